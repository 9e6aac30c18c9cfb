"""The newest observation of each env: in shared memory, or as its user has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envmgr.core.arenas import Arena, Arenas, Where, one_of
from envmgr.core.checked_views import ViewGuard
from envmgr.core.observations import ObservationReader
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import COPIED, Placement, Places
from envmgr.wire.block import PLACE_BITS

if TYPE_CHECKING:  # it knows of hosts, whose record has observations
    from envmgr.core.selection import Selection

_NO_PLACE = 255
_BYTES = [bytes((place,)) for place in range(PLACE_BITS + 1)]


class Observed:
    """The newest observations of all envs, and of batches of them.

    Args:
        count: envs and spares.

    Attributes:
        places: of the places.
        arena: where they are in shared memory; None where they are known one by one only.
    """

    def __init__(self, count: int) -> None:
        self.places = COPIED
        self.arena: Arena | Arenas | None = None
        self._readers: Sequence[ObservationReader] = ()
        self._guard: ViewGuard | None = None
        self._place_bytes = bytearray((_NO_PLACE,)) * count
        self._place_of: npt.NDArray[np.uint8] = np.frombuffer(self._place_bytes, dtype=np.uint8)
        self._kept: list[Any] = [None] * count
        self._in_arena = bytearray(count)
        self._is_in_arena: npt.NDArray[np.uint8] = np.frombuffer(self._in_arena, dtype=np.uint8)
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

    def lay_out(self, arena: Arena | Arenas, places: Places) -> None:
        """Read batches of envs from shared memory.

        Args:
            arena: where they are.
            places: of the places.
        """
        self.arena = arena
        self.places = places

    # -- what is newest ---------------------------------------------------------------------

    def read(self, env_id: int, reference: Any) -> Any:
        """Return the observation that a reply by message refers to.

        Raises:
            ValueMismatchError: it refers to none.
        """
        if self._place_bytes[env_id] != _NO_PLACE:
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

    def keep_each(self, timesteps: Mapping[int, EnvTimestep]) -> None:
        """As `keep`, of the observations of timesteps by env_id."""
        kept, in_arena, places = self._kept, self._in_arena, self._place_bytes
        for env_id, timestep in timesteps.items():
            kept[env_id] = timestep.obs
            in_arena[env_id] = 0
            places[env_id] = _NO_PLACE

    def began(self, places: Mapping[int, int]) -> None:
        """The newest observations of envs are those of resets, in these places, by env_id."""
        readers, place_bytes, in_arena = self._readers, self._place_bytes, self._in_arena
        n_steps = self.places.steps
        for env_id, place in places.items():
            reader, before = readers[env_id], place_bytes[env_id]
            if before < n_steps:
                reader.latest_step = before  # its view may be in use
            reader.latest_reset = place  # now: the next to be read may be that of a step
            place_bytes[env_id] = place
            in_arena[env_id] = 1

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
        array, arena = np.array(env_ids, dtype=np.int64), self.arena
        if arena is None:
            raise RuntimeError("places without an arena: a defect of envmgr, please report it")
        found = arena.rows(env_ids, array, self._place_of[array].tobytes())
        for env_id, observation in zip(env_ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_rows(self, selection: Selection, places: Where, found: Sequence[Any]) -> None:
        """The newest observations of envs are in `places`, and were handed out one by one."""
        self._are_in(selection, places)
        if selection.is_slice:
            self._kept[selection.rows] = found
            self._in_arena[selection.rows] = selection.stale
            return
        for env_id, observation in zip(selection.ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_batch(self, selection: Selection, places: Where) -> None:
        """The newest observations of envs are in `places`, and were handed out as a batch."""
        self._are_in(selection, places)
        if selection.is_slice:
            self._in_arena[selection.rows] = selection.fresh
        else:
            self._is_in_arena[selection.rows] = 1

    def _are_in(self, selection: Selection, places: Where) -> None:
        each = _BYTES[places] * selection.count if isinstance(places, int) else places
        if selection.is_slice:
            self._place_bytes[selection.rows] = each
        else:
            self._place_of[selection.rows] = np.frombuffer(each, np.uint8)

    # -- reading ----------------------------------------------------------------------------

    def newest_batch(self, selection: Selection) -> Any:
        """Return the newest observations of envs as one batch, as an arena does.

        None if some of them were handed out one by one.
        """
        rows = selection.rows
        if self.arena is None or 0 in self._is_in_arena[rows].tobytes():
            return None
        return self.arena.batch(selection, one_of(self._place_of[rows].tobytes()))

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
        self.arena = None
        self._kept = [None] * len(self._kept)
        self._in_arena[:] = self._none_in_arena
