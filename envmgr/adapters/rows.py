"""Timesteps of several envs as rows, and what is done with rows of arrays, dicts and tuples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

EnvIds = Sequence[int] | npt.NDArray[np.intp]


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


def rows_of(batch: Any, positions: Any) -> Any:
    """Return some rows of a batch, as a batch that is nobody else's."""
    if type(batch) is np.ndarray:
        return batch.take(positions, axis=0)
    if isinstance(batch, Mapping):
        return {key: rows_of(part, positions) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(rows_of(part, positions) for part in batch)
    return batch[positions]


def put_rows(batch: Any, positions: Any, rows: Any) -> None:
    """Put rows into a batch, in place."""
    if type(batch) is np.ndarray:
        batch[positions] = rows
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            put_rows(part, positions, rows[key])
    elif isinstance(batch, tuple):
        for part, of_rows in zip(batch, rows, strict=True):
            put_rows(part, positions, of_rows)
    else:
        batch[positions] = rows


def spread(n: int, parts: Sequence[tuple[EnvIds, Any]]) -> Any:
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
        rows_of(_concatenated([rows[k] for rows in each]), order) for k in range(4)
    )
    ended = sorted(env_id for rows in each for env_id in rows.ended)
    return Rows(obs, rewards, terminated, truncated, infos, ended)


def _concatenated(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: _concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenated(parts) for parts in zip(*batches, strict=True))
    return np.concatenate(batches)
