"""tianshou's ShmemVectorEnv. Its caller resets envs, as tianshou's own collector does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from spec import Runner, Spec
from tianshou.env import ShmemVectorEnv

from adapters.actions import array_batches


class TianshouShmem:
    """All envs step together, or, with `wait_num`, those go on that have arrived."""

    def __init__(self, fns: list[Callable[[], Any]], wait_num: int | None) -> None:
        self._fns = fns
        self._wait_num = wait_num
        self._actions = array_batches(len(fns))
        self._ids = np.arange(len(fns))

    def start(self) -> None:
        """Build and reset."""
        self._envs = ShmemVectorEnv(self._fns, wait_num=self._wait_num)
        self._envs.seed(0)
        self._envs.reset()

    def step(self) -> int:
        """Step the envs that are ready, and reset those whose episode has ended."""
        ids = self._ids
        obs, _, terminated, truncated, infos = self._envs.step(next(self._actions)[: len(ids)], ids)
        obs.item(0)
        if self._wait_num is not None:
            ids = self._ids = np.array([info["env_id"] for info in infos])
        ended = terminated | truncated
        if ended.any():
            self._envs.reset(ids[ended])
        return len(ids)

    def close(self) -> None:
        """Close; tianshou wants nothing under way then."""
        if self._wait_num is not None:
            while len(self._envs.waiting_id) > 0:
                self._envs.step(None)
        self._envs.close()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner; `options["wait_share"]` of the envs are waited for, 0 means one env."""
    share = spec.options.get("wait_share")
    wait_num = None if share is None else max(1, int(share * spec.env_num))
    return TianshouShmem([factory] * spec.env_num, wait_num)
