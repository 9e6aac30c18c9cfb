"""What goes through env code and is no failure of the env: the trainer's interrupts, in line."""

from __future__ import annotations

from envmgr.spaces.interrupts import came_through_a_handler
from envmgr.wire.hosts import HostSettings


def pass_on(error: BaseException, settings: HostSettings) -> None:
    """Raise what was raised in env code and is not the env's.

    That is Ctrl-C, and whatever else a signal handler of the trainer raises, where envs run in the
    trainer's own thread. In workers there is nothing of the kind.
    """
    if not settings.propagate:
        return
    if isinstance(error, settings.propagate) or came_through_a_handler(error):
        raise error
