"""An alarm that bounds code in the caller's own thread."""

from __future__ import annotations

import itertools
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_AGAIN_S = 0.100_003
"""The alarm rings again at this interval: at first the code may have been just about to sleep.

Nobody else has a timer with this interval, so it identifies the alarm's own timer."""

_LEAST_S = 1e-3

_LATE_S = 1e6
"""The delay of an alarm that is not to ring any more."""

_PACKAGE = str(Path(__file__).parents[1])


class TimeIsUp(BaseException):
    """Raised by the alarm inside code that has exceeded its limit."""


class _Before(NamedTuple):
    """The handler and the timer that were in place before the alarm was set.

    Attributes:
        handler: the handler of SIGALRM.
        remaining_s: the time left on a timer of the user's own; 0 if there is none.
        interval_s: the interval of that timer.
        began: when the alarm was set, on the monotonic clock.
    """

    handler: Any
    remaining_s: float
    interval_s: float
    began: float


class Alarm:
    """Raises `TimeIsUp` in code that takes too long, then restores the previous handler and timer.

    It works only in the main thread; in others nothing is set. If an interrupt keeps something from
    being restored, `restore` does it. A handler or a timer that the code itself has set stays.

    Attributes:
        before: the handler and the timer to restore; None if there is nothing to restore.
        where: the stack of the latest code, if its time was up; else empty.
    """

    def __init__(self) -> None:
        self.where = ""
        self.before: _Before | None = None
        self._limit_s = 0.0
        self._has_raised = False

    def bound(self, limit_s: float | None, code: Callable[[], object]) -> bool:
        """Call `code`, and end it after `limit_s`; None sets no limit.

        Returns:
            Whether it was ended by the alarm.
        """
        self.restore()
        self.where = ""
        main = threading.current_thread() is threading.main_thread()
        if limit_s is None or not main:
            code()
            return False
        try:
            try:
                self._set(limit_s)
                code()
            finally:
                self.restore()
        except TimeIsUp as error:
            self.restore()  # it may have rung in the midst of that; it raises once
            frames = traceback.extract_tb(error.__traceback__)
            self.where = stack_text(frames[:-1])  # the last is `_ring`
            interrupt = error.__context__
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt from None  # it was on its way out when the alarm rang
            return True
        return False

    def _set(self, limit_s: float) -> None:
        handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
        if (
            handler == self._ring
        ):  # env code has put back what it had found there in an earlier call
            handler = signal.SIG_DFL
        self._limit_s, self._has_raised = limit_s, False
        self.before = _Before(handler, *timer, time.monotonic())
        signal.signal(signal.SIGALRM, self._ring)
        # A timer of 0 s would never ring.
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, _LEAST_S), _AGAIN_S)

    def restore(self) -> None:
        """Restore the previous handler and timer; may be called again."""
        before = self.before
        if before is None or threading.current_thread() is not threading.main_thread():
            return
        has_timer = signal.getitimer(signal.ITIMER_REAL)[1] == _AGAIN_S
        if has_timer:  # it stays the alarm's until the end, for an interrupt may come in between
            signal.setitimer(signal.ITIMER_REAL, _LATE_S, _AGAIN_S)
        if signal.getsignal(signal.SIGALRM) == self._ring:
            signal.signal(signal.SIGALRM, before.handler)
        if has_timer:
            left_s = before.remaining_s
            if left_s > 0.0:
                left_s = max(left_s - (time.monotonic() - before.began), _LEAST_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, before.interval_s)
        self.before = None

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        before = self.before
        if before is None:
            return  # it was put back just now
        if time.monotonic() - before.began < self._limit_s:
            if callable(before.handler):  # the user's own alarm
                before.handler(signum, frame)
        elif not self._has_raised:
            self._has_raised = True
            raise TimeIsUp


def stack_text(frames: list[traceback.FrameSummary]) -> str:
    """Return the stack of a thread that runs envs, without envmgr's calls around the env's."""
    inner = itertools.dropwhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)
    theirs = itertools.dropwhile(lambda frame: frame.filename.startswith(_PACKAGE), inner)
    return "".join(traceback.format_list([*theirs] or frames)).rstrip()
