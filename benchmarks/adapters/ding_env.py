"""An env for DI-engine, here and for what puts faults to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ding.envs import BaseEnv, BaseEnvTimestep


class DingEnv(BaseEnv):  # type: ignore[misc]
    """A gymnasium env as DI-engine wants it."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.reward_space = None

    def reset(self) -> Any:
        """Begin an episode."""
        return self._env.reset()[0]

    def step(self, action: Any) -> Any:
        """Take a step."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        return BaseEnvTimestep(obs, reward, terminated or truncated, info)

    def seed(self, seed: int, dynamic_seed: bool = False) -> None:
        """Seed the env's own generator."""
        self._env.reset(seed=seed)

    def close(self) -> None:
        """Close."""
        self._env.close()

    def __repr__(self) -> str:
        return "DingEnv"
