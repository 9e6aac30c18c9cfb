"""The thread that carries resets, repairs and deadlines on while the caller is away."""

from __future__ import annotations

import contextlib
import logging
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from envmgr.transport.process.threads import BACKGROUND_THREAD
from envmgr.transport.ready import Waker

if TYPE_CHECKING:  # it is the engine's
    from envmgr.core.engine import Engine

logger = logging.getLogger("envmgr")

LOOK_EVERY_S = 0.5
"""How often the background thread looks after steps that are under way while the caller is away:
ordinary replies do not wake it, but a reset that failed behind such a step has to be seen."""

MIN_INTERVAL_S = 0.02
"""How often it looks around at most, while the caller comes and goes."""

DEATH_INTERVAL_S = 0.002
"""How long a death may be left to a caller who is there, before it looks whether he has gone."""


class Background:
    """The thread that carries work on while the caller is away.

    It sleeps until there is such work (`dormant`) or a worker has died, then watches the hosts
    concerned and looks around at short intervals. The caller tells it of new work only after a
    quiet time: a thread that is woken in every call costs more than the call.

    Attributes:
        dormant: it sleeps until it is told of work, or a worker dies.
        thread: once there was work.
    """

    def __init__(self, engine: Engine, lock: threading.RLock) -> None:
        self._engine = engine
        self._lock = lock
        self._doorbell = Waker()
        self.dormant = True
        self._deaths: list[Any] = []
        self._interval_s = MIN_INTERVAL_S
        self._seen_changes = 0
        self._ending = False
        self.thread: threading.Thread | None = None

    def arm(self) -> None:
        """Wake the thread if there is work that it would not see soon. Called without the lock."""
        if self.dormant:
            watches = self.thread is not None or not self._engine.transport.any_death()
            if watches and not self._engine.has_background_work():
                return
            self.dormant = False
            try:
                self._doorbell.wake()
                if self.thread is None:
                    thread = threading.Thread(target=self._run, name=BACKGROUND_THREAD, daemon=True)
                    thread.start()
                    self.thread = thread
            except RuntimeError as error:  # no thread can be had: the next call tries again
                self.dormant = True
                logger.warning("resets and repairs wait for the next call: %s", error)
            except BaseException:  # Ctrl-C in the midst of this: the next call rings again
                self.dormant = True
                raise
        elif self._interval_s > MIN_INTERVAL_S and self._seen_changes != self._changes():
            self._doorbell.wake()

    def _changes(self) -> int:
        return self._engine.supervisor.hosts.limits.changes

    def _run(self) -> None:
        while not self._ending:
            self._wait(self._deaths, None)
            while self._carry_on():
                pass

    def _wait(self, objects: list[Any], timeout_s: float | None) -> bool:
        """Wait for the doorbell or one of `objects`; return whether something has happened."""
        happened = False
        with contextlib.suppress(OSError, ValueError):  # an fd that the caller has just closed
            happened = bool(wait([self._doorbell.fileno(), *objects], timeout_s))
        self._doorbell.silence()
        return happened

    def _carry_on(self) -> bool:
        """Do what can be done now, then wait for more; False when there is nothing left to do."""
        if not self._lock.acquire(blocking=False):
            return self._stand_back()
        try:
            if self._ending:
                return False
            if self._engine.caller is not None:  # what its call has left is for the next one
                self.dormant = True
                return False
            self._engine.collect()
            self._deaths = self._engine.transport.any_death()
            if not self._engine.has_background_work():
                self.dormant = True
                return False
            hosts, until = self._engine.background_work()
            objects = [*self._engine.transport.waitables(hosts), *self._deaths]
            changes = self._changes()
        except Exception as error:  # a defect of ours must not vanish with the thread
            logger.exception("the background thread of a manager failed")
            self._engine.supervisor.repair.raise_later(error)
            self.dormant = True
            self._deaths = []  # what it failed at may still be there: wait for the next call
            return False
        finally:
            self._lock.release()
        quiet = changes == self._seen_changes
        self._interval_s = min(self._interval_s * 2, LOOK_EVERY_S) if quiet else MIN_INTERVAL_S
        self._seen_changes = changes
        if self._engine.transport.has_unsent:
            self._interval_s = MIN_INTERVAL_S  # `poll` sends on
        seconds = self._engine.seconds_until(until)
        self._wait(objects, self._interval_s if seconds is None else min(seconds, self._interval_s))
        return True

    def _stand_back(self) -> bool:
        """Leave it to the caller, who is in a call and does everything itself.

        Returns:
            Whether to look again; not if the caller stays: `arm` is called when it leaves.
        """
        self._interval_s = MIN_INTERVAL_S
        self._deaths = self._engine.transport.any_death()
        if self._wait(self._deaths, MIN_INTERVAL_S):
            self._wait([], DEATH_INTERVAL_S)  # a death that the caller has not seen yet
            return not self._ending  # a call may close the manager, and waits for this thread
        self.dormant = True  # before the look at the lock: a caller that has it is still to `arm`
        if self._ending or not self._lock.acquire(blocking=False):
            return False
        self._lock.release()
        self.dormant = False
        return True

    def stop(self) -> None:
        """Have the thread end. Called with the lock."""
        self._ending = True
        self._doorbell.wake()

    def end(self) -> None:
        """Wait for the thread, unless this is it, and release the doorbell."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        self._doorbell.close()
