"""Infos of vector envs, `{key: values, "_key": mask}`, as infos of single envs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

NumberColumn = tuple[tuple[str, ...], npt.NDArray[Any], npt.NDArray[np.bool_] | None]
"""The values that all rows of a vector env have for a key, as three parts: its keys, from the
outermost inwards; the values, which are numbers (n,), Python's own in infos of single envs, or
arrays (n, *shape); and a mask of the rows that have a value, None if all of them have one."""


class RowInfos(Sequence[Mapping[str, Any]]):
    """The infos of rows, made when one of them is asked for, which is before the env's next step.

    Args:
        infos: the infos, as the vector env gave them.
        rows: the rows whose infos these are, in this order.
        num_envs: how many rows the env has.
        hidden: keys that are not the rows' own.
        instead: infos of some rows, which replace those in `infos`.
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
        self._infos = infos
        self._hidden = hidden
        self._rows = rows
        self._num_envs = num_envs

    @cached_property
    def _columns(self) -> _Columns:
        return _columns_of(self._infos, self._num_envs, self._hidden)

    @property
    def told(self) -> Sequence[int]:
        """The positions of infos that are not empty, ascending."""
        instead = self._instead
        masks = [mask for _, _, mask in _entries(self._infos, self._hidden)]
        if not masks:
            return [k for k, row in enumerate(self._rows) if instead.get(row)] if instead else []
        if any(mask is None or np.all(mask) for mask in masks):  # each of them has something
            if not instead:
                return range(len(self._rows))
            told = [True] * self._num_envs
        else:
            told = np.logical_or.reduce([np.asarray(mask, bool) for mask in masks]).tolist()
        return [k for k, row in enumerate(self._rows) if instead.get(row, told[row])]

    def numbers(self) -> list[NumberColumn] | None:
        """Return the infos of all rows as columns, if all of their values are numbers.

        Returns:
            The columns are the env's own, and valid until its next step. None if there are values
            of other types, or infos in infos that some of the rows do not have, or so few rows that
            they cost less one by one.
        """
        if self._instead or not _FEWEST_ROWS <= self._num_envs == len(self._rows):
            return None
        found: list[NumberColumn] = []
        fits = _add_numbers(found, self._infos, self._num_envs, self._hidden)
        return found if fits else None

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
"""Keys, each with its values by row and a mask of the rows that have one; None if all have."""


class _Whole:
    """A value of the whole env, which is the same for each row."""

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


def _entries(
    infos: Mapping[str, Any], hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over keys, each with its value and the mask of the rows that have one, or None."""
    for key, value in infos.items():
        if key not in hidden and not (key.startswith("_") and key[1:] in infos):
            yield key, value, infos.get(f"_{key}")


def _add_numbers(
    found: list[NumberColumn],
    infos: Mapping[str, Any],
    num_envs: int,
    hidden: frozenset[str] = frozenset(),
    inside: tuple[str, ...] = (),
) -> bool:
    """Add columns to those in `found`; return False if one of them is not of numbers."""
    for key, value, mask in _entries(infos, hidden):
        present = None
        if mask is not None:
            present = np.asarray(mask, bool)
            if present.shape != (num_envs,):
                return False
            if present.all():
                present = None
        path = (*inside, key)
        if isinstance(value, Mapping):
            # Columns could not tell which of the rows have an inner info that is empty.
            if present is not None or not value or len(path) > _MOST_DEPTH:
                return False
            first = len(found)
            if not _add_numbers(found, value, num_envs, inside=path):
                return False
            if any(one is not None for _, _, one in found[first:]):
                return False
        elif type(value) is np.ndarray and _has_rows(value, num_envs):
            if value.dtype.kind not in "biuf" or value.dtype.itemsize > _LARGEST_NUMBER:
                return False
            if value.ndim == 1 and value.dtype == np.uint64:  # as Python's it may be too large
                return False
            found.append((path, value, present))
        else:
            return False
    return True


_FEWEST_ROWS = 24
"""The fewest rows that are given as columns. With five numbers in each info, 16 rows take 125 us
one by one and 159 us as columns; 32 rows take 182 us and 162 us."""

_MOST_DEPTH = 8
_LARGEST_NUMBER = 8


def _columns_of(
    infos: Mapping[str, Any], num_envs: int, hidden: frozenset[str] = frozenset()
) -> _Columns:
    columns: _Columns = []
    for key, value, mask in _entries(infos, hidden):
        values: Any = _Whole(value)
        if isinstance(value, Mapping):
            values = _Nested(_columns_of(value, num_envs))
        elif _has_rows(value, num_envs):
            # Python numbers, as single envs give them.
            values = value
            if isinstance(value, np.ndarray) and value.ndim == 1:
                values = value.tolist()
        columns.append((key, values, None if mask is None else np.asarray(mask, bool).tolist()))
    return columns


def _has_rows(value: Any, num_envs: int) -> bool:
    """Return whether a value has a part for each row; if not, it is one value for all rows."""
    if isinstance(value, np.ndarray):
        return bool(value.ndim) and value.shape[0] == num_envs
    return isinstance(value, (list, tuple)) and len(value) == num_envs


def _row_of(columns: _Columns, row: int) -> dict[str, Any]:
    return {
        key: value if type(value := values[row]) in _PLAIN else _own(value)
        for key, values, mask in columns
        if mask is None or mask[row]
    }


_PLAIN = frozenset((int, float, bool, str, dict))


def _own(value: Any) -> Any:
    """Return a number as a Python number, as single envs give it, and an array as a copy."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, (np.number, np.bool_)) else value
