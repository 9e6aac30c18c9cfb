"""Replies of envs that were taken together: as timesteps by env_id, or as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from envmgr.block import DONE, ENDING_BITS, ENDING_SHIFT, SLOT_BITS
from envmgr.env.contract import TERMINATED, TOLD, TRUNCATED, info_of
from envmgr.supervisor.observed import Observed, Rows
from envmgr.types import EnvTimestep

_make_timestep = partial(tuple.__new__, EnvTimestep)


class ArrayBatch(NamedTuple):
    """Timesteps of k envs as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,).
        reward: (k,) float64, or (k, *shape) if rewards are arrays.
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


class Taken:
    """Replies that were just taken; to be read before anything is sent to these envs again.

    Args:
        observed: the arenas.
        env_ids: whose.
        array: the same, as an array.
        rows: the same, as an index.
        rewards: the column of rewards.
        slot: the slot that all observations are in, if all replies are ordinary.
        flag: the flags that all replies have then.
        flags: else, the flags of each.
        details: info and type of reward of those, by position, where they are not the usual ones.
    """

    def __init__(
        self,
        observed: Observed,
        env_ids: list[int],
        array: npt.NDArray[np.int64],
        rows: Rows,
        rewards: npt.NDArray[np.float64],
        *,
        slot: int | None = None,
        flag: int = 0,
        flags: Sequence[int] = (),
        details: dict[int, tuple[Any, type]] | None = None,
    ) -> None:
        self._observed = observed
        self._env_ids = env_ids
        self._array = array
        self._rows = rows
        self._rewards = rewards
        self._slots: Any = [flag & SLOT_BITS for flag in flags] if slot is None else slot
        self._flag = flag
        self._flags = flags
        self._details = details or {}

    def timesteps(self) -> dict[int, EnvTimestep]:
        """Return them as timesteps by env_id."""
        ids = self._env_ids
        found = self._observed.rows(ids, self._rows, self._slots)
        self._observed.taken_as_rows(ids, self._rows, self._slots, found)
        rewards = self._rewards[self._rows].tolist()
        if not self._flags:
            infos = _ordinary_infos(self._flag, len(ids))
            steps = map(_make_timestep, zip(found, rewards, repeat(False), infos, strict=False))
            return dict(zip(ids, steps, strict=True))
        dones = [bool(flag & DONE) for flag in self._flags]
        for position, (_, kind) in self._details.items():
            rewards[position] = kind(rewards[position])
        steps = map(_make_timestep, zip(found, rewards, dones, self._infos(), strict=True))
        return dict(zip(ids, steps, strict=True))

    def arrays(self) -> ArrayBatch:
        """Return them as arrays."""
        count = len(self._env_ids)
        obs = self._observed.batch(self._rows, self._slots)
        self._observed.taken_as_batch(self._env_ids, self._rows, self._slots)
        rewards = self._rewards[self._rows]
        if isinstance(self._rows, slice):
            rewards = rewards.copy()
        if not self._flags:
            ends = np.zeros((2, count), dtype=np.bool_)
            infos = OrdinaryInfos(self._flag, count)
            return ArrayBatch(self._array, obs, rewards, ends[0], ends[1], infos)
        all_infos = self._infos()
        told = [_ends(flag, info) for flag, info in zip(self._flags, all_infos, strict=True)]
        ends = np.array(told, dtype=np.bool_).T.copy()
        return ArrayBatch(self._array, obs, rewards, ends[0], ends[1], tuple(all_infos))

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
