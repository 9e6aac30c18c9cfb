"""An EnvPool of PyPI's `envpool` as a batched env, of which all or some rows are stepped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.env.batched import AsyncBatchedEnv, BatchedEnv
from envmgr.env.contract import EnvContractError
from envmgr.env.gym_spaces import convert_space
from envmgr.env.vector_forms import own
from envmgr.env.vector_infos import RowInfos
from envmgr.spaces import codec_of, indexed

_ITS_OWN = frozenset(("env_id", "players", "elapsed_step"))
"""Infos that are about the pool."""

_SEEDED_ALONE = (
    "rows {} of an EnvPool cannot be seeded alone: a pool takes seeds when it is made. Reset all "
    "of its envs together"
)


class PoolBatch(BatchedEnv):
    """A pool of envs whose `step` and `reset` take any of its rows.

    A pool takes its seeds when it is made: other seeds need a new pool, and a reset of all rows.
    Episodes begin with a `reset` of the row, not with the pool's own reset in the next step.

    Args:
        make: makes a pool in gymnasium's form, given `seed`: an int, or a list of one for each row.
        seed: the seed of the first pool.
        infos: which infos rows are given; None: all but the pool's own.

    Attributes:
        pool: the current pool.
        num_envs: the number of its rows.
    """

    def __init__(
        self,
        make: Callable[[int | list[int]], Any],
        seed: int,
        infos: Sequence[str] | None = None,
    ) -> None:
        self._make = make
        self.pool = make(seed)
        self.num_envs = len(self.pool)
        self.metadata = dict(getattr(self.pool, "metadata", None) or {})
        self.render_mode = getattr(self.pool, "render_mode", None)
        with warnings.catch_warnings():  # of numbers in its spaces that are rounded
            warnings.filterwarnings("ignore", ".*precision lowered", UserWarning)
            self.observation_space = convert_space(self.pool.observation_space)
            self.action_space = convert_space(self.pool.action_space)
        self._seeds = [seed + row for row in range(self.num_envs)]
        self._is_fresh = True
        self._infos = None if infos is None else frozenset(infos)
        layout = codec_of(self.observation_space).layout
        self._obs_is_array = layout is not None and type(layout.skeleton) is int
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._dtype = getattr(self.action_space, "dtype", None)

    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]] | None]:
        """Begin an episode in some rows.

        Raises:
            EnvContractError: they were given params, or seeds that the other rows do not allow.
        """
        if any(params):
            raise EnvContractError("an EnvPool takes no reset params: leave them {}")
        if any(seed is not None for seed in seeds):
            self._seed(rows, seeds)
        self._is_fresh = False
        obs, infos = self.pool.reset(np.array(rows, np.int32))
        order = self._order(rows, infos)
        told = self._told(infos, len(rows))
        each = [own(indexed(obs, k)) for k in order]
        return each, None if told is None else [told[k] for k in order]

    def _seed(self, rows: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Ensure that the pool has these seeds, by making a new one if need be."""
        wanted = dict(zip(rows, seeds, strict=True))
        fits = all(seed in (None, self._seeds[row]) for row, seed in wanted.items())
        if fits and (self._is_fresh or len(rows) < self.num_envs):
            return
        if len(rows) < self.num_envs and not self._is_fresh:
            raise EnvContractError(_SEEDED_ALONE.format(list(rows)))
        self._remake(wanted)

    def _remake(self, wanted: Mapping[int, int | None]) -> None:
        """Make a pool with these seeds for rows; the other rows keep theirs."""
        known = enumerate(self._seeds)
        self._seeds = [old if (seed := wanted.get(i)) is None else seed for i, old in known]
        self.pool.close()
        self.pool = self._make(self._seeds)
        self._is_fresh = True

    def step(self, rows: Sequence[int], actions: Any) -> Sequence[Any]:
        """Take one action in each of some rows."""
        given = np.asarray(actions, dtype=self._dtype)
        is_whole = len(rows) == self.num_envs
        env_ids = self._all if is_whole else np.array(rows, np.int32)
        obs, rewards, terminated, truncated, infos = self.pool.step(given, env_ids)
        order = self._order(rows, infos)
        told = self._told(infos, len(rows))
        if order == list(range(len(rows))):
            obs = obs if self._obs_is_array else [indexed(obs, k) for k in order]
            return obs, rewards, terminated, truncated, told
        obs = obs[order] if self._obs_is_array else [indexed(obs, k) for k in order]
        listed = None if told is None else [told[k] for k in order]
        return obs, rewards[order], terminated[order], truncated[order], listed

    def _order(self, rows: Sequence[int], infos: Mapping[str, Any]) -> list[int]:
        """Return the position of each row's entry in the pool's results."""
        given = infos["env_id"].tolist()
        if given == list(rows):
            return list(range(len(given)))
        where = {row: k for k, row in enumerate(given)}
        return [where[row] for row in rows]

    def _told(self, infos: Mapping[str, Any], count: int) -> RowInfos | None:
        chosen = {k: v for k, v in infos.items() if k not in _ITS_OWN}
        if self._infos is not None:
            chosen = {k: v for k, v in infos.items() if k in self._infos}
        return RowInfos(chosen, range(count), count) if chosen else None

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()

    def attribute(self, row: int, name: str) -> Any:
        """Return an attribute of the pool; `render` is that of the row."""
        if name == "render":
            return lambda mode=None: self.pool.render(env_ids=np.array([row], np.int32))[0]
        return getattr(self, name) if hasattr(type(self), name) else getattr(self.pool, name)


class AsyncPoolBatch(PoolBatch, AsyncBatchedEnv):
    """A pool in its asynchronous mode: `batch_size` below the number of its envs.

    Rows are begun and stepped as requested; `receive` returns those that are done first. A pool
    with other seeds is made when the resets of all rows are requested and none is under way.
    """

    def __init__(
        self,
        make: Callable[[int | list[int]], Any],
        seed: int,
        infos: Sequence[str] | None = None,
    ) -> None:
        super().__init__(make, seed, infos)
        self._unused = set(range(self.num_envs))
        self._left: set[int] = set()
        self.action_space.seed(0)
        self._any_action = self.action_space.sample()

    reset = AsyncBatchedEnv.reset
    step = AsyncBatchedEnv.step

    def leave(self, row: int) -> None:
        """Note that a row no longer takes part."""
        self._left.add(row)

    def may_begin(self, seeds: Mapping[int, int | None], *, others: bool) -> bool:
        """Return whether rows can be reset now: other seeds are possible only for all rows."""
        return self._are_its_own(seeds) or (self._are_all(seeds) and not others)

    def _are_all(self, rows: Iterable[int]) -> bool:
        return len(self._left.union(rows)) == self.num_envs

    def _are_its_own(self, seeds: Mapping[int, int | None]) -> bool:
        """Return whether the pool was made with these seeds and has not used them yet."""
        unused = self._unused
        return all(s is None or (s == self._seeds[i] and i in unused) for i, s in seeds.items())

    def begin(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> None:
        """Begin an episode in some rows."""
        if any(params):
            raise EnvContractError("an EnvPool takes no reset params: leave them {}")
        wanted = dict(zip(rows, seeds, strict=True))
        if not self._are_its_own(wanted):
            if not self._are_all(rows):
                raise EnvContractError(_SEEDED_ALONE.format(list(rows)))
            self._remake(wanted)
            self._unused = set(range(self.num_envs))
        self._unused.difference_update(rows)
        self.pool._reset(np.array(rows, np.int32))  # its `reset` would wait for the results

    def send(self, rows: Sequence[int], actions: Sequence[Any]) -> None:
        """Begin a step of some rows."""
        self.pool.send(np.asarray(actions, dtype=self._dtype), np.array(rows, np.int32))

    def fill(self, rows: Sequence[int]) -> None:
        """Step rows that are in no episode."""
        self._unused.difference_update(rows)
        self.send(rows, [self._any_action] * len(rows))

    def receive(self) -> tuple[Sequence[int], Sequence[Any]]:
        """Wait for the next results."""
        obs, *columns, infos = self.pool.recv()
        rows = infos["env_id"].tolist()
        told = self._told(infos, len(rows))
        each = obs if self._obs_is_array else [indexed(obs, k) for k in range(len(rows))]
        return rows, (each, *columns, told)
