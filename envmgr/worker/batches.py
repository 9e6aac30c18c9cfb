"""A batched env in its host: what its rows are asked for is done together, and answered row by row.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from envmgr.env import adapt
from envmgr.env.batch_specs import Batch
from envmgr.env.batched import BatchedEnv, BatchRow, First, firsts_of, step_rows
from envmgr.env.contract import StepResult
from envmgr.spaces import Array
from envmgr.types import EnvFactory
from envmgr.wire.messages import Op
from envmgr.worker.interrupts import pass_on
from envmgr.worker.rows import Reset, RunningRow, Step
from envmgr.worker.running import RunningEnv, Surroundings

if TYPE_CHECKING:  # it takes steps of this
    from envmgr.worker.bulk import BulkSteps


class RunningBatch:
    """The batched env of some env_ids.

    It is built with the first of its rows, and closed with the last. A step is taken as soon as all
    rows that are in an episode were sent their actions; where the env steps some of its rows, those
    that were sent one do not wait for long for the others. Resets are run after what has come
    meanwhile, as all are that a host begins by itself, or with the next step if the env wants that.

    Args:
        batch: whose it is.
        spec: builds it.
        given: what its rows are given by their host.

    Attributes:
        is_async: results come later than steps and resets are begun.
        receives: all that it wants to run is to wait for them.
        in_episode: a byte for each row: 1 for those that take actions.
        is_late: episodes that end with the present step go on with the next one.
        steps: that rows were sent, and that have not been taken.
        resets: of rows, that have not been run.
        is_postponed: some of them are to be run that do not wait for the next step.
        bulk: takes steps of all rows in columns, and keeps their places; None if nobody does.
        built: the env, while there are rows.
    """

    is_async = False
    receives = False
    built: BatchedEnv

    def __init__(self, batch: Batch, spec: EnvFactory, given: Surroundings) -> None:
        self._batch = batch
        self._spec = spec
        self._given = given
        self._is_built = False
        self._rows: dict[int, BatchRow] = {}
        self.steps: dict[int, Step] = {}
        self.resets: dict[int, Reset] = {}
        # Rows in an episode that are to be sent an action before the next step; None: all of them.
        self._missing: set[int] | None = None
        self.is_postponed = False
        self.in_episode = bytearray(batch.size)
        self.is_late = False
        self.bulk: BulkSteps | None = None

    @property
    def env_ids(self) -> range:
        """Those of its rows."""
        return self._batch.env_ids

    @property
    def partial_steps(self) -> bool:
        """Whether the env steps any of its rows."""
        return self._batch.partial_steps

    # -- rows -------------------------------------------------------------------------------

    def open_row(self, env_id: int) -> BatchRow:
        """Return a row, of a new env if there is none.

        Raises:
            Exception: the env cannot be built.
        """
        if not self._is_built:
            self.built = self._spec()
            self.built.first_env_id = self._batch.first
            self._is_built = True
        row = env_id - self._batch.first
        self._rows[row] = env = BatchRow(self.built, row, self.in_episode)
        self._missing = None
        return env

    def run_row(self, env: BatchRow, given: Surroundings) -> RunningEnv:
        """Return what takes the steps of a row."""
        return RunningRow(env, given, self)

    def leave(self, row: int) -> None:
        """A row is closed."""
        self._rows.pop(row, None)
        self.steps.pop(row, None)
        self.resets.pop(row, None)
        self._missing = None
        self.in_episode[row] = False
        if not self._is_built:
            return
        self.built.leave(row)
        if self._rows:
            self._look_after_resets()
            return
        self._is_built = False
        try:
            adapt.close_env(self.built)
        except BaseException as error:  # as in `RunningEnv.close`
            pass_on(error, self._given.settings)
        finally:
            del self.built

    # -- what rows are asked for --------------------------------------------------------------

    def want_step(self, row: int, step: Step) -> bool:
        """Have a row take a step; return whether something is to be run later."""
        if self._missing is None:
            self._missing = {i for i, env in self._rows.items() if env.is_in_episode}
            self._missing.difference_update(self.steps)
        self.steps[row] = step
        self._missing.discard(row)
        if not self._missing:
            return self._take_steps()
        if self._batch.partial_steps:
            self._postpone()
            return True
        return False

    def want_resets(self, resets: Mapping[int, Reset]) -> None:
        """Have rows be reset."""
        for row, reset in resets.items():
            self.in_episode[row] = False
            if reset.is_ordered:
                self._postpone()
        self._missing = None
        self.resets.update(resets)
        self._look_after_resets()

    def _look_after_resets(self) -> None:
        """Have resets be run, unless all that are left wait for the next step of others."""
        if self.resets and not (self.built.begins_late and 1 in self.in_episode):
            self._postpone()

    def _postpone(self) -> None:
        if not self.is_postponed:
            self.is_postponed = True
            self._given.postpone(self._run)

    def _run(self) -> None:
        self.is_postponed = False
        if self.steps and self._batch.partial_steps:
            self._take_steps()
        if self.resets:
            self._run_resets()

    # -- steps ------------------------------------------------------------------------------

    def _take_steps(self) -> bool:
        """Take the steps that rows were sent; return whether resets follow."""
        steps, self.steps, self._missing = self.steps, {}, None
        rows = sorted(steps)
        first = steps[rows[0]]
        actions = [steps[row].action for row in rows]
        first.sink.announce(first.key, Op.STEP)
        try:
            step_results = step_rows(self.built, rows, actions)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return self.fail(first, error)
        self.begin_late()
        if self.bulk is not None:
            self.bulk.lend(rows)
        self.answer({row: steps[row] for row in rows}, step_results)
        if self.bulk is not None:
            self.bulk.take_back(rows)
        return self.is_postponed

    def fail(self, step: Step, error: BaseException) -> bool:
        """Report that the env's step has raised, which takes all rows, for one; return False."""
        self._given.messages.send(step.sink.raised(step.key, error, "step", of_batch=True))
        return False

    def begin_late(self) -> None:
        """Answer the resets that a step has begun: before its rows take the next one."""
        if self.resets and self.built.begins_late:
            self._run_resets()

    def answer(self, steps: dict[int, Step], step_results: Sequence[StepResult]) -> None:
        """Answer the steps of rows one by one."""
        pairs = list(zip(steps.items(), step_results, strict=True))
        self.note_ended(
            [row for row, step_result in zip(steps, step_results, strict=True) if step_result[2]]
        )
        inplace = [s.running for (_, s), out in pairs if out[2] and s.running.resets_inplace]
        if inplace:
            pairs = [(step, (copy.deepcopy(obs), *rest)) for step, (obs, *rest) in pairs]
            self.begin_inplace(inplace)  # until then, observations may be views
        for (row, (running, sink, key, _)), step_result in pairs:
            self.in_episode[row] = not step_result[2]
            running.take_step(sink, key, _itself, step_result)
        self._look_after_resets()

    def note_ended(self, rows: Sequence[int]) -> None:
        """Find out when the next episodes of rows begin whose step has ended theirs."""
        if rows and self.built.begins_late:
            self.is_late = self.in_episode.count(1) > len(rows)

    def begin_inplace(self, rows: Sequence[RunningRow], tokens: Array | None = None) -> bool:
        """Begin the next episodes of rows whose steps have ended theirs.

        Args:
            rows: which.
            tokens: of the steps of all rows, if they are answered in columns.

        Returns:
            Whether that was answered, too.
        """
        each, params = [row.env.row for row in rows], [row.plan.params for row in rows]
        if tokens is not None and False not in map(_is_plain, rows):
            return self._begin(each, [None] * len(rows), params, bulk=self.bulk, tokens=tokens)
        return self._begin(each, [row.env.seeds.due() for row in rows], params)

    # -- resets -----------------------------------------------------------------------------

    def _run_resets(self) -> None:
        """Run the resets that need not wait."""
        resets, others = self.resets, 1 in self.in_episode  # those that are to be reset are not
        is_plain = self.bulk is not None and False not in map(_is_plain, resets.values())
        if is_plain:
            asked = dict.fromkeys(resets, False)
        else:
            asked = {row: r.is_ordered for row, r in resets.items() if r.env.first is None}
        rows = sorted({*self.built.resettable(asked, others=others)} | resets.keys() - asked)
        if not rows:
            return
        resets, self._missing = {row: self.resets.pop(row) for row in rows}, None
        first = resets[rows[0]]
        first.sink.announce(first.key)
        if is_plain:
            if self._begin(rows, [None] * len(rows), [{}] * len(rows), bulk=self.bulk):
                return
        elif due := {row: reset for row, reset in resets.items() if reset.env.first is None}:
            seeds = [reset.env.seeds.due() for reset in due.values()]
            self._begin(list(due), seeds, [reset.params for reset in due.values()])
        for reset in resets.values():
            reset.answer()

    def _begin(
        self,
        rows: list[int],
        seeds: Sequence[int | None],
        params: Sequence[dict[str, Any]],
        *,
        bulk: BulkSteps | None = None,
        tokens: Array | None = None,
    ) -> bool:
        """Reset rows, so that each has what its own `reset` is to return or to raise.

        Args:
            rows: which.
            seeds: of each.
            params: likewise.
            bulk: answers all of them, if it can.
            tokens: of all rows; None: of their newest steps.

        Returns:
            Whether it has.
        """
        columns, began = None, monotonic()
        begun: Sequence[First | BaseException] = ()
        try:
            result = self.built.reset(rows, seeds, params)
            columns = None if bulk is None else bulk.firsts_of(result, len(rows))
            if columns is None:
                begun = firsts_of(self.built, result, len(rows))
        except BaseException as error:  # it is raised again, and reported, for each row
            pass_on(error, self._given.settings)
            begun = [error] * len(rows)
        if (meter := self._given.meter) is not None:
            for row in rows:
                meter.note_reset(self._rows[row], monotonic() - began)
        if bulk is not None and columns is not None:
            bulk.begin(rows, columns, tokens)
            return True
        for row, first in zip(rows, begun, strict=True):
            self._rows[row].first = first
        return False


_is_plain = operator.attrgetter("is_plain")


def _itself(step_result: StepResult) -> StepResult:
    return step_result
