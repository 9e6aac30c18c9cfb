"""Runs batched envs: one object that steps several envs at once, each of them a row of it.

A row looks to its host like any other env (`RowRunner`). The `BatchRunner` of its env collects the
requests for its rows, and steps and resets them together; the answers are written row by row. If
the results of the rows are nothing but arrays, `ColumnSteps` answers all rows at once. An
`AsyncBatchRunner` serves envs that return results first for the rows that are done first.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, cast

import numpy as np

from envmgr.env import adapt
from envmgr.env.batch_specs import Batch
from envmgr.env.batched import (
    AsyncBatchedEnv,
    BatchedEnv,
    BatchRow,
    First,
    firsts_of,
    step_results_of,
    step_rows,
)
from envmgr.env.contract import (
    ENDING_GIVEN,
    TERMINATED,
    TRUNCATED,
    EnvContractError,
    StepResult,
    env_name,
)
from envmgr.env.vector_infos import RowInfos
from envmgr.spaces import Array
from envmgr.types import EnvFactory, is_abnormal
from envmgr.wire.block import AFTER_SHIFT, DONE, ENDING_SHIFT, HAS_INFO, items
from envmgr.wire.messages import (
    AfterStep,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)
from envmgr.worker.env_runner import BlockRow, EnvRunner, HostContext, as_it_is
from envmgr.worker.sinks import BlockSink, ColumnSink, MessageSink, reraise_interrupt


class RowStep(NamedTuple):
    """A step that one row is to take."""

    runner: RowRunner
    sink: MessageSink
    key: Any
    action: Any


class RowReset(NamedTuple):
    """A reset of one row.

    Attributes:
        env: the row.
        sink: answers the reset.
        key: the request, or a part of it.
        params: the reset params.
        answer: called to answer the reset, once the env has done its part.
        is_requested: whether somebody has asked for it; else it follows the end of an episode.
        is_plain: whether it can be answered in columns.
    """

    env: BatchRow
    sink: MessageSink
    key: Any
    params: dict[str, Any]
    answer: Callable[[], None]
    is_requested: bool
    is_plain: bool = False


class RowRunner(EnvRunner):
    """Runs one row of a batched env, from when it is opened until it is closed.

    Args:
        context: what its host gives it.
        batch: runs its steps and resets.

    Attributes:
        batch: likewise.
        is_plain: whether it is known that there is nothing to be said of how its episodes end and
            begin.
    """

    env: BatchRow
    has_ordinary_steps = False
    is_plain = False

    def __init__(self, env: BatchRow, context: HostContext, batch: BatchRunner) -> None:
        self.batch = batch
        super().__init__(env, context)
        self.reset_env = adapt.reset_env  # the batch is measured, not what each row has of it

    def close(self) -> None:
        """Leave the batched env."""
        super().close()
        self.batch.close_row(self.env.row)

    @property
    def resets_alone(self) -> bool:
        """Whether the env can reset this row while others are in an episode."""
        return self.env.batched.resets_alone

    @property
    def resets_inplace(self) -> bool:
        """Whether the step that ends this episode begins the next one, as far as is known."""
        return super().resets_inplace and not self.batch.begins_with_next_step

    # -- steps ------------------------------------------------------------------------------

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Have the batch take a step, now or later; return whether something is to be run later."""
        return self.batch.submit_step(self.env.row, RowStep(self, sink, key, action))

    def end_episode(self) -> AfterStep:
        """Count the end of an episode, and return what the host does after that."""
        after = super().end_episode()
        if not self.is_plain:
            plan, is_limited = self.plan, self._context.wants_recycling is not None
            is_plain = plan.auto_reset and not (plan.params or is_limited)
            self.is_plain = is_plain and self.env.seeds.are_used_up
        if after is AfterStep.RESETS and self.batch.begins_with_next_step:
            return AfterStep.RESETS_IN_NEXT_STEP
        return after

    def report_exception(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that what the env returned for this row is unusable; return False."""
        self.env.is_in_episode = False
        of_batch = not self.resets_alone
        self._messages.send(sink.exception_reply(key, error, "step", of_batch=of_batch))
        return False

    def report_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env has called the step of this row abnormal; return False."""
        self.env.is_in_episode = False
        failure = RemoteFailure(
            FailureKind.ABNORMAL, "step", info=info, of_batch=not self.resets_alone
        )
        self._messages.send(sink.failure_reply(key, failure))
        return False

    # -- resets -----------------------------------------------------------------------------

    def reset(self, message: Message) -> None:
        """Have a RESET request run later."""
        wanted: ResetRequest = message.payload
        if wanted.dynamic_seed is not None and not self.resets_alone:
            text = (
                "dynamic_seed has each episode of a row be seeded, which takes an env that can "
                "reset some of its rows: leave it None"
            )
            self._messages.refuse(message, "reset", text)
            return
        self.env.first = None  # what an episode was to begin with that is not begun
        self.is_plain = False
        if wanted.seed is not None:
            self.env.seed(wanted.seed, wanted.dynamic_seed)
        answer = partial(super().reset, message)
        reset = RowReset(self.env, self._messages, message, wanted.params, answer, True)
        self.batch.submit_resets({self.env.row: reset})

    def reset_later(self, sink: MessageSink, key: Any) -> None:
        """Have the row reset later, as its plan says."""
        self.batch.submit_resets({self.env.row: self.planned_reset(sink, key, is_requested=True)})

    def begin_episode_later(self, sink: MessageSink, key: Any) -> None:
        """Have the next episode begin later, since one has ended."""
        self.batch.submit_resets({self.env.row: self.planned_reset(sink, key)})

    def planned_reset(self, sink: MessageSink, key: Any, *, is_requested: bool = False) -> RowReset:
        """Return the reset that the plan asks for."""
        answer = partial(self.run_reset, sink, key)
        return RowReset(self.env, sink, key, self.plan.params, answer, is_requested)

    def plain_reset(self, sink: BlockSink) -> RowReset:
        """Return the reset that can follow any step of the row while the row `is_plain`."""

        def answer() -> None:
            self.run_reset(sink, sink.replies[sink.row])

        return RowReset(self.env, sink, None, {}, answer, is_requested=False, is_plain=True)

    def run_reset(self, sink: MessageSink, key: Any) -> None:
        """Answer a reset that the batch has run; do nothing if the row was closed since."""
        if not self._is_closed:
            self.send(sink, key, self.begin_episode(sink, key))

    def begin_episode(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        """Begin the episode that the batch has reset the row for; return the answer's messages."""
        if not isinstance(self.env.first, tuple):
            return super().begin_episode(sink, key)
        observation = self.env.reset()  # which only returns what has begun
        return self._answer_reset(sink, key, observation, self.env.reset_info)


class BatchRunner:
    """Runs a batched env for the env_ids that are its rows.

    The env is built with the first of its rows, and closed with the last. A step is taken as soon
    as all rows that are in an episode were sent their actions; if the env can step some of its rows
    without the others, those that were sent an action do not wait long for the others. Resets are
    run after the requests that have come meanwhile, like all resets that a host begins by itself,
    or with the next step if the env wants that.

    Args:
        batch: which env_ids the rows are.
        context: what its rows are given by their host.

    Attributes:
        is_async: whether results come later than steps and resets are begun.
        only_receives: whether all that is to be run later is to wait for results.
        in_episode: a byte for each row: 1 for those that take actions.
        begins_with_next_step: whether rows whose step has just ended their episode begin the next
            one with the next step of the other rows.
        steps: the steps that rows were sent and that have not been taken.
        resets: the resets of rows that have not been run.
        is_scheduled: whether some of these are to be run later without waiting for the next step.
        column_steps: takes steps of all rows in columns, and keeps the buffers of their
            observations; None if nothing does.
        env: the env, while there are rows.
        is_built: whether there is an env. A signal handler that runs in its code may close all
            rows, and then nobody wants its results any more.
    """

    is_async = False
    only_receives = False
    env: BatchedEnv

    def __init__(self, batch: Batch, spec: EnvFactory, context: HostContext) -> None:
        self._batch = batch
        self._spec = spec
        self._context = context
        self.is_built = False
        self._rows: dict[int, BatchRow] = {}
        self.steps: dict[int, RowStep] = {}
        self.resets: dict[int, RowReset] = {}
        # Rows in an episode that are to be sent an action before the next step; None: all of them.
        self._awaited: set[int] | None = None
        self.is_scheduled = False
        self.in_episode = bytearray(batch.size)
        self.begins_with_next_step = False
        self.column_steps: ColumnSteps | None = None

    @property
    def env_ids(self) -> range:
        """The env_ids of its rows."""
        return self._batch.env_ids

    @property
    def partial_steps(self) -> bool:
        """Whether the env can step any of its rows, and leave the others."""
        return self._batch.partial_steps

    # -- rows -------------------------------------------------------------------------------

    def open_row(self, env_id: int) -> BatchRow:
        """Return a row; build the env first if there is none.

        Raises:
            Exception: the env cannot be built.
        """
        if not self.is_built:
            self.env = self._spec()
            self.env.first_env_id = self._batch.first
            self.is_built = True
        row = env_id - self._batch.first
        with self._closing_on_failure(row):
            self._rows[row] = batch_row = BatchRow(self.env, row, self.in_episode)
        self._awaited = None
        return batch_row

    def runner_of(self, env: BatchRow, context: HostContext) -> EnvRunner:
        """Return the runner of a row.

        Raises:
            Exception: as for `RowRunner`.
        """
        with self._closing_on_failure(env.row):
            return RowRunner(env, context, self)

    @contextlib.contextmanager
    def _closing_on_failure(self, row: int) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever the env's code may raise, SystemExit included
            self.close_row(row)
            raise

    def close_row(self, row: int) -> None:
        """Go on without a row; close the env with the last one."""
        self._rows.pop(row, None)
        self.steps.pop(row, None)
        self.resets.pop(row, None)
        self._awaited = None
        self.in_episode[row] = False
        if not self.is_built:
            return
        try:
            self.env.leave(row)
        except BaseException as error:  # as in `EnvRunner.close`
            reraise_interrupt(error, self._context.settings)
        if self._rows:
            self._schedule_resets()
            return
        self.is_built = False
        try:
            adapt.close_env(self.env)
        except BaseException as error:  # as above
            reraise_interrupt(error, self._context.settings)
        finally:
            del self.env

    # -- what rows are asked for --------------------------------------------------------------

    def submit_step(self, row: int, step: RowStep) -> bool:
        """Have a row take a step; return whether something is to be run later."""
        if self._awaited is None:
            self._awaited = {i for i, env in self._rows.items() if env.is_in_episode}
            self._awaited.difference_update(self.steps)
        self.steps[row] = step
        self._awaited.discard(row)
        if not self._awaited:
            return self._take_steps()
        if self._batch.partial_steps:
            self._schedule()
            return True
        return False

    def submit_resets(self, resets: Mapping[int, RowReset]) -> None:
        """Have rows reset."""
        for row, reset in resets.items():
            self.in_episode[row] = False
            if reset.is_requested:
                self._schedule()
        self._awaited = None
        self.resets.update(resets)
        self._schedule_resets()

    def _schedule_resets(self) -> None:
        """Have resets run later, unless all that are left wait for the next step of other rows."""
        if not (self.resets and self.is_built):
            return
        if not (self.env.begins_late and 1 in self.in_episode):
            self._schedule()

    def _schedule(self) -> None:
        if not self.is_scheduled:
            self.is_scheduled = True
            self._context.run_later(self._run)

    def _run(self) -> None:
        self.is_scheduled = False
        if self.steps and self._batch.partial_steps:
            self._take_steps()
        if self.resets:
            self._run_resets()

    # -- steps ------------------------------------------------------------------------------

    def _take_steps(self) -> bool:
        """Take the steps that rows were sent; return whether resets follow."""
        steps, self.steps, self._awaited = self.steps, {}, None
        rows = sorted(steps)
        first = steps[rows[0]]
        actions = [steps[row].action for row in rows]
        first.sink.announce(first.key, Op.STEP)
        try:
            step_results = step_rows(self.env, rows, actions)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return self.report_exception(first, error)
        if not self.is_built:
            return False
        self.answer_resets_of_step()
        if self.column_steps is not None:
            self.column_steps.give_buffers_to_writers(rows)
        self.answer({row: steps[row] for row in rows}, step_results)
        if self.column_steps is not None:
            self.column_steps.read_buffers_of_writers(rows)
        return self.is_scheduled

    def report_exception(self, step: RowStep, error: BaseException) -> bool:
        """Report to one row that the env's step has raised, which concerns all; return False."""
        reply = step.sink.exception_reply(step.key, error, "step", of_batch=True)
        self._context.messages.send(reply)
        return False

    def answer_resets_of_step(self) -> None:
        """Answer the resets that a step has begun, before their rows take the next step."""
        if self.resets and self.env.begins_late:
            self._run_resets()

    def answer(self, steps: dict[int, RowStep], step_results: Sequence[StepResult]) -> None:
        """Answer the steps of rows one by one."""
        pairs = list(zip(steps.items(), step_results, strict=True))
        self.note_ends(
            [row for row, step_result in zip(steps, step_results, strict=True) if step_result[2]]
        )
        inplace = [s.runner for (_, s), out in pairs if out[2] and s.runner.resets_inplace]
        if inplace:
            pairs = [(step, (copy.deepcopy(obs), *rest)) for step, (obs, *rest) in pairs]
            if self.begin_inplace(inplace):  # until then, observations may be views
                return
        for (row, (runner, sink, key, _)), step_result in pairs:
            self.in_episode[row] = not step_result[2]
            runner.take_step(sink, key, as_it_is, step_result)
        self._schedule_resets()

    def note_ends(self, rows: Sequence[int]) -> None:
        """Find out when rows whose step has ended their episode begin the next one."""
        if rows and self.is_built and self.env.begins_late:
            self.begins_with_next_step = self.in_episode.count(1) > len(rows)

    def begin_inplace(self, rows: Sequence[RowRunner], tokens: Array | None = None) -> bool:
        """Begin the next episodes of rows within the step that has ended the last ones.

        Args:
            rows: the rows.
            tokens: the tokens of the steps of all rows, if they are answered in columns.

        Returns:
            Whether the beginnings were answered, too, or nobody wants an answer any more.
        """
        each, params = [row.env.row for row in rows], [row.plan.params for row in rows]
        if tokens is not None and False not in map(_is_plain, rows):
            nothing = [None] * len(rows)
            return self._begin(each, nothing, params, columns=self.column_steps, tokens=tokens)
        return self._begin(each, [row.env.seeds.due() for row in rows], params)

    # -- resets -----------------------------------------------------------------------------

    def _run_resets(self) -> None:
        """Run the resets that need not wait."""
        resets, others = self.resets, 1 in self.in_episode  # those that are to be reset are not
        is_plain = self.column_steps is not None and False not in map(_is_plain, resets.values())
        if is_plain:
            asked = dict.fromkeys(resets, False)
        else:
            asked = {row: r.is_requested for row, r in resets.items() if r.env.first is None}
        try:
            ready = self._resettable(asked, others=others)
        except BaseException as error:  # it is raised again, and reported, for each row
            reraise_interrupt(error, self._context.settings)
            is_plain, ready = False, set(asked)
            for row in asked:
                resets[row].env.first = error
        rows = sorted(ready | resets.keys() - asked)
        if not rows:
            return
        resets, self._awaited = {row: self.resets.pop(row) for row in rows}, None
        first = resets[rows[0]]
        first.sink.announce(first.key)
        if is_plain:
            n_rows = len(rows)
            if self._begin(rows, [None] * n_rows, [{}] * n_rows, columns=self.column_steps):
                return
        elif due := {row: reset for row, reset in resets.items() if reset.env.first is None}:
            seeds = [reset.env.seeds.due() for reset in due.values()]
            if self._begin(list(due), seeds, [reset.params for reset in due.values()]):
                return
        for reset in resets.values():
            reset.answer()

    def _resettable(self, asked: dict[int, bool], *, others: bool) -> set[int]:
        """Return which of these rows the env can reset now.

        Raises:
            EnvContractError: the env has named other rows.
        """
        ready = set(self.env.resettable(asked, others=others))
        if not ready <= asked.keys():
            raise EnvContractError(
                f"resettable of {env_name(self.env)} was asked about the rows {sorted(asked)}, it "
                f"returned {list(ready)}"
            )
        return ready

    def _begin(
        self,
        rows: list[int],
        seeds: Sequence[int | None],
        params: Sequence[dict[str, Any]],
        *,
        columns: ColumnSteps | None = None,
        tokens: Array | None = None,
    ) -> bool:
        """Reset rows, so that each has what its own `reset` is to return or to raise.

        Args:
            rows: the rows.
            seeds: the seed of each row.
            params: the reset params of each row.
            columns: answers all of these resets, if it can.
            tokens: the tokens of all rows; None: those of their newest steps.

        Returns:
            Whether `columns` has answered, or nobody wants an answer any more.
        """
        observations, began = None, monotonic()
        begun: Sequence[First | BaseException] = ()
        try:
            result = self.env.reset(rows, seeds, params)
            if columns is not None:
                observations = columns.observations_of_reset(result, len(rows))
            if observations is None:
                begun = firsts_of(self.env, result, len(rows))
        except BaseException as error:  # it is raised again, and reported, for each row
            reraise_interrupt(error, self._context.settings)
            begun = [error] * len(rows)
        if not self.is_built:
            return True
        if (timer := self._context.reset_timer) is not None:
            for row in rows:
                timer.note_reset(self._rows[row], monotonic() - began)
        if columns is not None and observations is not None:
            columns.answer_resets(rows, observations, tokens)
            return True
        for row, first in zip(rows, begun, strict=True):
            self._rows[row].first = first
        return False


_is_plain = operator.attrgetter("is_plain")


# -- steps in columns ---------------------------------------------------------------------------


class StepColumns(NamedTuple):
    """The results of a step, with an entry for each row of the env, whichever of them took it.

    Attributes:
        obs: (n, *shape).
        rewards: (n,).
        terminated: (n,) bool.
        truncated: (n,) bool.
        rows_with_info: the rows whose infos hold something.
        infos: gives the infos by row.
    """

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    rows_with_info: Sequence[int]
    infos: Any


_make_columns = partial(tuple.__new__, StepColumns)


def step_columns_of(
    result: Any,
    count: int,
    *,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    finite: tuple[bool, bool],
) -> StepColumns | None:
    """Return what `step` of a batched env returned as columns; None if that is not possible.

    Args:
        result: what `step` returned.
        count: the number of rows.
        dtype: the dtype of their observations.
        shape: the shape of one observation.
        finite: whether observations, and rewards, have to be finite.
    """
    if type(result) is not tuple or len(result) != 5:
        return None
    obs, rewards, terminated, truncated, infos = result
    fits = (
        type(obs) is type(rewards) is type(terminated) is type(truncated) is np.ndarray
        and obs.dtype == dtype
        and obs.shape == (count, *shape)
        and rewards.shape == terminated.shape == truncated.shape == (count,)
        and rewards.dtype.kind in "fiub"
        and terminated.dtype == truncated.dtype == np.bool_
    )
    if not fits or (finite[0] and not np.isfinite(obs).all()):
        return None
    if finite[1] and not np.isfinite(rewards).all():
        return None
    if infos is None:
        return _make_columns((obs, rewards, terminated, truncated, (), None))
    with_info: Sequence[int] | None = getattr(infos, "told", None)
    if with_info is None:
        if not isinstance(infos, (list, tuple)) or len(infos) != count:
            return None
        with_info = [k for k, info in enumerate(infos) if type(info) is not dict or info]
    return _make_columns((obs, rewards, terminated, truncated, with_info, infos))


def reset_column_of(
    result: Any, count: int, *, dtype: np.dtype[Any], shape: tuple[int, ...], finite: bool
) -> Array | None:
    """Return what `reset` of a batched env returned as an array; None if that is not possible.

    Args:
        result: what `reset` returned.
        count: the number of rows.
        dtype: the dtype of their observations.
        shape: the shape of one observation.
        finite: whether observations have to be finite.
    """
    if type(result) is not tuple or len(result) != 2 or result[1] is not None:
        return None
    obs: Array = result[0]
    fits = type(obs) is np.ndarray and obs.dtype == dtype and obs.shape == (count, *shape)
    return obs if fits and (not finite or np.isfinite(obs).all()) else None


def for_all_rows(columns: StepColumns, rows: Array, count: int) -> StepColumns:
    """Return columns that have entries for some rows only as columns of all rows."""
    whole: list[Any] = [np.zeros((count, *part.shape[1:]), part.dtype) for part in columns[:4]]
    for target, part in zip(whole, columns, strict=False):
        target[rows] = part
    by_row = {int(rows[k]): columns.infos[k] for k in columns.rows_with_info}
    return _make_columns((*whole, list(by_row), by_row))


_ENDING_GIVEN = ENDING_GIVEN << ENDING_SHIFT
_HAS_INFO = np.uint16(HAS_INFO)
_TERMINATED = np.uint16(TERMINATED << ENDING_SHIFT | DONE)
_TRUNCATED = np.uint16(TRUNCATED << ENDING_SHIFT | DONE)
_CODES_OF_AFTER = {after: int(after) << AFTER_SHIFT for after in AfterStep}

_Begun = Sequence[tuple[int, Sequence[Any]]]
"""Rows whose next episodes have begun, and the messages that are to be sent about that."""


class ColumnSteps:
    """Takes the posted steps of all rows of a batch together, and answers them in columns.

    The env is given columns of the block, and what it returns is written there as columns. A row
    with more to report (an info, a failure) is answered by `EnvRunner.take_step`. This shortcut is
    what batched envs are there for: without it, workers take 5 times the CPU for null envs of 32
    rows, and 2.9 times where one in nine steps ends an episode.

    Args:
        block_rows: the block's rows of all rows of the batch.

    Attributes:
        observations_of_reset: returns what `reset` returned for some rows as an array; see
            `reset_column_of`.
    """

    def __init__(self, batch: BatchRunner, block_rows: Sequence[BlockRow]) -> None:
        self._batch = batch
        self._sinks = [block_row.sink for block_row in block_rows]
        self._info_columns = ColumnSink(self._sinks)
        self._runners = [cast("RowRunner", block_row.runner) for block_row in block_rows]
        self._count = len(block_rows)
        self._all = list(range(self._count))
        self._array = np.arange(self._count)
        block, single = block_rows[0].sink.block, self._runners[0].writer.single_array
        if single is None:
            raise RuntimeError("rows without buffers: a defect of envmgr, please report it")
        first = block_rows[0].row
        rows = slice(first, first + self._count)
        self._requests, self._replies = block.requests[rows], block.replies[rows]
        self._rewards, self._flags = block.rewards[rows], block.flags[rows]
        self._new_flags = np.empty(self._count, np.uint16)  # of a step, until they are written
        (column,) = block.actions_of[block_rows[0].action_kind]
        self._actions = column[rows]
        self._reset_flags = items(block.reset_flags[rows])
        self._resets = items(block.resets[rows])
        self._plain_resets = [
            runner.plain_reset(sink)
            for runner, sink in zip(self._runners, self._sinks, strict=True)
        ]
        dtype, shape, finite = single.dtype, single.shape, single.finite is not None
        refuses = finite, self._runners[0].refuses_non_finite
        self._columns_of = partial(step_columns_of, dtype=dtype, shape=shape, finite=refuses)
        self.observations_of_reset = partial(
            reset_column_of, dtype=dtype, shape=shape, finite=finite
        )
        in_arena = slice(single.row, single.row + self._count)
        self._by_buffer = [buffer[in_arena] for buffer in single.arena[: len(single.after)]]
        self._arena, self._first = single.arena, single.row
        self._after = bytes(single.after)
        self._buffers = bytearray(runner.writer.step_buffer for runner in self._runners)
        self._buffer_array: Array = np.frombuffer(self._buffers, np.uint8)
        self._all_at = [bytes([buffer]) * self._count for buffer in range(len(single.after))]
        self._ones = bytes([1]) * self._count
        # If no row skips a step while it shows the observation of a step, all rows may be in one
        # buffer.
        self._next = 0 if len(single.after) == 2 and not batch.partial_steps else None

    @staticmethod
    def of(batch: BatchRunner, block_rows: Sequence[BlockRow]) -> ColumnSteps | None:
        """Return the `ColumnSteps` of these rows; None if their steps do not fit into columns."""
        env_ids = [block_row.sink.env_id for block_row in block_rows]
        layout = block_rows[0].sink.block.plan.layouts[block_rows[0].action_kind]
        fits = (
            not batch.is_async
            and env_ids == list(batch.env_ids)
            and type(layout.skeleton) is int
            and [row.row - block_rows[0].row for row in block_rows] == list(range(len(block_rows)))
            and all(row.runner.writer.single_array is not None for row in block_rows)
        )
        return ColumnSteps(batch, block_rows) if fits else None

    # -- buffers of the rows' observations ----------------------------------------------------

    def give_buffers_to_writers(self, rows: Sequence[int]) -> None:
        """Give the writers of rows their buffers, for steps that are answered one by one."""
        if self._next is not None:
            self._buffers[:] = self._all_at[self._next]
        for row in rows:
            self._runners[row].writer.step_buffer = self._buffers[row]

    def read_buffers_of_writers(self, rows: Sequence[int]) -> None:
        """Go on from the buffers of writers, after steps that were answered one by one."""
        for row in rows:
            self._buffers[row] = self._runners[row].writer.step_buffer
        if self._next is not None:
            self._next = self._after[self._next]

    # -- steps ------------------------------------------------------------------------------

    def take(self, requests: list[int], taken: list[int]) -> bool | None:
        """Take the newly posted steps.

        Args:
            requests: the tokens that are posted, of all rows.
            taken: the tokens of the steps that were taken before.

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
            result = self._step_env(batch.env, rows, actions, mask)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return batch.report_exception(self._row_step(first, tokens), error)
        if not batch.is_built:
            return False
        if batch.resets:
            batch.answer_resets_of_step()
        if type(result) is StepColumns:  # `isinstance` asks longer
            return self._answer(rows, result, tokens, mask)
        some, step_results = rows.tolist(), cast("list[StepResult]", result)
        self.give_buffers_to_writers(some)
        batch.answer({row: self._row_step(row, tokens) for row in some}, step_results)
        self.read_buffers_of_writers(some)
        return batch.is_scheduled

    def _row_step(self, row: int, tokens: Array) -> RowStep:
        return RowStep(self._runners[row], self._sinks[row], int(tokens[row]), None)

    def _step_env(
        self, env: BatchedEnv, rows: Array, actions: Array, mask: Array | None
    ) -> StepColumns | list[StepResult]:
        """Step the env; return the results as columns if possible, else as step_results."""
        if mask is None:
            result = env.step(self._all, actions)
        elif env.step_whole is not None:
            result = env.step_whole(rows, actions)
        else:
            some = rows.tolist()
            result = env.step(some, actions[rows])
            columns = self._columns_of(result, len(some))
            if columns is not None:
                return for_all_rows(columns, rows, self._count)
            return step_results_of(env, result, len(some))
        columns = self._columns_of(result, self._count)
        if columns is not None:
            return columns
        step_results = step_results_of(env, result, self._count)
        return step_results if mask is None else [step_results[row] for row in rows.tolist()]

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, rows: Array, columns: StepColumns, tokens: Array, mask: Array | None) -> bool:
        obs, rewards, terminated, truncated, with_info, _ = columns
        buffer = self._write(rows, obs, is_whole=mask is None)
        any_ended = 1 in terminated.tobytes() or 1 in truncated.tobytes()
        if mask is None and not with_info and not any_ended:
            self._rewards[...] = rewards
            self._flags[...] = buffer | _ENDING_GIVEN
            self._replies[...] = tokens  # last: from now on the answers count
            return self._batch.is_scheduled
        flags = self._new_flags
        flags[...] = buffer | _ENDING_GIVEN
        others = self._write_infos(columns, flags, mask) if with_info else ()
        where: Any = True if mask is None else mask
        if others:
            where = np.ones(self._count, np.bool_) if mask is None else mask.copy()
            where[others] = False
        # Before the resets in place, in which the env may reuse the arrays that it returned.
        np.copyto(self._rewards, rewards, where=where)
        step_results = self._step_results_of(others, columns) if others else []
        begun: _Begun = ()
        if any_ended:
            flags |= terminated * _TERMINATED
            flags |= truncated * _TRUNCATED
            ended = np.logical_or(terminated, truncated)
            if mask is not None:
                ended &= mask
            begun = self._end_episodes(ended.nonzero()[0].tolist(), flags, tokens, others)
        np.copyto(self._flags, flags, where=where)
        np.copyto(self._replies, tokens, where=where)  # last, as above
        if others:
            self._answer_one_by_one(others, step_results, tokens)
        for row, messages in begun:
            self._runners[row].send(self._sinks[row], int(tokens[row]), messages)
        return self._batch.is_scheduled

    def _write(self, rows: Array, obs: Array, *, is_whole: bool) -> Any:
        """Write observations; return the buffer, or the buffers of all rows, that they are in."""
        buffer = self._next
        if buffer is None and is_whole and self._buffers == self._all_at[self._buffers[0]]:
            buffer = self._buffers[0]
        if buffer is None:
            buffers = self._buffer_array.copy()
            where = buffers[rows]
            self._arena[where, self._first + rows] = obs[rows]
            self._buffer_array[rows] = np.frombuffer(self._after, np.uint8)[where]
            return buffers
        if is_whole:
            self._by_buffer[buffer][...] = obs
        else:
            self._by_buffer[buffer][rows] = obs[rows]
        after = self._after[buffer]
        if self._next is None:
            self._buffers[:] = self._all_at[after]
        else:
            self._next = after
        return buffer

    def _write_infos(self, columns: StepColumns, flags: Array, mask: Array | None) -> list[int]:
        """Write infos beside the answers; return the rows whose infos there is no room for."""
        others: list[int] = []
        infos, sinks = columns.infos, self._sinks
        if type(infos) is RowInfos and (numbers := infos.numbers()) is not None:
            told = self._info_columns.write(numbers, mask)
            if told is not None:
                flags |= told * _HAS_INFO
                return others
        for row in columns.rows_with_info:
            if mask is not None and not mask[row]:
                continue
            info = infos[row]
            is_plain = type(info) is dict and not is_abnormal(info)
            if is_plain and sinks[row].has_written(info):
                flags[row] |= HAS_INFO
            else:
                others.append(row)
        return others

    def _end_episodes(
        self, ended: list[int], flags: Array, tokens: Array, others: Sequence[int]
    ) -> _Begun:
        """End the episodes of rows, except those that are answered one by one.

        Returns:
            The rows and messages to send when the steps have been answered.
        """
        batch = self._batch
        inplace: list[int] = []
        resets: dict[int, RowReset] = {}
        batch.note_ends(ended)
        for row in ended:
            if row in others:
                continue
            runner = self._runners[row]
            batch.in_episode[row] = False
            was_plain = runner.is_plain
            after = runner.end_episode()
            if after is AfterStep.NOTHING:
                continue
            flags[row] |= _CODES_OF_AFTER[after]
            if after is AfterStep.RESETS and runner.plan.inplace:
                inplace.append(row)
            elif after is not AfterStep.WANTS_RECYCLING:
                resets[row] = (
                    self._plain_resets[row]
                    if was_plain
                    else runner.planned_reset(self._sinks[row], int(tokens[row]))
                )
        batch.submit_resets(resets)
        if not inplace or batch.begin_inplace([self._runners[row] for row in inplace], tokens):
            return ()
        return [
            (row, self._runners[row].begin_episode(self._sinks[row], int(tokens[row])))
            for row in inplace
        ]

    def answer_resets(self, rows: list[int], obs: Array, tokens: Array | None) -> None:
        """Answer the resets of rows, which follow steps.

        Args:
            rows: the rows.
            obs: their first observations: (k, *shape).
            tokens: the tokens of the steps of all rows; None: those of the steps that were answered
                last.
        """
        in_episode, flags, resets = self._batch.in_episode, self._reset_flags, self._resets
        tokens = self._replies if tokens is None else tokens
        for row, first in zip(rows, obs, strict=True):
            runner = self._runners[row]
            writer = runner.writer
            flags[row] = buffer = writer.reset_buffer
            writer.reset_buffer = writer.after[buffer]
            self._arena[buffer, self._first + row] = first
            runner.env.reset_info = {}
            in_episode[row] = True
            resets[row] = tokens[row]  # last: from now on the answer counts

    def _step_results_of(self, rows: list[int], columns: StepColumns) -> list[StepResult]:
        """Return the step_results of rows from columns, with copies of the arrays."""
        result = tuple(column[rows] for column in columns[:4])
        infos = [columns.infos[row] for row in rows]
        return step_results_of(self._batch.env, (*result, infos), len(rows))

    def _answer_one_by_one(
        self, rows: list[int], step_results: list[StepResult], tokens: Array
    ) -> None:
        """Answer the steps that have more to report than columns can hold."""
        for row in rows:
            self._runners[row].writer.step_buffer = self._newest_buffer(row)
        answers = {row: self._row_step(row, tokens) for row in rows}
        self._batch.answer(answers, step_results)

    def _newest_buffer(self, row: int) -> int:
        """Return the buffer of the observation that was written last."""
        now = self._buffers[row] if self._next is None else self._next
        return self._after.index(now)


def column_steps_of(block_rows: Sequence[BlockRow]) -> list[tuple[int, int, ColumnSteps]]:
    """Return the first position, the end and the `ColumnSteps` of each batched env that has one."""
    found: list[tuple[int, int, ColumnSteps]] = []
    first = 0
    for batch, group in itertools.groupby(block_rows, _batch_of):
        some = list(group)
        end = first + len(some)
        if batch is not None:
            batch.column_steps = ColumnSteps.of(batch, some)
            if batch.column_steps is not None:
                found.append((first, end, batch.column_steps))
        first = end
    return found


def _batch_of(block_row: BlockRow) -> BatchRunner | None:
    return block_row.runner.batch if isinstance(block_row.runner, RowRunner) else None


# -- asynchronous batched envs ------------------------------------------------------------------


class AsyncBatchRunner(BatchRunner):
    """A runner of a batched env that returns results first for the rows that are done first.

    Steps and resets are begun before it waits for results, and it waits for these once in each
    round of the host. If fewer rows are under way than have to be, rows in no episode are stepped
    with them, and nobody gets to see those steps.
    """

    is_async = True

    def __init__(self, batch: Batch, spec: EnvFactory, context: HostContext) -> None:
        super().__init__(batch, spec, context)
        # The steps and resets under way, by row; None for those whose results nobody wants.
        self._under_way: dict[int, RowStep | RowReset | None] = {}
        # Whether the resets cannot be begun as things are; if nothing has changed in the next
        # round, they fail.
        self._waits_in_vain = False

    def close_row(self, row: int) -> None:
        """Go on without a row; close the env with the last one."""
        if row in self._under_way:
            self._under_way[row] = None
        super().close_row(row)
        if not self.is_built:
            self._under_way.clear()

    def submit_step(self, row: int, step: RowStep) -> bool:
        """Have a row take a step later."""
        self.steps[row] = step
        self.only_receives = False
        self._schedule()
        return True

    def _schedule_resets(self) -> None:
        if self.resets:
            self.only_receives = False
            self._schedule()

    def _run(self) -> None:
        self.is_scheduled = False
        if self.is_built:
            if not self._begin_submitted() and self._can_receive:
                self._receive()
                self._begin_submitted()
            self.only_receives = self._can_receive or self._waits_in_vain
            if self.only_receives:
                self._schedule()

    @property
    def _can_receive(self) -> bool:
        """Whether results are wanted, and enough rows are or can be under way for them to come."""
        under_way = self._under_way
        is_wanted = under_way and (self.resets or any(under_way.values()))
        return bool(is_wanted) and len(under_way) + len(self._idle_rows()) >= self._most

    @property
    def _most(self) -> int:
        return self._batch.batch_size or self._batch.size

    @property
    def _async_env(self) -> AsyncBatchedEnv:
        env = self.env
        if not isinstance(env, AsyncBatchedEnv):
            raise TypeError(f"a batch_size needs an AsyncBatchedEnv, not a {type(env).__name__}")
        return env

    def _idle_rows(self) -> list[int]:
        """Return the rows in no episode for which nothing is under way."""
        rows = range(self._batch.size)
        return [i for i in rows if not self.in_episode[i] and i not in self._under_way]

    def _begin_submitted(self) -> bool:
        """Begin the steps and resets of rows; return whether there was anything to begin."""
        steps, self.steps = self.steps, {}
        if steps:
            rows = sorted(steps)
            first = steps[rows[0]]
            first.sink.announce(first.key, Op.STEP)
            try:
                self._async_env.send(rows, [steps[row].action for row in rows])
            except BaseException as error:  # whatever the env's code may raise, SystemExit included
                self.report_exception(first, error)
                return True
            self._under_way.update(steps)
        return self._begin_resets() or bool(steps)

    def _begin_resets(self) -> bool:
        if not self.is_built:
            return False
        free = {row: reset for row, reset in self.resets.items() if row not in self._under_way}
        seeds = {row: reset.env.seeds.due() for row, reset in free.items()}
        asked = {row: seeds[row] for row, reset in free.items() if reset.is_requested}
        rows = sorted(seeds.keys() - asked.keys())  # episodes follow each other at once
        under_way = bool(self._under_way)
        try:
            if asked and (
                self._waits_in_vain or self._async_env.may_begin(asked, others=under_way)
            ):
                rows = sorted(seeds)
        except BaseException as error:  # as above
            reraise_interrupt(error, self._context.settings)
            _fail([self.resets.pop(row) for row in asked], error)
            asked = {}
        self._waits_in_vain = not rows and bool(asked) and not under_way
        if not rows:
            return False
        resets = {row: self.resets.pop(row) for row in rows}
        first = resets[rows[0]]
        first.sink.announce(first.key)
        try:
            params = [resets[row].params for row in rows]
            self._async_env.begin(rows, [seeds[row] for row in rows], params)
        except BaseException as error:  # as above
            reraise_interrupt(error, self._context.settings)
            _fail(resets.values(), error)
        else:
            self._under_way.update(resets)
        return True

    def _receive(self) -> None:
        """Wait for the next results, and answer with them."""
        missing = self._most - len(self._under_way)
        step = next((one for one in self._under_way.values() if isinstance(one, RowStep)), None)
        try:
            if missing > 0:
                self._async_env.fill(self._idle_rows()[:missing])
            received, result = self._async_env.receive()
            if not self.is_built:
                return
            rows = self._checked_rows(received)
            step_results = step_results_of(self.env, result, len(rows))
        except BaseException as error:  # as above
            self._fail_all(error, step)
            return
        done = {row: self._under_way.pop(row, None) for row in rows}
        steps, results = {}, []
        for (row, one), step_result in zip(done.items(), step_results, strict=True):
            if isinstance(one, RowStep):
                steps[row] = one
                results.append(step_result)
            elif isinstance(one, RowReset):
                one.env.first = self._first_of(step_result)
        self.answer(steps, results)
        for one in done.values():
            if isinstance(one, RowReset):
                one.answer()

    def _checked_rows(self, received: Sequence[int]) -> list[int]:
        """Return the rows whose results have come.

        Raises:
            EnvContractError: they are no rows of the env, or one of them is named twice.
        """
        rows = list(received)
        if len(set(rows)) < len(rows) or not set(rows) <= set(range(self._batch.size)):
            raise EnvContractError(
                f"receive of {env_name(self.env)} should return the results of some of its "
                f"{self._batch.size} rows, once of each, it returned those of {rows}"
            )
        return rows

    def _first_of(self, step_result: StepResult) -> First | BaseException:
        """Return what an episode begins with, given the result of a row whose reset was begun."""
        try:
            return self._async_env.own(step_result[0]), dict(step_result[4])
        except BaseException as error:  # as above
            reraise_interrupt(error, self._context.settings)
            return error

    def _fail_all(self, error: BaseException, step: RowStep | None) -> None:
        """Report an error in receiving results: nobody can tell whose results it concerns."""
        reraise_interrupt(error, self._context.settings)
        resets = [one for one in self._under_way.values() if isinstance(one, RowReset)]
        self._under_way.clear()
        if step is not None:
            self.report_exception(step, error)
        _fail(resets, error)


def _fail(resets: Iterable[RowReset], error: BaseException) -> None:
    """Answer resets with an exception: all are marked first, as an answer may ask for more."""
    resets = list(resets)
    for reset in resets:
        reset.env.first = error
    for reset in resets:
        reset.answer()
