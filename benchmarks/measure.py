"""Takes one measurement and prints it as JSON: `python measure.py SPEC`, started by `run.py`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from envs import env_factory
from processes import cpu_s, tree, tree_pss_bytes
from spec import RATE, Runner, Spec, UnavailableError

_LIFETIME_STEPS = 20


def rate(runner: Runner, warm_up_s: float, seconds: float) -> dict[str, float]:
    """Return env steps per second, and the processor time of a step, after a warm-up."""
    runner.start()
    try:
        _steps_for(runner.step, warm_up_s)
        trainer, *workers = tree(os.getpid())
        parts = ([trainer], workers)
        before = [cpu_s(pids) for pids in parts]
        steps, took_s = _steps_for(runner.step, seconds)
        trainer_s, workers_s = (
            cpu_s(pids) - then for pids, then in zip(parts, before, strict=True)
        )
    finally:
        runner.close()
    return {
        "steps_per_s": steps / took_s,
        "steps": steps,
        "wall_s": took_s,
        "trainer_us": 1e6 * trainer_s / steps,
        "workers_us": 1e6 * workers_s / steps,
    }


def _steps_for(step: Callable[[], int], seconds: float) -> tuple[int, float]:
    clock = time.perf_counter
    steps, began = 0, clock()
    end = began + seconds
    while True:
        steps += step()
        now = clock()
        if now >= end:
            return steps, now - began


def lifetime(runner: Runner) -> dict[str, float]:
    """Return how long start and close take, and the memory in between."""
    began = time.perf_counter()
    runner.start()
    started = time.perf_counter()
    for _ in range(_LIFETIME_STEPS):
        runner.step()
    pss_bytes = tree_pss_bytes()
    closing = time.perf_counter()
    runner.close()
    closed = time.perf_counter()
    return {"start_s": started - began, "pss_mb": pss_bytes / 1e6, "close_s": closed - closing}


def measure(spec: Spec) -> dict[str, Any]:
    """Return the figures of one spec, or `{"unavailable": reason}`."""
    from adapters import open_runner

    try:
        runner = open_runner(spec, env_factory(spec.env, spec.busy_loops))
        if spec.kind == RATE:
            return rate(runner, spec.warm_up_s, spec.seconds)
        return lifetime(runner)
    except UnavailableError as error:
        return {"unavailable": str(error)}


def main() -> None:
    """Measure; libraries may print what they like, it goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = measure(Spec.from_json(sys.argv[1]))
    answer.write(json.dumps(result) + "\n")
    answer.close()


if __name__ == "__main__":
    main()
