"""Loops over envs without any library, in one process or on as many cores at once as asked for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spec import Runner, Spec

from adapters.actions import list_batches

_STEPS = 256


class PlainLoop:
    """One env stepped in this process.

    A batch is `min_steps` steps, so that the clock is not read after each of them.
    """

    def __init__(self, spec: Spec, factory: Callable[[], Any]) -> None:
        self._factory = factory
        min_steps = 16 if spec.env == "busy" else _STEPS
        self._actions = next(list_batches(replace(spec, env_num=min_steps)))

    def start(self) -> None:
        """Build the env and reset it."""
        self._env = self._factory()
        self._env.reset(seed=0)

    def step(self) -> int:
        """Step the env a few times, with the resets that fall due."""
        env = self._env
        for action in self._actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(self._actions)

    def close(self) -> None:
        """Close the env."""
        self._env.close()


class PlainLoopOverAll:
    """All envs stepped in this process, one after another: what they cost without any library."""

    def __init__(self, spec: Spec, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._env_num = spec.env_num
        self._actions = list_batches(spec)

    def start(self) -> None:
        """Build the envs and reset them."""
        self._envs = [self._factory() for _ in range(self._env_num)]
        for number, env in enumerate(self._envs):
            env.reset(seed=number)

    def step(self) -> int:
        """Step each env once, with the resets that fall due."""
        for env, action in zip(self._envs, next(self._actions), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return self._env_num

    def close(self) -> None:
        """Close the envs."""
        for env in self._envs:
            env.close()


class PlainLoops:
    """Plain loops in several processes at once: what so many cores do without any library.

    The other processes run from `start` to `close` and count their steps in shared memory.
    """

    def __init__(self, spec: Spec, factory: Callable[[], Any], processes: int) -> None:
        self._own = PlainLoop(spec, factory)
        self._processes = processes
        context = multiprocessing.get_context("fork")
        self._counters = [context.Value("q", 0, lock=False) for _ in range(processes - 1)]
        self._seen = [0] * (processes - 1)
        self._others = [
            context.Process(target=_run_for_ever, args=(spec, factory, counter), daemon=True)
            for counter in self._counters
        ]

    def start(self) -> None:
        """Start the other processes and build the own env."""
        for process in self._others:
            process.start()
        self._own.start()

    def step(self) -> int:
        """Step the own env; count what the others have done meanwhile."""
        done = self._own.step()
        for i, counter in enumerate(self._counters):
            value = counter.value
            done += value - self._seen[i]
            self._seen[i] = value
        return done

    def close(self) -> None:
        """End the other processes."""
        for process in self._others:
            process.kill()
            process.join()
        self._own.close()


def _run_for_ever(spec: Spec, factory: Callable[[], Any], counter: Any) -> None:
    loop = PlainLoop(spec, factory)
    loop.start()
    while True:
        counter.value += loop.step()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return plain loops over an env each on `options["processes"]` cores; None: one over all."""
    processes = spec.options["processes"]
    if processes is None:
        return PlainLoopOverAll(spec, factory)
    if processes == 1:
        return PlainLoop(spec, factory)
    return PlainLoops(spec, factory, processes)
