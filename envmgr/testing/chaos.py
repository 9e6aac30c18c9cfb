"""The saboteur: injures random workers of a manager while it runs, and records what happens.

    env_fn = vulnerable([make_env] * 8)
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        saboteur = Saboteur(manager, rate_hz=20.0, kinds=("kill", "hang"), seed=0)
        while ...:
            timesteps = manager.step(...)
            saboteur.tick()      # or `with saboteur:` around the loop, for a thread of its own
    print(saboteur.summary())

`envmgr.testing.injuries` says how workers are hurt.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import Self

from envmgr.errors import ConfigError
from envmgr.interruptible import InterruptibleEvent, join_thread, start_thread
from envmgr.testing.injuries import AT_ONCE, refuse_kinds, send_signal, signal_of
from envmgr.types import Clock, monotonic


@dataclass
class Injury:
    """One injury of one worker. Times are by the saboteur's clock, which is the manager's.

    Attributes:
        kind: one of `KINDS`.
        pid: the pid of the worker.
        env_ids: the envs that the worker served.
        generations: how often each of these envs had been renewed.
        time_s: when the worker was hurt.
        failed_s: when the manager saw one of these envs fail; None if it has not.
        ready_s: when the last of the failed envs was ready again; None if one of them is not.
        disturbed: whether the worker's replacement was hurt before that.
    """

    kind: str
    pid: int
    env_ids: tuple[int, ...]
    generations: tuple[int, ...]
    time_s: float
    failed_s: float | None = None
    ready_s: float | None = None
    disturbed: bool = False
    _awaited: set[int] = field(default_factory=set, repr=False)

    @property
    def detection_s(self) -> float | None:
        """Seconds from the injury to its detection."""
        return None if self.failed_s is None else self.failed_s - self.time_s

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the injury until all envs concerned were ready again."""
        return None if self.ready_s is None else self.ready_s - self.time_s

    def take_failed(self, env_id: int, generation: int, time_s: float) -> None:
        """Note that an env failed, if it is one of `env_ids` in the generation that was hurt."""
        if time_s < self.time_s or self._generation_of(env_id) != generation:
            return
        if self.failed_s is None:
            self.failed_s = time_s
        if self.ready_s is None:
            self._awaited.add(env_id)

    def take_ready(self, env_id: int, generation: int, time_s: float) -> None:
        """Note that an env is ready again, if this injury awaits it."""
        if env_id in self._awaited and generation > self._generation_of(env_id):
            self._awaited.discard(env_id)
            if not self._awaited:
                self.ready_s = time_s

    def _generation_of(self, env_id: int) -> int:
        try:
            return self.generations[self.env_ids.index(env_id)]
        except ValueError:
            return -1


class HasWorkers(Protocol):
    """What a saboteur needs of a manager."""

    def stats(self) -> dict[str, Any]:
        """Return `workers`, `generations` and `moments`, among others; works from any thread."""
        ...


class Saboteur:
    """A saboteur that hurts random workers of a manager, one after the other, at a given rate.

    Call `tick` once in each iteration of the loop, which costs less than a microsecond while
    nothing is due; or use the saboteur as a context manager, and a thread of its own does that.
    Which worker is hurt, and how, follows from the seed and from which workers there are. A worker
    that was hurt is not hurt again. Its replacement may be hurt as soon as it has been started, but
    until its envs are ready only in a way that ends it at once: otherwise each start could take all
    of `connect_timeout`. Processes that do not descend from this one are never touched.

    What the manager's config needs: hung and stopped workers are detected only by `step_timeout`
    and `reset_timeout`, and while they start by `connect_timeout`. `max_failures` and
    `max_failures_total` have to be large. With `retry_waiting_time: 0` envs are renewed at once,
    even after several failures in a row.

    Args:
        manager: a launched manager, of a kind with worker processes.
        rate_hz: injuries per second.
        kinds: the kinds to draw from with equal probability; a repeated one is drawn more often.
        seed: the seed of the draws.
        clock: returns monotonic seconds; the manager's clock.
        send: sends a signal to a worker, and returns whether it was alive; for tests.

    Attributes:
        injuries: all injuries so far, oldest first.
        n_skipped: how often an injury was due and there was no worker to hurt.

    Raises:
        ConfigError: a kind does not exist, or the rate is not above 0.
    """

    def __init__(
        self,
        manager: HasWorkers,
        *,
        rate_hz: float = 20.0,
        kinds: Sequence[str] = ("kill", "stop", "hang", "corrupt"),
        seed: int | None = None,
        clock: Clock = monotonic,
        send: Callable[[int, int], bool] | None = None,
    ) -> None:
        refuse_kinds(kinds)
        if not rate_hz > 0.0 or math.isinf(rate_hz):
            raise ConfigError(f"rate_hz is {rate_hz}; it should be a number above 0")
        self._manager = manager
        self._interval_s = 1.0 / rate_hz
        self._kinds = tuple(kinds)
        self._random = random.Random(seed)
        self._clock = clock
        self._send = send or send_signal
        self._due_s = clock() + self._interval_s
        self._hurt: set[int] = set()
        self._failing: set[int] = set()
        self._open: list[Injury] = []
        self._last_moment: Any = None
        self._thread: threading.Thread | None = None
        self._stopping = InterruptibleEvent()
        self._lock = threading.Lock()
        self.injuries: list[Injury] = []
        self.n_skipped = 0

    # -- injuries ---------------------------------------------------------------------------

    def tick(self) -> Injury | None:
        """Hurt a worker if it is time, and return the injury. Missed ones are not made up for."""
        now = self._clock()
        if now < self._due_s:
            return None
        self._due_s = max(self._due_s + self._interval_s, now)
        return self.injure()

    def injure(self, kind: str | None = None, env_id: int | None = None) -> Injury | None:
        """Hurt a worker now.

        Args:
            kind: how to hurt it; None draws one of the saboteur's kinds.
            env_id: hurt the worker that serves this env; None draws a worker.

        Returns:
            The injury; None if there was no such worker, or it was hurt already, or it is dead.
        """
        with self._lock:
            stats = self._manager.stats()
            self._take_moments(stats)
            kind = self._random.choice(self._kinds) if kind is None else kind
            worker = self._chosen(stats.get("workers", ()), kind, env_id)
            now = self._clock()
            if worker is None or not self._send(worker["pid"], signal_of(kind)):
                self.n_skipped += 1
                return None
            generations = stats["generations"]
            env_ids = tuple(worker["env_ids"])
            for earlier in self._open:
                earlier.disturbed |= not set(env_ids).isdisjoint(earlier.env_ids)
            injury = Injury(
                kind, worker["pid"], env_ids, tuple(generations[i] for i in env_ids), now
            )
            self._hurt.add(worker["pid"])
            self._open.append(injury)
            self.injuries.append(injury)
            return injury

    def _chosen(
        self, workers: Sequence[Mapping[str, Any]], kind: str, env_id: int | None
    ) -> Mapping[str, Any] | None:
        self._hurt.intersection_update(worker["pid"] for worker in workers)
        unhurt = [w for w in workers if w["env_ids"] and w["pid"] not in self._hurt]  # no spares
        if kind not in AT_ONCE:
            unhurt = [w for w in unhurt if self._failing.isdisjoint(w["env_ids"])]
        if env_id is not None:
            unhurt = [worker for worker in unhurt if env_id in worker["env_ids"]]
        return self._random.choice(unhurt) if unhurt else None

    # -- what came of them ------------------------------------------------------------------

    def collect(self) -> list[Injury]:
        """Read the failures and recoveries that the manager has noted; return all injuries.

        The manager keeps the last thousand of them. They are read whenever a worker is to be hurt;
        call this also at the end of a run, before the manager is closed.
        """
        with self._lock:
            self._take_moments(self._manager.stats())
        return self.injuries

    @property
    def is_settled(self) -> bool:
        """Whether all detected injuries have been recovered from, as of the last `collect`."""
        return all(injury.failed_s is None or injury.ready_s is not None for injury in self._open)

    def _take_moments(self, stats: Mapping[str, Any]) -> None:
        new = []
        for moment in reversed(stats.get("moments", ())):
            if moment is self._last_moment:
                break
            new.append(moment)
        if new:
            self._last_moment = new[0]
        for env_id, generation, event, time_s in reversed(new):
            failed = event == "failed"
            (self._failing.add if failed else self._failing.discard)(env_id)
            for injury in self._open:
                take = injury.take_failed if failed else injury.take_ready
                take(env_id, generation, time_s)
        self._open = [injury for injury in self._open if injury.ready_s is None]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return figures for each kind of injury, and for `all`, as values that JSON can hold.

        Per kind: `injuries`, `detected`, `recovered`, and `detection_s` and `recovery_s` with
        `median`, `p99` and `max` (None where there are none). Recoveries that another injury has
        disturbed are counted, but not timed.
        """
        kinds = list(dict.fromkeys(injury.kind for injury in self.injuries))
        by_kind = {kind: [i for i in self.injuries if i.kind == kind] for kind in sorted(kinds)}
        return {
            kind: _figures(injuries) for kind, injuries in {**by_kind, "all": self.injuries}.items()
        }

    # -- a thread of its own ----------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begin to hurt workers, from a thread."""
        self._due_s = self._clock() + self._interval_s
        self._stopping = InterruptibleEvent()
        self._thread = threading.Thread(target=self._run, name="envmgr-saboteur", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:  # then `__exit__` is not called
            self._stopping.set()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Hurt no more workers."""
        self._stopping.set()
        if self._thread is not None:
            join_thread(self._thread)
            self._thread = None

    def _run(self) -> None:
        while not self._stopping.wait(max(self._due_s - self._clock(), 0.0)):
            self.tick()


def _figures(injuries: Sequence[Injury]) -> dict[str, Any]:
    recoveries = (injury.recovery_s for injury in injuries if not injury.disturbed)
    return {
        "injuries": len(injuries),
        "detected": sum(injury.failed_s is not None for injury in injuries),
        "recovered": sum(injury.ready_s is not None for injury in injuries),
        "detection_s": spread([injury.detection_s for injury in injuries]),
        "recovery_s": spread(recoveries),
    }


def spread(times: Iterable[float | None]) -> dict[str, float | None]:
    """Return the median, p99 and maximum of times by nearest rank, without those that are None."""
    known = sorted(time_s for time_s in times if time_s is not None)
    if not known:
        return {"median": None, "p99": None, "max": None}
    ranks = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: known[math.ceil(q * len(known)) - 1] for name, q in ranks.items()}
