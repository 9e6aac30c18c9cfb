"""Packages at the edge of envmgr can be left out: only what is theirs is missing then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envmgr

PACKAGE = Path(envmgr.__file__).parent
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cartpole.yaml"

COMMANDS: dict[str, list[str]] = {
    "run": ["run", str(CONFIG), "--steps", "20", "--output", "run", "--trace", "trace.json"],
    "list": ["list"],
    "show": ["show", str(CONFIG)],
    "init": ["init", "CartPole-v1", "--env-num", "1", "--out", "made.yaml"],
    "check": ["check", str(CONFIG), "--episodes", "2", "--methods", ""],
    "report": ["report", "run"],
    "trace": ["trace", "trace.json"],
    "dump": ["dump", "run"],
    "top": ["top", "run", "--once"],
    # These take long: that there is no such env is said when all that they need was found.
    "tune": ["tune", str(CONFIG), "--set", "env.id=Nothing-v0"],
    "bench": ["bench", str(CONFIG), "--set", "env.id=Nothing-v0"],
    "chaos": ["chaos", str(CONFIG), "--set", "env.id=Nothing-v0"],
}
NAMES_OF: dict[str, set[str]] = {
    "adapters": {"as_gymnasium", "as_sb3", "as_tianshou"},
    "collect": {"RolloutCollector"},
    "tuning": set(),
    "reporting": set(),
    "observing": {"dump_on_signal"},
    "testing": set(),
    "transport/ray": set(),
    "cli": set(),
}
"""The public names of each."""

COMMANDS_OF: dict[str, set[str]] = {
    "collect": {"run", "chaos", "tune"},  # its policies and its loop
    "tuning": {"tune", "bench", "init"},  # the config that it writes
    "reporting": {"run", "chaos", "report"},  # they end with a report, or could
    "observing": {"run", "chaos", "report", "dump", "top", "trace"},  # what runs tell of themselves
    "testing": {"check", "chaos"},
    "cli": set(COMMANDS),
}
"""Those of the commands that need it."""

# Where envmgr was installed for editing, its modules are found anywhere.
_NO_OTHER_COPY = """
import sys
sys.meta_path[:] = [
    finder for finder in sys.meta_path
    if "ditable" not in getattr(finder, "__name__", type(finder).__name__)
]
"""
_USE = """
import envmgr, json
def kind_of(use):
    try:
        use()
    except BaseException as error:
        return type(error).__name__
def step(kind):
    with envmgr.make("CartPole-v1", env_num=2, type=kind, num_workers=None) as manager:
        manager.step(dict.fromkeys(manager.ready_obs, 0))
kinds = {kind: kind_of(lambda: step(kind)) for kind in ("base", "thread", "subprocess")}
kinds["ray"] = kind_of(lambda: envmgr.make("CartPole-v1", env_num=2, type="ray").launch())
names = {name: kind_of(lambda: getattr(envmgr, name)) for name in envmgr.__all__}
print(json.dumps([kinds, names]))
"""
_RUN = """
import contextlib, io, json, runpy, sys
errors = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["envmgr", *arguments]
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            runpy.run_module("envmgr", run_name="__main__")
        except SystemExit as end:
            print(end.code, file=error)
    errors[name] = error.getvalue()
print(json.dumps(errors))
"""


@pytest.fixture
def without(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with envmgr, but for the package of the test."""
    leave_out = shutil.ignore_patterns("*.pyc.*")  # what is being written beside this
    shutil.copytree(PACKAGE, tmp_path / "envmgr", ignore=leave_out)
    shutil.rmtree(tmp_path / "envmgr" / request.param)
    return tmp_path


def run(folder: Path, code: str, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(folder), "ENVMGR_PURE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _NO_OTHER_COPY + code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("without", "package"), [(each, each) for each in NAMES_OF], indirect=["without"], ids=NAMES_OF
)
def test_without_a_package_at_the_edge_only_what_is_its_own_is_missing(
    without: Path, package: str
) -> None:
    kinds: dict[str, Any]
    names: dict[str, Any]
    kinds, names = run(without, _USE)
    assert [kinds[kind] for kind in ("base", "thread", "subprocess")] == [None] * 3
    assert kinds["ray"] == "MissingDependencyError", "of the package, or of ray"
    missing = dict.fromkeys(NAMES_OF[package], "MissingDependencyError")
    assert {name: error for name, error in names.items() if error is not None} == missing


@pytest.mark.parametrize(
    ("without", "package"), [(each, each) for each in NAMES_OF], indirect=["without"], ids=NAMES_OF
)
def test_without_a_package_at_the_edge_only_its_own_commands_are_missing(
    without: Path, package: str
) -> None:
    errors: dict[str, str] = run(without, _RUN, json.dumps(COMMANDS))
    assert not [error for error in errors.values() if "Traceback" in error]
    named = f"envmgr.{package.replace('/', '.')}"
    missing = {name for name, error in errors.items() if named in error}
    assert missing == COMMANDS_OF.get(package, set())
    works = {"run", "list", "show", "init", "check", "report", "trace"} - missing
    if "run" not in missing:  # what it has written is what others read
        assert {name: errors[name] for name in works if errors[name].splitlines()[-1] != "0"} == {}
