"""The time that trainer and workers have used during a run, as the system counts it (Linux).

Advice on the number of workers follows from it, in one line at the end of `envmgr run`: there is
none unless the figures of the run leave no other explanation (docs/decisions/0032).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from envmgr.collect import CollectStatistics
from envmgr.config_file import ResolvedConfig
from envmgr.launch import usable_cores
from envmgr.manager import EnvManager
from envmgr.proc import cpu_s_of, queued_s_of
from envmgr.types import monotonic

_KINDS = ("subprocess", "subprocess_v2", "async_subprocess", "async_subprocess_v2")


class _Reading(NamedTuple):
    pids: tuple[int, ...]
    wall_s: float
    steps: int
    trainer_s: float
    workers_s: float
    queued_s: float


class UsageMeter:
    """A meter that reads what a run has used at two moments; between them it costs nothing.

    Args:
        manager: the launched manager.
    """

    def __init__(
        self, manager: EnvManager, resolved: ResolvedConfig, statistics: CollectStatistics
    ) -> None:
        self._manager, self._resolved = manager, resolved
        self._began = self._read(statistics)

    def advice(self, statistics: CollectStatistics) -> str:
        """Return what would be much faster, in a sentence; empty if there is nothing to say."""
        began, ended = self._began, self._read(statistics)
        if began is None or ended is None or began.pids != ended.pids:
            return ""
        config = self._resolved.values.manager
        counted = {
            name: getattr(ended, name) - getattr(began, name) for name in _Reading._fields[1:]
        }
        usage = Usage(
            is_plain=config.type in _KINDS and not config.spare_env_num,
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
    """Return for how many seconds a process has computed, and was queued for a core."""
    return cpu_s_of(pid), queued_s_of(pid)


# -- advice ---------------------------------------------------------------------------------------

MUCH = 1.5
"""How many times as fast another setting has to be to be worth a line."""

LEAST_S, LEAST_STEPS = 1.0, 500
"""How long, and how many steps, a run has to take before its figures count."""

_BUSY = 0.6
"""The share of all cores that is in use where nothing but computing limits a run."""

_IDLE = 0.2
"""The share of a core that each worker, and the trainer, uses where a run waits for its envs."""

_QUEUED = 0.05
"""The share of the time for which workers may have been kept waiting for a core."""

_CHEAP_S = 60e-6
"""The most that a step costs a worker with one env where sharing is worth a line: much of so short
a time is being woken."""

_KEPT = 0.6
"""The share of what trainer and workers compute that remains when workers are shared. The true
share is smaller: docs/benchmarks."""

_BATCH_S = 20e-6
"""The most that a call of `step` costs, whatever is in it; added to be on the safe side."""


@dataclass(frozen=True)
class Usage:
    """What a run has used. Times are in seconds; those of workers are of all workers together.

    Attributes:
        is_plain: whether the envs run in worker processes, without spares.
        n_workers: number of workers that there were.
        cores: number of cores that may be used.
        wall_s: how long all this took.
        trainer_s: time that the trainer's process computed, all of it.
        workers_s: time that workers computed.
        queued_s: time that workers were ready to compute and had no core.
        policy_waits: whether the policy may have waited for something.
    """

    is_plain: bool
    env_num: int
    n_workers: int
    cores: int
    steps: int
    wall_s: float
    trainer_s: float
    workers_s: float
    queued_s: float
    policy_waits: bool = False


def advice_of(usage: Usage) -> str:
    """Return what would be much faster, as a sentence; empty if that cannot be said safely."""
    if not usage.is_plain or usage.wall_s < LEAST_S or usage.steps < LEAST_STEPS:
        return ""
    if usage.n_workers == usage.env_num > usage.cores:
        return _advice_to_share(usage)
    if usage.n_workers < usage.env_num:
        return _advice_to_spread(usage)
    return ""


def _advice_to_share(usage: Usage) -> str:
    """Judge more workers than cores, with one env each, that do little but wake and be woken."""
    worker_s = usage.workers_s / usage.steps
    if worker_s > _CHEAP_S:
        return ""
    if usage.trainer_s + usage.workers_s < _BUSY * usage.cores * usage.wall_s:
        return ""  # something else limits it: envs that wait, or other programs
    # A batch takes the trainer's time, and then that of the workers, which share the cores.
    kept_s = _KEPT * (usage.trainer_s / usage.steps + worker_s / usage.cores)
    factor = usage.wall_s / usage.steps / (kept_s + _BATCH_S / usage.env_num)
    if factor < MUCH:
        return ""
    return (
        f"num_workers: auto would be about {factor:.1f} x as fast, or more: steps cost less than "
        "waking a process for each"
    )


def _advice_to_spread(usage: Usage) -> str:
    """Judge workers with several envs that wait: each env then waits for its neighbours, too."""
    wall_s = usage.wall_s
    is_idle = (
        usage.workers_s < _IDLE * usage.n_workers * wall_s
        and usage.trainer_s < _IDLE * wall_s
        and usage.queued_s < _QUEUED * usage.n_workers * wall_s
    )
    if not is_idle or usage.policy_waits:
        return ""
    computed_s = usage.trainer_s + usage.workers_s
    by_cores = _BUSY * usage.cores * wall_s / max(computed_s, 1e-9)
    factor = min(usage.env_num / usage.n_workers, by_cores)
    if factor < MUCH:
        return ""
    return (
        f"num_workers: null, a worker for each env, would be up to {factor:.1f} x as fast: steps "
        "wait, and neighbours in a worker wait for each other"
    )
