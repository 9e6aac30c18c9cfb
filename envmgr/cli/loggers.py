"""Write a run's figures at intervals during the run: CSV, TensorBoard, W&B offline."""

from __future__ import annotations

import csv
import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from envmgr.collect import Collector, CollectStatistics
from envmgr.errors import ConfigError
from envmgr.manager import EnvManager
from envmgr.optional_packages import imported
from envmgr.reporting.files import METRICS, TENSORBOARD, WANDB
from envmgr.untrusted import opened_itself

EVERY_S = 10.0
"""Seconds between two times that figures are written; they are also written once at the end."""

Figure = float | list[float | None] | None
"""A number; for rewards that are vectors, one for each component. None where nothing is known."""

Figures = Mapping[str, Figure]


class Logger(ABC):
    """A writer of figures into the folder of a run."""

    module = ""
    """The module that has to be installed; empty if none."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables to set before the module is imported, unless they are set already."""

    goes_on = False
    """Whether the run was resumed, so that there are figures already."""

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Begin to write into the folder.

        Raises:
            OSError: nothing can be written.
        """

    @abstractmethod
    def log(self, figures: Figures) -> None:
        """Write the figures of one moment; those that are None are not known."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing; called only after `open`."""


class CsvLogger(Logger):
    """A logger that writes `metrics.csv`, with a line for each moment."""

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the file."""
        self._file = open(  # noqa: SIM115 - until `close`
            folder / METRICS,
            "a" if self.goes_on else "w",
            encoding="utf-8",
            newline="",
            buffering=1,
            opener=opened_itself,
        )
        self._writer: Any = None

    def log(self, figures: Figures) -> None:
        """Write a line."""
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(figures), extrasaction="ignore")
            if not self._file.tell():
                self._writer.writeheader()
        self._writer.writerow(figures)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger(Logger):
    """A logger that writes event files into `tensorboard`, with tensorboardX."""

    module = "tensorboardX"

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the event file."""
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder / TENSORBOARD)
        )

    def log(self, figures: Figures) -> None:
        """Add a scalar for each figure."""
        step = _steps_of(figures)
        for name, value in figures.items():
            if name != "steps":
                for tag, scalar in _scalars(f"envmgr/{name}", value):
                    self._writer.add_scalar(tag, scalar, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _steps_of(figures: Figures) -> int:
    steps = figures["steps"]
    return int(steps) if isinstance(steps, (int, float)) else 0


def _scalars(name: str, value: Figure) -> Iterator[tuple[str, float]]:
    """Yield a figure with its name, or each part of one that has several; skip unknown ones."""
    if isinstance(value, list):
        for k, part in enumerate(value):
            yield from _scalars(f"{name}/{k}", part)
    elif value is not None:
        yield name, value


class WandbLogger(Logger):
    """A logger that writes an offline run of Weights & Biases into `wandb`; nothing is sent."""

    module = WANDB
    # Even offline, wandb would tell sentry.io that a run has begun, and what wandb raised.
    environment: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Begin the run."""
        self._run = importlib.import_module(WANDB).init(
            mode="offline", dir=str(folder), project="envmgr", name=folder.name, config=dict(config)
        )

    def log(self, figures: Figures) -> None:
        """Log what is known."""
        known = {name: value for name, value in figures.items() if value is not None}
        self._run.log(known, step=_steps_of(figures))

    def close(self) -> None:
        """End the run."""
        self._run.finish()


KINDS: Mapping[str, type[Logger]] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


class Loggers:
    """The loggers of a run, which write its figures.

    Args:
        names: names of loggers, as in `KINDS`.
        writes: whether the run has a folder.

    Attributes:
        failures_before: failures before the run was resumed, from which the count goes on.

    Raises:
        MissingDependencyError: the module that a logger needs is not installed.
        ConfigError: there is nowhere to write.
    """

    def __init__(self, names: Sequence[str], *, writes: bool) -> None:
        if names and not writes:
            raise ConfigError(
                f"collect.loggers is {list(names)}, but nothing is to be written. Leave out "
                "--no-output, or the loggers."
            )
        for name in names:
            if module := KINDS[name].module:
                for variable, value in KINDS[name].environment.items():
                    os.environ.setdefault(variable, value)
                imported(module, f"collect.loggers names {name}, which needs {module}")
        self.failures_before = 0
        self._loggers = [KINDS[name]() for name in names]
        self._open: list[Logger] = []
        self._due_s = 0.0
        self._before: tuple[float, int] = (0.0, 0)

    def begin(
        self, folder: Path, config: Mapping[str, Any], before: CollectStatistics | None = None
    ) -> None:
        """Begin to write, or go on if the run was resumed.

        Args:
            folder: the folder of the run.
            config: the config of the run.
            before: what was collected before the run was resumed; None if it was not.

        Raises:
            OSError: nothing can be written.
        """
        if before is not None:
            self._before = before.elapsed_s, before.steps
        for logger in self._loggers:
            logger.goes_on = before is not None
            logger.open(folder, config)
            self._open.append(logger)
        self._due_s = time.monotonic() + EVERY_S

    @property
    def are_wanted(self) -> bool:
        """Whether the run has any loggers."""
        return bool(self._loggers)

    def tick(self, collector: Collector, manager: EnvManager) -> None:
        """Write figures if it is time for it."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + EVERY_S
            self.log(collector, manager)

    def log(self, collector: Collector, manager: EnvManager) -> None:
        """Write figures."""
        if not self._open:
            return
        figures = self._figures(collector, manager)
        for logger in self._open:
            logger.log(figures)

    def end(self) -> None:
        """Close all loggers; idempotent."""
        while self._open:
            self._open.pop().close()

    def _figures(self, collector: Collector, manager: EnvManager) -> dict[str, Figure]:
        found, stats = collector.statistics, manager.stats()
        about = found.as_dict()
        elapsed_s, steps = self._before
        passed_s = found.elapsed_s - elapsed_s
        self._before = found.elapsed_s, found.steps
        return {
            "steps": found.steps,
            "elapsed_s": found.elapsed_s,
            "steps_per_s": (found.steps - steps) / passed_s if passed_s > 0.0 else None,
            "episodes": found.episodes,
            "failures": self.failures_before + stats["failures"],
            "return_mean_of_last_100": about["return"]["mean_of_last_100"],
            "length_mean": about["length"]["mean"],
            **_latencies(stats.get("latency", {})),
        }


def _latencies(latency: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figures:
    """Return the times of the median env, and of the slowest one."""
    found: dict[str, Figure] = {}
    for kind, figures in latency.items():
        p50s = [value for value in figures["p50"] if value is not None]
        p99s = [value for value in figures["p99"] if value is not None]
        found[f"{kind}_p50_s"] = median(p50s) if p50s else None
        found[f"{kind}_p99_of_slowest_s"] = max(p99s, default=None)
    return found
