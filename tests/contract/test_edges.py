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

_COLLECTING = {"run"}
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
    "collect": _COLLECTING,
    "reporting": _COLLECTING,  # it ends with a report
    "observing": _COLLECTING,  # what it tells of the machine
    "cli": {"run", "list", "show"},
}
"""Those of the commands below that need it."""

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
_COMMAND = """
import runpy
sys.argv = {arguments!r}
runpy.run_module("envmgr", run_name="__main__")
"""


@pytest.fixture
def without(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with envmgr, but for the package of the test."""
    leave_out = shutil.ignore_patterns("*.pyc.*")  # what is being written beside this
    shutil.copytree(PACKAGE, tmp_path / "envmgr", ignore=leave_out)
    shutil.rmtree(tmp_path / "envmgr" / request.param)
    return tmp_path


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "ENVMGR_PURE": "1"}
    return subprocess.run(
        [sys.executable, "-c", _NO_OTHER_COPY + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
    )


@pytest.mark.parametrize(
    ("without", "package"), [(each, each) for each in NAMES_OF], indirect=["without"], ids=NAMES_OF
)
def test_without_a_package_at_the_edge_only_what_is_its_own_is_missing(
    without: Path, package: str
) -> None:
    done = run(without, _USE)
    assert done.returncode == 0, done.stderr
    kinds: dict[str, Any]
    names: dict[str, Any]
    kinds, names = json.loads(done.stdout.splitlines()[-1])
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
    commands = {
        "run": ["run", str(CONFIG), "--steps", "20", "--no-output"],
        "list": ["list"],
        "show": ["show", str(CONFIG)],
    }
    failed = set()
    for name, arguments in commands.items():
        done = run(without, _COMMAND.format(arguments=["envmgr", *arguments]))
        if done.returncode:
            failed.add(name)
            assert "Traceback" not in done.stderr
            assert f"envmgr.{package.replace('/', '.')}" in done.stderr
    assert failed == COMMANDS_OF.get(package, set())
