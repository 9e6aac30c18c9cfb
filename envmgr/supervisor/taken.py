"""Replies of envs that were taken together: as timesteps by env_id, or as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from envmgr.block import DONE, ENDING_BITS, ENDING_SHIFT, SLOT_BITS
from envmgr.env.contract import TERMINATED, TOLD, TRUNCATED, info_of
from envmgr.supervisor.observed import Observed
from envmgr.types import EnvTimestep

_make_timestep = partial(tuple.__new__, EnvTimestep)


class ArrayBatch(NamedTuple):
    """Timesteps of k envs as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,).
        reward: (k,) float64, or (k, *shape) if rewards are arrays; an object array (k,) if they are
            neither, or of different shapes.
        terminated: (k,) bool.
        truncated: (k,) bool.
        infos: k infos, as they are in timesteps.
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    reward: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: Sequence[Any]


class TakenBy(Protocol):
    """What `Taken` needs of the lanes that made it."""

    observed: Observed

    def handed_out(self, selection: Any, flags: Sequence[int]) -> None:
        """Go on with envs whose replies were read."""
        ...


class Taken:
    """Replies that were just taken; to be read once, before anything is sent to these envs again.

    Args:
        lanes: told when they have been read.
        selection: the envs.
        rewards: the column of rewards.
        flag: the flags of all replies, if all are ordinary and their observations in one slot.
        flags: else, the flags of each; empty otherwise.
        details: info and type of reward of those, by position, where they are not the usual ones.
    """

    __slots__ = ("_details", "_flag", "_flags", "_lanes", "_rewards", "_selection", "_slots")

    def __init__(
        self,
        lanes: TakenBy,
        selection: Any,
        rewards: npt.NDArray[np.float64],
        flag: int,
        flags: Sequence[int],
        details: dict[int, tuple[Any, type]],
    ) -> None:
        self._lanes = lanes
        self._selection = selection
        self._rewards = rewards
        self._flag = flag
        self._flags = flags
        self._details = details
        self._slots: Any = [each & SLOT_BITS for each in flags] if flags else flag & SLOT_BITS

    def timesteps(self) -> dict[int, EnvTimestep]:
        """Hand them out as timesteps by env_id."""
        selection, observed = self._selection, self._lanes.observed
        ids = selection.ids
        found = observed.rows(ids, selection.rows, self._slots)
        rewards = self._rewards[selection.rows].tolist()
        if not self._flags:
            infos = _ordinary_infos(self._flag, len(ids))
            steps = map(_make_timestep, zip(found, rewards, repeat(False), infos, strict=False))
        else:
            for position, (_, kind) in self._details.items():
                rewards[position] = kind(rewards[position])
            dones = [bool(flag & DONE) for flag in self._flags]
            steps = map(_make_timestep, zip(found, rewards, dones, self._infos(), strict=True))
        timesteps = dict(zip(ids, steps, strict=True))
        observed.taken_as_rows(ids, selection.rows, self._slots, found)
        self._lanes.handed_out(selection, self._flags)
        return timesteps

    def arrays(self) -> ArrayBatch:
        """Hand them out as arrays."""
        selection, observed = self._selection, self._lanes.observed
        rows, count = selection.rows, selection.count
        obs = observed.batch(selection, self._slots)
        rewards = self._rewards[rows].copy()
        if not self._flags:
            ends = np.zeros((2, count), dtype=np.bool_)
            infos: Sequence[Any] = OrdinaryInfos(self._flag, count)
        else:
            infos = tuple(self._infos())
            told = [_ends(flag, info) for flag, info in zip(self._flags, infos, strict=True)]
            ends = np.array(told, dtype=np.bool_).T.copy()
        observed.taken_as_batch(selection.ids, rows, self._slots)
        self._lanes.handed_out(selection, self._flags)
        return ArrayBatch(selection.array, obs, rewards, ends[0], ends[1], infos)

    def _infos(self) -> list[Any]:
        details = self._details
        return [
            info_of(
                (flag & ENDING_BITS) >> ENDING_SHIFT,
                details[position][0] if position in details else {},
            )
            for position, flag in enumerate(self._flags)
        ]


def _ordinary_infos(flag: int, count: int) -> list[Any]:
    if flag >> ENDING_SHIFT & TOLD:
        return [{"terminated": False, "truncated": False} for _ in range(count)]
    return [{} for _ in range(count)]


def _ends(flag: int, info: Any) -> tuple[bool, bool]:
    ending = (flag & ENDING_BITS) >> ENDING_SHIFT
    if ending:
        return bool(ending & TERMINATED), bool(ending & TRUNCATED)
    return ends_of(bool(flag & DONE), info)


def ends_of(done: bool, info: Any) -> tuple[bool, bool]:
    """Return (terminated, truncated) of a timestep whose env need not have said.

    An env that does not say why its episode ended counts as terminated. Where the info is a list
    or tuple of infos, one of them is enough.
    """
    truncated = _flag_of(info, "truncated", False)
    return _flag_of(info, "terminated", done and not truncated), truncated


def _flag_of(info: Any, name: str, default: bool) -> bool:
    if isinstance(info, dict):
        return bool(info.get(name, default))
    told = [part[name] for part in info if name in part] if isinstance(info, (list, tuple)) else []
    return any(told) if told else default


class OrdinaryInfos(Sequence[dict[str, Any]]):
    """The infos of steps that have nothing to say; made when one of them is asked for."""

    __slots__ = ("_count", "_flag", "_infos")

    def __init__(self, flag: int, count: int) -> None:
        self._flag = flag
        self._count = count
        self._infos: tuple[dict[str, Any], ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._made())

    def _made(self) -> tuple[dict[str, Any], ...]:
        if self._infos is None:
            self._infos = tuple(_ordinary_infos(self._flag, self._count))
        return self._infos
