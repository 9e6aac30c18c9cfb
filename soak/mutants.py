"""How much of what is wrong the tests find: mutants of the code, and which tests kill them.

    python soak/mutants.py envmgr/core envmgr/wire envmgr/worker --count 300 --seed 1

Draws mutants with fixed operators and a seed, so that the same draw can be made again, also over
another state of the code (`--root`). Each is run in a copy of the repository, against the tests
that run the changed statement, those that run the least besides first: unit tests, property tests,
then contract tests. Which tests run which lines is found once, under a tracer (`--lines` keeps it).
A run that spends more processor time than a limit counts as killed, and so does a test that waits
for longer than pytest's timeout, which grows with the load. What contract tests kill they kill
twice. Prints each mutant as a diff of one line, and what killed it; then the shares.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mutations import Mutant, drawn_of, mutants_of

HERE = Path(__file__).resolve().parent
SUITES = ("unit", "property", "contract")
CPU_LIMIT_S = {"unit": (15.0, 0.03), "property": (120.0, 0.0), "contract": (60.0, 1.0)}
"""Processor time of each process of a run, and for each test more: three times what they take."""
TEST_LIMIT_S = 60
WAITS = 20
"""So many times its processor time a run may last: a mutant may keep off pytest's timeout, too."""
MOST_TESTS = {"unit": 300, "property": 10, "contract": 60}
"""A line that more tests run is met by so many of them, drawn with the seed, of as many kinds."""
UNMET = "no test runs it"


# -- which tests run what -------------------------------------------------------------------------


@dataclass
class Runs:
    """Which tests of a suite run which lines.

    Attributes:
        tests: by the file's path below `envmgr/` and the line's number.
        n_lines: how many lines each test runs.
    """

    tests: defaultdict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    n_lines: Counter[str] = field(default_factory=Counter)

    def of(self, mutant: Mutant, most: int, draw: random.Random) -> list[str]:
        """Return tests that a mutant concerns, those that run the least besides first.

        Of too many: those that run all its lines between them, one of each function, others.
        """
        name = mutant.path.removeprefix("envmgr/")
        first, last = mutant.span or (1, sys.maxsize)
        by_line = [
            tests
            for (path, line), tests in self.tests.items()
            if path == name and first <= line <= last
        ]
        kept: dict[str, None] = {}
        for tests in sorted(by_line, key=len):
            if tests.isdisjoint(kept):
                kept[draw.choice(sorted(tests))] = None
        every = sorted(set().union(*by_line))
        seen: Counter[str] = Counter()
        rank = {}
        for test in draw.sample(every, len(every)):
            function = test.split("[")[0]
            seen[function] += 1
            rank[test] = seen[function]
        kept.update(dict.fromkeys(sorted(rank, key=lambda test: rank[test])))
        return sorted(list(kept)[:most], key=lambda test: (self.n_lines[test], test))


def runs_of(root: Path, suite: str, out: Path, files: Sequence[str], cases: int) -> Runs:
    """Return which lines the tests of a suite run; from `out`, or after a run under a tracer.

    Args:
        root: the checkout.
        suite: a folder of tests.
        out: a folder with what was found before, or for it.
        files: of the suite, as patterns; all if there are none.
        cases: of each function of the contract suite so many are traced.
    """
    if not (out / suite).is_dir():
        (out / suite).mkdir(parents=True)
        folder = root / "tests" / suite
        found = sorted({str(file) for pattern in files for file in folder.glob(pattern)})
        tests = ["-p", "lines", *(found or [f"tests/{suite}"])]
        environ = {"LINES_OUT": str((out / suite).resolve()), "LINES_OF": str(root / "envmgr")}
        environ["SHARE_OF_EXAMPLES"] = "0.1"  # what those do not run is run by chance
        environ["LINES_CASES"] = str(cases if suite == "contract" else 0)
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", *_options(600), *tests],
            cwd=root,
            env=_environ(root, str(HERE / "tracing"), **environ),
            check=False,
        )
    found = Runs()
    for file in (out / suite).glob("*.lines"):
        for entry in file.read_text(encoding="utf-8").splitlines():
            test, path, lines = entry.split("\t")
            for line in lines.split(","):
                found.tests[path, int(line)].add(test)
    for tests in found.tests.values():
        found.n_lines.update(tests)
    return found


# -- running tests --------------------------------------------------------------------------------


def pytest_sessionstart() -> None:
    """As a plugin of pytest: what hypothesis finds counts as it is, and is not made small."""
    import hypothesis

    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    parent = hypothesis.settings.get_profile("envmgr")
    hypothesis.settings.register_profile("mutants", parent, phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")


def pytest_collection_finish() -> None:
    """Have machines make only a share of their examples."""
    profiles = sys.modules.get("tests.property.profiles")
    for name, settings in profiles.MACHINES.items() if profiles else ():
        n_examples = round(settings.max_examples * float(os.environ["SHARE_OF_EXAMPLES"]))
        profiles.MACHINES[name] = type(settings)(settings, max_examples=n_examples)


def _options(limit_s: float) -> list[str]:
    """Return what each run of pytest is told: tests wait for longer when the machine is loaded."""
    load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    plugins = ["-p", "no:cacheprovider", "-p", "mutants", "--hypothesis-seed=0"]
    return [*plugins, "-o", "faulthandler_timeout=0", f"--timeout={limit_s * load:.0f}"]


def _cpu_s() -> float:
    """Return the processor time of all runs so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _environ(root: Path, *paths: str, **environ: str) -> dict[str, str]:
    path = os.pathsep.join((str(root), str(HERE), *paths))
    return {**os.environ, "PYTHONPATH": path, **environ}


def preload() -> None:
    """Import, once for all runs, what takes longer than most of them."""
    import gymnasium
    import hypothesis.stateful
    import numpy
    import pytest

    del gymnasium, hypothesis, numpy, pytest
    gc.freeze()


def _run(folder: Path, output: int, cpu_limit_s: int) -> NoReturn:
    """Run pytest in this process, which was forked for it."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 5))
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.update(_environ(folder))
    sys.path.insert(0, str(folder))
    rewritten = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
    flags = ["-q", "-x", "--tb=no", "-rfE", *rewritten, *_options(TEST_LIMIT_S)]
    code = 1
    try:
        code = pytest.main([*flags, "@chosen"])
        sys.stdout.flush()
    finally:  # whatever a mutant does, what this process was forked from is not ended twice
        os._exit(code)


def _exit_code(process: int, limit_s: float) -> int:
    """Wait for a process that leads its group; kill what has not ended by then."""
    pidfd = os.pidfd_open(process)
    try:
        if not select.select([pidfd], [], [], limit_s)[0]:
            os.killpg(process, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def first_failed(folder: Path, tests: Sequence[str], cpu_limit_s: float = 1800) -> str:
    """Run tests in a copy of the repository; return the first that failed, "" for none."""
    (folder / "chosen").write_text("\n".join(tests) + "\n", encoding="utf-8")
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if process == 0:
            _run(folder, output.fileno(), round(cpu_limit_s))
        code = _exit_code(process, WAITS * cpu_limit_s)
        output.seek(0)
        lines = output.read().splitlines()
    if code == 0:
        return ""
    failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0] if failed else f"exit status {code}"


class Copy:
    """A copy of the repository, with one mutant at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._time = int(time.time())
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(root, folder, ignore=skipped)

    def failed_without_mutant(self, suites: Sequence[str]) -> str:
        """Return the first test that fails anyway."""
        whole = (first_failed(self._folder, [f"tests/{suite}"]) for suite in suites)
        return next(filter(None, whole), "")

    def write(self, path: str, source: bytes) -> None:
        """Write a file, later than before, so that no bytecode of it counts."""
        (self._folder / path).write_bytes(source)
        self._time += 2
        os.utime(self._folder / path, (self._time, self._time))

    def killed_by(
        self,
        mutant: Mutant,
        runs: dict[str, Runs],
        draw: random.Random,
        most: dict[str, int],
        *,
        whole: bool,
    ) -> tuple[str, str]:
        """Return which suite kills a mutant, and the test; "" for none, and how many were run."""
        source = (self._root / mutant.path).read_bytes()
        self.write(mutant.path, mutant.applied(source))
        n_tests = 0
        try:
            for suite, of_suite in runs.items():
                tests = of_suite.of(mutant, most[suite], draw)
                n_tests += len(tests)
                test = self._failed(suite, tests) if tests else ""
                if not test and whole:
                    test = first_failed(self._folder, [f"tests/{suite}"])
                    test = test and f"ONLY BY THE WHOLE SUITE {test}"
                if test:
                    return suite, test
            return "", f"{n_tests} tests run it" if n_tests else UNMET
        finally:
            self.write(mutant.path, source)

    def _failed(self, suite: str, tests: list[str]) -> str:
        at_least, for_each = CPU_LIMIT_S[suite]
        limit_s = at_least + for_each * len(tests)
        test = first_failed(self._folder, tests, limit_s)
        while suite == "contract" and test in tests and not first_failed(self._folder, [test]):
            tests = tests[tests.index(test) + 1 :]
            test = first_failed(self._folder, tests, limit_s) if tests else ""
        return test


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", help="files, or folders with them, from the root")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="a checkout of envmgr")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=Path, help="folder with which tests run which lines")
    parser.add_argument("--suites", default=",".join(SUITES), help="in this order")
    parser.add_argument(
        "--whole", action="store_true", help="run whole suites on what the chosen tests leave"
    )
    parser.add_argument(
        "--examples", type=float, default=1.0, help="share of the examples of property machines"
    )
    parser.add_argument(
        "--files", default="", help="of the suites, to choose tests from: test_forms.py,test_s*.py"
    )
    parser.add_argument(
        "--cases", type=int, default=2, help="of each contract test so many are traced, drawn"
    )
    parser.add_argument(
        "--most", type=int, default=MOST_TESTS["contract"], help="contract tests for one mutant"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no mutant later than that"
    )
    parser.add_argument("--only", help="of those drawn, by number: 3,17")
    parser.add_argument("--out", type=Path, help="a JSON file to keep the result in")
    parser.add_argument("--name", default="now", help="of the state of the code, in that file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run tests against them, and print what they find."""
    options = parse(arguments)
    root = options.root.resolve()
    every = list(mutants_of(root, options.paths))
    draw = random.Random(options.seed)
    drawn = drawn_of(every, options.count, root, draw)
    print(f"{len(drawn)} of {len(every)} mutants, seed {options.seed}", flush=True)
    only = [int(one) for one in options.only.split(",")] if options.only else range(len(drawn))
    killed: Counter[str] = Counter()
    survivors, n_run, n_unmet = [], 0, 0
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        lines = options.lines or Path(temporary) / "lines"
        suites = options.suites.split(",")
        files = options.files.split(",") if options.files else []
        runs = {suite: runs_of(root, suite, lines, files, options.cases) for suite in suites}
        most = MOST_TESTS | {"contract": options.most}
        os.environ["SHARE_OF_EXAMPLES"] = str(options.examples)
        copy = Copy(root, Path(temporary) / "copy")
        preload()
        if options.whole and (failed := copy.failed_without_mutant(suites)):
            print(f"fails without a mutant: {failed}")
            return 1
        for number in only:
            if time.monotonic() > until:
                break
            mutant, began_s = drawn[number], _cpu_s()
            suite, how = copy.killed_by(mutant, runs, draw, most, whole=options.whole)
            killed[suite] += 1
            n_run += 1
            n_unmet += how == UNMET
            old = (root / mutant.path).read_bytes()[mutant.begin : mutant.end].decode()
            text = f"{mutant.path}:{mutant.line} {mutant.operator}: {old} -> {mutant.new}"
            print(
                f"{number:3} {text}\n    {suite or 'SURVIVED'}: {how} ({_cpu_s() - began_s:.1f} s)",
                flush=True,
            )
            if not suite:
                survivors.append(text)
    for suite in (*runs, ""):
        print(f"{suite or 'survived':10} {killed[suite]:4} {killed[suite] / max(n_run, 1):6.1%}")
    print(f"of these   {n_unmet:4} that none of the tests runs")
    if options.out:
        kept: dict[str, Any] = {"paths": options.paths, "seed": options.seed, "of": len(every)}
        kept |= {"killed": {suite: killed[suite] for suite in runs}, "survivors": survivors}
        kept |= {"drawn": n_run, "unmet": n_unmet, "date": time.strftime("%Y-%m-%d")}
        results = json.loads(options.out.read_text()) if options.out.exists() else {}
        results[options.name] = kept
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
