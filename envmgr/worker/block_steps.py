"""Takes the steps that the trainer posts in the shared block, for all envs of a host.

The trainer writes actions and tokens into the rows of envs, and then a number into `posted` of
their host. The host (`BlockStepper.take_posted`) reads the actions of all of its rows at once
(`ActionReader`), has the envs take their steps one after another, each answered in the block, and
rings the trainer's bell if the trainer sleeps. `TimedBlockStepper` also writes down how long steps
and resets take.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any

from envmgr.env import adapt
from envmgr.hot import hot
from envmgr.spaces.columns import in_form
from envmgr.wire.block import (
    RESETS_ASKED,
    RING_EACH,
    RING_MASK,
    Block,
    items,
)
from envmgr.wire.latencies import RESETS, STEPS, note
from envmgr.wire.timeline import BATCH, RESET, STEP, HostLog
from envmgr.worker.batch_runner import column_steps_of
from envmgr.worker.env_runner import BlockRow, StepFunction

_RING_AT_LEAST_S = 200e-6
"""The least time between rings of a host that rings for each env: a parent that is woken for every
one of many cheap steps takes from the hosts what it gains. It looks around by itself, too."""

_NOTHING_SEEN = -1
"""A number that is never posted."""

_SPINS = 16
_LEAST_SHARE = 16

_RowAndTokens = tuple[BlockRow, int, int]
"""A row, and the tokens of the latest step and the latest reset that it has taken."""


# -- actions ------------------------------------------------------------------------------------


class ActionReader:
    """Reads the actions of rows from the block, as private copies.

    Args:
        block: the columns.
        rows: the rows.
        takes_any_number: for each row, whether its env converts actions that are numbers in any
            case.
        kind: which kind of actions the rows take.
    """

    def __init__(
        self, block: Block, rows: list[int], *, takes_any_number: list[bool], kind: int
    ) -> None:
        layout = block.plan.layouts[kind]
        first, end = rows[0], rows[-1] + 1
        self._positions = None if end - first == len(rows) else [row - first for row in rows]
        self._columns = [column[first:end] for column in block.actions_of[kind]]
        self._forms = block.kinds[first:end]
        # Rows that are not in this list get Python's numbers, whatever was sent: C steps the env
        # that is inside the wrapper that converts.
        self._as_sent = [
            row - first
            for row, any_number in zip(rows, takes_any_number, strict=True)
            if not any_number
        ]
        self._layout = layout
        self._is_number = type(layout.skeleton) is int and layout.leaves[0].is_number

    @property
    def readers(self) -> tuple[Any, Callable[[], list[Any]]]:
        """The actions as indexable Python numbers, or None; and a function that reads them all."""
        if self._is_number and not self._as_sent and self._positions is None:
            (column,) = self._columns
            return items(column), column.tolist
        return None, self.read

    def read(self) -> list[Any]:
        """Return the action of each row."""
        if self._is_number:
            actions = self._numbers()
        else:
            leaves = [
                [copy[k, ...] for k in range(len(copy))] if not leaf.is_number else list(copy)
                for leaf, copy in zip(self._layout.leaves, map(_copied, self._columns), strict=True)
            ]
            unflatten = self._layout.unflatten
            actions = [unflatten(parts) for parts in zip(*leaves, strict=True)]
        return actions if self._positions is None else [actions[k] for k in self._positions]

    def _numbers(self) -> list[Any]:
        (column,) = self._columns
        numbers: list[Any] = column.tolist()
        if not self._as_sent:
            return numbers
        forms = self._forms.tobytes()
        if any(forms):  # else all of them are Python's
            dtype = column.dtype
            for k in self._as_sent:
                numbers[k] = in_form(numbers[k], forms[k], dtype)
        return numbers


class MixedActionReader:
    """Reads actions as `ActionReader` does, of rows that take different kinds of actions.

    Args:
        block: the columns.
        rows: the rows.
        kinds: the kind of actions that each of them takes.
        takes_any_number: as for `ActionReader`.
    """

    def __init__(
        self, block: Block, rows: list[int], kinds: list[int], *, takes_any_number: list[bool]
    ) -> None:
        self._count = len(rows)
        self._parts: list[tuple[list[int], ActionReader]] = []
        for kind in set(kinds):
            positions = [k for k in range(len(rows)) if kinds[k] == kind]
            of_kind = [rows[k] for k in positions]
            takes_any = [takes_any_number[k] for k in positions]
            reader = ActionReader(block, of_kind, takes_any_number=takes_any, kind=kind)
            self._parts.append((positions, reader))

    @property
    def readers(self) -> tuple[Any, Callable[[], list[Any]]]:
        """See `ActionReader.readers`."""
        return None, self.read

    def read(self) -> list[Any]:
        """Return the action of each row."""
        actions: list[Any] = [None] * self._count
        for positions, reader in self._parts:
            for position, action in zip(positions, reader.read(), strict=True):
                actions[position] = action
        return actions


def _copied(column: Any) -> Any:
    return column.copy()


# -- steps --------------------------------------------------------------------------------------


def _do_not_ring() -> None:
    """Stand in for the bell of a trainer that runs the steps itself."""


def _skip_step(token: int, action: Any) -> None:
    """Stand in for the step of an env that was closed in the middle of a batch."""


class BlockStepper:
    """Takes the posted steps of all envs of a host.

    Args:
        index: index of the host among the manager's hosts.
        ring: rings the trainer's bell; None if the trainer itself runs the steps.
        timed: whether to say when each step began, because there are time limits.
        spin_s: how long to watch the block before sleeping; 0 never does.

    Attributes:
        ring: rings the trainer's bell.
        interrupted_env_id: the env whose code `take_posted` was running when an exception went
            through it (Ctrl-C, where envs run in the caller); None if that was no env's code.
    """

    def __init__(
        self, index: int, ring: Callable[[], None] | None, *, timed: bool, spin_s: float = 0.0
    ) -> None:
        self._index = index
        self.ring = ring or _do_not_ring
        self._rings = ring is not None
        self._timed = timed
        self._spin_s = self._most_s = spin_s
        self._block_rows: list[BlockRow] = []
        self._steps: list[StepFunction] = []
        self._step_tokens: list[int] = []
        self._reset_tokens: list[int] = []
        # The rows that are to take part, while they are being changed.
        self._next_rows: list[_RowAndTokens] | None = None
        self._batch: tuple[list[BlockRow], list[StepFunction]] = ([], [])
        self._seen = 0
        self._n_messages: Any = (0,) * (index + 1)
        self._fence = threading.Lock()  # of this host alone: it may be one of many threads
        self._n_messages_read = _NOTHING_SEEN
        self.interrupted_env_id: int | None = None
        self._take_in_c: Any = None

    # -- which envs take part ---------------------------------------------------------------

    @property
    def has_rows(self) -> bool:
        """Whether an env takes part."""
        return bool(self._block_rows)

    def add_row(self, block_row: BlockRow) -> None:
        """Have an env take part, in place of the one that had its row before."""
        row, block = block_row.row, block_row.sink.block
        self.remove_row(row)
        self._posted = items(block.posted)
        self._finished = items(block.finished)
        self._n_messages = items(block.messages_sent)
        self._requests = items(block.requests)
        self._reset_requests = items(block.reset_requests)
        self._running = items(block.running)
        self._since = items(block.since)
        self._sleeping = items(block.sleeping)
        # What was posted there before is not for this env.
        new = (block_row, int(block.requests[row]), int(block.reset_requests[row]))
        self._set_rows(sorted((*self._rows_and_tokens(), new), key=lambda known: known[0].row))

    def remove_row(self, row: int) -> None:
        """Have the env of a row take part no more: it is closed, or another one takes its place."""
        block_rows, steps = self._batch
        for position, block_row in enumerate(block_rows):
            if block_row.row == row:
                steps[position] = _skip_step
        known = self._rows_and_tokens()
        left = [one for one in known if one[0].row != row]
        if len(left) < len(known):
            self._set_rows(left)

    def _rows_and_tokens(self) -> list[_RowAndTokens]:
        """Return the rows that take part, with the tokens that each has taken last.

        Where envs run in the caller, an interrupt may have come into `_set_rows`: then the rows
        that it was to set count.
        """
        if self._next_rows is not None:
            return self._next_rows
        return list(zip(self._block_rows, self._step_tokens, self._reset_tokens, strict=True))

    def _set_rows(self, known: list[_RowAndTokens]) -> None:
        """Have these rows take part, in this order."""
        self._next_rows = known
        self._use_rows(known)
        self._next_rows = None

    def _use_rows(self, known: list[_RowAndTokens]) -> None:
        self._block_rows = block_rows = [block_row for block_row, _, _ in known]
        self._step_tokens = [token for _, token, _ in known]
        self._reset_tokens = [token for _, _, token in known]
        self._steps = [block_row.step for block_row in block_rows]
        self._column_steps = column_steps_of(block_rows)
        self._is_lone = len(block_rows) == 1 and not self._timed
        self._take = self._take_lone if self._is_lone else self._take_batch
        if not block_rows:
            return
        self._rows = [block_row.row for block_row in block_rows]
        self._running_values = [row + 1 for row in self._rows]
        self._first, self._end = self._rows[0], self._rows[-1] + 1
        self._is_dense = self._end - self._first == len(block_rows)
        self._read_requests: Callable[[], list[int]] = (
            self._requests[self._first : self._end].tolist
            if self._is_dense
            else partial(self._in_rows, self._requests)
        )
        takes_any = [block_row.takes_any_number for block_row in block_rows]
        block, kinds = block_rows[0].sink.block, [one.action_kind for one in block_rows]
        actions: ActionReader | MixedActionReader
        if len(set(kinds)) == 1:
            rows, kind = self._rows, kinds[0]
            actions = ActionReader(block, rows, takes_any_number=takes_any, kind=kind)
        else:
            actions = MixedActionReader(block, self._rows, kinds, takes_any_number=takes_any)
        self._readers = actions.readers
        if hot is not None:
            since = self._since if self._timed else None
            self._take_in_c = hot.BatchOfSteps(hot.OrdinaryStep, self._running, since, self._index)

    def has_new_messages(self) -> bool:
        """Return whether messages have been sent to this host since the last call."""
        read, self._n_messages_read = self._n_messages_read, self._n_messages[self._index]
        return bool(read != self._n_messages_read)

    def _spin(self, seen: int) -> bool:
        """Watch for something to do, for a while; return whether there is something.

        How long it watches depends on how it went before: if the trainer takes its time, watching
        is not worth it.
        """
        posted, index = self._posted, self._index
        end = monotonic() + self._spin_s
        while monotonic() < end:
            for _ in range(_SPINS):
                if posted[index] != seen:
                    self._spin_s = self._most_s
                    return True
        self._spin_s = max(self._spin_s / 2, self._most_s / _LEAST_SHARE)
        return False

    # -- steps ------------------------------------------------------------------------------

    def run(self, await_bell: Callable[[], bool]) -> bool | None:
        """Take the steps that are posted, batch after batch, until there is something else to do.

        Args:
            await_bell: sleeps until the host's bell rings, and returns False if there is more to do
                than posted steps.

        Returns:
            Whether resets follow the batch that was taken last; None if the host has slept since
            that batch.
        """
        index, posted, sleeping, own_fence = self._index, self._posted, self._sleeping, self._fence
        n_messages, n_read, watches = self._n_messages, self._n_messages_read, self._most_s > 0.0
        while True:
            seen = self._seen
            if posted[index] != seen:
                follows = self.take_posted()
                if follows or n_messages[index] != n_read:
                    return follows
                continue
            if watches and self._spin(seen):
                continue
            sleeping[index] = True
            with own_fence:
                pass
            is_rung = posted[index] != seen or await_bell()
            sleeping[index] = False
            if not is_rung:
                return None

    def take_posted(self) -> bool | None:
        """Take one batch of posted steps.

        Returns:
            Whether resets follow; None if nothing was posted.
        """
        if self._next_rows is not None:  # a change of them was interrupted
            self._set_rows(self._next_rows)
        if not self._block_rows or (posting := self._posted[self._index]) == self._seen:
            return None
        follows = self._take(posting)
        self._seen = posting
        if posting & RESETS_ASKED:
            follows = self._take_resets() or follows
        self._finished[self._index] = posting
        if self._rings:
            with self._fence:
                pass
            if self._sleeping[-1] and (posting & RING_MASK or self._is_last(posting)):
                self.ring()
        return bool(follows)

    def _take_lone(self, posting: int) -> bool | None:
        """Do what `_take_batch` does, for an env that is alone."""
        token, tokens, number = self._requests[self._first], self._step_tokens, self._readers[0]
        if token == tokens[0]:
            return False
        try:
            self._seen, tokens[0] = posting, token
            return self._steps[0](token, self._readers[1]()[0] if number is None else number[0])
        except BaseException:  # as in `_take_batch`
            self.interrupted_env_id = self._block_rows[0].sink.env_id
            raise

    def _take_batch(self, posting: int) -> bool:
        """Take the steps of a batch; return whether resets follow."""
        self._batch = block_rows, steps = self._block_rows, self._steps
        tokens, in_c, follows = self._step_tokens, self._take_in_c, False
        rings_for_each = bool(posting & RING_EACH)  # also where it was to ring at the end anyhow
        requests, rung_s = self._read_requests(), monotonic() if rings_for_each else 0.0
        if self._column_steps:
            follows = self._take_columns(requests)
            if (tokens := self._step_tokens) == requests:
                self.note_idle()
                return follows
        actions = self._readers[1]()
        if not self._block_rows:  # a signal handler has closed all of them
            return False
        running, index, values = self._running, self._index, self._running_values
        since, position = self._since if self._timed else None, -1
        if in_c is not None:
            in_c.position = -1  # an interrupt may come before it is called
        try:
            self._seen, self._step_tokens = posting, requests
            if hot is not None and not rings_for_each:
                return in_c(steps, requests, tokens, actions, values) or follows
            for position, (step, token, action) in enumerate(
                zip(steps, requests, actions, strict=True)
            ):
                if token == tokens[position]:
                    continue
                if since is not None:
                    since[index] = monotonic()
                running[index] = values[position]
                if step(token, action):
                    follows = True
                if rings_for_each and (now := monotonic()) - rung_s >= _RING_AT_LEAST_S:
                    self.ring_if_asleep()
                    rung_s = now
        except BaseException:  # Ctrl-C, where envs run in the caller: the others are not lost
            if in_c is not None and not rings_for_each:
                position = in_c.position
            self.interrupted_env_id = None if position < 0 else block_rows[position].sink.env_id
            if block_rows is self._block_rows:
                self._step_tokens = [*requests[: position + 1], *tokens[position + 1 :]]
            self._seen = _NOTHING_SEEN
            raise
        self.note_idle()
        return follows

    def _take_columns(self, requests: list[int]) -> bool:
        """Take the steps of batched envs that go in columns; return whether resets follow."""
        follows, block_rows = False, self._block_rows
        for first, end, column_steps in self._column_steps:
            before = self._step_tokens
            new, old = requests[first:end], before[first:end]
            if new == old:
                continue
            self.note_running(self._rows[first])
            try:
                self._step_tokens = [*before[:first], *new, *before[end:]]  # also if interrupted
                done = column_steps.take(new, old)
                if done is None:
                    self._step_tokens = before
            except BaseException:  # as in `_take_batch`
                self.interrupted_env_id = block_rows[first].sink.env_id
                self._seen = _NOTHING_SEEN
                raise
            if not self._block_rows:  # as in `_take_batch`
                return False
            follows = follows or bool(done)
        return follows

    def _take_resets(self) -> bool:
        """Have the envs reset for which a reset was posted; return whether there are any."""
        if not self._block_rows:  # as in `_take_batch`
            return False
        requests, before = self._in_rows(self._reset_requests), self._reset_tokens
        self._reset_tokens = requests
        for block_row, token, known in zip(self._block_rows, requests, before, strict=True):
            if token != known:
                block_row.runner.reset_later(block_row.sink, token)
        return requests != before

    def _in_rows(self, column: Any) -> list[int]:
        """Return the items of a column that belong to the envs."""
        numbers: list[int] = column[self._first : self._end].tolist()
        return numbers if self._is_dense else [numbers[row - self._first] for row in self._rows]

    def note_running(self, row: int) -> None:
        """Say in the block that the env of a row is running from now on."""
        if self._timed:
            self._since[self._index] = monotonic()
        self._running[self._index] = row + 1

    def note_idle(self) -> None:
        """Say in the block that no env is running from now on."""
        if self._block_rows:
            self._running[self._index] = 0
            if self._timed:
                self._since[self._index] = monotonic()

    # -- the trainer's bell -----------------------------------------------------------------

    def _is_last(self, posting: int) -> bool:
        """Return whether all hosts that have the same posting have finished it.

        If two finish at once, at least one of them finds that all have: each says that it has
        finished before it looks. The host that was rung last is checked first, because it is the
        one most likely to be still busy.
        """
        posted, finished = self._posted, self._finished
        for index in range(len(posted) - 1, -1, -1):
            if posted[index] == posting and finished[index] != posting:
                return False
        return True

    def ring_if_asleep(self) -> None:
        """Ring the trainer's bell if the trainer sleeps."""
        if self._block_rows and self._rings:
            with self._fence:
                pass
            if self._sleeping[-1]:
                self.ring()


# -- steps whose times are measured -------------------------------------------------------------

_COST_S = 2e-6
"""What measuring one step costs, at most."""

_SHARE = 0.005
"""The share of the steps' time that may be spent on measuring them."""

_MOST_SKIPPED = 511

_SLOW = 4
"""A batch that takes this many times as long as the last measured one is looked into."""


class TimedBlockStepper(BlockStepper):
    """Takes steps as `BlockStepper` does, and writes into the block how long steps and resets take.

    It skips as many batches as it takes to keep the cost small, depending on how long the last
    measured batch took. The counts of a measured batch then stand for the skipped ones, too, so
    that the counts are nearly those of all steps.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._skip = 0
        self._n_skipped = 0
        self._weight = 1.0
        self._slow_s = 0.0
        self._plain_s = math.inf
        self._plain_steps: list[StepFunction] = []
        self._timed_steps: list[StepFunction] = []
        self._step_counts: list[Any] = []
        self._reset_counts: dict[int, Any] = {}
        self._log: HostLog | None = None

    def _use_rows(self, known: list[_RowAndTokens]) -> None:
        super()._use_rows(known)
        if not self._block_rows:
            return
        block = self._block_rows[0].sink.block
        latencies = block.latencies
        if block.plan.events:
            at = slice(self._index, self._index + 1)
            self._log = HostLog(block.events[self._index], block.n_events[at])
        self._step_counts = [items(latencies[STEPS, row]) for row in self._rows]
        self._reset_counts = {
            id(one.runner.env): (one.row, items(latencies[RESETS, one.row]))
            for one in self._block_rows
        }
        self._plain_steps = self._steps
        triples = zip(self._steps, self._rows, self._step_counts, strict=True)
        self._timed_steps = [self._timing(*triple) for triple in triples]
        if self._is_lone:
            self._steps = [self._sampling(self._plain_steps[0], self._timed_steps[0])]

    def _timing(self, take: StepFunction, row: int, counts: Any) -> StepFunction:
        """Return a step function that is measured."""
        log = self._log

        def step(token: int, action: Any) -> bool | None:
            began = monotonic()
            follows = take(token, action)
            ended = monotonic()
            note(counts, ended - began, self._weight)
            if log is not None:
                log.note(STEP, row, began, ended, int(self._weight) - 1)
            return follows

        return step

    def _sampling(self, take: StepFunction, timed: StepFunction) -> StepFunction:
        """Return the step function of a lone env, which is measured now and then."""

        def step(token: int, action: Any) -> bool | None:
            if self._skip:
                self._skip -= 1
                self._n_skipped += 1
                return take(token, action)
            self._weight = 1.0 + self._n_skipped
            began = monotonic()
            follows = timed(token, action)
            self._plan_skips(monotonic() - began, 1)
            return follows

        return step

    def _plan_skips(self, took_s: float, n_steps: int) -> None:
        """Decide how many batches to skip, after one that was measured.

        Measuring makes cheap steps take several times as long: what counts is how long they take
        without it, at best, in the batches that were skipped.
        """
        plain_s = max(min(took_s, self._plain_s), _COST_S)
        self._skip = min(int(n_steps * _COST_S / (_SHARE * plain_s)), _MOST_SKIPPED)
        self._n_skipped, self._plain_s = 0, math.inf
        self._slow_s = took_s * _SLOW

    def _take_batch(self, posting: int) -> bool:
        # The class is named, as `super()` costs as much as the clock, and this runs for each batch.
        if self._skip:
            self._skip -= 1
            self._n_skipped += 1
            began = monotonic()
            follows = BlockStepper._take_batch(self, posting)
            ended = monotonic()
            if (took_s := ended - began) < self._plain_s:
                self._plain_s = took_s
            elif took_s > self._slow_s:  # one of the envs is slow: find out which, next time
                self._skip = 0
            if self._log is not None:
                self._log.note(BATCH, -1, began, ended)
            return follows
        plain, timed = self._steps, self._timed_steps
        self._steps, self._weight = timed, 1.0 + self._n_skipped
        began = monotonic()
        try:
            return BlockStepper._take_batch(self, posting)
        finally:
            if self._steps is timed:  # else others take part by now
                self._steps = plain
            ended = monotonic()
            self._plan_skips(ended - began, len(timed))
            if self._log is not None:
                self._log.note(BATCH, -1, began, ended)

    def _take_columns(self, requests: list[int]) -> bool:
        if self._steps is not self._timed_steps:
            return super()._take_columns(requests)
        before, began = self._step_tokens, monotonic()
        follows = super()._take_columns(requests)
        ended = monotonic()
        took_s, now = ended - began, self._step_tokens
        positions = [
            position
            for first, end, _ in self._column_steps
            for position in range(first, end)
            if now[position] != before[position]
        ]
        for position in positions:
            note(self._step_counts[position], took_s / len(positions), self._weight)
            if self._log is not None:
                n_skipped = int(self._weight) - 1
                self._log.note(STEP, self._rows[position], began, ended, n_skipped)
        return follows

    # -- resets -----------------------------------------------------------------------------

    def reset_env(self, env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset an env as `adapt.reset_env` does, and measure it."""
        began = monotonic()
        result = adapt.reset_env(env, params)
        self.note_reset(env, monotonic() - began)
        return result

    def note_reset(self, env: Any, seconds: float) -> None:
        """Count the reset of an env; do nothing if the env has no row."""
        row, counts = self._reset_counts.get(id(env), (-1, None))
        if counts is not None:
            note(counts, seconds)
            if self._log is not None:
                ended = monotonic()
                self._log.note(RESET, row, ended - seconds, ended)


def block_stepper(
    index: int, ring: Callable[[], None] | None, *, measures: bool, **options: Any
) -> BlockStepper:
    """Return the stepper that takes the posted steps of a host.

    Args:
        index: see `BlockStepper`.
        ring: likewise.
        measures: whether the times of steps and resets are measured.
        **options: see `BlockStepper`.
    """
    kind = TimedBlockStepper if measures else BlockStepper
    return kind(index, ring, **options)
