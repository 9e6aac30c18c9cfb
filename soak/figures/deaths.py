"""Deaths: from a signal to the failure's being known, and to the env's being ready again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from envmgr.testing import Saboteur
from figures import Figure, in_ms, quantile
from figures.loop import ledger_manager

ENV_NUM = 8
STEP_S = 0.02
DETECTION_S = 0.010
STARTS = 3
CONTEXTS = {"server": (0.2, 300), "fork": (0.2, 300), "forkserver": (1.5, 40), "spawn": (1.5, 40)}
"""By start method: seconds between deaths, long enough for a start, and how many deaths."""
QUICK_DEATHS = 8
PATIENCE_S = 20.0
KINDS = ("kill", "segfault", "exit")


def measure(quick: bool) -> Sequence[Figure]:
    """Measure by SIGKILL for each start method, and by other ends for the default one."""
    figures = [figure for context in CONTEXTS for figure in _figures(context, "kill", quick)]
    for kind in KINDS[1:]:
        figures += _figures("server", kind, quick)[:1]
    return figures


def _figures(context: str, kind: str, quick: bool) -> list[Figure]:
    """Return how soon deaths were seen, and workers replaced.

    A start is what lies between the two: from a death's being known to the new env's being ready.
    """
    every_s, n = CONTEXTS[context]
    injuries = run(context, kind, every_s, QUICK_DEATHS if quick else n)
    undisturbed = [i for i in injuries if not i.disturbed and i.detection_s and i.recovery_s]
    missed = sum(i.failed_s is None for i in injuries)
    seen = [i.detection_s for i in undisturbed]
    recovered = [i.recovery_s for i in undisturbed]
    start_s = quantile([r - d for r, d in zip(recovered, seen, strict=True)], 0.5)
    seen_s, recovered_s = quantile(seen, 0.99), quantile(recovered, 0.99)
    how = f"`context: {context}`, {len(undisturbed)} workers ended by {kind}"
    return [
        Figure(
            f"{how}: death seen, p99",
            f"{in_ms(seen_s)}, median {in_ms(quantile(seen, 0.5))}, {missed} missed",
            f"{in_ms(DETECTION_S)}",
            seen_s <= DETECTION_S and not missed,
        ),
        Figure(
            f"{how}: ready again, p99",
            f"{in_ms(recovered_s)} = {recovered_s / start_s:.1f} starts "
            f"(median start {in_ms(start_s)})",
            f"{STARTS} median starts",
            recovered_s <= STARTS * start_s,
        ),
    ]


def run(context: str, kind: str, every_s: float, n: int) -> list[Any]:
    """Hurt so many workers while their manager steps; return the injuries, with their times."""
    manager = ledger_manager(
        ENV_NUM, type="async_subprocess", wait_num=1, context=context, step_s=STEP_S
    )
    try:
        saboteur = Saboteur(manager, rate_hz=1 / every_s, kinds=(kind,), seed=0)
        with saboteur:
            while len(saboteur.injuries) < n:
                _round(manager)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not _are_over(saboteur.collect()):
            _round(manager)
        return saboteur.injuries
    finally:
        manager.close()


def _are_over(injuries: list[Any]) -> bool:
    return all(injury.ready_s is not None for injury in injuries)


def _round(manager: Any) -> None:
    manager.step(dict.fromkeys(manager.ready_obs, 1))
