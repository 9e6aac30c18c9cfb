"""What commands that run envs have in common: launch, work, close, and how it all ended."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from datetime import datetime

from envmgr.cli import discard_output
from envmgr.cli.interrupt import Interruption
from envmgr.cli.progress import LogLines, Progress, logging_to
from envmgr.cli.report import counted, paragraph
from envmgr.cli.summary import Ending
from envmgr.collect import Policy, make_policy, policy_seed
from envmgr.config_file import ResolvedConfig
from envmgr.errors import ConfigError, EnvManagerError, MissingDependencyError
from envmgr.manager import EnvManager


class Attempt(ABC):
    """One run of envs, ready to be launched.

    Args:
        resolved: the config.
        manager: not launched.
        interruption: says when to end early.

    Attributes:
        title: what is run, in a few words.
    """

    def __init__(
        self, resolved: ResolvedConfig, manager: EnvManager, interruption: Interruption
    ) -> None:
        self._resolved = resolved
        self._manager = manager
        self._interruption = interruption
        self._ending = Ending.DONE
        self._error: str | None = None
        self._began = datetime.now().astimezone()
        env, cfg = resolved.values.env, resolved.values.manager
        self.title = f"{counted(cfg.env_num, 'env')} of {env.id or env.entry} on {cfg.type}"

    def execute(self) -> int:
        """Launch, work, close and report; return the exit code.

        Raises:
            ConfigError, MissingDependencyError: nothing was run.
            KeyboardInterrupt: interrupted before there was anything to report.
        """
        progress, logs = self._shown()
        with logging_to(logs):
            try:
                self._announce()
                with self._manager:
                    logs.launching = False
                    self._work(progress)
            except (KeyboardInterrupt, BrokenPipeError) as error:
                self._interrupted(error)
            except (ConfigError, MissingDependencyError):
                raise
            except Exception as error:
                self._ending = Ending.FAILED
                self._error = self._failure_text(error)
            finally:
                self._interruption.acknowledge()
        return self._report()

    @abstractmethod
    def _shown(self) -> tuple[Progress, LogLines]:
        """Return what shows the progress, and what is logged meanwhile."""

    @abstractmethod
    def _announce(self) -> None:
        """Print what is about to be launched."""

    @abstractmethod
    def _work(self, progress: Progress) -> None:
        """Do what is to be done with the launched manager."""

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether there is anything to report."""

    @abstractmethod
    def _report(self) -> int:
        """Print how it ended, and return the exit code; the manager is closed."""

    def _make_policy(self) -> Policy:
        """Return the policy that the config names, for the launched manager."""
        values = self._resolved.values
        return make_policy(
            values.collect.policy,
            self._manager.observation_space,
            self._manager.action_space,
            policy_seed(values.manager.seed),
            allow=self._resolved.import_policy,
        )

    def _interrupted(self, error: BaseException) -> None:
        if not self._has_begun and not isinstance(error, BrokenPipeError):
            raise KeyboardInterrupt
        self._ending = Ending.INTERRUPTED
        self._error = f"interrupted by {self._interruption.name}"
        if isinstance(error, BrokenPipeError):
            self._error = "interrupted, because what read the output has gone"
            discard_output()

    def _failure_text(self, error: Exception) -> str:
        """Return what went wrong; print the traceback of what is no error of envs or configs."""
        if isinstance(error, EnvManagerError):
            return paragraph(error)
        traceback.print_exception(error)  # of the policy's code, or a defect of ours
        return f"{type(error).__name__}: {error}"
