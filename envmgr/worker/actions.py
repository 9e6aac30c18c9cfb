"""Actions of a host's envs, as they are posted in the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envmgr.spaces.columns import in_form
from envmgr.wire.block import Block, items


class ActionReader:
    """Reads the actions of rows from the block, as private copies.

    Args:
        block: the columns.
        rows: which.
        takes_any_number: their envs do not mind whose numbers they get.
        kind: which kind of actions these take.
    """

    def __init__(
        self, block: Block, rows: list[int], *, takes_any_number: bool, kind: int = 0
    ) -> None:
        layout = block.plan.layouts[kind]
        first, end = rows[0], rows[-1] + 1
        self._positions = None if end - first == len(rows) else [row - first for row in rows]
        self._columns = [column[first:end] for column in block.actions_of[kind]]
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
        return [in_form(number, form, dtype) for number, form in zip(numbers, forms, strict=True)]


class KindsReader:
    """As `ActionReader`, for rows that take different kinds of actions.

    Args:
        block: the columns.
        rows: which.
        kinds: of each of them.
        takes_any_number: as there.
    """

    def __init__(
        self, block: Block, rows: list[int], kinds: list[int], *, takes_any_number: bool
    ) -> None:
        self._count = len(rows)
        self._parts: list[tuple[list[int], ActionReader]] = []
        for kind in set(kinds):
            positions = [k for k in range(len(rows)) if kinds[k] == kind]
            of_kind = [rows[k] for k in positions]
            reader = ActionReader(block, of_kind, takes_any_number=takes_any_number, kind=kind)
            self._parts.append((positions, reader))

    @property
    def readers(self) -> tuple[Any, Callable[[], list[Any]]]:
        """As there."""
        return None, self.read

    def read(self) -> list[Any]:
        """Return the action of each row."""
        actions: list[Any] = [None] * self._count
        for positions, reader in self._parts:
            for position, action in zip(positions, reader.read(), strict=True):
                actions[position] = action
        return actions


def _copied(column: Any) -> Any:
    return column.copy()
