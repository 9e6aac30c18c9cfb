"""Reading observations out of shared memory: one by one, or as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from envmgr.core.checked_views import ViewGuard
from envmgr.spaces import Array, Layout, merged_axes
from envmgr.wire.arenas import Places

_LARGE_BYTES = 4096
"""Observations from this size on are copied one by one: who keeps one should not keep a batch."""

_KNOWN_PARTS = 256

Rows = Any
"""What indexes rows: a slice of neighbours, or an array of their numbers."""


Where = int | bytes
"""The one place that observations are in, or that of each of them."""


def one_of(places: bytes) -> Where:
    """Return places as one, if they are."""
    return places[0] if places.count(places[:1]) == len(places) else places


class RowsOfArena(Protocol):
    """Rows that are read together.

    Attributes:
        ids: their numbers.
        rows: what indexes them.
        is_slice: whether they are neighbours.
        arenas: their rows of the arenas, by place, as far as they were asked for; if they are.
    """

    ids: list[int]
    rows: Rows
    is_slice: bool
    arenas: dict[int, list[Array]]


class Arena:
    """The observations of envs of one layout.

    Args:
        arrays: per leaf (places, rows, *shape).
        layout: of one observation.
        places: of the places.
        env_ids: whose rows they are.
        copies: whether observations are copied out of the arrays.
        guard: wraps views that are handed out; None leaves them.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        layout: Layout,
        places: Places,
        env_ids: Sequence[int],
        *,
        copies: bool,
        guard: ViewGuard | None,
    ) -> None:
        self._arrays = arrays
        self._env_ids = env_ids
        self._guard = guard
        self._by_place = [[array[place] for array in arrays] for place in range(places.count)]
        self._flat = [merged_axes(array) for array in arrays]
        self._copies = copies
        self._is_lone = type(layout.skeleton) is int
        self._unflatten = layout.unflatten
        self._numbers = [leaf.is_number for leaf in layout.leaves]
        self._large = [leaf.nbytes >= _LARGE_BYTES for leaf in layout.leaves]
        # Of shape () and yet an array: iterating over a batch would make a number of it.
        self._pointlike = [leaf.shape == () and not leaf.is_number for leaf in layout.leaves]
        odd = any(self._large) or any(self._pointlike)
        self._are_rows_of_a_copy = copies and self._is_lone and not odd

    def rows_of(self, selection: RowsOfArena, places: Where) -> list[Any]:
        """Return observations one by one, as `rows` does."""
        if self._are_rows_of_a_copy and type(places) is int and selection.is_slice:
            return list(self.batch(selection, places))  # the ordinary case, and the cheapest way
        return self.rows(selection.ids, selection.rows, places)

    def rows(self, ids: Sequence[int], rows: Rows, places: Where) -> list[Any]:
        """Return observations one by one.

        Args:
            ids: numbers of rows.
            rows: the same, as an index.
            places: where.
        """
        leaves = [self._leaf_rows(j, ids, rows, places) for j in range(len(self._arrays))]
        if self._guard is not None:
            wrap, env_ids = self._guard.wrap, self._env_ids
            leaves = [
                [wrap([env_ids[i]], view) for i, view in zip(ids, leaf, strict=True)]
                for leaf in leaves
            ]
        if self._is_lone:
            return leaves[0]
        return list(map(self._unflatten, zip(*leaves, strict=True)))

    def _leaf_rows(self, j: int, ids: Sequence[int], rows: Rows, places: Where) -> list[Any]:
        if self._copies and not self._large[j]:
            batch = self._leaf_batch(j, rows, places)
            if self._pointlike[j]:
                return [batch[k, ...] for k in range(len(ids))]
            return list(batch)
        if isinstance(places, int) and isinstance(rows, slice) and not self._pointlike[j]:
            found = list(self._by_place[places][j][rows])
        else:
            each = [places] * len(ids) if isinstance(places, int) else places
            arena = self._arrays[j]
            if self._numbers[j]:
                return [arena[place, i] for place, i in zip(each, ids, strict=True)]
            found = [arena[place, i, ...] for place, i in zip(each, ids, strict=True)]
        return [view.copy() for view in found] if self._copies else found

    def batch(self, selection: RowsOfArena, places: Where) -> Any:
        """Return observations as one batch: per leaf (k, *shape), nested as the space.

        A view of the arena if nothing is to be copied and it is one slice of it; else a copy.

        Args:
            selection: the rows.
            places: where.
        """
        rows = selection.rows
        if type(places) is int and selection.is_slice:
            leaves = selection.arenas.get(places)
            if leaves is None:
                leaves = [arena[rows] for arena in self._by_place[places]]
                selection.arenas[places] = leaves
            if self._copies and self._is_lone:
                return leaves[0].copy()
            if self._copies:
                leaves = [leaf.copy() for leaf in leaves]
            elif self._guard is not None:
                env_ids: Any = self._env_ids[rows]
                leaves = [self._guard.wrap(env_ids, leaf) for leaf in leaves]
        elif self._is_lone:
            return self._leaf_batch(0, rows, places)
        else:
            leaves = [self._leaf_batch(j, rows, places) for j in range(len(self._arrays))]
        return leaves[0] if self._is_lone else self._unflatten(leaves)

    def _leaf_batch(self, j: int, rows: Rows, places: Where) -> Array:
        if not isinstance(places, int):
            ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            each = np.frombuffer(places, np.uint8).astype(np.intp)
            where = each * self._arrays[j].shape[1] + ids
            batch: Array = self._flat[j].take(where, axis=0)
            return batch
        arena: Array = self._by_place[places][j]
        if not isinstance(rows, slice):
            taken: Array = arena.take(rows, axis=0)
            return taken
        return arena[rows].copy() if self._copies else arena[rows]


class _Part:
    """Those of some envs that are of one layout."""

    def __init__(self, arena: Arena, positions: list[int], ids: list[int]) -> None:
        first, count = ids[0], len(ids)
        self.arena = arena
        self.positions = positions
        self.ids = ids
        self.is_slice = ids == list(range(first, first + count))
        self.rows: Rows = slice(first, first + count) if self.is_slice else np.array(ids)
        self.arenas: dict[int, list[Array]] = {}


class Arenas:
    """The observations of envs of different layouts; as `Arena`, whose rows are the env_ids.

    Args:
        arena_of: the arena of each env, and its row there; None for those that are in none.
    """

    def __init__(self, arena_of: Sequence[tuple[Arena, int] | None]) -> None:
        self._arena_of = arena_of
        self._known: dict[tuple[int, ...], list[_Part]] = {}

    def rows_of(self, selection: RowsOfArena, places: Where) -> list[Any]:
        """Return observations one by one."""
        return self.rows(selection.ids, selection.rows, places)

    def rows(self, ids: Sequence[int], rows: Rows, places: Where) -> list[Any]:
        """Return observations one by one; as `Arena.rows`."""
        found: list[Any] = [None] * len(ids)
        for part in self._parts(ids):
            of_part = part.arena.rows_of(part, _places_of(part, places))
            for position, observation in zip(part.positions, of_part, strict=True):
                found[position] = observation
        return found

    def batch(self, selection: RowsOfArena, places: Where) -> Any:
        """Return observations as one batch; None if they are of several layouts."""
        part, *others = self._parts(selection.ids)
        return None if others else part.arena.batch(part, places)

    def _parts(self, ids: Sequence[int]) -> list[_Part]:
        key = tuple(ids)
        parts = self._known.get(key)
        if parts is None:
            if len(self._known) >= _KNOWN_PARTS:
                self._known.clear()
            parts = self._known[key] = self._made(key)
        return parts

    def _made(self, ids: tuple[int, ...]) -> list[_Part]:
        found: dict[Arena, tuple[list[int], list[int]]] = {}
        for position, env_id in enumerate(ids):
            entry = self._arena_of[env_id]
            if entry is None:
                raise RuntimeError(
                    f"env {env_id} has no arena: a defect of envmgr, please report it"
                )
            positions, rows = found.setdefault(entry[0], ([], []))
            positions.append(position)
            rows.append(entry[1])
        return [_Part(arena, positions, rows) for arena, (positions, rows) in found.items()]


def _places_of(part: _Part, places: Where) -> Where:
    if isinstance(places, int):
        return places
    return one_of(bytes([places[position] for position in part.positions]))
