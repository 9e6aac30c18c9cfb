"""Makes of the options of `envmgr run` what a run needs, before anything starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from envmgr.cli.output import RunFolder, default_path
from envmgr.cli.progress import Goal
from envmgr.cli.resume import ResumedFolder, RunFacts, refuse_changes
from envmgr.config.origins import Source
from envmgr.config.paths import check_output
from envmgr.config_file import ResolvedConfig, resolve_config, resolve_config_of_run
from envmgr.errors import ConfigError


@dataclass(frozen=True)
class RunOptions:
    """The options of `envmgr run`.

    Attributes:
        config: path of the config file.
        overrides: `section.key=value`, in order.
        allowed: what the config may do, by the names of the lists in `allow_list`.
        steps: timesteps to collect, in place of what the config says.
        episodes: episodes to collect, likewise.
        seed: the seed, in place of `manager.seed`.
        trace: path of the timeline, in place of `manager.trace`.
        output: folder for the results; None: that of the config, or a new one.
        force: whether to replace results.
        write: whether to write files.
        traceback: whether to show the tracebacks of envs.
        resume: the folder of the run to resume; `config` is then the one in that folder.
    """

    config: str
    overrides: tuple[str, ...] = ()
    allowed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    steps: int | None = None
    episodes: int | None = None
    seed: int | None = None
    trace: str | None = None
    output: str | None = None
    force: bool = False
    write: bool = True
    traceback: bool = False
    resume: str | None = None

    def resolve(self) -> ResolvedConfig:
        """Return the config with its overrides applied, those with options of their own last.

        Raises:
            ConfigError: the config cannot be read, or something in it is wrong.
        """
        overrides = list(self.overrides)
        if self.steps is not None:
            overrides += ["collect.episodes=null", f"collect.steps={self.steps}"]
        if self.episodes is not None:
            overrides += ["collect.steps=null", f"collect.episodes={self.episodes}"]
        if self.seed is not None:
            overrides.append(f"manager.seed={self.seed}")
        if self.trace is not None:
            overrides.append(f"manager.trace={json.dumps({'path': self.trace})}")
        elif self.resume is not None:
            overrides.append("manager.trace=null")  # there is one already, of what was before
        if self.output is not None or self.resume is not None:
            overrides.append("collect.output=null")  # whatever the config says is not asked for
        if self.resume is None:
            return resolve_config(self.config, set=overrides, **self.allowed)
        resolved = resolve_config_of_run(self.config, overrides, self.allowed)
        refuse_changes(Path(self.config), resolved)
        return resolved


def goal_of(resolved: ResolvedConfig, options: str = "--steps N or --episodes N") -> Goal:
    """Return what a run is to collect.

    Args:
        resolved: the config.
        options: which options of the command say it, for the error.

    Raises:
        ConfigError: nothing says when the run ends.
    """
    collect, manager = resolved.values.collect, resolved.values.manager
    if collect.steps is not None:
        return Goal(collect.steps, "steps")
    if collect.episodes is not None:
        return Goal(collect.episodes, "episodes")
    if math.isinf(manager.episode_num):
        raise ConfigError(
            f"nothing says when the run ends. Give {options}, or set collect.steps, "
            "collect.episodes or manager.episode_num in the config."
        )
    return Goal(manager.episode_num * (manager.env_num or 1), "episodes")


def folder_of(options: RunOptions, resolved: ResolvedConfig) -> RunFolder | None:
    """Return the folder for the results, ready to be written to; None if nothing is written.

    Raises:
        ConfigError: the folder holds results, or cannot be written to.
        UnreadableRunError: the run that is to be resumed cannot be resumed.
    """
    if options.resume is not None:
        resumed = ResumedFolder(Path(options.resume))
        resumed.prepare()
        resumed.prepare_seed(resolved)
        return resumed
    if not options.write:
        return None
    given = options.output or resolved.values.collect.output
    is_files = resolved.origins["collect.output"].source is Source.FILE
    is_of_file = options.output is None and given is not None and is_files
    if is_of_file:
        check_output(given)  # links may have been made since
    # Local time: it is for people, who look for the run of this afternoon.
    now = datetime.now().astimezone()
    path = Path(given).expanduser() if given else default_path(options.config, now)
    # JSON cannot hold a name that is not valid text; such a name is escaped as Python shows it.
    config = os.fsencode(os.path.abspath(options.config)).decode(errors="backslashreplace")
    facts = RunFacts(config, now.isoformat(timespec="seconds"))
    folder = RunFolder(path, force=options.force, facts=facts.as_json(), is_of_file=is_of_file)
    folder.prepare()
    return folder
