"""How workers are hurt: by signals from outside, or by code of their own that listens to signals.

SIGKILL, SIGSEGV, SIGABRT and SIGSTOP come from outside and hit a process wherever it is. To exit,
hang or send garbage, the code of the worker itself has to act: `Vulnerable` factories have it
listen to three real-time signals. `hang` holds the GIL in C with all signals blocked; `corrupt`
writes garbage into the worker's connection before its next step or reset.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envmgr.errors import ConfigError
from envmgr.proc import stat_of
from envmgr.testing.faulty import hang_holding_gil, worker_channel, write_garbage

_FROM_OUTSIDE = {"kill": "SIGKILL", "segfault": "SIGSEGV", "abort": "SIGABRT", "stop": "SIGSTOP"}
_FROM_INSIDE = ("exit", "hang", "corrupt")
_FIRST_SIGNAL = 7
"""The real-time signals used are SIGRTMIN plus this and the next ones."""

KINDS = (*_FROM_OUTSIDE, *_FROM_INSIDE)
"""All kinds of injuries."""

AT_ONCE = frozenset(("kill", "segfault", "abort", "exit"))
"""The kinds that end a worker at once; others wait for a time limit, or for the next step."""

EXIT_CODE = 17
"""Exit code of workers that were made to exit."""

_MOST_ANCESTORS = 8

_corruption_is_due = False


@dataclass(frozen=True)
class Vulnerable:
    """A factory of envs whose workers can be made to exit, hang and send garbage.

    It has no effect outside of worker processes, and can be pickled if the factory inside can.
    """

    factory: Callable[[], Any]

    def __call__(self) -> Any:
        """Return a new env, and have this process listen."""
        if worker_channel() is None:
            return self.factory()
        _listen()
        env = self.factory()
        return _later(env) if inspect.isawaitable(env) else _corrupting(env)


async def _later(built: Awaitable[Any]) -> Any:
    return _corrupting(await built)


def _corrupting(env: Any) -> Any:
    for name in ("step", "reset"):
        method = getattr(env, name)
        then = _corrupt_then_await if inspect.iscoroutinefunction(method) else _corrupt_then
        setattr(env, name, partial(then, method))
    return env


def vulnerable(env_fn: Iterable[Callable[[], Any]]) -> list[Vulnerable]:
    """Return factories of envs whose workers can be hurt in every way."""
    return [Vulnerable(factory) for factory in env_fn]


def _listen() -> None:
    signal.signal(signal_of("exit"), lambda number, frame: os._exit(EXIT_CODE))
    signal.signal(signal_of("hang"), lambda number, frame: hang_holding_gil())
    signal.signal(signal_of("corrupt"), _corrupt)


def _corrupt(number: int, frame: Any) -> None:
    global _corruption_is_due  # a handler can do no more than that
    _corruption_is_due = True


def _corrupt_then(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send garbage if that is due; the handler does not, as it may run amid a message."""
    if _corruption_is_due:
        write_garbage()
    return function(*args, **kwargs)


async def _corrupt_then_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send garbage if that is due, and await the method of an async env."""
    return await _corrupt_then(function, *args, **kwargs)


def signal_of(kind: str) -> int:
    """Return the number of the signal that hurts a worker."""
    if kind in _FROM_OUTSIDE:
        return int(getattr(signal, _FROM_OUTSIDE[kind]))
    return int(signal.SIGRTMIN) + _FIRST_SIGNAL + _FROM_INSIDE.index(kind)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process that descends from this one; return whether it was alive.

    Nothing is sent to any other process: by now, the pid may be that of an unrelated process.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            return True
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(0) or not _descends_from_this(pid):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def _descends_from_this(pid: int) -> bool:
    own = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        if pid == own:
            return True
        try:
            pid = int(stat_of(pid)[1])
        except (OSError, ValueError, IndexError):
            return False
        if pid <= 1:
            return False
    return sys.platform != "linux"


def refuse_kinds(kinds: Sequence[str]) -> None:
    """Refuse kinds of injuries that do not exist, or not on this platform.

    Raises:
        ConfigError: there is such a kind, or none is given; the message names the known ones.
    """
    known = KINDS if hasattr(signal, "SIGRTMIN") else tuple(_FROM_OUTSIDE)
    unknown = [kind for kind in kinds if kind not in known]
    if unknown or not kinds:
        raise ConfigError(
            f"there are no injuries of kind {', '.join(map(repr, unknown)) or '(none given)'} on "
            f"this platform; known are {', '.join(known)}"
        )
