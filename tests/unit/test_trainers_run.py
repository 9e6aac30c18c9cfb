"""What runs trainers' own suites (`make test-trainers`), which the tests here do not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import run


def test_suites_run_wherever_paths_are_relative_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suites/gymnasium").mkdir(parents=True)
    given: list[Any] = []

    def environment(folder: Path, suite: Any, torch: str) -> Path:
        given.append(folder)
        return folder / "bin/python"

    def run_suite(name: str, suite: Any, folder: Path, python: Path) -> dict[str, Any]:
        given.extend((folder, python))
        return {"tests": {}, "stale": []}

    monkeypatch.setattr(run, "environment", environment)
    monkeypatch.setattr(run, "run_suite", run_suite)
    monkeypatch.setattr(sys, "argv", ["run", "gymnasium", "--suites", "suites", "--venvs", "venvs"])
    assert run.main() == 0
    assert len(given) == 3
    assert all(path.is_absolute() for path in given), "each suite runs in its own folder"
