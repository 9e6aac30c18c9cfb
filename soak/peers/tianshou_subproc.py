"""tianshou's SubprocVectorEnv with its `timeout`: it goes on with the envs that are in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tianshou.env import SubprocVectorEnv

from peers import LIMIT_S, Factories, Outcome


class TianshouSubproc:
    """All envs that are ready step together; its caller resets, as tianshou's collector does."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._envs: Any = None

    def start(self) -> dict[int, Any]:
        """Build and reset."""
        self._envs = SubprocVectorEnv(list(self._factories), timeout=LIMIT_S)
        return dict(enumerate(self._envs.reset()[0]))

    def ready(self) -> list[int]:
        """Return the envs that have answered."""
        return sorted(self._envs.ready_id)

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step, take what is in time, reset what has ended."""
        obs, rewards, terminated, truncated, infos = self._envs.step(
            np.array([*actions.values()]), np.array([*actions])
        )
        done = terminated | truncated
        env_ids = [int(info["env_id"]) for info in infos]
        outcomes = {
            env_id: Outcome(obs[row], float(rewards[row]), bool(done[row]))
            for row, env_id in enumerate(env_ids)
        }
        ended = [env_id for env_id, outcome in outcomes.items() if outcome.done]
        if ended:
            self._envs.reset(np.array(ended))
        return outcomes

    def reset(self) -> dict[int, Any]:
        """Reset all envs that are not under way."""
        env_ids = self.ready()
        return dict(zip(env_ids, self._envs.reset(np.array(env_ids))[0], strict=True))

    def close(self) -> None:
        """Close."""
        if self._envs is not None:  # else its constructor has failed
            self._envs.close()


def open_peer(factories: Factories) -> TianshouSubproc:
    """Return envs that are not started."""
    return TianshouSubproc(factories)
