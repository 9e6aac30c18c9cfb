"""The engine: waits, and has the supervisor act on what comes, in the caller's thread or behind it.

One lock guards the supervisor; whoever holds it is the only writer of states. Inside a public call
the caller's thread holds it and does everything itself: a step is never handed to another thread.
While the caller is away, a background thread carries resets, retries, renewals and deadlines on. It
is armed only while such work is outstanding, tries the lock instead of waiting for it, and has a
doorbell of its own. Deaths of workers wake it at any time, also while nothing is outstanding.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from envmgr.core.background import LOOK_EVERY_S, Background
from envmgr.core.calls import FORKS, Call
from envmgr.core.phases import BEHIND_THE_CALLER, Phase
from envmgr.core.shelter import Shelter
from envmgr.core.supervisor import Supervisor
from envmgr.core.tracing import TracedCall
from envmgr.core.watch import Watch
from envmgr.errors import ManagerClosedError
from envmgr.transport.base import Transport
from envmgr.types import Clock

logger = logging.getLogger("envmgr")

T = TypeVar("T")

WARN_EVERY_S = 30.0
_SPINS = 8
_LEAST_SHARE = 16

NARROW_S = 0.005
"""How long a wait may look at nothing but its pivot."""


class Engine:
    """Runs a supervisor.

    Args:
        supervisor: keeps the envs.
        transport: what it speaks through.
        clock: monotonic seconds.
        background: whether a background thread may run (not for envs in the caller's thread).
        shelter: where what must not be half done is done; None: in the caller's thread.
        spin_s: how long to watch for replies before sleeping; only where cores are free.
        watch: keeps a board of the envs for others to look at.

    Attributes:
        supervisor: the envs.
        transport: what they are reached through.
        closing: `close` was called, from whatever thread.
        forks: forks of this process when it was made: in a fork there are more.
        watch: keeps a board of the envs; None if nobody does.
        calling: a context that holds the engine for one public call. Entering it gives the
            supervisor; leaving it hands what is outstanding to the background. Entering it raises
            ConcurrentCallError if another thread is inside a call, and ManagerClosedError if the
            engine was closed, or this process is a fork of the one it belongs to.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        transport: Transport,
        clock: Clock,
        *,
        background: bool,
        shelter: Shelter | None = None,
        spin_s: float = 0.0,
        watch: Watch | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.transport = transport
        self._clock = clock
        self._spin_s = self._most_spin_s = spin_s
        self.forks = len(FORKS)
        self.closing = False
        # Reentrant, because a signal handler may close the manager inside one of its calls.
        self._lock = threading.RLock()
        self._shelter = shelter
        self._ended = False
        self._background = Background(self, self._lock) if background else None
        tracer, guards = supervisor.hosts.tracer, (self, self._lock, self._background)
        self.calling = Call(*guards) if tracer is None else TracedCall(*guards, tracer)
        self.watch = watch
        if watch is not None:
            watch.begin(self)

    # -- public calls -----------------------------------------------------------------------

    @property
    def caller(self) -> FrameType | None:
        """The frame of the public call under way, see `Delivery`."""
        return self.supervisor.delivery.caller

    def collect(self) -> None:
        """Apply everything that has arrived, without waiting. The lock is held."""
        self._pump(0.0)

    def undisturbed(self, job: Callable[[], T]) -> T:
        """Do something that must not be half done: to its end, whatever signal handlers raise."""
        return job() if self._shelter is None else self._shelter.run(job)

    def recover(self) -> None:
        """Make up for an interrupt: what was begun is done, and what was not delivered is kept.

        Can be interrupted itself, and called again.
        """
        if self._shelter is not None:
            self._shelter.settle()
        if not self.closing:
            self.supervisor.recover(self.undisturbed)
            if self.transport.arrivals:  # the first of them may have been applied by half
                self.undisturbed(self._apply_steps)

    def wait_until(
        self,
        finished: Callable[[], bool],
        *,
        pivot: Callable[[], int | None] | None = None,
        deadline: float = math.inf,
        look_every_s: float = math.inf,
        doing: str,
    ) -> bool:
        """Wait, applying what arrives, until `finished` or `deadline`. The lock is held.

        Args:
            finished: asked after each arrival.
            pivot: a host whose reply is wanted in any case: waiting for it alone spares wake-ups.
                When that takes long, whatever else goes on is looked after, too.
            deadline: on the clock.
            look_every_s: ask `finished` so often, whatever arrives.
            doing: what this is, for the warning after a long wait.

        Returns:
            Whether `finished` became true.

        Raises:
            ManagerClosedError: another thread closed the manager.
        """
        began = self._clock()
        warn_at, narrow_until = began + WARN_EVERY_S, began + NARROW_S
        self.supervisor.sleep(soon=True)  # first of all: whatever comes after it rings
        while not self.closing:  # asked first: the wake-up may have been spent already
            self._collect()  # what came before it rang for nobody, or for the background
            if finished():
                self.supervisor.sleep(soon=False)
                return True
            now = self._clock()
            if now >= deadline:
                self.supervisor.sleep(soon=False)
                return False
            if now >= warn_at:
                self._warn(doing)
                warn_at = now + WARN_EVERY_S
            until = min(deadline, warn_at, self.supervisor.earliest_deadline, now + look_every_s)
            if pivot is not None and now < narrow_until:
                self._pump(max(min(until, narrow_until) - now, 0.0), pivot())
            else:
                self._pump(max(until - now, 0.0))
        raise ManagerClosedError("the manager was closed by another thread, or by a signal handler")

    def _await_rings(self, finished: Callable[[], bool], limit_s: float) -> bool:
        """Wait as `see_to` does, for what comes with rings alone.

        What happens in nearly every step costs as little as it can here. The trainer sleeps
        meanwhile, and runs with cold caches after it, as hosts do.
        """
        supervisor, transport = self.supervisor, self.transport
        supervisor.sleep(soon=True)
        while not finished():
            seconds = min(supervisor.earliest_deadline - self._clock(), limit_s)
            try:
                if self.closing or seconds <= 0.0 or not transport.await_ring(seconds):
                    return False
            except (OSError, ValueError):  # as in `_pump`
                if self.closing:
                    return False
                raise
        supervisor.sleep(soon=False)
        return True

    def see_to(
        self, finished: Callable[[], bool], look_every_s: float = math.inf, *, sleeps: bool = True
    ) -> bool:
        """Wait for steps in the way that costs least, if there is one; in line, take them.

        Args:
            finished: asked now and then.
            look_every_s: wait so long for one ring at most.
            sleeps: wait for rings; else only as long as that takes no sleep.

        Returns:
            Whether `finished` became true and nothing else has happened, as far as is known. If
            not, `wait_until` goes on.
        """
        transport = self.transport
        if not transport.works_alone:
            transport.poll(0.0)
            if not transport.arrivals and finished():
                return True
            self._act()
            return finished()
        if self.supervisor.posting is None:
            return False
        if self._most_spin_s > 0.0 and self._spin_until(finished):
            return True
        return sleeps and self._await_rings(finished, min(look_every_s, LOOK_EVERY_S))

    def _spin_until(self, finished: Callable[[], bool]) -> bool:
        """Watch for something that is about to happen, without sleeping; for a short while only.

        How long depends on how it went before: for hosts that take their time it is not worth it.

        Returns:
            Whether it has happened.
        """
        end = self._clock() + self._spin_s
        while self._clock() < end:
            for _ in range(_SPINS):
                if finished():
                    self._spin_s = self._most_spin_s
                    return True
        self._spin_s = max(self._spin_s / 2, self._most_spin_s / _LEAST_SHARE)
        return False

    def now(self) -> float:
        """Return the moment on the clock that deadlines are given on."""
        return self._clock()

    def wait_for(self, finished: Callable[[], bool], seconds: float) -> bool:
        """As `wait_until`, for at most so many seconds from now."""
        return self.wait_until(finished, deadline=self._clock() + seconds, doing="this")

    def _pump(self, timeout_s: float | None, pivot: int | None = None) -> None:
        try:
            self.transport.poll(timeout_s, pivot=pivot)
        except (OSError, ValueError):  # a signal handler has closed it in the middle of this
            if self.closing:
                return
            raise
        self._act()

    def _act(self) -> None:
        """Act on what `poll` has found, and on deadlines that have passed."""
        supervisor, transport = self.supervisor, self.transport
        self._apply()
        if self.closing:
            return
        if supervisor.earliest_deadline <= self._clock():
            transport.poll(0.0)
            self._apply()
            self.undisturbed(supervisor.expire)

    def _apply(self) -> None:
        """Apply what has come; an arrival is taken out of their queue when that was done."""
        self._apply_steps()
        if self.closing:
            return
        if self.transport.arrivals or self.transport.needs_attention:
            self.undisturbed(self._apply_all)
        self._collect()

    def _apply_steps(self) -> None:
        """Apply the ordinary steps that come before anything else."""
        arrivals = self.transport.arrivals
        if arrivals and not self.closing:
            self.supervisor.step_on(arrivals)

    def _apply_all(self) -> None:
        arrivals, handle = self.transport.arrivals, self.supervisor.handle
        if self.transport.needs_attention:
            self.transport.attend()
        while arrivals and not self.closing:
            handle(*arrivals.popleft())

    def _collect(self) -> None:
        """Apply what has arrived in the block besides replies to posted steps."""
        if self.supervisor.collect():
            self.undisturbed(self.supervisor.collect_rest)

    def _warn(self, doing: str) -> None:
        busy: dict[str, list[int]] = {}
        for slot in self.supervisor.slots:
            if slot.phase is not Phase.IDLE:
                busy.setdefault(slot.phase.label, []).append(slot.env_id)
        text = "; ".join(f"{what}: envs {ids}" for what, ids in busy.items()) or "nothing is busy"
        logger.warning(
            "%s has been waiting for %g s more (%s). Without step_timeout and reset_timeout this "
            "can last for ever; Ctrl-C or close() ends it.",
            doing,
            WARN_EVERY_S,
            text,
        )

    # -- the background ---------------------------------------------------------------------

    def background_work(self) -> tuple[list[int], float]:
        """Return the hosts to watch while the caller is away, and when to look at the latest."""
        hosts = self.supervisor.hosts
        until = self.supervisor.earliest_deadline
        if self.supervisor.statistics.outstanding:
            until = min(until, self._clock() + LOOK_EVERY_S)
        busy = [slot.host_id for slot in hosts.slots if slot.phase in BEHIND_THE_CALLER]
        return [host_id for host_id in busy if host_id is not None], until

    def has_background_work(self) -> bool:
        """Return whether anything is under way that needs looking after behind the caller."""
        supervisor = self.supervisor
        return bool(
            supervisor.statistics.outstanding or supervisor.hosts.phases.any_behind_the_caller
        )

    def seconds_until(self, moment: float) -> float | None:
        """Return how long it is to a moment on the clock; None for ever."""
        return None if math.isinf(moment) else max(moment - self._clock(), 0.0)

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """End everything; from any thread, at any time, any number of times.

        Args:
            grace_s: seconds that hosts get to close their envs; 0 does not ask them.
        """
        if self.forks != len(FORKS):
            return  # a fork: nothing here belongs to it
        self.closing = True
        self.transport.wake()
        with self._lock:
            if not self._ended:
                self.undisturbed(self._stop)
                if self.transport.works_alone:
                    self.undisturbed(lambda: self.transport.close(grace_s))
                else:  # its envs are closed in the thread that they ran in
                    self.transport.close(grace_s)
                self._ended = True  # not before: what is interrupted here can be done again
        for thread in (self._background, self._shelter):
            if thread is not None:
                thread.end()

    def _stop(self) -> None:
        if self._background is not None:
            self._background.stop()
        if self.watch is not None:
            self.watch.end()
        self.supervisor.stop()
