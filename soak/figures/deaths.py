"""Deaths: the time from a signal until the failure is known, and until the env is ready again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from envmgr.testing import Saboteur
from figures import Figure, in_ms, quantile
from figures.loop import ledger_manager

ENV_NUM = 8
STEP_S = 0.02
DETECTION_S = 0.010
STARTS = 3
QUICK_DEATHS = 8
PATIENCE_S = 20.0


class Setup(NamedTuple):
    """How workers run and end.

    Attributes:
        cfg: the config of their manager.
        kind: how they are ended.
        every_s: seconds between deaths, long enough for a start.
        n: how many deaths are caused.
    """

    cfg: dict[str, Any]
    kind: str = "kill"
    every_s: float = 0.2
    n: int = 300

    def __str__(self) -> str:
        values = ", ".join(f"{key} {str(value).lower()}" for key, value in self.cfg.items())
        return f"{self.kind}; {values}"


_ASYNC, _SYNC = {"type": "async_subprocess"}, {"type": "subprocess"}
SETUPS = (
    Setup({**_ASYNC, "context": "server"}),
    Setup({**_ASYNC, "context": "server"}, "segfault"),
    Setup({**_ASYNC, "context": "server"}, "exit"),
    Setup({**_SYNC, "context": "server"}),
    Setup({**_ASYNC, "context": "fork"}),
    Setup({**_SYNC, "context": "fork", "shared_memory": False}),
    Setup({**_ASYNC, "context": "forkserver"}, every_s=1.5, n=40),
    Setup({**_ASYNC, "context": "spawn"}, every_s=1.5, n=40),
)


def measure(quick: bool) -> Sequence[Figure]:
    """Measure how soon deaths are seen, and workers replaced."""
    return [figure for setup in SETUPS for figure in _figures(setup, quick)]


def _figures(setup: Setup, quick: bool) -> list[Figure]:
    """Return the figures of one setup.

    A start is the time between the two: from when a death is known until the new env is ready.
    """
    injuries = run(setup, QUICK_DEATHS if quick else setup.n)
    undisturbed = [i for i in injuries if not i.disturbed and i.detection_s and i.recovery_s]
    missed = sum(i.failed_s is None for i in injuries)
    seen = [i.detection_s for i in undisturbed]
    recovered = [i.recovery_s for i in undisturbed]
    start_s = quantile([r - d for r, d in zip(recovered, seen, strict=True)], 0.5)
    seen_s, recovered_s = quantile(seen, 0.99), quantile(recovered, 0.99)
    how = f"{len(undisturbed)} workers ended by {setup}"
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


def run(setup: Setup, n: int) -> list[Any]:
    """Hurt `n` workers while their manager steps; return the injuries, with their times."""
    cfg = dict(setup.cfg)
    if cfg["type"].startswith("async"):
        cfg["wait_num"] = 1
    manager = ledger_manager(ENV_NUM, step_s=STEP_S, **cfg)
    try:
        sent_s: dict[int, float] = {}
        saboteur = Saboteur(
            manager,
            rate_hz=1 / setup.every_s,
            kinds=(setup.kind,),
            seed=0,
            send=partial(_send, sent_s),
        )
        with saboteur:
            while len(saboteur.injuries) < n:
                _round(manager)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not _are_over(saboteur.collect()):
            _round(manager)
        for injury in saboteur.injuries:
            injury.time_s = sent_s[injury.pid]
        return saboteur.injuries
    finally:
        manager.close()


def _send(sent_s: dict[int, float], pid: int, number: int) -> bool:
    """Send a signal, and note when.

    The time that the saboteur itself notes is earlier: it releases the GIL before it sends, and may
    have to wait for the GIL while the trainer computes.
    """
    sent_s[pid] = time.monotonic()
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _are_over(injuries: list[Any]) -> bool:
    return all(injury.ready_s is not None for injury in injuries)


def _round(manager: Any) -> None:
    manager.step(dict.fromkeys(manager.ready_obs, 1))
