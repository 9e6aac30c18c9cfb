"""Interrupts: signals at every point of every public call, and at random moments of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from figures import Figure
from tests.faults.interrupted_calls import (
    LARGE_INFOS,
    PROCESS_KINDS,
    THREAD_KINDS,
    run,
    run_at_random,
)

KINDS: dict[str, dict[str, Any]] = {
    "in line": {"type": "base"},
    **THREAD_KINDS,
    # By fork, which starts fastest: a third of the signals close the manager, and need another one.
    **{name: {**config, "context": "fork"} for name, config in PROCESS_KINDS.items()},
    "shared workers, large infos": LARGE_INFOS,
}
AT_RANDOM, QUICK_AT_RANDOM = 10_000, 100
QUICK_POINTS = 100
TARGET = "0 lost, repeated, hung or wedged"


def measure(quick: bool) -> Sequence[Figure]:
    """Attack each kind at points of its calls, then at random moments of them."""
    gc.collect()
    gc.freeze()  # a collection in a forked worker, as it ends, would copy every page
    return [
        figure
        for name, config in KINDS.items()
        for figure in (_at_points(name, config, quick), _at_random(name, config, quick))
    ]


def _at_points(name: str, config: Mapping[str, Any], quick: bool) -> Figure:
    what = f"{name}: signals at points of calls"
    try:
        figures = run(config, QUICK_POINTS if quick else None)
    except AssertionError as error:
        return Figure(what, str(error), TARGET, False)
    text = f"{figures['points']} signals, {figures['raised']} calls ended by them: none"
    return Figure(what, text, TARGET, True)


def _at_random(name: str, config: Mapping[str, Any], quick: bool) -> Figure:
    what = f"{name}: alarms at random moments of calls"
    count = QUICK_AT_RANDOM if quick else AT_RANDOM
    try:
        n_raised = run_at_random(config, count)
    except AssertionError as error:
        return Figure(what, str(error), TARGET, False)
    return Figure(what, f"{count} alarms, {n_raised} calls ended by them: none", TARGET, True)
