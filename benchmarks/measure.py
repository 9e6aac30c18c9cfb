"""Takes one measurement and prints it as JSON: `python measure.py SPEC`, started by `run.py`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from envs import env_factory, missing_for
from processes import cpu_s, tree, tree_pss_bytes
from spec import RATE, TRAINING, Runner, Spec, Trainer, UnavailableError

_LIFETIME_STEPS = 20


def rate(runner: Runner, warm_up_s: float, seconds: float) -> dict[str, float]:
    """Return env steps per second, and the processor time of a step, after a warm-up."""
    runner.start()
    try:
        _steps_for(runner.step, warm_up_s)
        return _measured(lambda: _steps_for(runner.step, seconds))
    finally:
        runner.close()


def _measured(run: Callable[[], tuple[int, float]]) -> dict[str, float]:
    """Return the figures of what takes steps, and says how many and in how many seconds."""
    trainer, *workers = tree(os.getpid())
    parts = ([trainer], workers)
    before = [cpu_s(pids) for pids in parts]
    steps, took_s = run()
    trainer_s, workers_s = (cpu_s(pids) - then for pids, then in zip(parts, before, strict=True))
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


def training(trainer: Trainer) -> dict[str, float]:
    """Return env steps per second of a training, and the share of the time spent in its envs."""

    def run() -> tuple[int, float]:
        began = time.perf_counter()
        steps = trainer.train()
        return steps, time.perf_counter() - began

    trainer.start()
    try:
        figures = _measured(run)
        return {**figures, "envs_share": trainer.envs_s() / figures["wall_s"]}
    finally:
        trainer.close()


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

    factory = env_factory(spec.env, spec.busy_loops)
    try:
        _check_packages(spec.env)
        if spec.kind == TRAINING:
            from training import open_trainer

            return training(open_trainer(spec, factory))
        runner = open_runner(spec, factory)
        if spec.kind == RATE:
            return rate(runner, spec.warm_up_s, spec.seconds)
        return lifetime(runner)
    except UnavailableError as error:
        return {"unavailable": str(error)}


def _check_packages(env: str) -> None:
    for package in missing_for(env):
        reason = machine.reason_missing(package, Path(sys.prefix))
        raise UnavailableError(f"{package}: {reason}")


def main() -> None:
    """Measure; libraries may print what they like, it goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = measure(Spec.from_json(sys.argv[1]))
    answer.write(json.dumps(result) + "\n")
    answer.close()


if __name__ == "__main__":
    main()
