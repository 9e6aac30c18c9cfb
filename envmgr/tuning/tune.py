"""Tuning from beginning to end: profile, plan, search; what came of it as plain figures."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envmgr.calibrate import choose
from envmgr.config import ManagerConfig
from envmgr.errors import EnvManagerError
from envmgr.launch import usable_cores, worker_settings_of
from envmgr.manager import EnvManager
from envmgr.tuning.measuring import Act, Course, Stable, anchors_of, figures_of, profiled
from envmgr.tuning.model import EnvFigures, Machine, expected_rate, fitted_machine
from envmgr.tuning.plan import candidates, entrants, rounds_of
from envmgr.tuning.search import Measured, is_right, search
from envmgr.tuning.settings import Setting, changes_of, pair_of, setting_of
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile

LEAST_ENTRANTS, MOST_ENTRANTS = 5, 8
_PROFILE_SHARE, _MOST_PROFILE_S = 0.1, 3.0
_ANCHOR_SHARE, _MOST_ANCHOR_S = 0.02, 0.4
_LAUNCH_SHARE = 0.35
_CYCLES = 3.0


@dataclass(frozen=True)
class Row:
    """What is known of a setting.

    Attributes:
        setting: the setting.
        expected: steps per second, by the model; None if it knows nothing of the kind.
        measured: steps per second, the median; None if it was not measured.
        ratio: how it did beside the present setting, the median over laps.
        spread: half of the middle range of those ratios, as a part of their median.
        error: why it cannot be run; empty if it can.
    """

    setting: Setting
    expected: float | None
    measured: float | None = None
    ratio: float | None = None
    spread: float = 0.0
    error: str = ""

    @property
    def right(self) -> bool | None:
        """Whether the model was right, within 15 %; None if nobody knows."""
        return None if self.measured is None else is_right(self.expected, self.measured)


@dataclass(frozen=True)
class Tuned:
    """What came of tuning.

    Attributes:
        profile: of one env.
        worker_bytes: memory of a worker with one env, not shared with others; None if unknown.
        machine: what managers cost here.
        now: the present setting.
        best: the best one.
        rows: of all settings; those that were measured first, the fastest of them first.
        changes: keys of the manager's config for the best setting.
        gains: by these keys: what each would bring alone, as the model expects, as a factor.
    """

    profile: Profile
    worker_bytes: int | None
    machine: Machine
    now: Setting
    best: Setting
    rows: tuple[Row, ...]
    changes: Mapping[str, Any]
    gains: Mapping[str, float]

    def row_of(self, setting: Setting) -> Row:
        """Return what is known of a setting."""
        return next(row for row in self.rows if row.setting == setting)


def tune(
    config: Mapping[str, Any],
    factories: Sequence[EnvFactory],
    *,
    seconds: float,
    kinds: Sequence[str] = (),
    policy_of: Callable[[EnvManager], Act] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the setting of a config that steps its envs fastest here.

    Args:
        config: of the manager, with every key.
        factories: of the envs.
        seconds: about how long it may take.
        kinds: registry keys to try; empty for those with workers.
        policy_of: returns the policy for a launched manager; None acts at random, at no cost.
        say: told what is being done.

    Raises:
        EnvManagerError: the env cannot be built and stepped, or with no setting.
    """
    end, env_num = time.monotonic() + seconds, len(factories)
    config = {**config, "env_num": env_num}
    cores = usable_cores(worker_settings_of(ManagerConfig.from_mapping(config)).affinity)
    say("an env by itself")
    one = _try_one(config, factories, min(_MOST_PROFILE_S, _PROFILE_SHARE * seconds))
    say("what managers cost here")
    sync = pair_of(config["type"])[0]
    anchor_s = min(_MOST_ANCHOR_S, _ANCHOR_SHARE * seconds)
    anchors = anchors_of(one.spaces, sync, config, cores, anchor_s, policy_of)
    env, machine = figures_of(one.profile), fitted_machine(anchors, cores, sync)

    expected = _expectation(env_num, env, machine)
    now = _present(config, env_num, cores, one.profile)
    settings = candidates(now, env_num, cores, env, kinds)
    most = _most_entrants(seconds, one, env_num)
    chosen = [candidate.setting for candidate in entrants(settings, expected, most)]
    launches_s = len(chosen) * one.launch_s * (1 + env_num / 16)
    left_s = max(end - time.monotonic() - launches_s, 0.2 * seconds)
    launched = functools.partial(Course, config=config, factories=factories, policy_of=policy_of)
    with Stable(launched, *_window(left_s, len(chosen), env), say) as stable:
        best, found = search(chosen, stable.measure, dropped=stable.drop, cost=_cost(now))
    if not best.rate:
        why = stable.errors.get(now) or next(iter(stable.errors.values()), "it takes no step")
        raise EnvManagerError(f"no setting can be run: {why}")
    rows = _rows(found, settings, expected, stable.errors)
    changes = changes_of(best.setting, now, config)
    gains = _gains(changes, best.setting, now, expected)
    return Tuned(one.profile, one.worker_bytes, machine, now, best.setting, rows, changes, gains)


def _expectation(
    env_num: int, env: EnvFigures, machine: Machine
) -> Callable[[Setting], float | None]:
    """Return what says what is expected of a setting; None where the model knows nothing of it."""

    @functools.cache
    def expected(setting: Setting) -> float | None:
        known = setting.has_workers or setting.kind.startswith("base")
        return expected_rate(setting, env_num, env, machine) if known else None

    return expected


def _window(left_s: float, n_entrants: int, env: EnvFigures) -> tuple[float, float]:
    """Return how long to measure a setting each time, and how long to step it before that.

    Where resets take their time, a window should see several episodes; for that it may be twice as
    long as the budget has it.
    """
    window_s = left_s / sum(size * laps for size, laps in rounds_of(n_entrants))
    if env.reset_s_per_step <= 0.05 * env.step_s:
        return 0.9 * window_s, 0.1 * window_s
    cycle_s = env.reset_s + env.episode_steps * env.step_s
    window_s = max(window_s, min(_CYCLES * cycle_s, 2.0 * window_s))
    lead_s = min(0.3 * window_s, cycle_s)
    return window_s - lead_s, lead_s


@dataclass(frozen=True)
class _One:
    """What one env in a worker of its own is like."""

    profile: Profile
    spaces: tuple[Any, Any]
    worker_bytes: int | None
    launch_s: float


def _try_one(config: Mapping[str, Any], factories: Sequence[EnvFactory], seconds: float) -> _One:
    began = time.monotonic()
    plain = {**config, "env_num": 1, "seed": None}
    course = Course(Setting(pair_of(config["type"])[0]), plain, factories[:1])
    manager = course.manager
    launch_s = time.monotonic() - began
    try:
        profile: Profile = manager.apply(profiled, seconds)[0]
        workers = manager.stats().get("workers") or [{"pid": 0}]
        spaces = (manager.observation_space, manager.action_space)
        return _One(profile, spaces, _private_bytes(workers[0]["pid"]), launch_s)
    finally:
        course.close()


def _present(config: Mapping[str, Any], env_num: int, cores: int, profile: Profile) -> Setting:
    """Return the setting of the config; what `num_workers: auto` becomes is known by now."""
    setting = setting_of(config)
    if config["num_workers"] != "auto":
        return setting
    n = choose(env_num, cores, profile.trial).num_workers
    return setting._replace(num_workers=None if n == env_num else n)


def _most_entrants(seconds: float, one: _One, env_num: int) -> int:
    """Return how many settings can be launched side by side, in the time and the memory."""
    by_time = _LAUNCH_SHARE * seconds / (one.launch_s * (1 + env_num / 16))
    by_memory = float(MOST_ENTRANTS)
    available = _available_bytes()
    if one.worker_bytes and available:
        by_memory = 0.5 * available / (one.worker_bytes * env_num)
    return int(max(2, min(max(by_time, LEAST_ENTRANTS), MOST_ENTRANTS, by_memory)))


def _cost(now: Setting) -> Callable[[Setting], tuple[int, ...]]:
    """Return what to keep low among settings that do equally well: changes, spares, workers."""

    def cost(setting: Setting) -> tuple[int, ...]:
        n = 1_000_000 if setting.num_workers is None else setting.num_workers
        return (
            setting.kind != now.kind,
            setting.spare_env_num,
            sum(a != b for a, b in zip(setting, now, strict=True)),
            n,
        )

    return cost


def _rows(
    found: Sequence[Measured[Setting]],
    settings: Sequence[Setting],
    expected: Callable[[Setting], float | None],
    errors: Mapping[Setting, str],
) -> tuple[Row, ...]:
    rows = [
        Row(
            one.setting,
            expected(one.setting),
            one.rate or None,
            one.ratio,
            one.spread,
            errors.get(one.setting, ""),
        )
        for one in sorted(found, key=lambda one: -one.ratio)
    ]
    known = {row.setting for row in rows}
    others = [Row(setting, expected(setting)) for setting in settings if setting not in known]
    return (*rows, *sorted(others, key=lambda row: -(row.expected or 0.0)))


_FIELD_OF = {"type": "kind"}


def _gains(
    changes: Mapping[str, Any],
    best: Setting,
    now: Setting,
    expected: Callable[[Setting], float | None],
) -> dict[str, float]:
    """Return what each change would bring alone, as the model expects."""
    before, gains = expected(now), {}
    for key in changes:
        name = _FIELD_OF.get(key, key)
        alone = expected(now._replace(**{name: getattr(best, name)}))
        if before and alone:
            gains[key] = alone / before
    return gains


def _private_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared = map(int, file.read().split()[:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return None


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
