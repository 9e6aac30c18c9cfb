"""Loops over vector envs of other libraries, which all do equal work.

They act, look at observations, and reset as the library does. No library is imported here: a loop
is given a function that builds the vector env, and actions that were drawn before the clock runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

Build = Callable[[], Any]


class Loop(Protocol):
    """A library that runs envs."""

    def start(self) -> None:
        """Build the envs and reset them."""

    def step(self) -> int:
        """Take one batch of steps; return how many env steps it has, resets not counted."""

    def close(self) -> None:
        """Close the envs."""


def look_at(obs: Any) -> None:
    """Read a number of an observation, so that no library gets observations for free."""
    while isinstance(obs, dict):
        obs = next(iter(obs.values()))
    while isinstance(obs, tuple):
        obs = obs[0]
    if isinstance(obs, np.ndarray):
        obs.item(0)


class _VectorLoop:
    """What the loops have in common: envs are built, begin episodes, and are closed.

    Args:
        actions: endless batches of actions.
    """

    def __init__(self, build: Build, env_num: int, actions: Iterator[Any]) -> None:
        self._build = build
        self._env_num = env_num
        self._actions = actions

    def start(self) -> None:
        """Build and reset."""
        self._envs = self._build()
        self._begin()

    def _begin(self) -> None:
        self._envs.seed(0)
        self._envs.reset()

    def close(self) -> None:
        """Close."""
        self._envs.close()


class GymnasiumLoop(_VectorLoop):
    """A vector env of gymnasium's kind; by default, the call after an episode's end resets.

    Args:
        actions: endless batches of actions.
        resets_at_once: whether it is in the mode in which every call steps every env.
    """

    def __init__(
        self, build: Build, env_num: int, actions: Iterator[Any], *, resets_at_once: bool = False
    ) -> None:
        super().__init__(build, env_num, actions)
        self._resets_at_once = resets_at_once
        self._resetting = 0

    def _begin(self) -> None:
        self._envs.reset(seed=0)

    def step(self) -> int:
        """Step all envs; in the default mode, those whose episode had ended are reset instead."""
        obs, _, terminated, truncated, _ = self._envs.step(next(self._actions))
        look_at(obs)
        stepped = self._env_num - self._resetting
        if not self._resets_at_once:
            self._resetting = int(np.count_nonzero(terminated | truncated))
        return stepped


class Sb3Loop(_VectorLoop):
    """A vec env of Stable-Baselines3's kind, which resets inside the step that ends an episode."""

    def step(self) -> int:
        """Step all envs."""
        obs, _, _, _ = self._envs.step(next(self._actions))
        look_at(obs)
        return self._env_num


class TianshouLoop(_VectorLoop):
    """A vector env of tianshou's kind. Its caller resets envs, as tianshou's own collector does.

    Args:
        actions: endless batches of actions.
        gathers_some: whether it has a `wait_num`, so that only envs whose results have arrived go
            on.
    """

    def __init__(
        self, build: Build, env_num: int, actions: Iterator[Any], *, gathers_some: bool = False
    ) -> None:
        super().__init__(build, env_num, actions)
        self._gathers_some = gathers_some
        self._ids = np.arange(env_num)

    def step(self) -> int:
        """Step the envs that are ready, and reset those whose episode has ended."""
        ids = self._ids
        obs, _, terminated, truncated, infos = self._envs.step(next(self._actions)[: len(ids)], ids)
        look_at(obs)
        if self._gathers_some:
            ids = self._ids = np.array([info["env_id"] for info in infos])
        ended = terminated | truncated
        if ended.any():
            self._envs.reset(ids[ended])
        return len(ids)

    def close(self) -> None:
        """Close the envs; tianshou wants no step under way then."""
        if self._gathers_some:
            while len(self._envs.waiting_id) > 0:
                self._envs.step(None)
        super().close()


class DingLoop(_VectorLoop):
    """An env manager of DI-engine's kind: act on what is ready, get timesteps by env_id."""

    def _begin(self) -> None:
        self._envs.launch()
        while len(self._envs.ready_obs) < self._env_num:
            pass

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._envs.ready_obs
        timesteps = self._envs.step(dict(zip(obs, next(self._actions), strict=False)))
        return len(timesteps)
