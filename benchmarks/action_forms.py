"""What do the forms cost that actions are given in? Paired rounds with null envs, beside Gymnasium.

    python benchmarks/action_forms.py --n 8 --rounds 40

Managers that are given ints, what `argmax` of a policy gives (arrays of shape (), and (1,)), and
tensors of PyTorch if it is installed, in dicts and in lists of the V2 kind, run side by side with
Gymnasium's AsyncVectorEnv. A round measures each of them twice, forwards and backwards, for some
batches. Printed are the medians over rounds: steps per second, processor time of the trainer for
each batch, and the rate as a multiple of Gymnasium's. Every row of V2 is to reach 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from envs import NullEnv
from paired import Cost, paired_rounds

import envmgr

PROMISED = 1.2
THEIRS = "gymnasium-async"


def forms() -> dict[str, Callable[[int], Any]]:
    """Return what makes an action of a number, by the name of its form."""
    made: dict[str, Callable[[int], Any]] = {
        "int": int,
        "np.int64": np.int64,
        "array ()": np.array,
        "array (1,)": lambda number: np.array([number]),
        "int32 array ()": lambda number: np.array(number, np.int32),
    }
    try:
        import torch
    except ImportError:
        return made
    torch.set_num_threads(1)
    return {**made, "tensor ()": torch.tensor}


class Dicts:
    """A manager of a kind whose actions are dicts.

    Args:
        n: number of envs.
        form: makes an action.
        config: of the manager.
    """

    def __init__(self, n: int, form: Callable[[int], Any], **config: Any) -> None:
        self._manager = envmgr.make(NullEnv, n, seed=0, **config)
        self._manager.launch()
        self._actions = [form(1) for _ in range(n)]

    def run(self, batches: int) -> Cost:
        """Take batches."""
        manager, actions = self._manager, self._actions
        cpu_s, began = time.process_time(), time.perf_counter()
        for _ in range(batches):
            obs = manager.ready_obs
            manager.step(dict(zip(obs, actions, strict=True)))
        return time.perf_counter() - began, time.process_time() - cpu_s

    def close(self) -> None:
        """Close."""
        self._manager.close()


class Trees(Dicts):
    """A manager of a V2 kind."""

    def run(self, batches: int) -> Cost:
        """Take batches."""
        manager, actions = self._manager, self._actions
        cpu_s, began = time.process_time(), time.perf_counter()
        for _ in range(batches):
            len(manager.ready_obs)
            manager.step(actions)
        return time.perf_counter() - began, time.process_time() - cpu_s


class Theirs:
    """Gymnasium's AsyncVectorEnv.

    Args:
        n: number of envs.
    """

    def __init__(self, n: int) -> None:
        self._envs = gymnasium.vector.AsyncVectorEnv([NullEnv] * n)
        self._envs.reset(seed=0)
        self._actions = np.ones(n, np.int64)

    def run(self, batches: int) -> Cost:
        """Take batches."""
        cpu_s, began = time.process_time(), time.perf_counter()
        for _ in range(batches):
            self._envs.step(self._actions)
        return time.perf_counter() - began, time.process_time() - cpu_s

    def close(self) -> None:
        """Close."""
        self._envs.close()


def main() -> None:
    """Measure, print, and exit with 1 if a row of V2 is slower than is promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=8, help="number of envs")
    parser.add_argument("--rounds", type=int, default=40, help="of two windows of each")
    parser.add_argument("--batches", type=int, default=100, help="in each window")
    options = parser.parse_args()
    runners: dict[str, Any] = {THEIRS: Theirs(options.n)}
    try:
        for name, form in forms().items():
            runners[f"dict {name}"] = Dicts(options.n, form, type="subprocess")
            runners[f"V2 {name}"] = Trees(options.n, form, type="subprocess_v2")
        good = _compare(runners, options.n, options.rounds, options.batches)
    finally:
        for runner in runners.values():
            runner.close()
    raise SystemExit(0 if good else 1)


def _compare(runners: dict[str, Any], n: int, rounds: int, batches: int) -> bool:
    costs = list(paired_rounds(runners, rounds, batches))
    good = True
    for name in runners:
        walls, processors = zip(*(cost[name] for cost in costs), strict=True)
        times_theirs = [cost[THEIRS][0] / cost[name][0] for cost in costs]
        rate = 2 * batches * n / statistics.median(walls)
        cpu_us = statistics.median(processors) / (2 * batches) * 1e6
        ratio = statistics.median(times_theirs)
        good = good and (ratio >= PROMISED or not name.startswith("V2"))
        print(f"{name:<20} {rate:>9,.0f} steps/s {cpu_us:>7.0f} us/batch {ratio:>6.2f} x")
    return good


if __name__ == "__main__":
    main()
