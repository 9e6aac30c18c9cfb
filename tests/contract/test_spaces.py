"""Observation and action spaces: where they come from, what is checked, and what is cast."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from envmgr.errors import (
    ActionError,
    EnvProtocolError,
    EnvRaised,
    LaunchError,
    SpaceMismatchError,
)
from envmgr.spaces import codec_of, leafwise
from tests.cases import for_each
from tests.contract.envs import OBS_SPACE, Do, SampleEnv, ScriptedEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    INLINE,
    SOME_BLOCK,
    THREADS,
    Raises,
    Setup,
    World,
    every_kind,
    every_setup,
    over,
    ready_all,
    step_all,
)
from tests.contract.test_trajectories import difference


class FixedEnv(gymnasium.Env[Any, Any]):
    """Returns one and the same observation."""

    def __init__(self, observation_space: Any, obs: Any, action_space: Any = None) -> None:
        self.observation_space = observation_space
        self.action_space = Discrete(2) if action_space is None else action_space
        self.obs = obs
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        self.got.append(action)
        return self.obs, 0.0, False, False, {"action": action, "type": type(action).__name__}


# -- reading spaces -------------------------------------------------------------------------------


@every_setup
def test_spaces_are_there_before_launch_without_an_env_in_the_parent(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False)
    assert manager.observation_space == OBS_SPACE
    assert manager.action_space == Discrete(64)
    assert manager.reward_space == ScriptedEnv.reward_space
    assert manager.metadata == {"name": "scripted"}
    assert manager.closed
    assert world.journal(1) == []
    [[build, pid]] = world.noted(0, "build")
    assert build == 0
    assert (pid == os.getpid()) is not setup.has_processes
    manager.launch()
    assert [seen(obs).build for obs in ready_all(manager).values()] == [0, 0], "built twice"
    manager.close()
    assert manager.observation_space == OBS_SPACE  # known from then on
    assert len(world.noted(0, "build")) == 1


@every_kind
def test_a_host_that_was_started_for_the_spaces_is_closed_with_the_manager(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False)
    assert manager.observation_space is not None
    manager.close()
    assert [entry[0] for entry in world.journal(0)] == ["build", "close"]
    manager.launch()
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 0]


@every_kind
def test_spaces_that_cannot_be_read_say_why(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False, script={"build_faults": {0: "raise"}})
    with Raises(LaunchError, "spaces", "scripted error in build") as raised:
        _ = manager.observation_space
    assert isinstance(raised.value.failures[0], EnvRaised)
    assert manager.closed
    assert manager.action_space == Discrete(64)  # the second build works
    manager.launch()


@every_setup
def test_spaces_given_by_the_user_take_the_place_of_the_envs_own(
    world: World, setup: Setup
) -> None:
    space = Box(-1e9, 1e9, (6,), np.float32)
    manager = world.make(setup, 2, launch=False, observation_space=space, action_space=Discrete(50))
    assert (manager.observation_space, manager.action_space) == (space, Discrete(50))
    assert world.journal(0) == [], "nothing had to be started for this"
    manager.launch()
    obs = ready_all(manager)[0]
    assert obs.dtype == np.float32
    assert seen(step_all(manager, {0: 3})[0].obs)[:5] == (0, 0, 0, 1, 3)
    with Raises(ActionError, "55"):
        manager.step({0: 55})


def spaceless() -> Any:
    """Return an env that knows no spaces of its own."""
    env = FixedEnv(Discrete(2), np.zeros(3, np.float32))
    plain = type("Spaceless", (), {})()
    plain.reset = lambda: np.zeros(3, np.float32)
    plain.step = lambda action: (np.ones(3, np.float32), 0.0, False, {})
    plain.unused = env
    return plain


@every_kind
def test_envs_without_spaces_work_with_given_ones_and_by_message_without(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup,
        env_fn=[spaceless],
        observation_space=Box(0, 1, (3,), np.float32),
        action_space=Discrete(2),
    )
    assert step_all(manager, {0: 1})[0].obs.tolist() == [1.0, 1.0, 1.0]
    bare = world.make(setup, env_fn=[spaceless])
    assert type(bare.observation_space) is type(bare.action_space) is gymnasium.Space
    assert step_all(bare, {0: "whatever"})[0].obs.tolist() == [1.0, 1.0, 1.0]


# -- equal spaces ---------------------------------------------------------------------------------


@every_setup
def test_envs_with_different_spaces_are_refused(world: World, setup: Setup) -> None:
    zeros = np.zeros(3, np.float32)
    box = Box(0, 1, (3,), np.float32)
    for other in (
        partial(FixedEnv, Box(0, 2, (3,), np.float32), zeros),
        partial(FixedEnv, box, zeros, Discrete(3)),
    ):
        manager = world.make(setup, launch=False, env_fn=[partial(FixedEnv, box, zeros), other])
        with Raises(SpaceMismatchError, "env 1", "env 0", "same_spaces"):
            manager.launch()
        assert manager.closed


@every_setup
def test_envs_with_different_spaces_are_run_if_this_is_intended(world: World, setup: Setup) -> None:
    spaces = [
        Box(0, 1, (3,), np.float32),
        Box(0, 255, (5, 4), np.uint8),
        Dict({"a": Box(-1, 1, (2,), np.float64), "b": Discrete(3)}),
        Text(4),
        Box(0, 1, (3,), np.float32),
    ]
    manager = world.make(
        setup, env_fn=[partial(SampleEnv, s) for s in spaces], same_spaces=False, seed=2
    )
    for k in range(6):
        obs = ready_all(manager)
        assert all(spaces[i].contains(o) for i, o in obs.items())
        timesteps = step_all(manager, dict.fromkeys(range(5), k % 3))
        assert all(spaces[i].contains(t.obs) for i, t in timesteps.items())


EMPTY = [
    Box(-1, 1, (0,), np.float32),
    Box(0, 255, (2, 0, 3), np.uint8),
    MultiDiscrete(np.zeros(0, np.int64)),
    Dict({"none": Box(-1, 1, (0,), np.float32)}),
    Dict({"a": Box(-1, 1, (0,), np.float32), "n": Discrete(3), "x": Box(-1, 1, (2,), np.float32)}),
    Tuple((Box(-1, 1, (2,), np.float64), Dict({"none": Box(-1, 1, (2, 0), np.float64)}))),
]
"""Spaces some or all of whose arrays have no numbers in them."""


@for_each(
    "space, copies",
    [
        *((space, True) for space in EMPTY),
        *((EMPTY[k], copies) for k in (1, 4) for copies in (False, "until_send", "checked")),
    ],
)
@over(INLINE, THREADS, ALL_BLOCK_SHARED, ALL_MESSAGE)
def test_arrays_without_numbers_go_every_way(
    world: World, setup: Setup, space: Any, copies: Any
) -> None:
    """As observations and as actions, beside one another."""
    action = EMPTY[(EMPTY.index(space) + 4) % len(EMPTY)]
    obs = space.sample()
    manager = world.make(
        setup,
        env_fn=[partial(FixedEnv, space, obs, action)] * 2,
        copy_on_get=copies,
        snapshot_copy=True,
    )
    for k in range(3):
        assert all(space.contains(obs) for obs in ready_all(manager).values())
        if k == 1:
            manager.restore(manager.snapshot())
        batch = manager.ready_arrays(env_ids=[0, 1])
        manager.send_arrays(batch.env_ids, [action.sample(), action.sample()])
        found = manager.recv_arrays()
        assert difference(leafwise(np.array, found.obs), codec_of(space).stack([obs, obs])) is None
        for timestep in step_all(manager, {i: action.sample() for i in range(2)}).values():
            assert action.contains(timestep.info["action"])
            assert space.contains(timestep.obs)
    manager.close()


def test_arrays_without_numbers_are_taken_from_spares(world: World) -> None:
    space = EMPTY[4]
    env_fn = [partial(SampleEnv, space, episode_length=2)] * 2
    manager = world.make(ALL_BLOCK, env_fn=env_fn, spare_env_num=1)
    for _ in range(6):
        timesteps = step_all(manager, dict.fromkeys(range(2), 1))
        assert all(space.contains(timestep.obs) for timestep in timesteps.values())
        assert all(space.contains(obs) for obs in ready_all(manager).values())
    assert manager.stats()["swaps"] > 0


# -- dtypes of observations -----------------------------------------------------------------------


def warnings_about_casts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "cast" in r.getMessage()]


@every_setup
def test_same_kind_dtypes_are_cast_with_one_warning(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="envmgr")
    space = Box(-1, 1, (2,), np.float32)
    manager = world.make(setup, env_fn=[partial(FixedEnv, space, np.array([0.1, 0.2]))] * 3)
    for _ in range(3):
        timesteps = step_all(manager, {0: 1, 1: 1, 2: 0})
        assert all(t.obs.dtype == np.float32 for t in timesteps.values())
        assert all(t.obs.tolist() == np.float32([0.1, 0.2]).tolist() for t in timesteps.values())
    [warning] = warnings_about_casts(caplog)
    assert "float64" in warning
    assert "float32" in warning


@every_setup
def test_strict_dtype_refuses_casts(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, strict_dtype=True)
    first = ready_all(manager)[0]
    timestep = step_all(manager, {0: Do.CASTABLE_DTYPE})[0]
    assert isinstance(timestep.info["error"], EnvProtocolError)
    assert "strict_dtype" in str(timestep.info["error"])
    assert np.array_equal(timestep.obs, first)
    relaxed = world.make(setup, 1)
    ready_all(relaxed)
    assert step_all(relaxed, {0: Do.CASTABLE_DTYPE})[0].obs.dtype == np.float64


@pytest.mark.parametrize(
    ("space", "obs", "says"),
    [
        (Box(0, 1, (2,), np.int64), np.array([0.5, 0.5]), "float64"),
        (Box(0, 255, (2,), np.uint8), np.array([300, 1]), "fit"),
        (Box(0, 1, (2,), np.float32), np.zeros((2, 1), np.float32), "(2, 1)"),
        (Box(0, 1, (2,), np.float32), {"a": 1}, "(2,)"),
        (Discrete(3), np.array([1, 2]), "(2,)"),
        (Dict({"a": Discrete(2)}), {"a": 1, "b": 2}, "'b'"),
        (Dict({"a": Discrete(2)}), {}, "'a'"),
        (Tuple((Discrete(2), Discrete(2))), (1,), "2 items"),
        (Dict({"a": Tuple((Discrete(2),))}), {"a": ("x",)}, "['a'][0]"),
        (Text(3), "too long", "too long"),
        (Text(3), 5, "5"),
    ],
    ids=str,
)
@over(INLINE, ALL_MESSAGE, SOME_BLOCK)
def test_first_observations_that_do_not_fit_fail_the_launch_and_say_where(
    world: World, setup: Setup, space: Any, obs: Any, says: str
) -> None:
    manager = world.make(setup, env_fn=[partial(FixedEnv, space, obs)], launch=False)
    with Raises(LaunchError, "env 0", says) as raised:
        manager.launch()
    assert isinstance(raised.value.failures[0], EnvProtocolError)


# -- actions --------------------------------------------------------------------------------------

_F32 = np.float32
Check = tuple[Any, list[Any], list[Any], list[Any]]
ACTIONS: dict[str, Check] = {
    # space: accepted, refused, refused only with "strict"
    "discrete": (
        Discrete(3, start=2),
        [2, 4, np.int64(3), np.array(2), np.array([4]), np.uint8(2)],
        [1, 5, 2.0, "2", None, np.array([2, 3])],
        [],
    ),
    "box": (
        Box(-1, 1, (2,), _F32),
        [np.zeros(2, _F32), [0.5, 0.5], (0, 1), np.ones(2), np.zeros(2, np.int64)],
        [0.5, [0.1], np.zeros((2, 1)), "ab", None, np.zeros(2, complex), [[0], [0, 1]]],
        [np.array([2.0, 0.0]), [-3, 0], np.array([np.nan, 0.0])],
    ),
    "int box": (Box(0, 9, (1,), np.int64), [[3], np.array([9])], [[0.5], 3], [[10]]),
    "multidiscrete": (
        MultiDiscrete([2, 3]),
        [[1, 2], np.array([0, 0])],
        [[2, 0], [0, 3], [-1, 0], [0.5, 0.5], [1], 1],
        [],
    ),
    "multibinary": (MultiBinary(2), [[0, 1], np.ones(2, np.int8)], [[0, 2], [0], 1], []),
    "dict": (
        Dict({"move": Discrete(2), "turn": Box(-1, 1, (1,), _F32)}),
        [{"move": 1, "turn": [0.5]}, {"turn": np.zeros(1, _F32), "move": np.int64(0)}],
        [{"move": 1}, {"move": 2, "turn": [0.5]}, {"move": 1, "turn": [0.5], "x": 1}, 1, [1, 2]],
        [{"move": 1, "turn": [7.0]}],
    ),
    "tuple": (
        Tuple((Discrete(2), Discrete(2))),
        [(0, 1), [1, 1]],
        [(0,), (0, 2), 0, {"a": 1}],
        [],
    ),
    "text": (Text(3), ["abc"], ["abcd", 5, None], []),
}
every_action_space = pytest.mark.parametrize("name", ACTIONS)


def make_with_actions(world: World, setup: Setup, name: str, **cfg: Any) -> Any:
    env: Callable[[], Any] = partial(
        FixedEnv, Box(0, 1, (1,), _F32), np.zeros(1, _F32), ACTIONS[name][0]
    )
    return world.make(setup, env_fn=[env] * 2, **cfg)


@every_action_space
@over(INLINE, ALL_BLOCK)
def test_actions_are_checked_for_kind_and_shape_and_discrete_ones_for_bounds(
    world: World, setup: Setup, name: str
) -> None:
    manager = make_with_actions(world, setup, name)
    _, accepted, refused, loose = ACTIONS[name]
    for action in refused:
        with Raises(ActionError, "env 1", "Nothing was sent"):
            manager.step({0: accepted[0], 1: action})
        assert manager.ready_env == [0, 1]
    for action in accepted + loose:
        assert [*step_all(manager, {1: action})] == [1]
    assert manager.stats()["actions"] == len(accepted + loose)
    assert manager.stats()["failures"] == 0


@every_action_space
@over(INLINE)
def test_strict_checks_the_bounds_of_boxes_too(world: World, setup: Setup, name: str) -> None:
    manager = make_with_actions(world, setup, name, check_actions="strict")
    _, accepted, refused, loose = ACTIONS[name]
    for action in refused + loose:
        with Raises(ActionError, "env 1"):
            manager.step({1: action})
    for action in accepted:
        assert [*step_all(manager, {1: action})] == [1]


@over(INLINE, ALL_BLOCK)
def test_without_checks_any_action_reaches_the_env(world: World, setup: Setup) -> None:
    manager = make_with_actions(world, setup, "discrete", check_actions=False)
    for action in (99, -1, "left", 2.5):
        assert step_all(manager, {0: action})[0].info["action"] == action


@over(INLINE, ALL_BLOCK)
def test_actions_reach_gymnasium_envs_in_the_form_of_their_space(
    world: World, setup: Setup
) -> None:
    discrete = make_with_actions(world, setup, "discrete")
    for action in (2, np.int64(2), np.array(2), np.array([2])):
        info = step_all(discrete, {0: action})[0].info
        assert (info["action"], info["type"]) == (2, "int")
    box = make_with_actions(world, setup, "box")
    for action in ([0.5, 1], np.array([0.5, 1.0])):
        given = step_all(box, {0: action})[0].info["action"]
        assert (given.dtype, given.tolist()) == (np.float32, [0.5, 1.0])
