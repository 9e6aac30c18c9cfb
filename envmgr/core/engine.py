"""The engine: one caller at a time, and the one place that waits; `Gather` waits for timesteps.

It waits in the caller's thread, or behind the caller in a thread of its own.

One lock guards the supervisor; whoever holds it is the only writer of states. Inside a public call
the caller's thread holds it and does everything itself: a step is never handed to another thread.
While the caller is away, a background thread carries on resets, retries, renewals and deadlines. It
is armed only while such work is outstanding, tries the lock instead of waiting for it, and has a
doorbell of its own. Deaths of workers wake it at any time, even while nothing is outstanding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence, Sized
from functools import partial
from multiprocessing.connection import wait
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from envmgr.core.activities import awaited_text
from envmgr.core.call_journal import is_run
from envmgr.core.collect import HandedOut
from envmgr.core.failures import NoMemoryYet
from envmgr.core.phases import BEFORE_THE_CALLER, BEHIND_THE_CALLER
from envmgr.core.statistics import Tracer
from envmgr.core.supervisor import Supervisor
from envmgr.core.table import Selection
from envmgr.errors import (
    AllEnvsFailedError,
    ConcurrentCallError,
    ManagerClosedError,
    NothingReadyError,
    OutOfMemoryError,
)
from envmgr.interruptible import SoleThread, join_thread
from envmgr.lifecycle import EnvState
from envmgr.policy import GatherPolicy
from envmgr.shared_caps import SharedUnits
from envmgr.texts import logged, seconds_text
from envmgr.transport.base import Transport
from envmgr.transport.process.threads import thread_name
from envmgr.transport.ready import Waker
from envmgr.types import Clock
from envmgr.wire.block import RING_EACH, RING_LAST, fence
from envmgr.wire.board import Board

T = TypeVar("T")

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""The engines to tell that they are in a fork; asking for the pid in every call costs more."""


def refuse_in_fork() -> None:
    """Have the engines of the parent process do nothing in this fork of it."""
    for engine in list(_engines):
        engine.in_fork = engine.closing = True
    _engines.clear()


os.register_at_fork(after_in_child=refuse_in_fork)

_frame = sys._getframe


class Call:
    """The context of a public call.

    It is a class, because generators as contexts cost twice as much.

    The frame of the caller says that a call is under way. When a call is interrupted in its first
    or last moments, its frame may stay behind, and the lock with it: the next call finds that
    nobody runs the frame any more, and makes up for what was left. Between a call's end and its
    return, when it has its timesteps and the lock is free, its frame still runs: a call that comes
    then, from another thread or from a signal handler, is refused like any other.

    Args:
        engine: the engine that is called.
        lock: the engine's lock; held throughout the call.
        background: told when the call is over.
    """

    def __init__(self, engine: Engine, lock: threading.RLock, background: Attendant | None) -> None:
        self._engine = engine
        self._lock = lock
        self._acquire = lock.acquire
        self._background = background
        self._journal = engine.supervisor.journal
        self._owed: Sized = ()

    def __enter__(self, depth: int = 1) -> Supervisor:  # from whose frame it is called
        engine, journal = self._engine, self._journal
        if engine.closing:
            _refuse(engine)
        if not self._acquire(False):  # a keyword costs as much again
            self._await_background()
        frame = _frame(depth)
        if journal.caller is None and journal.returning is None:
            journal.caller = frame
        else:
            self._take_over(frame)
        if self._owed and engine.owner is not None:
            engine.owner.settle_owed()
        return engine.supervisor

    def _take_over(self, frame: FrameType) -> None:
        """Begin a call, which has the lock, after one that did not return, or is about to."""
        engine, journal = self._engine, self._journal
        if journal.caller is not None:
            self._refuse_beside(journal.caller)
            engine.recover()
        returning = journal.returning
        if returning is None:
            journal.caller = frame
        else:
            self._refuse_beside(returning.caller)
            journal.caller = frame
            engine.recover()

    def have_attended_by(self, owner: Owner) -> None:
        """Have the owner of the engine told when a call is over, in place of the background."""
        self._background, self._owed = owner, owner.owed

    def _await_background(self) -> None:
        """Wait for the background thread, which has the lock; but not for another caller.

        A caller has the lock for a moment before it says that it is one.
        """
        engine, lock = self._engine, self._lock
        while self._journal.caller is None:
            if lock.acquire(timeout=_LOOK_FOR_CALLER_EVERY_S):
                if engine.closing:  # meanwhile
                    lock.release()
                    _refuse(engine)
                return
        raise ConcurrentCallError(_ONE_CALLER)

    def _refuse_beside(self, caller: FrameType | None) -> None:
        """Refuse a call, which has the lock, while another one is under way.

        Raises:
            ConcurrentCallError: another call is under way; nothing was changed, and the lock was
                given back.
        """
        if is_run(caller):
            self._lock.release()
            raise ConcurrentCallError(_ONE_CALLER)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is not None:
                self._recover()
            # Not reached if `_recover` was interrupted, too: the next call goes on with it.
            self._journal.caller = None
        finally:
            self._lock._release_save()  # type: ignore[attr-defined] # what was left, too
        background = self._background
        if not (background is None or (engine := self._engine).closing) and (
            background.thread is None or not background.dormant or engine.has_background_work()
        ):
            background.arm()
        if kind is not None and issubclass(kind, MemoryError):
            raise OutOfMemoryError(f"{_NO_MEMORY} ({str(details[0]) or kind.__name__})")

    def _recover(self) -> None:
        """Make up for an interrupt, even if more of them come meanwhile."""
        for _ in range(_PATIENCE):
            try:
                if not self._lock._is_owned():  # type: ignore[attr-defined] # it was released in a wait
                    self._lock.acquire()
                if not self._engine.closing:
                    self._engine.recover()
                return
            except BaseException as error:
                again = error
        raise again


_enter, _exit = Call.__enter__, Call.__exit__
"""Called by these names, in every call: `super()` costs as much as reading the clock."""


def _is_at_the_edge_of_a_call() -> bool:
    """Return whether this thread is at the very start or end of a call, which has no frame yet."""
    frame: FrameType | None = _frame(1)
    while frame is not None:
        if frame.f_code in (_enter.__code__, _exit.__code__):
            return True
        frame = frame.f_back
    return False


class TracedPublicCall(Call):
    """A `Call` that is noted by a tracer."""

    def __init__(
        self, engine: Engine, lock: threading.RLock, background: Attendant | None, tracer: Tracer
    ) -> None:
        super().__init__(engine, lock, background)
        self._clock, self._noted = tracer.clock, tracer.calls
        self._code: CodeType = _enter.__code__
        self._began = 0.0

    def __enter__(self, depth: int = 2) -> Supervisor:
        began = self._clock()
        supervisor = _enter(self, depth)
        self._began = began
        if (caller := self._engine.caller) is not None:
            self._code = caller.f_code
        return supervisor

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            _exit(self, kind, *details)
        finally:
            self._noted.append((self._code, self._began, self._clock()))


class OneCaller:
    """A context for one caller at a time, where there may be no engine yet that others could call.

    As with `Call`, what an interrupt leaves behind does not keep the same thread out.
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
        """Make a new context: a manager that is not launched may be copied and sent elsewhere."""
        return OneCaller, ()


_NO_MEMORY = (
    "the trainer's process got no memory for this call; nothing was lost. Free memory (batches "
    "that are kept, a replay buffer), raise the limit of the process (ulimit -v, RLIMIT_AS, a "
    "container's), use fewer envs, or copy_on_get: false. Then go on: envs in `pending_env` have "
    "their actions, and their timesteps come with recv() or step({}); for the others make the same "
    "call again"
)

_PATIENCE = 10
"""How many interrupts may come in a row."""

_LOOK_FOR_CALLER_EVERY_S = 0.01
"""How often to look who has the lock."""

_ONE_CALLER = (
    "another thread is inside a call of this manager, or a signal handler has come into one; a "
    "manager serves one thread at a time (only close, stats and env_states may be called from "
    "others, and from handlers)"
)


CLOSED = "the manager was closed; call launch() to start its envs again"


def _refuse(engine: Engine) -> None:
    """Refuse a call, and say why the manager takes no calls any more.

    Raises:
        ManagerClosedError: in any case.
    """
    if engine.in_fork:
        raise ManagerClosedError(
            "this process is a fork of the one that launched the manager; its envs belong to "
            "that one. Launch a manager of its own here."
        )
    raise ManagerClosedError(CLOSED)


LOOK_EVERY_S = 0.5
"""How often the background thread looks after steps that are under way while the caller is away:
ordinary replies do not wake it, but a reset that failed behind such a step has to be seen."""

MIN_INTERVAL_S = 0.02
"""How often the background thread looks around at most, while the caller comes and goes."""

DEATH_INTERVAL_S = 0.002
"""How long the background thread may leave a death to a caller who is in a call, before it looks
whether the caller has gone."""


class Background(SoleThread):
    """The thread that carries work on while the caller is away.

    It sleeps until there is such work (`dormant`) or a worker has died, then watches the hosts
    concerned and looks around at short intervals. The caller tells it of new work only after a
    quiet time: a thread that is woken in every call costs more than the call.

    Attributes:
        dormant: whether it sleeps until it is told of work, or a worker dies.
    """

    def __init__(self, engine: Engine, lock: threading.RLock) -> None:
        super().__init__(thread_name("resets and repairs"))
        self._engine = engine
        self._lock = lock
        self._doorbell = Waker()
        self.dormant = True
        self._deaths: list[Any] = []
        self._interval_s = MIN_INTERVAL_S
        self._seen_changes = 0
        self._ending = False

    def arm(self) -> None:
        """Wake the thread if there is work that it would not see soon. Called without the lock."""
        if self.dormant:
            watches = self.thread is not None or not self._engine.transport.any_death()
            if watches and not self._engine.has_background_work():
                return
            self.dormant = False
            try:
                self._doorbell.wake()
                self.start()
            except RuntimeError as error:  # no thread can be had: the next call tries again
                self.dormant = True
                text = "resets and repairs wait for the next call: %s"
                logged(logging.WARNING, text, error)
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
            logged(logging.ERROR, "the background thread of a manager failed", exc_info=error)
            if not isinstance(error, MemoryError):  # then the next call does it once more
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
        """Leave the work to the caller, who is in a call and does everything itself.

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
            join_thread(self.thread)
        self._doorbell.close()


WARN_EVERY_S = 30.0
_SPINS = 8
_LEAST_SHARE = 16

NARROW_S = 0.005
"""How long a wait may look at nothing but its pivot."""


class Attendant(Protocol):
    """A thread that is told when calls are over.

    Attributes:
        dormant: whether it wants to be told only if there is work.
        thread: the thread; None before there is one.
    """

    dormant: bool
    thread: threading.Thread | None

    def arm(self) -> None:
        """Look after what calls have left. Called without the lock."""

    def stop(self) -> None:
        """Have the thread end. Called with the lock."""

    def end(self) -> None:
        """Wait for the thread, unless this is it, and release what it has."""


class Owner(Attendant, Protocol):
    """A thread that owns an engine: see `core.owner`."""

    @property
    def runs_envs(self) -> bool:
        """Whether the code of envs runs in this thread."""

    def have_collected(self) -> None:
        """Have what has arrived applied. The lock is held, and released meanwhile."""

    def wait_beside(
        self, finished: Callable[[], bool], deadline: float, look_every_s: float, doing: str
    ) -> bool:
        """Wait, as `Engine.wait_until` does. The lock is held, and released meanwhile."""

    def close_transport(self, grace_s: float) -> None:
        """Have the transport closed in this thread, and wait for that."""

    @property
    def owed(self) -> Sized:
        """The timesteps that were handed out to nobody, and are to be owed again."""

    def settle_owed(self) -> None:
        """Have envs owe the timesteps in `owed` again. The lock is held."""

    def forget_beside(self) -> None:
        """Let go of a call that an interrupt has ended while it waited. The lock is held."""


class Follower(Protocol):
    """Something that looks at a board, and ends with it."""

    def end(self) -> None:
        """End; can be called again."""


class KeepsBoard(Follower, Protocol):
    """Something that keeps a board of an engine until the engine ends.

    Attributes:
        followers: what ends with it.
    """

    followers: list[Follower]

    @property
    def board(self) -> Board | None:
        """The board that it writes; None if there is none, or none any more."""


class Engine:
    """Runs a supervisor.

    Args:
        supervisor: keeps the envs.
        transport: the transport that hosts are reached through.
        clock: monotonic seconds.
        background: whether a background thread may run (not for envs in the caller's thread).
        spin_s: how long to watch for replies before sleeping; only where cores are free.
        units: what the envs need of caps that managers share; None: nothing.

    Attributes:
        supervisor: keeps the envs.
        units: as given; taken before the first host is started, and given back when all have ended.
        transport: the transport that hosts are reached through.
        closing: whether nothing goes on here any more, because `close` was called, from whatever
            thread, or because this process is a fork.
        owner: the thread that does all that is done with the transport; None: each caller does it.
        in_fork: whether this process is a fork of the one that made the engine.
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
        spin_s: float = 0.0,
        units: SharedUnits | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.units = units
        self.transport = transport
        self._clock = clock
        self._limits = supervisor.hosts.limits
        self._statistics, self._table = supervisor.statistics, supervisor.table
        self._spin_s = self._most_spin_s = spin_s
        self.in_fork = self.closing = False
        self.owner: Owner | None = None
        # Reentrant, because a signal handler may close the manager inside one of its calls.
        self._lock = threading.RLock()
        self._ended = False
        self._background: Attendant | None = None
        if background:
            self._background = Background(self, self._lock)
        tracer, guards = supervisor.hosts.tracer, (self, self._lock, self._background)
        self.calling = Call(*guards) if tracer is None else TracedPublicCall(*guards, tracer)
        self.watch: KeepsBoard | None = None
        _engines.add(self)

    # -- public calls -----------------------------------------------------------------------

    @property
    def caller(self) -> FrameType | None:
        """The frame of the public call under way, see `CallJournal`."""
        return self.supervisor.journal.caller

    def refuse_if_closed(self) -> None:
        """Raise what public calls raise if they come too late, or in a fork of the process.

        Raises:
            ManagerClosedError: the engine was closed, or this process is a fork.
        """
        if self.closing:
            _refuse(self)

    @property
    def has_ended(self) -> bool:
        """Whether `close` has done all it does with the transport."""
        return self._ended

    @property
    def lock(self) -> threading.RLock:
        """The lock that whoever changes anything here has to hold."""
        return self._lock

    def collect(self) -> None:
        """Apply everything that has arrived, without waiting. The lock is held."""
        if self.owner is not None:
            self.owner.have_collected()
        else:
            self._pump(0.0)

    def see_ends_of_leases(self) -> None:
        """Apply the ends of leases that have ended, before a call refuses their envs."""
        if self._table.leased:
            self.collect()

    def collect_as_owner(self) -> None:
        """Do what `collect` does, in the owner's thread, where no signal handler interrupts."""
        transport, supervisor = self.transport, self.supervisor
        if not transport.await_ring(0.0):  # else nothing but replies in the block
            transport.poll(0.0)
            self._apply_steps()
            if transport.arrivals or transport.needs_attention:
                self._apply_all()
            if self.closing:
                return
        supervisor.apply_rest()
        if supervisor.earliest_deadline <= self._clock():
            transport.poll(0.0)
            self._apply_all()
            supervisor.apply_rest()
            supervisor.expire()

    def hand_over(self, owner: Owner) -> Attendant | None:
        """Have a thread own the engine from now on. The lock is held, and no call is under way.

        Returns:
            The background thread that there was, which is to be ended without holding the lock.
        """
        before, self._background, self.owner = self._background, owner, owner
        self.calling.have_attended_by(owner)
        self.supervisor.submitter.own_sleep = None
        return before

    def uninterrupted(self, job: Callable[[], T]) -> T:
        """Run a job that must not be left half done to its end, whatever signal handlers raise."""
        return self.supervisor.journal.uninterrupted(job)

    def recover(self) -> None:
        """Make up for an interrupt: what was begun is done, and what was not delivered is kept.

        Can be interrupted itself, and called again.
        """
        self.supervisor.journal.settle()
        if self.owner is not None:
            self.owner.forget_beside()
        if not self.closing:
            self.supervisor.recover()

    def let_go(self) -> None:
        """Release the lock that an interrupted call has left behind in the calling thread.

        The next public call would make up for that; but until then the owner, and any other thread
        that closes the manager, wait for the lock.

        Raises:
            ConcurrentCallError: the call is still under way: a signal handler, or the code of an
                env, has come from it.
        """
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return
        is_owner = self.owner is not None and threading.current_thread() is self.owner.thread
        if is_owner or is_run(self.caller) or _is_at_the_edge_of_a_call():
            raise ConcurrentCallError(_ONE_CALLER)
        self._lock._release_save()  # type: ignore[attr-defined]

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
            pivot: returns a host whose reply is wanted in any case: waiting for it alone spares
                wake-ups. When that takes long, whatever else goes on is looked after, too.
            deadline: when to stop waiting, on the clock.
            look_every_s: how often to ask `finished`, whatever arrives.
            doing: what this is, for the warning after a long wait.

        Returns:
            Whether `finished` became true.

        Raises:
            ManagerClosedError: another thread closed the manager.
        """
        if self.owner is not None:
            return self.owner.wait_beside(finished, deadline, look_every_s, doing)
        began = self._clock()
        warn_at, narrow_until = began + WARN_EVERY_S, began + NARROW_S
        self._sleeps(True)  # first of all: whatever comes after it rings
        while not self.closing:  # asked first: the wake-up may have been spent already
            self._collect()  # what came before it rang for nobody, or for the background
            if finished():
                self._sleeps(False)
                return True
            now = self._clock()
            if now >= deadline:
                self._sleeps(False)
                return False
            if now >= warn_at:
                self.warn_of_wait(doing, now - began)
                warn_at = now + WARN_EVERY_S
            until = min(deadline, warn_at, self.supervisor.earliest_deadline, now + look_every_s)
            if pivot is not None and now < narrow_until:
                self._pump(max(min(until, narrow_until) - now, 0.0), pivot())
            else:
                self._pump(max(until - now, 0.0))
        raise ManagerClosedError("the manager was closed by another thread, or by a signal handler")

    def _sleeps(self, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be rung for."""
        sleeping = self.supervisor.submitter.own_sleep
        if sleeping is not None:
            sleeping[-1] = soon
            if soon:
                fence()

    def see_to(
        self, finished: Callable[[], bool], look_every_s: float = math.inf, *, sleeps: bool = True
    ) -> bool:
        """Wait for steps in the cheapest way, if there is one; where they run inline, take them.

        This runs in nearly every step, so it costs as little as possible. The trainer sleeps
        meanwhile, and runs with cold caches afterwards, as hosts do.

        Args:
            finished: asked now and then.
            look_every_s: how long to wait for one ring at most.
            sleeps: whether to wait for rings; else this waits only as long as that takes no sleep.

        Returns:
            Whether `finished` became true and nothing else has happened, as far as is known. If
            not, `wait_until` goes on.
        """
        transport = self.transport
        if not transport.works_alone:
            if self.owner is not None:
                return False
            transport.poll(0.0)
            if not transport.arrivals and finished():
                return True
            self._act()
            return finished()
        sleeping = self.supervisor.submitter.own_sleep
        if sleeping is None:
            return False
        if self._most_spin_s > 0.0 and self._spin_until(finished):
            return True
        if not sleeps:
            return False
        limits, limit_s = self._limits, min(look_every_s, LOOK_EVERY_S)
        sleeping[-1] = 1
        fence()
        while not finished():
            seconds = min(limits.earliest - self._clock(), limit_s)
            try:
                if self.closing or seconds <= 0.0 or not transport.await_ring(seconds):
                    return False
            except (OSError, ValueError):  # as in `_pump`
                if self.closing:
                    return False
                raise
        sleeping[-1] = 0
        return True

    def _spin_until(self, finished: Callable[[], bool]) -> bool:
        """Watch for something that is about to happen, without sleeping; for a short while only.

        How long depends on how it went before: it is not worth it for hosts that take their time.

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
        """Return the present moment on the clock that deadlines refer to."""
        return self._clock()

    def wait_for(self, finished: Callable[[], bool], seconds: float) -> bool:
        """Wait as `wait_until` does, for at most so many seconds from now."""
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
            self.uninterrupted(supervisor.expire)

    def _apply(self) -> None:
        """Apply what has come; an arrival is out of the queue once it has been applied."""
        self._apply_steps()
        if self.closing:
            return
        if self.transport.arrivals or self.transport.needs_attention:
            self.uninterrupted(self._apply_all)
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
            arrival = arrivals.popleft()
            try:
                handle(*arrival)
            except NoMemoryYet:
                arrivals.appendleft(arrival)  # it is handled when there is some
                raise

    def _collect(self) -> None:
        """Apply what has arrived in the block besides replies to posted steps."""
        if self.supervisor.apply_ordinary():
            self.uninterrupted(self.supervisor.apply_rest)

    def warn_of_wait(self, doing: str, waited_s: float) -> None:
        """Say in the log that a call has been waiting for a long time, and for what."""
        waited = seconds_text(waited_s)
        # Commands that a shell script starts with `&` ignore Ctrl-C.
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        end = f"{f'`kill {os.getpid()}`' if is_ignored else 'Ctrl-C'} or close() ends it."
        if self.units is not None and self.units.lacks:
            text = "%s has been waiting for %s, for %s. %s"
            logged(logging.WARNING, text, doing, waited, self.units.lacks, end)
            return
        watch, pids = self.watch, self.transport.pids
        board = None if watch is None else watch.board
        # A dump shows stacks only of worker processes, and only where there are boards to be found.
        ask = f" `envmgr dump {os.getpid()}` shows the line." if pids and board is not None else ""
        logged(
            logging.WARNING,
            "%s has been waiting for %s: %s.%s Without step_timeout and reset_timeout this "
            "can last for ever; %s",
            doing,
            waited,
            awaited_text(self.supervisor.hosts, board, self._clock()),
            ask,
            end,
        )

    # -- the background ---------------------------------------------------------------------

    def background_work(self) -> tuple[list[int], float]:
        """Return the hosts to watch while the caller is away, and when to look at the latest."""
        hosts = self.supervisor.hosts
        until = self.supervisor.earliest_deadline
        if self.supervisor.statistics.outstanding:
            until = min(until, self._clock() + LOOK_EVERY_S)
        busy = [env.host_id for env in hosts.envs if env.phase in BEHIND_THE_CALLER]
        return [host_id for host_id in busy if host_id is not None], until

    def has_background_work(self) -> bool:
        """Return whether anything is under way that needs looking after behind the caller."""
        statistics, column = self._statistics, self._table.phases.column
        # This is `outstanding`, written out, because it is asked at the end of each call.
        if statistics.actions != statistics.timesteps + statistics.cancelled:
            return True
        return bool(column.translate(None, BEFORE_THE_CALLER))

    def seconds_until(self, moment: float) -> float | None:
        """Return how long it is to a moment on the clock; None for ever."""
        return None if math.isinf(moment) else max(moment - self._clock(), 0.0)

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """End everything; from any thread, at any time, any number of times.

        Args:
            grace_s: seconds that hosts get to close their envs; with 0 they are not asked to.
        """
        if self.in_fork:
            return  # nothing here belongs to it
        self.closing = True
        self.transport.wake()
        with self._lock:
            if not self._ended:
                self.uninterrupted(self._stop)
                if self.owner is not None and self.owner.runs_envs:
                    self.owner.close_transport(grace_s)
                elif self.transport.works_alone:
                    self.uninterrupted(lambda: self.transport.close(grace_s))
                else:  # its envs are closed in the thread that they ran in
                    self.transport.close(grace_s)
                if self.units is not None:
                    self.uninterrupted(self.units.release)
                self._ended = True  # not before: what is interrupted here can be done again
        if self._background is not None:
            self._background.end()
        self.supervisor.journal.end()

    def _stop(self) -> None:
        if self._background is not None:
            self._background.stop()
        if self.watch is not None:
            self.watch.end()
        self.supervisor.stop()


# -- what calls wait for ----------------------------------------------------------------------

_FEW = 8
"""Up to so many envs are asked about one by one."""


def await_one_ready(engine: Engine, supervisor: Supervisor) -> bool:
    """Wait until an env is ready, or the run has failed.

    Returns:
        False if all are DONE.

    Raises:
        NothingReadyError, AllEnvsFailedError: none of the envs that are not leased can become
            ready; the message says why.
    """
    repair, envs, table = supervisor.repair, supervisor.envs, supervisor.table

    def settled() -> bool:
        return repair.fatal is not None or any(table.is_ready(env.env_id) for env in envs)

    def hopeless() -> bool:
        return not any(table.is_coming(env.env_id) for env in envs if not env.owed)

    engine.wait_until(lambda: settled() or hopeless(), doing="ready_obs")
    if settled():
        return True
    _refuse_to_wait(supervisor)
    if table.leased:
        others = (
            "" if len(table.leased) == len(envs) else ", and the others take no action any more"
        )
        raise NothingReadyError(
            f"no env is ready: envs {sorted(table.leased)} are leased{others}. Calls for batches "
            "have a leased env when its lease has ended: end one, or use more envs."
        )
    return False


def unready(supervisor: Supervisor, env_ids: Sequence[int]) -> list[int]:
    """Return those of some envs that take no action now."""
    if len(env_ids) <= _FEW:
        return [env_id for env_id in env_ids if not supervisor.table.is_ready(env_id)]
    ready = set(supervisor.table.ready_ids())
    return [env_id for env_id in env_ids if env_id not in ready]


def await_all_ready(engine: Engine, supervisor: Supervisor, env_ids: Sequence[int]) -> None:
    """Wait until all of these envs are ready, or one of them cannot be, or the run has failed."""
    repair, table = supervisor.repair, supervisor.table

    def settled() -> bool:
        missing = unready(supervisor, env_ids)
        return repair.fatal is not None or not missing or not all(map(table.is_coming, missing))

    engine.wait_until(settled, doing="ready_arrays")


def refuse_unready(supervisor: Supervisor, env_ids: Sequence[int]) -> None:
    """Refuse envs that are not ready, and that it is no use to wait for.

    Raises:
        NothingReadyError: one of these envs is not ready.
        AllEnvsFailedError: no env at all can become ready.
    """
    missing = unready(supervisor, env_ids)
    if missing:
        _refuse_to_wait(supervisor)
        states = {i: supervisor.states[i].name for i in missing}
        raise NothingReadyError(f"envs {missing} do not become ready: they are in {states}")


def _refuse_to_wait(supervisor: Supervisor) -> None:
    """Say why nothing can become ready; return if all envs are done, or leased.

    Raises:
        NothingReadyError: for one of three reasons; AllEnvsFailedError for the last of them.
    """
    states, leased = supervisor.table.env_states(), supervisor.table.leased
    owed = supervisor.table.owed_ids()
    if owed:
        raise NothingReadyError(
            f"no env is ready: envs {owed} have actions under way. Gather their timesteps with "
            "recv() or step({}) first."
        )
    in_next_step = supervisor.table.rows_in_next_step(supervisor.table.all_ids)
    if in_next_step:
        raise NothingReadyError(
            f"the next episodes of envs {in_next_step} begin with the next step of the other rows "
            "of their vector env, which are ready (autoreset mode NextStep): step those first. "
            "With reset_inplace: true they begin at once, if the vector env can reset some of its "
            "rows."
        )
    waiting = [  # some of them may still be under repair after a failure
        env.env_id
        for env, state in zip(supervisor.envs, states, strict=True)
        if env.env_id not in leased and (state is EnvState.NEED_RESET or env.is_under_way)
    ]
    if waiting:
        raise NothingReadyError(
            f"no env is ready: the episodes of envs {waiting} have ended and auto_reset is off. "
            "Begin new ones with reset({env_id: params})."
        )
    failed = [i for i, state in enumerate(states) if state is not EnvState.DONE]
    if failed and not leased and EnvState.RUN not in states:
        raise AllEnvsFailedError(
            f"no env can become ready: envs {failed} have failed for good. Repair them with "
            "reset({env_id: None}), or close the manager."
        )


_NONE_READY = ". No env takes one now: ready_obs waits until one does, or says why none will"

_A_MOMENT_S = 0.001
_LOOK_EVERY_S = 0.002
"""How long a host of many cheap envs may be overlooked: it rings late, so as not to ring for each
of them."""


_ONE = GatherPolicy(1, 0.0)


class Gather:
    """The gathering of timesteps, inside calls that hold the engine.

    An urgent failure ends a gather. What a gather returns is to be handed out; None stands for
    nothing.

    Args:
        engine: the engine, which waits.
        policy: the manager's policy, for calls that do not say how many timesteps they want.

    Attributes:
        policy: as given.
        wants_all: whether the policy is to gather everything that is outstanding.
        ring: when workers ring for actions that one call sends and another one gathers, as
            `Submitter.by_id` takes it. Whoever gathers sets it by how much was gathered.
    """

    def __init__(self, engine: Engine, policy: GatherPolicy) -> None:
        self._engine = engine
        self.policy = policy
        self._supervisor = supervisor = engine.supervisor
        self._collector = supervisor.collector
        self._table = supervisor.table
        self._repair = supervisor.repair
        self.wants_all = policy.gathers_all
        self.ring = RING_LAST if self.wants_all else RING_EACH

    def exactly(self, selection: Selection, *, as_arrays: bool = False) -> HandedOut | None:
        """Wait for the timesteps of all of these envs, which were sent an action each.

        Args:
            selection: the envs.
            as_arrays: whether they are wanted as arrays.
        """
        repair, engine, collector, table = self._repair, self._engine, self._collector, self._table
        while True:
            in_c = selection.in_c
            arrived = (
                partial(collector.have_arrived, selection)
                if in_c is None or table.undelivered
                else in_c.arrived
            )
            # A timestep that is held back waits for a reset: what comes has to be applied, not only
            # seen.
            if table.awaits_reset or not engine.see_to(arrived):
                self._await(selection)
            if repair.urgent:
                return None
            if collector.left is None:
                taken = (collector.take_arrays if as_arrays else collector.take)(selection)
                if taken is not None:
                    return taken
            self._apply_alone()

    def _await(self, selection: Selection) -> None:
        """Wait until the timesteps of all of these envs have arrived, or something has failed."""
        repair, collector = self._repair, self._collector
        arrived = partial(collector.have_arrived, selection)
        self._engine.wait_until(
            lambda: repair.urgent or arrived() or collector.finds_malformed(),
            pivot=self._pivot(selection),
            doing="step",
        )

    def _pivot(self, selection: Selection) -> partial[int | None] | None:
        """Return a function that says which host's reply to wait for first.

        All of them are wanted, so waiting for one in the middle costs nothing, and the trainer is
        woken a few times instead of once for each env.
        """
        if self._supervisor.submitter.posts:
            return None
        return partial(self._one_of_the_missing, selection)

    def _one_of_the_missing(self, selection: Selection) -> int | None:
        undelivered = self._table.undelivered
        missing = [i for i in selection.ids if i not in undelivered]
        return self._supervisor.envs[missing[len(missing) // 2]].host_id if missing else None

    def some(
        self,
        policy: GatherPolicy,
        *,
        deadline: float = math.inf,
        exactly: bool = False,
        as_arrays: bool = False,
        after: int | None = None,
    ) -> HandedOut | None:
        """Wait for as many outstanding timesteps as the policy wants; take all that have arrived.

        Goes on until one of them is not an episode's end, so that there is something to step next;
        then waits for stragglers.

        Args:
            policy: how many to wait for, and how long for stragglers.
            deadline: return what has arrived at this moment.
            exactly: whether to be content with ends of episodes, too.
            as_arrays: as for the method `exactly`.
            after: take a single one, as `one` does; None: all.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        supervisor, submitter = self._supervisor, self._supervisor.submitter
        posts = submitter.posts
        outstanding = supervisor.statistics.outstanding
        if not outstanding:
            raise NothingReadyError(
                "nothing is outstanding: send actions first, with step(actions) or send(actions)"
                + ("" if supervisor.table.ready_ids() else _NONE_READY)
            )
        is_limited = deadline != math.inf  # and may have passed before anybody looks
        if not posts or is_limited or supervisor.table.any_repaired:
            self._engine.collect()
        if is_limited and supervisor.table.some_at_a_time:  # which have to be waited for
            deadline = max(deadline, self._engine.now() + _A_MOMENT_S)
        if posts:
            latest = submitter.latest(outstanding)
            wants_all = policy.needed(outstanding) == outstanding and not is_limited
            if latest is not None and wants_all and not supervisor.table.some_at_a_time:
                return self.exactly(latest, as_arrays=as_arrays)
            submitter.have_all_ring()
        while True:
            arrived = self._some_ids(policy, outstanding, deadline, exactly=exactly)
            if after is not None and arrived:
                arrived = [next((i for i in arrived if i > after), arrived[0])]
            selection = self._supervisor.selections.of(arrived)
            if supervisor.repair.urgent or selection is None:
                if not is_limited:
                    self._refuse_to_wait(arrived)
                return None
            collector = self._collector
            taken = collector.take_arrays(selection) if as_arrays else collector.take(selection)
            if taken is not None:
                return taken
            self._apply_alone()

    def one(self, after: int) -> HandedOut | None:
        """Wait for an outstanding timestep, and take one.

        Args:
            after: take, of those that have arrived, the next one after this env_id, in turn.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        return self.some(_ONE, exactly=True, after=after)

    def _some_ids(
        self, policy: GatherPolicy, outstanding: int, deadline: float, *, exactly: bool
    ) -> list[int]:
        collector, repair, engine = self._collector, self._supervisor.repair, self._engine
        needed, may_go_on = policy.needed(outstanding), self._table.may_go_on
        arrived: list[int] = []

        def satisfied() -> bool:
            arrived[:] = collector.arrived_ids()
            if len(arrived) < needed:
                return repair.urgent or not may_go_on(arrived)
            return (
                repair.urgent
                or exactly
                or len(arrived) == outstanding
                or collector.any_goes_on(arrived)
                or not may_go_on(arrived)
            )

        def complete() -> bool:
            arrived[:] = collector.arrived_ids()
            return len(arrived) == outstanding

        submitter = self._supervisor.submitter
        packed = submitter.posts and submitter.any_shared and needed < outstanding
        look_every_s = _LOOK_EVERY_S if packed else math.inf
        satisfying = (
            not self._table.awaits_reset
            and engine.see_to(satisfied, look_every_s, sleeps=deadline == math.inf)
        ) or engine.wait_until(
            satisfied, deadline=deadline, look_every_s=look_every_s, doing="step"
        )
        if satisfying and policy.step_wait_timeout_s > 0.0:
            until = min(deadline, engine.now() + policy.step_wait_timeout_s)
            engine.wait_until(complete, deadline=until, look_every_s=look_every_s, doing="step")
        return arrived

    def _refuse_to_wait(self, arrived: list[int]) -> None:
        """Refuse to wait for timesteps that do not come before more actions are sent.

        Raises:
            NothingReadyError: nothing comes before that.
        """
        table, repair = self._table, self._supervisor.repair
        if arrived or not table.some_at_a_time or repair.urgent or table.may_go_on(()):
            return
        raise NothingReadyError(
            f"envs {table.owed_ids()} have actions under way, but their pool gives nothing "
            f"before {table.needed_under_way()} of its envs are (batch_size): send actions to "
            "more of them"
        )

    def _apply_alone(self) -> None:
        self._engine.collect()  # what its host has sent before, for other envs, too
        self._engine.uninterrupted(self._supervisor.apply_alone)
