"""What is counted and noted of a run: counters since launch, and the events of a timeline."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from envmgr.core.call_journal import CallJournal
from envmgr.core.phases import Phase
from envmgr.core.table import ManagedEnv
from envmgr.errors import EnvFailure
from envmgr.types import Clock
from envmgr.wire.block import Block
from envmgr.wire.timeline import Done, noted

_KEPT_FAILURES = 100
_KEPT_MOMENTS = 1000


class Moment(NamedTuple):
    """When an env failed, or was ready again after failures.

    Attributes:
        env_id: which env.
        generation: how often it had been renewed by then.
        event: "failed" or "ready".
        time_s: on the monotonic clock.
    """

    env_id: int
    generation: int
    event: str
    time_s: float


@dataclass
class SlotCounts:
    """What is counted of the steps of leased envs; only the thread that owns the engine changes it.

    Attributes:
        actions: actions accepted.
        timesteps: timesteps handed on, the abnormal ones included.
        cancelled: accepted actions whose timestep nobody awaited.
        leases: leases begun.
    """

    actions: int = 0
    timesteps: int = 0
    cancelled: int = 0
    leases: int = 0


@dataclass
class Statistics:
    """What has happened since launch.

    Attributes:
        num_workers: hosts that share the envs.
        actions: actions accepted.
        timesteps: timesteps delivered, the abnormal ones included.
        abnormal: abnormal timesteps delivered or still to be delivered.
        cancelled: accepted actions whose timestep was discarded by `reset` or `close`.
        episodes: episodes that ended, abnormal ones not counted.
        reset_retries: attempts at resets that failed and were repeated.
        renewals: envs that were renewed.
        recycled: workers replaced at an episode's end because they reached a limit.
        has_generations: whether an env may be of another generation than the first.
        resumed: envs that have gone on where they were saved last, after their host was lost.
        swaps: how often a spare has taken the place of another env.
        spare_failures: failures of spares, which are not among those of the envs.
        dropped_replies: late or foreign replies that were dropped.
        failures_by_kind: failures by the name of their class.
        failures_by_env: failures by env_id.
        latest_failures: the latest failures.
        moments: the latest failures and recoveries; an env that lost its host by a neighbour's
            failure counts as failed, too.
        failing: envs that have failed and are not ready again.
        of_slots: what is counted of leased envs; not in `actions`, `timesteps` and `cancelled`,
            which are those of calls for batches.
        envs: the envs, each of which counts its own resets.
        journal: knows which timesteps are counted as delivered but have not been delivered yet.
        log: called with each failure, those of spares too; None if there is no log.
    """

    num_workers: int = 0
    actions: int = 0
    timesteps: int = 0
    abnormal: int = 0
    cancelled: int = 0
    episodes: int = 0
    reset_retries: int = 0
    renewals: int = 0
    recycled: int = 0
    has_generations: bool = False
    resumed: int = 0
    swaps: int = 0
    spare_failures: int = 0
    dropped_replies: int = 0
    failures_by_kind: Counter[str] = field(default_factory=Counter)
    failures_by_env: Counter[int] = field(default_factory=Counter)
    latest_failures: deque[EnvFailure] = field(default_factory=lambda: deque(maxlen=_KEPT_FAILURES))
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_KEPT_MOMENTS))
    failing: set[int] = field(default_factory=set)
    of_slots: SlotCounts = field(default_factory=SlotCounts)
    envs: Sequence[ManagedEnv] = ()
    journal: CallJournal = field(default_factory=CallJournal)
    log: Callable[[EnvFailure], None] | None = None

    @property
    def outstanding(self) -> int:
        """Actions whose timestep was neither delivered nor cancelled."""
        return self.actions - self.timesteps - self.cancelled

    @property
    def resets(self) -> int:
        """Resets that succeeded."""
        return sum(env.episode for env in self.envs)

    def count_failure(self, failure: EnvFailure) -> None:
        """Count a failure."""
        self.failures_by_kind[type(failure).__name__] += 1
        self.failures_by_env[failure.env_id] += 1
        self._note(failure)

    def count_spare_failure(self, failure: EnvFailure) -> None:
        """Count a failure of a spare."""
        self.spare_failures += 1
        self._note(failure)

    def _note(self, failure: EnvFailure) -> None:
        self.latest_failures.append(failure)
        if self.log is not None:
            with suppress(Exception):  # as in `texts.logged`: the repair goes on
                self.log(failure)

    def note_failed(self, env_id: int, generation: int, time_s: float) -> None:
        """Note when an env has failed, or has lost its host."""
        self.failing.add(env_id)
        self.moments.append(Moment(env_id, generation, "failed", time_s))

    def note_ready(self, env_id: int, generation: int, time_s: float) -> None:
        """Note when an env is ready again, if it has failed."""
        if env_id in self.failing:
            self.failing.discard(env_id)
            self.moments.append(Moment(env_id, generation, "ready", time_s))

    def accounts(self) -> dict[str, int]:
        """Return what has become of all actions, as it was at one moment; from any thread.

        These figures only grow. So if two looks at all of them find the same, that was true between
        the looks, whatever other threads did meanwhile.
        """
        before, slots = None, self.of_slots
        while before != (
            found := (
                self.cancelled + slots.cancelled,
                self._delivered() + slots.timesteps,
                self.actions + slots.actions,
            )
        ):
            before = found
        cancelled, delivered, actions = found
        return {
            "actions": actions,
            "timesteps": delivered,
            "cancelled": cancelled,
            "outstanding": actions - delivered - cancelled,
        }

    def _delivered(self) -> int:
        """Return how many timesteps have been returned to callers, at a moment during this call."""
        while True:
            returning, counted = self.journal.returning, self.timesteps
            if returning is self.journal.returning:
                return counted if returning is None else int(returning.timesteps.n_before)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values; from any thread, also while failures are counted."""
        latest = tuple(self.latest_failures)  # in one go: a deque may not change while it is read
        return {
            "num_workers": self.num_workers,
            **self.accounts(),
            "abnormal": self.abnormal,
            "episodes": self.episodes,
            "resets": self.resets,
            "reset_retries": self.reset_retries,
            "renewals": self.renewals,
            "recycled": self.recycled,
            "resumed": self.resumed,
            "swaps": self.swaps,
            "leases": self.of_slots.leases,
            "spare_failures": self.spare_failures,
            "dropped_replies": self.dropped_replies,
            "failures": sum(self.failures_by_kind.values()),
            "failures_by_kind": dict(self.failures_by_kind),
            "failures_by_env": dict(self.failures_by_env),
            "latest_failures": [str(failure) for failure in latest],
        }


_NOTED = frozenset((Phase.STARTING, Phase.ENDING, Phase.PAUSING, Phase.CALLING))
"""Phases that are noted here, because hosts do not note them themselves."""


class Notes(NamedTuple):
    """All that was noted of a launch.

    Attributes:
        env_num: how many envs there are; ids from this number on are those of spares.
        calls: name, begin and end of each public call.
        phases: (env_id, what its host was doing, begin, end).
        done: what each host has done.
    """

    env_num: int
    calls: Sequence[tuple[str, float, float]]
    phases: Sequence[tuple[int, str, float, float]]
    moments: Sequence[Moment]
    done: Sequence[Sequence[Done]]


class Tracer:
    """A recorder of the newest events on the trainer's side.

    Args:
        clock: monotonic seconds.
        events: how many events of each kind are kept.
    """

    def __init__(self, clock: Clock, events: int) -> None:
        self.clock = clock
        self.calls: deque[tuple[CodeType, float, float]] = deque(maxlen=events)
        self._phases: deque[tuple[int, str, float, float]] = deque(maxlen=events)
        self._since: dict[int, tuple[Phase, float]] = {}

    def changed(self, env_id: int, phase: Phase) -> None:
        """Note what the host of an env is doing from now on."""
        now = self.clock()
        before = self._since.get(env_id)
        if before is not None and before[0] is not phase:
            self._phases.append((env_id, before[0].label, before[1], now))
            del self._since[env_id]
        if phase in _NOTED:
            self._since.setdefault(env_id, (phase, now))

    def notes(self, env_num: int, block: Block | None, moments: Iterable[Moment]) -> Notes:
        """Return what was noted.

        Args:
            env_num: how many envs there are; ids from this number on are those of spares.
            block: where workers note what they have done; None if they do not.
            moments: failures, and recoveries.
        """
        now = self.clock()
        open_now = [(i, phase.label, began, now) for i, (phase, began) in self._since.items()]
        done: list[list[Done]] = []
        if block is not None:
            counts = block.n_events.tolist()
            done = [noted(ring.copy(), n) for ring, n in zip(block.events, counts, strict=True)]
        return Notes(
            env_num,
            [(code.co_name, began, ended) for code, began, ended in list(self.calls)],
            [*self._phases, *open_now],
            list(moments),
            done,
        )
