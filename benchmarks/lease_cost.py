"""What does a step of a leased env cost, beside the same env in batches of one? Paired rounds.

    python benchmarks/lease_cost.py --rounds 40
    python benchmarks/lease_cost.py --kind thread --envs 8

It counts the processor time of the trainer's process (`--kind thread`: of all threads), which means
something on a machine that others use, too. A hand-over from a thread to another that waits for a
socket and back, by a lock, is measured in the same rounds: a leased step takes two, and may cost
30 us besides those.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from envs import NullEnv
from paired import Cost, Runner, paired_rounds

import envmgr

BESIDES_US = 30.0


class Steps:
    """A manager whose env 0 takes steps in one of three ways.

    Args:
        kind: of the manager.
        n: number of envs.
        way: "batch", "thread" or "coroutine".
    """

    def __init__(self, kind: str, n: int, way: str) -> None:
        self._manager = envmgr.make(NullEnv, n, seed=0, type=kind)
        self._manager.launch()
        ways: dict[str, Callable[[int], None]] = {
            "batch": self._in_batches,
            "thread": self._leased,
            "coroutine": lambda steps: asyncio.run(self._awaited(steps)),
        }
        self._way = ways[way]

    def _in_batches(self, steps: int) -> None:
        manager, actions = self._manager, {0: 1}
        for _ in range(steps):
            len(manager.ready_obs)
            manager.step(actions)

    def _leased(self, steps: int) -> None:
        with self._manager.lease() as env:
            env.reset()
            for _ in range(steps):
                env.step(1)

    async def _awaited(self, steps: int) -> None:
        async with self._manager.lease() as env:
            await env.reset()
            for _ in range(steps):
                await env.step(1)

    def run(self, batches: int) -> Cost:
        """Take steps; return what they cost."""
        cpu_s, began = time.process_time(), time.perf_counter()
        self._way(batches)
        return time.perf_counter() - began, time.process_time() - cpu_s

    def close(self) -> None:
        """Close."""
        self._manager.close()


class HandOvers:
    """Two hand-overs: to a thread that waits for a socket, and back, by a lock."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._back = threading.Lock()
        self._back.acquire()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        poll = select.poll()
        poll.register(self._there, select.POLLIN)
        while True:
            poll.poll()
            if self._there.recv(16) == b"e":
                return
            self._back.release()

    def run(self, batches: int) -> Cost:
        """Hand over to and fro; return what that costs."""
        cpu_s, began = time.process_time(), time.perf_counter()
        for _ in range(batches):
            self._here.send(b"w")
            self._back.acquire()
        return time.perf_counter() - began, time.process_time() - cpu_s

    def close(self) -> None:
        """End."""
        self._here.send(b"e")
        self._thread.join()
        self._here.close()
        self._there.close()


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="subprocess", help="of the manager")
    parser.add_argument("--envs", type=int, default=1, help="of the manager; one is stepped")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=250, help="of each, twice in a round")
    return parser.parse_args()


def main() -> None:
    """Measure, and print microseconds of each step."""
    options = parse()
    runners: dict[str, Any] = {"two hand-overs": HandOvers()}
    for way in ("batch", "thread", "coroutine"):
        runners[way] = Steps(options.kind, options.envs, way)
    cpu: dict[str, list[float]] = {name: [] for name in runners}
    wall: dict[str, list[float]] = {name: [] for name in runners}
    try:
        measured: dict[str, Runner] = dict(runners)
        for costs in paired_rounds(measured, options.rounds, options.steps):
            for name, (wall_s, cpu_s) in costs.items():
                wall[name].append(wall_s / options.steps / 2 * 1e6)
                cpu[name].append(cpu_s / options.steps / 2 * 1e6)
    finally:
        for runner in runners.values():
            runner.close()
    print(
        f"{options.kind}, {options.envs} envs: us of each step, medians of {options.rounds} rounds"
    )
    print(f"{'':16}{'processors':>12}{'lowest':>10}{'wall':>10}")
    for name in runners:
        lowest, median = min(cpu[name]), statistics.median(cpu[name])
        print(f"{name:16}{median:12.1f}{lowest:10.1f}{statistics.median(wall[name]):10.1f}")
    rounds = zip(cpu["batch"], cpu["two hand-overs"], cpu["thread"], strict=True)
    besides = statistics.median(leased - batch - hands for batch, hands, leased in rounds)
    print(f"a leased step costs {besides:.1f} us more than both (target: {BESIDES_US:.0f})")


if __name__ == "__main__":
    main()
