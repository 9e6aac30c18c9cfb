"""Leases: many threads with an env each while envs fail, and coroutines cancelled at each await."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from figures import Figure
from tests.contract.cancelled import (
    ASYNCIO,
    TRIO,
    Library,
    Wrong,
    cancel_everywhere,
    cancel_launch_and_close,
)
from tests.contract.leased_stress import stress

N_THREADS = 64
STEPS, QUICK_STEPS = 100_000, 2_000
POINTS, QUICK_POINTS = 2_000, 60
LAUNCHES, QUICK_LAUNCHES = 400, 12

_WORKERS = 8
_SEED = 11
_NONE = "0 lost, repeated, mixed up"
_KINDS = ("base", "thread", "subprocess", "async_subprocess")


def measure(quick: bool) -> Sequence[Figure]:
    """Measure with threads, then with coroutines that are cancelled."""
    n_steps = QUICK_STEPS if quick else STEPS
    n_points = QUICK_POINTS if quick else POINTS
    n_launches = QUICK_LAUNCHES if quick else LAUNCHES
    return [
        by_threads("a worker for each env", n_steps, {}, faults=0.002),
        by_threads(f"{_WORKERS} workers", n_steps, {"num_workers": _WORKERS}, faults=0.0005),
        *(cancelled(kind, n_points, ASYNCIO) for kind in _KINDS),
        *(cancelled(kind, n_points, TRIO) for kind in ("base", "subprocess")),
        *(cancelled_launches(kind, n_launches, ASYNCIO) for kind in ("base", "subprocess")),
        cancelled_launches("subprocess", n_launches, TRIO),
    ]


def by_threads(title: str, n_steps: int, cfg: dict[str, Any], *, faults: float) -> Figure:
    """Have as many threads as envs take `n_steps` steps, while envs and workers fail."""
    began = time.monotonic()
    found = stress(
        {"type": "subprocess", **cfg},
        env_num=N_THREADS,
        n_threads=N_THREADS,
        n_steps=n_steps,
        seed=_SEED,
        faults=faults,
        kill_every_s=1.0,
    )
    return Figure(
        f"{N_THREADS} threads with an env each, {title}; crashes, hangs, a kill every second",
        f"{len(found.wrong)} of {found.steps:,} steps in {found.leases:,} leases "
        f"({found.failures:,} failures; {time.monotonic() - began:.0f} s){_first(found.wrong)}",
        _NONE,
        not found.wrong,
    )


def cancelled(kind: str, n_points: int, library: Library) -> Figure:
    """Cancel coroutines at the awaits of leases and of calls for batches."""
    n_different, wrong = cancel_everywhere({"type": kind}, most=n_points, library=library)
    return Figure(
        f"{kind}{_in(library)}: cancelled at each await of leases and of calls for batches",
        f"{len(wrong)} of {n_points:,} cancellations at {n_different} points{_first(wrong)}",
        "0 lost, leaked, wedged",
        not wrong,
    )


def cancelled_launches(kind: str, n_points: int, library: Library) -> Figure:
    """Cancel a coroutine that launches a manager and closes it."""
    wrong = cancel_launch_and_close({"type": kind}, most=n_points, library=library)
    return Figure(
        f"{kind}{_in(library)}: cancelled at each await of a launch, a lease and a close",
        f"{len(wrong)} of {n_points:,} cancellations{_first(wrong)}",
        "0 not closed",
        not wrong,
    )


def _in(library: Library) -> str:
    return " in trio" if library is TRIO else ""


def _first(wrong: Sequence[str | Wrong]) -> str:
    return f": {wrong[0]}" if wrong else ""
