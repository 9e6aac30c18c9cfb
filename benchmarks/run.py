"""Side-by-side benchmarks: `python benchmarks/run.py [CASE ...]`."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from envs import (
    EPISODE_STEPS,
    RESET_S,
    STEP_S,
    UNEVEN_MEDIAN_S,
    UNEVEN_SIGMA,
    NullEnv,
    SlowResetEnv,
    UnevenEnv,
)

import envmgr

WARM_UP_S = 1.0


def rate_of_manager(env: Any, env_num: int, seconds: float, **cfg: Any) -> float:
    """Return env steps per second of the dict-style loop."""
    with envmgr.make(env, env_num, seed=0, **cfg) as manager:

        def step() -> int:
            return len(manager.step(dict.fromkeys(manager.ready_obs, 0)))

        return rate_of(step, seconds)


def rate_of_gymnasium(env: Any, env_num: int, seconds: float) -> float:
    """Return env steps per second of Gymnasium's AsyncVectorEnv (shared memory, its default)."""
    envs = gymnasium.vector.AsyncVectorEnv([env] * env_num)
    try:
        envs.reset(seed=0)
        actions = np.zeros(env_num, np.int64)

        def step() -> int:
            envs.step(actions)
            return env_num

        return rate_of(step, seconds)
    finally:
        envs.close()


def rate_of(step: Callable[[], int], seconds: float) -> float:
    """Return units per second of `step`, after a warm-up."""
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        step()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done += step()
    return done / (time.perf_counter() - began)


def mean_sleep_s(draw: Callable[[], float], count: int) -> float:
    """Return how long `time.sleep` of such durations really takes on this machine, on average."""
    began = time.perf_counter()
    for _ in range(count):
        time.sleep(draw())
    return (time.perf_counter() - began) / count


def null_case(seconds: float, rounds: int) -> list[str]:
    """Throughput of a do-nothing env, n=8, one env per host, dict form."""
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(rate_of_gymnasium(NullEnv, 8, seconds))
        ours.append(rate_of_manager(NullEnv, 8, seconds, type="subprocess"))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return [
        f"null n=8: envmgr subprocess {statistics.median(ours):,.0f} steps/s, Gymnasium "
        f"AsyncVectorEnv {statistics.median(theirs):,.0f} steps/s, ratio {ratio:.2f}"
    ]


def uneven_case(seconds: float, rounds: int) -> list[str]:
    """async_subprocess, wait_num 1, n=16: share of what the envs can do alone."""
    generator = np.random.default_rng(0)
    alone_s = mean_sleep_s(lambda: generator.lognormal(np.log(UNEVEN_MEDIAN_S), UNEVEN_SIGMA), 1000)
    lines = []
    for env_num in (16, 64):
        ideal = env_num / alone_s
        cfg = {"type": "async_subprocess", "wait_num": 1, "step_wait_timeout": 0}
        rates = [rate_of_manager(UnevenEnv, env_num, seconds, **cfg) for _ in range(rounds)]
        lines.append(_share("uneven", env_num, "async_subprocess", rates, ideal))
    return lines


def slow_reset_case(seconds: float, rounds: int) -> list[str]:
    """Overlapped resets, n=16 and 64: share of the ideal."""
    step_s = mean_sleep_s(lambda: STEP_S, 500)
    reset_s = mean_sleep_s(lambda: RESET_S, 5)
    steps = sum(EPISODE_STEPS) / 2
    lines = []
    for env_num in (16, 64):
        ideal = env_num * steps / (steps * step_s + reset_s)
        for kind in ("subprocess", "async_subprocess"):
            rates = [
                rate_of_manager(SlowResetEnv, env_num, seconds, type=kind) for _ in range(rounds)
            ]
            lines.append(_share("slow reset", env_num, kind, rates, ideal))
    return lines


def _share(case: str, env_num: int, kind: str, rates: list[float], ideal: float) -> str:
    rate = statistics.median(rates)
    return (
        f"{case} n={env_num} {kind}: {rate:,.0f} steps/s of {ideal:,.0f} ideal, "
        f"{100 * rate / ideal:.1f} % (rounds: {', '.join(f'{100 * r / ideal:.1f}' for r in rates)})"
    )


CASES = {"null": null_case, "uneven": uneven_case, "slow-reset": slow_reset_case}


def main() -> None:
    """Run the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; the median counts")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.platform()}")
    for name in arguments.cases or CASES:
        if name not in CASES:
            parser.error(f"unknown case {name!r}; known: {', '.join(CASES)}")
        for line in CASES[name](arguments.seconds, arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
