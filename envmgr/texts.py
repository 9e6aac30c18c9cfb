"""Figures as texts, for people."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Iterable
from itertools import groupby
from typing import Any


def number(value: Any, digits: int = 2) -> str:
    """Return a figure, or a list of figures, as text; `-` for None.

    Args:
        value: a number, a list or tuple of numbers, or None.
        digits: digits after the point, for numbers that are no integers.
    """
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(number(one, digits) for one in value) + "]"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def short_time(seconds: float | None) -> str:
    """Return a time as text: three digits and a unit; `-` for None."""
    if seconds is None:
        return "-"
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    seconds = float(f"{seconds:.3g}")  # so that 0.99996 ms are 1 ms, and not 1e+03 us
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def seconds_text(seconds: float) -> str:
    """Return how long something lasts, in words; `?` if the time is not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1.0:
        return "< 1 s"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return `1 episode`, `2 episodes`; other plurals than these have to be given."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def env_ids_text(env_ids: Iterable[int]) -> str:
    """Return `env 3`, or `envs 0 to 5, 8, 9`."""
    ids = sorted(env_ids)
    runs = [[i for _, i in run] for _, run in groupby(enumerate(ids), lambda at: at[1] - at[0])]
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run)
    return f"env{'' if len(ids) == 1 else 's'} {', '.join(parts)}"


def how_often(n: int) -> str:
    """Return how often something happened, in words."""
    return "once" if n == 1 else "twice" if n == 2 else counted(n, "time")


def exit_text(status: int) -> str:
    """Return how a process ended: `exit code 3`, or `killed by SIGSEGV`.

    Args:
        status: its exit code, or minus the number of the signal that ended it.
    """
    return f"exit code {status}" if status >= 0 else f"killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def logged(level: int, text: str, *args: Any, exc_info: BaseException | None = None) -> None:
    """Log something in the midst of work that must go on even if logging fails.

    A handler of the user's may raise (its disk is full, its stream is closed): the work goes on.

    Args:
        level: a level of `logging`.
        text: the message, with a placeholder for each of `args`.
        *args: the values for these placeholders.
        exc_info: an exception whose traceback is logged, too.
    """
    with contextlib.suppress(Exception):
        logger = logging.getLogger("envmgr")
        logger.log(level, text, *args, exc_info=exc_info, stacklevel=2)
