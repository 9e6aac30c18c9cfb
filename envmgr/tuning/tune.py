"""Tuning from beginning to end: profile, plan, search; what came of it as plain figures."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envmgr.errors import EnvManagerError
from envmgr.manager import EnvManager
from envmgr.tuning.measuring import Act, Course, Stable, Still, still_course
from envmgr.tuning.model import EnvFigures, Machine, expected_rate
from envmgr.tuning.plan import entrants
from envmgr.tuning.search import Measured, is_right, search
from envmgr.tuning.settings import Setting, changes_of
from envmgr.tuning.task import Task, most_entrants, task_of, window_of
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile

_STILL_SHARE, _MOST_STILL_S = 0.01, 0.15
_LEAST_SHARE = 0.2


@dataclass(frozen=True)
class Row:
    """What is known of a setting.

    Attributes:
        setting: the setting.
        expected: steps per second, by the model; None if it knows nothing of the kind.
        measured: steps per second, at the pace of all laps; None if it was not measured.
        ratio: how it did beside the present setting, the median over laps.
        spread: half of the middle range of those ratios, as a part of their median.
        error: why it cannot be run; empty if it can.
        is_fitted: the model was fitted to what was measured of it, so it says nothing of the model.
    """

    setting: Setting
    expected: float | None
    measured: float | None = None
    ratio: float | None = None
    spread: float = 0.0
    error: str = ""
    is_fitted: bool = False

    @property
    def right(self) -> bool | None:
        """Whether the model was right, within 15 %; None if nobody knows."""
        if self.measured is None or self.is_fitted:
            return None
        return is_right(self.expected, self.measured)


@dataclass(frozen=True)
class Tuned:
    """What came of tuning.

    Attributes:
        profile: of one env.
        worker_bytes: memory of a worker with one env, not shared with others; None if unknown.
        env: what the model knows of it.
        machine: what managers cost here.
        now: the present setting.
        best: the best one.
        rows: of all settings; those that were measured first, the fastest of them first.
        changes: keys of the manager's config for the best setting.
        gains: by these keys: what each would bring alone, as the model expects, as a factor.
    """

    profile: Profile
    worker_bytes: int | None
    env: EnvFigures
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
        seconds: about how long it may take, with closing, which takes no longer than one launch.
        kinds: registry keys to try; empty for those with workers.
        policy_of: returns the policy for a launched manager; None acts at random, at no cost.
        say: told what is being done.

    Raises:
        EnvManagerError: the env cannot be built and stepped, or with no setting.
    """
    end = time.monotonic() + seconds
    say("an env by itself")
    task = task_of(config, factories, seconds, kinds)

    def measure(what: Setting | Still) -> float:
        of_still = (min(_MOST_STILL_S, _STILL_SHARE * seconds),)
        return stable.measure(what, *(of_still if isinstance(what, Still) else window))

    opened = functools.partial(_opened, task, factories, policy_of)
    with contextlib.closing(Stable(opened, say)) as stable:
        machine = task.machine([measure(still) for still in task.stills])
        left_s = max(end - time.monotonic() - task.one.launch_s, _LEAST_SHARE * seconds)
        window = window_of(left_s, task.env)
        most = most_entrants(left_s, task.one, task.env_num, sum(window))
        expected = _expectation(task.env_num, task.env, machine)
        best, found, still = search(
            [candidate.setting for candidate in entrants(task.settings, expected, most)],
            measure,
            left_s,
            time.monotonic,
            beside=task.stills,
            dropped=stable.drop,
            cost=_cost(task.now),
        )
    if not best.rate:
        why = stable.errors.get(task.now) or next(iter(stable.errors.values()), "it takes no step")
        raise EnvManagerError(f"no setting can be run: {why}")
    return _tuned(task, best.setting, found, still, stable.errors)


def _opened(
    task: Task,
    factories: Sequence[EnvFactory],
    policy_of: Callable[[EnvManager], Act] | None,
    what: Setting | Still,
) -> Course:
    if isinstance(what, Still):
        return still_course(what, task.one.spaces, task.config, policy_of)
    return Course(what, task.config, factories, policy_of)


def _tuned(
    task: Task,
    best: Setting,
    found: Sequence[Measured[Setting]],
    still: Sequence[Measured[Still]],
    errors: Mapping[Setting, str],
) -> Tuned:
    """Return what came of it, beside what the model expects.

    That is at the pace of all laps, which may be another than when those to measure were chosen.
    """
    first, now, env = found[0], task.now, task.env
    machine, scale = task.machine([_paced(one, first) for one in still]), 1.0
    if not still and first.rate and _is_modelled(now):  # the costs are guessed
        scale = first.rate / expected_rate(now, task.env_num, env, machine)
    expected = _expectation(task.env_num, env, machine, scale)
    return Tuned(
        profile=task.one.profile,
        worker_bytes=task.one.worker_bytes,
        env=env,
        machine=machine,
        now=now,
        best=best,
        rows=_rows(found, task.settings, expected, errors, is_fitted=not still),
        changes=(changes := changes_of(best, now, task.config)),
        gains=_gains(changes, best, now, expected),
    )


def _paced(one: Measured[Any], first: Measured[Any]) -> float:
    """Return steps per second at the pace of all laps, whichever of them it was measured in."""
    return one.ratio * first.rate if first.rate else one.rate


def _is_modelled(setting: Setting) -> bool:
    return setting.has_workers or setting.kind.startswith("base")


def _expectation(
    env_num: int, env: EnvFigures, machine: Machine, scale: float = 1.0
) -> Callable[[Setting], float | None]:
    """Return what says what is expected of a setting; None where the model knows nothing of it."""

    @functools.cache
    def expected(setting: Setting) -> float | None:
        if not _is_modelled(setting):
            return None
        return scale * expected_rate(setting, env_num, env, machine)

    return expected


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
    *,
    is_fitted: bool,
) -> tuple[Row, ...]:
    first = found[0]
    rows = [
        Row(
            one.setting,
            expected(one.setting),
            _paced(one, first) or None,
            one.ratio or None,
            one.spread,
            errors.get(one.setting, ""),
            is_fitted=is_fitted and one is first,
        )
        for one in sorted(found, key=lambda one: -one.ratio)
        if one.rates
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
