"""Rollouts from real managers: the same in every kind, whatever fails, and whatever interrupts."""

from __future__ import annotations

import random
import signal
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr import create_env_manager, make
from envmgr.collect import PolicyStep, RolloutBuffer, RolloutCollector

N_ENVS, N_STEPS = 3, 50


class Counting(gymnasium.Env[Any, Any]):
    """Its observation is how many steps it has ever taken, and how many in this episode."""

    observation_space = Dict({"ever": Box(0, 1e9, (), np.float64), "now": Discrete(100)})
    action_space = Discrete(10**6)

    def __init__(self, fails_at: float = np.inf) -> None:
        self._ever = self._now = 0
        self._fails_at = fails_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._now = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert action == self._ever, "the action for another observation"
        self._ever += 1
        self._now += 1
        if self._ever == self._fails_at:
            raise RuntimeError("scripted")
        return self._obs(), float(self._ever), False, self._now == 7, {}

    def _obs(self) -> Any:
        return {"ever": np.array(self._ever, np.float64), "now": np.int64(self._now)}


class Agent:
    """Acts on what it sees, and counts."""

    def initial_state(self, n: int) -> Any:
        return np.zeros(n, np.int64)

    def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
        ever = obs["ever"] if isinstance(obs, dict) else obs[:, 2] > 0
        return PolicyStep(ever.astype(np.int64), {"value": self.value(obs, state)}, state + 1)

    def value(self, obs: Any, state: Any) -> Any:
        return state * 0.5


def columns_of(rollout: RolloutBuffer) -> list[Any]:
    found = [rollout.obs, rollout.actions, rollout.rewards, rollout.truncated, rollout.states]
    return [*map(np.copy, found), *rollout.gae(gamma=0.9)]


def test_every_kind_gives_the_same_rollouts() -> None:
    expected: list[Any] = []
    for kind, cfg in (
        ("base", {}),
        ("subprocess", {"num_workers": 1, "copy_on_get": "until_send"}),
        ("async_subprocess", {}),
    ):
        with make("CartPole-v1", env_num=N_ENVS, type=kind, seed=7, **cfg) as manager:
            collector = RolloutCollector(manager, Agent(), n_steps=N_STEPS)
            for k in range(2):
                columns = columns_of(collector.collect())
                expected = [*expected, columns] if kind == "base" else expected
                for column, same in zip(columns, expected[k], strict=True):
                    np.testing.assert_array_equal(column, same)
            assert manager.stats()["timesteps"] == collector.statistics.steps
            assert collector.statistics.episodes == manager.stats()["episodes"]


def test_a_failed_step_is_masked_and_the_others_are_as_ever() -> None:
    env_fn = [Counting, lambda: Counting(fails_at=20), Counting]
    with create_env_manager({"type": "subprocess", "num_workers": 1}, env_fn=env_fn) as manager:
        rollout = RolloutCollector(manager, Agent(), n_steps=N_STEPS).collect()
    ever, now = rollout.obs["ever"], rollout.obs["now"]
    assert np.argwhere(rollout.abnormal).tolist() == [[19, 1]]
    assert rollout.truncated[19, 1]
    assert not rollout.mask[19, 1]
    assert rollout.mask.sum() == rollout.mask.size - 1
    for env_id in (0, 2):
        assert ever[:, env_id].tolist() == list(range(N_STEPS))
        assert now[:, env_id].tolist() == [t % 7 for t in range(N_STEPS)]
    assert ever[:20, 1].tolist() == list(range(20))
    assert (now[20, 1], rollout.episode_starts[20, 1]) == (0, True)
    (failed,) = [episode for episode in rollout.episodes if episode.abnormal]
    assert (failed.env_id, failed.length) == (1, 20 - 2 * 7)
    assert "RuntimeError: scripted" in str(failed.failure)
    assert len(rollout.terminal_steps) == len(rollout.episodes) == rollout.truncated.sum()


class Struck(Exception):
    """What a handler of a user's raises."""


@pytest.mark.parametrize("kind", ["subprocess", "async_subprocess"])
def test_signals_at_any_moment_lose_and_repeat_nothing(kind: str) -> None:
    rng, armed, struck = random.Random(5), [False], 0

    def strike(number: int, frame: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    seen: list[Any] = []
    try:
        with make(Counting, env_num=N_ENVS, type=kind, num_workers=1) as manager:
            collector = RolloutCollector(manager, Agent(), n_steps=4)
            for k in range(300):
                returned: list[RolloutBuffer] = []
                try:
                    armed[0] = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3 * (1 + k / 50)))
                    # In one go: what is returned is in the list, wherever the signal comes.
                    returned.extend(islice(iter(collector.collect, None), 1))
                    armed[0] = False
                except Struck:
                    struck += 1
                seen += [rollout.obs["ever"].copy() for rollout in returned]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    found = np.concatenate(seen)
    assert struck > 10
    assert len(seen) > 10
    for env_id in range(N_ENVS):
        assert found[:, env_id].tolist() == list(range(len(found)))
