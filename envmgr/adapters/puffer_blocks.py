"""Blocks of envs that are sent and received together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.adapters.rows import Rows


class Received(NamedTuple):
    """What `PufferVecEnv.recv` returns: k envs after a step.

    Attributes:
        observations: (k, *shape).
        rewards: (k,) float32.
        terminals: (k,) bool.
        truncations: (k,) bool.
        infos: of those envs that have something to say.
        env_ids: (k,), each one more than the one before it.
        masks: (k,) bool: all True.
    """

    observations: npt.NDArray[Any]
    rewards: npt.NDArray[np.float32]
    terminals: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    env_ids: npt.NDArray[np.int64]
    masks: npt.NDArray[np.bool_]


class Block:
    """One step of some envs, from the actions that they are sent to what comes of them.

    Args:
        first: the first env_id.
        size: how many follow on each other.
        keeps: what is received may be kept, and need not be copied.
        begins: (size,) which envs show the first observations of their episodes in it.

    Attributes:
        env_ids: (size,).
        begins: see above.
        terminals: (size,).
        truncations: (size,).
    """

    def __init__(
        self, first: int, size: int, *, keeps: bool, begins: npt.NDArray[np.bool_]
    ) -> None:
        self.env_ids = np.arange(first, first + size)
        self._first, self._size, self._keeps = first, size, keeps
        self.begins = begins
        self.terminals, self.truncations = np.zeros((2, self._size), np.bool_)
        self._awaited = ~begins
        self._obs: npt.NDArray[Any] | None = None
        self._rewards = np.zeros(self._size, np.float32)
        self._infos: list[dict[str, Any]] = [{}] * self._size

    def next(self, begins: npt.NDArray[np.bool_]) -> Block:
        """Return the next step of these envs."""
        return Block(self._first, self._size, keeps=self._keeps, begins=begins)

    @property
    def n_awaited(self) -> int:
        """How many envs have a step under way."""
        return int(np.count_nonzero(self._awaited))

    def put(self, env_ids: Sequence[int], rows: Rows, positions: npt.NDArray[np.intp]) -> None:
        """Put in the rows at some positions, which are those of envs of this block."""
        places = np.asarray(env_ids) - self._first
        if self._keeps and len(rows.rewards) == len(places) == self._size:  # ascending, and all
            self._obs = rows.obs
        else:
            self._show(places, rows.obs[positions])
        self._rewards[places] = rows.rewards[positions]
        self.terminals[places] = rows.terminated[positions]
        self.truncations[places] = rows.truncated[positions]
        if rows.infos is not None:
            for place, position in zip(places.tolist(), positions.tolist(), strict=True):
                self._infos[place] = rows.infos[position]
        self._awaited[places] = False

    def show(self, obs: npt.NDArray[Any], infos: Sequence[dict[str, Any]]) -> None:
        """Put in the first observations, and infos, of the envs whose episodes begin."""
        places = np.flatnonzero(self.begins)
        self._show(places, obs)
        for place, info in zip(places.tolist(), infos, strict=True):
            self._infos[place] = info

    def _show(self, places: npt.NDArray[np.intp], obs: npt.NDArray[Any]) -> None:
        if self._obs is None:
            self._obs = np.empty((self._size, *obs.shape[1:]), obs.dtype)
        self._obs[places] = obs

    def received(self) -> Received:
        """Return what has come; of all envs of this block something has."""
        obs: Any = self._obs
        infos = [info for info in self._infos if info]
        masks = np.ones(self._size, np.bool_)
        columns = obs, self._rewards, self.terminals.copy(), self.truncations.copy()
        return Received(*columns, infos, self.env_ids.copy(), masks)
