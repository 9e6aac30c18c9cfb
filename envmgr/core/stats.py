"""Counters of what has happened since launch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envmgr.core.delivery import Delivery
from envmgr.core.slots import EnvSlot
from envmgr.errors import EnvFailure

_KEPT_FAILURES = 100
_KEPT_MOMENTS = 1000


class Moment(NamedTuple):
    """When an env failed, or was ready again after failures.

    Attributes:
        env_id: which.
        generation: how often it had been renewed then.
        event: "failed" or "ready".
        time_s: on the monotonic clock.
    """

    env_id: int
    generation: int
    event: str
    time_s: float


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
        has_generations: an env may be of another generation than the first.
        resumed: envs that have gone on where they were saved last, after their host was lost.
        swaps: how often a spare has taken the place of another env.
        spare_failures: failures of spares, which are not among those of the envs.
        dropped_replies: late or foreign replies that were dropped.
        failures_by_kind: failures by the name of their class.
        failures_by_env: failures by env_id.
        latest_failures: the latest of them.
        moments: the latest failures and recoveries; those that lost their host by a neighbour's
            failure fail, too.
        failing: envs that have failed and are not ready again.
        slots: of the envs, each of which counts its own resets.
        delivery: what is counted as delivered, but has not been yet.
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
    slots: Sequence[EnvSlot] = ()
    delivery: Delivery = field(default_factory=Delivery)

    @property
    def outstanding(self) -> int:
        """Actions whose timestep was neither delivered nor cancelled."""
        return self.actions - self.timesteps - self.cancelled

    @property
    def resets(self) -> int:
        """Resets that succeeded."""
        return sum(slot.episode for slot in self.slots)

    def count_failure(self, failure: EnvFailure) -> None:
        """Count a failure."""
        self.failures_by_kind[type(failure).__name__] += 1
        self.failures_by_env[failure.env_id] += 1
        self.latest_failures.append(failure)

    def count_spare_failure(self, failure: EnvFailure) -> None:
        """Count a failure of a spare."""
        self.spare_failures += 1
        self.latest_failures.append(failure)

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

        These figures only grow. So what is the same in two looks at all of them was true between
        the looks, whatever other threads did meanwhile.
        """
        before = None
        while before != (found := (self.cancelled, self._delivered(), self.actions)):
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
            hand, counted = self.delivery.in_hand, self.timesteps
            if hand is self.delivery.in_hand:
                return counted if hand is None else hand.n_before

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
            "spare_failures": self.spare_failures,
            "dropped_replies": self.dropped_replies,
            "failures": sum(self.failures_by_kind.values()),
            "failures_by_kind": dict(self.failures_by_kind),
            "failures_by_env": dict(self.failures_by_env),
            "latest_failures": [str(failure) for failure in latest],
        }
