"""Crash loops: an env that dies again and again keeps to its budget, and costs next to nothing."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envmgr import create_env_manager
from envmgr.errors import FailuresExhaustedError
from envmgr.testing import LedgerEnv
from figures import Figure

ENV_NUM = 4
MAX_FAILURES = 5
SECONDS, QUICK_SECONDS = 60.0, 4.0
CPU_SHARE = 0.05


class DyingEnv(LedgerEnv):
    """An env that dies in its first step; those that are built after it all die in one place.

    Args:
        env_id: its number; only 0 dies.
        folder: where a file says that an env of this number was built before.
        place: where those built later die: "step", "reset" or "construction".
    """

    def __init__(self, env_id: int, folder: str, place: str) -> None:
        super().__init__(env_id)
        path = Path(folder, str(env_id))
        self._place = place if path.exists() and env_id == 0 else ""
        self._dies_first = env_id == 0
        path.touch()
        self._die_in("construction")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, or die."""
        self._die_in("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        """Step, or die."""
        if self._dies_first:
            os._exit(1)
        return super().step(action)

    def _die_in(self, place: str) -> None:
        if place == self._place:
            os._exit(1)


def measure(quick: bool) -> Sequence[Figure]:
    """Measure the budget, and the costs while the budget is not spent yet."""
    seconds = QUICK_SECONDS if quick else SECONDS
    return [
        budget("step", "in each step"),
        budget("reset", "in each reset"),
        budget("construction", "whenever it is built"),
        _costs("reset", "in each reset", seconds),
        _costs("construction", "whenever it is built", seconds),
    ]


def _manager(folder: str, place: str, max_failures: int) -> Any:
    env_fn = [partial(DyingEnv, env_id, folder, place) for env_id in range(ENV_NUM)]
    cfg = {"type": "subprocess", "max_failures": max_failures, "failure_window_s": 600.0}
    manager = create_env_manager(cfg, env_fn=env_fn)
    manager.launch()
    return manager


def budget(place: str, when: str) -> Figure:
    """Step until the budget is spent; count failures and starts."""
    with tempfile.TemporaryDirectory() as folder, _manager(folder, place, MAX_FAILURES) as manager:
        raised = False
        deadline = time.monotonic() + 60.0
        while not raised and time.monotonic() < deadline:
            try:
                manager.step(dict.fromkeys(manager.ready_obs, 1))
            except FailuresExhaustedError:
                raised = True
        stats = manager.stats()
        manager.get_attr("action_space", env_ids=range(1, ENV_NUM))  # they are not in a reset then
        others = len(manager.step(dict.fromkeys(manager.ready_obs, 1)))
    failures, renewals = stats["failures"], stats["renewals"]
    return Figure(
        f"an env that dies {when}, max_failures {MAX_FAILURES}",
        f"{failures} failures, {renewals} renewals, then {'raised' if raised else 'nothing'}; "
        f"{others} others go on",
        f"{MAX_FAILURES + 1} failures, {MAX_FAILURES} renewals, raised, {ENV_NUM - 1} others",
        (failures, renewals, raised, others) == (MAX_FAILURES + 1, MAX_FAILURES, True, ENV_NUM - 1),
    )


def _costs(place: str, when: str, seconds: float) -> Figure:
    """Leave it to the background, with the default pauses; count the time of all processes."""
    with tempfile.TemporaryDirectory() as folder, _manager(folder, place, 10) as manager:
        manager.step(dict.fromkeys(manager.ready_obs, 1))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
        renewals = manager.stats()["renewals"]
    return Figure(
        f"an env that dies {when}, for {seconds:g} s: processor time of the trainer's process",
        f"{share:.2%} of a core, {renewals} renewals",
        f"{CPU_SHARE:.0%} of a core",
        share <= CPU_SHARE,
    )
