"""What commands that run envs have in common: launch, work, close, and report how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from envmgr.cli.config_envs import env_name
from envmgr.cli.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    OutputGoneError,
    discard_output,
    last_words,
    printing,
)
from envmgr.cli.figures import versions
from envmgr.cli.interrupt import Interruption
from envmgr.cli.prepare import RunOptions, goal_of
from envmgr.cli.progress import LogLines, Progress, logging_to, make_progress
from envmgr.cli.resume import left_to_collect
from envmgr.cli.summary import Ending
from envmgr.cli.texts import error_text, wide_console
from envmgr.collect import Collector, Policy, make_policy, policy_seed
from envmgr.config import to_plain
from envmgr.config_file import ResolvedConfig
from envmgr.errors import ConfigError, EnvManagerError, MissingDependencyError
from envmgr.manager import EnvManager
from envmgr.texts import counted
from envmgr.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console

CODES = {Ending.DONE: DONE, Ending.FAILED: FAILED, Ending.INTERRUPTED: INTERRUPTED}


class Attempt(ABC):
    """One run of envs, ready to be launched.

    Args:
        options: the options of the command.
        manager: the manager, not launched yet.
        interruption: says when to end early.

    Attributes:
        title: what is run, in a few words.

    Raises:
        ConfigError: nothing says when the run ends.
    """

    shows_failures = True
    """Whether each failure of an env gets a line of its own."""

    shows = True
    """Whether anything besides errors is printed; False where the figures go to stdout."""

    goal_options = "--steps N or --episodes N"
    """Which options of the command say when the run ends."""

    def __init__(
        self,
        options: RunOptions,
        resolved: ResolvedConfig,
        manager: EnvManager,
        interruption: Interruption,
    ) -> None:
        self._run_options = options
        self._resolved = resolved
        self._goal = goal_of(resolved, self.goal_options)
        self._manager = manager
        self._interruption = interruption
        self._collector: Collector | None = None
        self._ending = Ending.DONE
        self._error: str | None = None
        self._began = datetime.now().astimezone()
        cfg = resolved.values.manager
        self.title = f"{counted(cfg.env_num, 'env')} of {env_name(resolved)} on {cfg.type}"

    def execute(self) -> int:
        """Launch, work, close and report; return the exit code.

        Raises:
            ConfigError, MissingDependencyError: nothing was run.
            KeyboardInterrupt: interrupted before there was anything to report.
        """
        progress = make_progress(self._goal, self._figures, shows=self.shows)
        logs = LogLines(
            progress, traceback=self._run_options.traceback, failures=self.shows_failures
        )
        with logging_to(logs):
            try:
                if self.shows:
                    with printing():
                        self._announce()
                with self._manager:
                    logs.launching = False
                    self._work(progress)
            except (KeyboardInterrupt, OutputGoneError) as error:
                self._interrupted(error)
            except Exception as error:
                is_bad_input = isinstance(error, (ConfigError, MissingDependencyError))
                if is_bad_input and not self._has_begun:
                    raise
                self._ending = Ending.FAILED
                self._error = self._failure_text(error)
            finally:
                self._interruption.acknowledge()
        return self._report()

    def _figures(self) -> list[str]:
        """Return what the progress shows besides the figures of the collection."""
        return []

    @abstractmethod
    def _announce(self) -> None:
        """Print what is about to be launched."""

    @abstractmethod
    def _work(self, progress: Progress) -> None:
        """Do what the command is for, with the launched manager."""

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether there is anything to report."""

    @abstractmethod
    def _report(self) -> int:
        """Print how the run ended, and return the exit code; the manager is closed by then."""

    def _make_policy(self) -> Policy:
        """Return the policy that the config names, for the launched manager."""
        values = self._resolved.values
        return make_policy(
            values.collect.policy,
            self._manager.observation_space,
            self._manager.action_space,
            policy_seed(values.manager.seed),
            allow=self._resolved.file_policy,
        )

    def _collect(self, collector: Collector, progress: Progress) -> None:
        """Collect what the config asks for, or until a signal asks for the end.

        Args:
            collector: the collector of the launched manager.
            progress: shows how the collection gets on.

        Raises:
            KeyboardInterrupt: a signal asked for the end.
        """
        self._collector, goal = collector, self._resolved.values.collect
        progress.start(collector)
        try:
            done = collector.statistics  # of a run that was resumed: not nothing
            steps, episodes = left_to_collect(goal, done)
            if 0 in (steps, episodes):
                return  # it was killed when it had collected everything
            for _ in collector.iterate(steps=steps, episodes=episodes):
                self._tick(progress, collector)
                if self._interruption.requested:
                    raise KeyboardInterrupt
        finally:
            self._interruption.acknowledge()
            progress.stop()

    def _tick(self, progress: Progress, collector: Collector) -> None:
        """Show the progress; called after each gather."""
        progress.tick()

    def _about(self) -> dict[str, Any]:
        """Return what was run, as JSON-compatible values."""
        values = self._resolved.values
        return {
            "config": os.path.abspath(self._run_options.config),
            "env": env_name(self._resolved),
            "manager": values.manager.type,
            "env_num": values.manager.env_num,
            "seed": to_plain(values.manager.seed),
            "policy": values.collect.policy,
            "began_at": self._began.isoformat(timespec="seconds"),
            "versions": versions(),
        }

    def _show(self, show: Callable[[Console], None]) -> None:
        """Print figures, if they are to be shown and anybody reads them."""
        if self.shows:
            with last_words():
                show(wide_console())

    def _not_written(self, what: str, error: OSError) -> None:
        """Record that the run failed at its end, in writing; an earlier error is kept."""
        self._ending = Ending.FAILED
        self._error = self._error or f"{what} cannot be written: {error}"

    def _interrupted(self, error: BaseException) -> None:
        if not self._has_begun and not isinstance(error, OutputGoneError):
            raise KeyboardInterrupt
        self._ending = Ending.INTERRUPTED
        self._error = f"interrupted by {self._interruption.name}"
        if isinstance(error, OutputGoneError):
            self._error = "interrupted, because what read the output has gone"
            discard_output()

    def _failure_text(self, error: Exception) -> str:
        """Return what went wrong; print the traceback unless an env or the config is to blame."""
        if isinstance(error, EnvManagerError):
            return error_text(error)
        with last_words():
            # An error in the policy's code, or a defect of ours.
            print(plain("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return f"{type(error).__name__}: {error}"
