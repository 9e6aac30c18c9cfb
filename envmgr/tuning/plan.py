"""Which settings are worth a look, and which of those are worth measuring. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envmgr.tuning.model import EnvFigures
from envmgr.tuning.settings import Setting, pair_of

_WORTH_HIDING, _LEAST_RESET_S = 0.05, 1e-3
"""Resets that take less than this share of the steps' time, or so little time, need no spares."""


class Candidate(NamedTuple):
    """A setting, and what is expected of it.

    Attributes:
        setting: the setting.
        expected: steps per second; None where the model knows nothing of its kind.
    """

    setting: Setting
    expected: float | None


def candidates(
    now: Setting,
    env_num: int,
    cores: int,
    env: EnvFigures,
    kinds: Sequence[str] = (),
) -> list[Setting]:
    """Return the settings to choose from, the present one first.

    Args:
        now: the setting of the config.
        env_num: number of envs.
        cores: that may be used.
        env: what one is like.
        kinds: registry keys to try; empty for those with workers, in the form of the present one.
    """
    found = [now]
    for kind in kinds or pair_of(now.kind):
        plain = Setting(kind)
        if not plain.has_workers:
            found.append(plain)
            continue
        waits = [math.inf] if kind == pair_of(kind)[0] else _waits(env_num)
        for wait_num in waits:
            workers = _workers(env_num, cores)
            found += [Setting(kind, n, wait_num) for n in workers]
            for n_spares in _spares(env_num, env):
                found.append(Setting(kind, None, wait_num, n_spares))
    return list(dict.fromkeys(found))


def _workers(env_num: int, cores: int) -> list[int | None]:
    """Return numbers of workers: powers of two, the cores, and one each (None)."""
    numbers = {1, cores, 2 * cores, *(2**k for k in range(6))}
    return [*sorted(n for n in numbers if n < env_num), None]


def _waits(env_num: int) -> list[float]:
    quarters = {max(1, round(env_num * share)) for share in (0.125, 0.25, 0.5, 0.75)}
    return [float(n) for n in sorted(quarters) if n < env_num]


def _spares(env_num: int, env: EnvFigures) -> list[int]:
    """Return numbers of spares: of about as many envs as are being reset at a time, and more."""
    is_cheap = env.reset_s < _LEAST_RESET_S or env.reset_s_per_step < _WORTH_HIDING * env.step_s
    if math.isinf(env.episode_steps) or is_cheap:
        return []
    share = env.reset_s_per_step / max(env.reset_s_per_step + env.step_s, 1e-12)
    busy = max(1, round(env_num * share))
    return sorted({max(1, busy // 2), busy, min(2 * busy, env_num), min(4 * busy, 2 * env_num)})


def entrants(
    settings: Sequence[Setting],
    expected: Callable[[Setting], float | None],
    most: int,
) -> list[Candidate]:
    """Return the settings to measure: the present one, the best of each sort, the best of all.

    The model may be wrong about what it has never seen here. So every sort of setting (shared
    workers, workers of their own, with spares, sync and async) is measured once at least.

    Args:
        settings: the present one first.
        expected: what the model says.
        most: how many to return at most; 2 or more.
    """
    known = [Candidate(setting, expected(setting)) for setting in settings]
    now, others = known[0], sorted(known[1:], key=lambda c: -(c.expected or math.inf))
    best_of_sort: dict[tuple[str, bool, bool], Candidate] = {}
    for candidate in others:
        best_of_sort.setdefault(_sort_of(candidate.setting), candidate)
    chosen = [now, *others[:1], *best_of_sort.values(), *others]
    return list(dict.fromkeys(chosen))[:most]


def _sort_of(setting: Setting) -> tuple[str, bool, bool]:
    return setting.kind, setting.num_workers is None, bool(setting.spare_env_num)


def sizes_of(n: int) -> list[int]:
    """Return how many settings are measured in each round: half of them stay, until three do."""
    sizes = [n]
    while sizes[-1] > 3:
        sizes.append(max(3, math.ceil(sizes[-1] / 2)))
    return sizes
