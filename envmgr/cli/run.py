"""`envmgr run`: from a config to collected episodes, also through failures and interruptions."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from envmgr.cli.attempt import CODES, Attempt
from envmgr.cli.config_envs import manager_of
from envmgr.cli.exit_codes import say
from envmgr.cli.figures import versions
from envmgr.cli.interrupt import Interruption
from envmgr.cli.loggers import Loggers
from envmgr.cli.output import RunFolder
from envmgr.cli.prepare import RunOptions, folder_of
from envmgr.cli.progress import Progress
from envmgr.cli.report import write_report
from envmgr.cli.resource_usage import UsageMeter
from envmgr.cli.resume import (
    Earlier,
    ResumedFolder,
    command_with_modules,
    refuse_no_run,
    resuming_command,
)
from envmgr.cli.samples import Samples
from envmgr.cli.summary import Ending, print_summary, summary_of
from envmgr.cli.texts import episodes_text, raised_by_envs, stacks_in
from envmgr.collect import Collector, EpisodeRecord
from envmgr.config import to_plain
from envmgr.config.origins import Source
from envmgr.config.yaml_text import dump_yaml
from envmgr.config_file import ResolvedConfig, read_config_file
from envmgr.errors import ConfigError, EnvManagerError
from envmgr.reporting.files import VIDEOS
from envmgr.texts import counted
from envmgr.untrusted import plain

_MOST_STACKS = 3
"""How many stacks are printed with a run's error: as many as causes of a launch that failed."""


def execute(options: RunOptions, interruption: Interruption) -> int:
    """Run a config and return the exit code. Prints what happens.

    Args:
        options: the options of the command.
        interruption: says when to end early.

    Raises:
        ConfigError, MissingDependencyError: nothing was run.
        KeyboardInterrupt: interrupted before anything was collected.
    """
    if options.resume is None:
        return _execute(options, interruption)
    run = Path(options.resume)
    refuse_no_run(run)
    try:
        return _execute(options, interruption)
    except ConfigError as error:
        command = command_with_modules(run, options.overrides, options.allowed)
        if not command:
            raise
        raise ConfigError(
            f"{error} What it imports lies beside the config that the run was begun with; if you "
            f"trust it: {command}"
        ) from error


def _execute(options: RunOptions, interruption: Interruption) -> int:
    resolved = _measured(options)
    loggers = Loggers(resolved.values.collect.loggers, writes=options.write)
    folder = folder_of(options, resolved)
    try:
        run = _Run(options, resolved, manager_of(resolved), interruption)
        run.loggers, run.folder = loggers, folder
        run.save_videos()
        return run.execute()
    except BaseException:
        if folder is not None:
            folder.discard()
        raise


def _measured(options: RunOptions) -> ResolvedConfig:
    """Return the config, with the envs' times measured for the report unless it says otherwise."""
    resolved = options.resolve()
    origin = resolved.origins.get("manager.metrics")
    if options.write and origin is not None and origin.source is Source.DEFAULT:
        resolved.values.manager.metrics = {"port": None}
    return resolved


@contextlib.contextmanager
def _writing_results() -> Iterator[None]:
    """Let the body write results; an `OSError` elsewhere in a run is not about them.

    Raises:
        EnvManagerError: the results cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise EnvManagerError(f"the results cannot be written: {error}") from error


class _Run(Attempt):
    """One run, ready to be launched.

    Attributes:
        folder: the folder for the results, prepared; None writes nothing.
        loggers: the loggers that write figures into the folder.
    """

    folder: RunFolder | None = None
    loggers: Loggers
    _samples: Samples
    _states: Mapping[str, int] = MappingProxyType({})
    _advice = ""

    def save_videos(self) -> None:
        """Have the envs save videos, if the config says so.

        Raises:
            ConfigError: there is nowhere to save them.
        """
        if not self._resolved.values.collect.videos:
            return
        if self.folder is None:
            raise ConfigError(
                "collect.videos is true, but nothing is to be written. Leave out --no-output, or "
                "the videos."
            )
        self._manager.enable_save_replay(str(self.folder.path.absolute() / VIDEOS))

    @property
    def _earlier(self) -> Earlier | None:
        return self.folder.earlier if isinstance(self.folder, ResumedFolder) else None

    def _announce(self) -> None:
        earlier = self._earlier
        if earlier is not None:
            found = earlier.statistics
            what = f"{episodes_text(found)} and {counted(found.steps, 'timestep')}"
            print(f"envmgr run: resuming {self._run_options.resume}: {what} are there", flush=True)
        print(f"envmgr run: launching {plain(self.title)}", flush=True)
        kind = self._resolved.values.manager.type
        if kind == "base" and self._resolved.origins["manager.type"].source is Source.DEFAULT:
            print(
                "envmgr run: no manager.type in the config, so base: envs run in this process, and "
                "one that crashes or hangs in C code takes the run with it. `type: subprocess` "
                "gives each env a worker.",
                flush=True,
            )

    def _about(self) -> dict[str, Any]:
        about, earlier = super()._about(), self._earlier
        if earlier is None:
            return {**about, "resumed": []}
        facts = earlier.facts
        of_the_run = {
            "config": facts.config,
            "seed": read_config_file(self._run_options.config)["manager"]["seed"],
            "began_at": facts.began_at,
            "resumed": msgspec.to_builtins(facts.resumed, str_keys=True),
        }
        return {**about, **of_the_run}

    def _work(self, progress: Progress) -> None:
        manager, values = self._manager, self._resolved.values
        policy = self._make_policy()
        earlier = self._earlier
        if self.folder is not None:
            with _writing_results():
                self.folder.begin(self._config_text())
                before = None if earlier is None else earlier.statistics
                self.loggers.begin(self.folder.path, to_plain(values), before)
        if earlier is not None:
            progress.failures_before = self.loggers.failures_before = earlier.failures.count
        collector = Collector(
            manager,
            policy,
            on_episode=self._add,
            keep_episodes=False,
            statistics=None if earlier is None else earlier.statistics,
        )
        meter = UsageMeter(manager, self._resolved, collector.statistics)
        path = None if self.folder is None else self.folder.path
        sample = None if earlier is None else earlier.sample
        with _writing_results():
            self._samples = Samples(path, collector, manager, sample, goes_on=earlier is not None)
        try:
            self._collect(collector, progress)
            self._advice = meter.advice(collector.statistics)
            self._check_goal(collector)
        finally:
            self._states = manager.stats()["states"]  # before they are closed
            with _writing_results():
                self._samples.end()
                self._end_loggers(collector)
            if self._interruption.requested:
                limit_s = values.manager.close_timeout
                progress.log(
                    f"envmgr: {self._interruption.name}: closing the envs, in {limit_s:g} s at most"
                )

    def _tick(self, progress: Progress, collector: Collector) -> None:
        progress.tick()
        self._samples.tick()
        if self.loggers.are_wanted:
            with _writing_results():
                self.loggers.tick(collector, self._manager)

    def _add(self, record: EpisodeRecord) -> None:
        if self.folder is not None:
            with _writing_results():
                self.folder.add(record)

    def _end_loggers(self, collector: Collector) -> None:
        try:
            self.loggers.log(collector, self._manager)
        finally:
            self.loggers.end()

    def _check_goal(self, collector: Collector) -> None:
        """Refuse to call a run done that ended early because no env was left."""
        values = self._resolved.values
        wanted = values.collect[self._goal.noun]
        found = getattr(collector.statistics, self._goal.noun)
        if wanted is not None and found < wanted and math.isinf(values.manager.episode_num):
            raise EnvManagerError(
                f"no env is left after {found} of {wanted} {self._goal.noun}: each failed more "
                "often than allowed and was taken out (on_exhausted: drop). Look at the failures; "
                "raise max_failures or max_failures_total to go on in spite of them."
            )

    def _config_text(self) -> str:
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        return (
            f"# The config of a run with every key filled in, begun {self._began:%Y-%m-%d %H:%M:%S}"
            f"\n# with {found}.\n{dump_yaml(self._resolved.values)}"
        )

    # -- the end ----------------------------------------------------------------------------

    def _failure_text(self, error: Exception) -> str:
        text = super()._failure_text(error)
        if self._run_options.traceback:
            for stacks in stacks_in(error)[:_MOST_STACKS]:
                say(stacks, err=True)
        elif raised_by_envs(error):
            text += "\n(--traceback shows where in the env's code.)"
        return text

    @property
    def _has_begun(self) -> bool:
        return self._steps > 0

    @property
    def _steps(self) -> int:
        return 0 if self._collector is None else self._collector.statistics.steps

    def _report(self) -> int:
        summary = summary_of(
            self._collector,
            self._manager,
            ending=self._ending,
            error=self._error,
            states=self._states,
            about=self._about(),
            earlier=self._earlier,
        )
        where = self._write(summary)
        if self._steps:
            self._show(lambda to: print_summary(to, summary, title=self.title, where=where))
        if self._advice:
            say(f"envmgr: {self._advice} (`envmgr tune` measures it)")
        if self._ending is Ending.INTERRUPTED:
            say(f"envmgr: {self._error}; {self._kept(where)}", err=True)
            has_ended = self._collector is not None and self._collector.statistics.n_ended
            is_endless = math.isinf(self._resolved.values.manager.episode_num)
            if where is not None and is_endless and has_ended:
                options = self._run_options
                command = resuming_command(Path(where), options.overrides, options.allowed)
                say(f"envmgr: to go on: {command}", err=True)
        elif self._ending is Ending.FAILED:
            say(f"envmgr: error: {self._error}", err=True)
            say(f"envmgr: the run failed; {self._kept(where)}", err=True)
        return CODES[self._ending]

    def _write(self, summary: dict[str, Any]) -> str | None:
        """Write the summary and return where the results are; None if nowhere."""
        folder = self.folder
        if folder is None:
            return None
        try:
            if not folder.begun:
                folder.begin(self._config_text())
            folder.end(summary)
            self._write_report(folder)
        except OSError as error:
            self._not_written("the summary", error)
        finally:
            folder.close()
        return str(folder.path)

    def _write_report(self, folder: RunFolder) -> None:
        """Write the report; a run whose report cannot be written has not failed."""
        try:
            write_report(folder.path)
        except Exception as error:
            again = f"`envmgr report {shlex.quote(str(folder.path))}` makes it"
            say(f"envmgr: there is no report: {error!r}; {again}", err=True)

    def _kept(self, where: str | None) -> str:
        earlier = self._earlier
        statistics = None if earlier is None else earlier.statistics
        if self._collector is not None:
            statistics = self._collector.statistics
        if statistics is None or not statistics.steps:
            return "nothing had been collected" + (f"; see {where}" if where else "")
        if where is None:
            what = f"{episodes_text(statistics)} and {counted(statistics.steps, 'timestep')}"
            return f"{what} had been collected, and nothing was written"
        if not statistics.n_ended:
            steps = counted(statistics.steps, "timestep")
            return f"no episode had ended, so {steps} of unfinished ones are not kept; see {where}"
        unfinished = {} if self._collector is None else self._collector.unfinished
        n_lost = sum(unfinished.values())
        kept = counted(statistics.steps - n_lost, "timestep")
        text = f"{episodes_text(statistics)} and {kept} had been collected and are kept in {where}"
        if unfinished:
            episodes = counted(len(unfinished), "unfinished episode")
            text += f", but not {counted(n_lost, 'timestep')} of {episodes}"
        return text
