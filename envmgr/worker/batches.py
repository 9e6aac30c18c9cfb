"""A batched env in its host: what its rows are asked for is done together, and answered row by row.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from envmgr.env import adapt
from envmgr.env.batched import Batch, BatchedEnv, BatchRow, First, reset_rows, step_rows
from envmgr.env.contract import Outcome
from envmgr.types import EnvFactory
from envmgr.wire.messages import Message, Op, ResetOrder
from envmgr.worker.interrupts import pass_on
from envmgr.worker.running import RunningEnv, Surroundings
from envmgr.worker.sinks import MessageSink


class _Step(NamedTuple):
    """A step that one row is to take."""

    running: RunningRow
    sink: MessageSink
    key: Any
    action: Any


class _Reset(NamedTuple):
    """A reset of one row; `answer` is run when the env has done its part."""

    env: BatchRow
    sink: MessageSink
    key: Any
    params: dict[str, Any]
    answer: Callable[[], None]


class RunningBatch:
    """The batched env of some env_ids.

    It is built with the first of its rows, and closed with the last. A step is taken as soon as all
    rows that are in an episode were sent their actions; where the env steps some of its rows, those
    that were sent one do not wait for long for the others. Resets are run after what has come
    meanwhile, as all are that a host begins by itself.

    Args:
        batch: whose it is.
        spec: builds it.
        given: what its rows are given by their host.
    """

    def __init__(self, batch: Batch, spec: EnvFactory, given: Surroundings) -> None:
        self._batch = batch
        self._spec = spec
        self._given = given
        self._env: BatchedEnv | None = None
        self._rows: dict[int, BatchRow] = {}
        self._steps: dict[int, _Step] = {}
        self._resets: dict[int, _Reset] = {}
        # Rows in an episode that are to be sent an action before the next step; None: all of them.
        self._missing: set[int] | None = None
        self._is_postponed = False

    @property
    def env_ids(self) -> range:
        """Those of its rows."""
        return self._batch.env_ids

    @property
    def has_steps(self) -> bool:
        """Whether rows were sent actions that have not been taken."""
        return bool(self._steps)

    # -- rows -------------------------------------------------------------------------------

    def open_row(self, env_id: int) -> BatchRow:
        """Return a row, of a new env if there is none.

        Raises:
            Exception: the env cannot be built.
        """
        if self._env is None:
            self._env = self._spec()
        row = env_id - self._batch.first
        self._rows[row] = env = BatchRow(self._env, row)
        self._missing = None
        return env

    def run_row(self, env: BatchRow, given: Surroundings) -> RunningEnv:
        """Return what takes the steps of a row."""
        return RunningRow(env, given, self)

    def leave(self, row: int) -> None:
        """A row is closed."""
        self._rows.pop(row, None)
        self._steps.pop(row, None)
        self._resets.pop(row, None)
        self._missing = None
        if self._rows or self._env is None:
            return
        env, self._env = self._env, None
        try:
            adapt.close_env(env)
        except BaseException as error:  # as in `RunningEnv.close`
            pass_on(error, self._given.settings)

    # -- what rows are asked for --------------------------------------------------------------

    def want_step(self, row: int, step: _Step) -> bool:
        """Have a row take a step; return whether something is to be run later."""
        if self._missing is None:
            self._missing = {i for i, env in self._rows.items() if env.is_in_episode}
            self._missing.difference_update(self._steps)
        self._steps[row] = step
        self._missing.discard(row)
        if not self._missing:
            return self._take_steps()
        if self._batch.partial_steps:
            self._postpone()
            return True
        return False

    def want_reset(self, row: int, reset: _Reset) -> None:
        """Have a row be reset."""
        reset.env.is_in_episode = False
        self._missing = None
        self._resets[row] = reset
        self._postpone()

    def _postpone(self) -> None:
        if not self._is_postponed:
            self._is_postponed = True
            self._given.postpone(self._run)

    def _run(self) -> None:
        self._is_postponed = False
        if self._steps and self._batch.partial_steps:
            self._take_steps()
        if self._resets:
            self._run_resets()

    def _take_steps(self) -> bool:
        """Take the steps that rows were sent; return whether resets follow."""
        steps, self._steps, self._missing = self._steps, {}, None
        rows = sorted(steps)
        first = steps[rows[0]]
        first.sink.announce(first.key, Op.STEP)
        try:
            outcomes = step_rows(self._built, rows, [steps[row].action for row in rows])
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            self._given.messages.send(first.sink.raised(first.key, error, "step", of_batch=True))
            return False
        ended = [
            steps[row].running for row, outcome in zip(rows, outcomes, strict=True) if outcome[2]
        ]
        if inplace := [running for running in ended if running.resets_inplace]:
            outcomes = [(copy.deepcopy(obs), *rest) for obs, *rest in outcomes]  # they may be views
            self._begin([row.env for row in inplace], [row.plan.params for row in inplace])
        for row, outcome in zip(rows, outcomes, strict=True):
            running, sink, key, _ = steps[row]
            running.env.is_in_episode = not outcome[2]
            running.take_step(sink, key, _itself, outcome)
        return bool(self._resets)

    def _run_resets(self) -> None:
        resets, self._resets, self._missing = self._resets, {}, None
        rows = sorted(resets)
        first = resets[rows[0]]
        first.sink.announce(first.key)
        if due := [reset for row in rows if (reset := resets[row]).env.first is None]:
            self._begin([reset.env for reset in due], [reset.params for reset in due])
        for row in rows:
            resets[row].answer()

    def _begin(self, envs: Sequence[BatchRow], params: Sequence[dict[str, Any]]) -> None:
        """Reset rows, so that each has what its own `reset` is to return or to raise."""
        rows, seeds = [env.row for env in envs], [env.seeds.due() for env in envs]
        begun: Sequence[First | BaseException]
        try:
            begun = reset_rows(self._built, rows, seeds, params)
        except BaseException as error:  # it is raised again, and reported, for each row
            pass_on(error, self._given.settings)
            begun = [error] * len(rows)
        for env, first in zip(envs, begun, strict=True):
            env.first = first

    @property
    def _built(self) -> BatchedEnv:
        if self._env is None:
            raise RuntimeError("a row without its env: a defect of envmgr, please report it")
        return self._env


class RunningRow(RunningEnv):
    """One row of a batched env, from when it is opened until it is closed.

    Args:
        env: the row.
        given: what its host gives it.
        batch: has steps and resets run.
    """

    env: BatchRow

    def __init__(self, env: BatchRow, given: Surroundings, batch: RunningBatch) -> None:
        self._batch = batch
        super().__init__(env, given)

    def close(self) -> None:
        """Leave the env."""
        super().close()
        self._batch.leave(self.env.row)

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Have a step be taken, now or later."""
        return self._batch.want_step(self.env.row, _Step(self, sink, key, action))

    def fail_step(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that what the env gave for this row is of no use."""
        self.env.is_in_episode = False
        return super().fail_step(sink, key, error)

    def fail_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env has called the step of this row abnormal."""
        self.env.is_in_episode = False
        return super().fail_abnormal(sink, key, info)

    def reset(self, message: Message) -> None:
        """Have RESET be run later."""
        order: ResetOrder = message.payload
        self.env.first = None  # what an episode was to begin with that is not begun
        if order.seed is not None:
            self.env.seed(order.seed, order.dynamic_seed)
        answer = partial(super().reset, message)
        reset = _Reset(self.env, self._messages, message, order.params, answer)
        self._batch.want_reset(self.env.row, reset)

    def order_reset(self, sink: MessageSink, key: Any) -> None:
        """Have the row be reset later, as its plan says."""
        answer = partial(self.begin_episode, sink, key)
        self._batch.want_reset(self.env.row, _Reset(self.env, sink, key, self.plan.params, answer))


def _itself(outcome: Outcome) -> Outcome:
    return outcome
