"""Steps of a batched env that are posted in the block: taken, and answered, in columns.

What there is to say of a row besides (an info, a failure) is said by `RunningEnv.take_step`.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from envmgr.env.batched import BatchedEnv, outcomes_of
from envmgr.env.contract import TERMINATED, TOLD, TRUNCATED, Outcome
from envmgr.spaces import Array
from envmgr.wire.block import AFTER_SHIFT, DONE, ENDING_SHIFT, items
from envmgr.wire.messages import AfterStep
from envmgr.worker.batches import RunningBatch
from envmgr.worker.rows import RunningRow, Step

if TYPE_CHECKING:  # a seat is where steps come from
    from envmgr.worker.seats import Seat

_TOLD = TOLD << ENDING_SHIFT
_TERMINATED = np.uint16(TERMINATED << ENDING_SHIFT | DONE)
_TRUNCATED = np.uint16(TRUNCATED << ENDING_SHIFT | DONE)


_Begun = Sequence[tuple[int, Sequence[Any]]]
"""Rows whose next episodes have begun, and what is to be sent of that."""


class _Columns(NamedTuple):
    """What a step gave, with an entry for each row that took it; what is odd is in `told`."""

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    told: Sequence[int]
    infos: Any


class BulkSteps:
    """Takes the posted steps of all rows of a batch together.

    Args:
        batch: whose rows they are.
        seats: of all of them.
    """

    def __init__(self, batch: RunningBatch, seats: Sequence[Seat]) -> None:
        self._batch = batch
        self._sinks = [seat.sink for seat in seats]
        self._rows: list[RunningRow] = [seat.running for seat in seats]  # type: ignore[misc]
        self._count = len(seats)
        self._all = list(range(self._count))
        block, lone = seats[0].sink.block, self._rows[0].writer.lone
        if lone is None:
            raise RuntimeError("rows without places: a defect of envmgr, please report it")
        first = seats[0].row
        rows = slice(first, first + self._count)
        self._requests, self._replies = block.requests[rows], block.replies[rows]
        self._rewards, self._flags = block.rewards[rows], block.flags[rows]
        self._flag_items = items(self._flags)
        (column,) = block.actions_of[seats[0].action_kind]
        self._actions = column[rows]
        self._dtype, self._shape = lone.dtype, (self._count, *lone.shape)
        self._finite = lone.finite is not None
        self._takes_any_reward = not self._rows[0].refuses_non_finite
        arena = lone.arena
        in_arena = slice(lone.row, lone.row + self._count)
        self._by_place = [place[in_arena] for place in arena[: len(lone.after)]]
        self._arena, self._first = arena, lone.row
        self._after = bytes(lone.after)
        self._places = bytearray(row.writer.step_place for row in self._rows)
        self._place_array: Array = np.frombuffer(self._places, np.uint8)
        self._same = [bytes([place]) * self._count for place in range(len(lone.after))]
        self._ones = bytes([1]) * self._count
        # Where no row skips a step while it shows an observation of one, all may be at one place.
        self._next = 0 if len(lone.after) == 2 and not batch.partial_steps else None

    @staticmethod
    def of(batch: RunningBatch, seats: Sequence[Seat]) -> BulkSteps | None:
        """Return what takes steps of these rows in columns; None if they are no columns."""
        env_ids = [seat.sink.env_id for seat in seats]
        layout = seats[0].sink.block.plan.layouts[seats[0].action_kind]
        fits = (
            env_ids == list(batch.env_ids)
            and type(layout.skeleton) is int
            and [seat.row - seats[0].row for seat in seats] == list(range(len(seats)))
            and all(seat.running.writer.lone is not None for seat in seats)
        )
        return BulkSteps(batch, seats) if fits else None

    # -- places of the rows' observations ----------------------------------------------------

    def lend(self, rows: Sequence[int]) -> None:
        """Have the writers of rows know their places, for steps that are answered one by one."""
        if self._next is not None:
            self._places[:] = self._same[self._next]
        for row in rows:
            self._rows[row].writer.step_place = self._places[row]

    def take_back(self, rows: Sequence[int]) -> None:
        """Go on after steps that were answered one by one."""
        for row in rows:
            self._places[row] = self._rows[row].writer.step_place
        if self._next is not None:
            self._next = self._after[self._next]

    # -- steps ------------------------------------------------------------------------------

    def take(self, requests: list[int], taken: list[int]) -> bool | None:
        """Take the steps that are posted anew.

        Args:
            requests: the tokens that are posted, of all rows.
            taken: those that were taken before.

        Returns:
            Whether resets follow; None if the steps have to be taken one by one.
        """
        batch, count = self._batch, self._count
        if requests.count(requests[0]) == count and taken.count(taken[0]) == count:
            changed = self._ones
        else:
            changed = bytes(map(operator.ne, requests, taken))
        if changed != batch.in_episode or batch.has_steps:
            return None
        is_whole = changed == self._ones
        rows = self._all if is_whole else [row for row, new in enumerate(changed) if new]
        tokens = self._requests.copy()
        actions = self._actions.copy() if is_whole else self._actions[rows]
        first = self._step_of(rows[0], tokens)
        result = batch.run_step(first, lambda env: self._run(env, rows, actions))
        if result is None:
            return False
        if isinstance(result, _Columns):
            return self._answer(rows, result, tokens, is_whole=is_whole)
        self.lend(rows)
        batch.answer({row: self._step_of(row, tokens) for row in rows}, result)
        self.take_back(rows)
        return batch.has_resets

    def _step_of(self, row: int, tokens: Array) -> Step:
        return Step(self._rows[row], self._sinks[row], int(tokens[row]), None)

    def _run(
        self, env: BatchedEnv, rows: Sequence[int], actions: Array
    ) -> _Columns | list[Outcome]:
        """Step the env; return what that gave as columns, or as outcomes if it is none."""
        result = env.step(rows, actions)
        columns = self._columns(result, len(rows))
        return outcomes_of(env, result, len(rows)) if columns is None else columns

    def _columns(self, result: Any, count: int) -> _Columns | None:
        if type(result) is not tuple or len(result) != 5:
            return None
        obs, rewards, terminated, truncated, infos = result
        fits = (
            type(obs) is np.ndarray
            and obs.dtype == self._dtype
            and obs.shape == (count, *self._shape[1:])
            and type(rewards) is np.ndarray
            and rewards.shape == (count,)
            and rewards.dtype.kind in "fiub"
            and _are_flags(terminated, count)
            and _are_flags(truncated, count)
        )
        if not fits:
            return None
        told: Sequence[int] | None = () if infos is None else getattr(infos, "told", None)
        if told is None:
            if not isinstance(infos, (list, tuple)) or len(infos) != count:
                return None
            told = [k for k, info in enumerate(infos) if type(info) is not dict or info]
        if self._finite and not np.isfinite(obs).all():
            return None
        if not self._takes_any_reward and not np.isfinite(rewards).all():
            return None
        return _Columns(obs, rewards, terminated, truncated, told, infos)

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, rows: list[int], columns: _Columns, tokens: Array, *, is_whole: bool) -> bool:
        obs, rewards, terminated, truncated, told, _ = columns
        places = self._written(rows, obs, is_whole=is_whole)
        ended = np.logical_or(terminated, truncated)
        any_ended = ended.any()
        if is_whole:
            self._rewards[...] = rewards
            flags = self._flags
        else:
            self._rewards[rows] = rewards
            flags = np.empty(len(rows), np.uint16)
        flags[...] = places
        flags |= np.uint16(_TOLD)
        begun: _Begun = ()
        if any_ended:
            flags |= terminated * _TERMINATED
            flags |= truncated * _TRUNCATED
            begun = self._end(rows, ended.nonzero()[0].tolist(), flags, tokens, told)
        if not is_whole:
            self._flags[rows] = flags
        if not told and is_whole:
            self._replies[...] = tokens  # last: from now on the answers count
        else:
            plain = [row for k, row in enumerate(rows) if k not in set(told)] if told else rows
            self._replies[plain] = tokens[plain]
            self._tell(rows, columns, tokens)
        for row, replies in begun:
            self._rows[row].send(self._sinks[row], int(tokens[row]), replies)
        return self._batch.has_resets

    def _written(self, rows: list[int], obs: Array, *, is_whole: bool) -> Any:
        """Write observations; return the place, or the places, that they are at."""
        place = self._next
        if place is None and is_whole and self._places == self._same[self._places[0]]:
            place = self._places[0]
        if place is None:
            where = self._place_array[rows].copy()
            self._arena[where, self._first + np.array(rows)] = obs
            self._place_array[rows] = np.frombuffer(self._after, np.uint8)[where]
            return where
        if is_whole:
            self._by_place[place][...] = obs
        else:
            self._by_place[place][rows] = obs
        after = self._after[place]
        if self._next is None:
            self._places[:] = self._same[after]
        else:
            self._next = after
        return place

    def _end(
        self, rows: list[int], ended: list[int], flags: Array, tokens: Array, told: Sequence[int]
    ) -> _Begun:
        """End episodes of which there is nothing else to say, and write what follows.

        Returns:
            What is to be sent when that has been answered.
        """
        batch, inplace = self._batch, []
        batch.note_ended([rows[k] for k in ended])
        for k in ended:
            if told and k in told:
                continue
            row = rows[k]
            running = self._rows[row]
            batch.in_episode[row] = False
            begins = running.resets_inplace
            after = running.end_episode()
            flags[k] |= after << AFTER_SHIFT
            if after is AfterStep.RESETS and begins:
                inplace.append(row)
            elif after is AfterStep.RESETS or after is AfterStep.RESETS_LATE:
                running.go_on(self._sinks[row], int(tokens[row]))
        if not inplace:
            return ()
        batch.begin_inplace([self._rows[row] for row in inplace])
        return [(row, self._rows[row].begin(self._sinks[row], int(tokens[row]))) for row in inplace]

    def _tell(self, rows: list[int], columns: _Columns, tokens: Array) -> None:
        """Answer the steps of which there is more to say."""
        batch, told = self._batch, columns.told
        if not told:
            return
        result = tuple(column[list(told)] for column in columns[:4])
        outcomes = outcomes_of(
            self._rows[0].env.batched, (*result, [columns.infos[k] for k in told]), len(told)
        )
        some = [rows[k] for k in told]
        before = [self._before(row) for row in some]
        for row, place in zip(some, before, strict=True):
            self._rows[row].writer.step_place = place
        batch.answer({row: self._step_of(row, tokens) for row in some}, outcomes)

    def _before(self, row: int) -> int:
        """Return the place of the observation that was written last."""
        now = self._places[row] if self._next is None else self._next
        return self._after.index(now)


def _are_flags(column: Any, count: int) -> bool:
    return type(column) is np.ndarray and column.dtype == np.bool_ and column.shape == (count,)


def bulks_of(seats: Sequence[Seat]) -> list[tuple[int, int, BulkSteps]]:
    """Return what takes the steps of batched envs among these, from and to which position."""
    bulks: list[tuple[int, int, BulkSteps]] = []
    first = 0
    for batch, group in itertools.groupby(seats, lambda seat: seat.batch):
        some = list(group)
        end = first + len(some)
        if batch is not None:
            batch.bulk = BulkSteps.of(batch, some)
            if batch.bulk is not None:
                bulks.append((first, end, batch.bulk))
        first = end
    return bulks
