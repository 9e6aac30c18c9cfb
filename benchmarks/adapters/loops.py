"""Loops over vector envs with the interfaces of Stable-Baselines3 and of tianshou."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adapters.actions import array_batches


class Sb3Loop:
    """A vec env of Stable-Baselines3's kind, which resets inside the step that ends an episode.

    Args:
        build: builds it.
        env_num: how many envs.
    """

    def __init__(self, build: Callable[[], Any], env_num: int) -> None:
        self._build = build
        self._env_num = env_num
        self._actions = array_batches(env_num)

    def start(self) -> None:
        """Build and reset."""
        self._envs = self._build()
        self._envs.seed(0)
        self._envs.reset()

    def step(self) -> int:
        """Step all envs."""
        obs, _, _, _ = self._envs.step(next(self._actions))
        obs.item(0)
        return self._env_num

    def close(self) -> None:
        """Close."""
        self._envs.close()


class TianshouLoop:
    """A vector env of tianshou's kind. Its caller resets envs, as tianshou's own collector does.

    Args:
        build: builds it.
        env_num: how many envs.
        gathers_some: it has a `wait_num`: those go on that have arrived.
    """

    def __init__(
        self, build: Callable[[], Any], env_num: int, *, gathers_some: bool = False
    ) -> None:
        self._build = build
        self._gathers_some = gathers_some
        self._actions = array_batches(env_num)
        self._ids = np.arange(env_num)

    def start(self) -> None:
        """Build and reset."""
        self._envs = self._build()
        self._envs.seed(0)
        self._envs.reset()

    def step(self) -> int:
        """Step the envs that are ready, and reset those whose episode has ended."""
        ids = self._ids
        obs, _, terminated, truncated, infos = self._envs.step(next(self._actions)[: len(ids)], ids)
        obs.item(0)
        if self._gathers_some:
            ids = self._ids = np.array([info["env_id"] for info in infos])
        ended = terminated | truncated
        if ended.any():
            self._envs.reset(ids[ended])
        return len(ids)

    def close(self) -> None:
        """Close; tianshou wants nothing under way then."""
        if self._gathers_some:
            while len(self._envs.waiting_id) > 0:
                self._envs.step(None)
        self._envs.close()
