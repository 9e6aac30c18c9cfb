"""A pytest plugin: runs somebody else's suite, unmodified, with our classes in place of theirs.

It runs in the environment of that trainer, in a process that `run.py` starts:

    python -m pytest -p swapping --suite SUITE.yaml --results RESULTS.json FILES

The names are replaced before any module of the suite is imported. `tests` is a package of the suite
there, so nothing of this folder is imported as `tests.trainers`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", required=True, help="what to replace, and the named exceptions")
    parser.addoption("--results", required=True, help="where to write what became of each test")


def pytest_configure(config: pytest.Config) -> None:
    suite = yaml.safe_load(Path(config.getoption("--suite")).read_text())
    for theirs, ours in suite["replace"].items():
        _replace(theirs, ours)
    config.pluginmanager.register(Swapping(suite, Path(config.getoption("--results"))))


def _replace(theirs: str, ours: str) -> None:
    """Put `module:Class` in place of `package.module.Class`."""
    module, _, name = theirs.rpartition(".")
    home, _, attribute = ours.partition(":")
    setattr(
        importlib.import_module(module), name, getattr(importlib.import_module(home), attribute)
    )


class Swapping:
    """Writes down what becomes of each test.

    Args:
        suite: has `named` and `not_run`: patterns of test ids, with the reason of each.
        results: the file.
    """

    def __init__(self, suite: dict[str, Any], results: Path) -> None:
        self._named: dict[str, str] = suite.get("named") or {}
        self._not_run: dict[str, str] = suite.get("not_run") or {}
        self._path = results
        self._results: dict[str, dict[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            reason = _reason_for(item.nodeid, self._not_run)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._results[report.nodeid] = {"outcome": "failed", "reason": "cannot be imported"}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: pytest.TestReport = yield
        known = self._results.setdefault(report.nodeid, {"outcome": "passed", "reason": ""})
        named = _reason_for(report.nodeid, self._named)
        if report.failed and named is not None:
            known.update(outcome="named", reason=named)
        elif report.failed:
            known.update(outcome="failed", reason=report.longreprtext.strip().splitlines()[-1])
        elif report.skipped and known["outcome"] == "passed":
            known.update(outcome="not run", reason=_why_skipped(report))
        return report

    def pytest_sessionfinish(self) -> None:
        used = {r["reason"] for r in self._results.values()}
        stale = [test for test, why in {**self._named, **self._not_run}.items() if why not in used]
        self._path.write_text(json.dumps({"tests": self._results, "stale": stale}))


def _reason_for(test: str, reasons: dict[str, str]) -> str | None:
    for pattern, reason in reasons.items():
        if test == pattern or fnmatchcase(test, pattern) or test.startswith(pattern + "["):
            return reason
    return None


def _why_skipped(report: pytest.TestReport) -> str:
    why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")
