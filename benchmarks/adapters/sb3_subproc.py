"""Stable-Baselines3's SubprocVecEnv, which resets inside the step that ends an episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec import Runner, Spec
from stable_baselines3.common.vec_env import SubprocVecEnv

from adapters.actions import array_batches


class Sb3Subproc:
    """Workers are forked: its default, a fork server, imports PyTorch in each of them."""

    def __init__(self, fns: list[Callable[[], Any]]) -> None:
        self._fns = fns
        self._actions = array_batches(len(fns))

    def start(self) -> None:
        """Build and reset."""
        self._envs = SubprocVecEnv(self._fns, start_method="fork")
        self._envs.seed(0)
        self._envs.reset()

    def step(self) -> int:
        """Step all envs."""
        obs, _, _, _ = self._envs.step(next(self._actions))
        obs.item(0)
        return len(self._fns)

    def close(self) -> None:
        """Close."""
        self._envs.close()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of SubprocVecEnv."""
    return Sb3Subproc([factory] * spec.env_num)
