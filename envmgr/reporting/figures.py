"""The figures of a run, which its page shows, as JSON-compatible values."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from envmgr.reporting.files import Latency, Sample
from envmgr.reporting.folder import MOST_FAILURES, Failed, Run, shortened

FORMAT = 1
MOST_POINTS = 150
"""The most points of a line over time: further ones are averaged, or passed over."""

MOST_ENVS = 200
"""The most envs that have a row of their own: the slowest ones."""

STRAGGLES = 1.5
"""How many times as long a straggler's steps take as those of the median env."""

MATTERS_S = 1e-4
"""How much longer a straggler's steps take at least. Less is not mentioned: waking a worker takes
as much."""

_SHORT_S = 0.5
"""A shorter time between samples says nothing. Only the last one may follow so soon on another."""

_IN_THE_TRAINER = frozenset(("base", "base_v2", "gym_vector"))
"""Kinds whose envs run in the trainer's main thread."""

OF_IT_QUEUED = "of it queued"
"""Time that is included in the other parts of a time; in which of them is not known."""

Column = list[float | None]
_Numbers = npt.NDArray[np.float64]


def figures_of(run: Run) -> dict[str, Any]:
    """Return the figures of a run."""
    envs = _envs(run)
    return {
        "envmgr_report": FORMAT,
        "run": run.name,
        "unread": run.unread,
        "goes_on": run.goes_on,
        "summary": _summary(run),
        "episodes_over_time": _episodes_over_time(run),
        "samples_over_time": _samples_over_time(run.samples),
        "time": _time(run),
        "memory": _memory(run.samples),
        "envs": envs[:MOST_ENVS],
        "envs_left_out": max(len(envs) - MOST_ENVS, 0),
        "stragglers": _stragglers(envs),
        "failures": _failures(run),
        "config": run.config,
    }


def finite(value: Any) -> Any:
    """Return a number as JSON and people want it: six digits, None if it is not finite."""
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


# -- the whole run ------------------------------------------------------------------------------


def _summary(run: Run) -> dict[str, Any]:
    summary, last = run.summary, run.samples[-1] if run.samples else None
    if summary is not None:
        found: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
        stats = found.pop("stats")
        for name in ("latency", "latest_failures"):
            del stats[name]
        found["return"] = {name: finite(value) for name, value in found["return"].items()}
        return {**found, **stats}
    n_abnormal = sum(run.abnormal)
    found = {} if run.outcomes is None else _summary_of_log(run, run.outcomes)
    return {
        "ending": None,
        "error": None,
        "steps": last.steps if last is not None else int(sum(run.lengths)),
        "elapsed_s": last.elapsed_s if last is not None else max(run.ended_s, default=0.0),
        "episodes": len(run.ended_s) - n_abnormal,
        "abnormal_episodes": n_abnormal,
        "failures": last.failures if last is not None else n_abnormal,
        **found,
    }


def _summary_of_log(run: Run, outcomes: Mapping[str, int]) -> dict[str, Any]:
    """Return the further totals that an episode log gives."""
    is_normal = np.frombuffer(run.abnormal, np.uint8) == 0
    returns, lengths = np.array(run.returns)[is_normal], np.array(run.lengths)[is_normal]
    return {
        "failures": sum((run.causes or {}).values()),
        "outcomes": dict(outcomes),
        "return": {
            "mean": _spread(returns)["mean"],
            "mean_of_last_100": _spread(returns[-100:])["mean"],
        },
        "length": {"mean": _spread(lengths)["mean"]},
    }


def _episodes_over_time(run: Run) -> dict[str, Column]:
    """Return figures of the episodes in equal pieces of time; those that failed do not count."""
    is_normal = np.frombuffer(run.abnormal, np.uint8) == 0
    ended_s = np.array(run.ended_s)[is_normal]
    named = {
        "return": np.array(run.returns)[is_normal],
        "length": np.array(run.lengths)[is_normal],
    }
    names = [f"{name}_{part}" for name in named for part in ("mean", "p10", "p90")]
    found: dict[str, Column] = {name: [] for name in ("elapsed_s", "episodes", *names)}
    if not len(ended_s):
        return found
    n = MOST_POINTS if len(ended_s) < MOST_POINTS else min(max(len(ended_s) // 20, 25), MOST_POINTS)
    piece_s = max(float(ended_s.max()), 1e-9) / n
    pieces = np.minimum((ended_s / piece_s).astype(np.int64), n - 1)
    order = np.argsort(pieces, kind="stable")
    for chosen in np.split(order, np.flatnonzero(np.diff(pieces[order])) + 1):
        found["elapsed_s"].append(finite(float(ended_s[chosen].mean())))
        found["episodes"].append(len(chosen))
        for name, values in named.items():
            for part, value in _spread(values[chosen]).items():
                found[f"{name}_{part}"].append(value)
    return found


def _spread(values: _Numbers) -> dict[str, float | None]:
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(("mean", "p10", "p90"))
    with np.errstate(over="ignore", invalid="ignore"):
        p10, p90 = np.percentile(values, (10, 90)).tolist()
        return {"mean": finite(float(values.mean())), "p10": finite(p10), "p90": finite(p90)}


def _samples_over_time(samples: Sequence[Sample]) -> dict[str, Column]:
    """Return rates and memory over time; each rate is the one since the previous moment."""
    if len(samples) > 2 and samples[-1].elapsed_s - samples[-2].elapsed_s < _SHORT_S:
        samples = [*samples[:-2], samples[-1]]  # a rate over next to nothing says nothing
    indices = _spread_out(len(samples), MOST_POINTS + 1)
    memory = ("trainer_mb", "workers_mb", "largest_worker_mb")
    names = ("elapsed_s", "steps_per_s", "failures", *memory)
    found: dict[str, Column] = {name: [] for name in names}
    for before, at in itertools.pairwise(indices):
        one, earlier = samples[at], samples[before]
        passed_s = one.elapsed_s - earlier.elapsed_s
        rate = (one.steps - earlier.steps) / passed_s if passed_s > 0.0 else math.nan
        found["elapsed_s"].append(finite(one.elapsed_s))
        found["steps_per_s"].append(finite(max(rate, 0.0)))
        found["failures"].append(one.failures)
        found["trainer_mb"].append(finite(one.trainer_bytes / 1e6))
        for name, n_bytes in zip(memory[1:], (one.workers_bytes, one.largest_bytes), strict=True):
            found[name].append(finite(n_bytes / 1e6) if one.workers else None)
    return found


def _spread_out(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, the first and the last one among them."""
    found = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    positions: list[int] = found.tolist()
    return positions


def _memory(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the most memory that was in use at any moment."""
    return {
        "trainer_mb": finite(max((one.trainer_bytes / 1e6 for one in samples), default=None)),
        "workers_mb": finite(max((one.workers_bytes / 1e6 for one in samples), default=None)),
        "largest_worker_mb": finite(
            max((one.largest_bytes / 1e6 for one in samples), default=None)
        ),
    }


# -- where the time went ------------------------------------------------------------------------


def _time(run: Run) -> dict[str, dict[str, float | None]]:
    """Return seconds by what they were spent on, for the trainer's main thread and for workers.

    What was not measured is worked out from what was, so these are estimates.
    """
    if not run.samples:
        return {}
    first, last = run.samples[0], run.samples[-1]
    measured = last.env_step_s is not None
    envs = {
        "env steps": max((last.env_step_s or 0.0) - (first.env_step_s or 0.0), 0.0),
        "env resets": max((last.env_reset_s or 0.0) - (first.env_reset_s or 0.0), 0.0),
    }
    trainer = {"policy": last.policy_s}
    if run.summary is not None and run.summary.manager in _IN_THE_TRAINER and measured:
        trainer.update(envs)
    trainer["envmgr"] = max(last.trainer_cpu_s - sum(trainer.values()), 0.0)
    trainer["queued"] = last.trainer_queued_s or 0.0
    found = {"trainer": _with_rest(trainer, last.elapsed_s)}
    if last.workers_s and last.workers_cpu_s is not None:
        workers = dict(envs) if measured else {}
        name = "envmgr" if measured else "computing"
        workers[name] = max(last.workers_cpu_s - sum(workers.values()), 0.0)
        found["workers"] = _with_rest(workers, last.workers_s)
        found["workers"][OF_IT_QUEUED] = finite(last.workers_queued_s)
    return found


def _with_rest(parts: Mapping[str, float], total_s: float) -> dict[str, float | None]:
    """Return parts of a time, cut so that they fit into it, and the rest of it as waiting."""
    left = total_s
    found: dict[str, float | None] = {}
    for name, seconds in parts.items():
        found[name] = finite(min(seconds, left))
        left -= min(seconds, left)
    return {**found, "waiting": finite(left)}


# -- each env -----------------------------------------------------------------------------------


def _envs(run: Run) -> list[dict[str, Any]]:
    """Return the figures of each env, those with the slowest steps first."""
    env_ids, abnormal = np.array(run.env_ids), np.frombuffer(run.abnormal, np.uint8)
    lengths, returns = np.array(run.lengths), np.array(run.returns)
    stats = None if run.summary is None else run.summary.stats
    measured = {} if stats is None else stats.latency
    latency = {kind: measured[kind] for kind in ("step", "reset") if kind in measured}
    n_measured = min((len(one.mean) for one in latency.values()), default=0)
    failed = run.failures_by_env if stats is None else stats.failures_by_env
    found: dict[int, dict[str, Any]] = {}
    order = np.argsort(env_ids, kind="stable")
    known = np.split(order, np.flatnonzero(np.diff(env_ids[order])) + 1) if len(order) else []
    of_env = {int(env_ids[chosen[0]]): chosen for chosen in known}
    for env_id in sorted({*range(n_measured), *of_env, *(failed or ())}):
        chosen = of_env.get(env_id, order[:0])
        normal = chosen[abnormal[chosen] == 0]
        found[env_id] = {
            "env_id": env_id,
            "steps_of_episodes": int(lengths[chosen].sum()),
            "episodes": len(normal),
            "return_mean": _spread(returns[normal])["mean"],
            "length_mean": _spread(lengths[normal])["mean"],
            "failures": (len(chosen) - len(normal) if failed is None else failed.get(env_id, 0)),
            **{kind: _times_of(one, env_id) for kind, one in latency.items()},
        }
    return sorted(found.values(), key=lambda env: -(_mean_of(env) or 0.0))


def _times_of(latency: Latency, env_id: int) -> dict[str, float | None]:
    columns = msgspec.structs.asdict(latency).items()
    return {
        name: finite(column[env_id]) if env_id < len(column) else None for name, column in columns
    }


def _mean_of(env: Mapping[str, Any]) -> float | None:
    found: float | None = env.get("step", {}).get("mean")
    return found


def _stragglers(envs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the envs whose steps take much longer than those of the median env.

    A step or two during which the worker had to wait for a core do not make a straggler, however
    much they add to the mean of a short run: one of the quantiles has to say the same.
    """
    steps = {env["env_id"]: env["step"] for env in envs if _mean_of(env) is not None}
    middle = {
        part: median([of_env[part] or 0.0 for of_env in steps.values()] or [0.0])
        for part in ("mean", "p50", "p90", "p99")
    }
    mean_s = middle.pop("mean")
    if mean_s <= 0.0:
        return {"median_step_s": None, "envs": []}
    found = [
        {
            "env_id": env_id,
            "step_mean_s": of_env["mean"],
            "times_the_median": finite(of_env["mean"] / mean_s),
        }
        for env_id, of_env in steps.items()
        if of_env["mean"] > max(STRAGGLES * mean_s, mean_s + MATTERS_S)
        and any((of_env[part] or 0.0) > STRAGGLES * usual_s for part, usual_s in middle.items())
    ]
    return {"median_step_s": finite(mean_s), "envs": found[:MOST_ENVS]}


# -- failures -----------------------------------------------------------------------------------


def _moments_of_failures(run: Run) -> list[float]:
    """Return when envs failed, in ascending order; of many failures, only some.

    Of failures that ended no episode, such as failed resets, it is only known between which samples
    they happened.
    """
    ended = zip(run.ended_s, run.abnormal, strict=True)
    moments = sorted(at for at, is_abnormal in ended if is_abnormal and math.isfinite(at))
    others = [
        one.elapsed_s
        for earlier, one in itertools.pairwise(run.samples)
        if one.failures > earlier.failures
        and math.isfinite(one.elapsed_s)
        and bisect_right(moments, one.elapsed_s) == bisect_right(moments, earlier.elapsed_s)
    ]
    moments = sorted(moments + others)
    return [float(f"{moments[k]:.6g}") for k in _spread_out(len(moments), MOST_POINTS)]


def _failures(run: Run) -> dict[str, Any]:
    """Return how many failures there were, and the texts of some.

    Failures that ended episodes are in `episodes.jsonl`; the others, such as failed resets, are
    only among the latest ones in the summary.
    """
    stats = None if run.summary is None else run.summary.stats
    known = {one.text for one in run.failures}
    latest = [] if stats is None else map(shortened, stats.latest_failures)
    others = [text for text in latest if text not in known]
    shown = [*run.failures, *map(Failed, others)][:MOST_FAILURES]
    n_abnormal = sum(run.abnormal)
    n = n_abnormal if stats is None else max(stats.failures, n_abnormal)
    by_kind = {} if stats is None else stats.failures_by_kind
    if run.causes is not None:
        n, by_kind = sum(run.causes.values()), dict(run.causes)
    return {
        "count": n,
        "by_kind": by_kind,
        "elapsed_s": _moments_of_failures(run),
        "left_out": max(n - len(shown), 0),
        "shown": [
            {"env_id": one.env_id, "elapsed_s": finite(one.elapsed_s), "text": one.text}
            for one in shown
        ],
    }
