"""`envmgr run --resume`: what an interrupted or killed run has collected, and what is left to do.

The folder has all that the rest of the run needs: `config.yaml` with every key, limits included;
`episodes.jsonl`, a line for each episode that counts; and `run.json`, which says when the run was
begun, and when it was resumed. Timesteps of episodes that had not ended are lost with the kill.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from envmgr.cli.output import RunFolder, locked, refuse_links
from envmgr.collect import CollectStatistics, EpisodeRecord
from envmgr.config import to_plain
from envmgr.config.allow_list import LISTS
from envmgr.config.imports import left_behind
from envmgr.config.sections import CollectConfig
from envmgr.config_file import ResolvedConfig, read_config_file, resolve_config_of_run
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.reporting.files import (
    CONFIG,
    EPISODES,
    FIGURES,
    PAGE,
    RUN,
    SAMPLES,
    SUMMARY,
    Count,
    EnvId,
    Failures,
    Resumption,
    Resumptions,
    Sample,
    Seconds,
)
from envmgr.untrusted import opened_file, opened_itself

UNKNOWN = "unknown"
"""Kind of the failures of a killed part of a run: until its end, only their number is written."""

_RESUMED = 0x4E5
"""Keeps the seeds of resumed runs distinct from all others that follow from a seed."""

_LARGEST_FILE = 1 << 26
"""The most bytes that are read of a file, or of a line."""

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class _Line(msgspec.Struct, gc=False, frozen=True):
    """A line of `episodes.jsonl`; see `EpisodeRecord`."""

    episode: Count
    env_id: EnvId
    nth: Count
    seed: int | None
    generation: Count | None
    length: Count
    terminated: bool | None
    truncated: bool | None
    abnormal: bool
    failure: str | None
    duration_s: Seconds
    ended_s: Seconds
    returned: float | list[float | None] | None = msgspec.field(name="return")

    def record(self) -> EpisodeRecord:
        """Return the record that was written; numbers that were not finite are NaN."""
        found = msgspec.structs.asdict(self)
        returned = found.pop("returned")
        parts = returned if isinstance(returned, list) else [returned]
        known = [math.nan if part is None else part for part in parts]
        return EpisodeRecord(
            number=found.pop("episode"),
            episode_return=known if isinstance(returned, list) else known[0],
            **found,
        )


class RunFacts(msgspec.Struct):
    """The content of `run.json`.

    Attributes:
        version: version of the format.
        config: path of the config that the run was begun with.
        began_at: when the run was begun.
        resumed: how often and when it was resumed.
    """

    config: str
    began_at: str
    version: int = msgspec.field(name="envmgr_run", default=1)
    resumed: Resumptions = msgspec.field(default_factory=list)

    def as_json(self) -> bytes:
        """Return the facts as the text of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass
class Earlier:
    """What is known of a run from before it is resumed.

    Attributes:
        statistics: statistics of all episodes that ended, with their timesteps only.
        failures: failures until now.
        sample: the latest sample; None if there is none.
        seeds: seeds that its envs have been launched with, as far as episodes say.
        episodes_bytes: where the last whole line of the episodes ends.
        samples_bytes: likewise, for the samples.
    """

    facts: RunFacts
    statistics: CollectStatistics = field(default_factory=CollectStatistics)
    failures: Failures = field(default_factory=Failures)
    sample: Sample | None = None
    seeds: set[int] = field(default_factory=set)
    episodes_bytes: int = 0
    samples_bytes: int = 0

    def seed_of_rest(self, seed: Any, env_num: int) -> Any:
        """Return what takes the place of `manager.seed` from now on, in the same form.

        Each seed is replaced by one that follows from it and from how often the run was resumed,
        and that no env of the run had before.

        Args:
            seed: `manager.seed` of the config.
            env_num: how many envs there are.
        """
        if isinstance(seed, Mapping):
            return {env_id: self._other(one, 1) for env_id, one in seed.items()}
        if isinstance(seed, Sequence):
            return [self._other(one, 1) for one in seed]
        return self._other(seed, env_num)

    def _other(self, seed: int | None, n_envs: int) -> int | None:
        """Return another seed; `n_envs` envs get it and the numbers that follow it."""
        if seed is None:
            return None
        nth = len(self.facts.resumed) + 1
        for attempt in itertools.count():
            words = np.random.SeedSequence((seed, _RESUMED, nth, attempt)).generate_state(1)
            found = int(words[0]) >> 1  # old envs refuse more than 32 bits, with env_id added too
            if self.seeds.isdisjoint(range(found, found + n_envs)):
                return found
        raise AssertionError("unreachable")

    def count_in(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Return a manager's figures plus what the run had counted before it was resumed."""
        before, found = self.failures, dict(stats)
        by_kind = Counter(before.by_kind) + Counter(stats.get("failures_by_kind", {}))
        by_env = Counter(before.by_env) + Counter(stats.get("failures_by_env", {}))
        found["failures"] = before.count + stats.get("failures", 0)
        found["failures_by_kind"], found["failures_by_env"] = dict(by_kind), dict(by_env)
        for name, more in (
            ("timesteps", self.statistics.steps),
            ("episodes", self.statistics.n_ended),
        ):
            if name in found:
                found[name] += more
        return found


class ResumedFolder(RunFolder):
    """The folder of a run that goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.earlier: Earlier
        self._seed: Any = None

    def prepare(self) -> None:
        """Read what is in the folder, and lock it against other writers.

        Raises:
            UnreadableRunError: it is not the folder of a run, not whole, or parts of it are links.
            ConfigError: the run is complete, or goes on; or the folder cannot be written to.
        """
        refuse_no_run(self.path)
        self._lock = locked(self.path)
        try:
            self.earlier = read_earlier(self.path)
            refuse_links(self.path)
        except BaseException:
            self.discard()
            raise
        self.resumed = len(self.earlier.facts.resumed) + 1

    def prepare_seed(self, resolved: ResolvedConfig) -> None:
        """Have the envs and the policy begin with other seeds than the run has used so far."""
        cfg = resolved.values.manager
        self._seed = self.earlier.seed_of_rest(to_plain(cfg.seed), cfg.env_num or 1)
        cfg.seed = self._seed

    def begin(self, config_yaml: str) -> None:
        """Record that the run was resumed, drop half-written lines, and go on with the lists.

        Raises:
            OSError: they cannot be written.
        """
        earlier = self.earlier
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        done = earlier.statistics
        earlier.facts.resumed.append(
            Resumption(now, self._seed, done.steps, done.n_ended, earlier.failures)
        )
        self._write_facts(earlier.facts.as_json())  # first: its seeds are used from here on
        for name in (SUMMARY, PAGE, FIGURES):
            (self.path / name).unlink(missing_ok=True)
        _open_at(self.path / SAMPLES, earlier.samples_bytes).close()
        self._episodes = _open_at(self.path / EPISODES, earlier.episodes_bytes)
        self._begun = True
        self._write_process()

    def discard(self) -> None:
        """Release the folder, and leave it as it was."""
        self.close()


def left_to_collect(
    goal: CollectConfig, collected: CollectStatistics
) -> tuple[int | None, int | None]:
    """Return how many steps and how many episodes a run still has to collect.

    Args:
        goal: the section `collect` of its config.
        collected: what was collected until now, also before the run was resumed.

    Returns:
        None for what has no limit.
    """
    wanted = (goal.steps, collected.steps), (goal.episodes, collected.episodes)
    steps, episodes = (None if n is None else max(n - found, 0) for n, found in wanted)
    return steps, episodes


def refuse_no_run(path: Path) -> None:
    """Refuse to resume a folder that is not of a run, or is of a complete one.

    Raises:
        UnreadableRunError: it is not the folder of a run.
        ConfigError: the run is complete.
    """
    where = str(path)
    if not path.is_dir():
        raise UnreadableRunError(
            f"{where!r} is no folder. Give the one that `envmgr run` wrote its results into, such "
            "as runs/<config>-<date>-<time>."
        )
    missing = [name for name in (EPISODES, RUN, CONFIG) if not (path / name).is_file()]
    if missing:
        raise UnreadableRunError(
            f"{where!r} is no folder of a run that can be resumed: there is no "
            f"{' and no '.join(missing)} in it. Give the one that `envmgr run` wrote its results "
            "into; a run that was killed before it collected anything is begun again."
        )
    if (_summary_in(path) or {}).get("ending") == "done":
        raise ConfigError(
            f"the run in {where!r} is complete, so there is nothing to resume. To collect more, "
            f"begin another run: envmgr run {shlex.quote(str(path / CONFIG))} --steps N"
        )


def _open_at(path: Path, end: int) -> io.FileIO:
    """Open a file to append to, cut off where its last whole line ends.

    Raises:
        OSError: it cannot be written; or it is a link, so that another file would be cut.
    """
    file = io.FileIO(path, "a", opener=opened_itself)
    if os.fstat(file.fileno()).st_size > end:
        file.truncate(end)
    file.seek(0, os.SEEK_END)
    return file


# -- reading --------------------------------------------------------------------------------------


def read_earlier(path: Path) -> Earlier:
    """Return what is known of a run so far, to go on with it.

    Raises:
        UnreadableRunError: a file of the run is not whole.
    """
    try:
        return _read_earlier(path)
    except OSError as error:
        raise UnreadableRunError(
            f"the run in {str(path)!r} cannot be read: {error.strerror} ({error.filename})"
        ) from error


def _facts_of(path: Path) -> RunFacts:
    with opened_file(path / RUN) as file:
        return msgspec.json.decode(file.read(_LARGEST_FILE), type=RunFacts)


def _read_earlier(path: Path) -> Earlier:
    try:
        facts = _facts_of(path)
    except _UNREADABLE as error:
        raise UnreadableRunError(
            f"{str(path / RUN)!r} is not whole, or none of envmgr: {error}. The run cannot be "
            "resumed; `envmgr report` shows what it has collected."
        ) from None
    earlier = Earlier(facts)
    statistics, by_env = earlier.statistics, Counter[int]()
    parts: set[int | None] = set()
    for line, earlier.episodes_bytes in _whole_lines(path / EPISODES, _Line):
        if not line.abnormal:
            parts.add(len(line.returned) if isinstance(line.returned, list) else None)
        if len(parts) > 1:
            raise UnreadableRunError(
                f"{str(path / EPISODES)!r} is damaged: not all returns in it have as many parts, "
                "so they are not of the same envs. Begin the run again."
            )
        statistics.add(line.record())
        statistics.steps += line.length
        statistics.elapsed_s = max(statistics.elapsed_s, line.ended_s)
        by_env[line.env_id] += line.abnormal
        if line.seed is not None:
            earlier.seeds.add(line.seed)
    if os.path.lexists(path / SAMPLES):
        for earlier.sample, earlier.samples_bytes in _whole_lines(path / SAMPLES, Sample):
            statistics.elapsed_s = max(statistics.elapsed_s, earlier.sample.elapsed_s)
    earlier.failures = _failures_until_now(earlier, by_env, _summary_in(path))
    return earlier


def _whole_lines(path: Path, kind: type[Any]) -> Iterator[tuple[Any, int]]:
    """Yield the lines of a file, and where each ends; a half-written last line is left out.

    Raises:
        UnreadableRunError: a line cannot be read although it is not half-written: its end is there.
        OSError: the file cannot be read, or is a link.
    """
    end = 0
    with opened_file(path) as file:
        for n, text in enumerate(iter(lambda: file.readline(_LARGEST_FILE), b""), 1):
            if not text.endswith(b"\n") and len(text) < _LARGEST_FILE:
                return
            end += len(text)
            try:
                line = msgspec.convert(json.loads(text), kind, str_keys=True)
            except _UNREADABLE as error:
                raise UnreadableRunError(
                    f"{str(path)!r} is damaged, so it cannot be told what was collected: line {n}: "
                    f"{error}. Remove the lines that are not whole, or begin the run again."
                ) from None
            yield line, end


def _summary_in(path: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None if there is none that can be read."""
    with (
        contextlib.suppress(OSError, ValueError, RecursionError),
        opened_file(path / SUMMARY) as file,
    ):
        found = json.loads(file.read(_LARGEST_FILE))
        return found if isinstance(found, dict) else None
    return None


def _failures_until_now(
    earlier: Earlier, by_env: Mapping[int, int], summary: Mapping[str, Any] | None
) -> Failures:
    """Return the failures of all parts: from the summary, or else as far as they are known."""
    if summary is not None:
        with contextlib.suppress(*_UNREADABLE, KeyError, TypeError):
            stats = summary["stats"]
            known = {"count": stats["failures"], "by_kind": stats["failures_by_kind"]}
            told = {**known, "by_env": stats["failures_by_env"]}
            return msgspec.convert(told, Failures, strict=False)
    resumed = earlier.facts.resumed
    before = resumed[-1].failures if resumed else Failures()
    sampled = 0 if earlier.sample is None else earlier.sample.failures
    count = max(before.count, sampled, earlier.statistics.abnormal_episodes)
    killed = {UNKNOWN: count - before.count} if count > before.count else {}
    by_kind = Counter(before.by_kind) + Counter(killed)
    envs = {*before.by_env, *(env_id for env_id, n in by_env.items() if n)}
    return Failures(
        count,
        dict(by_kind),
        {i: max(before.by_env.get(i, 0), by_env.get(i, 0)) for i in sorted(envs)},
    )


# -- the config -----------------------------------------------------------------------------------


def refuse_changes(config: Path, resolved: ResolvedConfig) -> None:
    """Refuse to resume a run with other settings than those that it was begun with.

    Args:
        config: path of the config in the folder of the run.
        resolved: the same config, with what `--set` says.

    Raises:
        ConfigError: a setting differs; or the run ends by `manager.episode_num`.
    """
    given = read_config_file(config)
    for section, values in to_plain(resolved.values).items():
        before = given.get(section) or {}
        for key, value in values.items():
            if f"{section}.{key}" in _OWN or key not in before or before[key] == value:
                continue
            raise ConfigError(
                f"--set makes {section}.{key} {value!r}, but the run was begun with "
                f"{before[key]!r}. A run is resumed with the settings that it was begun with: "
                "leave --set out, or begin another run."
            )
    if not math.isinf(resolved.values.manager.episode_num):
        raise ConfigError(
            "manager.episode_num gives each env of the run a number of episodes, of which a new "
            "manager knows none, so the run cannot be resumed. Runs that end by collect.steps or "
            "collect.episodes (--steps, --episodes) can."
        )


_OWN = ("collect.output", "manager.trace")
"""Keys that a resumed run has values of its own for."""


def command_with_modules(
    path: Path, overrides: Sequence[str], allowed: Mapping[str, Sequence[str]]
) -> str:
    """Return the command that finds the modules beside the config that a run was begun with.

    Args:
        path: the folder of the run.
        overrides: what the command was given with `--set`.
        allowed: what it was given with the options of `allow_list`, by the names of its lists.

    Returns:
        The command; empty if the run names no modules that are there and cannot be imported from
        here.
    """
    try:
        facts = _facts_of(path)
        given = read_config_file(path / CONFIG)
    except (ConfigError, OSError, *_UNREADABLE):  # said elsewhere
        return ""
    manager = given.get("manager")
    names = manager.get("import_names") if isinstance(manager, Mapping) else None
    parts = [given.get("env"), given.get("collect"), names]
    named = {name for name in map(_MODULE.match, _texts_in(parts)) if name is not None}
    allowed_imports = allowed.get("allow_imports", ())
    folder = Path(facts.config).parent
    modules = left_behind({name[0] for name in named}, folder, allowed_imports)
    if not modules or folder == Path.cwd() != path.resolve():  # found from here
        return ""
    imports = [*allowed_imports, *(one for one in modules if one not in allowed_imports)]
    command = _command(path, overrides, {**allowed, "allow_imports": imports})
    return f"PYTHONPATH={shlex.quote(str(folder))} {command}"


def resuming_command(
    path: Path, overrides: Sequence[str], allowed: Mapping[str, Sequence[str]]
) -> str:
    """Return the command that goes on with a run from the working directory.

    Args:
        path: the folder of the run.
        overrides: what the run was given with `--set`; repeated if a file may not set all of it.
        allowed: what it was given with the options of `allow_list`, by the names of its lists.
    """
    with contextlib.suppress(ConfigError, OSError):
        resolve_config_of_run(str(path / CONFIG), (), allowed)
        overrides = ()
    return command_with_modules(path, overrides, allowed) or _command(path, overrides, allowed)


def _command(path: Path, overrides: Sequence[str], allowed: Mapping[str, Sequence[str]]) -> str:
    options = [(LISTS[name].option, entry) for name, given in allowed.items() for entry in given]
    options += [("--set", one) for one in overrides]
    words = [f"{option} {shlex.quote(value)}" for option, value in options]
    return " ".join(["envmgr run --resume", shlex.quote(str(path)), *words])


_MODULE = re.compile(r"[A-Za-z_]\w*(?=[.:]|$)")


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts_in(item)
