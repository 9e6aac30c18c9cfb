"""What a step of a batched env gave, as columns with an entry for each of its rows.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from envmgr.spaces import Array


class Columns(NamedTuple):
    """What a step gave, with an entry for each row of the env, whichever of them have taken it.

    Attributes:
        obs: (n, *shape).
        rewards: (n,).
        terminated: (n,) bool.
        truncated: (n,) bool.
        told: the rows whose infos hold something.
        infos: gives them by row.
    """

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    told: Sequence[int]
    infos: Any


_make = partial(tuple.__new__, Columns)


def columns_of(
    result: Any,
    count: int,
    *,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    finite: tuple[bool, bool],
) -> Columns | None:
    """Return what `step` returned as columns; None if it is to be looked at row by row.

    Args:
        result: that.
        count: of how many rows.
        dtype: of their observations.
        shape: of one of them.
        finite: whether observations, and rewards, have to be finite.
    """
    if type(result) is not tuple or len(result) != 5:
        return None
    obs, rewards, terminated, truncated, infos = result
    fits = (
        type(obs) is type(rewards) is type(terminated) is type(truncated) is np.ndarray
        and obs.dtype == dtype
        and obs.shape == (count, *shape)
        and rewards.shape == terminated.shape == truncated.shape == (count,)
        and rewards.dtype.kind in "fiub"
        and terminated.dtype == truncated.dtype == np.bool_
    )
    if not fits or (finite[0] and not np.isfinite(obs).all()):
        return None
    if finite[1] and not np.isfinite(rewards).all():
        return None
    if infos is None:
        return _make((obs, rewards, terminated, truncated, (), None))
    told: Sequence[int] | None = getattr(infos, "told", None)
    if told is None:
        if not isinstance(infos, (list, tuple)) or len(infos) != count:
            return None
        told = [k for k, info in enumerate(infos) if type(info) is not dict or info]
    return _make((obs, rewards, terminated, truncated, told, infos))


def firsts_of(
    result: Any, count: int, *, dtype: np.dtype[Any], shape: tuple[int, ...], finite: bool
) -> Array | None:
    """Return what `reset` returned as an array; None if it is to be looked at row by row.

    Args:
        result: that.
        count: of how many rows.
        dtype: of their observations.
        shape: of one of them.
        finite: whether they have to be finite.
    """
    if type(result) is not tuple or len(result) != 2 or result[1] is not None:
        return None
    obs: Array = result[0]
    fits = type(obs) is np.ndarray and obs.dtype == dtype and obs.shape == (count, *shape)
    return obs if fits and (not finite or np.isfinite(obs).all()) else None


def spread(columns: Columns, rows: Array, count: int) -> Columns:
    """Return columns with entries for some rows as columns of all of them."""
    whole: list[Any] = [np.zeros((count, *part.shape[1:]), part.dtype) for part in columns[:4]]
    for target, part in zip(whole, columns, strict=False):
        target[rows] = part
    by_row = {int(rows[k]): columns.infos[k] for k in columns.told}
    return _make((*whole, list(by_row), by_row))
