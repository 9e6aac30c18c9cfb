"""The engine: runs the envs of one launched manager, in the caller's thread or behind it.

One lock guards the table of envs; whoever holds it is the only writer of states. Inside a public
call the caller's thread holds it and does everything itself: a step is never handed to another
thread. While the caller is away, a background thread carries resets, retries, renewals and
deadlines on. It is armed only while such work is outstanding, tries the lock instead of waiting for
it, and has a doorbell of its own. Deaths of workers wake it at any time, also while nothing is
outstanding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from envmgr.core.collect import ArrayBatch, Collected, Collector
from envmgr.core.episodes import Episodes
from envmgr.core.failures import Repair
from envmgr.core.hosts import Hosts
from envmgr.core.journal import Journal, is_run
from envmgr.core.phases import BEHIND_THE_CALLER, Phase
from envmgr.core.replies import Answers, Arrivals, BlockReplies
from envmgr.core.resets import ExplicitResets
from envmgr.core.setup import Orientation
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics, Tracer
from envmgr.core.submit import Packer, Submitter
from envmgr.core.table import EpisodeRules, Selections
from envmgr.errors import ConcurrentCallError, ManagerClosedError, OutOfMemoryError
from envmgr.lifecycle import Event
from envmgr.policy import FailurePolicy
from envmgr.spaces import codec_of
from envmgr.transport.base import Arrival, Transport
from envmgr.transport.process.threads import BACKGROUND_THREAD
from envmgr.transport.ready import Waker
from envmgr.types import Clock, EnvTimestep
from envmgr.wire.board import Board
from envmgr.wire.messages import EnvDescription, Op

logger = logging.getLogger("envmgr")

T = TypeVar("T")


_RESETTING = Phase.RESETTING


class Supervisor:
    """The envs of one launched manager.

    Args:
        hosts: to speak to hosts.
        rules: of episodes and observations.
        policy: of failures.

    Attributes:
        record: what is known of all envs.
        states: the state of each env_id.
        slots: the details of each env_id; of spares, see `spares`.
        spares: envs that wait to take the place of others; None if there are none.
        statistics: counters since launch.
        repair: what follows failures.
        resets: begins those that users ask for.
        selections: envs that are stepped together.
        submitter: submits actions.
        collector: finds what has arrived, and hands it out.
        journal: what is under way in the public call, and what that is about to return.
        step_on: applies ordinary steps that have come by message, as `Answers` does.
    """

    def __init__(
        self,
        hosts: Hosts,
        rules: EpisodeRules,
        policy: FailurePolicy,
        journal: Journal[Collected] | None = None,
    ) -> None:
        self.hosts = hosts
        self.rules = rules
        self.record = hosts.record
        self.states = hosts.record.states
        env_num = hosts.env_num
        self.slots = hosts.slots[:env_num]
        spare_num = len(hosts.slots) - env_num
        self.journal = journal = Journal[Collected]() if journal is None else journal
        self.statistics = Statistics(
            num_workers=len(hosts.groups) - spare_num, slots=self.slots, journal=journal
        )
        self._orientation = Orientation(hosts, env_num)
        self.spares: Spares | None = None
        if spare_num:
            self.spares = Spares(
                hosts,
                self.statistics,
                self._orientation,
                rules.spare_takers or (True,) * env_num,
                in_order=rules.spares_in_order,
            )
        self.selections = selections = Selections(hosts.record)
        self._episodes = Episodes(hosts, rules, self.statistics, self.spares)
        self.submitter = Submitter(hosts, self.statistics, journal, selections)
        self.repair = Repair(
            hosts,
            policy,
            self.statistics,
            self._episodes,
            selections,
            self.spares,
            auto_reset=rules.auto_reset,
        )
        self.resets = ExplicitResets(
            hosts, self.statistics, self._episodes, self.repair, self.submitter, self.spares
        )
        answers = Answers(
            hosts,
            self.statistics,
            journal,
            self._orientation,
            self._episodes,
            self.repair,
            self.spares,
        )
        self._arrivals = Arrivals(
            hosts,
            self.statistics,
            answers,
            self._episodes,
            self.repair,
            raise_non_finite=rules.raise_non_finite,
        )
        self.step_on = answers.step_on
        self.collector = Collector(
            hosts,
            self._episodes,
            self.statistics,
            journal,
            selections,
            reset_inplace=rules.reset_inplace,
            has_spares=self.spares is not None,
        )

    @property
    def descriptions(self) -> dict[int, EnvDescription]:
        """What each env said of itself, by env_id."""
        known = self._orientation.descriptions
        return {i: known[i] for i in sorted(known) if i < len(self.slots)}

    # -- what comes -------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host; not to be interrupted."""
        self._arrivals.handle(host_id, arrival)

    def collect(self) -> bool:
        """Apply what has arrived by another way than by message, as far as that is ordinary.

        Can be interrupted anywhere, and called again.

        Returns:
            Whether there is more: `collect_rest` applies it.
        """
        arrivals, spares = self._arrivals, self.spares
        if self.submitter.packer is None and spares is None:
            return False
        if not arrivals.begin_episodes() or arrivals.have_replied:
            return True
        if spares is None or not spares.are_wanted:
            return False
        return self._waits_for_posted or not self.record.is_executing

    @property
    def _waits_for_posted(self) -> bool:
        """Whether a timestep waits for a spare, which comes when all posted steps are over."""
        return bool(self.record.held) and Phase.POSTED in self.record.phases.column

    def collect_rest(self) -> None:
        """Apply all that has arrived by another way than by message; not to be interrupted."""
        self._arrivals.collect()
        if self.spares is not None:
            if self.spares.are_wanted and self._waits_for_posted:
                self._arrivals.set_aside_posted()
            self.spares.look()

    def set_aside(self) -> None:
        """Look at the reply by itself that `Collector.take` has left; not to be interrupted."""
        env_id, self.collector.left = self.collector.left, None
        if env_id is not None:
            self._arrivals.set_aside(env_id)

    def sleep(self, *, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be woken."""
        self.submitter.sleep(soon=soon)

    def recover(self) -> None:
        """Make up for an interrupt: can be interrupted itself, and called again."""
        journal = self.journal
        journal.finish()
        self._arrivals.begin_episodes()
        if self.record.unexecuted:
            journal.uninterrupted(self.repair.answer_unexecuted)
        if journal.returning is not None:
            journal.uninterrupted(self._take_back)

    def _take_back(self) -> None:
        """Have envs owe the timesteps that were handed out by a call that has not returned."""
        journal = self.journal
        if journal.returning is not None:
            self.collector.give_back(journal.returning)
            journal.returning = None  # last: until then it says what was delivered

    # -- launch -----------------------------------------------------------------------------

    def start_hosts(self, env_ids: Iterable[int]) -> None:
        """Begin to start hosts of envs that have none yet.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        missing = [s for s in map(self.hosts.slots.__getitem__, env_ids) if s.host_id is None]
        self.hosts.start(missing)
        self.record.launched([slot.env_id for slot in missing])

    def place_observations(self, *, same_spaces: bool) -> None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Raises:
            SpaceMismatchError: they differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        block = self._orientation.place_observations(
            same_spaces=same_spaces, handed_out=self.rules.copy_on_get
        )
        if block is None:
            return
        self.hosts.share(block)
        check, (spaces, kind_of) = self.rules.check_actions, self._orientation.kinds
        codecs = [codec_of(space, strict=check == "strict") for space in spaces]
        converting = self._orientation.kinds_that_convert
        columns = [
            codec.action_columns(checked=check is not False, in_any_form=kind in converting)
            for kind, codec in enumerate(codecs)
        ]
        packs = [each for each in columns if each is not None]
        replies = BlockReplies(block, self.record.observed.places, self.record.may_begin_late)
        self._arrivals.share(replies)
        self.collector.share(block, replies)
        self.submitter.share(block, Packer(block, packs, kind_of))

    def begin_episodes(self) -> None:
        """Have every env reset for the first time; its host has said HELLO."""
        for slot in self.hosts.slots:
            self._orientation.attach(slot)  # what is repeated on later envs has been done on these
            slot.seed, slot.new_seed = slot.new_seed, None
            self._episodes.begin(slot)

    def repeat(self, env_ids: Sequence[int], op: Op, payloads: Sequence[Any]) -> None:
        """Have a request that was sent to envs repeated on every later env of these env_ids.

        One that was sent to all envs is repeated on the spares, too, if it was one for all: an env
        that was not sent what the spares were sent takes no spare.

        Args:
            env_ids: whom it was sent to.
            op: SET_ATTR or CALL.
            payloads: of each env; one and the same object, or different ones.
        """
        for env_id, payload in zip(env_ids, payloads, strict=True):
            self._orientation.repeat(env_id, op, payload)
        if len(payloads) == len(self.slots) and all(p is payloads[0] for p in payloads):
            self._orientation.repeat_on_spares(op, payloads[0])

    # -- steps ------------------------------------------------------------------------------

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        return self.record.ready_ids()

    def timesteps(self, collected: Collected) -> dict[int, EnvTimestep]:
        """Hand out what was taken, as timesteps by env_id."""
        timesteps = self.collector.timesteps(collected)
        self._go_on(collected)
        return timesteps

    def arrays(self, collected: Collected) -> ArrayBatch | None:
        """Hand out what was taken as arrays; None if that needs `timesteps`."""
        batch = self.collector.arrays(collected)
        if batch is not None:
            self._go_on(collected)
        return batch

    def _go_on(self, collected: Collected) -> None:
        """Do what follows what was handed out."""
        if _RESETTING in self.record.phases.column:
            self._arrivals.begin_episodes()
        spares = self.spares
        if collected.odd or (spares is not None and spares.are_wanted):
            self.journal.uninterrupted(self._follow_up)

    def _follow_up(self) -> None:
        collected = self.journal.returning
        if collected is not None and collected.odd:
            self.collector.follow_up(collected)
            self._arrivals.collect()  # the resets after them may be over
        if self.spares is not None:
            self.spares.relieve()

    # -- calls ------------------------------------------------------------------------------

    def forget_results(self, env_ids: Iterable[int]) -> None:
        """Let go of what came of calls."""
        for env_id in env_ids:
            self.slots[env_id].result = None

    # -- time -------------------------------------------------------------------------------

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        return self.hosts.limits.earliest

    def expire(self) -> None:
        """Act on deadlines that have passed. What had arrived before has been handled."""
        limits = self.hosts.limits
        now = limits.clock()
        for env_id in limits.late_steps(now):
            self.hosts.take_over(self.slots[env_id])
        for slot in limits.due(now):
            if not limits.is_due(slot):
                continue  # settled together with another env of its host
            if slot.phase is Phase.ENDING:
                self.hosts.end(slot.group, ask=False)
            elif slot.phase is Phase.PAUSING:
                self.repair.renewals.proceed(slot)
            else:
                self._arrivals.time_out(slot)

    def stop(self) -> None:
        """All envs are VOID from now on; what was owed is cancelled."""
        self.hosts.forget_all()
        returning = self.journal.returning
        if returning is not None and not is_run(returning.caller):  # its call did not return
            self.statistics.timesteps = returning.n_before
        self.statistics.cancelled += self.statistics.outstanding
        self.journal.forget()
        for slot in self.hosts.slots:
            self.record.happened(slot.env_id, Event.CLOSE)
            self.hosts.settle(slot)
        self.record.clear()
        self.hosts.share(None)
        self._arrivals.share(None)
        self.collector.share(None, None)
        self.submitter.detach()


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
        self._journal = engine.supervisor.journal

    def __enter__(self, depth: int = 1) -> Supervisor:  # from whose frame it is called
        engine, journal = self._engine, self._journal
        if engine.closing or engine.forks != len(FORKS):
            _refuse(engine)
        if not self._lock.acquire(False):  # a keyword costs as much again
            self._await_background()
        frame = _frame(depth)
        if journal.caller is not None:
            self._refuse_beside(journal.caller)
            engine.recover()
        returning = journal.returning
        if returning is None:
            journal.caller = frame
        else:  # of a call that did not return, or is about to
            self._refuse_beside(returning.caller)
            journal.caller = frame
            engine.recover()
        return engine.supervisor

    def _await_background(self) -> None:
        """Wait for the background thread, which has the lock; but not for another caller.

        A caller has it for a moment before it says so.
        """
        engine, lock = self._engine, self._lock
        while self._journal.caller is None:
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
            self._journal.caller = None
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


_enter, _exit = Call.__enter__, Call.__exit__
"""By their names: `super()` costs as much as the clock, and this is in every call."""


class TracedCall(Call):
    """A `Call` that is noted."""

    def __init__(
        self, engine: Engine, lock: threading.RLock, background: Background | None, tracer: Tracer
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


WARN_EVERY_S = 30.0
_SPINS = 8
_LEAST_SHARE = 16

NARROW_S = 0.005
"""How long a wait may look at nothing but its pivot."""


class Follower(Protocol):
    """Something that looks at a board, and ends with it."""

    def end(self) -> None:
        """End; can be called again."""


class Watcher(Follower, Protocol):
    """Something that keeps a board of an engine until that ends.

    Attributes:
        followers: what ends with it.
    """

    followers: list[Follower]

    @property
    def board(self) -> Board | None:
        """What it writes; None if there is none, or no more."""


class Engine:
    """Runs a supervisor.

    Args:
        supervisor: keeps the envs.
        transport: what it speaks through.
        clock: monotonic seconds.
        background: whether a background thread may run (not for envs in the caller's thread).
        spin_s: how long to watch for replies before sleeping; only where cores are free.

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
        spin_s: float = 0.0,
    ) -> None:
        self.supervisor = supervisor
        self.transport = transport
        self._clock = clock
        self._spin_s = self._most_spin_s = spin_s
        self.forks = len(FORKS)
        self.closing = False
        # Reentrant, because a signal handler may close the manager inside one of its calls.
        self._lock = threading.RLock()
        self._ended = False
        self._background = Background(self, self._lock) if background else None
        tracer, guards = supervisor.hosts.tracer, (self, self._lock, self._background)
        self.calling = Call(*guards) if tracer is None else TracedCall(*guards, tracer)
        self.watch: Watcher | None = None

    # -- public calls -----------------------------------------------------------------------

    @property
    def caller(self) -> FrameType | None:
        """The frame of the public call under way, see `Journal`."""
        return self.supervisor.journal.caller

    def collect(self) -> None:
        """Apply everything that has arrived, without waiting. The lock is held."""
        self._pump(0.0)

    def uninterrupted(self, job: Callable[[], T]) -> T:
        """Do something that must not be half done: to its end, whatever signal handlers raise."""
        return self.supervisor.journal.uninterrupted(job)

    def recover(self) -> None:
        """Make up for an interrupt: what was begun is done, and what was not delivered is kept.

        Can be interrupted itself, and called again.
        """
        self.supervisor.journal.settle()
        if not self.closing:
            self.supervisor.recover()

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
        if self.supervisor.submitter.packer is None:
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
            self.uninterrupted(supervisor.expire)

    def _apply(self) -> None:
        """Apply what has come; an arrival is taken out of their queue when that was done."""
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
            handle(*arrivals.popleft())

    def _collect(self) -> None:
        """Apply what has arrived in the block besides replies to posted steps."""
        if self.supervisor.collect():
            self.uninterrupted(self.supervisor.collect_rest)

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
        return bool(supervisor.statistics.outstanding or supervisor.record.any_behind_the_caller)

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
                self.uninterrupted(self._stop)
                if self.transport.works_alone:
                    self.uninterrupted(lambda: self.transport.close(grace_s))
                else:  # its envs are closed in the thread that they ran in
                    self.transport.close(grace_s)
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
