"""Replies of envs that were taken together: as timesteps by env_id, or as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from envmgr.core.observed import Observed
from envmgr.core.selection import NOBODY, Selection
from envmgr.env.contract import TERMINATED, TOLD, TRUNCATED, info_of
from envmgr.spaces import indexed
from envmgr.types import EnvTimestep
from envmgr.wire.block import DONE, ENDING_BITS, ENDING_SHIFT, REWARD_SHIFT, Block
from envmgr.wire.rewards import FIRST_WIDE, restored

_make_timestep = partial(tuple.__new__, EnvTimestep)
_EMPTY: Mapping[int, Any] = {}  # not a MappingProxyType: who keeps a batch may pickle it


class ArrayBatch(NamedTuple):
    """Timesteps of k envs as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,).
        reward: (k,) float64 if each reward is one number, be it in an array of shape (1,); float64
            (k, *shape) if they are larger arrays; an object array (k,) if they are neither, or of
            different shapes.
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

    @property
    def ended(self) -> npt.NDArray[np.int64]:
        """The envs whose episodes ended with these timesteps: (m,) int64."""
        if type(self.infos) is BatchInfos and self.infos.are_ordinary:
            return NOBODY
        return self.env_ids[self.terminated | self.truncated]

    @property
    def told(self) -> Sequence[int]:
        """The positions of infos that hold more than `terminated` and `truncated`, ascending.

        To know them takes less than to look at all infos.
        """
        infos = self.infos
        if type(infos) is BatchInfos:
            return infos.told
        return [k for k, info in enumerate(infos) if type(info) is not dict or info.keys() - _ENDS]


def by_env_id(result: Mapping[int, EnvTimestep] | ArrayBatch) -> dict[int, EnvTimestep]:
    """Return timesteps that were handed out by env_id, in whatever form that was."""
    if not isinstance(result, ArrayBatch):
        return dict(result)
    infos, rewards = result.infos, result.reward.tolist()
    if type(infos) is BatchInfos:
        rewards = infos.rewards(result.reward)
    return {
        env_id: EnvTimestep(indexed(result.obs, k), reward, bool(ended), info)
        for k, (env_id, reward, ended, info) in enumerate(
            zip(
                result.env_ids.tolist(),
                rewards,
                result.terminated | result.truncated,
                infos,
                strict=True,
            )
        )
    }


_make_batch = partial(tuple.__new__, ArrayBatch)

_WIDE = FIRST_WIDE << REWARD_SHIFT
"""Flags from this on are those of rewards of several numbers: their bits are the highest."""

_ENDS = frozenset(("terminated", "truncated"))


class ReadyBatch(NamedTuple):
    """Observations of k envs that take an action now, as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any


class Remarks(NamedTuple):
    """What replies say besides their observations, as far as they were looked at.

    Attributes:
        usual: the flags that a reply has if there is nothing to it. Rewards of this kind are read
            together.
        size: how many replies.
        specials: the flags of those with something to them, by position.
        details: info and reward of those, by position; without those of plain ends of episodes,
            whose rewards are of the usual kind.
    """

    usual: int
    size: int
    specials: Mapping[int, int] = _EMPTY
    details: Mapping[int, tuple[Any, Any]] = _EMPTY

    @property
    def have_rewards_of_different_shapes(self) -> bool:
        """Whether those are no column of an array as they are."""
        flags = (self.usual, *self.specials.values())
        kind = self.usual >> REWARD_SHIFT
        return max(flags) >= _WIDE and any(flag >> REWARD_SHIFT != kind for flag in flags)


class Taken:
    """Timesteps that were just taken; to be read once, before anything is sent to these envs again.

    Args:
        ids: whose they are.
        selection: those of them whose replies are in the block; None if there are none.
        reader: reads these; None if there are none.
        places: the place that all of their observations are in, or a list with one for each.
        remarks: what else they say.
        kept: the other timesteps, by env_id.

    Attributes:
        selection: see above.
        remarks: see above.
        kept: see above.
    """

    __slots__ = ("_ids", "_places", "_reader", "kept", "remarks", "selection")

    def __init__(
        self,
        ids: Sequence[int],
        selection: Selection | None,
        reader: ReplyReader | None,
        places: Any,
        remarks: Remarks,
        kept: Mapping[int, EnvTimestep] = _EMPTY,
    ) -> None:
        self._ids = ids
        self._places = places
        self._reader = reader
        self.remarks = remarks
        self.kept = kept
        self.selection = selection

    def beside(self, ids: Sequence[int], kept: Mapping[int, EnvTimestep]) -> Taken:
        """Return these and others, which are not in the block, in the order of `ids`."""
        return Taken(ids, self.selection, self._reader, self._places, self.remarks, kept)

    def timesteps(self) -> dict[int, EnvTimestep]:
        """Return them as timesteps by env_id."""
        kept, selection, reader = self.kept, self.selection, self._reader
        timesteps: dict[int, EnvTimestep] = {}
        if reader is not None and selection is not None:
            timesteps = reader.timesteps(selection, self._places, self.remarks)
        if kept:
            timesteps = {i: kept[i] if i in kept else timesteps[i] for i in self._ids}
        return timesteps

    def arrays(self) -> ArrayBatch | None:
        """Return them as arrays; None if they have to be put together from timesteps."""
        remarks, selection, reader = self.remarks, self.selection, self._reader
        odd = remarks.specials and remarks.have_rewards_of_different_shapes
        if reader is None or selection is None or self.kept or odd:
            return None
        return reader.arrays(selection, self._places, remarks)


class ReplyReader:
    """Reads replies in the block, whose flags are known.

    Args:
        observed: reads observations.
        block: the columns with the rewards.
    """

    def __init__(self, observed: Observed, block: Block) -> None:
        self._observed = observed
        self._arena: Any = observed.arena
        self._block = block

    def timesteps(
        self, selection: Selection, places: Any, remarks: Remarks
    ) -> dict[int, EnvTimestep]:
        """Return timesteps by env_id."""
        usual, count, specials, details = remarks
        ids, rows = selection.ids, selection.rows
        found = self._arena.rows_of(selection, places)
        kind = usual >> REWARD_SHIFT
        rewards: list[Any] = (
            restored(kind, self._block.reward_numbers(kind, rows))
            if kind
            else self._block.rewards[rows].tolist()
        )
        infos = _ordinary_infos(usual, count)
        dones: Iterable[bool] = repeat(False)
        if specials:
            dones = [False] * count
            for position, flag in specials.items():
                dones[position] = bool(flag & DONE)
            for position, (_, reward) in details.items():
                rewards[position] = reward
            _put_in(infos, specials, details)
        steps = map(_make_timestep, zip(found, rewards, dones, infos, strict=False))
        timesteps = dict(zip(ids, steps, strict=True))
        self._observed.taken_as_rows(selection, places, found)
        return timesteps

    def arrays(self, selection: Selection, places: Any, remarks: Remarks) -> ArrayBatch | None:
        """Return them as arrays; None if their observations are of several layouts."""
        usual, window, obs = remarks.usual, selection.window, self._arena.batch(selection, places)
        if obs is None:
            return None
        if window is not None and usual < _WIDE:
            rewards = window.rewards.copy()
        else:
            rewards = self._block.reward_numbers(usual >> REWARD_SHIFT, selection.rows)
            rewards = rewards.copy() if selection.is_slice else rewards
        terminated, truncated = bytearray(remarks.size), bytearray(remarks.size)
        for at, flag in remarks.specials.items():
            if flag & ENDING_BITS:
                terminated[at], truncated[at] = flag & _TERMINATED != 0, flag & _TRUNCATED != 0
            else:
                terminated[at], truncated[at] = ends_of(bool(flag & DONE), remarks.details[at][0])
        self._observed.taken_as_batch(selection, places)
        ends = np.frombuffer(terminated, np.bool_), np.frombuffer(truncated, np.bool_)
        return _make_batch((selection.array, obs, rewards, *ends, BatchInfos(remarks)))


_TERMINATED, _TRUNCATED = TERMINATED << ENDING_SHIFT, TRUNCATED << ENDING_SHIFT


def _put_in(
    infos: list[Any], specials: Mapping[int, int], details: Mapping[int, tuple[Any, Any]]
) -> None:
    """Put the infos of replies with something to them in their places."""
    for position, flag in specials.items():
        info = details[position][0].copy() if position in details else {}
        infos[position] = info_of((flag & ENDING_BITS) >> ENDING_SHIFT, info)


def _ordinary_infos(flag: int, count: int) -> list[Any]:
    if flag >> ENDING_SHIFT & TOLD:
        return [{"terminated": False, "truncated": False} for _ in range(count)]
    return [{} for _ in range(count)]


def ends_of(done: bool, info: Any) -> tuple[bool, bool]:
    """Return (terminated, truncated) of a timestep whose env need not have said.

    An env that does not say why its episode ended counts as terminated. Where the info is a list
    or tuple of infos, one of them is enough, and so is one agent where it says so by agent.
    """
    truncated = _flag_of(info, "truncated", False, done)
    return _flag_of(info, "terminated", done and not truncated, done), truncated


def _flag_of(info: Any, name: str, default: bool, done: bool) -> bool:
    if isinstance(info, dict):
        flag = info.get(name, default)
        return done and any(flag.values()) if isinstance(flag, dict) else bool(flag)
    told = [part[name] for part in info if name in part] if isinstance(info, (list, tuple)) else []
    return any(told) if told else default


class BatchInfos(Sequence[dict[str, Any]]):
    """The infos of steps; made when one of them is asked for.

    Args:
        remarks: of their replies.
    """

    __slots__ = ("_infos", "_remarks")

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._infos: tuple[dict[str, Any], ...] | None = None

    @property
    def are_ordinary(self) -> bool:
        """Whether none of the steps has anything to it."""
        return not self._remarks.specials

    @property
    def told(self) -> Sequence[int]:
        """Where there are infos that hold more than `terminated` and `truncated`, ascending."""
        return [position for position, (info, _) in self._remarks.details.items() if info]

    def rewards(self, numbers: npt.NDArray[np.float64]) -> list[Any]:
        """Return the rewards of the same steps, as the envs gave them, given their numbers."""
        rewards = restored(self._remarks.usual >> REWARD_SHIFT, numbers)
        for position, (_, reward) in self._remarks.details.items():
            rewards[position] = reward
        return rewards

    def __len__(self) -> int:
        return self._remarks.size

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
            usual, count, specials, details = self._remarks
            infos = _ordinary_infos(usual, count)
            _put_in(infos, specials, details)
            self._infos = tuple(infos)
        return self._infos
