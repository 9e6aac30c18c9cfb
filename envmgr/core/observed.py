"""The newest observations of envs in their lanes: in shared memory, or as their user has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envmgr.core.checked_views import ViewGuard
from envmgr.core.observations import ObservationReader
from envmgr.spaces import Array, Layout
from envmgr.wire.arenas import Places

_LARGE_BYTES = 4096
"""Observations from this size on are copied one by one: who keeps one should not keep a batch."""

_NO_SLOT = 255
_FEW = 8
"""So many observations are copied rather than looked for as a slice that could be a view."""

Rows = Any
"""What indexes the rows of envs: a slice of neighbours, or an array of env_ids."""


class Batch(Protocol):
    """What is read of a selection of envs: see `lanes.Selection`."""

    @property
    def ids(self) -> Sequence[int]:
        """Their env_ids."""
        ...

    @property
    def rows(self) -> Rows:
        """What indexes their rows."""
        ...

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    @property
    def fresh(self) -> bytes:
        """What says of all of them that the newest observation is in the arena."""
        ...

    @property
    def arenas(self) -> dict[int, list[Array]]:
        """Their rows of the arenas, by slot."""
        ...


class Observed:
    """Hands out observations from the arenas of one layout.

    Args:
        arenas: per leaf (slots, env_num, *shape).
        layout: of one observation.
        places: of the slots.
        readers: of each env_id; they have to know which slots are in use.
        copies: whether observations are copied out of the arenas.
        guard: wraps views that are handed out; None leaves them.
    """

    def __init__(
        self,
        arenas: Sequence[Array],
        layout: Layout,
        places: Places,
        readers: Sequence[ObservationReader],
        *,
        copies: bool,
        guard: ViewGuard | None = None,
    ) -> None:
        env_num = len(readers)
        self.places = places
        self.layout = layout
        self._arenas = arenas
        self._by_slot = [[arena[slot] for arena in arenas] for slot in range(places.count)]
        self._flat = [arena.reshape(-1, *arena.shape[2:]) for arena in arenas]
        self._readers = readers
        self._copies = copies
        self._is_lone = type(layout.skeleton) is int
        self._guard = guard
        self._large = [leaf.nbytes >= _LARGE_BYTES for leaf in layout.leaves]
        # Of shape () and yet an array: iterating over a batch would make a number of it.
        self._pointlike = [leaf.shape == () and not leaf.is_number for leaf in layout.leaves]
        self._slot_bytes = bytearray((_NO_SLOT,)) * env_num
        self._slots: npt.NDArray[np.uint8] = np.frombuffer(self._slot_bytes, dtype=np.uint8)
        self._kept: list[Any] = [None] * env_num
        self._in_arena = bytearray(env_num)
        self._none_in_arena = bytes(env_num)

    # -- what is newest ---------------------------------------------------------------------

    def keep(self, env_id: int, observation: Any) -> None:
        """An env enters its lane: this is its newest observation."""
        self._kept[env_id] = observation
        self._in_arena[env_id] = 0
        self._slots[env_id] = _NO_SLOT

    def began(self, env_id: int, slot: int) -> None:
        """The newest observation of an env is that of a reset, in `slot`."""
        before = int(self._slots[env_id])
        if before != _NO_SLOT:
            self._readers[env_id].note(before)  # its view may be in use
        self._readers[env_id].note(slot)  # now: the next to be read may be that of a step
        self._slots[env_id] = slot
        self._in_arena[env_id] = 1

    def note(self, env_id: int) -> None:
        """The newest observation of an env that leaves its lane is in use."""
        slot = int(self._slots[env_id])
        if slot != _NO_SLOT:
            self._readers[env_id].note(slot)

    def newest(self, env_id: int) -> Any:
        """Return the newest observation of an env that leaves its lane."""
        self.note(env_id)
        return self.of([env_id])[0]

    def of(self, env_ids: Sequence[int]) -> list[Any]:
        """Return the newest observations of envs; always the same object for the same one."""
        kept, in_arena = self._kept, self._in_arena
        if in_arena != self._none_in_arena:
            missing = [i for i in env_ids if in_arena[i]]
            if missing:
                self._fetch(missing)
        return [kept[i] for i in env_ids]

    def _fetch(self, env_ids: list[int]) -> None:
        array = np.array(env_ids, dtype=np.int64)
        found = self.rows(env_ids, array, self._slots[array].tolist())
        for env_id, observation in zip(env_ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_rows(self, env_ids: Sequence[int], rows: Rows, slots: Any, found: Any) -> None:
        """The newest observations of envs are in `slots`, and were handed out one by one."""
        self._slots[rows] = slots
        if isinstance(rows, slice):
            self._kept[rows] = found
            self._in_arena[rows] = self._none_in_arena[: len(env_ids)]
            return
        for env_id, observation in zip(env_ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_batch(self, selection: Batch, slots: Any) -> None:
        """The newest observations of envs are in `slots`, and were handed out as a batch."""
        rows = selection.rows
        if isinstance(rows, slice):
            one_slot = type(slots) is int
            self._slot_bytes[rows] = bytes((slots,)) * selection.count if one_slot else bytes(slots)
            self._in_arena[rows] = selection.fresh
            return
        self._slots[rows] = slots
        for env_id in selection.ids:
            self._in_arena[env_id] = 1

    # -- reading ----------------------------------------------------------------------------

    def rows(self, env_ids: Sequence[int], rows: Rows, slots: Any) -> list[Any]:
        """Return observations of envs one by one.

        Args:
            env_ids: which.
            rows: the same, as an index.
            slots: the one slot that all of them are in, or a list with one for each.
        """
        leaves = [self._leaf_rows(j, env_ids, rows, slots) for j in range(len(self._arenas))]
        if self._guard is not None:
            wrap = self._guard.wrap
            leaves = [
                [wrap([env_id], view) for env_id, view in zip(env_ids, leaf, strict=True)]
                for leaf in leaves
            ]
        if type(self.layout.skeleton) is int:
            return leaves[0]
        return list(map(self.layout.unflatten, zip(*leaves, strict=True)))

    def _leaf_rows(self, j: int, env_ids: Sequence[int], rows: Rows, slots: Any) -> list[Any]:
        one_slot = type(slots) is int
        if self._copies and not self._large[j]:
            batch = self._leaf_batch(j, rows, slots)
            if self._pointlike[j]:
                return [batch[k, ...] for k in range(len(env_ids))]
            return list(batch)
        if one_slot and isinstance(rows, slice) and not self._pointlike[j]:
            found = list(self._by_slot[slots][j][rows])
        else:
            each = [slots] * len(env_ids) if one_slot else slots
            arena = self._arenas[j]
            if self.layout.leaves[j].is_number:
                return [arena[slot, i] for slot, i in zip(each, env_ids, strict=True)]
            found = [arena[slot, i, ...] for slot, i in zip(each, env_ids, strict=True)]
        return [view.copy() for view in found] if self._copies else found

    def batch(self, selection: Batch, slots: Any) -> Any:
        """Return observations of envs as one batch: per leaf (k, *shape), nested as the space.

        A view of the arena if nothing is to be copied and it is one slice of it; else a copy.

        Args:
            selection: the envs.
            slots: the one slot that all of them are in, or a list with one for each.
        """
        rows = selection.rows
        if type(slots) is int and isinstance(rows, slice):
            leaves = selection.arenas.get(slots)
            if leaves is None:
                leaves = [arena[rows] for arena in self._by_slot[slots]]
                selection.arenas[slots] = leaves
            if self._copies:
                leaves = [leaf.copy() for leaf in leaves]
            elif self._guard is not None:
                ids = range(rows.start, rows.stop)
                leaves = [self._guard.wrap(ids, leaf) for leaf in leaves]
        else:
            leaves = [self._leaf_batch(j, rows, slots) for j in range(len(self._arenas))]
        return leaves[0] if self._is_lone else self.layout.unflatten(leaves)

    def _leaf_batch(self, j: int, rows: Rows, slots: Any) -> Array:
        if type(slots) is not int:
            ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            places = np.array(slots) * len(self._slot_bytes) + ids
            batch: Array = self._flat[j].take(places, axis=0)
            return batch
        arena: Array = self._by_slot[slots][j]
        if not isinstance(rows, slice):
            taken: Array = arena.take(rows, axis=0)
            return taken
        return arena[rows].copy() if self._copies else arena[rows]

    def newest_few(self, env_ids: Sequence[int]) -> Any:
        """Return the newest observations of a few envs as a batch of their own, as `batch` does.

        None if some of them were handed out one by one, or views of neighbours are cheaper.
        """
        if not self._copies and len(env_ids) > _FEW:
            return None
        if not all(map(self._in_arena.__getitem__, env_ids)):
            return None
        rows, slots = np.array(env_ids), [self._slot_bytes[i] for i in env_ids]
        leaves = [self._leaf_batch(j, rows, slots) for j in range(len(self._arenas))]
        return leaves[0] if self._is_lone else self.layout.unflatten(leaves)

    def newest_batch(self, selection: Batch) -> Any:
        """Return the newest observations of envs as one batch, as `batch` does.

        None if some of them were handed out one by one.
        """
        rows = selection.rows
        if not all(map(self._in_arena.__getitem__, selection.ids)):
            return None
        slots = self._slots[rows].tolist()
        one_slot = slots.count(slots[0]) == len(slots)
        return self.batch(selection, slots[0] if one_slot else slots)

    def counted(self, env_ids: Sequence[int]) -> None:
        """These envs are sent an action."""
        if self._guard is not None:
            self._guard.count(env_ids)

    def detach(self) -> None:
        """Let go of the shared memory, and of what was handed out of it."""
        self._arenas = []
        self._by_slot = []
        self._flat = []
        self._kept = [None] * len(self._kept)
