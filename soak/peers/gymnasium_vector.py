"""Gymnasium's AsyncVectorEnv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from peers import LIMIT_S, Factories, Outcome


class GymnasiumVector:
    """`step_async` and `step_wait(timeout)`, and the same with `reset`."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._envs: Any = None

    def start(self) -> dict[int, Any]:
        """Build and reset."""
        self._envs = gymnasium.vector.AsyncVectorEnv(list(self._factories))
        return dict(enumerate(self._envs.reset(seed=0)[0]))

    def ready(self) -> list[int]:
        """Return all envs: it steps all or none."""
        return list(range(len(self._factories)))

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step all envs, within the limit."""
        self._envs.step_async(np.array([actions[i] for i in self.ready()]))
        obs, rewards, terminated, truncated, _ = self._envs.step_wait(timeout=LIMIT_S)
        done = terminated | truncated
        return {i: Outcome(obs[i], float(rewards[i]), bool(done[i])) for i in self.ready()}

    def reset(self) -> dict[int, Any]:
        """Reset all envs, within the limit."""
        self._envs.reset_async()
        return dict(enumerate(self._envs.reset_wait(timeout=LIMIT_S)[0]))

    def close(self) -> None:
        """Close by force: without `terminate` it waits for envs that hang for ever."""
        if self._envs is not None:  # else its constructor has failed
            self._envs.close(terminate=True)


def open_peer(factories: Factories) -> GymnasiumVector:
    """Return envs that are not started."""
    return GymnasiumVector(factories)
