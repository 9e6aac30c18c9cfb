"""What tianshou relies on, of the adapter for it; see also `make test-trainers`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

import envmgr
from envmgr.errors import ConfigError, EnvCrash, EnvManagerError
from tests.contract.envs import Do, NothingTaken, SampleEnv, ScriptedGymEnv, SeedOnly, seen
from tests.contract.harness import ALL_BLOCK, INLINE, Raises, Setup, World, over
from tests.contract.trainers import adapter, rows


@pytest.fixture
def tianshou(monkeypatch: pytest.MonkeyPatch) -> Any:
    return adapter("tianshou", monkeypatch)


def factories(world: World, n: int) -> list[Any]:
    return world.factories(n, ScriptedGymEnv)


@over(INLINE, ALL_BLOCK)
def test_steps_resets_and_attributes(world: World, setup: Setup, tianshou: Any) -> None:
    env = tianshou.EnvmgrVectorEnv(factories(world, 3), num_workers=2, **setup.cfg)
    try:
        assert (len(env), env.env_num, env.is_async, env.waiting_id) == (3, 3, False, [])
        assert env.seed(5) == [[5], [6], [7]]
        assert [world.noted(i, "reset") for i in range(3)] == [[[0, {}, 5 + i]] for i in range(3)]
        obs, infos = env.reset()
        assert rows(obs, range(3)) == [[i, 0, 1, 0] for i in range(3)]
        assert infos.dtype == object
        assert [info["episode"] for info in infos] == [1, 1, 1]
        check_steps(env, world)
        check_attributes(env)
    finally:
        env.close()
    env.close()
    assert env.is_closed
    for call in (env.reset, env.render, lambda: env.step([0] * 3), lambda: env.get_env_attr("x")):
        with pytest.raises(AssertionError, match="closed"):
            call()


def check_steps(env: Any, world: World) -> None:
    actions = np.array([1.0, float(Do.END), float(Do.TRUNCATE)])  # as policies of Box give them
    obs, rewards, terminated, truncated, infos = env.step(actions)
    assert rows(obs, range(3)) == [[i, 0, 1, 1] for i in range(3)], "the terminal ones"
    assert rewards.tolist() == [1001.0, 1001001.0, 2001001.0]
    assert terminated.tolist() == [False, True, False]
    assert truncated.tolist() == [False, False, True]
    assert [(info["env_id"], info["action"]) for info in infos] == [(0, 1), (1, 10), (2, 11)]
    assert (infos.dtype, infos.shape) == (np.dtype(object), (3,))
    obs, infos = env.reset(np.array([2, 1]), seed=8, options={"a": 1})
    assert rows(obs, range(2)) == [[2, 0, 2, 0], [1, 0, 2, 0]]
    assert world.noted(2, "reset")[-1] == world.noted(1, "reset")[-1] == [2, {"a": 1}, 8]
    obs, rewards, *_, infos = env.step([3, 4], [2, 0])
    assert rows(obs, range(2)) == [[2, 0, 2, 1], [0, 0, 1, 2]], "in the order they were asked for"
    assert rewards.tolist() == [2002001.0, 1002.0]
    assert [(info["env_id"], info["action"]) for info in infos] == [(2, 3), (0, 4)]
    assert rows(env.reset(1)[0], [0]) == [[1, 0, 3, 0]]
    assert world.noted(1, "reset")[-1] == [3, {}, None], "seeds and options are used once"
    with pytest.raises(ValueError, match="actions"):
        env.step(None)
    with pytest.raises(AssertionError, match="2 actions came for 3 envs"):
        env.step([0, 0])
    with pytest.raises(TypeError, match="'mode'"):
        env.reset(mode="x")


def check_attributes(env: Any) -> None:
    assert env.action_space == [Discrete(64)] * 3
    assert env.get_env_attr("label") == ["env-0", "env-1", "env-2"]
    assert env.get_env_attr("label", id=[2, 0]) == ["env-2", "env-0"]
    env.set_env_attr("mark", [1, 2], 1)
    assert env.get_env_attr("mark") == [None, [1, 2], None]
    assert [frame[0, 0, 0] for frame in env.render()] == [0, 1, 2]


def test_some_steps_are_gathered_and_others_go_on(world: World, tianshou: Any) -> None:
    gate = world.gate
    env = tianshou.EnvmgrVectorEnv(factories(world, 3), wait_num=2, context="fork")
    env.reset()
    assert env.is_async
    with pytest.raises(AssertionError, match="no step is under way"):
        env.step(None)
    obs, *_, infos = env.step([1, int(Do.GATE), 2])
    visit = gate.await_visit(1)
    assert [info["env_id"] for info in infos] == [0, 2]
    assert rows(obs, range(2)) == [[0, 0, 0, 1], [2, 0, 0, 1]]
    assert (env.waiting_id, sorted(env.ready_id)) == ([1], [0, 2])
    for call in (lambda: env.step([0], [1]), env.reset, lambda: env.get_env_attr("label")):
        with pytest.raises(AssertionError, match=r"envs \[1\] have steps under way"):
            call()
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        env.render()
    assert rows(env.reset([0])[0], [0]) == [[0, 0, 1, 0]]
    visit.release()
    assert [info["env_id"] for info in env.step(None)[-1]] == [1]
    assert env.waiting_id == []
    env.close()


def test_after_the_timeout_what_has_come_is_returned(world: World, tianshou: Any) -> None:
    manager = world.make(ALL_BLOCK, env_fn=factories(world, 2), launch=False, auto_reset=False)
    env = envmgr.as_tianshou(manager, timeout=0.01)
    env.reset()
    visits = world.gate
    came = [info["env_id"] for info in env.step([int(Do.GATE), 1])[-1]]
    assert came == [1]
    visits.await_visit(0).release()
    assert [info["env_id"] for info in env.step(None)[-1]] == [0]


def test_failed_envs_are_truncated_and_reset_anew(world: World, tianshou: Any) -> None:
    env = tianshou.EnvmgrVectorEnv(factories(world, 2), context="fork")
    env.reset()
    env.step([1, 2])
    obs, rewards, terminated, truncated, infos = env.step([3, int(Do.KILL)])
    assert (rewards[1], terminated.tolist(), truncated.tolist()) == (0, [False] * 2, [False, True])
    assert seen(obs[1])[:5] == (1, 0, 0, 1, 2), "the last good one"
    assert infos[1]["abnormal"]
    assert infos[1]["error"].startswith("EnvCrash: ")
    assert rows(env.reset([1])[0], [0]) == [[1, 1, 0, 0]]
    env.close()


def test_failures_are_raised_for_those_who_ask_for_that(world: World, tianshou: Any) -> None:
    manager = world.make(ALL_BLOCK, env_fn=factories(world, 2), launch=False, auto_reset=False)
    env = envmgr.as_tianshou(manager, on_failure="raise")
    env.reset()
    with pytest.raises(EnvCrash, match="env 0"):
        env.step([int(Do.OS_EXIT), 1])
    env.close()


def test_after_a_failure_that_has_closed_the_manager_all_begin_anew(
    world: World, tianshou: Any
) -> None:
    manager = world.make(
        ALL_BLOCK, env_fn=factories(world, 2), launch=False, auto_reset=False, on_failure="raise"
    )
    env = envmgr.as_tianshou(manager, on_failure="raise")
    env.reset()
    with pytest.raises(EnvCrash, match="env 0"):
        env.step([int(Do.OS_EXIT), 1])
    env.reset([0])
    with pytest.raises(AssertionError, match=r"envs \[1\] have to be reset first"):
        env.step([1], [1])
    env.reset([1])
    env.step([1, 1])
    env.close()


def test_a_failure_that_has_closed_the_manager_leaves_no_steps_under_way(
    world: World, tianshou: Any
) -> None:
    manager = world.make(
        INLINE, env_fn=factories(world, 2), launch=False, auto_reset=False, on_failure="raise"
    )
    env = envmgr.as_tianshou(manager, wait_num=1)
    env.reset()
    with pytest.raises(EnvManagerError):
        env.step([int(Do.RAISE), 1])
    assert (env.waiting_id, env.ready_id) == ([], [0, 1])
    with pytest.raises(AssertionError, match="no step is under way"):
        env.step(None)
    with pytest.raises(AssertionError, match="have to be reset first"):
        env.step([1, 1])
    env.reset()
    env.step([1, 1])
    env.close()


def test_dicts_are_given_one_by_one_and_spaces_may_differ(tianshou: Any) -> None:
    def space(high: int) -> Dict:
        return Dict({"a": Box(0, high, (2,), np.float32), "b": Tuple((Discrete(3),))})

    env = tianshou.EnvmgrVectorEnv([partial(SampleEnv, space(i)) for i in (1, 2)], type="base")
    obs, _ = env.reset()
    assert (obs.dtype, obs.shape) == (np.dtype(object), (2,))
    assert obs[1]["a"].shape == (2,)
    assert isinstance(obs[1]["b"], tuple)
    assert env.observation_space == [space(1), space(2)]
    env.close()


def test_what_its_vector_env_types_pass_is_taken(world: World, tianshou: Any) -> None:
    @dataclass
    class OnEnvmgr:
        """As the page shows it, in place of a `VectorEnvType`."""

        cfg: dict[str, Any]

        def create_venv(self, factories: Any) -> Any:
            return tianshou.EnvmgrVectorEnv(factories, **self.cfg)

    for cfg, expected in (
        ({}, (True, "server")),
        ({"share_memory": True}, (True, "server")),
        ({"share_memory": True, "context": "fork"}, (True, "fork")),
        ({"share_memory": False, "context": get_context("spawn")}, (False, "spawn")),
        ({"share_memory": None, "context": None, "shared_memory": False}, (False, "server")),
    ):
        # Its EnvFactory.create_venv does these two calls.
        env = OnEnvmgr({"type": "base", **cfg}).create_venv(factories(world, 2))
        assert env.seed([7, 3]) == [[7], [3]]
        found = env.manager.cfg
        assert (found.shared_memory, found.context) == expected
        env.close()


@over(INLINE, ALL_BLOCK)
def test_envs_whose_reset_takes_less(world: World, setup: Setup, tianshou: Any) -> None:
    for cls in (SeedOnly, NothingTaken):
        env = tianshou.EnvmgrVectorEnv([cls] * 2, **setup.cfg)
        env.reset()
        for _ in range(2):
            for k in range(4):
                ended = env.step(np.array([0, 1]))[2]
                assert ended.tolist() == [k == 3] * 2
            env.reset([0, 1])
        assert env.manager.stats()["failures"] == 0
        if cls is SeedOnly:
            assert np.array_equal(env.reset(seed=5)[0], env.reset(seed=5)[0])
        else:
            with Raises(EnvManagerError, "takes no `seed`", "NothingTaken"):
                env.seed(5)
        env.close()


class OfTwoAgents(SampleEnv):
    """Gives its rewards in a list that it uses again, as tianshou's `PettingZooEnv`."""

    def __init__(self) -> None:
        super().__init__(Box(0, 1, (2,), np.float32))
        self.rewards = [0, 0]

    def step(self, action: Any) -> Any:
        obs, _, *ending = super().step(action)
        self.rewards[:] = int(action), -int(action)
        return obs, self.rewards, *ending


@over(INLINE, ALL_BLOCK)
def test_rewards_may_be_lists(world: World, setup: Setup, tianshou: Any) -> None:
    env = tianshou.EnvmgrVectorEnv([OfTwoAgents] * 2, **setup.cfg)
    env.reset()
    for actions in ([0, 1], [2, 1]):
        _, rewards, terminated, truncated, infos = env.step(np.array(actions))
        assert rewards.tolist() == [[action, -action] for action in actions]
        assert not terminated.any()
        assert not truncated.any()
        assert not any("error" in info for info in infos)
    env.close()


class Finite(SampleEnv):
    """Has data for two episodes; then its reset says so, as it is told to."""

    def __init__(self, tell: str) -> None:
        super().__init__(Box(0, 1, (2,), np.float32))
        self.tell, self.left = tell, 2

    def reset(self, **arguments: Any) -> Any:
        obs, _ = super().reset(**arguments)
        self.left -= 1
        if self.left >= 0:
            return obs, {"left": self.left}
        return (None, {}) if self.tell == "by None" else (obs, {"no_more_data": True})


def test_an_env_that_has_no_more_data_says_so_in_its_info(tianshou: Any) -> None:
    env = tianshou.EnvmgrVectorEnv([partial(Finite, "by info")] * 2, type="base")
    told = [env.reset()[1].tolist() for _ in range(3)]
    assert told == [[{"left": 1}] * 2, [{"left": 0}] * 2, [{"no_more_data": True}] * 2]
    assert env.manager.stats()["failures"] == 0
    env.close()


def test_a_reset_that_gives_none_has_failed(tianshou: Any) -> None:
    env = tianshou.EnvmgrVectorEnv([partial(Finite, "by None")], type="base")
    told = [env.reset()[1].tolist() for _ in range(3)]
    assert told == [[{"left": 1}], [{"left": 0}], [{"left": 1}]], "that of an env built anew"
    assert (env.manager.stats()["failures"], env.manager.generations) == (1, [1])
    env.close()


def test_what_does_not_fit_is_refused(tianshou: Any) -> None:
    space = Tuple((Discrete(2), Discrete(3)))
    with Raises(ConfigError, "Tuple", "FlattenObservation"):
        tianshou.EnvmgrVectorEnv([partial(SampleEnv, space)], type="base")
    for name, value in (("wait_num", 3), ("wait_num", 1.5), ("timeout", 0.0)):
        with pytest.raises(AssertionError, match=f"{name} should be"):
            tianshou.EnvmgrVectorEnv([partial(SampleEnv, space)] * 2, type="base", **{name: value})
    with Raises(ConfigError, "auto_reset: false"):
        envmgr.as_tianshou(envmgr.make("CartPole-v1", type="base"))
