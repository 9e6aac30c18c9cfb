"""One way to run every kind of env: BaseEnv, DI-engine's style, plain classes, gymnasium."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from easydict import EasyDict
from gymnasium.spaces import Box, Discrete, Tuple

from envmgr.env import adapt
from envmgr.env.adapt import (
    EnvContractError,
    as_base_env,
    close_env,
    env_attribute,
    random_action_of,
    reset_env,
    seed_env,
    set_env_attribute,
    spaces_of,
)
from envmgr.env.async_env import as_blocking
from envmgr.env.base import BaseEnv
from envmgr.env.batched import BatchRow
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.old_gym import OldGymEnv
from envmgr.env.play import RandomPlay
from envmgr.env.steps import step_env
from envmgr.env.vector_batch import VectorBatch
from envmgr.types import EnvTimestep

DingTimestep = namedtuple("DingTimestep", ["obs", "reward", "done", "info"])
SmacTimestep = namedtuple("SmacTimestep", ["obs", "reward", "done", "info", "episode_steps"])

OBS = np.zeros(2, np.float32)


class Plain:
    """Follows the protocol without deriving from anything; has no optional method."""

    def __init__(self, result: Any = None, reset_result: Any = OBS) -> None:
        self.observation_space = Box(0, 1, (2,), np.float32)
        self.action_space = Discrete(2)
        self.result = result
        self.reset_result = reset_result
        self.calls: list[Any] = []

    def reset(self, **params: Any) -> Any:
        self.calls.append(("reset", params))
        return self.reset_result

    def step(self, action: Any) -> Any:
        self.calls.append(("step", action))
        return self.result


class Derived(Plain, BaseEnv):
    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        self.calls.append(("seed", seed, dynamic_seed))

    def close(self) -> None:
        self.calls.append("close")


class GymOnly:
    """Stands for `gym.Env`, from which DI-engine's BaseEnv derives."""


GymOnly.__module__ = "gym.core"
GymOnly.__name__ = "Env"


class DingEnv(Plain, GymOnly):
    """As DI-engine's envs: from gym.Env, with the class methods of DI-engine's BaseEnv."""

    @staticmethod
    def create_collector_env_cfg(cfg: Any) -> list[Any]:
        return [cfg]

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self.calls.append(("seed", seed, dynamic_seed))

    def random_action(self) -> Any:
        """DI-engine's default gives None."""


class LazyDing(DingEnv):
    """Builds itself in its first reset: until then its spaces are None, or fail."""

    def __init__(self, early: Any = None) -> None:
        self.calls = []
        self.reset_result = OBS
        self._space: Any = early

    def reset(self, **params: Any) -> Any:
        self._space = Box(0, 1, (2,), np.float32)
        return super().reset(**params)

    @property
    def observation_space(self) -> Any:
        if self._space == "broken":
            raise RuntimeError("not built yet")
        return self._space

    @observation_space.setter
    def observation_space(self, space: Any) -> None:
        self._space = space

    @property
    def action_space(self) -> Any:
        return None if self._space is None else Discrete(2)

    @action_space.setter
    def action_space(self, space: Any) -> None: ...


# -- what a factory may return ----------------------------------------------------------------


def test_envs_that_follow_the_protocol_are_used_as_they_are() -> None:
    for env in (Derived(), Plain(), DingEnv()):
        assert as_base_env(env, 0) is env


def test_gymnasium_envs_are_wrapped() -> None:
    inner = gymnasium.make("CartPole-v1")
    env = as_base_env(inner, 3)
    assert type(env) is GymnasiumEnv
    assert env.env is inner


def test_a_gymnasium_env_with_the_protocols_methods_is_used_as_it_is() -> None:
    class Both(Derived, gymnasium.Env[Any, Any]):
        pass

    env = Both()
    assert as_base_env(env, 0) is env


class SeededByReset(Plain):
    """Written like a gymnasium env, without deriving from it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.calls.append(("reset", seed, options))
        return OBS, {"seed": seed}


def test_plain_classes_in_gymnasiums_style_get_their_seeds_and_options() -> None:
    inner = SeededByReset((OBS, 1, False, True, {}))
    env = as_base_env(inner, 0)
    assert type(env.env) is OldGymEnv
    assert seed_env(env, 4, None)
    obs, info = reset_env(env, {"level": 1})
    assert obs is OBS
    assert info == {"seed": 4}
    assert inner.calls == [("reset", 4, {"level": 1})]
    assert step_env(env, np.array([1])).info == {"terminated": False, "truncated": True}
    assert inner.calls[-1] == ("step", 1)


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (None, "None; does it lack a `return`"),
        (Plain, "the class Plain and not an instance"),
        (Derived, "the class Derived and not an instance"),
        (partial(Plain), "another callable"),
        (lambda: None, r"another callable \(.*<lambda>\)"),
        (5, "a value of type int, which has no reset and no step method"),
        ([Plain()], r"a list of 1 \(Plain\), which has no reset"),
        (EasyDict(reset=lambda: 1), "a value of type EasyDict, which has no step method"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(obj: Any, text: str) -> None:
    with pytest.raises(EnvContractError, match=f"^the factory of env 7 returned {text}"):
        as_base_env(obj, 7)
    assert issubclass(EnvContractError, TypeError)


def test_vector_envs_are_refused() -> None:
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(EnvContractError, match=r"vector env.*BatchedEnvSpec"):
        as_base_env(vector, 0)
    vector.close()
    plain = Plain()
    plain.single_observation_space = plain.observation_space  # type: ignore[attr-defined]
    with pytest.raises(EnvContractError, match="vector env"):
        as_base_env(plain, 0)


# -- reset ------------------------------------------------------------------------------------


def test_reset_hands_on_the_params_and_gives_obs_and_info() -> None:
    env = Derived()
    obs, info = reset_env(env, {"level": 2})
    assert obs is OBS
    assert info == {}
    reset_env(env, None)
    reset_env(env, {})
    assert env.calls == [("reset", {"level": 2}), ("reset", {}), ("reset", {})]


def test_the_reset_info_of_gymnasium_envs_arrives() -> None:
    env = as_base_env(gymnasium.make("FrozenLake-v1"), 0)
    assert reset_env(env, {})[1] == {"prob": 1}


def test_a_base_env_may_have_a_reset_info() -> None:
    env = Derived()
    env.reset_info = {"map": 4}  # type: ignore[attr-defined]
    info = reset_env(env, {})[1]
    assert info == {"map": 4}
    assert info is not env.reset_info  # type: ignore[attr-defined]


def test_only_plain_classes_may_return_obs_and_info() -> None:
    pair = (OBS, {"x": 1})
    assert reset_env(Plain(reset_result=pair), {})[0] is OBS
    assert reset_env(Plain(reset_result=pair), {})[1] == {"x": 1}
    for env in (Derived(reset_result=pair), DingEnv(reset_result=pair)):
        assert reset_env(env, {}) == (pair, {})


def test_a_pair_that_is_an_observation_stays_one() -> None:
    env = Plain(reset_result=(1, {"a": 1}))
    env.observation_space = Tuple((Discrete(2), gymnasium.spaces.Dict(a=Discrete(2))))
    assert reset_env(env, {}) == ((1, {"a": 1}), {})
    env.reset_result = ((1, {"a": 1}), {"info": 2})
    assert reset_env(env, {}) == ((1, {"a": 1}), {"info": 2})
    env.reset_result = [1, {}]
    assert reset_env(env, {}) == ([1, {}], {})


# -- step -------------------------------------------------------------------------------------


@dataclass
class TimestepObject:
    obs: Any
    reward: Any
    done: Any
    info: Any


@pytest.mark.parametrize("env_class", [Plain, Derived, DingEnv])
@pytest.mark.parametrize(
    "result",
    [
        EnvTimestep(OBS, 1.0, np.bool_(True), {"x": 1}),
        DingTimestep(OBS, 1.0, True, {"x": 1}),
        (OBS, 1.0, np.array([True]), {"x": 1}),
        [OBS, 1.0, 1, {"x": 1}],
        TimestepObject(OBS, 1.0, True, {"x": 1}),
    ],
)
def test_four_values_in_any_form(env_class: Any, result: Any) -> None:
    timestep = step_env(env_class(result), 1)
    assert type(timestep) is EnvTimestep
    assert timestep.obs is OBS
    assert timestep[1:] == (1.0, True, {"x": 1})
    assert timestep.done is True


def test_a_timestep_that_is_right_already_is_not_built_again() -> None:
    timestep = EnvTimestep(OBS, 1.0, False, {})
    assert step_env(Derived(timestep), 0) is timestep


def test_five_values_are_gymnasiums() -> None:
    info = {"x": 1}
    timestep = step_env(Plain((OBS, 1, False, True, info)), 0)
    assert timestep[1:] == (1.0, True, {"x": 1, "terminated": False, "truncated": True})
    assert info == {"x": 1}


def test_further_fields_of_a_named_tuple_go_into_the_info() -> None:
    info = {"battle_won": True}
    timestep = step_env(DingEnv(SmacTimestep(OBS, 2.0, True, info, 17)), 0)
    assert timestep[1:] == (2.0, True, {"battle_won": True, "episode_steps": 17})
    assert info == {"battle_won": True}
    several = step_env(DingEnv(SmacTimestep(OBS, 2.0, True, [info], 17)), 0)
    assert several.info == [info]


def test_rewards_and_infos_of_base_envs_stay_what_they_are() -> None:
    reward, info = np.array([0.5], np.float32), EasyDict(x=1)
    timestep = step_env(Derived(EnvTimestep(None, reward, True, info)), 0)
    assert timestep.reward is reward
    assert timestep.info is info
    infos = [{"a": 1}, {"b": 2}]
    assert step_env(Derived(DingTimestep(OBS, reward, False, infos)), 0).info is infos


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, "None"),
        (OBS, "type ndarray"),
        ((OBS, 1.0, False), "a tuple of 3"),
        ((OBS, 1.0, False, {}, 1, 2), "a tuple of 6"),
        ({"obs": OBS}, "type dict"),
        ((OBS, 1.0, False, None), "info.*None"),
        ((OBS, 1.0, False, [1]), "info.*list of 1"),
        ((OBS, 1.0, None, {}), "`done`.*None"),
        ((OBS, 1.0, np.array([True, False]), {}), "`done`.*ndarray"),
        ((OBS, 1.0, False, True, []), "info.*list"),
    ],
)
def test_other_results_of_step_are_named(result: Any, found: str) -> None:
    with pytest.raises(EnvContractError, match=found):
        step_env(Plain(result), 0)


# -- seed, spaces, close, random actions ------------------------------------------------------


def test_dynamic_seed_is_handed_on_only_when_given() -> None:
    env = DingEnv()
    assert seed_env(env, 3, None) is True
    assert seed_env(env, 3, False) is True
    assert env.calls == [("seed", 3, True), ("seed", 3, False)]


def test_an_env_without_seed_is_left_alone() -> None:
    assert seed_env(Plain(), 3, True) is False


def test_an_env_whose_seed_takes_one_argument() -> None:
    seeds: list[int] = []
    env = Plain()
    env.seed = seeds.append  # type: ignore[attr-defined]
    assert seed_env(env, 3, None) is True
    assert seeds == [3]


def test_spaces_of_ready_envs_are_read_without_a_reset() -> None:
    env = Plain()
    found = spaces_of(env)
    assert found == (env.observation_space, env.action_space, None)
    assert env.calls == []


@pytest.mark.parametrize("early", [None, "broken"])
def test_an_env_that_builds_itself_late_is_reset_once_for_its_spaces(early: Any) -> None:
    env = LazyDing(early)
    assert spaces_of(env)[:2] == (Box(0, 1, (2,), np.float32), Discrete(2))
    assert env.calls == [("reset", {})]


def test_spaces_that_the_user_gives_are_not_asked_for() -> None:
    env = LazyDing()
    given = Box(0, 2, (2,), np.float32)
    assert spaces_of(env, given, Discrete(5)) == (given, Discrete(5), None)
    assert env.calls == []


def test_an_env_without_spaces_has_any_object_and_strange_spaces_are_named() -> None:
    env = Plain()
    env.observation_space = env.action_space = None  # type: ignore[assignment]
    assert [type(space) for space in spaces_of(env)[:2]] == [gymnasium.Space, gymnasium.Space]
    env.observation_space = env.action_space = "Box"  # type: ignore[assignment]
    with pytest.raises(EnvContractError, match="type str"):
        spaces_of(env)


def test_a_reward_space_that_cannot_be_read_counts_as_none() -> None:
    env = Plain()
    half_made = type("Box", (), {"__module__": "gym.spaces.box"})()  # has not even a shape
    for odd in ("anything", half_made):
        env.reward_space = odd  # type: ignore[attr-defined]
        assert spaces_of(env)[2] is None
    env.reward_space = Box(0, 1, (1,), np.float32)  # type: ignore[attr-defined]
    assert spaces_of(env)[2] == Box(0, 1, (1,), np.float32)
    assert spaces_of(as_base_env(gymnasium.make("CartPole-v1"), 0))[2] is not None


@pytest.mark.parametrize("is_async", [False, True])
def test_random_actions_are_those_of_an_async_env_too(is_async: bool) -> None:
    class Chat:
        observation_space = action_space = None

        async def reset(self, seed: int | None = None) -> Any:
            return "hello", {}

        async def step(self, action: Any) -> Any:
            return action, 1.0, True, False, {}

        def random_action(self) -> Any:
            return self._later() if is_async else "say"

        async def _later(self) -> str:
            return "say"

    env = as_blocking(Chat())
    play = RandomPlay(env)
    play.reset()
    assert play.step(play.action()).obs == "say"
    env.close()


def test_close_is_optional() -> None:
    close_env(Plain())
    env = Derived()
    close_env(env)
    assert env.calls == ["close"]


def test_random_actions() -> None:
    env = Derived()
    for candidate in (Plain(), DingEnv(), env, as_base_env(gymnasium.make("CartPole-v1"), 0)):
        assert random_action_of(candidate) in (0, 1)
    env.random_action = lambda: 5  # type: ignore[method-assign]
    assert random_action_of(env) == 5


# -- attributes -------------------------------------------------------------------------------


class Base(gymnasium.Env[Any, Any]):
    observation_space = Discrete(2)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.color = "red"
        self._hidden = 1
        self.reset_info = "the env's own"

    def greet(self, name: str) -> str:
        return f"hello {name}"


class Outer(gymnasium.Wrapper[Any, Any, Any, Any]):
    shade = "dark"


def test_attributes_are_found_through_gymnasium_wrappers() -> None:
    inner = Base()
    env = as_base_env(Outer(inner), 0)
    assert env_attribute(env, "color") == "red"
    assert env_attribute(env, "shade") == "dark"
    assert env_attribute(env, "_hidden") == 1
    assert env_attribute(env, "greet")("you") == "hello you"
    assert env_attribute(env, "unwrapped") is inner
    with pytest.raises(AttributeError, match="nothing"):
        env_attribute(env, "nothing")


def test_names_of_the_protocol_are_the_wrappers() -> None:
    env = as_base_env(Outer(Base()), 0)
    assert env_attribute(env, "reset") == env.reset
    assert env_attribute(env, "render") == env.render
    assert env_attribute(env, "reset_info") == {}
    assert env_attribute(env, "action_space") is env.action_space
    assert env_attribute(env, "reward_space") is env.reward_space
    assert {"reset", "step", "seed", "close", "observation_space"} <= adapt.PROTOCOL_NAMES
    for name in adapt.PROTOCOL_NAMES:
        with pytest.raises(AttributeError, match="protocol"):
            set_env_attribute(env, name, 1)


def test_attributes_are_set_where_they_are_defined() -> None:
    inner = Base()
    env = as_base_env(Outer(inner), 0)
    assert set_env_attribute(env, "color", "blue") is False
    assert set_env_attribute(env, "shade", "light") is False
    assert set_env_attribute(env, "fresh", 1) is True
    assert vars(inner)["fresh"] == 1, "the env does not see what its wrappers have"
    assert inner.color == "blue"
    assert env.env.shade == "light"
    assert "shade" not in vars(inner)
    assert env_attribute(env, "fresh") == 1


def test_attributes_of_base_envs_are_plain_attributes() -> None:
    env = Derived()
    set_env_attribute(env, "level", 3)
    assert env.level == 3  # type: ignore[attr-defined]
    assert env_attribute(env, "level") == 3
    assert env_attribute(env, "reset") == env.reset
    with pytest.raises(AttributeError):
        env_attribute(env, "nothing")


def test_optional_methods_that_a_plain_class_lacks_have_defaults() -> None:
    env = Plain()
    assert env_attribute(env, "random_action")() in (0, 1)
    assert env_attribute(DingEnv(), "random_action")() in (0, 1)
    assert env_attribute(env, "reward_shaping")([{}]) == [{}]
    env.reward_shaping = lambda transitions: []  # type: ignore[attr-defined]
    assert env_attribute(env, "reward_shaping")([{}]) == []
    with pytest.raises(AttributeError):
        env_attribute(env, "enable_save_replay")


class GymsRender(GymOnly):
    def render(self, mode: str = "human") -> Any:
        raise NotImplementedError


GymsRender.__module__, GymsRender.__name__ = "gym.core", "Env"


class Picture(Plain):
    def render(self, mode: str | None = None) -> Any:
        return f"a picture in {mode}"


class DingWithRender(DingEnv):
    def render(self, mode: str | None = None) -> Any:
        return "its own"


@pytest.mark.parametrize("bases", [(DingEnv,), (DingEnv, GymsRender)])
def test_an_env_of_ding_that_does_not_render_renders_what_is_inside(bases: Any) -> None:
    env = type("Outside", bases, {})()
    with pytest.raises(EnvContractError, match=r"Outside has no render method, and no env inside"):
        env_attribute(env, "render")("rgb_array")
    env._env = Picture()
    assert env_attribute(env, "render")("rgb_array") == "a picture in rgb_array"
    assert env_attribute(DingWithRender(), "render")() == "its own"


def test_other_envs_are_asked_to_render_themselves() -> None:
    env = Plain()
    env._env = Picture()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        env_attribute(env, "render")


def test_reset_params_become_options_of_gymnasium_envs_and_of_vector_envs() -> None:
    class NamesThem(Plain):
        def reset(self, level: int = 0, seed: int | None = None) -> Any:
            return OBS, {}

    class HasOptions(Plain):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return OBS, {}

    rows = BatchRow(VectorBatch(gymnasium.make_vec("CartPole-v1", 2)), 0)
    for env, becomes in (
        (gymnasium.make("CartPole-v1"), True),
        (rows, True),
        (HasOptions(), True),
        (NamesThem(), False),
        (Plain(), False),
        (Derived(), False),
    ):
        as_run = env if env is rows else as_base_env(env, 0)
        assert adapt.params_are_options(as_run) is becomes, env
    close_env(rows.batched)
