"""Leaks: what is there after many renewals that was not there before."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

from envmgr.testing import Saboteur
from figures import Figure
from figures.loop import ledger_manager
from tests.leak_guard import LeakGuard

ENV_NUM = 8
RENEWALS, QUICK_RENEWALS = 2_000, 60
WARM_UP, QUICK_WARM_UP = 600, 20
"""Renewals before the first snapshot: what is kept of the latest failures has a fixed length, which
this many renewals fill."""
MEMORY_MIB = 2.0
CONTEXTS = ("server", "fork")
PATIENCE_S = 30.0


def measure(quick: bool) -> Sequence[Figure]:
    """Measure for two start methods."""
    n, warm_up = (QUICK_RENEWALS, QUICK_WARM_UP) if quick else (RENEWALS, WARM_UP)
    return [grown(context, n, warm_up, quick=quick) for context in CONTEXTS]


def grown(context: str, n: int, warm_up: int, *, quick: bool) -> Figure:
    """Measure for one start method."""
    guard = LeakGuard()
    manager = ledger_manager(ENV_NUM, type="subprocess", context=context)
    try:
        saboteur = Saboteur(manager, kinds=("kill",), seed=0)
        _renew(manager, saboteur, warm_up)
        before, before_mib, before_workers = guard.snapshot(), _resident_mib(), _workers(manager)
        _renew(manager, saboteur, n)
        after_mib, after_workers = _resident_mib(), _workers(manager)
        now = guard.snapshot()
        renewals = manager.stats()["renewals"]
    finally:
        manager.close()
    fds = len(now.fds) - len(before.fds)
    threads = len(now.threads) - len(before.threads)
    shared = len(now.shared_memory) - len(before.shared_memory)
    mappings = len(now.mappings) - len(before.mappings)
    zombies = sum(process.zombie for process in now.processes.values())
    processes = len(now.processes) - len(before.processes) - (after_workers - before_workers)
    more_mib = after_mib - before_mib
    more = (fds, threads, shared + mappings, processes, zombies)
    return Figure(
        f"{n:,} renewals after {warm_up}, `context: {context}` ({renewals:,} counted)",
        "{:+d} fds, {:+d} threads, {:+d} shared memory, {:+d} processes, {} zombies, ".format(*more)
        + f"{more_mib:+.1f} MiB",
        f"+0 of each, +{MEMORY_MIB:g} MiB",
        not any(more) and (quick or more_mib <= MEMORY_MIB),
    )


def _renew(manager: Any, saboteur: Saboteur, n: int) -> None:
    """Kill one worker after the other, and wait until all envs are ready again."""
    for _ in range(n):
        deadline = time.monotonic() + PATIENCE_S
        renewals = manager.stats()["renewals"]
        while saboteur.injure() is None:
            if time.monotonic() > deadline:
                raise RuntimeError("there is no worker to be killed")
            time.sleep(0.001)
        while manager.stats()["renewals"] == renewals or len(manager.ready_obs) < ENV_NUM:
            if time.monotonic() > deadline:
                raise RuntimeError("an env that was killed is not renewed")
            manager.step(dict.fromkeys(manager.ready_obs, 1))
    saboteur.injuries.clear()
    gc.collect()


def _workers(manager: Any) -> int:
    return len(manager.stats()["workers"])


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
