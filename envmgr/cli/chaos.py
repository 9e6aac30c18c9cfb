"""`envmgr chaos`: a run of a config while its workers are injured, and a report of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from envmgr.cli.attempt import CODES, Attempt
from envmgr.cli.config_envs import manager_of
from envmgr.cli.exit_codes import FAILED, say
from envmgr.cli.figures import STDOUT, try_to_write, write_json
from envmgr.cli.interrupt import Interruption
from envmgr.cli.prepare import RunOptions
from envmgr.cli.progress import Progress
from envmgr.cli.summary import Ending
from envmgr.cli.texts import failures_text, print_table
from envmgr.collect import Collector, policy_seed
from envmgr.config.origins import Source
from envmgr.config_file import ResolvedConfig
from envmgr.errors import ConfigError
from envmgr.manager import EnvManager
from envmgr.testing import ANY_ENV, AuditedLoop, Ledgered, LedgerReport, Saboteur, vulnerable
from envmgr.testing.injuries import refuse_kinds
from envmgr.texts import counted, short_time
from envmgr.types import EnvFactory
from envmgr.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console

LIMITS: Mapping[str, float] = {"step_timeout": 1.0, "reset_timeout": 5.0, "connect_timeout": 20.0}
"""Time limits in seconds where the config gives none: only a time limit detects what hangs."""

UNSEEN = frozenset({"hang", "stop"})
"""Kinds of injuries that only a time limit detects."""

BUDGET: Mapping[str, Any] = {
    "on_failure": "recover",
    "snapshot_every": None,  # an env that is resumed signs some of its steps twice
    "max_failures": 1_000_000,
    "max_failures_total": 1_000_000,
    "retry_waiting_time": 0.0,
    # What an env has signed is compared with what arrives: nothing may change or take any of it.
    "normalize_obs": False,
    "normalize_reward": False,
    "start_steps": 0,
}
"""Keys that are set whatever the config says: with them a run goes on however often its workers are
hurt, and its accounts can be made."""


@dataclass(frozen=True)
class ChaosOptions(RunOptions):
    """The options of `envmgr chaos`.

    Attributes:
        rate_hz: injuries per second.
        json_file: where the figures go; None writes none.
    """

    rate_hz: float = 1.0
    kinds: tuple[str, ...] = ("kill", "stop", "hang", "corrupt")
    json_file: str | None = None


def execute(options: ChaosOptions, interruption: Interruption) -> int:
    """Run a config while hurting its workers, and return the exit code. Prints what happens.

    Raises:
        ConfigError, MissingDependencyError: nothing was run.
        KeyboardInterrupt: interrupted before anything was collected.
    """
    refuse_kinds(options.kinds)
    resolved = options.resolve()
    changes = _harden(resolved)
    moves = bool(resolved.values.manager.spare_env_num)
    manager = manager_of(resolved, partial(_wrapped, moves=moves))
    _refuse_without_workers(manager, resolved)
    try_to_write(options.json_file)
    return _ChaosRun(options, resolved, manager, changes, interruption).execute()


def _wrapped(factories: list[EnvFactory], *, moves: bool) -> list[EnvFactory]:
    """Return factories of envs that sign their steps and can be hurt.

    Args:
        factories: the factories of the envs themselves.
        moves: whether envs may take each other's places, and are built alike.
    """
    ids = [ANY_ENV] * len(factories) if moves else range(len(factories))
    return [*vulnerable(Ledgered(factory, i) for factory, i in zip(factories, ids, strict=True))]


def _harden(resolved: ResolvedConfig) -> dict[str, Any]:
    """Set the limits that are missing, and the budget; return what was changed."""
    section, origins = resolved.values.manager, resolved.origins
    changes: dict[str, Any] = {
        key: value
        for key, value in LIMITS.items()
        if section[key] is None or origins[f"manager.{key}"].source is Source.DEFAULT
    }
    changes.update({key: value for key, value in BUDGET.items() if section[key] != value})
    section.update(changes)
    return changes


def _refuse_without_workers(manager: EnvManager, resolved: ResolvedConfig) -> None:
    """Refuse kinds without worker processes on this machine.

    Raises:
        ConfigError: there would be no worker to hurt.
    """
    from envmgr.managers import AsyncSubprocessEnvManager, BaseEnvManager

    if isinstance(manager, BaseEnvManager) and not isinstance(manager, AsyncSubprocessEnvManager):
        raise ConfigError(
            f"manager.type is {resolved.values.manager.type!r}, which has no worker processes on "
            "this machine: there is no worker to hurt. Choose a kind that has, as in --set "
            "manager.type=subprocess."
        )


class _ChaosRun(Attempt):
    """One run, ready to be launched.

    Args:
        options: the options of the command.
        resolved: the config, with limits and budget.
        manager: the manager, not launched yet.
        changes: the keys of the config that were changed, with their new values.
        interruption: says when to end early.
    """

    shows_failures = False
    goal_options = "--steps N"

    def __init__(
        self,
        options: ChaosOptions,
        resolved: ResolvedConfig,
        manager: EnvManager,
        changes: Mapping[str, Any],
        interruption: Interruption,
    ) -> None:
        super().__init__(options, resolved, manager, interruption)
        self._options = options
        self.shows = options.json_file != STDOUT
        self._changes = changes
        self._loop: AuditedLoop | None = None
        self._saboteur: Saboteur | None = None

    def _announce(self) -> None:
        kinds = ", ".join(self._options.kinds)
        if self._changes:
            set_here = ", ".join(f"{key}: {value}" for key, value in self._changes.items())
            print(f"envmgr chaos: for this run, manager has {set_here}")
        print(
            f"envmgr chaos: launching {plain(self.title)}; injuries per second: "
            f"{self._options.rate_hz:g} ({kinds})",
            flush=True,
        )
        limit_s = self._resolved.values.manager.step_timeout
        if limit_s > LIMITS["step_timeout"] and set(self._options.kinds) & UNSEEN:
            print(
                f"envmgr chaos: an env that hangs or is stopped stands still for the {limit_s:g} s "
                f"of step_timeout; --set manager.step_timeout={LIMITS['step_timeout']:g} is faster",
                flush=True,
            )

    def _work(self, progress: Progress) -> None:
        manager, values = self._manager, self._resolved.values
        if not manager.stats().get("workers"):
            raise ConfigError(
                f"the kind {values.manager.type!r} says of no worker process (stats()['workers']), "
                "so none can be hurt. Choose another kind."
            )
        policy = self._make_policy()
        self._loop = loop = AuditedLoop(manager)
        self._saboteur = saboteur = Saboteur(
            manager,
            rate_hz=self._options.rate_hz,
            kinds=self._options.kinds,
            seed=policy_seed(values.manager.seed),
        )
        collector = Collector(manager, policy, keep_episodes=False, loop=loop)
        try:
            with saboteur:
                self._collect(collector, progress)
        finally:
            saboteur.collect()

    def _figures(self) -> list[str]:
        if self._loop is None or self._saboteur is None:
            return []
        report = self._loop.ledger.report()
        wrong = f"{report.lost} lost, {report.repeated} repeated, {report.swapped} swapped"
        return [counted(len(self._saboteur.injuries), "injury", "injuries"), wrong]

    # -- the end ----------------------------------------------------------------------------

    @property
    def _has_begun(self) -> bool:
        return self._loop is not None

    def _report(self) -> int:
        """Print the figures, write them if asked to, and return the exit code."""
        if self._loop is None or self._saboteur is None:
            say(f"envmgr: error: {self._error}", err=True)
            self._write({"ending": self._ending.value, "error": self._error, **self._about()})
            return FAILED
        report, saboteur = self._loop.settle(), self._saboteur
        figures = self._summary(report, saboteur)
        self._show(lambda console: self._print(console, report, saboteur))
        self._write(figures)
        for finding in report.findings:
            say(f"envmgr: {finding}", err=True)
        if self._error is not None:
            prefix = "error: " if self._ending is Ending.FAILED else ""
            say(f"envmgr: {prefix}{self._error}; the figures are those until then", err=True)
        return CODES[self._ending] if report.is_clean else FAILED

    def _summary(self, report: LedgerReport, saboteur: Saboteur) -> dict[str, Any]:
        stats = self._manager.stats()
        accounts = {field.name: getattr(report, field.name) for field in fields(report)}
        return {
            "ending": self._ending.value,
            "error": self._error,
            "is_clean": report.is_clean,
            **self._about(),
            "changed": dict(self._changes),
            "elapsed_s": self._elapsed_s,
            "accounts": {name: n for name, n in accounts.items() if isinstance(n, int)},
            "failures": stats["failures"],
            "failures_by_kind": stats["failures_by_kind"],
            "rate_hz": self._options.rate_hz,
            "findings": list(report.findings),
            "skipped_injuries": saboteur.n_skipped,
            "injuries": saboteur.summary(),
        }

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._collector is None else self._collector.statistics.elapsed_s

    def _write(self, figures: Mapping[str, Any]) -> None:
        path = self._options.json_file
        if path is None:
            return
        try:
            write_json(path, figures)
        except OSError as error:
            self._not_written("the figures", error)

    def _print(self, console: Console, report: LedgerReport, saboteur: Saboteur) -> None:
        verdict = "nothing lost, repeated or swapped" if report.is_clean else "NOT in order"
        title = f"{self.title}: {self._ending.value}, {verdict}"
        console.print(plain(title), style="bold", markup=False, highlight=False)
        rows = [
            ("accepted actions", f"{report.accepted:,} in {self._elapsed_s:,.1f} s"),
            ("= normal", f"{report.normal:,}"),
            ("+ abnormal", f"{report.abnormal:,}"),
            ("+ cancelled", f"{report.cancelled:,}"),
            ("lost", f"{report.lost:,}"),
            ("repeated", f"{report.repeated:,}"),
            ("swapped", f"{report.swapped:,}"),
            ("failures", failures_text(self._manager.stats())),
        ]
        if report.unchecked:
            rows.append(("without checksum", f"{report.unchecked:,} (no space of fixed layout)"))
        print_table(console, (), rows)
        print_table(console, _HEADER, _injury_rows(saboteur.summary()))
        if not saboteur.injuries:
            console.print("no worker was hurt: the run was too short for this rate", markup=False)


_HEADER = (
    *("injuries", "n", "detected", "median", "p99", "max"),
    *("recovered", "median", "p99", "max"),
)


def _injury_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            kind,
            f"{figures['injuries']:,}",
            f"{figures['detected']:,}",
            *(short_time(figures["detection_s"][name]) for name in ("median", "p99", "max")),
            f"{figures['recovered']:,}",
            *(short_time(figures["recovery_s"][name]) for name in ("median", "p99", "max")),
        ]
        for kind, figures in summary.items()
    ]
