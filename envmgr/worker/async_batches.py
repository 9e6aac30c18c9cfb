"""A batched env that gives the results of some rows at a time: those that are done first.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from envmgr.env.async_batch import AsyncBatchedEnv
from envmgr.env.batched import step_results_of
from envmgr.wire.messages import Op
from envmgr.worker.batches import RunningBatch
from envmgr.worker.interrupts import pass_on
from envmgr.worker.rows import Reset, Step


class RunningAsyncBatch(RunningBatch):
    """As `RunningBatch`; steps and resets are begun when they are asked for, and end later.

    What is asked for is begun before results are waited for, and these are waited for once in each
    round of the host. If fewer rows are under way than have to be, rows in no episode are stepped
    with them, which is nobody's business.
    """

    is_async = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type] # as there
        # What is under way; None for what nobody wants.
        self._under_way: dict[int, Step | Reset | None] = {}
        # Resets cannot be begun as they are; if nothing has changed in the next round, they fail.
        self._waits_in_vain = False

    def leave(self, row: int) -> None:
        """A row is closed."""
        if row in self._under_way:
            self._under_way[row] = None
        super().leave(row)
        if not self._is_built:
            self._under_way.clear()

    def want_step(self, row: int, step: Step) -> bool:
        """Have a row take a step later."""
        self.steps[row] = step
        self.receives = False
        self._postpone()
        return True

    def _look_after_resets(self) -> None:
        if self.resets:
            self.receives = False
            self._postpone()

    def _run(self) -> None:
        self.is_postponed = False
        if self._is_built:
            if not self._begin_asked() and self._can_receive:
                self._receive()
                self._begin_asked()
            self.receives = self._can_receive or self._waits_in_vain
            if self.receives:
                self._postpone()

    @property
    def _can_receive(self) -> bool:
        """Whether results are wanted, and so many rows are under way, or may be, that they come."""
        under_way = self._under_way
        is_wanted = under_way and (self.resets or any(under_way.values()))
        return bool(is_wanted) and len(under_way) + len(self._idle()) >= self._most

    @property
    def _most(self) -> int:
        return self._batch.batch_size or self._batch.size

    @property
    def _async(self) -> AsyncBatchedEnv:
        env = self.built
        if not isinstance(env, AsyncBatchedEnv):
            raise TypeError(f"a batch_size needs an AsyncBatchedEnv, not a {type(env).__name__}")
        return env

    def _idle(self) -> list[int]:
        """Return the rows in no episode that nothing is under way of."""
        rows = range(self._batch.size)
        return [i for i in rows if not self.in_episode[i] and i not in self._under_way]

    def _begin_asked(self) -> bool:
        """Begin what rows were asked for; return whether that was anything."""
        steps, self.steps = self.steps, {}
        if steps:
            rows = sorted(steps)
            first = steps[rows[0]]
            first.sink.announce(first.key, Op.STEP)
            try:
                self._async.send(rows, [steps[row].action for row in rows])
            except BaseException as error:  # whatever the env's code may raise, SystemExit included
                self.fail(first, error)
                return True
            self._under_way.update(steps)
        return self._begin_resets() or bool(steps)

    def _begin_resets(self) -> bool:
        free = {row: reset for row, reset in self.resets.items() if row not in self._under_way}
        seeds = {row: reset.env.seeds.due() for row, reset in free.items()}
        asked = {row: seeds[row] for row, reset in free.items() if reset.is_ordered}
        rows = sorted(seeds.keys() - asked.keys())  # episodes follow each other at once
        if self._waits_in_vain or self._async.may_begin(asked, others=bool(self._under_way)):
            rows = sorted(seeds)
        self._waits_in_vain = not rows and bool(asked) and not self._under_way
        if not rows:
            return False
        resets = {row: self.resets.pop(row) for row in rows}
        first = resets[rows[0]]
        first.sink.announce(first.key)
        try:
            params = [resets[row].params for row in rows]
            self._async.begin(rows, [seeds[row] for row in rows], params)
        except BaseException as error:  # as above
            pass_on(error, self._given.settings)
            for reset in resets.values():
                reset.env.first = error
                reset.answer()
        else:
            self._under_way.update(resets)
        return True

    def _receive(self) -> None:
        """Wait for the next results, and answer with them."""
        missing = self._most - len(self._under_way)
        under_way = next((one for one in self._under_way.values() if isinstance(one, Step)), None)
        try:
            if missing > 0:
                fill = self._idle()[:missing]
                self._async.fill(fill)
                self._under_way.update(dict.fromkeys(fill))
            rows, result = self._async.receive()
            step_results = step_results_of(self.built, result, len(rows))
        except BaseException as error:  # as above
            self._fail_all(error, under_way)
            return
        done = {row: self._under_way.pop(row, None) for row in rows}
        steps, results = {}, []
        for (row, one), step_result in zip(done.items(), step_results, strict=True):
            if isinstance(one, Step):
                steps[row] = one
                results.append(step_result)
            elif isinstance(one, Reset):
                one.env.first = self._async.own(step_result[0]), dict(step_result[4])
        self.answer(steps, results)
        _answer(one for one in done.values() if isinstance(one, Reset))

    def _fail_all(self, error: BaseException, step: Step | None) -> None:
        """Report what has gone wrong with results: nobody can tell with whose."""
        pass_on(error, self._given.settings)
        resets = [one for one in self._under_way.values() if isinstance(one, Reset)]
        self._under_way.clear()
        if step is not None:
            self.fail(step, error)
        for reset in resets:
            reset.env.first = error
        _answer(resets)


def _answer(resets: Iterable[Reset]) -> None:
    for reset in resets:
        reset.answer()
