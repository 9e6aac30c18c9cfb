"""Stable-Baselines3's SubprocVecEnv, with its check for NaN; it has no time limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv, VecCheckNan

from peers import Factories, Outcome


class Sb3Subproc:
    """`step` and `reset` of all envs."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._envs: Any = None

    def start(self) -> dict[int, Any]:
        """Build and reset."""
        self._envs = VecCheckNan(SubprocVecEnv(list(self._factories)), raise_exception=True)
        return dict(enumerate(self._envs.reset()))

    def ready(self) -> list[int]:
        """Return all envs: it steps all or none."""
        return list(range(len(self._factories)))

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step all envs."""
        obs, rewards, dones, _ = self._envs.step(np.array([actions[i] for i in self.ready()]))
        return {i: Outcome(obs[i], float(rewards[i]), bool(dones[i])) for i in self.ready()}

    def reset(self) -> dict[int, Any]:
        """Reset all envs."""
        return dict(enumerate(self._envs.reset()))

    def close(self) -> None:
        """Close."""
        if self._envs is not None:  # else its constructor has failed
            self._envs.close()


def open_peer(factories: Factories) -> Sb3Subproc:
    """Return envs that are not started."""
    return Sb3Subproc(factories)
