"""Envs and spaces of the old gym package: stand-ins with gym's names, as gym is not installed."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envmgr.env.adapt import (
    as_base_env,
    convert_space,
    env_attribute,
    reset_env,
    seed_env,
    set_env_attribute,
    spaces_of,
)
from envmgr.env.async_env import as_blocking
from envmgr.env.contract import EnvContractError
from envmgr.env.gym_spaces import own_space
from envmgr.env.old_gym import OldGymEnv
from envmgr.env.steps import step_env


def in_gym(module: str, name: str, *bases: type, **members: Any) -> type:
    """A class that looks as if it came from the package gym."""
    return type(name, bases or (object,), {"__module__": module, **members})


Space = in_gym("gym.spaces.space", "Space")
Box = in_gym("gym.spaces.box", "Box", Space)
GymDiscrete = in_gym("gym.spaces.discrete", "Discrete", Space)
Env = in_gym("gym.core", "Env", reward_range=(-float("inf"), float("inf")), metadata={})


def make(cls: type, **members: Any) -> Any:
    space = cls()
    vars(space).update(members)
    return space


def discrete(n: int) -> Any:
    return make(GymDiscrete, n=n, dtype=np.dtype(np.int64), shape=())


def forward(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"attempted to get missing private attribute '{name}'")
    return getattr(self.env, name)


class _Wrapper(Env):  # type: ignore[misc, valid-type]
    def __init__(self, env: Any) -> None:
        self.env = env

    __getattr__ = forward

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


Wrapper = in_gym("gym.core", "Wrapper", _Wrapper)


class Gym21(Env):  # type: ignore[misc, valid-type]
    """gym up to 0.21: seed(), reset() -> obs, four values, render(mode)."""

    def __init__(self, result: Any = None) -> None:
        self.observation_space = discrete(4)
        self.action_space = discrete(2)
        self.result = result
        self.calls: list[Any] = []
        self.level = 1

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.calls.append(("seed", seed))
        return [seed]

    def reset(self, start: int = 0) -> Any:
        self.calls.append(("reset", start))
        return start

    def step(self, action: Any) -> Any:
        self.calls.append(("step", action))
        return self.result

    def render(self, mode: str = "human") -> Any:
        return f"rendered {mode}"

    def close(self) -> None:
        self.calls.append("close")


class Gym26(Gym21):
    """gym from 0.26: seeds and options through reset -> (obs, info), five values, render()."""

    render_mode = "ansi"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        self.calls.append(("reset", seed, options))
        return 3, {"seed": seed}

    def render(self) -> Any:  # type: ignore[override]
        return "rendered"


# -- envs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda env: env, Wrapper, lambda env: Wrapper(Wrapper(env))])
def test_envs_of_gym_21(wrap: Any) -> None:
    inner = Gym21((2, 1, True, {"TimeLimit.truncated": True}))
    env = as_base_env(wrap(inner), 0)
    assert type(env.env) is OldGymEnv
    assert seed_env(env, 5, None)
    assert reset_env(env, {"start": 2}) == (2, {})
    assert reset_env(env, {}) == (0, {})
    assert inner.calls == [("seed", 5), ("reset", 2), ("reset", 0)]
    timestep = step_env(env, np.array([1]))
    assert inner.calls[-1] == ("step", 1)
    assert type(inner.calls[-1][1]) is int
    expected = {"TimeLimit.truncated": True, "terminated": False, "truncated": True}
    assert timestep == (2, 1.0, True, expected)
    assert inner.result[3] == {"TimeLimit.truncated": True}
    assert env.render() == "rendered rgb_array"
    assert env.render("human") == "rendered human"
    env.close()
    assert inner.calls[-1] == "close"


@pytest.mark.parametrize(
    ("done", "info", "terminated", "truncated"),
    [
        (False, {}, False, False),
        (True, {}, True, False),
        (True, {"TimeLimit.truncated": False}, True, False),
        (True, {"TimeLimit.truncated": True}, False, True),
        (False, {"TimeLimit.truncated": True}, False, False),
    ],
)
def test_what_ended_an_episode(
    done: bool, info: dict[str, Any], terminated: bool, truncated: bool
) -> None:
    timestep = step_env(as_base_env(Gym21((0, 0.0, done, info)), 0), 0)
    assert timestep.done is done
    assert timestep.info == {**info, "terminated": terminated, "truncated": truncated}


@pytest.mark.parametrize("wrap", [lambda env: env, Wrapper])
def test_envs_of_gym_26(wrap: Any) -> None:
    inner = Gym26((2, 1.0, False, True, {"x": 1}))
    env = as_base_env(wrap(inner), 0)
    assert seed_env(env, 5, False)
    assert reset_env(env, {"level": 2}) == (3, {"seed": 5})
    assert reset_env(env, {}) == (3, {"seed": 5})
    assert inner.calls == [("reset", 5, {"level": 2}), ("reset", 5, None)]
    expected = {"x": 1, "terminated": False, "truncated": True}
    assert step_env(env, 1) == (2, 1.0, True, expected)
    assert env.render("rgb_array") == "rendered"


def test_figures_of_episodes_are_saved_as_those_of_gymnasium(tmp_path: Path) -> None:
    class Drawn(Gym26):
        render_mode = "rgb_array"

        def render(self) -> Any:  # type: ignore[override]
            return np.zeros((4, 6, 3), np.uint8)

    env = as_base_env(Wrapper(Drawn((2, 1.0, True, False, {}))), 3)
    env.enable_save_figure(str(tmp_path))
    step_env(env, 1)
    (figure,) = tmp_path.iterdir()
    assert figure.name.startswith("env_3-")


def test_a_wrapper_whose_reset_takes_nothing_hides_the_seed_argument() -> None:
    class Narrow(Wrapper):  # type: ignore[misc, valid-type]
        def reset(self) -> Any:
            return self.env.reset()

    inner = Gym26()
    env = as_base_env(Narrow(inner), 0)
    seed_env(env, 5, None)
    reset_env(env, {})
    assert inner.calls == [("seed", 5), ("reset", None, None)]


def test_a_reset_that_takes_anything_is_not_given_the_seed() -> None:
    class Loose(Gym21):
        def reset(self, **kwargs: Any) -> Any:
            self.calls.append(("reset", kwargs))
            return 0

    inner = Loose()
    env = as_base_env(inner, 0)
    seed_env(env, 5, None)
    reset_env(env, {"start": 1})
    assert inner.calls == [("seed", 5), ("reset", {"start": 1})]


def test_malformed_steps_are_contract_errors() -> None:
    for result in (None, (1, 2), (1, 1.0, False, None), (1, 1.0, False, False, None)):
        with pytest.raises(EnvContractError, match="Gym21"):
            step_env(as_base_env(Gym21(result), 0), 0)


def test_spaces_become_gymnasiums() -> None:
    env = as_base_env(Gym21(), 0)
    found = spaces_of(env)
    assert found[:2] == (spaces.Discrete(4), spaces.Discrete(2))
    assert found[2] == spaces.Box(-np.inf, np.inf, (), np.float64)
    assert env.random_action() in (0, 1)
    bare = Gym21()
    bare.action_space = None
    assert type(as_base_env(bare, 0).action_space) is gymnasium.Space


class Bare:
    """A plain class whose reset takes a seed: no method `seed`, no spaces, no `close`."""

    n_resets = 0

    def reset(self, seed: int | None = None) -> Any:
        self.n_resets += 1
        return "hello", {"seed": seed}

    def step(self, action: Any) -> Any:
        return action, 1.0, False, False, {}


class BareAsync(Bare):
    async def reset(self, seed: int | None = None) -> Any:
        return super().reset(seed)

    async def step(self, action: Any) -> Any:
        return super().step(action)


class Late(Bare):
    """Knows its spaces from its first reset on; until then one is not there, one cannot be read."""

    action_space: Any

    @property
    def observation_space(self) -> Any:
        return self.action_space

    def reset(self, seed: int | None = None) -> Any:
        self.action_space = discrete(2)
        return super().reset(seed)


class Unready(Late):
    @property
    def observation_space(self) -> Any:
        if not self.n_resets:
            raise RuntimeError("not built yet")
        return discrete(2)


def test_a_plain_class_needs_neither_spaces_nor_close() -> None:
    inner = Bare()
    env = as_base_env(inner, 0)
    assert [type(space) for space in spaces_of(env)] == [gymnasium.Space] * 2 + [spaces.Box]
    seed_env(env, 5, None)
    assert reset_env(env, {}) == ("hello", {"seed": 5})
    assert step_env(env, ["any"]).obs == ["any"]
    env.close()
    never_reset = as_base_env(BareAsync(), 0)
    assert [type(space) for space in spaces_of(never_reset)[:2]] == [gymnasium.Space] * 2
    blocking = as_blocking(BareAsync())
    assert blocking.reset() == "hello"
    assert blocking.step("any").obs == "any"
    blocking.close()


@pytest.mark.parametrize("late", [Late, Unready])
def test_a_plain_class_that_builds_itself_late_is_reset_once_for_its_spaces(late: Any) -> None:
    inner = late()
    env = as_base_env(inner, 0)
    assert spaces_of(env)[:2] == (spaces.Discrete(2), spaces.Discrete(2))
    assert spaces_of(env)[:2] == (spaces.Discrete(2), spaces.Discrete(2))
    assert inner.n_resets == 1
    assert type(step_env(env, np.array([1])).obs) is int, "actions are converted for the late space"
    given = late()
    assert spaces_of(as_base_env(given, 0), *[spaces.Discrete(2)] * 2)[0] == spaces.Discrete(2)
    assert given.n_resets == 0


def test_attributes_are_found_and_set_where_they_are_defined() -> None:
    inner = Gym21()
    outer = Wrapper(inner)
    outer.color = "red"
    inner._hidden = 2
    env = as_base_env(Wrapper(outer), 0)
    assert env_attribute(env, "level") == 1
    assert env_attribute(env, "color") == "red"
    assert env_attribute(env, "_hidden") == 2
    set_env_attribute(env, "level", 5)
    set_env_attribute(env, "color", "blue")
    set_env_attribute(env, "fresh", 1)
    assert inner.level == 5
    assert outer.color == "blue"
    assert "color" not in vars(inner)
    assert vars(inner)["fresh"] == 1
    with pytest.raises(AttributeError):
        env_attribute(env, "nothing")


def test_gyms_vector_envs_are_refused() -> None:
    env = Gym21()
    env.single_observation_space = env.observation_space
    with pytest.raises(EnvContractError, match="vector env"):
        as_base_env(env, 0)


# -- spaces -----------------------------------------------------------------------------------


def test_gymnasium_spaces_stay_the_same_object() -> None:
    space = spaces.Discrete(3)
    assert convert_space(space) is space


def gym_space(name: str, **members: Any) -> Any:
    return make(in_gym(f"gym.spaces.{name.lower()}", name, Space), **members)


LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([1.0, np.inf], np.float32)
BOX = make(Box, low=LOW, high=HIGH, shape=(2,), dtype=np.dtype(np.float32))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BOX, spaces.Box(LOW, HIGH, dtype=np.float32)),
        (
            make(
                Box,
                low=np.zeros((2, 2), np.uint8),
                high=np.full((2, 2), 255, np.uint8),
                shape=(2, 2),
                dtype=np.uint8,
            ),
            spaces.Box(0, 255, (2, 2), np.uint8),
        ),
        (discrete(5), spaces.Discrete(5)),
        (make(GymDiscrete, n=np.int64(5), start=np.int64(-2)), spaces.Discrete(5, start=-2)),
        (
            gym_space("MultiDiscrete", nvec=np.array([2, 3]), dtype=np.dtype(np.int64)),
            spaces.MultiDiscrete([2, 3]),
        ),
        (gym_space("MultiBinary", n=4), spaces.MultiBinary(4)),
        (gym_space("MultiBinary", n=(2, 3)), spaces.MultiBinary([2, 3])),
        (
            gym_space("Dict", spaces=OrderedDict(z=discrete(2), a=BOX)),
            spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Box(LOW, HIGH))),
        ),
        (
            gym_space("Tuple", spaces=(discrete(2), gym_space("Tuple", spaces=[discrete(3)]))),
            spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Discrete(3)])]),
        ),
        (
            gym_space("Text", min_length=2, max_length=5, character_set={"a", "b"}),
            spaces.Text(5, min_length=2, charset="ab"),
        ),
    ],
)
def test_each_of_gyms_spaces_has_its_equal(old: Any, new: spaces.Space[Any]) -> None:
    converted = convert_space(old)
    assert type(converted) is type(new)
    assert converted == new
    assert converted.dtype == new.dtype
    converted.seed(0)
    assert new.contains(converted.sample())


GYMS = SimpleNamespace(
    Box=lambda *args, **kwargs: ("Box", args, kwargs),
    Tuple=lambda *args, **kwargs: ("Tuple", args, kwargs),
    Discrete=lambda n, start: make(GymDiscrete, n=n, start=start),
)


def test_a_converted_space_goes_back_to_its_own_package_also_from_another_process() -> None:
    old = gym_space("Tuple", spaces=(make(GymDiscrete, n=5, start=-2), BOX))
    converted = pickle.loads(pickle.dumps(convert_space(old)))
    name, ((first, (box, (low, high), of_box)),), _ = own_space(converted, GYMS)
    assert (name, box, of_box) == ("Tuple", "Box", {"shape": (2,), "dtype": np.float32})
    assert (type(first), first.n, first.start) == (GymDiscrete, 5, -2)
    assert (low.tolist(), high.tolist()) == (LOW.tolist(), HIGH.tolist())


@pytest.mark.parametrize("space", [spaces.Discrete(3), None])
def test_a_space_that_was_not_converted_stays_what_it_is(space: Any) -> None:
    assert own_space(space, GYMS) is space


def test_the_order_of_a_dict_space_is_kept() -> None:
    old = gym_space("Dict", spaces=OrderedDict(z=discrete(2), a=discrete(3)))
    assert list(convert_space(old).spaces) == ["z", "a"]  # type: ignore[attr-defined]


def test_a_box_whose_dtype_was_narrowed_keeps_what_bounds_it_can() -> None:
    limit = np.finfo(np.float64).max
    old = make(Box, low=np.array([-limit]), high=np.array([2.0]), shape=(1,), dtype=np.float32)
    assert convert_space(old) == spaces.Box(-np.inf, 2.0, (1,), np.float32)


def test_classes_derived_from_gyms_spaces_are_known_by_their_base() -> None:
    derived = make(type("Levels", (GymDiscrete,), {}), n=3)
    assert convert_space(derived) == spaces.Discrete(3)


@pytest.mark.parametrize("space", [make(Space), gym_space("Graph"), "Box", None, 3])
def test_what_is_no_known_space_is_refused(space: Any) -> None:
    with pytest.raises(EnvContractError, match="gymnasium space or one of gym's Box, Discrete"):
        convert_space(space)
