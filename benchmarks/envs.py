"""Envs whose cost is known: nothing, uneven sleeps, slow resets."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

STEP_S = 0.001
RESET_S = 0.2
EPISODE_STEPS = (50, 150)
UNEVEN_MEDIAN_S = 0.002
UNEVEN_SIGMA = 1.0


class NullEnv(gymnasium.Env[Any, Any]):
    """Does nothing: float32[4] observations, two actions, episodes without end."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        return self._obs, 0.0, False, False, {}


class UnevenEnv(NullEnv):
    """Each step sleeps log-normally: median 2 ms, sigma 1."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep, then take a step."""
        time.sleep(self.np_random.lognormal(np.log(UNEVEN_MEDIAN_S), UNEVEN_SIGMA))
        return super().step(action)


class SlowResetEnv(NullEnv):
    """Steps sleep 1 ms, resets 200 ms; episodes of 50 to 150 steps, so envs are out of phase."""

    _left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, slowly."""
        result = super().reset(seed=seed)
        time.sleep(RESET_S)
        self._left = int(self.np_random.integers(EPISODE_STEPS[0], EPISODE_STEPS[1] + 1))
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep, then take a step of an episode that ends."""
        time.sleep(STEP_S)
        self._left -= 1
        return self._obs, 0.0, self._left <= 0, False, {}
