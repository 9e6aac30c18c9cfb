"""Timesteps of several envs as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.spaces import concatenated, rows_of

RowIds = Sequence[int] | npt.NDArray[np.intp]


class Rows(NamedTuple):
    """Timesteps of k envs, in the order they were asked for.

    Attributes:
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,). At
            an episode's end, the terminal observation.
        rewards: (k,) float64; (k, *shape) if they are larger arrays.
        terminated: (k,) bool.
        truncated: (k,) bool. The episode of an env that failed is truncated.
        infos: k infos as `failures.plain_info` gives them; None if all of them are empty.
        ended: the env_ids whose episodes ended, ascending.
    """

    obs: Any
    rewards: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]] | None
    ended: list[int]

    def at(self, positions: Sequence[int]) -> Rows:
        """Return the rows at some positions; `ended` stays as it is."""
        obs, rewards, terminated, truncated = (rows_of(column, positions) for column in self[:4])
        infos = self.infos and [self.infos[k] for k in positions]
        return Rows(obs, rewards, terminated, truncated, infos, self.ended)


def spread(n: int, parts: Sequence[tuple[RowIds, Any]]) -> Any:
    """Return a batch of n rows that has the rows of other batches at their positions, else zeros.

    Args:
        n: how many rows.
        parts: positions, and a batch with a row for each.
    """
    first = parts[0][1]
    if type(first) is not np.ndarray and isinstance(first, Mapping):
        return {key: spread(n, [(ids, rows[key]) for ids, rows in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(spread(n, [(i, rows[k]) for i, rows in parts]) for k in range(len(first)))
    batch = np.zeros((n, *first.shape[1:]), first.dtype)
    for positions, rows in parts:
        batch[positions] = rows
    return batch


def joined(parts: Sequence[tuple[npt.NDArray[np.int64], Rows]]) -> Rows:
    """Return the rows of several envs each as one, in ascending order of env_id."""
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    each = [rows for _, rows in parts]
    infos: list[dict[str, Any]] | None = None
    if any(rows.infos is not None for rows in each):
        listed = [
            info
            for ids, rows in parts
            for info in (rows.infos if rows.infos is not None else [{} for _ in ids])
        ]
        infos = [listed[k] for k in order.tolist()]
    obs, rewards, terminated, truncated = (
        rows_of(concatenated([rows[k] for rows in each]), order) for k in range(4)
    )
    ended = sorted(env_id for rows in each for env_id in rows.ended)
    return Rows(obs, rewards, terminated, truncated, infos, ended)
