"""PufferLib's Multiprocessing (zero-copy, workers that spin) and Serial, by its emulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pufferlib.emulation
import pufferlib.vector
from spec import Runner, Spec

from adapters.actions import array_batches


class PufferVector:
    """A vector env of PufferLib: the call after an episode's end only resets.

    Observations are valid until the next step.
    """

    def __init__(self, build: Callable[[], Any], env_num: int) -> None:
        self._build = build
        self._env_num = env_num
        self._actions = array_batches(env_num)
        self._resetting = 0

    def start(self) -> None:
        """Build and reset."""
        self._envs = self._build()
        self._envs.async_reset(0)
        self._envs.recv()

    def step(self) -> int:
        """Step all envs; those whose episode had ended are reset instead."""
        obs, _, terminated, truncated, _ = self._envs.step(next(self._actions))
        obs.item(0)
        stepped = self._env_num - self._resetting
        self._resetting = int(np.count_nonzero(terminated | truncated))
        return stepped

    def close(self) -> None:
        """Close."""
        self._envs.close()


def _emulated(factory: Callable[[], Any], buf: Any = None, seed: int = 0) -> Any:
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=factory, buf=buf, seed=seed)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of Multiprocessing with `options["workers"]`, or of Serial without it."""
    creator = functools.partial(_emulated, factory)
    workers = spec.options.get("workers")

    def build() -> Any:
        if workers is None:
            return pufferlib.vector.make(
                creator, backend=pufferlib.vector.Serial, num_envs=spec.env_num
            )
        return pufferlib.vector.make(
            creator,
            backend=pufferlib.vector.Multiprocessing,
            num_envs=spec.env_num,
            num_workers=workers,
            batch_size=spec.env_num,
            zero_copy=True,
            overwork=True,
        )

    return PufferVector(build, spec.env_num)
