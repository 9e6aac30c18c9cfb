"""Tuning from beginning to end: one env by itself, then a contest of settings, side by side."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envmgr.config import ManagerConfig
from envmgr.errors import ConfigError, EnvManagerError
from envmgr.launch import cores_of
from envmgr.proc import resident_bytes
from envmgr.texts import counted
from envmgr.transport.process.preflight import free_memory
from envmgr.tuning.benchmark_process import Contestant, ContestantError
from envmgr.tuning.measuring import (
    MANY,
    Course,
    ErrorText,
    PolicyOf,
    Runner,
    Stable,
    measure_one,
)
from envmgr.tuning.plan import candidates, most_entrants, window_of
from envmgr.tuning.search import Measured, search
from envmgr.tuning.settings import Setting, changes_of, pair_of, setting_of, without_workers
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile

_PROFILE_SHARE, _MOST_PROFILE_S = 0.1, 3.0
_LEAST_SHARE = 0.2
_PATIENCE_S, _PATIENCE_SHARE = 10.0, 0.25
"""How long envs in one process may take to start, or hang: seconds, and a share of all the time."""


class NoSettingError(EnvManagerError):
    """No setting can be run; the message says why, as a command shows it."""


@dataclass(frozen=True)
class Row:
    """What is known of a setting.

    Attributes:
        measured: steps per second, at the pace of all laps; None if it was not measured.
        ratio: its speed relative to the present setting, the median over laps.
        spread: half of the interquartile range of those ratios, relative to their median.
        error: why it cannot be run, as a command shows it; empty if it can.
        note: what `num_workers: auto` has become, and why.
        is_choice: whether it can be the best one.
    """

    setting: Setting
    measured: float | None = None
    ratio: float | None = None
    spread: float = 0.0
    error: str = ""
    note: str = ""
    is_choice: bool = True


@dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    Attributes:
        worker_bytes: memory of a worker with one env, not shared with others; None if unknown.
        now: the present setting.
        rows: rows of all settings: first those that were measured, with the fastest at the top.
        changes: keys of the manager's config that the best setting changes.
    """

    profile: Profile
    worker_bytes: int | None
    now: Setting
    best: Setting
    rows: tuple[Row, ...]
    changes: Mapping[str, Any]

    def row_of(self, setting: Setting) -> Row:
        """Return what is known of a setting."""
        return next(row for row in self.rows if row.setting == setting)


def tune(
    config: Mapping[str, Any],
    factories: Sequence[EnvFactory],
    *,
    seconds: float,
    kinds: Sequence[str] = (),
    policy_of: PolicyOf | None = None,
    say: Callable[[str], None] = lambda text: None,
    error_text: ErrorText = str,
) -> Tuned:
    """Find the setting of a config that steps its envs fastest here.

    Args:
        config: config of the manager, with every key.
        factories: factories of the envs.
        seconds: about how long tuning may take, closing included, which takes no longer than one
            launch.
        kinds: registry keys to try; empty for those with workers.
        policy_of: returns the policy for a launched manager; None acts at random, at no cost.
        say: called with what is being done.
        error_text: returns an error's message as it is shown.

    Raises:
        ConfigError: `limits.shared` or `limits.starts_per_s` is set, which trials would use up.
        NoSettingError: no setting can be run.
        EnvManagerError: the env cannot be built and stepped.
    """
    end = time.monotonic() + seconds
    env_num = len(factories)
    config = {**config, "env_num": env_num}
    _refuse_limits(config)
    say("an env by itself")
    one = _try_one(config, factories, min(_MOST_PROFILE_S, _PROFILE_SHARE * seconds))
    cores, trial = cores_of(ManagerConfig.from_mapping(config)), one.profile.trial
    now = setting_of(config)
    settings = candidates(now, env_num, cores, trial, kinds)
    in_line = without_workers(now)
    beside = [in_line] if now.has_workers and in_line not in settings else []
    notes: dict[Setting, str] = {}

    def opened(setting: Setting) -> Runner:
        if setting in beside:  # a process of its own: an env may crash or hang it
            patience_s = max(_PATIENCE_S, _PATIENCE_SHARE * seconds)
            keys = {**config, **setting.as_config()}
            return Contestant(None, factories, keys, patience_s, policy_of, error_text)
        course = Course(setting, config, factories, policy_of)
        notes[setting] = _note(course)
        return course

    def shown(error: EnvManagerError) -> str:
        # That of a contestant is shown already, by its process.
        return str(error) if isinstance(error, ContestantError) else error_text(error)

    with contextlib.closing(Stable(opened, say, shown)) as stable:
        left_s = max(end - time.monotonic() - one.launch_s, _LEAST_SHARE * seconds)
        window = window_of(left_s, trial)
        most = most_entrants(
            left_s,
            one.launch_s,
            env_num,
            sum(window),
            worker_bytes=one.worker_bytes,
            free_bytes=free_memory()[0],
        )
        best, found, aside = search(
            settings[:most],
            lambda setting: stable.measure(setting, *window),
            left_s,
            time.monotonic,
            beside=beside,
            dropped=stable.drop,
            cost=_cost(now),
        )
    if not best.rate:
        why = stable.errors.get(now) or next(iter(stable.errors.values()), "it takes no step")
        raise NoSettingError(f"no setting can be run: {why}")
    return Tuned(
        profile=one.profile,
        worker_bytes=one.worker_bytes,
        now=now,
        best=best.setting,
        rows=_rows(found, aside, settings, stable.errors, notes),
        changes=changes_of(best.setting, now),
    )


def _refuse_limits(config: Mapping[str, Any]) -> None:
    """Refuse limits that make settings wait for each other's envs, or that they exceed together."""
    limits = config.get("limits") or {}
    shared, starts_per_s = limits.get("shared"), limits.get("starts_per_s")
    if starts_per_s:
        raise ConfigError(
            f"manager.limits.starts_per_s is {starts_per_s:g}, and `envmgr tune` has several "
            f"managers of {config['env_num']} envs each, which together reset theirs more often. "
            "Tune without it, on a server that allows that: --set manager.limits=null."
        )
    if shared:
        raise ConfigError(
            f"manager.limits.shared is {dict(shared)}, and `envmgr tune` keeps several managers of "
            f"{config['env_num']} envs each launched at one time, which would wait for each other. "
            "Tune without it: --set manager.limits=null. What is best does not depend on it."
        )


@dataclass(frozen=True)
class _One:
    """What one env in a worker of its own is like, and how long it took to launch it."""

    profile: Profile
    worker_bytes: int | None
    launch_s: float


def _try_one(config: Mapping[str, Any], factories: Sequence[EnvFactory], seconds: float) -> _One:
    began = time.monotonic()
    step_s, reset_s = config["step_timeout"], config["reset_timeout"]
    bears = {"on_failure": "recover", "max_failures": MANY}  # `measure_one` tries it several times
    plain = {**config, "env_num": 1, "seed": None, **bears}
    if reset_s is not None:
        # It is the limit of all that `measure_one` does as well, with two or three resets: none if
        # steps have none. That one has its own for each step and reset.
        all_s = None if step_s is None else 3 * reset_s + 2 * step_s + 2 * seconds
        plain["reset_timeout"] = all_s
    course = Course(Setting(pair_of(config["type"])[0]), plain, factories[:1])
    launch_s = time.monotonic() - began
    with contextlib.closing(course) as course:
        profile, _, failures = measure_one(course.manager, seconds, step_s, reset_s)
        if profile is None:
            raise EnvManagerError(
                f"an env by itself could not be measured in {counted(len(failures), 'attempt')}, "
                f"however short they were. The first: {str(failures[0]).splitlines()[0]}"
            ) from failures[0]
        workers = course.manager.stats().get("workers") or [{"pid": 0}]
        private = resident_bytes(workers[0]["pid"], shared=False) or None
        return _One(profile, private, launch_s)


def _note(course: Course) -> str:
    """Return what `num_workers: auto` has become, and why; empty if it is not `auto`."""
    found = course.manager.stats().get("calibration")
    return "" if found is None else f"{found['num_workers']}: {found['reason']}"


def _cost(now: Setting) -> Callable[[Setting], tuple[Any, ...]]:
    """Return what to keep low among settings that do equally well: changes, spares, workers."""

    def cost(setting: Setting) -> tuple[Any, ...]:
        n = setting.num_workers
        return (
            setting.kind != now.kind,
            setting.spare_env_num,
            sum(a != b for a, b in zip(setting, now, strict=True)),
            (n is None, n == "auto", n if isinstance(n, int) else 0),
        )

    return cost


def _rows(
    found: Sequence[Measured[Setting]],
    aside: Sequence[Measured[Setting]],
    settings: Sequence[Setting],
    errors: Mapping[Setting, str],
    notes: Mapping[Setting, str],
) -> tuple[Row, ...]:
    first = found[0]
    rows = [
        Row(
            one.setting,
            # At the pace of all laps, whichever of them it was measured in.
            (one.ratio * first.rate if first.rate else one.rate) or None,
            one.ratio or None,
            one.spread,
            errors.get(one.setting, ""),
            notes.get(one.setting, ""),
            is_choice=one not in aside,
        )
        for one in sorted([*found, *aside], key=lambda one: -one.ratio)
        if one.rates
    ]
    known = {row.setting for row in rows}
    return (*rows, *(Row(setting) for setting in settings if setting not in known))
