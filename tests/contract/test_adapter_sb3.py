"""What Stable-Baselines3 relies on, of the adapter for it; see also `make test-trainers`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.wrappers import TimeLimit

import envmgr
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvCrash,
    EnvManagerError,
    EnvNotReadyError,
    ManagerClosedError,
    MethodAccessError,
    MissingDependencyError,
)
from tests.contract.envs import Do, NothingTaken, SampleEnv, ScriptedGymEnv, SeedOnly, seen
from tests.contract.harness import ALL_BLOCK, INLINE, Raises, Setup, World, over
from tests.contract.trainers import adapter, rows


class Wrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has a method of its own, and attributes."""

    def describe(self, *, greeting: str) -> str:
        return f"{greeting} {self.get_wrapper_attr('label')}"

    def told(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def fail(self, message: str) -> None:
        raise LookupError(message)


class Special(Wrapper):
    pass


@pytest.fixture
def sb3(monkeypatch: pytest.MonkeyPatch) -> Any:
    return adapter("sb3", monkeypatch)


def factories(world: World, n: int, cls: type = Wrapper) -> list[Any]:
    return [partial(build, world.folder, cls, i) for i in range(n)]


def build(folder: str, cls: type, env_id: int) -> Any:
    return cls(TimeLimit(ScriptedGymEnv(env_id, folder), max_episode_steps=1000))


@over(INLINE, ALL_BLOCK)
def test_steps_resets_and_calls(world: World, setup: Setup, sb3: Any) -> None:
    env = sb3.EnvmgrVecEnv(factories(world, 3), num_workers=2, **setup.cfg)
    try:
        assert (env.num_envs, env.render_mode, env.waiting) == (3, "rgb_array", False)
        assert not env.env_is_wrapped(dict, 0)[0], "it is launched for this"
        with Raises(EnvNotReadyError, "reset()"):
            env.step_async([0, 0, 0])
        assert env.seed(5) == [5, 6, 7]
        env.set_options([{"a": 1}, {"b": 2}, {}])
        obs = env.reset()
        assert rows(obs, range(3)) == [[0, 0, 1, 0], [1, 0, 1, 0], [2, 0, 1, 0]]
        assert [world.noted(i, "reset")[-1] for i in range(3)] == [
            [1, {"a": 1}, 5],
            [1, {"b": 2}, 6],
            [1, {}, 7],
        ]
        assert [info["episode"] for info in env.reset_infos] == [1, 1, 1]

        check_steps(env)
        assert world.noted(1, "reset")[-1] == [2, {}, None], "its automatic reset has none of it"
        check_misuse(env)
        check_calls(env)
        assert rows(env.reset(), range(3)) == [[i, 0, 2 + (i > 0), 0] for i in range(3)]
        assert world.noted(0, "reset")[-1] == [2, {}, None], "seeds and options are used once"
    finally:
        env.close()
    env.close()
    assert env.closed
    for call in (env.reset, env.step_wait, lambda: env.step_async([0]), lambda: env.get_attr("x")):
        with Raises(ManagerClosedError, "build a new one"):
            call()


def check_steps(env: Any) -> None:
    obs, rewards, dones, infos = env.step(np.array([1, 2, 3]))
    assert rows(obs, range(3)) == [[0, 0, 1, 1], [1, 0, 1, 1], [2, 0, 1, 1]]
    assert rewards.tolist() == [1001.0, 1001001.0, 2001001.0]
    assert (rewards.dtype, dones.dtype) == (np.float64, np.bool_)
    assert [info["TimeLimit.truncated"] for info in infos] == [False] * 3
    assert "terminal_observation" not in infos[0]
    assert "terminated" not in infos[0]
    kept = obs.copy()
    after, _, dones, infos = env.step([0, int(Do.END), int(Do.TRUNCATE)])
    assert np.array_equal(obs, kept), "what was handed out does not change"
    assert rows(after, range(3)) == [[0, 0, 1, 2], [1, 0, 2, 0], [2, 0, 2, 0]]
    assert dones.tolist() == [False, True, True]
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False, True]
    assert [seen(infos[i]["terminal_observation"])[:4] for i in (1, 2)] == [
        (1, 0, 1, 2),
        (2, 0, 1, 2),
    ]
    assert [info["episode"] for info in env.reset_infos] == [1, 2, 2]


def check_misuse(env: Any) -> None:
    with Raises(EnvNotReadyError, "step_async"):
        env.step_wait()
    for actions in ([0, 0], [0, 0, 0.5], np.zeros((3, 2))):
        with pytest.raises(ActionError):
            env.step_async(actions)
    env.step_async([0, 0, 0])
    with Raises(EnvNotReadyError, "step_wait()"):
        env.step_async([0, 0, 0])
    assert env.step_wait()[0][:, 3].tolist() == [3, 1, 1]


def check_calls(env: Any) -> None:
    assert env.env_is_wrapped(Wrapper) == [True] * 3
    assert env.env_is_wrapped(TimeLimit, indices=[0, -1]) == [True, True]
    assert env.env_is_wrapped(Special) == [False] * 3
    assert env.get_attr("label") == ["env-0", "env-1", "env-2"]
    assert env.get_attr("label", -1) == ["env-2"]
    env.set_attr("mark", [1, 2])
    assert env.get_attr("mark") == [[1, 2]] * 3
    env.set_attr("mark", 7, indices=[1])
    assert env.get_attr("mark") == [[1, 2], 7, [1, 2]]
    assert env.has_attr("mark")
    assert env.has_attr("describe"), "a method is an attribute, too"
    assert not env.has_attr("nothing")
    assert env.env_method("describe", greeting="hello", indices=1) == ["hello env-1"]
    odd = {"name": 1, "method": 2, "env_ids": [0], "args": 3}
    assert env.env_method("told", indices=[1, 2], **odd) == [odd] * 2
    with pytest.raises(LookupError, match="as it was"):
        env.env_method("fail", "as it was")
    with pytest.raises(AttributeError, match="no_method"):
        env.env_method("no_method")
    with pytest.raises(MethodAccessError):
        env.env_method("reset")
    with pytest.raises(AttributeError):
        env.get_attr("nothing")
    assert [frame[0, 0, 0] for frame in env.get_images()] == [0, 1, 2]


class Monitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Passes on what it is given, as that which `make_vec_env` puts around each env."""

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)


@over(INLINE, ALL_BLOCK)
def test_envs_whose_reset_takes_less(world: World, setup: Setup, sb3: Any) -> None:
    for cls in (SeedOnly, NothingTaken):
        env = sb3.EnvmgrVecEnv([cls, lambda cls=cls: Monitor(cls())], **setup.cfg)
        env.reset()
        ended = [env.step(np.array([0, 1]))[2].any() for _ in range(9)]
        assert ended.count(True) == 2, "it is reset in its step, too"
        assert env.manager.stats()["failures"] == 0
        env.seed(5)
        if cls is SeedOnly:
            first = env.reset()
            env.seed(5)
            assert np.array_equal(env.reset(), first)
        else:
            with Raises(EnvManagerError, "takes no `seed`", "NothingTaken"):
                env.reset()
        env.close()


def test_options_for_a_reset_that_takes_none_are_named(sb3: Any) -> None:
    env = sb3.EnvmgrVecEnv([SeedOnly], type="base")
    env.set_options({"level": 3})
    with Raises(EnvManagerError, "takes no `options`", "{'level': 3}"):
        env.reset()
    env.close()


def test_spares_stand_in_for_envs_of_one_function(
    world: World, sb3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make_env(rank: int) -> Any:  # as make_vec_env does: what is built knows its rank
        def build() -> Any:
            env = SeedOnly()
            env.action_space.seed(rank)
            return env

        return build

    alike = make_env(0)
    for env_fns, swaps in (([alike] * 2, 4), ([make_env(0), make_env(1)], 2)):
        caplog.clear()
        env = sb3.EnvmgrVecEnv(env_fns, context="fork", spare_env_num=2)
        env.reset()
        dones = [env.step(np.array([0, 1]))[2].all() for _ in range(8)]
        assert dones == [False, False, False, True] * 2
        assert env.manager.stats()["swaps"] == swaps
        assert ("envs [1] take no spare" in caplog.text) == (swaps == 2)
        env.close()


def test_an_env_that_fails_ends_its_episode_as_a_truncated_one(world: World, sb3: Any) -> None:
    manager = world.make(ALL_BLOCK, env_fn=factories(world, 2, Special), launch=False)
    env = envmgr.as_sb3(manager)
    env.reset()
    env.step([1, 2])
    monitor = sb3.VecMonitor(env)
    env.step_async([3, int(Do.KILL)])
    obs, rewards, dones, infos = monitor.step_wait()
    assert rows(obs, range(2)) == [[0, 0, 0, 2], [1, 1, 0, 0]]
    assert (rewards[1], dones.tolist()) == (0.0, [False, True])
    assert infos[1]["TimeLimit.truncated"]
    assert infos[1]["abnormal"]
    assert infos[1]["error"].startswith("EnvCrash: ")
    assert seen(infos[1]["terminal_observation"])[:5] == (1, 0, 0, 1, 2), "the last good one"
    assert env.env_is_wrapped(Special) == [True, True]
    env.step_async([int(Do.END), 0])
    _, rewards, dones, after = monitor.step_wait()
    assert dones.tolist() == [True, False]
    assert "episode" not in infos[1], "what a failure has cut short is in no statistics"
    assert after[0]["episode"]["l"] == 2
    assert monitor.episode_count == 1
    assert monitor.episode_lengths.tolist() == [0, 1]


def test_failures_are_raised_for_those_who_ask_for_that(world: World, sb3: Any) -> None:
    env = sb3.EnvmgrVecEnv(factories(world, 2), on_failure="raise", context="fork")
    env.reset()
    with pytest.raises(EnvCrash, match="env 1"):
        env.step([0, int(Do.OS_EXIT)])
    assert rows(env.reset(), range(2)) == [[0, 0, 1, 0], [1, 1, 0, 0]]
    env.close()


def test_a_step_that_is_interrupted_can_be_waited_for_again(
    world: World, sb3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(INLINE, env_fn=factories(world, 2), launch=False)
    env = envmgr.as_sb3(manager)
    env.reset()
    env.step_async([int(Do.END), 1])
    first_obs, put_rows = env._batches.first_obs, sb3.put_rows

    def interrupted(*arguments: Any) -> Any:
        if len(arguments) > 1:
            put_rows(*arguments)  # the first observations are in place of the terminal ones
        raise KeyboardInterrupt

    for owner, name, whole in (
        (env._batches, "first_obs", first_obs),
        (sb3, "put_rows", put_rows),
    ):
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.step_wait()
        assert env.waiting
        monkeypatch.setattr(owner, name, whole)
    obs, _, dones, infos = env.step_wait()
    assert rows(obs, range(2)) == [[0, 0, 1, 0], [1, 0, 0, 1]]
    assert dones.tolist() == [True, False]
    assert seen(infos[0]["terminal_observation"])[:4] == (0, 0, 0, 1)
    env.step_async([0, 0])
    assert rows(env.reset(), range(2)) == [[0, 0, 2, 0], [1, 0, 1, 0]], "the step is cancelled"
    env.step([0, 0])


@pytest.mark.parametrize("views", [False, "until_send", "checked"])
def test_terminal_observations_of_dict_spaces(world: World, sb3: Any, views: Any) -> None:
    space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(9)})
    made = partial(SampleEnv, space, episode_length=2)
    plain = sb3.EnvmgrVecEnv([made] * 2, type="base")
    env = envmgr.as_sb3(world.make(ALL_BLOCK, env_fn=[made] * 2, launch=False, copy_on_get=views))
    for one in (plain, env):
        one.seed(3)
        one.reset()
    for step in range(5):
        (obs, _, dones, infos), (want, _, _, infos_wanted) = (e.step([0, 1]) for e in (env, plain))
        assert dones.all() == (step % 2 == 1)
        for key in ("a", "b"):
            assert np.array_equal(np.array(obs[key]), want[key])
        if dones.all():
            last, expected = (i[1]["terminal_observation"] for i in (infos, infos_wanted))
            assert np.array_equal(last["a"], expected["a"])
            assert last["b"] == expected["b"]
    plain.close()


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (Text(4), "the observation space is a Text"),
        (
            Dict({"in": Dict({"x": Discrete(2)})}),
            "the part 'in' of the observation space is a Dict",
        ),
        (Tuple((Discrete(2), Text(3))), "the part 1 of the observation space is a Text"),
    ],
)
def test_spaces_it_cannot_take_are_refused(sb3: Any, space: Any, says: str) -> None:
    with Raises(ConfigError, says, "FlattenObservation"):
        sb3.EnvmgrVecEnv([partial(SampleEnv, space)], type="base")


def test_start_methods_are_those_of_multiprocessing(sb3: Any) -> None:
    with pytest.raises(ValueError, match="'illegal'"):
        sb3.EnvmgrVecEnv([gymnasium.Env], start_method="illegal")


def test_without_the_trainer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter("sb3", monkeypatch)
    monkeypatch.delitem(sys.modules, "envmgr.adapters.sb3")
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env.base_vec_env", None)
    with Raises(MissingDependencyError, "pip install 'stable-baselines3>=2.3'"):
        envmgr.as_sb3(envmgr.make("CartPole-v1", type="base"))
