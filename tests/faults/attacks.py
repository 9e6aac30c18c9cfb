"""Calls that are interrupted at each of their points, or at random moments, whatever they are of.

A subject has calls, and knows what has to hold after one that was interrupted: managers are in
`interrupted_calls`, adapters in `interrupted_adapters`, collectors in `interrupted_collectors`.
"""

from __future__ import annotations

import dis
import gc
import inspect
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import envmgr
from envmgr.errors import ConfigError
from envmgr.transport.fds import PARENT_FDS
from tests.faults.interrupting import (
    EVERYTHING_PUBLIC,
    Interrupted,
    Point,
    handlers,
    interrupt_at,
    points_of,
)

SIGNALS = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)
_SOON_S, _LATE_S = 5e-6, 1e-3
_PACKAGE = str(Path(envmgr.__file__).parent)

_DELIVERING = {
    "step": ("returning", "step", "_under_way"),
    "recv": ("returning", "_turn"),
    "recv_arrays": ("returning",),
    "step_wait": ("step",),
    "_step": ("step",),
    "_step_taken": ("step",),
    "_gather_some": ("_under_way",),
    "reset": ("unseen",),
    "_reset": ("unseen",),
    "async_reset": ("unseen",),
    "_seen": ("unseen",),
    "maybe_reset": (),
    "call_wait": ("_called", "_results"),
    "reset_wait": ("_resetting",),
    "collect": ("_books", "recorded"),
}
"""The attributes that a function stores last of all: from then on it has delivered. Without one,
that is when the last of the functions that it calls has returned."""


class Subject(Protocol):
    """What is attacked.

    Attributes:
        signals: what it is attacked with.
        package: the folder of envmgr that has its calls.
        abnormal: how many abnormal timesteps have come.
    """

    signals: Sequence[int]
    package: str
    abnormal: int

    @property
    def names(self) -> list[str]:
        """The calls."""
        ...

    def prepare(self, name: str) -> None:
        """Have all be as a call wants it."""
        ...

    def call(self, name: str) -> Any:
        """Make a call."""
        ...

    def settle(
        self, name: str, results: list[Any], raised: BaseException | None, *, is_past: bool
    ) -> None:
        """Check what has to hold after a call.

        Args:
            name: of it.
            results: what it has returned, if it has.
            raised: what the signal raised in it, if anything.
            is_past: that came when the call had delivered, or not begun.
        """
        ...

    def close(self) -> None:
        """End it."""
        ...


class Strike(NamedTuple):
    """How a call is interrupted.

    Attributes:
        number: the signal.
        run: runs the call, and has the signal come into it.
        is_past: whether what came of that was raised when the call had done all it does.
        reached: grows when the signal is raised at a point.
    """

    number: int
    run: Callable[[Callable[[], None]], Any]
    is_past: Callable[[BaseException], bool]
    reached: Sequence[None] = ()


def at_point(point: Point, number: int) -> Strike:
    """Return a strike at a point of the call."""
    is_past, reached = _is_past_delivery(point), list[None]()

    def run(call: Callable[[], None]) -> None:
        interrupt_at(point, call, number, lambda: reached.append(None))

    return Strike(number, run, lambda error: is_past, reached)


def _is_past_delivery(point: Point) -> bool:
    """Whether a point comes after the store by which a public function has delivered.

    No signal handler runs there but for the tracer: there is no call, and no jump, until the caller
    has the result. A function that returns what another one has delivered is past it at its return.
    """
    within = point.code.co_filename.endswith("batches.py")  # which adapters stand on
    stored = None if within else _DELIVERING.get(point.code.co_name)
    if stored is None:
        return False
    found = list(dis.get_instructions(point.code))
    returns = [i.offset for i in found if i.opname == "RETURN_VALUE"]
    if point.is_opcode and point.at in returns:
        return True
    stores = [i.offset for i in found if i.opname == "STORE_ATTR" and i.argval in stored]
    if not stores:
        stores = [i.offset for i in found if i.opname.startswith("CALL")]
    at = point.at
    if not point.is_opcode:
        at = next(start for start, _, line in point.code.co_lines() if line == point.at)
    return at > max(stores, default=at)


def after(seconds: float) -> Strike:
    """Return a strike by an alarm, which may come too late."""

    def run(call: Callable[[], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def is_past(error: BaseException) -> bool:
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
                return False
            traceback = traceback.tb_next
        return True

    return Strike(signal.SIGALRM, run, is_past)


def attack(subject: Subject, name: str, strike: Strike) -> BaseException | None:
    """Make a call that is interrupted, and check what has to hold after it.

    Returns:
        What the call has raised.
    """
    subject.prepare(name)
    raised = None
    results: list[Any] = []
    with handlers(subject.close) as raises:
        try:
            strike.run(lambda: results.append(subject.call(name)))
        except (KeyboardInterrupt, Interrupted, SystemExit) as error:
            raised = error
        except ConfigError as error:  # reading an argument, whatever that raises, refuses it
            raised = _root_of(error)
    if raised is not None:
        assert isinstance(raised, raises[strike.number]), f"{raised!r} came of {strike.number}"
    is_past = raised is not None and strike.is_past(raised)
    if raised is not None:  # whoever has handled it does not keep the frames that it came through
        with warnings.catch_warnings():  # what was just made goes with them, and says so
            warnings.simplefilter("ignore", ResourceWarning)
            raised.__traceback__ = None
    subject.settle(name, results, raised, is_past=is_past)
    return raised


def _root_of(error: BaseException) -> BaseException:
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _is_end_of_generator(point: Point) -> bool:
    """Whether a generator is just let go of by an exception, since Python 3.12.

    What is raised there by a tracer is lost, as in any finalizer; no signal handler runs there.
    """
    if not point.is_opcode or not point.code.co_flags & inspect.CO_GENERATOR:
        return False
    names = {one.offset: one.opname for one in dis.get_instructions(point.code)}
    return names.get(point.at) in ("CALL_INTRINSIC_1", "RERAISE")


def drawn(
    subject: Subject,
    count: int | None,
    seed: int,
    calls: int | None = None,
    within: str = "",
) -> list[tuple[str, Point, int]]:
    """Return points of calls with the signals to raise there: all of them, or some.

    Args:
        subject: whose calls.
        count: how many points.
        seed: of the draw.
        calls: of how many calls.
        within: the file or folder that the points are in.
    """
    rng, names = random.Random(seed), subject.names
    found: list[tuple[str, Point, int]] = []
    for name in names if calls is None else rng.sample(names, min(calls, len(names))):
        subject.prepare(name)
        results: list[Any] = []
        call = partial(_noted, subject, name, results)
        points = points_of(call, EVERYTHING_PUBLIC)
        subject.settle(name, results, None, is_past=False)
        own = Path(_PACKAGE, subject.package)
        for point in points:
            # Where what another one calls has delivered no signal comes before it is kept.
            filename = point.code.co_filename
            is_wanted = filename.startswith(within) and not _is_end_of_generator(point)
            if is_wanted and (own in Path(filename).parents or not _is_past_delivery(point)):
                found += [(name, point, number) for number in subject.signals]
    return found if count is None else rng.sample(found, min(count, len(found)))


def _noted(subject: Subject, name: str, results: list[Any]) -> None:
    results.append(subject.call(name))


def run(
    make: Callable[[], Subject],
    count: int | None = None,
    seed: int = 0,
    calls: int | None = None,
    within: str = "",
) -> dict[str, int]:
    """Attack a subject at points of its calls; return what came of it.

    Args:
        make: makes the subject.
        count: at so many points, drawn; None: at all of them.
        seed: of the draw.
        calls: of so many calls; None: of all.
        within: in this file or folder.

    Returns:
        `points`: how many there were; `reached`: those that the calls passed this time, too, which
        is not certain of calls that wait for processes; `raised`: calls that ended by the signal;
        `abnormal`: timesteps.

    Raises:
        AssertionError: something was lost, repeated, wedged or left open; it says where.
    """
    figures = {"points": 0, "reached": 0, "raised": 0}
    with _made(make) as subject:
        for name, point, number in drawn(subject, count, seed, calls, within):
            strike = at_point(point, number)
            try:
                raised = attack(subject, name, strike)
            except BaseException as error:
                where = f"{name}, {signal.Signals(number).name} at {point}"
                raise AssertionError(f"after an interrupt in {where}: {error!r}") from error
            figures["points"] += 1
            figures["reached"] += len(strike.reached)
            figures["raised"] += raised is not None
    return {**figures, "abnormal": subject.abnormal}


@contextmanager
def _made(make: Callable[[], Subject]) -> Iterator[Subject]:
    """Make a subject, close it, and check that none of its fds are left."""
    before = {*PARENT_FDS}
    subject = make()
    yield subject
    subject.close()
    gc.collect()  # what an interrupt has kept from being known to anybody closes itself
    left = PARENT_FDS.keys() - before
    assert not left, f"left open, or not forgotten: fds {left}"


def run_at_random(
    make: Callable[[], Subject], count: int, seed: int = 0, *, without: Sequence[str] = ()
) -> int:
    """Attack a subject at random moments of its calls; return how many were ended by it.

    Raises:
        AssertionError: as `run`.
    """
    rng, n_raised = random.Random(seed), 0
    with _made(make) as subject:
        names = [name for name in subject.names if name not in without]
        for _ in range(count):
            name, seconds = rng.choice(names), rng.uniform(_SOON_S, _LATE_S)
            try:
                raised = attack(subject, name, after(seconds))
            except BaseException as error:
                where = f"{name}, {seconds * 1e6:.0f} us after its beginning"
                raise AssertionError(f"after an interrupt in {where}: {error!r}") from error
            n_raised += raised is not None
    return n_raised
