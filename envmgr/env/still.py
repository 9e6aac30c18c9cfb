"""An env that does nothing: for what needs envs, and nothing of them."""

from __future__ import annotations

from typing import Any

import gymnasium


class StillEnv(gymnasium.Env[Any, Any]):
    """Does nothing.

    Args:
        observation_space: what its observation is drawn from; it is always the same.
        action_space: what actions are drawn from; they are ignored.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._obs = observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        return self._obs, 0.0, False, False, {}
