"""What envs that sleep could do at best on this machine, from how long its sleeps really take."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from envs import EPISODE_STEPS, RESET_S, STEP_S, UNEVEN_MEDIAN_S, UNEVEN_SIGMA, WAIT_S


def mean_sleep_s(draw: Callable[[], float], count: int) -> float:
    """Return how long `time.sleep` of such durations really takes on this machine, on average."""
    began = time.perf_counter()
    for _ in range(count):
        time.sleep(draw())
    return (time.perf_counter() - began) / count


def uneven_steps_per_s() -> float:
    """Return env steps per second of one env `uneven` that nobody disturbs.

    The mean of the distribution is known; what a sleep takes longer than asked for is measured.
    """
    asked_s = UNEVEN_MEDIAN_S * float(np.exp(UNEVEN_SIGMA**2 / 2))
    late_s = mean_sleep_s(lambda: UNEVEN_MEDIAN_S, 300) - UNEVEN_MEDIAN_S
    return 1.0 / (asked_s + late_s)


def slow_reset_steps_per_s() -> float:
    """Return env steps per second of one env `slow-reset` that nobody disturbs."""
    steps = sum(EPISODE_STEPS) / 2
    step_s = mean_sleep_s(lambda: STEP_S, 500)
    reset_s = mean_sleep_s(lambda: RESET_S, 3)
    return steps / (steps * step_s + reset_s)


def waiting_steps_per_s() -> float:
    """Return env steps per second of one env `waiting` that nobody disturbs."""
    return 1.0 / mean_sleep_s(lambda: WAIT_S, 50)


SLEEP_IDEALS: dict[str, Callable[[], float]] = {
    "uneven": uneven_steps_per_s,
    "slow-reset": slow_reset_steps_per_s,
    "waiting": waiting_steps_per_s,
}
