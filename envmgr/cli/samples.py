"""Where a run stands, written at intervals: what its report shows over time."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from envmgr.cli.resource_usage import times_of
from envmgr.collect import Collector
from envmgr.manager import EnvManager
from envmgr.proc import queued_s_of, resident_bytes
from envmgr.reporting.files import SAMPLES, Sample
from envmgr.types import monotonic
from envmgr.untrusted import opened_itself

EVERY_S = 1.0
_OF_THE_RUN = 500.0
"""After this many samples, the time between two is the time of the run divided by this number."""

_RESTS = 100.0
"""After a sample, none is taken for this many times as long as that sample took."""


class Samples:
    """The samples of a run, appended to `samples.jsonl` by the thread that steps the envs.

    Args:
        folder: the folder of the run; None writes nothing.
        collector: the collector of the run.
        manager: the launched manager.
        before: the latest sample of a run that is resumed, whose counts go on from there; None if
            there is none.
        goes_on: whether the run is resumed, so that the file is there already.

    Raises:
        OSError: nothing can be written.
    """

    def __init__(
        self,
        folder: Path | None,
        collector: Collector,
        manager: EnvManager,
        before: Sample | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._collector, self._manager = collector, manager
        self._file = None
        if folder is not None:
            self._file = io.FileIO(folder / SAMPLES, "a" if goes_on else "x", opener=opened_itself)
        self._usage = _WorkersUsage()
        self._before = before
        # Timesteps of episodes that a kill cut off took their time, too, though they do not count.
        self._lost_steps = 0 if before is None else before.steps - collector.statistics.steps
        self._began_s = monotonic() - collector.statistics.elapsed_s
        self._cpu_s, self._queued_s = time.thread_time(), _queued_s()
        self._due_s = 0.0 if folder is not None else float("inf")
        self.tick()

    def tick(self) -> None:
        """Write a line if it is time for one; called after each gather."""
        if monotonic() >= self._due_s:
            self.take()

    def take(self) -> None:
        """Write a line."""
        if self._file is None:
            return
        began_s = monotonic()
        with contextlib.suppress(OSError):  # figures over time are not worth a run
            line, before = msgspec.json.encode(self._sample()) + b"\n", self._file.tell()
            if self._file.write(line) != len(line):
                self._file.truncate(before)  # the next line would be part of this one
        now = monotonic()
        pause_s = max(EVERY_S, (now - self._began_s) / _OF_THE_RUN, (now - began_s) * _RESTS)
        self._due_s = now + pause_s

    def end(self) -> None:
        """Write the last line, and close the file."""
        self.take()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sample(self) -> Sample:
        stats = self._manager.stats()
        pids = [worker["pid"] for worker in stats.get("workers", ())]
        usage = self._usage
        usage.look(pids)
        memory = [resident_bytes(pid) for pid in pids]
        queued_s = _queued_s()
        sample = Sample(
            elapsed_s=max(monotonic() - self._began_s, 0.0),
            steps=self._collector.statistics.steps + max(self._lost_steps, 0),
            failures=stats["failures"],
            policy_s=self._collector.policy_s,
            trainer_cpu_s=time.thread_time() - self._cpu_s,
            trainer_queued_s=None if queued_s is None else queued_s - (self._queued_s or 0.0),
            env_step_s=total_s(stats, "step"),
            env_reset_s=total_s(stats, "reset"),
            workers=len(pids),
            workers_s=usage.alive_s,
            workers_cpu_s=usage.cpu_s,
            workers_queued_s=usage.queued_s,
            trainer_bytes=resident_bytes(os.getpid()),
            workers_bytes=sum(memory),
            largest_bytes=max(memory, default=0),
        )
        return sample if self._before is None else _added(sample, self._before)


_SUMS = (
    "failures",
    "policy_s",
    "trainer_cpu_s",
    "trainer_queued_s",
    "env_step_s",
    "env_reset_s",
    "workers_s",
    "workers_cpu_s",
    "workers_queued_s",
)
"""The fields that a resumed run counts from zero again."""


def _added(sample: Sample, before: Sample) -> Sample:
    """Return a sample plus what was counted before the run was resumed."""
    sums = {}
    for name in _SUMS:
        one, more = getattr(sample, name), getattr(before, name)
        sums[name] = None if one is None else one + (more or 0)
    return msgspec.structs.replace(sample, **sums)


def _queued_s() -> float | None:
    """Return how long the main thread was queued for a core; None where the system does not say."""
    try:
        return queued_s_of(os.getpid())
    except (OSError, ValueError, IndexError):
        return None


def total_s(stats: Mapping[str, Any], kind: str) -> float | None:
    """Return how long steps, or resets, took in all; None where it is not measured."""
    if "latency" not in stats:
        return None
    of_envs = stats["latency"][kind]
    counted = zip(of_envs["count"], of_envs["mean"], strict=True)
    return float(sum(n * mean for n, mean in counted if mean is not None))


class _WorkersUsage:
    """The sum of what workers have used, including those that were replaced meanwhile.

    Attributes:
        alive_s: seconds that workers were alive between looks, summed over all of them.
        cpu_s: seconds that workers have computed; None where the system does not say.
        queued_s: seconds that workers were queued for a core; likewise.
    """

    def __init__(self) -> None:
        self.alive_s = 0.0
        self.cpu_s: float | None = 0.0
        self.queued_s: float | None = 0.0
        self._before: dict[int, tuple[float, float]] = {}
        self._looked_s = monotonic()

    def look(self, pids: list[int]) -> None:
        """Read what the present workers have used."""
        now = monotonic()
        passed_s, self._looked_s = now - self._looked_s, now
        self.alive_s += passed_s * len(pids)
        if self.cpu_s is None or self.queued_s is None:
            return
        found: dict[int, tuple[float, float]] = {}
        try:
            for pid in pids:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it died
                    found[pid] = times_of(pid)
        except (OSError, ValueError, IndexError):
            self.cpu_s = self.queued_s = None
            return
        for pid, (cpu_s, queued_s) in found.items():
            before = self._before.get(pid)
            if before is not None:  # of a new one, what it took to start does not count
                self.cpu_s += max(cpu_s - before[0], 0.0)
                self.queued_s += max(queued_s - before[1], 0.0)
        self._before = found
