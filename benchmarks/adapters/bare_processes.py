"""Processes that do nothing but step and ring: what any library of this shape is bounded by.

Shared arrays, an eventfd for each process and one for the trainer, and the shortest loop there is:
no request ids, no checks, no infos, no rewards, no time limits, nobody who looks after a death.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from spec import Runner, Spec

from adapters.actions import array_batches

_END = 1 << 32
_LINE = 8


class BareProcesses:
    """Envs in forked processes, stepped in lockstep or each process on its own.

    Args:
        spec: how many envs, and their actions; `options["processes"]` share them, in equal parts;
            None: one for each env.
        factory: builds an env.
        together: wait for all of them each time; else go on with those that are done.
        spins: watch shared memory instead of sleeping; only where each process has a core.
    """

    def __init__(
        self,
        spec: Spec,
        factory: Callable[[], Any],
        *,
        together: bool,
        spins: bool,
    ) -> None:
        self._factory = factory
        env_num = spec.env_num
        self._processes = processes = spec.options["processes"] or env_num
        self._share = env_num // processes
        self._together = together
        self._spins = spins
        self._batches = array_batches(spec)
        space = factory().observation_space
        first = next(self._batches)
        self._actions = _shared(first.shape, first.dtype)
        self._obs = _shared((env_num, *space.shape), space.dtype)
        self._asked, self._done = (_shared((processes, _LINE), np.int64)[:, 0] for _ in range(2))
        self._bells = [os.eventfd(0) for _ in range(processes)]
        self._bell = os.eventfd(0)
        self._pids: list[int] = []
        self._rounds = 0

    def start(self) -> None:
        """Fork, and have everybody take a first step."""
        for index in range(self._processes):
            pid = os.fork()
            if pid == 0:
                self._serve(index)
            self._pids.append(pid)
        self._ask(range(self._processes))

    def _ask(self, indexes: Any) -> None:
        self._actions[:] = next(self._batches)
        for index in indexes:
            self._asked[index] += 1
            if not self._spins:
                os.eventfd_write(self._bells[index], 1)

    def step(self) -> int:
        """Gather what is done, take the observations, and send the next actions."""
        asked, done = memoryview(self._asked), memoryview(self._done)
        n = self._processes
        while True:
            ready = [index for index in range(n) if done[index] == asked[index]]
            if len(ready) == n or (ready and not self._together):
                break
            if not self._spins:
                os.eventfd_read(self._bell)
        if len(ready) == n:
            self._obs.copy()
        else:
            for index in ready:
                self._obs[index * self._share : (index + 1) * self._share].copy()
        self._ask(ready)
        return len(ready) * self._share

    def close(self) -> None:
        """End the processes."""
        for index, pid in enumerate(self._pids):
            self._asked[index] = -1
            os.eventfd_write(self._bells[index], _END)
            os.waitpid(pid, 0)
        for fd in (*self._bells, self._bell):
            os.close(fd)

    def _serve(self, index: int) -> None:
        envs = [self._factory() for _ in range(self._share)]
        for number, env in enumerate(envs):
            env.reset(seed=number)
        rows = slice(index * self._share, (index + 1) * self._share)
        actions, obs = self._actions[rows], self._obs[rows]
        asked, done, taken = memoryview(self._asked), memoryview(self._done), 0
        while True:
            if not self._spins and os.eventfd_read(self._bells[index]) >= _END:
                os._exit(0)
            while asked[index] == taken:
                pass
            taken = asked[index]
            if taken < 0:
                os._exit(0)
            given = actions.tolist() if actions.ndim == 1 else list(actions.copy())
            for row, (env, action) in enumerate(zip(envs, given, strict=True)):
                observation, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    observation, _ = env.reset()
                obs[row] = observation
            done[index] = taken
            if not self._spins:
                os.eventfd_write(self._bell, 1)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, mmap.mmap(-1, nbytes))


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return bare processes, as `options` say."""
    return BareProcesses(
        spec,
        factory,
        together=spec.options.get("together", True),
        spins=spec.options.get("spins", False),
    )
