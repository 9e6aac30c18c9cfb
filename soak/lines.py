"""A pytest plugin that writes down which lines of envmgr each test runs.

`mutants.py` uses it: `pytest -p lines`, with the folder in the environment as LINES_OUT. Processes
that are forked from the one of the tests go on writing; those that are started anew do not.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = str(Path(__file__).resolve().parents[1] / "envmgr") + os.sep

_test = ""
_seen: set[tuple[str, int]] = set()


def _write(name: str, line: int) -> None:
    if (name, line) not in _seen:
        _seen.add((name, line))
        path = os.path.join(os.environ["LINES_OUT"], str(os.getpid()))
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{name.removeprefix(ROOT)}\t{line}\t{_test}\n")


def _trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        _write(frame.f_code.co_filename, frame.f_lineno)
    return _trace_lines


def _trace_calls(frame: FrameType, event: str, argument: Any) -> Any:
    return _trace_lines if frame.f_code.co_filename.startswith(ROOT) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace a test."""
    global _test
    _test = item.nodeid
    _seen.clear()
    sys.settrace(_trace_calls)
    threading.settrace(_trace_calls)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
