"""What the trainer and its workers have used during a run, as the system counts it (Linux)."""

from __future__ import annotations

import os
from typing import NamedTuple

from envmgr.collect import CollectStatistics
from envmgr.config_file import ResolvedConfig
from envmgr.launch import usable_cores
from envmgr.manager import EnvManager
from envmgr.proc import cpu_s_of, queued_s_of
from envmgr.types import monotonic


class _Reading(NamedTuple):
    pids: tuple[int, ...]
    wall_s: float
    steps: int
    trainer_s: float
    workers_s: float
    queued_s: float


class UsageMeter:
    """Reads what a run has used, at two moments; between them it costs nothing.

    Args:
        manager: launched.
        resolved: its config.
        statistics: of the collection.
    """

    def __init__(
        self, manager: EnvManager, resolved: ResolvedConfig, statistics: CollectStatistics
    ) -> None:
        self._manager, self._resolved = manager, resolved
        self._began = self._read(statistics)

    def advice(self, statistics: CollectStatistics) -> str:
        """Return what would be much faster, in a sentence; empty if there is nothing to say."""
        try:
            from envmgr.tuning.advice import Usage, advice_of
            from envmgr.tuning.settings import setting_of
        except ModuleNotFoundError:  # an installation without `envmgr.tuning`
            return ""
        began, ended = self._began, self._read(statistics)
        if began is None or ended is None or began.pids != ended.pids:
            return ""
        config = self._resolved.values.manager
        counted = {
            name: getattr(ended, name) - getattr(began, name) for name in _Reading._fields[1:]
        }
        usage = Usage(
            setting=setting_of(config),
            env_num=self._manager.env_num,
            n_workers=len(ended.pids),
            cores=usable_cores(None),
            policy_waits=self._resolved.values.collect.policy != "random",
            **counted,
        )
        return advice_of(usage)

    def _read(self, statistics: CollectStatistics) -> _Reading | None:
        """Return what has been used so far; None where it cannot be read."""
        workers = self._manager.stats().get("workers", ())
        pids = tuple(sorted(worker["pid"] for worker in workers if worker["env_ids"]))
        try:
            times = [times_of(pid) for pid in pids]
        except (OSError, ValueError, IndexError):
            return None
        if not times:
            return None
        workers_s, queued_s = (sum(column) for column in zip(*times, strict=True))
        own = os.times()
        trainer_s = own.user + own.system
        return _Reading(pids, monotonic(), statistics.steps, trainer_s, workers_s, queued_s)


def times_of(pid: int) -> tuple[float, float]:
    """Return seconds that a process has computed, and those it was queued for a core."""
    return cpu_s_of(pid), queued_s_of(pid)
