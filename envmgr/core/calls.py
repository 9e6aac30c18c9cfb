"""Public calls: one at a time, and what an interrupt leaves of one is made up for by the next."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from envmgr.errors import ConcurrentCallError, ManagerClosedError

if TYPE_CHECKING:  # it is the engine's
    from envmgr.core.background import Background
    from envmgr.core.engine import Engine
    from envmgr.core.supervisor import Supervisor

FORKS: list[None] = []
"""Grows in every fork of this process: asking for the pid in every call costs more."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: FORKS.append(None))

_frame = sys._getframe


class Call:
    """The context of a public call. A class, because generators as contexts cost twice as much.

    The frame of the caller says that a call is under way. Of a call that was interrupted in its
    first or last moments it may stay behind, and the lock with it: the next call finds that the
    frame is not among those that called it, and makes up for what was left.

    Args:
        engine: what is called.
        lock: the engine's; held throughout the call.
        background: told when the call is over.
    """

    def __init__(
        self, engine: Engine, lock: threading.RLock, background: Background | None
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._background = background

    def __enter__(self, depth: int = 1) -> Supervisor:  # from whose frame it is called
        engine, lock = self._engine, self._lock
        if engine.closing or engine.forks != len(FORKS):
            _refuse(engine)
        if not lock.acquire(False):  # a keyword costs as much again
            if engine.caller is not None:
                raise ConcurrentCallError(_ONE_CALLER)
            lock.acquire()  # the background thread has it
            if engine.closing:  # meanwhile
                lock.release()
                _refuse(engine)
        frame = _frame(depth)
        if engine.caller is not None:
            if _is_called_by(frame, engine.caller):
                lock.release()
                raise ConcurrentCallError(_ONE_CALLER)
            engine.recover()
        engine.caller = frame
        supervisor = engine.supervisor
        if supervisor.delivery.in_hand is not None:  # of a call that did not return
            engine.recover()
        return supervisor

    def __exit__(self, kind: object, *details: object) -> None:
        engine, background = self._engine, self._background
        try:
            if kind is not None:
                self._recover()
            engine.caller = None  # not if that was interrupted, too: the next call goes on with it
        finally:
            self._lock._release_save()  # type: ignore[attr-defined] # what was left, too
        if background is None or engine.closing or engine.forks != len(FORKS):
            return
        if background.thread is None or not background.dormant or engine.has_background_work():
            background.arm()

    def _recover(self) -> None:
        """Make up for an interrupt, also if more of them come."""
        for _ in range(_PATIENCE):
            try:
                if not self._engine.closing:
                    self._engine.recover()
                return
            except BaseException as error:
                again = error
        raise again


_PATIENCE = 10
"""So many interrupts may come in a row."""

_ONE_CALLER = (
    "another thread is inside a call of this manager, or a signal handler has come into one; a "
    "manager serves one thread at a time (only close, stats and env_states may be called from "
    "others, and from handlers)"
)


def _is_called_by(frame: FrameType | None, caller: FrameType) -> bool:
    while frame is not None:
        if frame is caller:
            return True
        frame = frame.f_back
    return False


def _refuse(engine: Engine) -> None:
    """Say why there are no calls any more.

    Raises:
        ManagerClosedError: in any case.
    """
    if engine.forks != len(FORKS):
        raise ManagerClosedError(
            "this process is a fork of the one that launched the manager; its envs belong to "
            "that one. Launch a manager of its own here."
        )
    raise ManagerClosedError("the manager is closed; call launch() first")
