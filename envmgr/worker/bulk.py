"""Steps of a batched env that are posted in the block: taken, and answered, in columns.

What there is to say of a row besides (an info, a failure) is said by `RunningEnv.take_step`.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from envmgr.env.batched import BatchedEnv, step_results_of
from envmgr.env.contract import TERMINATED, TOLD, TRUNCATED, StepResult
from envmgr.spaces import Array
from envmgr.types import is_abnormal
from envmgr.wire.block import AFTER_SHIFT, DONE, ENDING_SHIFT, HAS_INFO, INFO_BYTES, items
from envmgr.wire.infos import InfoEncoder
from envmgr.wire.messages import AfterStep
from envmgr.worker.batches import RunningBatch
from envmgr.worker.columns import Columns, columns_of, firsts_of, spread
from envmgr.worker.rows import Reset, RunningRow, Step

if TYPE_CHECKING:  # a seat is where steps come from
    from envmgr.worker.seats import Seat

_TOLD = TOLD << ENDING_SHIFT
_TERMINATED = np.uint16(TERMINATED << ENDING_SHIFT | DONE)
_TRUNCATED = np.uint16(TRUNCATED << ENDING_SHIFT | DONE)


_Begun = Sequence[tuple[int, Sequence[Any]]]
"""Rows whose next episodes have begun, and what is to be sent of that."""


class BulkSteps:
    """Takes the posted steps of all rows of a batch together.

    Args:
        batch: whose rows they are.
        seats: of all of them.

    Attributes:
        firsts_of: returns what `reset` returned of some rows as an array, as `columns.firsts_of`.
    """

    def __init__(self, batch: RunningBatch, seats: Sequence[Seat]) -> None:
        self._batch = batch
        self._sinks = [seat.sink for seat in seats]
        self._rows: list[RunningRow] = [seat.running for seat in seats]  # type: ignore[misc]
        self._count = len(seats)
        self._all = list(range(self._count))
        self._array = np.arange(self._count)
        block, lone = seats[0].sink.block, self._rows[0].writer.lone
        if lone is None:
            raise RuntimeError("rows without places: a defect of envmgr, please report it")
        first = seats[0].row
        rows = slice(first, first + self._count)
        self._requests, self._replies = block.requests[rows], block.replies[rows]
        self._rewards, self._flags = block.rewards[rows], block.flags[rows]
        self._infos = block.infos[rows]
        self._encode = InfoEncoder(INFO_BYTES).encode
        self._made = np.empty(self._count, np.uint16)  # the flags of a step, until they are written
        (column,) = block.actions_of[seats[0].action_kind]
        self._actions = column[rows]
        self._reset_flags = items(block.reset_flags[rows])
        self._resets = items(block.resets[rows])
        self._plain_resets = [
            row.plain_reset(sink) for row, sink in zip(self._rows, self._sinks, strict=True)
        ]
        refuses = lone.finite is not None, self._rows[0].refuses_non_finite
        self._columns = partial(columns_of, dtype=lone.dtype, shape=lone.shape, finite=refuses)
        self.firsts_of = partial(firsts_of, dtype=lone.dtype, shape=lone.shape, finite=refuses[0])
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
            not batch.is_async
            and env_ids == list(batch.env_ids)
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
        if changed != batch.in_episode or batch.steps:
            return None
        tokens, actions, mask = self._requests.copy(), self._actions.copy(), None
        rows, first = self._array, 0
        if changed != self._ones:
            mask = np.frombuffer(changed, np.bool_)
            rows = mask.nonzero()[0]
            if first := int(rows[0]):
                self._sinks[first].announce(int(tokens[first]))
        try:
            result = self._run(batch.built, rows, actions, mask)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return batch.fail(self._step_of(first, tokens), error)
        if batch.resets:
            batch.begin_late()
        if type(result) is Columns:  # `isinstance` asks longer
            return self._answer(rows, result, tokens, mask)
        some, step_results = rows.tolist(), cast("list[StepResult]", result)
        self.lend(some)
        batch.answer({row: self._step_of(row, tokens) for row in some}, step_results)
        self.take_back(some)
        return batch.is_postponed

    def _step_of(self, row: int, tokens: Array) -> Step:
        return Step(self._rows[row], self._sinks[row], int(tokens[row]), None)

    def _run(
        self, env: BatchedEnv, rows: Array, actions: Array, mask: Array | None
    ) -> Columns | list[StepResult]:
        """Step the env; return what that gave as columns, or as step results if it is none."""
        if mask is None:
            result = env.step(self._all, actions)
        elif env.step_whole is not None:
            result = env.step_whole(rows, actions)
        else:
            some = rows.tolist()
            result = env.step(some, actions[rows])
            columns = self._columns(result, len(some))
            if columns is not None:
                return spread(columns, rows, self._count)
            return step_results_of(env, result, len(some))
        columns = self._columns(result, self._count)
        if columns is not None:
            return columns
        step_results = step_results_of(env, result, self._count)
        return step_results if mask is None else [step_results[row] for row in rows.tolist()]

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, rows: Array, columns: Columns, tokens: Array, mask: Array | None) -> bool:
        obs, rewards, terminated, truncated, told, _ = columns
        place = self._written(rows, obs, is_whole=mask is None)
        any_ended = 1 in terminated.tobytes() or 1 in truncated.tobytes()
        if mask is None and not told and not any_ended:
            self._rewards[...] = rewards
            self._flags[...] = place | _TOLD
            self._replies[...] = tokens  # last: from now on the answers count
            return self._batch.is_postponed
        flags = self._made
        flags[...] = place | _TOLD
        odd = self._tell(columns, flags, mask) if told else ()
        begun: _Begun = ()
        if any_ended:
            flags |= terminated * _TERMINATED
            flags |= truncated * _TRUNCATED
            ended = np.logical_or(terminated, truncated)
            if mask is not None:
                ended &= mask
            begun = self._end(ended.nonzero()[0].tolist(), flags, tokens, odd)
        where: Any = True if mask is None else mask
        if odd:
            where = np.ones(self._count, np.bool_) if mask is None else mask.copy()
            where[odd] = False
        np.copyto(self._rewards, rewards, where=where)
        np.copyto(self._flags, flags, where=where)
        np.copyto(self._replies, tokens, where=where)  # last, as above
        if odd:
            self._tell_odd(odd, columns, tokens)
        for row, replies in begun:
            self._rows[row].send(self._sinks[row], int(tokens[row]), replies)
        return self._batch.is_postponed

    def _written(self, rows: Array, obs: Array, *, is_whole: bool) -> Any:
        """Write observations; return the place, or the places of all rows, that they are at."""
        place = self._next
        if place is None and is_whole and self._places == self._same[self._places[0]]:
            place = self._places[0]
        if place is None:
            places = self._place_array.copy()
            where = places[rows]
            self._arena[where, self._first + rows] = obs[rows]
            self._place_array[rows] = np.frombuffer(self._after, np.uint8)[where]
            return places
        if is_whole:
            self._by_place[place][...] = obs
        else:
            self._by_place[place][rows] = obs[rows]
        after = self._after[place]
        if self._next is None:
            self._places[:] = self._same[after]
        else:
            self._next = after
        return place

    def _tell(self, columns: Columns, flags: Array, mask: Array | None) -> list[int]:
        """Write infos beside the answers; return the rows whose infos there is no room for."""
        odd: list[int] = []
        infos, written, encode = columns.infos, self._infos, self._encode
        for row in columns.told:
            if mask is not None and not mask[row]:
                continue
            info = infos[row]
            is_plain = type(info) is dict and not is_abnormal(info)
            data = encode(info) if is_plain else None
            if data is None:
                odd.append(row)
            else:
                written[row, : len(data)] = memoryview(data)
                flags[row] |= HAS_INFO
        return odd

    def _end(self, ended: list[int], flags: Array, tokens: Array, odd: Sequence[int]) -> _Begun:
        """End the episodes of rows, but for odd ones, and write what follows.

        Returns:
            What is to be sent when that has been answered.
        """
        batch, inplace = self._batch, []
        resets: dict[int, Reset] = {}
        batch.note_ended(ended)
        plainly = AfterStep.RESETS_LATE if batch.is_late else AfterStep.RESETS
        for row in ended:
            if row in odd:
                continue
            running = self._rows[row]
            batch.in_episode[row] = False
            if running.is_plain and running.episodes_left > 0:
                running.episodes += 1
                running.episodes_left -= 1
                flags[row] |= plainly << AFTER_SHIFT
                if running.plan.inplace and not batch.is_late:
                    inplace.append(row)
                else:
                    resets[row] = self._plain_resets[row]
                continue
            begins = not batch.is_late and running.resets_inplace
            after = running.end_episode()
            flags[row] |= after << AFTER_SHIFT
            if after is AfterStep.RESETS and begins:
                inplace.append(row)
            elif after is AfterStep.RESETS or after is AfterStep.RESETS_LATE:
                resets[row] = running.beginning(self._sinks[row], int(tokens[row]))
        batch.want_resets(resets)
        if not inplace or batch.begin_inplace([self._rows[row] for row in inplace], tokens):
            return ()
        return [(row, self._rows[row].begin(self._sinks[row], int(tokens[row]))) for row in inplace]

    def begin(self, rows: list[int], obs: Array, tokens: Array | None) -> None:
        """Answer the resets of rows, which follow steps.

        Args:
            rows: which.
            obs: their first observations: (k, *shape).
            tokens: of the steps of all rows; None: of those that were answered last.
        """
        in_episode, flags, resets = self._batch.in_episode, self._reset_flags, self._resets
        tokens = self._replies if tokens is None else tokens
        for row, first in zip(rows, obs, strict=True):
            running = self._rows[row]
            writer = running.writer
            flags[row] = place = writer.reset_place
            writer.reset_place = writer.after[place]
            self._arena[place, self._first + row] = first
            running.env.reset_info = {}
            in_episode[row] = True
            resets[row] = tokens[row]  # last: from now on the answer counts

    def _tell_odd(self, odd: list[int], columns: Columns, tokens: Array) -> None:
        """Answer the steps of which there is more to say one by one."""
        batch = self._batch
        result = tuple(column[odd] for column in columns[:4])
        step_results = step_results_of(
            batch.built, (*result, [columns.infos[row] for row in odd]), len(odd)
        )
        before = [self._before(row) for row in odd]
        for row, place in zip(odd, before, strict=True):
            self._rows[row].writer.step_place = place
        batch.answer({row: self._step_of(row, tokens) for row in odd}, step_results)

    def _before(self, row: int) -> int:
        """Return the place of the observation that was written last."""
        now = self._places[row] if self._next is None else self._next
        return self._after.index(now)


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
