"""Policies that configs name in `collect.policy`.

A policy is made once, by calling what the config names with the observation space, the action space
and the seed. It is called with the observations of the envs that are ready, by env_id, and returns
an action for each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class BalancePole:
    """Pushes the cart of CartPole-v1 to the side that the pole falls to."""

    def __init__(self, observation_space: Any, action_space: Any, seed: int | None) -> None:
        self._weights = np.array([0.05, 0.3, 3.0, 1.0])

    def __call__(self, obs: dict[int, Any]) -> dict[int, int]:
        """Return an action for each env."""
        return {env_id: int(self._weights @ one > 0.0) for env_id, one in obs.items()}
