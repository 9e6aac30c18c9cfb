"""Runs the test suites of trainers, unmodified, with our classes in place of theirs.

    python tests/trainers/run.py SUITE... --suites DIR --venvs DIR [--table FILE]

A SUITE is the name of a YAML file in this folder (without `.yaml`):

    tests: gymnasium                        # the checkout: a folder of --suites, ...
    fetch: {sdist: stable-baselines3==2.7.0}     # ... or what pip downloads into it (or wheel: ...)
    requirements: requirements-gymnasium.txt     # of the environment, beside envmgr itself
    no_deps: DI-engine==0.5.3               # installed after these, without its dependencies
    files: [tests/vector/test_vector_env.py]     # relative to the checkout; without: ours only
    arguments: [-p, no:randomly]            # further ones for pytest
    replace: {gymnasium.vector.AsyncVectorEnv: "envmgr.adapters.gymnasium:EnvmgrVectorEnv"}
    named: {"tests/vector/test_x.py::test_y": why it fails with ours}
    not_run: {"tests/vector/test_x.py::test_z": why it is not run}
    needs: [torch]
    ours: [test_cleanrl_ppo.py]             # of this folder; run after them, as they are
    examples: [stable-baselines3]           # pages of docs/guide, whose examples are run as well
    like: gymnasium                         # a suite that says what this one does not

Exit code 1 if a test fails that is not named, or if a reason is given for a test that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"


def main() -> int:
    """Run the suites that were asked for, and say what became of their tests."""
    parser = argparse.ArgumentParser(description="Runs trainers' own test suites on envmgr.")
    known = sorted(path.stem for path in HERE.glob("*.yaml"))
    parser.add_argument("names", nargs="*", metavar="SUITE", help=f"of {', '.join(known)}")
    parser.add_argument("--suites", type=Path, required=True, help="the folder with checkouts")
    parser.add_argument("--venvs", type=Path, required=True, help="where environments are made")
    parser.add_argument("--torch", default=TORCH, help="how pip is to get PyTorch")
    parser.add_argument("--table", type=Path, help="write what became of each test as markdown")
    asked = parser.parse_args()
    # The suites run in folders of their own, where relative paths would lead elsewhere.
    asked.suites, asked.venvs = asked.suites.absolute(), asked.venvs.absolute()
    results: dict[str, Any] = {}
    for name in asked.names or known:
        suite = suite_of(name)
        folder = asked.suites / suite.get("tests", "")
        if not folder.exists() and "fetch" in suite:
            fetch(suite["fetch"], folder)
        if not folder.exists():
            print(f"==> {name}: not run: there is no {folder}")
            continue
        python = environment(asked.venvs / f"trainer-{name}", suite, asked.torch)
        results[name] = run_suite(name, suite, folder, python)
    if asked.table:
        asked.table.write_text("\n".join(table_of(name, found) for name, found in results.items()))
    bad = [name for name, found in results.items() if found["stale"] or failures_of(found)]
    if bad:
        print(f"==> FAILED: {', '.join(bad)}")
    return 1 if bad or not results else 0


def suite_of(name: str) -> dict[str, Any]:
    """Return what the file of a suite says, and the one that it is like."""
    suite: dict[str, Any] = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    if "like" in suite:
        other = suite_of(suite["like"])
        for reasons in ("named", "not_run"):
            suite[reasons] = {**other.get(reasons, {}), **suite.get(reasons, {})}
        suite = {**other, **suite}
    return suite


def fetch(source: dict[str, str], folder: Path) -> None:
    """Download an sdist or a wheel, and unpack it."""
    ((kind, requirement),) = source.items()
    only = ["--no-binary", ":all:"] if kind == "sdist" else ["--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as place:
        pip(Path(sys.executable), "download", "--no-deps", *only, "-d", place, requirement)
        (archive,) = Path(place).iterdir()
        unpacked = Path(place) / "unpacked"
        if archive.suffix == ".whl":
            shutil.unpack_archive(archive, unpacked, "zip")
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(unpacked, filter="data")
            (unpacked,) = unpacked.iterdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unpacked.rename(folder)


def environment(folder: Path, suite: dict[str, Any], torch: str) -> Path:
    """Return the Python of a suite's environment, which is made if it is not there."""
    python, made = folder / "bin/python", folder / ".made"
    requirements = HERE / suite["requirements"]
    wanted = requirements.read_text() + suite.get("no_deps", "")
    if made.exists() and made.read_text() == wanted:
        return python
    print(f"==> making {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if "torch" in suite.get("needs", []):
        pip(python, "install", *torch.split())
    pip(python, "install", "-r", str(requirements), "pytest>=8", "pytest-timeout", "hypothesis")
    if "no_deps" in suite:
        pip(python, "install", "--no-deps", suite["no_deps"])
    pip(python, "install", "-e", str(ROOT))
    made.write_text(wanted)
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run pip of an environment."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, check=True)


def run_suite(name: str, suite: dict[str, Any], folder: Path, python: Path) -> dict[str, Any]:
    """Run the tests of a suite and return what became of each."""
    print(f"==> {name}", flush=True)
    found = run_theirs(suite, folder, python) if "files" in suite else {"tests": {}, "stale": []}
    for file in suite.get("ours", []):
        found["tests"][file] = run_ours(file, python)
    for page in suite.get("examples", []):
        found["tests"][f"examples of {page}.md"] = run_examples(page, python)
    counts = Counter(test["outcome"] for test in found["tests"].values())
    each = ", ".join(f"{counts[what]} {what}" for what in ("passed", "named", "not run"))
    print(f"==> {name}: {each}, {counts['failed']} FAILED")
    for test, result in failures_of(found).items():
        print(f"    FAILED {test}: {result['reason']}")
    for test in found["stale"]:
        print(f"    has a reason and passes, or is not there: {test}")
    return found


def run_theirs(suite: dict[str, Any], folder: Path, python: Path) -> dict[str, Any]:
    """Run the trainer's own tests with our classes in place of theirs."""
    with tempfile.TemporaryDirectory() as place:
        results, told = Path(place) / "results.json", Path(place) / "suite.yaml"
        told.write_text(yaml.safe_dump(suite))
        command = [
            *(python, "-m", "pytest", "-p", "swapping", "--suite", told),
            *("--results", results, "-q", "--timeout", "120", "-p", "no:cacheprovider"),
            *("--rootdir", folder, *configuration(folder)),
            *suite.get("arguments", []),
            *suite["files"],
        ]
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(command, cwd=folder, env=env, check=False)
        if not results.exists():
            ended = {"outcome": "failed", "reason": "pytest has ended"}
            return {"tests": {"all": ended}, "stale": []}
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def run_ours(file: str, python: Path) -> dict[str, str]:
    """Run tests of this folder and return what became of them, as one."""
    return run_pytest(python, "--noconftest", "--rootdir", HERE, "-c", os.devnull, HERE / file)


def run_examples(page: str, python: Path) -> dict[str, str]:
    """Run the examples of a page of the guide and return what became of them, as one."""
    tests = ROOT / "tests" / "docs" / "test_examples.py"
    return run_pytest(python, "--rootdir", ROOT, tests, "-k", f"guide/{page}.md")


def run_pytest(python: Path, *arguments: Any) -> dict[str, str]:
    """Run tests of ours and return what became of them, as one."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False)
    return {"outcome": "failed" if done.returncode else "passed", "reason": "see above"}


def configuration(folder: Path) -> list[Any]:
    """Return the arguments that have pytest take a suite's own configuration, and not ours."""
    for name in ("pytest.ini", "pyproject.toml", "setup.cfg"):
        if (folder / name).exists():
            return ["-c", folder / name]
    return ["-c", os.devnull]


def failures_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the tests that failed and are not named."""
    return {t: result for t, result in found["tests"].items() if result["outcome"] == "failed"}


def table_of(name: str, found: dict[str, Any]) -> str:
    """Return what became of each file's tests as a table, then the tests that are named."""
    files: dict[str, Counter[str]] = {}
    for test, result in found["tests"].items():
        files.setdefault(test.partition("::")[0], Counter())[result["outcome"]] += 1
    lines = [f"### {name}\n", "| file | passed | named | not run |", "| --- | --- | --- | --- |"]
    for file, counts in sorted(files.items()):
        lines.append(f"| `{file}` | {counts['passed']} | {counts['named']} | {counts['not run']} |")
    lines.append("")
    for test, result in sorted(found["tests"].items()):
        if result["outcome"] in ("named", "not run"):
            lines.append(f"- `{test.partition('::')[2]}` ({result['outcome']}): {result['reason']}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
