"""Which settings are worth measuring, how many there is time for, and for how long each. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from envmgr.tuning.settings import Setting, pair_of
from envmgr.worker.profiling import Trial

_LEAST, _MOST = 5, 16
"""How many settings are measured side by side."""

_LAUNCH_SHARE, _LAP_SHARE = 0.3, 0.25
"""Of the time, what launches may take, and a lap."""

_WINDOW_S, _STEPS, _EPISODES = 0.12, 60, 2.5
_WORTH_HIDING, _LEAST_RESET_S = 0.05, 1e-3
"""Resets that take less than this share of the steps' time, or so little time, need no spares."""


def candidates(
    now: Setting, env_num: int, cores: int, trial: Trial, kinds: Sequence[str] = ()
) -> list[Setting]:
    """Return the settings to choose from: the present one, then those that tell most of an env.

    Args:
        now: the setting of the config.
        env_num: number of envs.
        cores: that may be used.
        trial: what one env does.
        kinds: registry keys to try; empty for those with workers, in the form of the present one.
    """
    found = [now]
    spares = _spares(env_num, trial)
    by_kind = [_of_kind(kind, env_num, cores, spares) for kind in kinds or pair_of(now.kind)]
    for row in itertools.zip_longest(*by_kind):  # in turns: there may not be the time for all
        found += [setting for setting in row if setting is not None]
    return list(dict.fromkeys(found))


def _of_kind(kind: str, env_num: int, cores: int, spares: Sequence[int]) -> Iterator[Setting]:
    plain = Setting(kind)
    if not plain.has_workers:
        yield plain
    elif kind == pair_of(kind)[0]:
        yield plain
        shared = [n for n in _workers(cores) if n < env_num]
        hidden = [plain._replace(spare_env_num=n) for n in spares]
        yield from (plain._replace(num_workers=n) for n in shared[:2])
        yield from hidden[:2]
        if env_num > 1:
            yield plain._replace(num_workers="auto")
        yield from (plain._replace(num_workers=n) for n in shared[2:])
        yield from hidden[2:]
    else:
        shares = (0.5, 0.25, 0.75, 0.125)
        waits = dict.fromkeys(float(max(1, round(env_num * share))) for share in shares)
        each = [plain._replace(wait_num=n) for n in waits if n < env_num]
        yield from each[:1]
        if cores < env_num:
            yield from (one._replace(num_workers=cores) for one in each[:1])
        yield from (each[0]._replace(spare_env_num=n) for n in spares[:2] if each)
        yield from each[1:]


def _workers(cores: int) -> list[int]:
    """Return numbers of workers: one per core, one, two per core, and powers of two up to that."""
    powers = itertools.takewhile(lambda n: n < 2 * cores, (2**k for k in itertools.count()))
    return list(dict.fromkeys((cores, 1, 2 * cores, *powers)))


def _spares(env_num: int, trial: Trial) -> list[int]:
    """Return numbers of spares: for about as many envs as are being reset at a time, and more."""
    per_step_s = trial.reset_s_per_step
    is_cheap = trial.reset_s < _LEAST_RESET_S or per_step_s < _WORTH_HIDING * trial.step_s
    if not trial.n_episodes or is_cheap:
        return []
    busy = max(1, round(env_num * per_step_s / (per_step_s + trial.step_s)))
    return list(dict.fromkeys((busy, min(2 * busy, env_num), max(1, busy // 2))))


def most_entrants(
    seconds: float,
    launch_s: float,
    env_num: int,
    window_s: float,
    *,
    worker_bytes: int | None,
    free_bytes: int,
) -> int:
    """Return how many settings to launch side by side, for the time and the memory there is.

    Args:
        seconds: that there are for all of it.
        launch_s: what launching one env took.
        env_num: number of envs.
        window_s: how long a setting is measured in each lap.
        worker_bytes: memory of a worker's own; None if unknown.
        free_bytes: memory that is free.
    """
    by_time = _LAUNCH_SHARE * seconds / (launch_s * (1 + env_num / 16))
    by_lap = _LAP_SHARE * seconds / window_s
    by_memory = 0.5 * free_bytes / (worker_bytes * env_num) if worker_bytes else float(_MOST)
    return int(max(2, min(max(min(by_time, by_lap), _LEAST), _MOST, by_memory)))


def window_of(left_s: float, trial: Trial) -> tuple[float, float]:
    """Return how long to measure a setting each time, and how long to step it before that.

    Many short windows tell more than few long ones, as the machine is now fast and now slow. But
    one should see many steps, and where resets take their time, several episodes.
    """
    window_s = min(_WINDOW_S, left_s / 120)
    window_s = max(window_s, min(_STEPS * trial.step_s, left_s / 60))
    if not trial.n_episodes or trial.reset_s_per_step <= 0.05 * trial.step_s:
        return window_s, 0.1 * window_s
    cycle_s = trial.reset_s + trial.n_steps / trial.n_episodes * trial.step_s
    window_s = max(window_s, min(_EPISODES * cycle_s, left_s / 24))
    return window_s, min(0.3 * window_s, cycle_s)
