"""Posted steps whose times are measured: of all, where they take long, else of a sample.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from envmgr.env import adapt
from envmgr.wire.block import items
from envmgr.wire.latencies import RESETS, STEPS, note
from envmgr.wire.timeline import BATCH, RESET, STEP, HostLog
from envmgr.worker.posted import PostedSteps, _Known
from envmgr.worker.seats import Step

_COST_S = 2e-6
"""What measuring one step costs, at most."""

_SHARE = 0.005
"""So much of the time of steps may be spent on measuring them."""

_MOST_SKIPPED = 511

_SLOW = 4
"""A batch that takes so many times as long as the one that was measured last is looked into."""


_take_batch = PostedSteps._take_batch
"""By its name: `super()` costs as much as the clock, and this is in every batch."""


class MeasuredSteps(PostedSteps):
    """As `PostedSteps`; and writes down in the block how long steps and resets take.

    As many batches are passed over as keep the cost small, depending on how long the last one that
    was measured took. What is counted then stands for those that were passed over, too, so that
    counts are those of all steps, nearly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._skip = 0
        self._passed_over = 0
        self._weight = 1.0
        self._slow_s = 0.0
        self._plain_s = math.inf
        self._plain: list[Step] = []
        self._measured: list[Step] = []
        self._step_rows: list[Any] = []
        self._reset_rows: dict[int, Any] = {}
        self._log: HostLog | None = None

    def _apply(self, known: list[_Known]) -> None:
        super()._apply(known)
        if not self._seats:
            return
        block = self._seats[0].sink.block
        latencies = block.latencies
        if block.plan.events:
            at = slice(self._index, self._index + 1)
            self._log = HostLog(block.events[self._index], block.n_events[at])
        self._step_rows = [items(latencies[STEPS, seat.row]) for seat in self._seats]
        self._reset_rows = {
            id(seat.running.env): (seat.row, items(latencies[RESETS, seat.row]))
            for seat in self._seats
        }
        self._plain = self._steps
        triples = zip(self._steps, self._rows, self._step_rows, strict=True)
        self._measured = [self._measuring(*triple) for triple in triples]
        if self._is_lone:
            self._steps = [self._sampling(self._plain[0], self._measured[0])]

    def _measuring(self, take: Step, row: int, counts: Any) -> Step:
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

    def _sampling(self, take: Step, measured: Step) -> Step:
        """Return the `step` of a lone env."""

        def step(token: int, action: Any) -> bool | None:
            if self._skip:
                self._skip -= 1
                self._passed_over += 1
                return take(token, action)
            self._weight = 1.0 + self._passed_over
            began = monotonic()
            follows = measured(token, action)
            self._pass_over(monotonic() - began, 1)
            return follows

        return step

    def _pass_over(self, took_s: float, n_steps: int) -> None:
        """Decide how many batches to pass over, after one that was measured.

        The measuring makes cheap steps take several times as long: what counts is how long they
        take without it, at best, in the batches that were passed over.
        """
        plain_s = max(min(took_s, self._plain_s), _COST_S)
        self._skip = min(int(n_steps * _COST_S / (_SHARE * plain_s)), _MOST_SKIPPED)
        self._passed_over, self._plain_s = 0, math.inf
        self._slow_s = took_s * _SLOW

    def _take_batch(self, posting: int) -> bool:
        if self._skip:
            self._skip -= 1
            self._passed_over += 1
            began = monotonic()
            follows = _take_batch(self, posting)
            ended = monotonic()
            if (took_s := ended - began) < self._plain_s:
                self._plain_s = took_s
            elif took_s > self._slow_s:  # somebody is slow: find out who, next time
                self._skip = 0
            if self._log is not None:
                self._log.note(BATCH, -1, began, ended)
            return follows
        plain, measured = self._steps, self._measured
        self._steps, self._weight = measured, 1.0 + self._passed_over
        began = monotonic()
        try:
            return _take_batch(self, posting)
        finally:
            if self._steps is measured:  # else others take part by now
                self._steps = plain
            ended = monotonic()
            self._pass_over(ended - began, len(measured))
            if self._log is not None:
                self._log.note(BATCH, -1, began, ended)

    def _take_bulks(self, requests: list[int]) -> bool:
        if self._steps is not self._measured:
            return super()._take_bulks(requests)
        before, began = self._taken, monotonic()
        follows = super()._take_bulks(requests)
        ended = monotonic()
        took_s = ended - began
        n_taken = sum(self._taken[first:end] != before[first:end] for first, end, _ in self._bulks)
        for first, end, _ in self._bulks:
            for position in range(first, end):
                if self._taken[position] != before[position]:
                    note(self._step_rows[position], took_s / n_taken, self._weight)
                    if self._log is not None:
                        passed_over = int(self._weight) - 1
                        self._log.note(STEP, self._rows[position], began, ended, passed_over)
        return follows

    # -- resets -----------------------------------------------------------------------------

    def reset_env(self, env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """As `adapt.reset_env`, measured."""
        began = monotonic()
        result = adapt.reset_env(env, params)
        self.note_reset(env, monotonic() - began)
        return result

    def note_reset(self, env: Any, seconds: float) -> None:
        """Count the reset of an env; nothing if it has no seat."""
        row, counts = self._reset_rows.get(id(env), (-1, None))
        if counts is not None:
            note(counts, seconds)
            if self._log is not None:
                ended = monotonic()
                self._log.note(RESET, row, ended - seconds, ended)


def posted_steps(index: int, ring: Callable[[], None] | None, **how: Any) -> PostedSteps:
    """Return what takes the posted steps of a host.

    Args:
        index: see `PostedSteps`.
        ring: likewise.
        **how: likewise; and `measures`, whether their times are measured.
    """
    kind = MeasuredSteps if how.pop("measures") else PostedSteps
    return kind(index, ring, **how)
