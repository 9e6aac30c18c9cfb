"""Actions of a host's envs, as they are posted in the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envmgr.spaces.columns import NUMBERS_IN_ARRAYS, NUMPY_VALUES
from envmgr.wire.block import Block, items


class ActionReader:
    """Reads the actions of rows from the block, as private copies.

    Args:
        block: the columns.
        rows: which.
        takes_any_number: their envs do not mind whose numbers they get.
    """

    def __init__(self, block: Block, rows: list[int], *, takes_any_number: bool) -> None:
        layout = block.plan.actions
        first, end = rows[0], rows[-1] + 1
        self._positions = None if end - first == len(rows) else [row - first for row in rows]
        self._columns = [column[first:end] for column in block.actions]
        self._kinds = None if takes_any_number else block.kinds[first:end]
        self._layout = layout
        self._is_number = type(layout.skeleton) is int and layout.leaves[0].is_number

    @property
    def readers(self) -> tuple[Any, Callable[[], list[Any]]]:
        """The actions as Python's numbers, one by one, or None; and `read`, which always works."""
        plain = self._is_number and self._kinds is None and self._positions is None
        return items(self._columns[0]) if plain else None, self.read

    def read(self) -> list[Any]:
        """Return the action of each row."""
        if self._is_number:
            actions = self._numbers()
        else:
            leaves = [
                [copy[k, ...] for k in range(len(copy))] if not leaf.is_number else list(copy)
                for leaf, copy in zip(self._layout.leaves, map(_copied, self._columns), strict=True)
            ]
            unflatten = self._layout.unflatten
            actions = [unflatten(parts) for parts in zip(*leaves, strict=True)]
        return actions if self._positions is None else [actions[k] for k in self._positions]

    def _numbers(self) -> list[Any]:
        (column,) = self._columns
        numbers: list[Any] = column.tolist()
        if self._kinds is None:
            return numbers
        forms = self._kinds.tobytes()
        if not any(forms):  # all of them are Python's
            return numbers
        dtype = column.dtype
        return [
            np.array([number], dtype)
            if form == NUMBERS_IN_ARRAYS
            else dtype.type(number)
            if form == NUMPY_VALUES
            else number
            for number, form in zip(numbers, forms, strict=True)
        ]


def _copied(column: Any) -> Any:
    return column.copy()
