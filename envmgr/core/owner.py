"""The thread that owns an engine while envs are leased, and hands on what arrives.

From the first lease on, it takes the place of the background thread, and does everything that is
done with the transport: it alone polls, so it alone runs the code of envs where that runs inline.
Users of leased envs queue commands (`Slots`) and wake the thread; it carries the commands out, and
notifies the users when there is an answer. A call takes two thread switches, and no thread looks at
a clock meanwhile.

Public calls for batches still hold the engine's lock, and do their work in their own thread. Only
their waiting is different: they release the lock to the owner, which asks `finished` of each call
after anything has arrived, and wakes the call when that is true (`wait_beside`).

The owner waits without the lock, for the transport's own fds (`Transport.news`) and for its own
doorbell. As long as there is an owner, the block marks the trainer as asleep all the time, so that
everything that arrives is rung for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from envmgr.core.call_journal import Returning, is_run
from envmgr.core.collect import HandedOut, by_env_id
from envmgr.core.engine import CLOSED, LOOK_EVERY_S, MIN_INTERVAL_S, WARN_EVERY_S, Engine
from envmgr.core.phases import Phase
from envmgr.core.slots import Slots
from envmgr.errors import ConcurrentCallError, ManagerClosedError
from envmgr.interruptible import InterruptibleEvent, SoleThread, join_thread
from envmgr.texts import logged
from envmgr.transport.base import at_most
from envmgr.transport.process.threads import thread_name
from envmgr.transport.ready import Waker, Watch, await_any, fds_of
from envmgr.wire.block import fence

T = TypeVar("T")

_NOT_RUN_HERE = bytes((Phase.IDLE, Phase.ENDING, Phase.PAUSING))
"""Phases in which nothing is to be run inline."""

_LOOK_INLINE_S = 0.005
"""How often to look for results of pools that run inline, which no fd announces."""

_LOOK_RETURNING_S = 0.001
"""How often to look whether a call has returned, which takes it only a moment."""

_LOOK_S = 0.05
"""How often the thread looks whether it is to end, while a call has the engine."""


class CallAbandonedError(BaseException):
    """The error in a call for batches that nobody awaits any more, so that it delivers nothing.

    Like interrupts, it is not an Exception.
    """


class _Beside:
    """A call for batches that waits while the owner has the engine.

    Args:
        finished: returns whether what the call waits for has come.
        names_envs: whether it waits for envs that it names, which must not be leased meanwhile.
    """

    __slots__ = ("finished", "is_abandoned", "is_woken", "names_envs", "woken")

    def __init__(self, finished: Callable[[], bool], *, names_envs: bool) -> None:
        self.finished = finished
        self.names_envs = names_envs
        self.woken = threading.Lock()
        self.woken.acquire()
        self.is_woken = self.is_abandoned = False

    def wake(self) -> None:
        """Wake the call, so that it looks for itself."""
        if not self.is_woken:
            self.is_woken = True
            self.woken.release()


class AwaitedCall:
    """A call for batches that a coroutine awaits, while a thread makes it.

    Attributes:
        is_abandoned: whether nobody awaits the call any more.
        returned: timesteps that it has returned, until the coroutine has them; else None.
    """

    __slots__ = ("__weakref__", "is_abandoned", "returned")

    def __init__(self) -> None:
        self.is_abandoned = False
        self.returned: HandedOut | None = None


class Owner(SoleThread):
    """The owner of an engine, which is also the engine's background thread.

    Args:
        on_owed: called with the envs whose timesteps were handed out and will be once more.

    Attributes:
        dormant: always False: each call for batches wakes the thread.
        runs_envs: whether the code of envs runs in this thread.
        owed: timesteps that were handed out to nobody, and are to be owed again; see `take_back`.
    """

    dormant = False

    def __init__(
        self,
        engine: Engine,
        lock: threading.RLock,
        slots: Slots,
        on_owed: Sequence[Callable[[list[int]], None]] = (),
    ) -> None:
        # The name says whether the thread may exist when somebody forks.
        self.runs_envs = not engine.transport.works_alone
        super().__init__("envmgr-envs" if self.runs_envs else thread_name("leases"))
        self.slots = slots
        self._on_owed = on_owed
        self._engine = engine
        self._lock = lock
        self._doorbell = Waker()
        self._news = Waker()
        self._is_followed = False
        self._returned: HandedOut | None = None  # by the call for batches that ended last
        self.owed: deque[HandedOut] = deque()
        self._ending = False
        self._asleep = False
        self._beside: _Beside | None = None
        self._n_rounds = 0
        self._last_job: Callable[[], None] | None = None
        self._has_run = False
        self._has_news = True
        self._watch, self._watched = Watch(()), list[Any]()
        self._awaited: AwaitedCall | None = None  # what the thread `_maker` is at
        self._maker = 0
        # Calls that have returned to coroutines that may not have resumed yet; only that thread
        # changes this. The references are weak: a coroutine that is just dropped keeps no env from
        # being leased.
        self._untaken: deque[weakref.ref[AwaitedCall]] = deque()
        self._awaits_taking = False
        self._has_engine = InterruptibleEvent()

    def await_engine(self) -> None:
        """Wait until the thread has taken the engine over, or has ended."""
        self._has_engine.wait()

    # -- from other threads ---------------------------------------------------------------------

    def wake(self) -> None:
        """Have the thread look at what was queued for it."""
        if self._asleep:
            self._doorbell.wake()

    def arm(self) -> None:
        """Note the end of a call for batches, which may have left work or timesteps behind."""
        if self._is_followed:
            self._news.silence()  # if there are more, the next round says so again
        self._has_news = True
        returning = self._engine.supervisor.journal.returning
        self._returned = returned = None if returning is None else returning.timesteps
        awaited = self._awaited
        if returned is not None and awaited is not None and threading.get_ident() == self._maker:
            awaited.returned = returned
            untaken = self._untaken
            untaken.append(weakref.ref(awaited))
            while untaken and _returned_by(untaken[0]) is None:
                untaken.popleft()
        self.wake()

    def refuse_within_a_call(self) -> None:
        """Refuse a call that would wait for ever for this thread.

        Raises:
            ManagerClosedError: this process is a fork of the one that the thread is in.
            ConcurrentCallError: a signal handler, or the code of an env, calls from inside a call.
        """
        engine = self._engine
        if engine.in_fork:
            engine.refuse_if_closed()
        engine.let_go()

    def fileno(self) -> int:
        """Return the fd that is readable while timesteps have arrived that are to be gathered."""
        self._is_followed = self._has_news = True
        self.wake()
        return self._news.fileno()

    def stop(self) -> None:
        """Have the thread end. Called with the lock."""
        self._ending = True
        self._doorbell.wake()

    def close_transport(self, grace_s: float) -> None:
        """Have the thread close the transport, whose envs it has run, and wait for that.

        Called with the lock, after `stop`; can be called again.
        """
        if self.thread is None or self.thread is threading.current_thread():
            self._engine.transport.close(grace_s)
            return
        if self._last_job is None:
            self._last_job = lambda: self._engine.transport.close(grace_s)
            self._doorbell.wake()
        join_thread(self.thread)
        self._close()  # if the thread had ended before

    def end(self) -> None:
        """Wait for the thread, unless it makes this call itself, and release what it has."""
        if self.thread is not None and self.thread is not threading.current_thread():
            join_thread(self.thread)
        self._doorbell.close()
        self._news.close()

    # -- calls for batches ----------------------------------------------------------------------

    def have_collected(self) -> None:
        """Have the owner apply what has arrived, and wait for it, with the lock released."""
        n_rounds = self._n_rounds
        self.wait_beside(lambda: self._n_rounds > n_rounds, math.inf, math.inf, "step")

    def wait_beside(
        self, finished: Callable[[], bool], deadline: float, look_every_s: float, doing: str
    ) -> bool:
        """Wait in a call for batches; the arguments are those of `Engine.wait_until`."""
        if threading.current_thread() is self.thread:
            raise ConcurrentCallError(
                "the code of an env, or a signal handler, has made a call for batches of the "
                "manager that runs the env: it would wait for itself"
            )
        engine, clock = self._engine, self._engine.now
        began = clock()
        warn_at = began + WARN_EVERY_S
        while not engine.closing:
            if finished():
                return True
            now = clock()
            if now >= deadline:
                return False
            if now >= warn_at:
                engine.warn_of_wait(doing, now - began)
                warn_at = now + WARN_EVERY_S
            beside = _Beside(finished, names_envs=doing != "step")
            self._beside = beside  # first: `abandon` looks for it last
            awaited = self._awaited
            is_left = awaited is not None and awaited.is_abandoned
            if is_left and threading.get_ident() == self._maker:
                self._beside = None
                raise CallAbandonedError
            self._wait_unlocked(beside, min(deadline, warn_at, now + look_every_s) - now)
        raise ManagerClosedError("the manager was closed by another thread, or by a signal handler")

    def _wait_unlocked(self, beside: _Beside, seconds: float) -> None:
        """Leave the lock to the owner until it wakes the caller, for at most `seconds`."""
        lock: Any = self._lock
        held = lock._release_save()
        try:
            self._has_news = True  # it may have come already
            self.wake()
            beside.woken.acquire(timeout=max(at_most(seconds), 0.0))
        finally:  # what an interrupt has left unlocked here is locked in the exit of the call
            self._beside = None
            lock._acquire_restore(held)

    def forget_beside(self) -> None:
        """Let go of a call for batches that an interrupt has ended. Called with the lock."""
        self._beside = None

    def make(self, call: Callable[[], T], awaited: AwaitedCall) -> T:
        """Make a call for batches, in the thread that makes all calls that coroutines await.

        Raises:
            CallAbandonedError: nobody awaits it any more; nothing was delivered.
        """
        self._maker, self._awaited = threading.get_ident(), awaited
        try:
            if awaited.is_abandoned:
                raise CallAbandonedError
            return call()
        finally:
            self._awaited = None

    def abandon(self, awaited: AwaitedCall) -> None:
        """Have a call stop waiting, or not begin; may be called from any thread."""
        awaited.is_abandoned = True
        beside = self._beside
        if beside is not None:
            beside.wake()  # another one just looks once more

    def taken(self, awaited: AwaitedCall) -> None:
        """Note that a coroutine has what its call has returned, so that its envs may be leased.

        It may be called from any thread.
        """
        awaited.returned = None
        if self._awaits_taking:
            self._has_news = True
            self.wake()

    def take_back(self, awaited: AwaitedCall) -> None:
        """Have envs owe again the timesteps that a call returned to nobody; from any thread.

        The next call does it, as it does after an interrupt; or, if there was another one since,
        that one, or the one after it. Nobody leases these envs before: see `_held`.
        """
        returned = awaited.returned
        if returned is not None:
            self._have_owed(returned)
            self.taken(awaited)

    def _have_owed(self, returned: HandedOut) -> None:
        """Have the next call, or the owner, make envs owe again what was returned."""
        journal = self._engine.supervisor.journal
        if self._lock.acquire(False):
            try:
                was_last = self._returned is returned
                if was_last and journal.caller is None and journal.returning is None:
                    journal.returning = Returning(returned, None)
                    return
            finally:
                self._lock.release()
        self.owed.append(returned)
        self._has_news = True
        self.wake()

    def settle_owed(self) -> None:
        """Do what `take_back` has left to be done. The engine's lock is held."""
        if self.owed:
            self._engine.uninterrupted(self._owe_again)

    def _owe_again(self) -> None:
        collector, table = self._engine.supervisor.collector, self._engine.supervisor.table
        while self.owed:
            timesteps = by_env_id(self.owed.popleft().result)
            again = [env_id for env_id in timesteps if not table.owes(env_id)]
            for on_owed in self._on_owed:
                on_owed(again)
            collector.owe(timesteps)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._take_over():
                self._serve()
        finally:
            self._end()

    def _serve(self) -> None:
        """Do the work that there is, and sleep in between, until the engine is closed."""
        while not self._ending:
            if not self._acquire():
                break
            again, seconds = True, 0.0
            try:
                if not self._ending:
                    again, seconds = self._round()
            except Exception as error:  # a defect of ours must not vanish with the thread
                logged(logging.ERROR, "the owner of an engine failed", exc_info=error)
                if not isinstance(error, MemoryError):  # then it is done once more in a moment
                    self._engine.supervisor.repair.raise_later(error)
                again, seconds = False, LOOK_EVERY_S
            except BaseException:  # of the code of an env that runs here: its host counts as dead
                again, seconds = True, 0.0
            finally:
                self._lock.release()
            self.slots.notify_all()
            if not again:
                self._sleep(seconds)

    def _acquire(self) -> bool:
        if self._lock.acquire(False):
            return True
        while not self._lock.acquire(timeout=_LOOK_S):
            if self._ending:
                return False
        return True

    def _take_over(self) -> bool:
        """Take the engine over once no call is under way; return False if it ends before that."""
        while not self._lock.acquire(timeout=_LOOK_S):
            if self._engine.closing:
                return False
        try:
            if self._engine.closing:
                return False
            self._engine.supervisor.journal.finish()
            before = self._engine.hand_over(self)
            sleeping = self._engine.supervisor.submitter.sleeping
            if sleeping is not None:
                sleeping[-1] = 1
                fence()
        finally:
            self._lock.release()
        self._has_engine.set()
        if before is not None:
            before.stop()
            before.end()
        return True

    def _round(self) -> tuple[bool, float]:
        """Do all that can be done now.

        Returns:
            Whether there is more to do at once; and if not, for how many seconds there is nothing.
        """
        engine, slots = self._engine, self.slots
        supervisor, transport = engine.supervisor, engine.transport
        supervisor.journal.finish()  # what an interrupt may have left
        slots.obey()
        # The order matters: envs of a call that has returned by now are held, and timesteps of envs
        # that are held no more are owed.
        is_returning = slots.has_waiting and self._is_returning()
        held = self._held()
        self.settle_owed()
        limits, beside = supervisor.hosts.limits, self._beside
        now = limits.clock()
        is_full = self._has_news or self.runs_envs or limits.earliest <= now
        if is_full:
            self._has_news = False  # first: `arm` says that there is more
            engine.collect_as_owner()
            if engine.closing:
                return True, 0.0
            supervisor.submitter.have_all_ring()
        may_lease = not is_returning and (beside is None or not beside.names_envs)
        slots.serve(may_lease=may_lease, held=held)
        if is_full:
            self._n_rounds += 1
            if beside is not None and not beside.is_woken and self._is_finished(beside):
                beside.wake()
            if self._is_followed and supervisor.collector.arrived_ids():
                self._news.wake()
        if transport.arrivals or transport.needs_attention or slots.has_commands:
            self._has_news = True
            return True, 0.0
        until, seconds = min(limits.earliest, slots.until), math.inf
        if until != math.inf:
            seconds = max(until - now, 0.0)
        if is_returning:
            seconds = min(seconds, _LOOK_RETURNING_S)
        if self.runs_envs and supervisor.table.phases.column.translate(None, _NOT_RUN_HERE):
            is_new, self._has_run = not self._has_run, True
            return is_new, min(seconds, _LOOK_INLINE_S)  # of a pool, results may come by and by
        self._has_run = False
        return False, min(seconds, MIN_INTERVAL_S) if transport.has_unsent else seconds

    def _held(self) -> frozenset[int]:
        """Return envs whose timesteps a call has returned to a coroutine that has not resumed yet.

        If the coroutine is cancelled at this moment, the envs owe these timesteps again; so nobody
        may lease the envs before it has resumed.
        """
        self._awaits_taking = self.slots.has_waiting  # first: `taken` looks at it last
        if not self._awaits_taking:
            return frozenset()
        returned = filter(None, map(_returned_by, self._untaken.copy()))
        return frozenset(i for each in returned for i in by_env_id(each.result))

    def _is_returning(self) -> bool:
        """Return whether a call for batches is over, but has not returned yet.

        If an interrupt comes at this moment, the envs of the call owe their timesteps again; so
        nobody may lease them before the call has returned. If a call was interrupted like this, it
        is made up for here, since there may never be another call to do it.
        """
        journal = self._engine.supervisor.journal
        returning = journal.returning
        if returning is None:
            return False
        if is_run(journal.caller) or is_run(returning.caller):
            return True
        self._engine.recover()
        return False

    def _is_finished(self, beside: _Beside) -> bool:
        try:
            return beside.finished()
        except Exception:  # who asks finds out what it is
            return True

    def _sleep(self, seconds: float) -> None:
        """Wait for something to do, without holding the engine's lock."""
        self._asleep = True
        if self._has_news or self._ending or self.slots.has_commands:
            self._asleep = False
            return
        try:
            news, doorbell = self._engine.transport.news(), self._doorbell.fileno()
            if news != self._watched or not self._watch.fds:
                self._watch, self._watched = Watch([doorbell, *fds_of(news)]), news
            ready = self._watch.ready(None if seconds == math.inf else seconds)
            if doorbell in ready:
                self._doorbell.silence()
            if ready != [doorbell]:  # something else; or nothing, at a time limit
                self._has_news = True
        except (OSError, ValueError):  # an fd that `close` has just closed
            pass
        self._asleep = False

    def _end(self) -> None:
        """Answer everybody who waits, and close what this thread has to close."""
        self._asleep = False
        self._has_engine.set()
        with contextlib.suppress(Exception):
            self.slots.shut(ManagerClosedError(CLOSED))
            self.slots.notify_all()
        beside = self._beside
        if beside is not None:
            beside.wake()
        if self.runs_envs:
            while self._engine.closing and self._last_job is None and not self._engine.has_ended:
                await_any([self._doorbell], _LOOK_S)
                self._doorbell.silence()
            self._close()

    def _close(self) -> None:
        job, self._last_job = self._last_job, _nothing
        if job is not None:
            job()


def _returned_by(call: weakref.ref[AwaitedCall]) -> HandedOut | None:
    """Return timesteps that the coroutine of a call may not have yet, if there are any."""
    awaited = call()
    return None if awaited is None else awaited.returned


def _nothing() -> None:
    """Do nothing: the last job is done."""
