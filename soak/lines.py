"""A pytest plugin that writes down which lines of envmgr each test runs, in whatever process.

`mutants.py` uses it: `pytest -p lines`, with a folder in the environment as LINES_OUT, the path of
`envmgr/` as LINES_OF, and as LINES_CASES how many cases of each test function are run. Processes
that the tests start load it by `tracing/sitecustomize.py`, and learn from a file which test is
running; so do those that are forked. (PYTEST_DONT_REWRITE)
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter, defaultdict
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_OUT = os.environ["LINES_OUT"]
_OF = os.environ["LINES_OF"] + os.sep
_RUNNING = os.path.join(_OUT, "running")

_test = ""
_keeps = False
"""Whether this process lives until the end of the test, and can write everything then."""
_seen: defaultdict[str, list[int]] = defaultdict(list)
_unseen: dict[CodeType, set[int]] = {}
"""The lines of a function that the test has not run yet; none left: its calls are not traced."""


def _write() -> None:
    with open(os.path.join(_OUT, f"{os.getpid()}.lines"), "a", encoding="utf-8") as file:
        for name, lines in _seen.items():
            numbers = ",".join(map(str, lines))
            file.write(f"{_test}\t{name.removeprefix(_OF)}\t{numbers}\n")
    _seen.clear()


def _trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
    unseen = _unseen.get(frame.f_code)
    if not unseen:
        return None
    if event == "line" and frame.f_lineno in unseen:
        unseen.remove(frame.f_lineno)
        _seen[frame.f_code.co_filename].append(frame.f_lineno)
        if not _keeps:
            _write()
    return _trace_lines


def _trace_calls(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    unseen = _unseen.get(code)
    if unseen is None:
        lines = code.co_lines() if code.co_filename.startswith(_OF) else ()
        unseen = _unseen[code] = {line for _, _, line in lines if line is not None}
    return _trace_lines if unseen else None


def trace(test: str, *, keeps: bool) -> None:
    """Write down from now on what the test runs."""
    global _test, _keeps
    _test, _keeps = test, keeps
    _seen.clear()
    _unseen.clear()
    sys.settrace(_trace_calls)
    threading.settrace(_trace_calls)


def trace_started_process() -> None:
    """Do so in a process that a test has started, and in those that it forks."""
    with open(_RUNNING, encoding="utf-8") as file:
        trace(file.read(), keeps=False)


def pytest_sessionstart() -> None:
    """Have forked processes find out which test is running: it may not be the first of a server."""
    os.register_at_fork(after_in_child=trace_started_process)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out all but some cases of each function, drawn."""
    most = int(os.environ.get("LINES_CASES", "0"))
    seen: Counter[str] = Counter()
    kept = set()
    for item in random.Random(0).sample(items, len(items)):
        function = item.nodeid.split("[")[0]
        seen[function] += 1
        if not most or seen[function] <= most:
            kept.add(item.nodeid)
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Trace a test."""
    with open(_RUNNING, "w", encoding="utf-8") as file:
        file.write(item.nodeid)
    trace(item.nodeid, keeps=True)


def pytest_runtest_logfinish() -> None:
    """Stop tracing."""
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    _write()
