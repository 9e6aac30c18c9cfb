"""The collector with real managers: every kind gives the same episodes, and loses none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import create_env_manager, make
from envmgr.collect import Collector, EpisodeRecord, RolloutCollector, StepCollector
from envmgr.errors import ConfigError
from tests.contract.envs import Do
from tests.contract.harness import INLINE, Setup, World, every_setup, over

V2 = (
    Setup("base_v2"),
    *(Setup(kind, "fork") for kind in ("subprocess_v2", "async_subprocess_v2")),
)
KINDS = ("base", "subprocess", "async_subprocess")
every_kind_and_v2 = pytest.mark.parametrize(
    "setup",
    [
        *(
            pytest.param(Setup(kind), id=kind)
            for kind in ("base", "subprocess", "async_subprocess")
        ),
        *(pytest.param(setup, id=setup.kind, marks=pytest.mark.v2) for setup in V2),
    ],
)
ENV_NUM = 3

History = dict[int, list[tuple[int, float, bool]]]


def history_of(episodes: list[EpisodeRecord]) -> History:
    """Return what each env's episodes were like, in order."""
    found: History = defaultdict(list)
    for episode in episodes:
        assert episode.nth == len(found[episode.env_id])
        assert not isinstance(episode.episode_return, list)
        found[episode.env_id].append((episode.length, episode.episode_return, episode.abnormal))
    return found


def assert_accounted(collector: Collector) -> None:
    steps = sum(e.length for e in collector.episodes) + sum(collector.unfinished.values())
    assert collector.statistics.steps == steps == collector.manager.stats()["timesteps"]


def move_or(fault: Mapping[int, Do], every: int) -> Any:
    """A policy: each env ends its episodes after a few steps, some env now and then does worse."""
    taken: dict[int, int] = defaultdict(int)

    def policy(obs: dict[int, Any]) -> dict[int, int]:
        actions = {}
        for env_id, one in obs.items():
            assert int(one[0]) == env_id, "the observation of another env"
            taken[env_id] += 1
            worse = taken[env_id] % every == 0 and env_id in fault
            ends = int(one[3]) == 2 + env_id
            actions[env_id] = int(fault[env_id]) if worse else int(Do.END) if ends else 1
        return actions

    return policy


@pytest.fixture(scope="module")
def expected() -> History:
    with make("CartPole-v1", env_num=ENV_NUM, type="base", seed=7) as manager:
        return history_of(Collector(manager).collect(steps=3000))


@every_kind_and_v2
def test_the_same_seed_gives_the_same_episodes(setup: Setup, expected: History) -> None:
    with make("CartPole-v1", env_num=ENV_NUM, type=setup.kind, seed=7) as manager:
        collector = Collector(manager)
        collector.collect(steps=500)
        collector.collect(episodes=20)
        while min(map(len, history_of(collector.episodes).values())) < 6:
            collector.collect(episodes=4)  # an env of a slow worker
        assert_accounted(collector)
        found = history_of(collector.episodes)
    for env_id in range(ENV_NUM):
        n = len(found[env_id])
        assert n > 5
        assert found[env_id] == expected[env_id][:n]


@every_setup
@pytest.mark.parametrize("fault", [Do.RAISE, Do.BAD_SHAPE], ids=lambda do: do.name)
def test_failures_leave_the_others_as_they_were(setup: Setup, fault: Do, world: World) -> None:
    policy = move_or({1: fault}, every=7)
    manager = world.make(setup, ENV_NUM, max_failures=1000, failure_window_s=0.001)
    collector = Collector(manager, policy)
    collector.collect(episodes=30)
    while not any(episode.abnormal for episode in collector.episodes):
        collector.collect(episodes=4)  # the others may be quicker, and run all of them alone
    assert_accounted(collector)
    found = history_of(collector.episodes)
    assert {env_id for env_id in found if any(bad for _, _, bad in found[env_id])} == {1}
    for env_id in (0, 2):
        lengths = [length for length, _, _ in found[env_id]]
        assert lengths == [3 + env_id] * len(lengths)
        # every step was executed, once and in order
        n_begun = sum(lengths) + collector.unfinished.get(env_id, 0)
        episode = [1] * (2 + env_id) + [Do.END]
        assert world.actions(env_id) == (episode * n_begun)[:n_begun]


@every_kind_and_v2
def test_failures_say_what_happened(setup: Setup, world: World) -> None:
    manager = world.make(setup, 2, max_failures=1000, failure_window_s=0.001)
    collector = Collector(manager, move_or({0: Do.RAISE}, every=4))
    abnormal: list[Any] = []
    while not abnormal:  # the other env may be quicker, and run the first four alone
        abnormal = [e for e in collector.collect(episodes=4) if e.abnormal]
    for episode in abnormal:
        assert episode.env_id == 0
        assert episode.failure is not None
        assert "raised" in episode.failure
        assert "scripted error in step of env 0" in episode.failure
        assert (episode.terminated, episode.truncated) == (False, True)


@over(INLINE)
def test_generations_are_those_the_episodes_began_in(setup: Setup, world: World) -> None:
    manager = world.make(
        setup, 1, retry_type="renew", max_failures=1000, failure_window_s=0.001, seed=3
    )
    collector = Collector(manager, move_or({0: Do.RAISE}, every=5))
    collector.collect(steps=20)
    found = [(e.generation, e.abnormal) for e in collector.episodes]
    assert found[:5] == [(0, False), (0, True), (1, False), (1, True), (2, False)]


@over(INLINE)
def test_rewards_of_any_form_are_summed(setup: Setup, world: World) -> None:
    rewards = [np.array([1.0]), np.float32(2.0), 3, np.array(4.0)]

    class Odd:
        observation_space = action_space = make("CartPole-v1", type="base").action_space
        n = 0

        def reset(self) -> int:
            self.n = 0
            return 0

        def step(self, action: Any) -> tuple[int, Any, bool, dict[str, Any]]:
            self.n += 1
            return 0, rewards[self.n - 1], self.n == len(rewards), {}

    manager = world.make(setup, env_fn=[Odd])
    (episode,) = Collector(manager).collect(episodes=1)
    assert episode.episode_return == 10.0
    assert (episode.terminated, episode.truncated) == (None, None)


class Wide(gymnasium.Env[Any, Any]):
    """Its observations are so many numbers, and its actions less than that."""

    def __init__(self, n: int, dtype: Any) -> None:
        self.observation_space = Box(0, 9, (n,), dtype)
        self.action_space = Discrete(n)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.full(self.observation_space.shape, 0.5, self.observation_space.dtype), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.reset()[0], 1.0, False, False, {}


def test_envs_of_different_spaces_keep_their_own() -> None:
    envs = [partial(Wide, 2, np.float32), partial(Wide, 9, np.float64)]
    cfg = {"type": "base", "same_spaces": False}
    with create_env_manager(cfg, env_fn=envs) as manager:
        found = StepCollector(manager).collect(40)
        assert [one.obs.shape[1:] for one in found] == [(2,), (9,)]
        assert [one.obs.dtype for one in found] == [np.float32, np.float64]
        assert max(found[1].actions) > 1, "random, of the env's own space"
        with pytest.raises(
            ConfigError, match=r"the observation space of env 1 is Box.*EpisodeColl"
        ):
            RolloutCollector(manager, n_steps=2)


def test_seeds_that_a_manager_was_given_by_hand_are_those_of_its_config() -> None:
    def run(seed: int | None, by_hand: int | None) -> list[Any]:
        manager = make("CartPole-v1", 2, type="base", seed=seed)
        if by_hand is not None:
            manager.seed(by_hand)
        with manager:
            records = Collector(manager).collect(steps=100)
            rollout = RolloutCollector(manager, n_steps=30).collect()
        return [(one.seed, one.length) for one in [*records, *rollout.episodes]]

    assert run(7, None) == run(None, 7)
    assert {seed for seed, _ in run(7, None)} == {7, 8}
