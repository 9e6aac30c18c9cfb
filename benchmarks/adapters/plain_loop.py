"""A loop over one env in one process, on as many cores at once as asked for: the ideal."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec

from adapters.actions import list_batches

_STEPS = 256


class PlainLoop:
    """One env stepped in this process.

    A batch is `min_steps` steps, so that the clock is not read after each of them.
    """

    def __init__(self, factory: Callable[[], Any], min_steps: int) -> None:
        self._factory = factory
        self._actions = next(list_batches(min_steps))

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


class PlainLoops:
    """Plain loops in several processes at once: what so many cores do without any library.

    The other processes run from `start` to `close` and count their steps in shared memory.
    """

    def __init__(self, factory: Callable[[], Any], min_steps: int, processes: int) -> None:
        self._own = PlainLoop(factory, min_steps)
        self._processes = processes
        context = multiprocessing.get_context("fork")
        self._counters = [context.Value("q", 0, lock=False) for _ in range(processes - 1)]
        self._seen = [0] * (processes - 1)
        self._others = [
            context.Process(target=_run_for_ever, args=(factory, min_steps, counter), daemon=True)
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


def _run_for_ever(factory: Callable[[], Any], min_steps: int, counter: Any) -> None:
    loop = PlainLoop(factory, min_steps)
    loop.start()
    while True:
        counter.value += loop.step()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return plain loops on `options["processes"]` cores."""
    min_steps = 16 if spec.env == "busy" else _STEPS
    processes = spec.options["processes"]
    if processes == 1:
        return PlainLoop(factory, min_steps)
    return PlainLoops(factory, min_steps, processes)
