"""Gymnasium's AsyncVectorEnv and SyncVectorEnv, and the loop over any vector env of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from spec import Runner, Spec

from adapters.actions import array_batches


class GymnasiumVector:
    """A vector env in its default reset mode: the call after an episode's end only resets.

    Args:
        build: builds it.
        env_num: how many envs.
        resets_at_once: it is in the mode in which every call steps every env.
    """

    def __init__(
        self, build: Callable[[], Any], env_num: int, *, resets_at_once: bool = False
    ) -> None:
        self._build = build
        self._env_num = env_num
        self._resets_at_once = resets_at_once
        self._actions = array_batches(env_num)
        self._resetting = 0

    def start(self) -> None:
        """Build and reset."""
        self._envs = self._build()
        self._envs.reset(seed=0)

    def step(self) -> int:
        """Step all envs; in the default mode, those whose episode had ended are reset instead."""
        obs, _, terminated, truncated, _ = self._envs.step(next(self._actions))
        obs.item(0)
        stepped = self._env_num - self._resetting
        if not self._resets_at_once:
            self._resetting = int(np.count_nonzero(terminated | truncated))
        return stepped

    def close(self) -> None:
        """Close."""
        self._envs.close()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of `options["kind"]`, `async` or `sync`."""
    fns = [factory] * spec.env_num
    copy = spec.options.get("copy", True)

    def build() -> Any:
        if spec.options["kind"] == "sync":
            return gymnasium.vector.SyncVectorEnv(fns, copy=copy)
        return gymnasium.vector.AsyncVectorEnv(fns, copy=copy)

    return GymnasiumVector(build, spec.env_num)
