"""Timesteps of several envs as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from envmgr.adapters.on_failure import plain_info
from envmgr.manager import ArrayBatch
from envmgr.spaces import concatenated, rows_of

RowIds = Sequence[int] | npt.NDArray[np.intp]


class _MadeInfos(Sequence[dict[str, Any]]):
    """Infos whose list is made when one of them is first asked for, and kept."""

    _infos: list[dict[str, Any]] | None = None

    def _make(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _made(self) -> list[dict[str, Any]]:
        if self._infos is None:
            self._infos = self._make()
        return self._infos

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._made())


class PlainInfos(_MadeInfos):
    """The infos of timesteps as `on_failure.plain_info` returns them; made when first needed.

    Args:
        batch: the timesteps.
    """

    def __init__(self, batch: ArrayBatch) -> None:
        self._batch = batch

    @property
    def columns(self) -> dict[str, Any] | None:
        """These infos in columns, like `ArrayBatch.info_columns`; None if not all are data."""
        batch = self._batch
        if batch.abnormal:  # with what is an exception there, and a text here
            return None
        infos = batch.infos
        if isinstance(infos, tuple) and set(map(type, infos)) != {dict}:
            return None
        return batch.info_columns

    def __len__(self) -> int:
        return len(self._batch.infos)

    def _make(self) -> list[dict[str, Any]]:
        batch = self._batch
        made: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for position in batch.told:
            made[position] = plain_info(batch.infos[position])
        return made


class InfosWithResets(_MadeInfos):
    """The infos of a step in which some envs have begun an episode; made when first needed.

    Args:
        n: number of envs.
        begun: the infos of resets, by env_id.
        positions: the other envs.
        of_rows: their infos; None if all of them are empty.

    Attributes:
        begun: see above; likewise `positions` and `of_rows`.
    """

    def __init__(
        self,
        n: int,
        begun: Mapping[int, dict[str, Any]],
        positions: npt.NDArray[np.intp],
        of_rows: Sequence[dict[str, Any]] | None,
    ) -> None:
        self.begun = begun
        self.positions = positions
        self.of_rows = of_rows
        self._n = n

    def __len__(self) -> int:
        return self._n

    def _make(self) -> list[dict[str, Any]]:
        found = dict(self.begun)
        if self.of_rows is not None:
            found.update(zip(self.positions.tolist(), self.of_rows, strict=True))
        return [found.get(i, {}) for i in range(self._n)]


class Rows(NamedTuple):
    """Timesteps of k envs, in the order they were asked for.

    Attributes:
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,). At
            an episode's end, the terminal observation.
        rewards: (k,) float64; (k, *shape) if they are larger arrays.
        terminated: (k,) bool.
        truncated: (k,) bool. The episode of an env that failed is truncated.
        infos: k infos as `on_failure.plain_info` gives them; None if all of them are empty.
        ended: the env_ids whose episodes ended, ascending.
    """

    obs: Any
    rewards: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: Sequence[dict[str, Any]] | None
    ended: list[int]

    def at(self, positions: Sequence[int]) -> Rows:
        """Return the rows at some positions; `ended` stays as it is."""
        obs, rewards, terminated, truncated = (rows_of(column, positions) for column in self[:4])
        infos = self.infos and [self.infos[k] for k in positions]
        return Rows(obs, rewards, terminated, truncated, infos, self.ended)


def spread(n: int, parts: Sequence[tuple[RowIds, Any]]) -> Any:
    """Return a batch of n rows: those of other batches at their positions, and zeros elsewhere.

    Args:
        n: the number of rows.
        parts: pairs of positions and a batch with a row for each of them.
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
    """Return the rows of several groups of envs as one, in ascending order of env_id."""
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
