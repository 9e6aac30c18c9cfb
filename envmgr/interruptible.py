"""Waiting for threads in the main thread, where a signal handler may raise at any moment.

`threading` waits for events with conditions written in Python, also for the event by which a new
thread reports that it runs. If a handler raises in such a condition at the wrong moment, the error
becomes `RuntimeError: release unlocked lock`, and whoever asked for an interrupt never sees it.
`envmgr.journal` says how an interrupt leaves no call half done.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import methodcaller
from time import monotonic
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.05

_call: Any = methodcaller("__call__")
_acquired: Any = methodcaller("acquire")
_acquired_at_once: Any = methodcaller("acquire", False)
_released: Any = methodcaller("release")
_WITHOUT_COLLECTION = (gc.disable, sys._current_frames, gc.enable)


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident.

    This does what `sys._current_frames` does, which can hang Python 3.11 for ever: it creates
    objects while it holds the lock that a thread takes to end. If they trigger a garbage collection
    in which a callback lets other threads run, a thread that ends waits for that lock, and keeps
    the GIL.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    try:
        # One call into C: neither another thread nor a signal handler comes in between. The frames
        # get no name here: this frame is one of them, and would stay alive with all that its
        # callers hold.
        return list(map(_call, _WITHOUT_COLLECTION))[1]  # type: ignore[no-any-return]
    except MemoryError:
        gc.enable()
        raise


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; an exception that a signal handler raises meanwhile is passed on unchanged.

    In that case the thread either runs or was not started. `Thread.start` cannot promise that: if
    the handler raises once the system has the new thread, it forgets that thread, which then ends
    with a `KeyError` before it has run anything. So the main thread has another thread call it.

    Raises:
        RuntimeError: no thread can be started.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    task, starters = Task(thread.start), list[int]()
    try:
        # One call into C: an interrupt comes before the start or after it is noted.
        starters.extend(map(start_new_thread, (task.run,), ((),)))
        task.wait()
    except BaseException:
        if starters:
            task.wait()
        raise
    task.outcome()


class SoleThread(ABC):
    """Something that one thread does, whatever has interrupted those who had it started.

    An interrupt may come when the thread runs and its starter has not noted it yet, so that it is
    started once more. Therefore the thread notes itself, and a second one ends at once.

    Args:
        name: the name of the thread.

    Attributes:
        thread: the thread; None before there is one.
    """

    def __init__(self, name: str) -> None:
        self.thread: threading.Thread | None = None
        self._name = name
        self._is_taken = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it was started.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self.thread is None:
            thread = threading.Thread(target=self._run_once, name=self._name, daemon=True)
            start_thread(thread)
            if self.thread is None:
                self.thread = thread

    def _run_once(self) -> None:
        if self._is_taken.acquire(blocking=False):
            self.thread = threading.current_thread()
            self._run()

    @abstractmethod
    def _run(self) -> None:
        """Do what the thread is for."""


def join_thread(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait until a thread has ended.

    This also works in a signal handler that interrupts such a wait, although the wait then holds
    the lock by which Python before 3.13 knows that the thread has ended.

    Args:
        thread: the thread; one that was not started counts as ended.
        timeout_s: the longest time to wait, in seconds; None: for ever.
    """
    due = math.inf if timeout_s is None else monotonic() + timeout_s
    while thread.is_alive() and thread.ident in frames_of_threads():
        left_s = min(due - monotonic(), _LOOK_EVERY_S)
        if left_s <= 0.0:
            return
        thread.join(left_s)


class Lock(Protocol):
    """A `threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        ...

    def release(self) -> None:
        """Let go of it."""
        ...


def take(lock: Lock, held: list[Lock], *, at_once: bool = False) -> None:
    """Acquire a lock, and append it to `held`, in one call of C.

    An interrupt comes before both or after both. `let_go` goes with it, twice: in a `finally`, and
    in an `except BaseException` around that, for an interrupt that has kept the first from being
    done. A `with` would not do where it is part of a context manager written in Python: an
    interrupt between the end of that one's `__enter__` and the body leaves the lock taken.

    Args:
        lock: what to acquire.
        held: what `let_go` releases.
        at_once: whether to leave it, and `held` empty, if somebody has it.
    """
    held.extend(filter(_acquired_at_once if at_once else _acquired, (lock,)))


def let_go(held: list[Lock]) -> None:
    """Release what `take` has acquired, in one call of C, as that did; at most once."""
    if held:
        any(map(_released, map(list.pop, (held,))))


class InterruptibleEvent:
    """An event like `threading.Event` that passes exceptions of signal handlers on unchanged.

    Attributes:
        is_set: whether the event was set; it stays set for good.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_set = False

    def set(self) -> None:
        """Set the event, which ends all waits for it."""
        self.is_set = True
        self._let_go()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the event is set; signal handlers run meanwhile.

        It waits in short intervals, because a signal that comes just before the thread falls asleep
        does not wake it.

        Args:
            timeout_s: the longest time to wait, in seconds; None: for ever.

        Returns:
            Whether the event is set.
        """
        due = math.inf if timeout_s is None else monotonic() + timeout_s
        while not self.is_set:
            left_s = min(due - monotonic(), _LOOK_EVERY_S)
            if left_s <= 0.0:
                return False
            if self._lock.acquire(timeout=left_s):
                self._let_go()  # there may be others who wait
        return True

    def _let_go(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # another thread has done so
            return


class Task(Generic[T]):
    """Something that another thread does once, and what came of it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._ended = InterruptibleEvent()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the job."""
        try:
            self._result = self._job()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Wait until the job is done; signal handlers run meanwhile."""
        self._ended.wait()

    def outcome(self) -> T:
        """Return what the job returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]
