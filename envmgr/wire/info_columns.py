"""Infos of several envs as columns: for each key the values of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

OF_STEPS = frozenset(("terminated", "truncated"))
"""Keys that managers put into infos; batches have columns of their own for these."""


class _ValuesAndPresent(NamedTuple):
    values: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]


class InfoColumn(_ValuesAndPresent):
    """The values of k infos for one key: `values, present = batch.info_columns[key]`.

    Attributes:
        values: (k,) for numbers and bools of one type, (k, *shape) for arrays of one dtype and
            shape; an object array (k,) for all else. It has zero, or None, where there is no value.
        present: (k,) bool: which of the infos have the key.
        kind: the exact type of all values; None if they are of several types.
    """

    kind: type | None = None

    @classmethod
    def of(
        cls, values: npt.NDArray[Any], present: npt.NDArray[np.bool_], kind: type | None
    ) -> InfoColumn:
        """Return a column of values of a type."""
        column: InfoColumn = tuple.__new__(cls, (values, present))
        column.kind = kind
        return column


class InfoColumns(dict[str, Any]):
    """The columns of k infos: an `InfoColumn` for each key, or `InfoColumns` for keys of dicts.

    Args:
        columns: the columns, by key.
        present: see below.

    Attributes:
        present: (k,) bool: which of the infos there are; for inner columns, which infos have the
            key.
    """

    def __init__(self, columns: Mapping[str, Any], present: npt.NDArray[np.bool_]) -> None:
        super().__init__(columns)
        self.present = present


_NUMBERS: dict[type, Any] = {float: np.float64, int: np.int64, bool: np.bool_}


def columns_of(infos: Sequence[Any], *, hidden: frozenset[str] = OF_STEPS) -> InfoColumns:
    """Return infos as columns.

    Args:
        infos: the infos; those that are not dicts have no values here.
        hidden: keys that are left out.
    """
    count = len(infos)
    if count and type(infos[0]) is dict:
        keys = infos[0].keys()
        if all(type(info) is dict and info.keys() == keys for info in infos):
            alike = {key: [info[key] for info in infos] for key in keys if key not in hidden}
            everywhere = slice(None)
            columns = {key: _column(count, everywhere, values) for key, values in alike.items()}
            return InfoColumns(columns, np.ones(count, np.bool_))
    found: dict[str, tuple[list[int], list[Any]]] = {}
    present = np.zeros(count, np.bool_)
    for position, info in enumerate(infos):
        if type(info) is not dict:
            continue
        present[position] = True
        for key, value in info.items():
            if key not in hidden:
                positions, values = found.setdefault(key, ([], []))
                positions.append(position)
                values.append(value)
    columns = {key: _column(count, *column) for key, column in found.items()}
    return InfoColumns(columns, present)


def without_ends(columns: InfoColumns) -> InfoColumns:
    """Return columns without those that say how episodes end, which batches have themselves."""
    if OF_STEPS.isdisjoint(columns):
        return columns
    kept = {key: column for key, column in columns.items() if key not in OF_STEPS}
    return InfoColumns(kept, columns.present)


def _column(count: int, positions: list[int] | slice, values: list[Any]) -> Any:
    """Return a column with values at some positions, or at all of them."""
    first = values[0]
    kinds = set(map(type, values))
    at = range(count)[positions] if isinstance(positions, slice) else positions
    if kinds == {dict}:
        nested: list[Any] = [None] * count
        for position, value in zip(at, values, strict=True):
            nested[position] = value
        return columns_of(nested, hidden=frozenset())
    present = np.zeros(count, np.bool_)
    present[positions] = True
    column = _empty(count, first, values) if len(kinds) == 1 else None
    if column is not None:
        try:
            column[positions] = values
            return InfoColumn.of(column, present, type(first))
        except (OverflowError, ValueError):  # an integer of more than 64 bits
            pass
    column = np.full(count, None, dtype=object)
    for position, value in zip(at, values, strict=True):
        column[position] = value
    return InfoColumn.of(column, present, type(first) if len(kinds) == 1 else None)


def _empty(count: int, first: Any, values: list[Any]) -> npt.NDArray[Any] | None:
    """Return zeros for values of one type; None if they have to be objects."""
    kind = type(first)
    if kind in _NUMBERS:
        return np.zeros(count, _NUMBERS[kind])
    if kind is np.ndarray:
        dtype, shape = first.dtype, first.shape
        are_alike = all(value.dtype == dtype and value.shape == shape for value in values)
        return np.zeros((count, *shape), dtype) if are_alike and dtype.kind in "biufc" else None
    if isinstance(first, np.generic) and first.dtype.kind in "biufc":
        return np.zeros(count, first.dtype)
    return None
