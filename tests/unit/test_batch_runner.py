"""A batched env in its host: who is stepped with whom, and what becomes of each row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.env import adapt
from envmgr.env.batch_specs import Batch, BatchedEnvSpec, batches_of
from envmgr.env.batched import AsyncBatchedEnv, BatchedEnv
from envmgr.errors import ConfigError
from envmgr.spaces import codec_of
from envmgr.wire.arenas import arena_arrays, buffers_for, plan_placements
from envmgr.wire.block import (
    AFTER_BITS,
    AFTER_SHIFT,
    BUFFER_BITS,
    DONE,
    HAS_INFO,
    RESETS_ASKED,
    RING_ONCE,
    Block,
    BlockPlan,
    posting_of,
    token_of,
)
from envmgr.wire.hosts import HostSettings
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.latencies import N_BUCKETS, STEPS, SUM
from envmgr.wire.messages import AfterStep, EpisodePlan, FailureKind, Message, Op, ResetRequest
from envmgr.worker.batch_runner import RowRunner
from envmgr.worker.block_steps import block_stepper
from envmgr.worker.host import Host
from tests.batched import Do, ScriptedBatch
from tests.faults.interrupting import handlers, interrupt_at, points_of

PLAN = EpisodePlan(True, float("inf"), {"hard": 1})
WAITING = PLAN._replace(auto_reset=False)
both_routes = pytest.mark.parametrize("in_block", [False, True], ids=["message", "block"])


class Rig:
    """A host of one batched env, or some, built and reset; the test is the parent."""

    def __init__(
        self,
        size: int = 4,
        *,
        in_block: bool = True,
        partial_steps: bool = True,
        plan: EpisodePlan = PLAN,
        build: Callable[[int], Any] = ScriptedBatch,
        measures: bool = False,
        n_batches: int = 1,
        **settings: Any,
    ) -> None:
        self.size, self.in_block, self.plan = size, in_block, plan
        actions, layout = codec_of(Discrete(32)).layout, codec_of(ScriptedBatch.observation_space)
        assert actions is not None
        block_plan = BlockPlan(size, 1, actions, measures=measures)
        placements, nbytes = plan_placements(
            [layout.layout] * size, buffers_for(True), block_plan.nbytes
        )
        self.placements = [dataclasses.replace(p, block=block_plan) for p in placements if p]
        self.memory = bytearray(nbytes)
        self.block = Block(self.memory, block_plan)
        self.arena = arena_arrays(self.memory, self.placements[0])[0]
        self.posted = block_stepper(0, lambda: None, timed=False, measures=measures)
        self.built: list[Any] = []
        self.sent: list[Message] = []
        each = size // n_batches
        spec = BatchedEnvSpec(lambda: self._build(build, each), each, partial_steps)
        self.host = Host(
            dict.fromkeys(range(size), spec),
            HostSettings(batches=batches_of([spec] * size), **settings),
            encode=lambda message: message,
            send=self.sent.append,
            memory=lambda n: self.memory,
            stepper=self.posted if in_block else None,
        )
        self.request_id = 0
        self.generations = [0] * size
        for env_id in range(size):
            self.ask(Op.HELLO, env_id)
        if self.built and isinstance(self.built[0], ScriptedBatch):
            self.reset(*range(size))
            self.env.log.clear()

    def _build(self, build: Callable[[int], Any], size: int) -> Any:
        self.built.append(build(size))
        return self.built[-1]

    @property
    def env(self) -> ScriptedBatch:
        env: ScriptedBatch = self.built[-1]
        return env

    def ask(self, op: Op, env_id: int, payload: Any = None) -> None:
        """Send a request."""
        if op == Op.RESET and self.in_block:
            self.host.handle(Message(Op.ATTACH, env_id, 0, 0, self.placements[env_id]))
        self.request_id += 1
        self.host.handle(Message(op, env_id, 0, self.request_id, payload))

    def reset(
        self, *env_ids: int, seed: int | None = None, dynamic_seed: bool | None = None
    ) -> list[tuple[int, Op]]:
        """Reset rows by message, together; row i with `seed + i`."""
        self.ask_resets(*env_ids, seed=seed, dynamic_seed=dynamic_seed)
        return self.later()

    def ask_resets(
        self, *env_ids: int, seed: int | None = None, dynamic_seed: bool | None = None
    ) -> None:
        """Send the requests of that."""
        for i in env_ids:
            given = None if seed is None else seed + i
            self.ask(Op.RESET, i, ResetRequest({"x": i}, given, dynamic_seed, self.plan))

    def step(self, actions: dict[int, int], ring: int = RING_ONCE) -> list[tuple[int, Op]]:
        """Have rows take steps; return what was said of which at once, in the block too."""
        self.sent.clear()
        if not self.in_block:
            for env_id, action in actions.items():
                self.ask(Op.STEP, env_id, action)
            return self.said()
        self.request_id += 1
        for env_id, action in actions.items():
            self.block.actions[0][env_id] = action
            token = token_of(self.generations[env_id], self.request_id)
            self.block.requests[env_id] = token
        self.block.posted[0] = posting_of(self.request_id, ring)
        self.follows = self.posted.take_posted()
        newest = [token_of(generation, self.request_id) for generation in self.generations]
        replied = np.flatnonzero(self.block.replies == newest).tolist()
        return [*((i, Op.STEPPED) for i in replied), *self.said()]

    def later(self) -> list[tuple[int, Op]]:
        """Run what was postponed; return what was said."""
        before = self.block.resets.copy(), self.block.replies.copy()
        self.sent.clear()
        self.host.run_resets(len(self.host.pending_resets))
        new = zip(before, (self.block.resets, self.block.replies), strict=True)
        resets, replies = (np.flatnonzero(old != now).tolist() for old, now in new)
        in_block = [(i, Op.STEPPED) for i in replies] + [(i, Op.RESET_DONE) for i in resets]
        return in_block + self.said()

    def running(self) -> int | None:
        """Return who the host says is run."""
        if self.in_block:
            running = int(self.block.running[0]) - 1
            return None if running < 0 else running
        return next((m.env_id for m in reversed(self.sent) if m.op == Op.BEGAN), None)

    def said(self) -> list[tuple[int, Op]]:
        return [(message.env_id, Op(message.op)) for message in self.sent]

    def observed(self, env_id: int, *, of_reset: bool = False) -> list[float]:
        """Return the observation that a row's latest reply is about."""
        if not self.in_block:
            (message,) = (m for m in self.sent if m.env_id == env_id)
            (leaf,) = message.payload[0]
            dtype = ScriptedBatch.observation_space.dtype
            return list(np.frombuffer(leaf, dtype).tolist())
        flags = self.block.reset_flags if of_reset else self.block.flags
        return list(self.arena[int(flags[env_id]) & BUFFER_BITS, env_id].tolist())


def stepped(*env_ids: int) -> list[tuple[int, Op]]:
    return [(env_id, Op.STEPPED) for env_id in env_ids]


def begun(*env_ids: int) -> list[tuple[int, Op]]:
    return [(env_id, Op.RESET_DONE) for env_id in env_ids]


def test_a_batch_is_built_once_and_closed_with_its_last_row() -> None:
    rig = Rig(3)
    assert len(rig.built) == 1
    rig.ask(Op.RELEASE, 1)
    assert rig.env.closed == 0
    rig.ask(Op.RENEW, 1)
    assert len(rig.built) == 1
    rig.host.close()
    assert rig.env.closed == 1


@both_routes
def test_rows_are_reset_together_each_with_its_seed_and_params(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block)
    assert rig.reset(0, 2, seed=40) == begun(0, 2)
    assert rig.env.log == [("reset", [0, 2], [40, 42])]
    assert rig.env.params == [{"x": 0}, {"x": 2}]
    if not in_block:
        assert [m.payload[1] for m in rig.sent] == [{"first_of": 0}, {"first_of": 2}]


@pytest.mark.parametrize(
    ("dynamic_seed", "later"), [(None, [None, None]), (False, [40, 41]), (True, [1618817284, 7])]
)
def test_automatic_resets_are_seeded_as_those_of_gymnasium_envs(
    dynamic_seed: bool | None, later: list[Any]
) -> None:
    rig = Rig(2)
    rig.reset(0, 1, seed=40, dynamic_seed=dynamic_seed)
    rig.step({0: Do.END, 1: Do.END})
    rig.later()
    seeds = rig.env.log[-1][2]
    assert seeds == later or (dynamic_seed and seeds != [40, 41] and None not in seeds)


@both_routes
def test_rows_are_stepped_together_and_answered_each(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block)
    assert rig.step({0: 5, 1: 6, 2: 7}) == stepped(0, 1, 2)
    assert rig.env.log == [("step", [0, 1, 2], [5, 6, 7])]
    assert [rig.observed(i)[::4] for i in range(3)] == [[0, 5], [1, 6], [2, 7]]
    assert rig.later() == []


@both_routes
def test_some_rows_are_stepped_after_what_has_come_meanwhile(in_block: bool) -> None:
    rig = Rig(4, in_block=in_block)
    assert rig.step({1: 5}) == []
    assert rig.step({3: 6}) == []
    assert rig.host.has_pending_steps
    assert rig.later() == stepped(1, 3)
    assert rig.env.log == [("step", [1, 3], [5, 6])]
    assert not rig.host.has_pending_steps


@both_routes
def test_an_env_that_steps_all_of_its_rows_waits_for_them(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block, partial_steps=False)
    assert rig.step({0: 1, 1: 2}) == []
    assert not rig.host.pending_resets
    assert rig.step({2: 3}) == (stepped(2) if in_block else stepped(0, 1, 2))
    assert rig.env.log == [("step", [0, 1, 2], [1, 2, 3])]


@both_routes
def test_an_ended_row_is_reset_alone_and_not_waited_for(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block, partial_steps=False)
    assert rig.step({0: 1, 1: Do.END, 2: 1}) == stepped(0, 1, 2)
    if in_block:
        assert [bool(flags & DONE) for flags in rig.block.flags] == [False, True, False]
    else:
        assert [m.payload[2:5:2] for m in rig.sent][1] == (True, AfterStep.RESETS)
    assert rig.step({0: 1, 2: 1}) == stepped(0, 2)
    assert rig.later() == begun(1)
    assert rig.observed(1, of_reset=True)[2:] == [2, 0, 0]
    assert rig.step({0: 1, 2: 1}) == []
    assert rig.step({1: 9}) == (stepped(1) if in_block else stepped(0, 1, 2))
    assert [entry[:2] for entry in rig.env.log] == [
        ("step", [0, 1, 2]),
        ("step", [0, 2]),
        ("reset", [1]),
        ("step", [0, 1, 2]),
    ]


def test_all_rows_of_a_batch_are_stepped_in_columns_and_fewer_are_not() -> None:
    rig = Rig(3)
    assert [(first, end) for first, end, _ in rig.posted._column_steps] == [(0, 3)]
    rig.step({0: 1, 1: 1, 2: 1})
    assert rig.follows is False
    rig.step({0: 1, 1: Do.END, 2: 1})
    assert rig.follows is True, "its reset would wait for the next request"
    rig.ask(Op.RELEASE, 2)
    assert not rig.posted._column_steps


def test_rows_that_end_together_are_reset_together() -> None:
    rig = Rig(3)
    rig.step({0: Do.END, 1: 1, 2: Do.END})
    assert rig.later() == begun(0, 2)
    assert rig.env.log[1] == ("reset", [0, 2], [None, None])
    assert rig.env.params == [{"hard": 1}, {"hard": 1}]


def test_ended_rows_are_left_where_nobody_wants_a_reset() -> None:
    rig = Rig(2, partial_steps=False, plan=WAITING)
    rig.step({0: Do.END, 1: 1})
    assert rig.later() == []
    assert rig.step({1: 1}) == stepped(1)
    rig.reset(0)
    assert rig.step({1: 1}) == []


def test_what_some_rows_do_in_columns_is_reported_for_the_first_of_them() -> None:
    rig = Rig(3, partial_steps=False, plan=WAITING)
    rig.step({0: Do.END, 1: 1, 2: 1})
    rig.later()
    assert rig.step({1: 1, 2: Do.RAISE}) == [(1, Op.FAILED)]


def test_a_row_ends_alone_whatever_reward_the_others_get() -> None:
    class Late(ScriptedBatch):
        begins_late = True

    rig = Rig(3, in_block=False, partial_steps=False, build=Late)
    rig.step({0: Do.END, 1: 1, 2: 1})
    after = {m.env_id: m.payload[4] for m in rig.sent if m.op == Op.STEPPED}
    assert after == {0: AfterStep.RESETS_IN_NEXT_STEP, 1: AfterStep.NOTHING, 2: AfterStep.NOTHING}


def test_in_place_an_ended_row_begins_its_next_episode_within_the_step() -> None:
    rig = Rig(2, partial_steps=False, plan=PLAN._replace(inplace=True))
    assert rig.step({0: Do.END, 1: 1}) == stepped(0, 1)
    assert (rig.block.resets[0], rig.later()) == (rig.block.replies[0], [])
    assert rig.step({1: 1}) == []


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (Do.RAISE, FailureKind.RAISED, "in the midst"),
        (Do.SYS_EXIT, FailureKind.EXITED, "3"),
        (Do.FEW_ROWS, FailureKind.PROTOCOL, "obs .* entry for each of 3 rows, it has 2"),
    ],
)
@both_routes
def test_what_the_whole_env_does_is_reported_once_for_all_rows(
    in_block: bool, action: Do, kind: FailureKind, text: str
) -> None:
    rig = Rig(3, in_block=in_block)
    assert rig.step({0: 1, 1: action, 2: 1}) == [(0, Op.FAILED)]
    (failure,) = (message.payload for message in rig.sent)
    assert (failure.kind, failure.during, failure.of_batch) == (kind, "step", True)
    assert re.search(text, failure.message)


@pytest.mark.parametrize("action", [Do.BAD_ROW, Do.ABNORMAL])
@both_routes
def test_what_one_row_gives_is_that_rows_affair(in_block: bool, action: Do) -> None:
    rig = Rig(3, in_block=in_block, partial_steps=False)
    assert sorted(rig.step({0: 1, 1: action, 2: 1})) == sorted([*stepped(0, 2), (1, Op.FAILED)])
    (failure,) = (m.payload for m in rig.sent if m.op == Op.FAILED)
    assert not failure.of_batch
    assert rig.step({0: 1, 2: 1}) == stepped(0, 2)


@both_routes
def test_a_reset_that_raises_is_reported_for_each_row(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block)
    rig.step({0: Do.END_THEN_RAISE, 1: 1, 2: Do.END})
    assert rig.later() == [(0, Op.FAILED), (2, Op.FAILED)]
    assert "rows [0] cannot be reset" in rig.sent[1].payload.message
    assert not rig.sent[0].payload.of_batch
    assert rig.reset(0, 2) == begun(0, 2)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (ValueError("which?"), FailureKind.RAISED, "which?"),
        ([0, 7], FailureKind.PROTOCOL, r"about the rows \[0, 2\], it returned \[0, 7\]"),
        (None, FailureKind.RAISED, "not iterable"),
    ],
    ids=["raises", "strange row", "nothing"],
)
@both_routes
def test_an_env_that_cannot_say_which_rows_can_be_reset_fails_their_resets(
    in_block: bool, answer: Any, kind: FailureKind, text: str
) -> None:
    answers = [answer]

    class Odd(ScriptedBatch):
        def resettable(self, asked: Any, *, others: bool) -> Any:
            if not (self.log and answers):
                return super().resettable(asked, others=others)
            given = answers.pop()
            if isinstance(given, Exception):
                raise given
            return given

    rig = Rig(3, in_block=in_block, build=Odd)
    rig.step({0: Do.END, 1: 1, 2: Do.END})
    assert rig.later() == [(0, Op.FAILED), (2, Op.FAILED)]
    failures = [message.payload for message in rig.sent]
    assert {(f.kind, f.during, f.of_batch) for f in failures} == {(kind, "reset", False)}
    assert re.search(text, failures[0].message)
    assert rig.reset(0, 2) == begun(0, 2)


def test_what_a_row_raises_that_leaves_is_nobodys_concern() -> None:
    class Clinging(ScriptedBatch):
        def leave(self, row: int) -> None:
            raise ValueError("stay")

    rig = Rig(2, build=Clinging)
    for env_id in (0, 1):
        rig.ask(Op.RELEASE, env_id)
    assert rig.said()[-2:] == [(0, Op.RESULT), (1, Op.RESULT)]
    assert rig.env.closed == 1


@both_routes
def test_in_place_rows_that_end_together_are_reset_together(in_block: bool) -> None:
    rig = Rig(3, in_block=in_block, plan=PLAN._replace(inplace=True, episodes_left=3))
    said = rig.step({0: Do.END, 1: 1, 2: Do.END})
    assert [rig.observed(i)[2:] for i in range(3)] == [[1, 1, Do.END], [1, 1, 1], [1, 1, Do.END]]
    said += rig.later()
    assert said == stepped(0, 1, 2) + ([] if in_block else begun(0, 2))
    said = rig.step({0: Do.END, 1: 1, 2: Do.END_THEN_RAISE}) + rig.later()
    assert {(i, op) for i, op in said if op == Op.FAILED} == {(0, Op.FAILED), (2, Op.FAILED)}
    rig.reset(0, 2)
    assert [entry[:2] for entry in rig.env.log] == [
        ("step", [0, 1, 2]),
        ("reset", [0, 2]),
        ("step", [0, 1, 2]),
        ("reset", [0, 2]),
        ("reset", [0, 2]),
    ]


@both_routes
def test_a_row_that_is_to_be_reset_is_not_waited_for(in_block: bool) -> None:
    rig = Rig(4, in_block=in_block, partial_steps=False)
    rig.step({0: 1})
    rig.ask_resets(3)
    rig.step({1: 1})
    assert rig.later() == begun(3)
    assert rig.env.log == [("reset", [3], [None])]
    rig.ask_resets(2, 3)
    rig.step({1: 2})
    assert rig.env.log[1:] == [("step", [0, 1], [1, 2])]
    rig.later()
    rig.step({0: 1})
    rig.ask_resets(3)
    rig.step({1: 1, 2: 1})
    assert rig.env.log[3:] == [("step", [0, 1, 2], [1, 1, 1])]


@both_routes
def test_who_is_run_is_said_before_the_env_is(in_block: bool) -> None:
    seen: list[Any] = []

    class Watching(ScriptedBatch):
        def step(self, rows: Any, actions: Any) -> Any:
            seen.append(rig.running())
            return super().step(rows, actions)

        def reset(self, rows: Any, seeds: Any, params: Any) -> Any:
            if self.log:
                seen.append(rig.running())
            return super().reset(rows, seeds, params)

    announced = frozenset((Op.STEP, Op.RESET))
    rig = Rig(4, in_block=in_block, build=Watching, announced=announced)
    rig.step({1: Do.END, 2: Do.END})
    rig.later()
    rig.step({0: Do.END, 3: Do.END})
    rig.later()
    rig.later()
    assert seen == [1, 1, 0, 0]
    assert rig.running() is None


def test_what_passes_through_a_reset_is_not_reported() -> None:
    rig = Rig(2, propagate=(RuntimeError,))
    rig.step({0: Do.END_THEN_RAISE, 1: 1})
    with pytest.raises(RuntimeError):
        rig.later()
    assert rig.said() == []


def test_what_passes_through_is_not_reported() -> None:
    rig = Rig(2, propagate=(KeyboardInterrupt,))
    with pytest.raises(KeyboardInterrupt):
        rig.step({0: 1, 1: Do.INTERRUPT})
    assert rig.posted.interrupted_env_id in (0, 1)
    assert rig.said() == []


def test_an_env_that_cannot_be_built_fails_all_rows() -> None:
    def build(size: int) -> Any:
        raise OSError("no device")

    rig = Rig(2, build=build)
    assert rig.said() == [(0, Op.FAILED), (1, Op.FAILED)]


@pytest.mark.parametrize("space", ["odd", None], ids=["is none", "raises"])
def test_a_batch_whose_rows_cannot_be_run_is_closed(space: Any) -> None:
    class Odd(ScriptedBatch):
        @property
        def observation_space(self) -> Any:  # type: ignore[override]
            if space is None:
                raise ValueError("no space")
            return space

    sent, built = list[Message](), list[ScriptedBatch]()

    def build() -> ScriptedBatch:
        built.append(Odd(2))
        return built[-1]

    spec = BatchedEnvSpec(build, 2)
    host = Host(
        dict.fromkeys(range(2), spec),
        HostSettings(batches=batches_of([spec] * 2)),
        encode=lambda message: message,
        send=sent.append,
        memory=lambda n: None,
    )
    for env_id in range(2):
        host.handle(Message(Op.HELLO, env_id, 0, 1, None))
    assert [message.op for message in sent] == [Op.FAILED] * 2
    assert [env.closed for env in built] == [1, 1]


def test_a_spec_that_builds_something_else_says_so() -> None:
    rig = Rig(2, build=lambda size: object())
    assert "returned a value of type object, not a BatchedEnv" in rig.sent[0].payload.message


def test_calls_and_attributes_are_about_a_row() -> None:
    rig = Rig(2)
    rig.sent.clear()
    rig.ask(Op.CALL, 1, ("double", (4,)))
    rig.ask(Op.SET_ATTR, 0, ("colour", "red"))
    rig.ask(Op.GET_ATTR, 0, "colour")
    rig.ask(Op.GET_ATTR, 1, "double")
    rig.ask(Op.SET_ATTR, 0, ("size", 3))
    rig.ask(Op.CALL, 0, ("render", ()))
    results = [message.payload for message in rig.sent]
    assert results[:2] == [[1, 8], False]
    assert (results[2].value, results[3].is_method) == ("red", True)
    assert "rows share one object" in results[4].message
    assert "cannot render" in results[5].message


def test_a_function_may_step_a_row_alone() -> None:
    rig = Rig(2)
    rig.sent.clear()
    rig.ask(Op.APPLY, 1, (lambda applied: applied.step_result(8)[0].tolist()[4], ()))
    assert rig.sent[0].payload == 8
    assert rig.env.log == [("step", [1], [8])]


def test_a_batch_of_one_row_is_stepped_at_once() -> None:
    rig = Rig(1, partial_steps=False)
    assert rig.step({0: Do.END}) == stepped(0)
    assert rig.later() == begun(0)


# -- which env_ids are rows ---------------------------------------------------------------------


def test_the_rows_of_a_batch_are_neighbours() -> None:
    two, three = (BatchedEnvSpec(lambda: ScriptedBatch(1), n) for n in (2, 3))
    assert batches_of([two, two, object, three, three, three, two, two]) == (
        Batch(0, 2, False),
        Batch(3, 3, False),
        Batch(6, 2, False),
    )
    assert batches_of([object]) == ()


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_batch_that_lacks_rows_is_refused(n_rows: int) -> None:
    spec = BatchedEnvSpec(lambda: ScriptedBatch(2), 2)
    with pytest.raises(ConfigError, match=f"2 rows from env {n_rows - 1} on, .* for 1 envs"):
        batches_of([spec] * n_rows)


@pytest.mark.parametrize(("build", "size"), [("x", 2), (ScriptedBatch, 0), (ScriptedBatch, True)])
def test_a_spec_of_no_use_is_refused(build: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match="BatchedEnvSpec"):
        BatchedEnvSpec(build, size)


def test_a_plain_factory_of_a_batched_env_is_told_what_to_do() -> None:
    with pytest.raises(adapt.EnvContractError, match="wrap its factory in a BatchedEnvSpec"):
        adapt.as_base_env(ScriptedBatch(2), 0)
    assert isinstance(ScriptedBatch(2), BatchedEnv)


def test_a_step_in_columns_leaves_the_newest_observation_where_it_is() -> None:
    rig = Rig(3, partial_steps=False)
    buffers = []
    for number in (1, 2, 3):
        assert len(rig.step(dict.fromkeys(range(3), number))) == 3
        buffers.append((rig.block.flags & BUFFER_BITS).tolist())
        assert [rig.observed(i)[4] for i in range(3)] == [number] * 3
    assert buffers[0] == buffers[2] != buffers[1]
    assert all(len(set(found)) == 1 for found in buffers)


class Telling(ScriptedBatch):
    """Rows tell their action in an info; 9 in one that is no data."""

    def step(self, rows: Sequence[int], actions: Sequence[Any]) -> Any:
        *columns, _ = super().step(rows, actions)
        told = [int(action) for action in actions]
        infos = [{"n": n} if n < 9 else {"n": object()} if n == 9 else {} for n in told]
        return (*columns, infos)


@pytest.mark.parametrize("partial_steps", [False, True])
def test_infos_of_a_step_in_columns_are_written_beside_it(partial_steps: bool) -> None:
    rig = Rig(4, partial_steps=partial_steps, build=Telling)
    rig.reset(*range(4))
    assert rig.step({0: 1, 1: Do.END, 2: 9, 3: 3}) == [
        (0, Op.STEPPED),
        (1, Op.STEPPED),
        (3, Op.STEPPED),
        (2, Op.STEPPED),  # by message
    ]
    assert type(rig.sent[0].payload[3]["n"]) is object
    decode, block = InfoDecoder().decode, rig.block
    told = [bool(flag & HAS_INFO) for flag in block.flags]
    assert told == [True, False, False, True]
    assert [decode(block.infos[i].tobytes()) for i in (0, 3)] == [{"n": 1}, {"n": 3}]
    assert [rig.observed(i)[4] for i in (0, 1, 3)] == [1, Do.END, 3]
    rig.later()  # row 1 begins an episode
    assert len(rig.step({0: 4, 1: 5, 2: 6, 3: 7})) == 4
    assert [decode(block.infos[i].tobytes())["n"] for i in range(4)] == [4, 5, 6, 7]
    assert [rig.observed(i)[4] for i in range(4)] == [4, 5, 6, 7]


class Whole(Telling):
    """Steps some rows as columns of all of them; those that take none tell something, too."""

    def step_whole(self, rows: Any, actions: Any) -> Any:  # type: ignore[override]
        obs, rewards, ends, truncated, infos = self.step(rows.tolist(), actions[rows])
        whole = [np.full((4, *part.shape[1:]), 9, part.dtype) for part in (obs, rewards)]
        flags = [np.ones(4, bool), np.ones(4, bool)]
        for column, part in zip((*whole, *flags), (obs, rewards, ends, truncated), strict=True):
            column[rows] = part
        by_row = dict(zip(rows.tolist(), infos, strict=True))
        return (*whole, *flags, [by_row.get(row, {"nobody": "asked"}) for row in range(4)])


@pytest.mark.parametrize("build", [ScriptedBatch, Telling, Whole])
@pytest.mark.parametrize("partial_steps", [False, True])
def test_what_rows_that_take_no_step_have_replied_stays(partial_steps: bool, build: Any) -> None:
    rig = Rig(4, partial_steps=partial_steps, build=build, plan=WAITING)
    rig.reset(*range(4))
    rig.step({0: 1, 1: 2, 2: 3, 3: Do.END})

    def of_row_3() -> tuple[Any, ...]:
        block = rig.block
        numbers = (block.rewards[3], block.flags[3], block.replies[3])
        return (*numbers, block.infos[3].tobytes())

    before, shown = of_row_3(), rig.observed(3)
    assert len(rig.step({0: 4, 1: 5, 2: 6})) == 3
    assert of_row_3() == before
    assert rig.observed(3) == shown
    assert [rig.observed(i)[4] for i in range(3)] == [4, 5, 6]


class Silent(ScriptedBatch):
    """Its resets say nothing besides the observations, which it may use again."""

    def reset(self, *args: Any) -> tuple[Any, Any]:
        return super().reset(*args)[0], None


UNTOLD = PLAN._replace(params={})


@pytest.mark.parametrize("inplace", [False, True])
def test_episodes_that_begin_in_columns_are_answered_as_others(inplace: bool) -> None:
    rig = Rig(4, build=Silent, plan=UNTOLD._replace(inplace=inplace))
    rig.generations = [0, 1, 2, 3]
    buffers = []
    for episode in (1, 2, 3):  # the first ends are looked at one by one
        rig.step({0: 1, 1: Do.END, 2: 2, 3: Do.END})
        tokens = rig.block.replies.copy()
        after = (AfterStep.RESETS << AFTER_SHIFT | DONE) * np.array([0, 1, 0, 1])
        assert (rig.block.flags & (AFTER_BITS | DONE)).tolist() == after.tolist()
        if not inplace:
            assert rig.later() == begun(1, 3)
        assert rig.env.log[-1] == ("reset", [1, 3], [None, None])
        assert rig.block.resets[[1, 3]].tolist() == tokens[[1, 3]].tolist()
        shown = [rig.observed(i, of_reset=True) for i in (1, 3)]
        assert shown == [[i, -1, episode + 1, 0, 0] for i in (1, 3)]
        assert [rig.observed(i)[3] for i in (1, 3)] == [1, 1], "the last observation stays"
        buffers.append(rig.block.reset_flags[[1, 3]].tolist())
    assert buffers[0] == buffers[2] != buffers[1], "those of two episodes are not in one buffer"
    assert rig.step(dict.fromkeys(range(4), 1)) == stepped(0, 1, 2, 3)
    assert [env.episodes for env in rig.host._envs.values()] == [0, 3, 0, 3]


def test_episodes_begin_in_columns_with_the_seeds_that_are_due() -> None:
    rig = Rig(2, build=Silent, plan=UNTOLD)
    for seed, dynamic, due in ((5, False, [5, 6]), (7, None, [None, None]), (9, False, [9, 10])):
        rig.reset(0, 1, seed=seed, dynamic_seed=dynamic)
        for _ in range(3):
            rig.step({0: Do.END, 1: Do.END})
            rig.later()
            assert rig.env.log[-1] == ("reset", [0, 1], due)


def test_episodes_that_begin_together_have_the_params_of_their_plans() -> None:
    rig = Rig(2, build=Silent, plan=PLAN)
    for _ in range(3):
        rig.step({0: Do.END, 1: Do.END})
        assert rig.later() == begun(0, 1)
        assert rig.env.params == [{"hard": 1}] * 2


def test_a_reset_in_columns_that_raises_is_reported_for_each_row() -> None:
    rig = Rig(3, build=Silent, plan=UNTOLD)
    for _ in range(2):
        rig.step({0: Do.END, 1: Do.END, 2: 1})
        assert rig.later() == begun(0, 1)
    rig.step({0: Do.END_THEN_RAISE, 1: Do.END, 2: 1})
    assert rig.later() == [(0, Op.FAILED), (1, Op.FAILED)]


def test_resets_in_columns_end_with_the_budget_of_episodes() -> None:
    rig = Rig(2, build=Silent, plan=UNTOLD._replace(episodes_left=3))
    for _ in range(3):
        rig.step({0: Do.END, 1: Do.END})
        assert rig.later() == begun(0, 1)
    rig.step({0: Do.END, 1: Do.END})
    assert rig.later() == []
    assert (rig.block.flags & AFTER_BITS).tolist() == [0, 0]


def test_a_worker_with_a_limit_is_asked_at_each_end() -> None:
    rig = Rig(2, build=Silent, plan=UNTOLD, max_episodes=4)
    rig.step({0: Do.END, 1: Do.END})
    assert rig.later() == begun(0, 1)
    rig.step({0: Do.END, 1: Do.END})
    after = (rig.block.flags & AFTER_BITS) >> AFTER_SHIFT
    assert after.tolist() == [AfterStep.RESETS, AfterStep.WANTS_RECYCLING]


def test_steps_in_columns_are_taken_whatever_is_interrupted_before_them() -> None:
    def posted() -> Rig:
        rig = Rig(3, partial_steps=False, build=Silent, plan=UNTOLD, propagate=(KeyboardInterrupt,))
        rig.step(dict.fromkeys(range(3), 1))
        rig.request_id += 1
        rig.block.requests[:] = token_of(0, rig.request_id)
        rig.block.posted[0] = posting_of(rig.request_id, RING_ONCE)
        return rig

    rig = posted()
    points = points_of(lambda: rig.posted.take_posted())
    before = [point for point in points if point.code.co_filename.endswith("block_steps.py")]
    assert len(before) > 20
    with handlers(lambda: None):
        for point in before:
            rig = posted()
            with contextlib.suppress(KeyboardInterrupt):
                interrupt_at(point, rig.posted.take_posted, signal.SIGINT)
            if rig.posted.interrupted_env_id is None:
                rig.posted.take_posted()
                is_answered = rig.block.replies == token_of(0, rig.request_id)
                assert is_answered.all(), str(point)


def test_who_was_interrupted_is_known_though_a_handler_has_closed_all() -> None:
    rig = Rig(3, propagate=(KeyboardInterrupt,))

    def close_and_raise(*args: Any) -> Any:
        rig.host.close()
        raise KeyboardInterrupt

    rig.env.step = close_and_raise  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rig.step(dict.fromkeys(range(3), 1))
    assert rig.posted.interrupted_env_id == 0


@pytest.mark.parametrize("method", ["step", "reset"])
@pytest.mark.parametrize("n_batches", [1, 2])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("build", [ScriptedBatch, Silent])
@both_routes
def test_a_handler_that_closes_all_in_the_code_of_an_env_is_no_failure(
    in_block: bool, build: Any, inplace: bool, n_batches: int, method: str
) -> None:
    for measures, action, ring in itertools.product(
        (False, True), (1, Do.END), (RING_ONCE, RING_ONCE | RESETS_ASKED)
    ):
        rig = Rig(
            4,
            in_block=in_block,
            build=build,
            plan=UNTOLD._replace(inplace=inplace),
            n_batches=n_batches,
            measures=measures,
        )
        logs: list[Any] = []

        def close(run: Any, rig: Rig = rig, logs: list[Any] = logs) -> Callable[..., Any]:
            def runs(*args: Any) -> Any:
                result = run(*args)
                rig.host.close()
                logs.append([list(env.log) for env in rig.built])
                return result

            return runs

        for _ in range(2):  # how an episode ends is known from the first end on
            rig.step(dict.fromkeys(range(4), Do.END))
            rig.later()
        for env in rig.built:
            setattr(env, method, close(getattr(env, method)))
        rig.step({0: action, 1: 1, 2: action, 3: 1}, ring)
        while rig.host.pending_resets:
            rig.host.run_resets(1)  # as where envs run in the caller: only there are handlers run
        if method == "step" or action == Do.END:
            assert [[env.log for env in rig.built]] == logs, "one is run after it was closed"
            assert [env.closed for env in rig.built] == [1] * n_batches
            assert not rig.posted.has_rows


def test_a_reset_by_hand_of_an_env_that_a_handler_closes_is_no_failure() -> None:
    rig = Rig(2, in_block=False)
    reset = rig.env.reset

    def close(*args: Any) -> Any:
        result = reset(*args)
        rig.host.close()
        return result

    rig.env.reset = close  # type: ignore[method-assign]
    assert rig.reset(0, 1) == []
    assert (len(rig.env.log), rig.env.closed) == (1, 1)


def test_steps_and_resets_in_columns_ask_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(4, build=Silent, plan=UNTOLD)
    end = {0: 1, 1: Do.END, 2: 1, 3: 1}
    rig.step(end)
    rig.later()  # from now on it is known that there is nothing to say of that row

    def refuse(*args: Any) -> Any:
        raise AssertionError("a row was asked")

    for name in ("take_step", "begin_episode"):
        monkeypatch.setattr(RowRunner, name, refuse)
    assert len(rig.step(end)) == 4
    assert rig.later() == begun(1)


def test_a_row_that_skips_a_step_keeps_its_newest_observation_when_it_is_stepped_again() -> None:
    rig = Rig(3, partial_steps=True)
    rig.step(dict.fromkeys(range(3), 1))
    before = rig.block.flags[1] & BUFFER_BITS
    rig.step({0: 2, 2: 2})
    rig.later()
    rig.step(dict.fromkeys(range(3), 3))
    assert rig.block.flags[1] & BUFFER_BITS != before, "it would be overwritten while it is shown"


def test_steps_in_columns_are_measured_for_each_row_that_takes_them() -> None:
    rig = Rig(3, partial_steps=False, build=Silent, measures=True)
    rig.reset(*range(3))
    rig.step(dict.fromkeys(range(3), 1))
    counts = [row[:N_BUCKETS].sum() for row in rig.block.latencies[STEPS]]
    assert counts == [1, 1, 1]
    sums = rig.block.latencies[STEPS][:, SUM]
    assert sums[0] == sums[1] == sums[2] > 0


# -- batched envs that give results when they are there -------------------------------------------


class Asynchronous(AsyncBatchedEnv):
    """What has been begun is done in the order of `order`, two rows at a time; 13 fails."""

    observation_space, action_space = Box(-99, 99, (1,), np.float32), Discrete(32)

    def __init__(self, size: int) -> None:
        self.under_way: dict[int, float] = {}
        self.order: list[int] = []
        self.log: list[Any] = []
        self.may = True

    def send(self, rows: Sequence[int], actions: Sequence[Any]) -> None:
        self.log.append(("send", list(rows)))
        if 13 in actions:
            raise ValueError("thirteen")
        self.under_way.update(zip(rows, map(float, actions), strict=True))

    def begin(self, rows: Sequence[int], seeds: Any, params: Any) -> None:
        self.log.append(("begin", list(rows), list(seeds), list(params)))
        if {"fails": True} in params:
            raise ValueError("no beginning")
        self.under_way.update(dict.fromkeys(rows, 0.0))

    def fill(self, rows: Sequence[int]) -> None:
        self.log.append(("fill", list(rows)))
        self.under_way.update(dict.fromkeys(rows, -1.0))

    def may_begin(self, seeds: Any, *, others: bool) -> bool:
        return self.may

    def receive(self) -> tuple[Sequence[int], Sequence[Any]]:
        rows = sorted(self.under_way, key=lambda row: (row not in self.order, row))[:2]
        assert len(rows) == 2, "it would wait for ever"
        values = [self.under_way.pop(row) for row in rows]
        self.log.append(("receive", rows))
        if 7.0 in values:
            raise ValueError("seven")
        ended = [value == 9 for value in values]
        obs = np.array(values, np.float32)[:, None]
        return rows, (obs, values, ended, [False] * 2, [{"row": row} for row in rows])


class AsyncRig:
    """A host of one such env, built and reset; what it says by message is `said`."""

    def __init__(
        self,
        size: int = 4,
        plan: EpisodePlan = UNTOLD,
        build: Callable[[int], Asynchronous] = Asynchronous,
    ) -> None:
        self.plan, self.request_id, self.sent = plan, 0, list[Message]()
        self.env = build(size)
        spec = BatchedEnvSpec(lambda: self.env, size, batch_size=2)
        self.host = Host(
            dict.fromkeys(range(size), spec),
            HostSettings(batches=batches_of([spec] * size)),
            encode=lambda message: message,
            send=self.sent.append,
            memory=lambda n: None,
        )
        for env_id in range(size):
            self.ask(Op.HELLO, env_id)
        self.reset(*range(size))
        while self.host.pending_resets:
            self.said()
        self.env.log.clear()

    def ask(self, op: Op, env_id: int, payload: Any = None) -> None:
        self.request_id += 1
        self.host.handle(Message(op, env_id, 0, self.request_id, payload))

    def reset(self, *env_ids: int, **params: Any) -> None:
        for env_id in env_ids:
            self.ask(Op.RESET, env_id, ResetRequest(params, None, None, self.plan))

    def step(self, actions: dict[int, int]) -> None:
        for env_id, action in actions.items():
            self.ask(Op.STEP, env_id, action)

    def said(self) -> list[tuple[int, Op]]:
        """Run what is due now; return what was said."""
        self.sent.clear()
        self.host.run_resets(len(self.host.pending_resets))
        return [(message.env_id, Op(message.op)) for message in self.sent]


def test_rows_that_are_done_first_are_answered_first() -> None:
    rig = AsyncRig()
    rig.env.order = [2, 3]
    rig.step({0: 1, 1: 2, 2: 3, 3: 4})
    assert rig.host.has_pending_steps
    assert rig.said() == [], "all are begun before anything is waited for"
    assert rig.host.only_receives
    assert rig.said() == stepped(2, 3)
    assert [message.payload[3]["row"] for message in rig.sent] == [2, 3]
    assert rig.said() == stepped(0, 1)
    assert not rig.host.pending_resets
    assert not rig.host.only_receives
    assert rig.env.log == [("send", [0, 1, 2, 3]), ("receive", [2, 3]), ("receive", [0, 1])]


def test_an_episode_that_has_ended_begins_beside_the_steps_of_others() -> None:
    rig = AsyncRig()
    rig.step({0: 9, 1: 1})
    rig.said()
    assert rig.said() == stepped(0, 1)
    rig.step({1: 2})
    rig.said()
    assert ("begin", [0], [None], [{}]) in rig.env.log
    assert rig.said() == [*stepped(1), *begun(0)]
    (reset,) = (message for message in rig.sent if message.op == Op.RESET_DONE)
    assert reset.payload[1] == {"row": 0}


def test_idle_rows_fill_a_batch_that_would_not_come_else() -> None:
    rig = AsyncRig(plan=WAITING)
    rig.step({0: 9, 1: 9, 2: 9, 3: 1})
    while rig.host.pending_resets:
        rig.said()
    rig.step({3: 2})
    rig.said()
    assert rig.said() == stepped(3), "what was filled in is not shown"
    assert ("fill", [0]) in rig.env.log


def test_one_row_alone_waits_for_a_second_one() -> None:
    rig = AsyncRig()
    rig.step({0: 1})
    assert rig.said() == []
    assert not rig.host.pending_resets, "nothing would come"
    rig.step({1: 1})
    rig.said()
    assert rig.said() == stepped(0, 1)


def test_what_an_asynchronous_batch_raises_is_reported_once_and_to_each_reset() -> None:
    rig = AsyncRig()
    rig.step({0: 13, 1: 1})
    assert rig.said() == [(0, Op.FAILED)]
    assert rig.sent[0].payload.of_batch
    rig.reset(2, 3, fails=True)
    assert rig.said() == [(2, Op.FAILED), (3, Op.FAILED)]
    rig = AsyncRig()
    rig.step({0: 7, 1: 1})
    rig.reset(2, 3)
    rig.env.order = [0]
    said, sent = list[tuple[int, Op]](), list[Message]()
    for _ in range(3):
        said += rig.said()
        sent += rig.sent
    assert said == [(0, Op.FAILED), (2, Op.FAILED), (3, Op.FAILED)]
    assert {message.payload.message for message in sent} == {"seven"}


def test_a_reset_that_cannot_begin_waits_while_others_are_under_way_and_then_fails_to() -> None:
    rig = AsyncRig()
    rig.env.may = False
    rig.step({0: 1, 1: 1})
    rig.reset(2)
    rig.said()
    assert rig.said() == stepped(0, 1)
    assert not any(entry[0] == "begin" for entry in rig.env.log)
    rig.step({3: 1})
    while rig.host.pending_resets:
        rig.said()
    assert ("begin", [2], [None], [{}]) in rig.env.log, "nothing changes any more"


def test_an_env_that_cannot_say_whether_rows_may_begin_fails_their_resets() -> None:
    def may_begin(seeds: Any, *, others: bool) -> bool:
        raise ValueError("who knows")

    rig = AsyncRig()
    rig.env.may_begin = may_begin  # type: ignore[method-assign]
    rig.step({0: 9, 1: 1})
    assert rig.said() == []
    rig.reset(2, 3)
    assert rig.said() == [(2, Op.FAILED), (3, Op.FAILED), *stepped(0, 1)]
    failures = [message.payload for message in rig.sent[:2]]
    assert {(f.during, f.message) for f in failures} == {("reset", "who knows")}
    assert ("begin", [0], [None], [{}]) in rig.env.log, "nobody has asked for this one"


@pytest.mark.parametrize("rows", [[0, 0], [0, 7], [0, -1], [0, "x"]], ids=str)
def test_results_of_strange_rows_are_a_breach_of_the_protocol(rows: list[Any]) -> None:
    class Odd(Asynchronous):
        def receive(self) -> Any:
            received, result = super().receive()
            return (received if self.may else rows), result

    rig = AsyncRig(build=Odd)
    rig.env.may = False
    rig.step({0: 1, 1: 1})
    rig.said()
    assert rig.said() == [(0, Op.FAILED)]
    (failure,) = (message.payload for message in rig.sent)
    assert (failure.kind, failure.of_batch) == (FailureKind.PROTOCOL, True)
    assert f"it returned those of {rows}" in failure.message


def test_a_first_observation_that_cannot_be_kept_fails_that_reset() -> None:
    def own(observation: Any) -> Any:
        raise ValueError("no copy")

    rig = AsyncRig()
    rig.env.own = own  # type: ignore[method-assign]
    rig.reset(0)
    rig.step({1: 1})
    rig.said()
    assert sorted(rig.said()) == sorted([(0, Op.FAILED), *stepped(1)])


def test_a_row_that_is_closed_is_not_answered() -> None:
    rig = AsyncRig()
    rig.step({0: 1, 1: 2})
    rig.said()
    rig.ask(Op.RELEASE, 0)
    assert rig.said() == stepped(1)
    for env_id in (1, 2, 3):
        rig.ask(Op.RELEASE, env_id)
    assert rig.said() == []


@pytest.mark.parametrize("method", ["send", "begin", "receive"])
def test_a_handler_that_closes_all_in_an_asynchronous_batch_is_no_failure(method: str) -> None:
    rig = AsyncRig()
    run = getattr(rig.env, method)

    def close(*args: Any) -> Any:
        result = run(*args)
        rig.host.close()
        return result

    setattr(rig.env, method, close)
    rig.step({0: 1, 1: 1})
    rig.reset(2, 3)
    while rig.host.pending_resets:
        rig.said()
    assert rig.env.log[-1][0] == method, "it is run after it was closed"
