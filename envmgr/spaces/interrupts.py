"""Telling exceptions of a signal handler from those of the code that the handler interrupted."""

from __future__ import annotations

import signal
from types import CodeType


def came_through_a_handler(error: BaseException) -> bool:
    """Return whether an exception was raised in one of the signal handlers of this process.

    Code that catches whatever foreign code may raise asks this first: the user's own alarm is no
    failure of an env, of a pickle or of an argument. `KeyboardInterrupt` is known by its class.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def pass_interrupt_on(error: BaseException) -> None:
    """Raise an exception again if it was raised in a signal handler; for `except` clauses."""
    if came_through_a_handler(error):
        raise error


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a handler, which may be a function, a method or a callable object."""
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
