"""The same seed and actions give the same trajectories, whatever runs the envs and however fast."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
)

from tests.contract.envs import Do, SampleEnv, ScriptedGymEnv
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    AXES,
    INLINE,
    SETUPS,
    SOME_MESSAGE,
    THREADS,
    THREADS_MESSAGE_SHARED,
    Setup,
    World,
    over,
)

SPACES: dict[str, Any] = {
    "vector": Box(-1.0, 1.0, (3,), np.float32),
    "double": Box(-np.inf, np.inf, (2, 2), np.float64),
    "image": Box(0, 255, (9, 8, 3), np.uint8),
    "scalar": Box(0.0, 1.0, (), np.float32),
    "integers": Box(-5, 5, (2,), np.int16),
    "discrete": Discrete(5, start=-2),
    "multidiscrete": MultiDiscrete([3, 4]),
    "multibinary": MultiBinary([2, 3]),
    "empty": Box(-1.0, 1.0, (2, 0, 3), np.float32),
    "dict with an empty part": Dict(
        {"none": Box(0, 255, (0,), np.uint8), "x": Box(0, 1, (2,), np.float64)}
    ),
    "dict": Dict(
        {
            "picture": Box(0, 255, (4, 4), np.uint8),
            "more": Tuple((Discrete(3), Dict({"x": Box(0, 1, (2,), np.float32)}))),
            "bits": MultiBinary(3),
        }
    ),
    "tuple": Tuple((Box(0, 1, (1,), np.float64), Discrete(4))),
    "text": Text(6),
    "sequence": Sequence(Discrete(4)),
    "stacked sequence": Sequence(Box(0, 1, (2,), np.float32), stack=True),
    "graph": Graph(Box(0, 1, (2,), np.float32), Discrete(3)),
    "one of": OneOf((Discrete(3), Box(0, 1, (2,), np.float32))),
    "dict with text": Dict({"words": Text(4), "x": Box(0, 1, (2,), np.float32)}),
    "dict of texts": Dict({"head": Text(4), "body": Text(300)}),
    "dict with a sequence": Dict({"n": Sequence(Discrete(4)), "x": Box(0, 1, (2,), np.float32)}),
}
FIXED = {name: SPACES[name] for name in list(SPACES)[: list(SPACES).index("text")]}
"""Those with a fixed layout."""
N_STEPS = 11
EPISODE_LENGTH = 4


def action_of(env_id: int, k: int) -> int:
    """Return the k-th action of an env: fixed, so that timing cannot choose it."""
    return (env_id * 7 + k * 5) % 3


def plain_run(space: Any, env_id: int, seed: int) -> list[Any]:
    """Return the trajectory of one env that nobody manages."""
    env = SampleEnv(space, episode_length=EPISODE_LENGTH)
    obs, info = env.reset(seed=seed)
    trajectory: list[Any] = [("first", obs, info)]
    for k in range(N_STEPS):
        obs, reward, terminated, truncated, info = env.step(action_of(env_id, k))
        flags = {"terminated": terminated, "truncated": truncated}
        trajectory.append(("step", obs, reward, terminated or truncated, {**info, **flags}))
        if terminated or truncated:
            obs, info = env.reset()
            trajectory.append(("first", obs, info))
    return trajectory


def managed_run(manager: Any) -> list[list[Any]]:
    """Return the trajectories of all envs of a manager, each N_STEPS long."""
    n = manager.env_num
    trajectories: list[list[Any]] = [[] for _ in range(n)]
    taken = [0] * n
    fresh = [True] * n
    while min(taken) < N_STEPS or any(fresh):
        # What is ready when is up to the timing; what an env sees may not be.
        ready, infos = manager.ready_obs, manager.ready_info
        for i, obs in ready.items():
            if fresh[i]:
                trajectories[i].append(("first", obs, infos[i]))
                fresh[i] = False
        actions = {i: action_of(i, taken[i]) for i in ready if taken[i] < N_STEPS}
        if not actions and not manager.stats()["outstanding"]:
            continue
        for i, timestep in manager.step(actions).items():
            trajectories[i].append(("step", *timestep))
            taken[i] += 1
            fresh[i] = timestep.done
    return trajectories


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Say where two values differ, in type, dtype, shape or contents; None if they do not."""
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} is not {type(other).__name__}"
    if isinstance(one, dict):
        if [*one] != [*other]:
            return f"{path}: keys {[*one]} are not {[*other]}"
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{path}: {len(one)} items are not {len(other)}"
        pairs = [(k, a, b) for k, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{path}: {one.dtype}{one.shape} is not {other.dtype}{other.shape}"
        return None if one.tobytes() == other.tobytes() else f"{path}: {one} is not {other}"
    else:
        return None if one == other else f"{path}: {one!r} is not {other!r}"
    for key, a, b in pairs:
        found = difference(a, b, f"{path}[{key!r}]")
        if found is not None:
            return found
    return None


def check_trajectories(manager: Any, spaces: Mapping[str, Any]) -> None:
    """Run envs with these spaces, seeded 100 and on, and compare with what they give unmanaged."""
    for i, (name, trajectory) in enumerate(zip(spaces, managed_run(manager), strict=True)):
        expected = plain_run(spaces[name], i, 100 + i)
        assert len(trajectory) == len(expected)
        for k, (got, wanted) in enumerate(zip(trajectory, expected, strict=True)):
            assert difference(got, wanted) is None, f"{name}, item {k}: {difference(got, wanted)}"


def sampled(spaces: Mapping[str, Any]) -> list[Any]:
    """Return factories of envs that take a random short time."""
    return [
        partial(SampleEnv, space, episode_length=EPISODE_LENGTH, jitter_s=0.001)
        for space in spaces.values()
    ]


in_both_modes = pytest.mark.parametrize(
    "mode", [{}, {"reset_inplace": True}], ids=["background", "in_place"]
)


@in_both_modes
@pytest.mark.parametrize("name", ["vector", "everything"])
@over(*AXES, THREADS, THREADS_MESSAGE_SHARED)
def test_trajectories_are_those_of_envs_that_nobody_manages(
    world: World, setup: Setup, name: str, mode: dict[str, Any]
) -> None:
    """All envs have the same space, as steps by the block need."""
    space = SPACES["vector"] if name == "vector" else Dict(FIXED)
    spaces = {f"{name} {i}": space for i in range(3)}
    manager = world.make(setup, env_fn=sampled(spaces), seed=100, **mode)
    by_block = setup.shared_memory or setup == INLINE
    assert (manager._running.supervisor.submitter.posts) is by_block
    check_trajectories(manager, spaces)


@in_both_modes
@over(INLINE, ALL_BLOCK._replace(num_workers=2), SOME_MESSAGE._replace(num_workers=2))
def test_trajectories_of_envs_with_different_spaces(
    world: World, setup: Setup, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, env_fn=sampled(SPACES), same_spaces=False, seed=100, **mode)
    check_trajectories(manager, SPACES)


def scripted_run(manager: Any) -> list[list[Any]]:
    """Return what envs that fail now and then give, step by step, without their errors."""
    faults = {(0, 2): Do.RAISE, (1, 3): Do.ABNORMAL, (2, 4): Do.END_THEN_RAISE, (0, 6): Do.SYS_EXIT}
    trajectories: list[list[Any]] = [[] for _ in range(manager.env_num)]
    taken = [0] * manager.env_num
    while min(taken) < 9:
        actions = {
            i: int(faults.get((i, taken[i]), Do.END_LATE if taken[i] % 4 == 3 else Do.JITTER))
            for i in manager.ready_obs
            if taken[i] < 9
        }
        if not actions and not manager.stats()["outstanding"]:
            continue
        for i, (obs, reward, done, info) in manager.step(actions).items():
            about = {"abnormal"} if "abnormal" in info else {"episode", "step", "params", "nested"}
            trajectories[i].append(
                (obs.tolist(), reward, done, {key: info[key] for key in sorted(about)})
            )
            taken[i] += 1
    return trajectories


def test_failures_and_renewals_repeat_too_under_every_kind(tmp_path: Any) -> None:
    runs = {}
    for k, setup in enumerate(SETUPS):
        folder = tmp_path / str(k)
        folder.mkdir()
        world = World(folder)
        try:
            manager = world.make(setup, 3, env=ScriptedGymEnv, seed=8, max_failures=9)
            runs[str(setup)] = scripted_run(manager)
            assert manager.stats()["failures"] == 4
        finally:
            world.close()
    expected = runs["inline"]
    for name, run in runs.items():
        for i in range(3):
            assert difference(run[i], expected[i]) is None, (
                f"{name}, env {i}: {difference(run[i], expected[i])}"
            )


@over(ALL_MESSAGE)
def test_the_number_of_envs_has_no_part_in_what_one_of_them_does(
    world: World, setup: Setup
) -> None:
    def run(n: int) -> list[Any]:
        env_fn = [partial(SampleEnv, SPACES["dict"], episode_length=EPISODE_LENGTH)] * n
        manager = world.make(setup, env_fn=env_fn, seed=3)
        trajectory = managed_run(manager)[0]
        manager.close()
        return trajectory

    assert difference(run(1), run(5)) is None
