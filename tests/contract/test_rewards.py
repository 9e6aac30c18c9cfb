"""Rewards are given back as the env gave them, whatever they are and however they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep
from envmgr.wire.block import INFO_BYTES
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    INLINE,
    SOME_BLOCK,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

setups = over(INLINE, ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, ALL_BLOCK_SHARED)

REWARDS: list[Any] = [
    0.5,
    -3,
    np.float32(0.1),
    np.float64("inf"),
    np.array([0.1], np.float32),
    np.array([0.1]),
    np.array([0.1, -2.0, 3.0], np.float32),
    np.linspace(0.0, 1.0, 8),
    np.linspace(0.0, 1.0, 9),
    np.array(0.1),
    np.array([[0.1, 0.2]]),
    np.array([1, 2]),
]
SHAPES = [(), (), (), (), (), (), (3,), (8,), (9,), (), (1, 2), (2,)]
"""Of one row of an array of each."""

LAST, TELL = 20, 40
"""Added to an action: the episode ends; there is an info too large for the block."""


class Rewarding(BaseEnv):
    """Gives the reward that it is asked for, in an array of its own that it uses again."""

    observation_space = Box(-9.0, 9.0, (1,), np.float32)
    action_space = Discrete(60)
    reward_space = Box(-9.0, 9.0, (1,), np.float32)

    def __init__(self) -> None:
        self._given: Any = None

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None: ...

    def reset(self) -> Any:
        if isinstance(self._given, np.ndarray):
            self._given[...] = 0
        return np.zeros(1, np.float32)

    def step(self, action: Any) -> EnvTimestep:
        reward = REWARDS[action % LAST]
        self._given = reward.copy() if isinstance(reward, np.ndarray) else reward
        info = {"text": "x" * INFO_BYTES} if action >= TELL else {}
        return EnvTimestep(np.ones(1, np.float32), self._given, LAST <= action < TELL, info)

    def close(self) -> None: ...


def assert_same(found: Any, given: Any) -> None:
    """Check that a reward is of the same type, dtype, shape and value as another."""
    assert type(found) is type(given)
    np.testing.assert_array_equal(found, given, strict=True)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "reset_inplace"])
@setups
def test_all_of_a_kind_and_mixed(world: World, setup: Setup, inplace: bool) -> None:
    manager = world.make(setup, env_fn=[Rewarding] * 4, reset_inplace=inplace)
    count = len(REWARDS)
    alike = [[k] * 4 for k in range(count)]
    mixed = [[(k + i) % count for i in range(4)] for k in range(count)]
    ends = [[k, k + LAST, k + TELL, k] for k in range(count)]
    for actions in [*alike, *mixed, *ends]:
        ready_all(manager)
        timesteps = step_all(manager, dict(enumerate(actions)))
        for i, action in enumerate(actions):
            assert_same(timesteps[i].reward, REWARDS[action % LAST])
            assert timesteps[i].done == (LAST <= action < TELL)
    assert manager.stats()["failures"] == 0


@setups
def test_as_arrays(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=[Rewarding] * 4)
    for k, (reward, shape) in enumerate(zip(REWARDS, SHAPES, strict=True)):
        for actions in ([k] * 4, [k, k + LAST, k + TELL, k]):
            ready_all(manager)
            manager.send_arrays(np.arange(4), np.array(actions))
            found = manager.recv_arrays(min_ready=4).reward
            expected = np.array([reward] * 4, np.float64).reshape(4, *shape)
            np.testing.assert_array_equal(found, expected, strict=True)


@setups
def test_abnormal_timesteps_beside_arrays_of_rewards(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=[Rewarding] * 3)
    for k, expected in ((4, [0.0, 0.1, 0.1]), (6, [[0.0] * 3, [0.1, -2, 3], [0.1, -2, 3]])):
        ready_all(manager)
        manager.send({0: 15, 1: k, 2: k})  # there is no such reward
        batch = manager.recv_arrays(min_ready=3)
        assert batch.infos[0]["abnormal"]
        np.testing.assert_array_equal(batch.reward.astype(np.float32), np.float32(expected))
        ready_all(manager)
        timesteps = step_all(manager, {0: k, 1: 15, 2: k})
        assert_same(timesteps[1].reward, 0.0)
        assert_same(timesteps[2].reward, REWARDS[k])
