"""Collectors as the subject of interrupts: every step of every env is in one place, once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from envmgr import create_env_manager
from envmgr.collect import (
    Collector,
    EpisodeCollector,
    RolloutBuffer,
    RolloutCollector,
    StepCollector,
    Trajectory,
)
from tests.faults.attacks import SIGNALS
from tests.faults.interrupted_adapters import Counting, N

N_STEPS = 4
"""Of a rollout: with episodes of three steps it ends in the midst of them."""


class Numbering:
    """Gives each action a number of its own, for dicts and for batches."""

    def __init__(self) -> None:
        self._latest = 0

    def __call__(self, obs: Any) -> Any:
        """Return actions."""
        first = self._latest + 1
        self._latest += len(obs)
        if isinstance(obs, Mapping):
            return {env_id: first + k for k, env_id in enumerate(obs)}
        return np.arange(first, first + len(obs))


class Collecting:
    """A collector and its account: see `attacks.Subject`.

    Args:
        collector: which: a key of `COLLECTORS`.
        config: of the manager.
        seed: of what comes after each interrupt.
    """

    signals = SIGNALS[:2]
    package = "collect"

    def __init__(self, collector: str, config: Mapping[str, Any], seed: int = 0) -> None:
        self._collector = collector
        self._inline = config["type"] == "base"
        self._rng = random.Random(seed)
        self.abnormal = 0
        self.manager = create_env_manager({"max_failures": 10**6, **config}, env_fn=[Counting] * N)
        self.manager.launch()
        self._known: list[float | None] = [0.0] * N
        self._lost = False
        self.collector = COLLECTORS[collector](self.manager, Numbering())

    @property
    def names(self) -> list[str]:
        """The calls."""
        names = ["collect", "collect again"]
        if isinstance(self.collector, RolloutCollector):
            return [*names, "reset"]
        return [*names, "iterate"]

    def _collect(self) -> Any:
        if isinstance(self.collector, RolloutCollector):
            return self.collector.collect()
        if isinstance(self.collector, Collector):
            return self.collector.collect(steps=5)
        return self.collector.collect(2 if isinstance(self.collector, EpisodeCollector) else 5)

    def _iterate(self) -> None:
        for _ in self.collector.iterate(steps=4):
            pass

    # -- the account ----------------------------------------------------------------------------

    def _take(self, result: Any) -> None:
        """Check what a collection has returned."""
        if isinstance(result, RolloutBuffer):
            self._take_rollout(result)
        elif isinstance(self.collector, Collector):
            self._check_records()
        else:
            for one in result:
                self._take_trajectory(one)

    def _take_trajectory(self, one: Trajectory) -> None:
        for obs, action, after in zip(one.obs, one.actions, one.next_obs, strict=True):
            self._take_step(one.env_id, obs, action, after)
        if one.abnormal:
            self._fail(one.env_id)

    def _take_step(self, env_id: int, obs: Any, action: float, after: Any) -> None:
        known = self._known[env_id]
        is_known = known is None or obs[2] == known or (self._inline and obs[2] == 0)
        assert is_known, f"env {env_id}: a step after {obs[2]:g} others, {known} are known"
        assert after[0] == action, f"env {env_id}: {after} after the action {action}"
        assert after[2] == obs[2] + 1, f"env {env_id}: {after} after {obs}"
        self._known[env_id] = after[2]

    def _fail(self, env_id: int) -> None:
        assert self._inline, f"env {env_id} has failed"
        self.abnormal += 1
        self._known[env_id] = None

    def _take_rollout(self, rollout: RolloutBuffer) -> None:
        ends = zip(rollout.terminal_steps.tolist(), rollout.terminal_env_ids.tolist(), strict=True)
        final = dict(zip(ends, rollout.terminal_obs, strict=True))
        assert rollout.is_complete
        for env_id in range(N):
            assert rollout.lengths[env_id] == N_STEPS
            for t in range(N_STEPS):
                if rollout.abnormal[t, env_id]:
                    self._fail(env_id)
                    continue
                after = rollout.last_obs if t + 1 == N_STEPS else rollout.obs[t + 1]
                obs, action = rollout.obs[t, env_id], rollout.actions[t, env_id]
                self._take_step(env_id, obs, action, final.get((t, env_id), after[env_id]))

    def _check_records(self) -> None:
        collector, statistics = self.collector, self.collector.statistics
        lengths = sum(record.length for record in collector.episodes)
        assert len(collector.episodes) == statistics.n_ended
        assert statistics.steps == lengths + sum(collector.unfinished.values())
        stats = self.manager.stats()
        assert statistics.steps == stats["timesteps"], "the manager has delivered others"
        if not self._inline:
            assert statistics.steps == sum(self.manager.get_attr("ever"))

    # -- as the subject of attacks --------------------------------------------------------------

    def prepare(self, name: str) -> None:
        """Have all be as a call wants it."""
        if name != "collect":
            self._take(self._collect())

    def call(self, name: str) -> Any:
        """Make a call."""
        if name == "iterate":
            return self._iterate()
        return self.collector.reset() if name == "reset" else self._collect()

    def settle(
        self, name: str, results: list[Any], raised: BaseException | None, *, is_past: bool
    ) -> None:
        """Check what has to hold after a call, and go on."""
        if name == "reset":
            self.collector.reset()
            self._known = [None] * N  # it drops what was under way
        elif name.startswith("collect") and results:
            self._take(results[0])
        elif is_past:  # it has returned what is not known here
            self._known = [None] * N
        if self._rng.random() < 0.3 and hasattr(self.collector, "iterate"):
            self._iterate()
        for _ in range(2):
            self._take(self._collect())
        assert not self.manager.stats()["outstanding"]

    def close(self) -> None:
        """Close the manager."""
        self.manager.close()


COLLECTORS: dict[str, Any] = {
    "Collector": Collector,
    "StepCollector": StepCollector,
    "EpisodeCollector": EpisodeCollector,
    "RolloutCollector": lambda manager, policy: RolloutCollector(manager, policy, n_steps=N_STEPS),
}
"""The collectors of `envmgr.collect`."""
