"""How near to the ideal are envs that wait: async envs in batches, and rollouts of leases?

    python benchmarks/async_envs.py batches --envs 2000 --step-s 1
    python benchmarks/async_envs.py batches --envs 10000 --step-s 10 --steps 3
    python benchmarks/async_envs.py rollouts --rollouts 256 --step-s 3

`batches` steps async envs which wait so long in each step, and sends each its next action as soon
as its timestep is there. The ideal is a step of each env in each such time. `rollouts` has as many
coroutines, or threads, each with a leased env, take so many steps; the ideal is the sum of
the steps of one. What is printed besides: processor time of the trainer, and memory of each env.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

import envmgr

OBS = Box(-np.inf, np.inf, (4,), np.float32)


class Waits(gymnasium.Env[Any, Any]):
    """Waits in each step, as an env does that asks a server.

    Args:
        step_s: for how long.
    """

    observation_space, action_space = OBS, Discrete(2)

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin an episode."""
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        """Wait, and answer."""
        time.sleep(self.step_s)
        return np.ones(4, np.float32), 1.0, False, False, {}


class WaitsAsync(Waits):
    """Waits likewise, in a coroutine."""

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin an episode."""
        return np.zeros(4, np.float32), {}

    async def step(self, action: Any) -> Any:
        """Wait, and answer."""
        await asyncio.sleep(self.step_s)
        return np.ones(4, np.float32), 1.0, False, False, {}


def memory_kb() -> float:
    """Return the private memory of this process and of all that it has started, in kB."""
    mine = os.getpid()
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    family = {mine}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(map(_private_kb, family))


def _private_kb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return float(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")))


def batches(options: argparse.Namespace) -> None:
    """Step async envs, each as soon as it is ready."""
    n, step_s = options.envs, options.step_s

    def launched(count: int) -> Any:
        return envmgr.make(
            [partial(WaitsAsync, step_s)] * count,
            type="async_subprocess",
            num_workers=options.workers,
            wait_num=1,
        )

    with launched(options.workers):
        before_kb = memory_kb()
    began = time.perf_counter()
    with launched(n) as manager:
        launch_s = time.perf_counter() - began
        each_kb = (memory_kb() - before_kb) / (n - options.workers)
        manager.send(dict.fromkeys(manager.ready_obs, 1))
        began, cpu, taken, left = time.perf_counter(), time.process_time(), 0, options.steps * n
        while left > 0:
            came = manager.recv(1)
            taken, left = taken + len(came), left - len(came)
            manager.send(dict.fromkeys(came, 1))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    rate = taken / seconds
    print(
        f"{n} async envs, {step_s:g} s in each step, {options.workers} workers: {rate:.0f} "
        f"steps/s, {rate * step_s / n:.1%} of the ideal; {cpu / taken * 1e6:.0f} us of the "
        f"trainer's processor time for each; {each_kb:.0f} kB for each env; "
        f"launched in {launch_s:.1f} s"
    )


def rollouts(options: argparse.Namespace) -> None:
    """Have rollouts lease an env each: by coroutines and threads, of both kinds of envs."""
    n, steps, ideal_s = options.rollouts, options.steps, options.steps * options.step_s
    for env in (WaitsAsync, Waits):
        keys = {"num_workers": options.workers} if env is WaitsAsync else {}
        for way in (_by_coroutines, _by_threads):
            factories = [partial(env, options.step_s)] * n
            with envmgr.make(factories, type="subprocess", **keys) as manager:
                cpu, seconds = time.process_time(), way(manager, n, steps)
                cpu = time.process_time() - cpu
                workers = manager.stats()["num_workers"]
            print(
                f"{n} rollouts of {steps} steps of {options.step_s:g} s, {env.__name__:10} in "
                f"{workers:3} workers, {way.__name__[1:]:13}: {seconds:.2f} s, "
                f"{seconds / ideal_s:.3f} x the ideal; {cpu / n / steps * 1e6:.0f} us of the "
                "trainer's processor time for each step"
            )


def _by_coroutines(manager: Any, n: int, steps: int) -> float:
    async def roll() -> None:
        async with manager.lease() as env:
            await env.reset()
            for _ in range(steps):
                await env.step(1)

    async def main() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(roll() for _ in range(n)))
        return time.perf_counter() - began

    return asyncio.run(main())


def _by_threads(manager: Any, n: int, steps: int) -> float:
    def roll() -> None:
        with manager.lease() as env:
            env.reset()
            for _ in range(steps):
                env.step(1)

    threads = [threading.Thread(target=roll) for _ in range(n)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["batches", "rollouts"])
    parser.add_argument("--envs", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2, help="that share the async envs")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3, help="of each env, or rollout")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse()
    (batches if chosen.what == "batches" else rollouts)(chosen)
