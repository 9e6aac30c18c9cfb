"""Waiting for threads in the main thread, where a signal handler may raise at any moment.

`threading` waits for events, also for the one by which a thread that is started says that it runs,
with conditions written in Python. If a handler raises in one at the wrong moment, the error becomes
`RuntimeError: release unlocked lock`, and whoever asked for an interrupt is not told of it.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from operator import methodcaller
from time import monotonic
from types import FrameType
from typing import Any

_LOOK_EVERY_S = 0.05

_call: Any = methodcaller("__call__")
_WITHOUT_COLLECTION = (gc.disable, sys._current_frames, gc.enable)


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident.

    As `sys._current_frames`, with which Python 3.11 can stand still for ever: it makes objects
    while it holds the lock by which threads end. If they bring about a garbage collection, in which
    a callback lets other threads run, one that ends waits for that lock, and keeps the GIL.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    try:
        # One call of C: neither another thread nor a signal handler comes in between. They have no
        # name here: this frame is one of them, and would stay with all that its callers hold.
        return list(map(_call, _WITHOUT_COLLECTION))[1]  # type: ignore[no-any-return]
    except MemoryError:
        gc.enable()
        raise


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; what a signal handler raises meanwhile comes through as it is.

    The thread may have been started then, or not.

    Raises:
        RuntimeError: no thread can be had.
    """
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__
        if interrupt is None or interrupt is handled:
            raise
        raise interrupt from None


def join_thread(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait until a thread has ended.

    Also in a signal handler that has come into such a wait, which holds the lock then by which
    Python before 3.13 knows that the thread has ended.

    Args:
        thread: the thread; one that was not started has ended.
        timeout_s: for so long at most; None for ever.
    """
    due = math.inf if timeout_s is None else monotonic() + timeout_s
    while thread.is_alive() and thread.ident in frames_of_threads():
        left_s = min(due - monotonic(), _LOOK_EVERY_S)
        if left_s <= 0.0:
            return
        thread.join(left_s)


class InterruptibleEvent:
    """As `threading.Event`; what a signal handler raises in a wait comes through as it is.

    Attributes:
        is_set: for good.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_set = False

    def set(self) -> None:
        """Have all waits end."""
        self.is_set = True
        self._let_go()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; signal handlers run meanwhile.

        Not in one go: a signal that comes just before the thread falls asleep does not wake it.

        Args:
            timeout_s: for so long at most; None for ever.

        Returns:
            Whether it is set.
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
