"""The newest observation of each env: in shared memory, or as its user has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envmgr.core.checked_views import ViewGuard
from envmgr.core.observations import ObservationReader
from envmgr.spaces import Array, Layout
from envmgr.wire.arenas import COPIED, Placement, Places
from envmgr.wire.block import PLACE_BITS

if TYPE_CHECKING:  # it knows of hosts, whose record has observations
    from envmgr.core.selection import Selection

_LARGE_BYTES = 4096
"""Observations from this size on are copied one by one: who keeps one should not keep a batch."""

_NO_PLACE = 255
_FEW = 8
"""So many observations are copied rather than looked for as a slice that could be a view."""

_BYTES = [bytes((place,)) for place in range(PLACE_BITS + 1)]

Rows = Any
"""What indexes the rows of envs: a slice of neighbours, or an array of env_ids."""


class Observed:
    """The newest observations of all envs, and of batches of them.

    Args:
        count: envs and spares.

    Attributes:
        places: of the places.
        layout: of one observation; None where they are known one by one only.
    """

    def __init__(self, count: int) -> None:
        self.places = COPIED
        self.layout: Layout | None = None
        self._arenas: Sequence[Array] = ()
        self._by_place: list[list[Array]] = []
        self._flat: list[Array] = []
        self._readers: Sequence[ObservationReader] = ()
        self._copies = True
        self._is_lone = False
        self._are_rows_of_a_copy = False
        self._guard: ViewGuard | None = None
        self._large: list[bool] = []
        self._pointlike: list[bool] = []
        self._numbers: list[bool] = []
        self._unflatten: Callable[[Sequence[Any]], Any] = list
        self._place_bytes = bytearray((_NO_PLACE,)) * count
        self._place_of: npt.NDArray[np.uint8] = np.frombuffer(self._place_bytes, dtype=np.uint8)
        self._kept: list[Any] = [None] * count
        self._in_arena = bytearray(count)
        self._none_in_arena = bytes(count)

    def open(self, readers: Sequence[ObservationReader], guard: ViewGuard | None = None) -> None:
        """Read what replies refer to.

        Args:
            readers: of each env.
            guard: wraps views that are handed out; None leaves them.
        """
        self._readers = readers
        self._guard = guard

    @property
    def is_open(self) -> bool:
        """Whether hosts may have been told where observations go."""
        return bool(self._readers)

    def lay_out(
        self, arenas: Sequence[Array], layout: Layout, places: Places, *, copies: bool
    ) -> None:
        """Read batches of envs from their arenas, all of which are of one layout.

        Args:
            arenas: per leaf (places, env_num, *shape).
            layout: of one observation.
            places: of the places.
            copies: whether observations are copied out of the arenas.
        """
        self.places = places
        self.layout = layout
        self._arenas = arenas
        self._by_place = [[arena[place] for arena in arenas] for place in range(places.count)]
        self._flat = [arena.reshape(-1, *arena.shape[2:]) for arena in arenas]
        self._copies = copies
        self._is_lone = type(layout.skeleton) is int
        self._unflatten = layout.unflatten
        self._numbers = [leaf.is_number for leaf in layout.leaves]
        self._large = [leaf.nbytes >= _LARGE_BYTES for leaf in layout.leaves]
        # Of shape () and yet an array: iterating over a batch would make a number of it.
        self._pointlike = [leaf.shape == () and not leaf.is_number for leaf in layout.leaves]
        odd = any(self._large) or any(self._pointlike)
        self._are_rows_of_a_copy = copies and self._is_lone and not odd

    # -- what is newest ---------------------------------------------------------------------

    def read(self, env_id: int, reference: Any) -> Any:
        """Return the observation that a reply by message refers to.

        Raises:
            ValueMismatchError: it refers to none.
        """
        self._note(env_id)
        return self._readers[env_id].read(reference)

    def lost_step(self, env_id: int, observation: Any) -> tuple[Any, Any, Any]:
        """Return reward, terminated and truncated of a step that an env has lost.

        Args:
            env_id: which.
            observation: the newest that it has shown.
        """
        return self._readers[env_id].lost_step(observation)

    def keep(self, env_id: int, observation: Any) -> None:
        """This is the newest observation of an env, as its user gets it."""
        self._kept[env_id] = observation
        self._in_arena[env_id] = 0
        self._place_bytes[env_id] = _NO_PLACE

    def began(self, env_id: int, place: int) -> None:
        """The newest observation of an env is that of a reset, in `place`."""
        self._note(env_id)  # its view may be in use
        self._readers[env_id].note(place)  # now: the next to be read may be that of a step
        self._place_bytes[env_id] = place
        self._in_arena[env_id] = 1

    def _note(self, env_id: int) -> None:
        """The newest observation of an env is in use, also when there is a newer one."""
        place = self._place_bytes[env_id]
        if place != _NO_PLACE:
            self._readers[env_id].note(place)

    def placed_anew(self, env_id: int, placement: Placement) -> Placement:
        """Return the placement for a new env: it goes on after the places that are in use."""
        self._note(env_id)
        return self._readers[env_id].placed_anew(placement)

    def retire(self, env_id: int) -> None:
        """Replies of an env carry its observations from now on; the newest stays where it is.

        The place that it is in is not that of the next observation, nor of the one after that.
        """
        self.of((env_id,))
        self._readers[env_id].detach()

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
        found = self.rows(env_ids, array, self._place_of[array].tolist())
        for env_id, observation in zip(env_ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_rows(self, selection: Selection, places: Any, found: Sequence[Any]) -> None:
        """The newest observations of envs are in `places`, and were handed out one by one."""
        self._are_in(selection, places)
        if selection.is_slice:
            self._kept[selection.rows] = found
            self._in_arena[selection.rows] = selection.stale
            return
        for env_id, observation in zip(selection.ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_batch(self, selection: Selection, places: Any) -> None:
        """The newest observations of envs are in `places`, and were handed out as a batch."""
        self._are_in(selection, places)
        if selection.is_slice:
            self._in_arena[selection.rows] = selection.fresh
            return
        for env_id in selection.ids:
            self._in_arena[env_id] = 1

    def _are_in(self, selection: Selection, places: Any) -> None:
        if not selection.is_slice:
            self._place_of[selection.rows] = places
        elif type(places) is int:
            self._place_bytes[selection.rows] = _BYTES[places] * selection.count
        else:
            self._place_bytes[selection.rows] = places

    # -- reading ----------------------------------------------------------------------------

    def rows_of(self, selection: Selection, places: Any) -> list[Any]:
        """Return observations of envs one by one, as `rows` does."""
        if self._are_rows_of_a_copy and type(places) is int and selection.is_slice:
            return list(self.batch(selection, places))  # the ordinary case, and the cheapest way
        return self.rows(selection.ids, selection.rows, places)

    def rows(self, env_ids: Sequence[int], rows: Rows, places: Any) -> list[Any]:
        """Return observations of envs one by one.

        Args:
            env_ids: which.
            rows: the same, as an index.
            places: the one place that all of them are in, or a list with one for each.
        """
        leaves = [self._leaf_rows(j, env_ids, rows, places) for j in range(len(self._arenas))]
        if self._guard is not None:
            wrap = self._guard.wrap
            leaves = [
                [wrap([env_id], view) for env_id, view in zip(env_ids, leaf, strict=True)]
                for leaf in leaves
            ]
        if self._is_lone:
            return leaves[0]
        return list(map(self._unflatten, zip(*leaves, strict=True)))

    def _leaf_rows(self, j: int, env_ids: Sequence[int], rows: Rows, places: Any) -> list[Any]:
        one_place = type(places) is int
        if self._copies and not self._large[j]:
            batch = self._leaf_batch(j, rows, places)
            if self._pointlike[j]:
                return [batch[k, ...] for k in range(len(env_ids))]
            return list(batch)
        if one_place and isinstance(rows, slice) and not self._pointlike[j]:
            found = list(self._by_place[places][j][rows])
        else:
            each = [places] * len(env_ids) if one_place else places
            arena = self._arenas[j]
            if self._numbers[j]:
                return [arena[place, i] for place, i in zip(each, env_ids, strict=True)]
            found = [arena[place, i, ...] for place, i in zip(each, env_ids, strict=True)]
        return [view.copy() for view in found] if self._copies else found

    def batch(self, selection: Selection, places: Any) -> Any:
        """Return observations of envs as one batch: per leaf (k, *shape), nested as the space.

        A view of the arena if nothing is to be copied and it is one slice of it; else a copy.

        Args:
            selection: the envs.
            places: the one place that all of them are in, or a list with one for each.
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
                ids = range(rows.start, rows.stop)
                leaves = [self._guard.wrap(ids, leaf) for leaf in leaves]
        else:
            leaves = [self._leaf_batch(j, rows, places) for j in range(len(self._arenas))]
        return leaves[0] if self._is_lone else self._unflatten(leaves)

    def _leaf_batch(self, j: int, rows: Rows, places: Any) -> Array:
        if type(places) is not int:
            ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            where = np.array(places) * self._arenas[j].shape[1] + ids
            batch: Array = self._flat[j].take(where, axis=0)
            return batch
        arena: Array = self._by_place[places][j]
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
        rows, places = np.array(env_ids), [self._place_bytes[i] for i in env_ids]
        leaves = [self._leaf_batch(j, rows, places) for j in range(len(self._arenas))]
        return leaves[0] if self._is_lone else self._unflatten(leaves)

    def newest_batch(self, selection: Selection) -> Any:
        """Return the newest observations of envs as one batch, as `batch` does.

        None if some of them were handed out one by one.
        """
        rows = selection.rows
        if not all(map(self._in_arena.__getitem__, selection.ids)):
            return None
        places = self._place_of[rows].tolist()
        one_place = places.count(places[0]) == len(places)
        return self.batch(selection, places[0] if one_place else places)

    @property
    def counts(self) -> bool:
        """Whether it matters which envs are sent actions."""
        return self._guard is not None

    def counted(self, env_ids: Iterable[int], request: int) -> None:
        """These envs are sent an action; the same request counts once."""
        if self._guard is not None:
            self._guard.count(env_ids, request)

    def detach(self) -> None:
        """Let go of the shared memory, and of what was handed out of it."""
        for reader in self._readers:
            reader.detach()
        self._arenas, self._by_place, self._flat = (), [], []
        self._kept = [None] * len(self._kept)
        self._in_arena[:] = self._none_in_arena
