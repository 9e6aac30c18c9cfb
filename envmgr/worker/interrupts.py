"""What goes through env code and is no failure of the env: the trainer's interrupts, in line."""

from __future__ import annotations

import signal
from types import CodeType

from envmgr.wire.hosts import HostSettings


def pass_on(error: BaseException, settings: HostSettings) -> None:
    """Raise what was raised in env code and is not the env's.

    That is Ctrl-C, and whatever else a signal handler of the trainer raises, where envs run in the
    trainer's own thread. In workers there is nothing of the kind.
    """
    if not settings.propagate:
        return
    if isinstance(error, settings.propagate) or _came_through_a_handler(error):
        raise error


def _came_through_a_handler(error: BaseException) -> bool:
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a handler: of a function, a method, or an object that is called."""
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
