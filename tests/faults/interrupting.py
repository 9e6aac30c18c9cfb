"""Interrupts at chosen points of public calls, and accounts of what becomes of the actions.

A point is a line of envmgr that a call runs, or an opcode of a public function (of managers,
adapters, collectors), or the entry of one of Python's library, and which time it is run. The
signal is raised there for real (`signal.raise_signal`), from a trace function, so that its handler
runs between that bytecode and the next one, as it does for users.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import envmgr

_PACKAGE = str(Path(envmgr.__file__).parent)
MANAGERS = (str(Path(_PACKAGE, "manager")),)
EVERYTHING_PUBLIC = (*MANAGERS, str(Path(_PACKAGE, "adapters")), str(Path(_PACKAGE, "collect")))
"""Where each opcode is a point."""
_LIBRARY = str(Path(threading.__file__).parent)
_NOT_IN = ("site-packages", "weakref", "socket")
"""What a handler raises in a callback of a weak reference is lost; so is, for good, the fd of a
socket that Python's own `socketpair` has not yet made an object of."""
_LEFT_OUT = frozenset(("__getattr__",))


class Point(NamedTuple):
    """Where a signal is raised.

    Attributes:
        code: the function.
        at: the line, or the offset of the opcode.
        is_opcode: which of them.
        hit: which time, from 1.
    """

    code: CodeType
    at: int
    is_opcode: bool
    hit: int

    def __str__(self) -> str:
        kind = "opcode" if self.is_opcode else "line"
        name = Path(self.code.co_filename)
        name = name.relative_to(_PACKAGE) if _PACKAGE in map(str, name.parents) else name.name
        return f"{name}:{self.code.co_name} {kind} {self.at} hit {self.hit}"


class _Tracer:
    """Counts the points that are passed, and does something at one of them."""

    def __init__(
        self, target: Point | None, act: Callable[[], None], public: tuple[str, ...]
    ) -> None:
        self._public = public
        self.hits: dict[tuple[CodeType, int, bool], int] = {}
        self._target = target
        self._act = act
        self.acted = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if self._target is not None and code is self._target.code:
            self._trace(frame, opcodes=self._target.is_opcode)
            return self._local
        if code.co_filename.startswith(_LIBRARY) and not any(
            name in code.co_filename for name in _NOT_IN
        ):
            return self._at_entry
        if not code.co_filename.startswith(_PACKAGE) or code.co_name in _LEFT_OUT:
            return None
        self._trace(frame, opcodes=code.co_filename.startswith(self._public))
        return self._local

    def _trace(self, frame: FrameType, *, opcodes: bool) -> None:
        frame.f_trace = self._local  # first: else Python 3.13 traces no opcodes of the frame
        frame.f_trace_opcodes = opcodes

    def _at_entry(self, frame: FrameType, event: str, arg: Any) -> None:
        # Only there: between its other lines the tracer would run handlers where Python runs none.
        self._local(frame, event, arg)
        frame.f_trace = None

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event not in ("line", "opcode"):
            return self._local
        is_opcode = event == "opcode"
        at = frame.f_lasti if is_opcode else frame.f_lineno
        key = (frame.f_code, at, is_opcode)
        self.hits[key] = hit = self.hits.get(key, 0) + 1
        if not self.acted and self._target == (*key, hit):
            self.acted = True
            sys.settrace(None)
            self._act()
        return self._local


class _TracerOfAll(_Tracer):
    """Does something at each point, the first time that it is passed."""

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        n_points = len(self.hits)
        super()._local(frame, event, arg)
        if len(self.hits) > n_points:
            self._act()
        return self._local


def points_of(call: Callable[[], Any], public: tuple[str, ...] = MANAGERS) -> list[Point]:
    """Return the points that a call passes, each the first and the last time.

    Args:
        call: runs it.
        public: where opcodes are points.
    """
    tracer = _Tracer(None, lambda: None, public)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
    points = []
    for (code, at, is_opcode), hits in tracer.hits.items():
        points += [Point(code, at, is_opcode, hit) for hit in sorted({1, hits})]
    return points


def interrupt_at(
    point: Point,
    call: Callable[[], Any],
    number: int,
    reached: Callable[[], None] = lambda: None,
) -> Any:
    """Run a call, with a signal raised at a point; return what the call returned.

    Whatever the handler raised comes through.

    Args:
        point: where; the call may not pass it this time.
        call: runs it.
        number: the signal.
        reached: called before the signal is raised.
    """

    def strike() -> None:
        reached()
        signal.raise_signal(number)

    return act_at(point, call, strike)


def act_at(point: Point, call: Callable[[], Any], act: Callable[[], None]) -> Any:
    """Run a call, and do something at a point, if it passes that; return what it returned."""
    public = (point.code.co_filename,) if point.is_opcode else ()
    return _traced(_Tracer(point, act, public), call)


def act_at_all(call: Callable[[], Any], act: Callable[[], None]) -> None:
    """Run a call, and do something at each of its points, the first time that it comes there."""
    _traced(_TracerOfAll(None, act, MANAGERS), call)


def _traced(tracer: _Tracer, call: Callable[[], Any]) -> Any:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return call()
    finally:
        sys.settrace(before)


def at_each_point(prepare: Callable[[], None], call: Callable[[], None]) -> Iterator[str]:
    """Have a call interrupted at each of its points, one after the other; yield after each."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prepare()
        points = points_of(call)
        yield "nowhere"
        for point in points:
            prepare()
            with suppress(KeyboardInterrupt):
                interrupt_at(point, call, signal.SIGINT)
            yield str(point)
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupted(Exception):
    """What a user's own handler raises."""


@contextmanager
def no_gc_callbacks() -> Iterator[None]:
    """Have no callback of others run in a collection: what a handler raises in one is lost.

    Hypothesis has one, from the first of its tests in a process on.
    """
    before = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:] = before


@contextmanager
def lost_exceptions_are_no_errors() -> Iterator[None]:
    """Have nobody report what a handler raises in a callback of a weak reference: it is lost there.

    So it is in `multiprocessing`, which keeps its processes in sets of weak references.
    """
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, (Interrupted, KeyboardInterrupt, SystemExit)):
            report(unraisable)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report


@contextmanager
def handlers(close: Callable[[], None]) -> Iterator[dict[int, type[BaseException]]]:
    """Install what users install; yield which signal raises what.

    Args:
        close: what the handler of SIGTERM calls before it has the process exit.
    """

    def raise_own(number: int, frame: object) -> None:
        raise Interrupted

    def close_and_exit(number: int, frame: object) -> None:
        close()
        sys.exit(3)

    wanted: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGALRM: raise_own,
        signal.SIGTERM: close_and_exit,
    }
    with no_gc_callbacks(), lost_exceptions_are_no_errors():
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield {
                signal.SIGINT: KeyboardInterrupt,
                signal.SIGALRM: Interrupted,
                signal.SIGTERM: SystemExit,
            }
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
