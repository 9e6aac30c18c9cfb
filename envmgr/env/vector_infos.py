"""Infos of vector envs, `{key: values, "_key": mask}`, as infos of single envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np


class RowInfos(Sequence[Mapping[str, Any]]):
    """The infos of rows; made when one of them is asked for.

    Args:
        infos: as the vector env gave them.
        rows: which rows, in this order.
        num_envs: how many the env has.
        hidden: keys that are not the rows' own.
        instead: the infos of some rows, in place of theirs.
    """

    def __init__(
        self,
        infos: Mapping[str, Any],
        rows: Sequence[int],
        num_envs: int,
        hidden: frozenset[str] = frozenset(),
        instead: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._instead = instead or {}
        self._columns = _columns_of(infos, num_envs, hidden)
        self._rows = rows
        self._num_envs = num_envs

    @property
    def told(self) -> list[int]:
        """The positions of infos that are not empty, ascending."""
        instead = self._instead
        if not self._columns:
            return [k for k, row in enumerate(self._rows) if instead.get(row)] if instead else []
        masks = [mask for _, _, mask in self._columns]
        if None in masks:  # each of them has something
            masks = [[True] * self._num_envs]
        told = [any(each) for each in zip(*masks, strict=True)]
        return [k for k, row in enumerate(self._rows) if instead.get(row, told[row])]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        row = self._rows[index]
        if row in self._instead:
            return dict(self._instead[row])
        return _row_of(self._columns, row)


_Columns = list[tuple[str, Any, list[bool] | None]]
"""Keys, with what gives the value of a row, and which rows have one; None for all of them."""


class _Whole:
    """A value that is that of the whole env: of each row the same."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, row: int) -> Any:
        return self._value


class _Nested:
    """An info in an info."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns

    def __getitem__(self, row: int) -> Any:
        return _row_of(self._columns, row)


def _columns_of(
    infos: Mapping[str, Any], num_envs: int, hidden: frozenset[str] = frozenset()
) -> _Columns:
    columns: _Columns = []
    for key, value in infos.items():
        if key in hidden or (key.startswith("_") and key[1:] in infos):  # the mask of another
            continue
        mask = infos.get(f"_{key}")
        values: Any = _Whole(value)
        if isinstance(value, Mapping):
            values = _Nested(_columns_of(value, num_envs))
        elif isinstance(value, (np.ndarray, list, tuple)) and len(value) == num_envs:
            # Numbers as Python's, as envs of one's own give them.
            values = value
            if isinstance(value, np.ndarray) and value.ndim == 1:
                values = value.tolist()
        columns.append((key, values, None if mask is None else np.asarray(mask, bool).tolist()))
    return columns


def _row_of(columns: _Columns, row: int) -> dict[str, Any]:
    return {
        key: value if type(value := values[row]) in _PLAIN else _own(value)
        for key, values, mask in columns
        if mask is None or mask[row]
    }


_PLAIN = frozenset((int, float, bool, str, dict))


def _own(value: Any) -> Any:
    """Return a number as Python's, as envs of one's own give them, and an array as a copy."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, (np.number, np.bool_)) else value
