"""Histograms of how long steps and resets take: a row of numbers for each env, of fixed size.

Buckets are log-linear, like those of HDR histograms: each doubling of time has the same number of
buckets, so that values read from them are right within some percent, from a microsecond to minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp
from typing import Any

import numpy as np
import numpy.typing as npt

STEPS, RESETS = 0, 1
KINDS = ("step", "reset")

_PER_DOUBLING = 8
_SHIFT = 3
_LEAST_EXPONENT = -19
_LEAST_S = 2.0 ** (_LEAST_EXPONENT - 1)
DOUBLINGS = 28
N_BUCKETS = DOUBLINGS * _PER_DOUBLING
SUM, MAX = N_BUCKETS, N_BUCKETS + 1
NUMBERS = N_BUCKETS + 2
"""How many numbers a row has: the count of each bucket, the sum in seconds, the longest time."""

_MOST = 2.0**53
"""A larger number is neither a count nor a time; sums of smaller ones are exact, and never
infinite."""

Numbers = npt.NDArray[np.float64]

BOUNDS: Numbers = np.array(
    [
        2.0 ** (_LEAST_EXPONENT - 1 + i // _PER_DOUBLING) * (1 + (i % _PER_DOUBLING + 1) / 8)
        for i in range(N_BUCKETS)
    ]
)
"""Upper bounds of the buckets in seconds. Longer times are counted in the last bucket, too."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a time."""
    if seconds < _LEAST_S:
        return 0
    mantissa, exponent = frexp(seconds)
    bucket = (exponent - _LEAST_EXPONENT << _SHIFT) + int(mantissa * 16) - _PER_DOUBLING
    return min(bucket, N_BUCKETS - 1)


def note(row: Any, seconds: float, weight: float = 1.0) -> None:
    """Count a time.

    Args:
        row: the row of an env; (NUMBERS,).
        seconds: the time.
        weight: how many measurements it stands for.
    """
    row[bucket_of(seconds)] += weight
    row[SUM] += seconds * weight
    if seconds > row[MAX]:
        row[MAX] = seconds


def counts_of(rows: Numbers) -> Numbers:
    """Return how many measurements were counted: (...,) for rows (..., NUMBERS)."""
    found: Numbers = sane(rows)[..., :N_BUCKETS].sum(-1)
    return found


def sane(rows: Numbers) -> Numbers:
    """Return rows that hosts have written, with 0 for numbers that only a broken host writes."""
    return np.where((rows > 0.0) & (rows < _MOST), rows, 0.0)


def quantiles(rows: Numbers, parts: Sequence[float]) -> Numbers:
    """Return quantiles in seconds: (len(parts), ...); NaN where nothing was counted.

    Args:
        rows: (..., NUMBERS).
        parts: which quantiles, from 0 to 1.
    """
    rows = sane(rows)
    sums = rows[..., :N_BUCKETS].cumsum(-1)
    total, longest = sums[..., -1:], rows[..., MAX]
    found = []
    for part in parts:
        bucket = (sums < part * total).sum(-1)
        bound = BOUNDS[np.minimum(bucket, N_BUCKETS - 1)]
        found.append(np.where(total[..., 0] > 0.0, np.minimum(bound, longest), np.nan))
    return np.array(found)


def summary(rows: Numbers) -> dict[str, list[float | None]]:
    """Return a summary of rows, as lists with an entry for each row.

    Args:
        rows: (n, NUMBERS).
    """
    rows, counts = sane(rows), counts_of(rows)
    p50, p90, p99 = quantiles(rows, (0.5, 0.9, 0.99))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = rows[:, SUM] / counts
    columns = {"mean": mean, "p50": p50, "p90": p90, "p99": p99}
    columns["max"] = np.where(counts > 0.0, rows[:, MAX], np.nan)
    lists: dict[str, list[float | None]] = {"count": counts.tolist()}
    for name, column in columns.items():
        lists[name] = [None if value != value else value for value in column.tolist()]
    return lists
