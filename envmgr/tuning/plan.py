"""Which settings to measure, how many there is time for, and how long each takes. Does no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from envmgr.calibrate import TYPICAL, choose
from envmgr.tuning.settings import Setting, pair_of
from envmgr.worker.profiling import Trial

_LEAST, _MOST = 5, 16
"""How many settings are measured side by side, at least and at most."""

_LAUNCH_SHARE, _LAP_SHARE = 0.3, 0.25
"""The shares of the time that launches, and a lap, may take."""

_WINDOW_S, _STEPS, _EPISODES = 0.12, 60, 2.5
_WORTH_HIDING, _LEAST_RESET_S = 0.05, 1e-3
"""Resets that take less than this share of the steps' time, or so little time, need no spares."""


def candidates(
    now: Setting, env_num: int, cores: int, trial: Trial, kinds: Sequence[str] = ()
) -> list[Setting]:
    """Return the settings to choose from: the present one, then the most informative ones.

    There may not be time for all. If `num_workers: auto` would give each env a worker of its own,
    because envs wait, settings that do so come first; else these and settings with shared workers
    alternate.

    Args:
        now: the setting of the config.
        env_num: number of envs.
        cores: number of cores that may be used.
        trial: what one env does.
        kinds: registry keys to try; empty for kinds with workers and the view of the present one.
    """
    likely = choose(env_num, cores, trial, TYPICAL).num_workers
    spares = _spares(env_num, trial)
    apart, shared = [], []
    for kind in kinds or pair_of(now.kind):
        plain = Setting(kind)
        if not plain.has_workers:
            apart.append([plain])
        elif kind == pair_of(kind)[0]:
            apart.append([plain, *(plain._replace(spare_env_num=n) for n in spares)])
            shared.append([plain._replace(num_workers=n) for n in _workers(env_num, cores, likely)])
        else:
            each = [plain._replace(wait_num=n) for n in _waits(env_num)]
            hidden = [each[0]._replace(spare_env_num=n) for n in spares if each]
            apart.append([*each[:1], *hidden, *each[1:]])
            in_few = each[:2] if cores < env_num else []
            shared.append([one._replace(num_workers=cores) for one in in_few])
    of_apart, of_shared = _in_turns(*apart), _in_turns(*shared)
    found = [*of_apart, *of_shared] if likely == env_num else _in_turns(of_shared, of_apart)
    return list(dict.fromkeys((now, *found)))


def _in_turns(*groups: Sequence[Setting]) -> list[Setting]:
    rows = itertools.zip_longest(*groups)
    return [one for row in rows for one in row if one is not None]


def _workers(env_num: int, cores: int, likely: int) -> list[int | Literal["auto"]]:
    """Return numbers of workers: the likely one, and powers of two up to two per core."""
    if env_num == 1:
        return []
    powers = itertools.takewhile(lambda n: n < 2 * cores, (2**k for k in itertools.count()))
    numbers = dict.fromkeys((likely, cores, 1, 2 * cores, *powers))
    first, *others = (n for n in numbers if n < env_num)
    return [first, "auto", *others]


def _waits(env_num: int) -> list[float]:
    """Return numbers of envs to wait for, each a part of all."""
    numbers = (float(max(1, round(env_num * share))) for share in (0.5, 0.25, 0.125, 0.75))
    return [n for n in dict.fromkeys(numbers) if n < env_num]


def _spares(env_num: int, trial: Trial) -> list[int]:
    """Return numbers of spares to try: half as many as hide all resets, and as many as do."""
    per_step_s = trial.reset_s_per_step
    is_cheap = trial.reset_s < _LEAST_RESET_S or per_step_s < _WORTH_HIDING * trial.step_s
    if not trial.n_episodes or is_cheap:
        return []
    enough = min(math.ceil(env_num * per_step_s / trial.step_s), 2 * env_num)
    return list(dict.fromkeys((math.ceil(enough / 2), enough)))


def most_entrants(
    seconds: float,
    launch_s: float,
    env_num: int,
    window_s: float,
    *,
    worker_bytes: int | None,
    free_bytes: int,
) -> int:
    """Return how many settings to launch side by side, given the time and the memory there is.

    Args:
        seconds: how long everything may take.
        launch_s: how long launching one env took.
        env_num: number of envs.
        window_s: how long a setting is measured in each lap.
        worker_bytes: memory that a worker shares with no other; None if unknown.
        free_bytes: memory that is free.
    """
    by_time = _LAUNCH_SHARE * seconds / (launch_s * (1 + env_num / 16))
    by_lap = _LAP_SHARE * seconds / window_s
    by_memory = 0.5 * free_bytes / (worker_bytes * env_num) if worker_bytes else float(_MOST)
    return int(max(2, min(max(min(by_time, by_lap), _LEAST), _MOST, by_memory)))


def window_of(left_s: float, trial: Trial) -> tuple[float, float]:
    """Return how long to measure a setting each time, and how long to step it before that.

    Many short windows tell more than a few long ones, because the speed of the machine varies. But
    a window should have many steps in it, and where resets take long, several episodes.
    """
    window_s = min(_WINDOW_S, left_s / 120)
    window_s = max(window_s, min(_STEPS * trial.step_s, left_s / 60))
    if not trial.n_episodes or trial.reset_s_per_step <= 0.05 * trial.step_s:
        return window_s, 0.1 * window_s
    cycle_s = trial.reset_s + trial.n_steps / trial.n_episodes * trial.step_s
    window_s = max(window_s, min(_EPISODES * cycle_s, left_s / 24))
    return window_s, min(0.3 * window_s, cycle_s)
