"""Public calls: one at a time, and what an interrupt leaves of one is made up for by the next."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from envmgr.core.delivery import is_run
from envmgr.errors import ConcurrentCallError, ManagerClosedError, OutOfMemoryError

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
    first or last moments it may stay behind, and the lock with it: the next call finds that nobody
    runs the frame any more, and makes up for what was left. Between a call's end and its return,
    when its timesteps are in its hands and the lock is free, its frame runs still: who comes then,
    from another thread or from a signal handler, is refused like everybody else.

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
        self._delivery = engine.supervisor.delivery

    def __enter__(self, depth: int = 1) -> Supervisor:  # from whose frame it is called
        engine, delivery = self._engine, self._delivery
        if engine.closing or engine.forks != len(FORKS):
            _refuse(engine)
        if not self._lock.acquire(False):  # a keyword costs as much again
            self._await_background()
        frame = _frame(depth)
        if delivery.caller is not None:
            self._refuse_beside(delivery.caller)
            engine.recover()
        hand = delivery.in_hand
        if hand is None:
            delivery.caller = frame
        else:  # of a call that did not return, or is about to
            self._refuse_beside(hand.caller)
            delivery.caller = frame
            engine.recover()
        return engine.supervisor

    def _await_background(self) -> None:
        """Wait for the background thread, which has the lock; but not for another caller.

        A caller has it for a moment before it says so.
        """
        engine, lock = self._engine, self._lock
        while self._delivery.caller is None:
            if lock.acquire(timeout=_LOOK_EVERY_S):
                if engine.closing:  # meanwhile
                    lock.release()
                    _refuse(engine)
                return
        raise ConcurrentCallError(_ONE_CALLER)

    def _refuse_beside(self, caller: FrameType | None) -> None:
        """Refuse a call, which has the lock, while another one is under way.

        Raises:
            ConcurrentCallError: that is so; nothing was changed, and the lock was given back.
        """
        if is_run(caller):
            self._lock.release()
            raise ConcurrentCallError(_ONE_CALLER)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        engine, background = self._engine, self._background
        try:
            if kind is not None:
                self._recover()
            # Not if that was interrupted, too: the next call goes on with it.
            self._delivery.caller = None
        finally:
            self._lock._release_save()  # type: ignore[attr-defined] # what was left, too
        if not (background is None or engine.closing or engine.forks != len(FORKS)) and (
            background.thread is None or not background.dormant or engine.has_background_work()
        ):
            background.arm()
        if kind is not None and issubclass(kind, MemoryError):
            raise OutOfMemoryError(f"{_NO_MEMORY} ({str(details[0]) or kind.__name__})")

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


class Alone:
    """A context for one caller at a time, where there may be no engine yet that others could call.

    As with `Call`, what an interrupt leaves of it does not keep the same thread out.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._caller: FrameType | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise ConcurrentCallError(_ONE_CALLER)
        if is_run(self._caller):
            self._lock.release()
            raise ConcurrentCallError(_ONE_CALLER)
        self._caller = _frame(1)

    def __exit__(self, *details: object) -> None:
        self._caller = None
        self._lock._release_save()  # type: ignore[attr-defined] # what was left, too

    def __reduce__(self) -> Any:
        """A manager that is not launched may be copied, and sent elsewhere."""
        return Alone, ()


_NO_MEMORY = (
    "the trainer's process got no memory for this call; nothing was lost. Free memory (batches "
    "that are kept, a replay buffer), raise the limit of the process (ulimit -v, RLIMIT_AS, a "
    "container's), use fewer envs, or copy_on_get: false. Then go on: envs in `pending_env` have "
    "their actions, and their timesteps come with recv() or step({}); for the others make the same "
    "call again"
)

_PATIENCE = 10
"""So many interrupts may come in a row."""

_LOOK_EVERY_S = 0.01
"""How often to look who has the lock."""

_ONE_CALLER = (
    "another thread is inside a call of this manager, or a signal handler has come into one; a "
    "manager serves one thread at a time (only close, stats and env_states may be called from "
    "others, and from handlers)"
)


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
