"""PufferLib's Multiprocessing, a process for each env, by its emulation; it has no time limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pufferlib.emulation
import pufferlib.vector

from peers import Factories, Outcome


class PufferProcesses:
    """`step` and `reset` of all envs; what has ended is reset in the next step."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._envs: Any = None

    def start(self) -> dict[int, Any]:
        """Build and reset."""
        n = len(self._factories)
        self._envs = pufferlib.vector.make(
            [
                partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=factory)
                for factory in self._factories
            ],
            env_args=[[] for _ in range(n)],
            env_kwargs=[{} for _ in range(n)],
            backend=pufferlib.vector.Multiprocessing,
            num_envs=n,
            num_workers=n,
            overwork=True,
        )
        return self.reset()

    def ready(self) -> list[int]:
        """Return all envs: it steps all or none."""
        return list(range(len(self._factories)))

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step all envs."""
        obs, rewards, terminated, truncated, _ = self._envs.step(
            np.array([actions[i] for i in self.ready()])
        )
        done = terminated | truncated
        return {i: Outcome(obs[i].copy(), float(rewards[i]), bool(done[i])) for i in self.ready()}

    def reset(self) -> dict[int, Any]:
        """Reset all envs."""
        return dict(enumerate(self._envs.reset(seed=0)[0]))

    def close(self) -> None:
        """Close."""
        if self._envs is not None:  # else its constructor has failed
            self._envs.close()


def open_peer(factories: Factories) -> PufferProcesses:
    """Return envs that are not started."""
    return PufferProcesses(factories)
