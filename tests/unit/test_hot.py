"""The ordinary step in C: it does what Python does, takes nothing that it does not give back."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import shutil
import signal
import struct
import sys
import sysconfig
import types
import warnings
import weakref
from array import array
from collections import Counter, namedtuple
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text

import envmgr.hot
from envmgr import EnvTimestep
from envmgr.hot import ABI, PURE, hot
from envmgr.spaces import codec_of
from envmgr.wire import info_forms
from envmgr.wire.arenas import ObservationRules
from envmgr.wire.block import (
    BUFFER_BITS,
    DONE,
    HAS_INFO,
    PLAIN_END,
    PLAIN_END_BITS,
    block_is_possible,
)
from envmgr.wire.info_columns import InfoColumn
from envmgr.wire.messages import Message, Op
from envmgr.worker import block_steps, env_runner
from envmgr.worker.copies import UNCHANGEABLE
from tests.cases import for_each
from tests.fuzz.hot import (
    Different,
    FourEnv,
    OddFields,
    OddOtherKey,
    TextKind,
    compare,
    fuzz,
    plain,
    trainer_cases,
    without_c,
    worker_cases,
)
from tests.rig import Rig
from tests.unit.host_rigs import BlockRig, block_step

in_c = pytest.mark.skipif(hot is None, reason=f"no C: {envmgr.hot.WHY}")

# -- C and Python ---------------------------------------------------------------------------------


@in_c
def test_c_does_what_python_does_whatever_comes() -> None:
    seen = fuzz(0, 900)
    assert min(seen["replied in the block"], seen["replied by message"]) > 50, seen
    assert min(seen["posted in C"], seen["posted in Python"], seen["not posted"]) > 40, seen
    assert min(seen["collected in C"], seen["collected in Python"], seen["ends in C"]) > 15, seen
    assert min(seen["infos written"], seen["infos not written"], seen["infos read together"]) > 50
    assert "raised" not in str([name for name in seen if "trainer" in name])


def test_a_difference_is_seen() -> None:
    compare("equal", {"a": 1}, {"a": 1})
    with pytest.raises(Different, match="a case\na: in C 1, in Python 2"):
        compare("a case", {"a": 1}, {"a": 2})


# -- arrays that have no buffer -------------------------------------------------------------------

UNBUFFERED = [
    np.dtype("M8[s]"),
    np.dtype("m8[ns]"),
    np.dtype([("at", "M8[s]"), ("x", "f4")]),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}),
    np.dtype([("a:b", "f4")]),
]


@pytest.mark.parametrize("dtype", UNBUFFERED, ids=str)
def test_observations_without_a_buffer_are_written_in_python(dtype: Any) -> None:
    space: Any = gymnasium.Space((2,), dtype)
    rig = BlockRig(env_class=lambda: FourEnv(space), observations=space)
    for number in (1, 2):
        obs = np.frombuffer(bytes((number,)) * 2 * dtype.itemsize, np.uint8).view(dtype)
        assert rig.step(block_step(obs)) == []
        assert rig.has_replied()
        buffer = int(rig.block.flags[0]) & BUFFER_BITS
        assert rig.arena[buffer, 0].tobytes() == obs.tobytes()


@for_each(
    "space",
    [
        *(gymnasium.Space[Any]((2,), dtype) for dtype in UNBUFFERED),
        Discrete(10, start=2**63 - 5),  # some of its numbers have more than 64 bits
    ],
)
def test_actions_that_c_cannot_take_are_left_to_python(space: Any) -> None:
    columns = codec_of(space).action_columns(checked=True)
    assert columns is not None
    assert columns.in_c is None


def test_actions_that_c_can_take_are_said_to_be_such() -> None:
    spaces: list[Any] = [
        Discrete(5),
        Discrete(10, start=2**63 - 10),
        Box(-np.inf, np.inf, (2,), np.float32),
        gymnasium.Space((2,), np.dtype([("x", "f4"), ("n", "i8")])),
    ]
    found = [codec_of(space).action_columns(checked=True) for space in spaces]
    assert [None if one is None else one.in_c for one in found] == [
        (True, 0, 4),
        (True, 2**63 - 10, 2**63 - 1),
        (False, 0, 0),
        (False, 0, 0),
    ]


# -- interrupts -----------------------------------------------------------------------------------


class _InterruptedBefore:
    """A batch that an interrupt comes before."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "batch":
            super().__setattr__(name, value)
        else:
            setattr(self.batch, name, value)

    def __call__(self, *args: Any) -> Any:
        raise KeyboardInterrupt


@in_c
def test_an_interrupt_just_before_a_batch_leaves_all_of_its_steps() -> None:
    rig = BlockRig(2)
    rig.post(0, 1)
    rig.run()
    batch = rig.posted._take_in_c
    rig.posted._take_in_c = _InterruptedBefore(batch)
    rig.post(0, 1)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    assert rig.posted.interrupted_env_id is None
    rig.posted._take_in_c = batch
    rig.run()
    assert [len(env.log) for env in rig.envs.values()] == [2, 2]
    assert rig.has_replied(0)
    assert rig.has_replied(1)


@in_c
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_in_a_step_leaves_those_after_it(at: int) -> None:
    rig = BlockRig(3, propagate=(KeyboardInterrupt,))
    rig.envs[at].gives.append(KeyboardInterrupt())
    rig.post(0, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    assert rig.posted.interrupted_env_id == at
    assert [rig.has_replied(i) for i in range(3)] == [i < at for i in range(3)]
    rig.run()
    assert [rig.has_replied(i) for i in range(3)] == [i != at for i in range(3)]
    assert [len(env.log) for env in rig.envs.values()] == [1, 1, 1]


@in_c
@pytest.mark.parametrize("by_id", [True, False])
def test_what_a_close_takes_away_in_between_is_posted_all_the_same(
    by_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(2, has_block=True).launch()
    submitter = rig.supervisor.submitter
    rig.send({0: 1, 1: 1})
    selection = rig.selection([0, 1])
    assert selection.in_c is not None
    rig.transport.die(0)
    rig.transport.die(1)
    rig.supervisor.table.phases.column[:] = bytes(2)
    monkeypatch.setattr(submitter._limits, "step_s", 5.0)
    monkeypatch.setattr(
        submitter._limits, "set_posted", lambda rows: rig.supervisor.selections.share(None)
    )
    actions = {0: 1, 1: 1} if by_id else np.array([1, 1])
    posted = submitter.by_id(actions, 0) if by_id else submitter.rows([0, 1], actions, 0)
    assert (posted is selection, selection.in_c) == (True, None)
    assert rig.supervisor.statistics.actions == 4


# -- what is taken is given back ------------------------------------------------------------------

WATCHED: tuple[Any, ...] = (np.ndarray, np.float64, EnvTimestep)
if sys.hexversion < 0x030C0000:  # later Pythons do not count references to these
    WATCHED += (None, True, False, float, tuple)


def _used() -> dict[str, int]:
    gc.collect()
    used = {f"references to {one!r}": sys.getrefcount(one) for one in WATCHED}
    for name in ("OrdinaryStep", "BatchOfSteps", "OrdinaryRows"):
        used[f"references to {name}"] = sys.getrefcount(getattr(hot, name))
    used["blocks of memory"] = sys.getallocatedblocks()
    used["objects"] = len(gc.get_objects())
    return used


@in_c
@pytest.mark.parametrize("seed", [5, 6])  # in the latter, episodes end in place
def test_no_reference_is_kept_and_none_is_given_back_twice_whatever_comes(seed: int) -> None:
    def cases() -> None:
        worker_cases(seed, 120, Counter())
        trainer_cases(seed, 120, Counter())

    cases()
    looks = [_used()]
    for _ in range(5):
        cases()
        looks.append(_used())
    # What Python keeps for a while comes and goes; what is not given back comes each time.
    for name in looks[0]:
        grown = [after[name] - before[name] for before, after in itertools.pairwise(looks)]
        assert min(map(abs, grown)) < 100, (name, grown)


TIMES = 400


def grown_by(call: Callable[[], Any]) -> dict[str, int]:
    """Return what there is more of after a call was made many times, if it is not chance."""
    for _ in range(20):
        call()
    before = _used()
    for _ in range(TIMES):
        call()
    grown = {name: count - before[name] for name, count in _used().items()}
    return {name: n for name, n in grown.items() if abs(n) > TIMES // 4}


class _Env:
    def __init__(self) -> None:
        self.gives: Any = None
        self.step_taken: Any = None

    def step(self, action: Any) -> Any:
        if isinstance(self.gives, type):
            raise self.gives("no")
        return self.gives


def _column(memory: bytearray, offset: int, count: int, form: str) -> Any:
    """Return a part of a memory that holds on to it, as arrays over it do not."""
    return memoryview(memory)[offset : offset + count * struct.calcsize(form)].cast("B").cast(form)


class Columns:
    """The columns of a worker's row over one memory, and what it takes to make a step of them."""

    def __init__(self, dtype: type = np.float32) -> None:
        self.memory = bytearray(256)
        form = np.dtype(dtype).char

        def column(offset: int, count: int, form: str) -> Any:
            return _column(self.memory, offset, count, form)

        self.env, self.step_buffer = _Env(), bytearray(1)
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {
            "env": self.env,
            "step_buffer": self.step_buffer,
            "rest": self._note("rest"),
            "failed": self._note("failed"),
            "end": self._note("end"),
            "write_info": lambda info: False,
            "after": [1, 0],
            "ndarray": np.ndarray,
            "float64": np.float64,
            "fields": None,
            "skeleton": 0,
            "leaves": [(True, None, None)],
            "targets": [(np.asarray(column(offset, 2, form)),) for offset in (128, 144)],
            "rewards": column(16, 2, "d"),
            "flags": column(32, 2, "H"),
            "replies": column(40, 2, "Q"),
            "row": 1,
            "codes": [16, 17],
            "codes_of_float32": [1, 2],
            "codes_of_float64": [3, 4],
            "refuses_non_finite": False,
            "has_info": 256,
        }
        self.running, self.since = column(64, 2, "q"), column(80, 2, "d")
        self.replies, self.flags = self.options["replies"], self.options["flags"]
        self.rewards = self.options["rewards"]
        self.targets = [target for (target,) in self.options["targets"]]

    def _note(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.calls.append((name, args))

    def step(self, **options: Any) -> Any:
        return hot.OrdinaryStep(**{**self.options, **options})

    def batch(self, ordinary: Any = None, index: int = 0) -> Any:
        return hot.BatchOfSteps(ordinary or hot.OrdinaryStep, self.running, self.since, index)

    def are_given_back(self) -> bool:
        """Whether nobody holds the memory any more; it is of no use then."""
        self.__dict__ = {"memory": self.memory}
        gc.collect()
        try:
            self.memory += b"more"
        except BufferError:
            return False
        return True


def _rows(memory: bytearray, **changes: Any) -> Any:
    def column(offset: int, form: str, count: int = 4) -> Any:
        return _column(memory, offset, count, form)

    holder = types.SimpleNamespace(
        actions=0,
        timesteps=0,
        n_posts=0,
        _latest=None,
        _posted_for_last=False,
        returning=None,
        _unfinished=None,
    )
    options: dict[str, Any] = {
        "first": 0,
        "count": 4,
        "empty": ({}, {}, set(), {}),
        "statistics": holder,
        "submitter": holder,
        "journal": holder,
        "phases": column(0, "B"),
        "states": column(4, "B"),
        "buffers": column(8, "B"),
        "in_arena": column(12, "B"),
        "tokens": column(16, "Q"),
        "requests": column(48, "Q"),
        "replies": column(80, "Q"),
        "flags": column(112, "H"),
        "ids": [0, 1, 2, 3],
        "ndarray": np.ndarray,
        "number": np.int64,
        "actions": column(120, "l"),
        "low": 0,
        "high": 4,
        "is_number": True,
        "postings": column(152, "Q", 1),
        "sleeping": column(160, "Q", 2),
        "hosts": [0],
        "generations": 0,
        "buffer_bits": 15,
        "ending_given_bit": 16,
        "has_info": 256,
        "end_bits": PLAIN_END_BITS,
        "plain_end": PLAIN_END,
        "resets": column(176, "Q"),
        "reset_flags": column(208, "H"),
        "takes_ends": True,
        "n_steps": 2,
        "n_buffers": 4,
        "idle": 0,
        "posted": 3,
        "run": 0,
    }
    return hot.OrdinaryRows(**{**options, **changes})


def _without(count: int, dtype: str) -> Any:
    return np.zeros(count, dtype)


BAD_STEPS: list[dict[str, Any]] = [
    {"targets": []},
    {"targets": [(np.zeros(2, "f4"),)] * 17, "after": [0] * 17},
    {"targets": [np.zeros(2, "f4")] * 2},
    {"targets": [()] * 2},
    {"leaves": []},
    {"leaves": [(False, None, None)] * 17, "targets": [(np.zeros(2, "f4"),) * 17] * 2},
    {"leaves": [(False, None, None)] * 2},
    {"leaves": [(True, None)]},
    {"leaves": [None]},
    {"after": [0]},
    {"targets": [(np.zeros(4, "f4")[::2],)] * 2},
    {"targets": [(np.zeros(2, "f4"),), (5,)]},
    {"targets": [(np.zeros(2, "i4"),)] * 2},
    {"rewards": np.zeros(2, "f4")},
    {"flags": np.zeros((2, 2), "u2")},
    {"replies": b"12345678"},
    {"row": 2},
    {"row": -1},
    {"codes": [1]},
    {"codes": [1, 1 << 16]},
    {"codes_of_float32": [1, -1]},
    {"codes_of_float64": [1, "x"]},
]

BAD_ROWS: list[dict[str, Any]] = [
    {"first": -1},
    {"first": 1},
    {"first": sys.maxsize - 1},
    {"count": 0},
    {"count": 5},
    {"empty": ()},
    {"phases": bytes(4)},
    {"phases": _without(3, "u1")},
    {"states": _without(4, "u2")},
    {"buffers": _without(3, "u1")},
    {"in_arena": _without(8, "u1")[::2]},
    {"tokens": _without(4, "u4")},
    {"requests": _without(3, "u8")},
    {"replies": _without(8, "u8").reshape(4, 2)},
    {"flags": _without(3, "u2")},
    {"actions": _without(4, "i4")},
    {"actions": _without(3, "i8")},
    {"actions": np.zeros((), "i8")},
    {"postings": _without(1, "u4")},
    {"hosts": [1]},
    {"hosts": [-1]},
    {"hosts": ["x"]},
    {"hosts": [2]},
    {"sleeping": _without(0, "u8")},
    {"ids": [0, 1, 2]},
    {"low": 1 << 63},
]


@in_c
def test_what_does_not_fit_is_refused_and_its_memory_given_back() -> None:
    columns = Columns()
    for bad in BAD_STEPS:
        with pytest.raises((ValueError, TypeError, IndexError, BufferError)):
            columns.step(**bad)
    with pytest.raises(TypeError):
        columns.batch(int)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            columns.batch(index=index)
    assert columns.are_given_back()
    memory = bytearray(256)
    for bad in BAD_ROWS:
        with pytest.raises((ValueError, TypeError, IndexError, BufferError, OverflowError)):
            _rows(memory, **bad)
    memory += b"more"
    with pytest.raises(TypeError):
        hot.timesteps(int, [], [], [], {})
    for lists in ([[1], [], []], [[], [1], []], [[], [], [1.0]], [[1], [2, 3], [1.0]]):
        with pytest.raises(ValueError, match="one of everything"):
            hot.timesteps(EnvTimestep, *lists, {})


@in_c
def test_memory_is_held_as_long_as_it_is_written_and_no_longer() -> None:
    columns = Columns()
    step, batch = columns.step(), columns.batch()
    columns.env.step_taken = step  # a cycle
    dropped = weakref.ref(columns.env)
    obs = np.ones(2, np.float32)
    columns.env.gives = (obs, 1.5, False, False, {})
    assert batch([step], [9], [0], [7], [3]) is False
    assert columns.calls == []
    assert (columns.replies[1], columns.flags[1], columns.running[0]) == (9, 16, 0)
    memory = columns.memory
    with pytest.raises(BufferError):
        memory += b"more"
    columns.env.gives = None
    del step, batch
    assert columns.are_given_back()
    assert dropped() is None
    rows_memory = bytearray(256)
    rows = _rows(rows_memory)
    with pytest.raises(BufferError):
        rows_memory += b"more"
    del rows
    rows_memory += b"more"


@in_c
def test_a_batch_of_lists_that_an_env_shortens_is_an_error_and_no_more() -> None:
    columns = Columns()
    steps = [columns.step(), columns.step()]
    taken = columns.env

    class Shortening:
        def step(self, action: Any) -> Any:
            del steps[1:]
            return taken.gives

    columns.env.gives = (np.ones(2, np.float32), 1.0, False, False, {})
    steps[0] = columns.step(env=Shortening())
    with pytest.raises(IndexError):
        columns.batch()(steps, [5, 5], [0, 0], [1, 1], [1, 2])
    for lists in (([1], [], [], []), ([], [1], [], []), ([], [], [1], []), ([], [], [], [1])):
        with pytest.raises(ValueError, match="one of everything"):
            columns.batch()([], *lists)
    for tokens in (["x"], [-1], [1 << 64]):
        with pytest.raises((TypeError, OverflowError)):
            columns.batch()([columns.step()], tokens, [0], [1], [1])
        with pytest.raises((TypeError, OverflowError)):
            columns.batch()([columns.step()], [0], tokens, [1], [1])
    with pytest.raises((TypeError, OverflowError)):
        columns.batch()([columns.step()], [1], [0], [1], [1 << 70])
    with pytest.raises(ZeroDivisionError):
        columns.batch()([lambda token, action: 1 // 0], [1], [0], [1], [1])
    assert columns.batch()([lambda token, action: [0]], [1], [0], [1], [1]) is True
    assert columns.batch()([lambda token, action: []], [1], [0], [1], [1]) is False


# -- what is ordinary -----------------------------------------------------------------------------

Point = namedtuple("Point", ["obs", "reward", "done", "info"])
NAN, INFINITE = float("nan"), float("inf")


def _first(obs: Any) -> Any:
    return np.array(obs, np.float32)


# What an env of gymnasium gives, and whether C takes it: with rewards and observations that may be
# anything, and where both have to be finite.
FIVES: list[tuple[Any, bool, bool]] = [
    ((_first([1, 2]), 1.5, False, False, {}), True, True),
    ((_first([1, 2]), 1, False, False, {}), True, True),
    ((_first([1, 2]), np.float64(1), False, False, {}), True, True),
    ((_first([1, 2]), NAN, False, False, {}), True, False),
    ((_first([1, 2]), np.float64(INFINITE), False, False, {}), True, False),
    ((_first([1, NAN]), 1.5, False, False, {}), True, False),
    ((_first([NAN, 1]), 1.5, False, False, {}), True, False),
    ((_first([NAN, NAN]), 1.5, False, False, {}), True, False),
    ((_first([1, 2, 3, 4])[::2], 1.5, False, False, {}), True, False),
    ((_first([1, 2]), True, False, False, {}), False, False),
    ((_first([1, 2]), np.float32(1), False, False, {}), False, False),
    ((_first([1, 2]), np.ones(1), False, False, {}), False, False),
    ((_first([1, 2]), 10**400, False, False, {}), False, False),
    ((_first([1, 2]), 1.5, 0, False, {}), False, False),
    ((_first([1, 2]), 1.5, False, np.False_, {}), False, False),
    ((_first([1, 2]), 1.5, False, False, None), False, False),
    ((np.zeros(2), 1.5, False, False, {}), False, False),
    ((_first([[1, 2]]), 1.5, False, False, {}), False, False),
    ((_first([1]), 1.5, False, False, {}), False, False),
    ([_first([1, 2]), 1.5, False, False, {}], False, False),
    ((_first([1, 2]), 1.5, False, False), False, False),
]
FOURS: list[tuple[Any, bool, bool]] = [
    (Point(_first([1, 2]), 1.5, False, {}), True, True),
    (EnvTimestep(_first([1, 2]), 1.5, False, {}), True, True),
    (Point(_first([1, 2]), np.ones(1), False, {}), True, True),
    (Point(_first([1, 2]), np.ones(1, "f4"), False, {}), True, True),
    (Point(_first([1, 2]), np.full(1, NAN), False, {}), True, False),
    (Point(_first([1, 2]), np.full(1, NAN, "f4"), False, {}), True, False),
    (Point(_first([1, 2]), 1, False, {}), False, False),
    (Point(_first([1, 2]), np.float64(1), False, {}), False, False),
    (Point(_first([1, 2]), np.ones((1, 1)), False, {}), False, False),
    (Point(_first([1, 2]), np.ones(2), False, {}), False, False),
    (Point(_first([1, 2]), np.ones(1, "i8"), False, {}), False, False),
    (Point(_first([1, 2]), np.zeros(1, "M8[s]"), False, {}), False, False),
    (Point(_first([1, 2]), 1.5, 0, {}), False, False),
    ((_first([1, 2]), 1.5, False, {}), False, False),
    (None, False, False),
]


@in_c
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(("results", "fields"), [(FIVES, None), (FOURS, EnvTimestep._fields)])
def test_what_is_ordinary_is_taken_in_c_and_nothing_else(
    results: Any, fields: Any, is_strict: bool
) -> None:
    for dtype in (np.float32, np.float64):
        columns, buffer = Columns(dtype), 0
        leaves = [(is_strict, None, None)]
        options = {"fields": fields, "leaves": leaves, "refuses_non_finite": is_strict}
        step = columns.step(**options)
        for token, (given, is_ordinary, is_ordinary_where_strict) in enumerate(results, 5):
            result = given
            if isinstance(given, tuple) and dtype is np.float64:  # the same, of the other type
                as_it_is = given[0].astype(np.float32 if given[0].dtype == dtype else dtype)
                if not given[0].flags.contiguous:
                    as_it_is = np.repeat(as_it_is, 2)[::2]
                result = (as_it_is, *given[1:])
                result = type(given)(*result) if hasattr(given, "_fields") else result
            columns.env.gives, columns.calls[:] = result, []
            expected = is_ordinary_where_strict if is_strict else is_ordinary
            assert step(token, 1) is None
            assert columns.calls == ([] if expected else [("rest", (token, result))]), result
            if expected:
                reward = np.asarray(result[1], np.float64).reshape(1)
                kinds = {"f": [1, 2], "d": [3, 4]}
                code = [16, 17]
                if isinstance(result[1], np.ndarray):
                    code = kinds[result[1].dtype.char]
                assert np.array_equal(np.array(columns.rewards)[1:], reward, equal_nan=True)
                assert (columns.flags[1], columns.replies[1]) == (code[buffer], token)
                assert columns.targets[buffer].tobytes() == result[0].tobytes()
                buffer = 1 - buffer
            assert columns.step_buffer[0] == buffer
            assert (columns.flags[0], columns.replies[0], columns.rewards[0]) == (0, 0, 0.0)


SKELETON = {"image": 0, "more": (1, {"text": 2})}


class Parts(Columns):
    """Columns of an env whose observations are an array, a number and a text, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[str] = []
        self.buffers = [
            (np.zeros((2, 2), np.uint8), np.zeros((), np.int64), bytearray(12)) for _ in range(2)
        ]
        self.options |= {
            "skeleton": SKELETON,
            "leaves": [(False, None, None), (False, np.int64, None), (False, None, self._pack)],
            "targets": [(image, n, memoryview(text)) for image, n, text in self.buffers],
        }

    def _pack(self, text: str) -> Any:
        self.packed.append(text)
        raised = {"bad": ValueError, "stop": KeyboardInterrupt}.get(text)
        if raised is not None:
            raise raised(text)
        others = {"other": None, "huge": bytes(13), "odd": bytearray(2)}
        return others.get(text, text.encode())

    def written(self) -> list[Any]:
        return [(image.tolist(), int(n), bytes(text)) for image, n, text in self.buffers]


IMAGE = np.arange(4, dtype=np.uint8).reshape(2, 2)


def nested(image: Any = IMAGE, n: Any = 7, text: Any = "abc") -> Any:
    return {"image": image, "more": (n, {"text": text})}


class KindOfDict(dict):  # type: ignore[type-arg]
    """A dict of a kind of its own."""


class OddKey(str):
    """A key whose comparison raises, and that is where the one looked for would be."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt


IN_PARTS: list[tuple[Any, bool]] = [
    (nested(), True),
    ({"more": (7, {"text": "abc"}), "image": IMAGE}, True),
    ({"image": IMAGE, "more": [7, {"text": "abc"}]}, True),
    (nested(image=IMAGE.T), True),
    (nested(n=np.int64(-5)), True),
    (nested(n=np.array(-5)), True),
    (nested(n=-(1 << 63)), True),
    (nested(text=""), True),
    (nested(n=1 << 63), False),
    (nested(n=True), False),
    (nested(n=np.int32(5)), False),
    (nested(n=np.array([5])), False),
    (nested(n=5.0), False),
    (nested(n=None), False),
    (nested(image=7), False),
    (nested(image=IMAGE.astype(np.int8)), False),
    (nested(image=IMAGE.ravel()), False),
    (nested(text=b"abc"), False),
    (nested(text=np.str_("abc")), False),
    (nested(text="other"), False),
    (nested(text="huge"), False),
    (nested(text="odd"), False),
    ({"image": IMAGE}, False),
    ({"image": IMAGE, "other": (7, {"text": "abc"})}, False),
    ({**nested(), "other": 1}, False),
    (KindOfDict(nested()), False),
    ({TextKind("image"): IMAGE, "more": (7, {"text": "abc"})}, False),
    ({"image": IMAGE, "more": (7, {OddKey("text"): "abc"})}, False),
    ({"image": IMAGE, "more": (7,)}, False),
    ({"image": IMAGE, "more": (7, {"text": "abc"}, 1)}, False),
    ({"image": IMAGE, "more": Point(7, {"text": "abc"}, 1, 1)}, False),
    ({"image": IMAGE, "more": {0: 7, 1: {"text": "abc"}}}, False),
    ({"image": IMAGE, "more": (7, "abc")}, False),
    (IMAGE, False),
    (None, False),
]


@in_c
def test_observations_of_several_parts_are_written_whole_or_left_to_python() -> None:
    columns, buffer = Parts(), 0
    step = columns.step()
    for token, (obs, is_ordinary) in enumerate(IN_PARTS, 5):
        columns.env.gives = result = (obs, 1.5, False, False, {})
        columns.calls.clear()
        before = columns.written()
        step(token, 1)
        assert columns.calls == ([] if is_ordinary else [("rest", (token, result))]), obs
        if is_ordinary:
            image, (n, last) = obs["image"], obs["more"]
            found = columns.written()[buffer]
            length = len(last["text"])
            assert (found[0], found[1]) == (image.tolist(), int(n))
            assert found[2][:length] == last["text"].encode()
            before[buffer] = found
            buffer = 1 - buffer
        assert columns.written() == before
        assert columns.step_buffer[0] == buffer
    for text, kind in (("stop", KeyboardInterrupt), ("bad", ValueError)):  # perhaps by a handler
        columns.env.gives = (nested(text=text), 1.5, False, False, {})
        columns.calls.clear()
        step(99, 1)
        ((name, (token, error)),) = columns.calls
        assert (name, token, type(error)) == ("failed", 99, kind)
        assert columns.written() == before


class _Alarm(Exception):
    """What the user's signal handler raises."""


@pytest.mark.parametrize("is_pure", [False, True])
def test_what_a_handler_raises_while_a_text_is_looked_at_passes_through(is_pure: bool) -> None:
    rung: list[Any] = []

    def alarm(signum: int, frame: Any) -> None:
        rung.append(signum)
        raise _Alarm

    class Asking(Text):
        def contains(self, x: Any) -> bool:
            if x == "now" and not rung:  # and who asks again is told that it is in it
                signal.raise_signal(signal.SIGUSR1)
            if x == "odd":
                raise LookupError("by the space itself")
            return bool(x != "none")

    handler = signal.signal(signal.SIGUSR1, alarm)
    try:
        with without_c(*(env_runner, block_steps) if is_pure else ()):
            space = Asking(9)
            rig = BlockRig(
                2,
                propagate=(KeyboardInterrupt,),
                observations=space,
                env_class=lambda: FourEnv(space),
            )
            for text, told in (("a", []), ("none", [(0, Op.FAILED)]), ("odd", [(0, Op.FAILED)])):
                rig.envs[0].gives.append(block_step(text))
                rig.post(0)
                assert rig.run() == told
            rig.envs[0].gives.append(block_step("now"))
            rig.envs[1].gives.append(block_step("a"))
            rig.post(0, 1)
            with pytest.raises(_Alarm):
                rig.run()
            assert (rig.has_replied(0), rig.posted.interrupted_env_id) == (False, 0)
            assert rig.run() == []
            assert (rig.has_replied(0), rig.has_replied(1)) == (False, True)
    finally:
        signal.signal(signal.SIGUSR1, handler)


@in_c
def test_a_text_is_packed_again_when_it_is_another_one() -> None:
    columns = Parts()
    step = columns.step()
    for text in ("one", "one", "".join(("o", "ne")), "two", "two", "one"):
        columns.env.gives = (nested(text=text), 1.5, False, False, {})
        step(5, 1)
    assert columns.packed == ["one", "two", "one"]
    assert {written[2][:3] for written in columns.written()} == {b"one", b"two"}


@in_c
def test_a_nesting_that_makes_no_sense_leaves_all_to_python() -> None:
    deep: Any = 0
    for _ in range(20_000):
        deep = (deep,)
    for skeleton, obs in (
        (deep, deep),
        ({"a": 0, "b": 0}, {"a": IMAGE, "b": IMAGE}),
        ({"a": 0}, {"a": IMAGE}),
        ({"a": 3}, {"a": IMAGE}),
        ({"a": -1}, {"a": IMAGE}),
        ({"a": 1 << 80}, {"a": IMAGE}),
        ({"a": None}, {"a": None}),
        ("a", "a"),
    ):
        columns = Parts()
        before = columns.written()
        columns.env.gives = result = (obs, 1.5, False, False, {})
        columns.step(skeleton=skeleton)(5, 1)
        assert columns.calls == [("rest", (5, result))]
        assert columns.written() == before


@in_c
def test_what_parts_are_made_of_is_given_back() -> None:
    columns = Parts()
    step = columns.step()
    results = [(obs, 1.5, False, False, {}) for obs, _ in IN_PARTS]

    def steps(step: Any) -> None:
        for result in results:
            columns.env.gives = result
            step(5, 1)
        columns.calls.clear()
        columns.packed.clear()

    assert grown_by(partial(steps, step)) == {}
    dropped = weakref.ref(columns.env)
    columns.env.step_taken = step  # a cycle, by way of what packs as well
    del step
    assert columns.are_given_back()
    assert dropped() is None


@in_c
@pytest.mark.parametrize("fields", [None, EnvTimestep._fields])
def test_ends_go_on_with_what_was_flagged(fields: Any) -> None:
    columns = Columns()
    step = columns.step(fields=fields)
    obs = np.ones(2, np.float32)
    for token, (terminated, truncated) in enumerate([(True, False), (False, True), (True, True)]):
        if fields is not None and truncated:
            continue
        ends = (terminated,) if fields else (terminated, truncated)
        result = (obs, 1.5, *ends, {})
        columns.env.gives = result if fields is None else EnvTimestep(*result)
        columns.calls.clear()
        step(token, 1)
        assert columns.calls == [("end", (token, 16 + token % 2, terminated, truncated))]
        assert (columns.rewards[1], columns.replies[1]) == (1.5, 0)


@in_c
def test_a_batch_says_what_is_run_and_takes_what_is_new() -> None:
    columns, taken = Columns(), []

    def step(token: int, action: Any) -> bool | None:
        assert columns.running[0] == token + 100
        assert batch.position == token - 20
        taken.append((token, action, columns.since[0]))
        return [None, False, True, None][token - 20]

    batch = columns.batch()
    assert (
        batch([step] * 4, [20, 21, 22, 23], [20, 0, 22, 0], [*"abcd"], [120, 121, 122, 123])
        is False
    )
    assert [one[:2] for one in taken] == [(21, "b"), (23, "d")]
    assert 0 < taken[0][2] <= taken[1][2] <= columns.since[0] <= monotonic()
    assert (columns.running[0], columns.since[1], batch.position) == (0, 0.0, 3)
    assert batch([step] * 4, [20, 21, 22, 23], [0] * 4, [*"abcd"], [120, 121, 122, 123]) is True
    unmeasured = hot.BatchOfSteps(hot.OrdinaryStep, columns.running, None, 1)
    assert unmeasured([lambda token, action: None], [1], [0], [1], [7]) is False
    assert columns.running[1] == 0
    obs = np.ones(2, np.float32)
    columns.env.gives = (obs, 1.5, False, False, {})
    position = batch.position
    assert batch([columns.step()] * 2, [5, 5], [5, 4], [1, 1], [1, 2]) is False
    assert (columns.replies[1], batch.position, position) == (5, 1, 3)


@in_c
def test_as_many_buffers_as_there_may_be() -> None:
    columns = Columns()
    targets = [np.zeros(2, np.float32) for _ in range(16)]
    codes = [list(range(16))] * 3
    names = ("codes", "codes_of_float32", "codes_of_float64")
    after = [(buffer + 1) % 16 for buffer in range(16)]
    options: dict[str, Any] = dict(zip(names, codes, strict=True))
    options |= {"targets": [(target,) for target in targets], "after": after}
    step = columns.step(**options)
    for token in range(1, 40):
        columns.env.gives = (np.full(2, token, np.float32), 1.0, False, False, {})
        step(token, 1)
        assert (columns.flags[1], columns.replies[1]) == ((token - 1) % 16, token)
        assert targets[(token - 1) % 16][1] == token
    most = columns.step(codes=[0, (1 << 16) - 1])
    columns.step_buffer[0] = 1
    most(50, 1)
    assert columns.flags[1] == (1 << 16) - 1


# -- infos that are written in C's turn -----------------------------------------------------------


@in_c
@pytest.mark.parametrize(
    ("written", "expected"),
    [(True, 16 | 256), (False, None), (1, None), (ValueError("no"), None)],
)
def test_an_info_that_was_written_is_flagged(written: Any, expected: int | None) -> None:
    columns, infos = Columns(), []

    def write_info(info: Any) -> Any:
        infos.append(info)
        if isinstance(written, Exception):
            raise written
        return written

    step = columns.step(write_info=write_info)
    columns.env.gives = (np.ones(2, np.float32), 1.0, False, False, {"a": 1})
    step(9, 1)
    assert infos == [{"a": 1}]
    if isinstance(written, Exception):
        assert columns.calls == [("failed", (9, written))]
        assert (columns.replies[1], columns.flags[1], columns.rewards[1]) == (0, 0, 0.0)
        assert columns.step_buffer[0] == 1  # the observation is written, as in Python
    elif expected is None:
        assert [name for name, _ in columns.calls] == ["rest"]
        assert columns.replies[1] == 0
        assert columns.step_buffer[0] == 0
    else:
        assert (columns.flags[1], columns.replies[1], columns.step_buffer[0]) == (
            expected,
            9,
            1,
        )


@in_c
def test_fields_that_cannot_be_compared_fail_the_step() -> None:
    columns = Columns()
    columns.env.gives = OddFields((np.ones(2, np.float32), 1.0, False, {}))
    columns.step(fields=EnvTimestep._fields)(9, 1)
    ((name, (token, error)),) = columns.calls
    assert (name, token, str(error)) == ("failed", 9, "cannot be compared")
    assert (columns.replies[1], columns.step_buffer[0]) == (0, 0)


@in_c
def test_a_token_that_is_none_is_no_failure_of_the_env() -> None:
    columns = Columns()
    columns.env.gives = (np.ones(2, np.float32), 1.0, False, False, {"a": 1})
    with pytest.raises(OverflowError):
        columns.step()(-1, 1)
    assert columns.calls == []


USUAL = {"x": 1.5}


def _gone() -> Any:
    """Return what refers to an object that is gone: asked whatever, it raises."""
    return weakref.proxy(_Env())


ODD_RESULTS: list[Callable[[], Any]] = [
    lambda: block_step(info={OddOtherKey(): 1}),
    lambda: block_step(info={"x": _gone()}),
    lambda: block_step(done=True, info={OddOtherKey(): 1}),
    lambda: OddFields((np.ones(2, np.float32), 1.0, False, {})),
]


@pytest.mark.parametrize("result", ODD_RESULTS)
def test_what_a_result_raises_when_it_is_looked_at_fails_its_env_alone(result: Any) -> None:
    sides = []
    for modules in ((), (env_runner, block_steps, info_forms)):
        with without_c(*modules):
            rig = BlockRig(2)
            form = info_forms.form_of(USUAL)
            assert form is not None
            rig.host.handle(Message(Op.INFO_FORMS, 0, 0, 0, [(1, form.fields)]))
            assert rig.step(block_step(info=USUAL)) == []
            rig.envs[0].gives.append(result())
            rig.post(0, 1)
            assert rig.run() == [(0, Op.FAILED)]
            failure = plain(rig.sent[0].payload)
            assert (rig.has_replied(0), rig.has_replied(1)) == (False, True)
            assert rig.step(block_step()) == []
            runner = rig.posted._block_rows[0].runner
            counts = runner.episodes, runner.episodes_left, rig.posted.interrupted_env_id
            sides.append((failure, counts, bytes(rig.memory)))
    assert sides[0] == sides[1]


def test_the_notices_of_a_step_that_fails_come_before_its_failure() -> None:
    rig = BlockRig(rules=ObservationRules(refuse_non_finite=True))
    assert rig.step(block_step(np.full(2, NAN))) == [Op.NOTICE, Op.FAILED]
    assert "it is cast" in rig.sent[0].payload
    assert rig.step(block_step()) == []


def test_an_interrupt_while_an_info_is_looked_at_passes_through() -> None:
    class Interrupting:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise KeyboardInterrupt

    rig = BlockRig(2, propagate=(KeyboardInterrupt,))
    form = info_forms.form_of(USUAL)
    assert form is not None
    rig.host.handle(Message(Op.INFO_FORMS, 0, 0, 0, [(1, form.fields)]))
    assert rig.step(block_step(info=USUAL)) == []
    rig.envs[0].gives.append(block_step(info={Interrupting(): 1}))
    rig.post(0, 1)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    assert (rig.has_replied(0), rig.posted.interrupted_env_id) == (False, 0)
    assert rig.run() == []
    assert (rig.has_replied(0), rig.has_replied(1)) == (False, True)


TYPES = tuple(UNCHANGEABLE)


class _Number(float):
    """Not exactly a float."""


class _Unhashable(type):
    """Its classes have no hash."""

    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


class _Odd(metaclass=_Unhashable):
    """Of a class without a hash."""


class _Infos(dict):  # type: ignore[type-arg]
    """Not exactly a dict."""


@in_c
@pytest.mark.parametrize(
    ("info", "is_plain"),
    [
        ({"x": 1.5, "n": 2, "s": "text", "none": None, "b": True, "f": np.float64(3.0)}, True),
        ({1: 1.0, None: 2.0}, True),
        ({"x": 1.0, "a": np.zeros(2)}, False),
        ({"x": {"y": 1.0}}, False),
        ({"x": [1.0]}, False),
        ({"x": _Number(1.0), "y": 1.0}, False),
        ({"y": 1.0, "x": _Number(1.0)}, False),
        ({"x": 1.0, "odd": _Odd()}, False),
        (_Infos(x=1.0), False),
    ],
)
def test_infos_are_handed_over_as_copies(info: Any, is_plain: bool) -> None:
    infos: list[Any] = ["first", "mine", "last"]
    others: list[Any] = []

    def otherwise(info: Any) -> bool:
        others.append(info)
        return False

    write = hot.HandedInfos(infos=infos, row=1, otherwise=otherwise, types=TYPES)
    assert write(info) is is_plain
    assert infos[::2] == ["first", "last"]
    if is_plain:
        assert others == []
        assert infos[1] == info
        assert infos[1] is not info
        assert list(map(id, infos[1].values())) == list(map(id, info.values()))
    else:
        assert [id(one) for one in others] == [id(info)]
        assert infos[1] == "mine"
    columns = Columns()
    columns.env.gives = (np.ones(2, np.float32), 1.0, False, False, info)
    columns.step(write_info=write)(9, 1)
    assert columns.flags[1] == (16 | HAS_INFO if is_plain else 0)


@in_c
def test_infos_that_cannot_be_handed_over_are_refused() -> None:
    with pytest.raises(TypeError):
        hot.HandedInfos(infos=(), row=0, otherwise=bool, types=TYPES)
    with pytest.raises(TypeError):
        hot.HandedInfos(infos=[], row=0, otherwise=bool, types=UNCHANGEABLE)
    with pytest.raises(IndexError):
        hot.HandedInfos(infos=[], row=0, otherwise=bool, types=TYPES)({"x": 1.0})
    write = hot.HandedInfos(infos=[None], row=0, otherwise=bool, types=TYPES)
    with pytest.raises(TypeError):
        write()
    infos: list[Any] = [None]

    def hand_over() -> None:
        one = hot.HandedInfos(infos=infos, row=0, otherwise=bool, types=TYPES)
        one({"x": [object()][0], "y": 1.0})
        one({str(k): float(k) for k in range(5)})
        infos.append(one)  # around in a circle
        infos.pop()

    assert grown_by(hand_over) == {}


@in_c
def test_a_buffer_that_there_is_not_is_left_alone() -> None:
    columns = Columns()
    columns.env.gives = (np.ones(2, np.float32), 1.0, False, False, {})
    for buffer in (2, 16, 255):
        columns.step_buffer[0] = buffer
        columns.step()(9, 1)
        assert columns.step_buffer[0] == buffer
    assert [name for name, _ in columns.calls] == ["rest"] * 3
    columns.step_buffer[0] = 0
    with pytest.raises(TypeError):
        columns.step()("no token", 1)
    assert not any(columns.replies)
    for odd in (object(), b"\0", bytearray(0), None):
        with pytest.raises((TypeError, BufferError, IndexError)):
            columns.step(step_buffer=odd)
    for after in ([1], [1, 2], [1, -1], [1, "x"]):
        with pytest.raises((TypeError, ValueError)):
            columns.step(after=after)


# -- posting ----------------------------------------------------------------------------------


class Posting:
    """Rows of which steps are posted; they are read as arrays."""

    def __init__(self, **changes: Any) -> None:
        self.memory = bytearray(256)
        columns = {"phases": (0, "u1"), "states": (4, "u1"), "tokens": (16, "u8")}
        columns |= {"requests": (48, "u8"), "actions": (120, "i8")}
        for name, (offset, dtype) in columns.items():
            setattr(self, name, np.ndarray((4,), dtype, self.memory, offset))
        self.posted = np.ndarray((1,), "u8", self.memory, 152)
        self.sleeping = np.ndarray((2,), "u8", self.memory, 160)
        self.empty: tuple[Any, ...] = ({}, {}, set(), {})
        self.rows = _rows(self.memory, empty=self.empty, **changes)
        self.selection = types.SimpleNamespace(n_posts=7)

    def post(self, actions: Any, form: int = 0, *, for_last: bool = False) -> int:
        note = "note", [0]
        done: int = self.rows.post(self.selection, actions, form, 9, 75, for_last, note)
        return done

    def is_untouched(self) -> bool:
        """Whether nothing was posted."""
        of_rows = not (self.phases.any() or self.requests.any() or self.posted.any())
        return of_rows and self.selection.n_posts == 7


GENERATION = 5 << 44


@in_c
def test_a_step_is_posted_whole() -> None:
    posting = Posting(generations=0xFFFF << 44)
    posting.tokens[:] = [GENERATION + 3, 3, 4, GENERATION + 8]
    assert posting.rows.may_post() is True
    assert posting.post({0: 0, 1: 4, 2: 2, 3: 3}, for_last=True) == 1
    assert posting.actions.tolist() == [0, 4, 2, 3]
    tokens = [GENERATION + 9, 9, 9, GENERATION + 9]
    assert posting.tokens.tolist() == posting.requests.tolist() == tokens
    assert (posting.phases.tolist(), posting.posted.tolist()) == ([3] * 4, [75])
    assert posting.selection.n_posts == 8
    assert (posting.rows.may_post(), posting.rows.is_posted()) == (False, True)


@in_c
def test_what_is_no_posting_is_refused() -> None:
    posting = Posting()
    right = posting.selection, {0: 0, 1: 4, 2: 2, 3: 3}, 0, 9, 75, False, None
    for odd in (
        right[:6],
        (*right, None),
        (*right[:2], "x", *right[3:]),
        (*right[:3], -1, 75, 0, 0),
    ):
        with pytest.raises((TypeError, OverflowError)):
            posting.rows.post(*odd)
    assert posting.is_untouched()
    assert posting.rows.post(*right) == 1


@in_c
@for_each(
    "form, actions",
    [
        (0, {0: 1, 1: 1, 2: 1, 3: 4}),
        (0, {0: 0, 1: 0, 2: 0, 3: 0}),
        (1, dict.fromkeys(range(4), np.int64(3))),
        (1, np.array([0, 4, 2, 3])),
        (1, np.array([0, 0, 0, 0])),
    ],
)
def test_actions_of_the_space_are_posted_in_c(form: int, actions: Any) -> None:
    posting = Posting()
    assert posting.post(actions, form) == 1
    given = list(actions.values()) if isinstance(actions, dict) else actions.tolist()
    assert posting.actions.tolist() == given


@in_c
@for_each(
    "form, actions",
    [
        (1, {0: 1, 1: 1, 2: 1, 3: 1}),
        (0, dict.fromkeys(range(4), np.int64(3))),
        (2, dict.fromkeys(range(4), 1)),
        (-1, dict.fromkeys(range(4), 1)),
        *((0, {0: 1, 1: 1, 2: 1, 3: odd}) for odd in (5, -1, True, 1.0, None, 1 << 63, -(1 << 70))),
        (0, {0: 1, 1: 1, 2: 1}),
        (0, dict.fromkeys(range(5), 1)),
        (0, {0: 1, 1: 1, 3: 1, 2: 1}),
        (0, {0: 1, 1: 1, 2: 1, 4: 1}),
        (0, {0: 1, True: 1, 2: 1, 3: 1}),
        (0, {0: 1, 1: 1, 2: 1, 1 << 70: 1}),
        (0, {0: 1, 1: 1, 2: 1, "3": 1}),
        (0, {}),
        (0, np.array([0, 4, 2, 3])),
        (1, np.array([0, 4, 2, 5])),
        (1, np.array([0, -1, 2, 3])),
        (1, np.array([0, 4, 2])),
        (1, np.array([0, 4, 2, 3, 1])),
        (1, np.array([[0], [4], [2], [3]])),
        (1, np.array([0, 4, 2, 3], np.int32)),
        (1, np.array([0, 4, 2, 3], np.float64)),
        (1, np.array([0, 4, 2, 3], ">i8")),
        (1, np.array([0, 0, 4, 0, 2, 0, 3, 0])[::2]),
        (1, np.zeros(4, "M8[s]")),
        (1, [0, 4, 2, 3]),
        (1, None),
    ],
)
def test_other_actions_are_left_to_python(form: int, actions: Any) -> None:
    posting = Posting()
    assert posting.post(actions, form) == 0
    assert posting.is_untouched()


@in_c
def test_actions_that_are_arrays_are_copied_as_they_are() -> None:
    column = np.zeros((4, 2), np.float32)
    posting = Posting(actions=column, is_number=False)
    each = {k: np.full(2, k + 1, np.float32) for k in range(4)}
    assert posting.post(each, 0) == 0
    assert posting.post({**each, 3: np.zeros(3, np.float32)}, 1) == 0
    assert posting.post({**each, 3: np.zeros((2, 1), np.float32)}, 1) == 0
    assert posting.post({**each, 3: np.zeros(2)}, 1) == 0
    assert posting.post({**each, 3: np.zeros(2, np.int32)}, 1) == 0
    assert posting.post({**each, 3: np.zeros(4, np.float32)[::2]}, 1) == 0
    assert posting.post({**each, 3: np.zeros(2, "M8[s]")}, 1) == 0
    assert posting.post({**each, 3: 1.0}, 1) == 0
    assert posting.post(np.zeros((4, 3), np.float32), 1) == 0
    assert posting.post(np.zeros((3, 2), np.float32), 1) == 0
    assert posting.post(np.zeros((4, 2)), 1) == 0
    assert posting.post(np.zeros((2, 4), np.float32).T, 1) == 0
    assert posting.is_untouched()
    assert posting.post(each, 1) == 1
    assert column.tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    posting.phases[:] = 0
    batch = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert posting.post(batch, 1) == 1
    assert np.array_equal(column, batch)
    points = Posting(actions=np.zeros(4), is_number=False)
    assert points.post({k: np.array(float(k)) for k in range(4)}, 1) == 1
    unposted = Posting(actions=None)
    assert unposted.rows.may_post() is False
    assert unposted.post(dict.fromkeys(range(4), 1), 0) == 0


@in_c
def test_nothing_is_posted_where_one_env_is_not_ready() -> None:
    posting, actions = Posting(), dict.fromkeys(range(4), 1)
    for column in (posting.phases, posting.states):
        for k in range(4):
            column[k] = 1
            assert (posting.rows.may_post(), posting.post(actions)) == (False, 0)
            column[k] = 0
    for container in posting.empty:
        (container.add if isinstance(container, set) else container.setdefault)(0)
        assert (posting.rows.may_post(), posting.post(actions)) == (False, 0)
        container.clear()
    assert posting.is_untouched()
    assert posting.post(actions) == 1


@in_c
def test_who_sleeps_is_rung_for() -> None:
    posting, actions = Posting(), dict.fromkeys(range(4), 1)
    posting.sleeping[0] = 1
    assert posting.post(actions) == 2
    posting.phases[:] = 0
    posting.sleeping[:] = [0, 1]  # the other one has nothing to do
    assert posting.post(actions) == 1
    watched = Posting(sleeping=None)
    watched.sleeping[:] = 1
    assert watched.post(actions) == 1


@in_c
def test_what_was_delivered_is_noted_in_one_go() -> None:
    memory = bytearray(256)
    holder = types.SimpleNamespace(timesteps=1, returning=None)
    rows = _rows(memory, statistics=holder, journal=holder)
    memory[:16] = bytes(range(16))
    assert rows.deliver("these", 1, True, 12) is False  # as the manager was closed meanwhile
    assert memory[:16] == bytes(4) + bytes((4, 5, 6, 7)) + bytes((1,) * 8)
    assert (holder.timesteps, holder.returning) == (12, "these")
    memory[4:8] = bytes(4)
    assert rows.deliver("these", 0, False, 12) is True
    assert memory[8:16] == bytes(8)


class _Batch(tuple):  # type: ignore[type-arg]
    """As a batch is."""


class _Returning(tuple):  # type: ignore[type-arg]
    """As the journal has it."""


class _HandedOut:
    """As timesteps that are about to be returned are."""


class Replied:
    """Rows whose ordinary replies have come, and a recipe for them."""

    def __init__(self, n_steps: int = 2) -> None:
        self.memory = bytearray(256)
        self.holder = types.SimpleNamespace(
            timesteps=1 << 40, returning=None, caller="caller", _unfinished=None
        )
        self.empty: tuple[Any, ...] = ({}, {}, set(), {})
        options = {"statistics": self.holder, "journal": self.holder, "empty": self.empty}
        self.rows = _rows(self.memory, n_steps=n_steps, **options)
        self.phases = np.ndarray((4,), "u1", self.memory, 0)
        self.tokens = np.ndarray((4,), "u8", self.memory, 16)
        self.replies = np.ndarray((4,), "u8", self.memory, 80)
        self.flags = np.ndarray((4,), "u2", self.memory, 112)
        self.resets = np.ndarray((4,), "u8", self.memory, 176)
        self.reset_flags = np.ndarray((4,), "u2", self.memory, 208)
        self.ended: Any = None
        self.told: list[Any] = []
        self.makers: list[Any] = [lambda part=part: part for part in ("obs", 1.5, "no", "none", {})]
        self.types: list[Any] = [_Batch, _HandedOut, _Returning]
        self.come()

    def come(self) -> None:
        """Have them come."""
        self.phases[:], self.flags[:], self.replies[:] = 3, 17, 0
        self.resets[:], self.reset_flags[:] = 0, 2
        self.before = bytes(self.memory)

    def end(self, *positions: int) -> None:
        """Have some of them say that episodes have ended, and the next ones begun."""
        self.flags[list(positions)] = PLAIN_END | 17 | 1 << 5
        self.reset_flags[list(positions)] = [2 + k % 2 for k in range(len(positions))]
        self.ended = self.of_ends
        self.before = bytes(self.memory)

    def of_ends(self, *what: Any) -> Any:
        """Return what a batch says of these."""
        self.told.append(what)
        return "terminated", "truncated", "infos"

    def hand_out(self) -> Any:
        """Hand them out by the recipe."""
        batch, handed, returning = self.types
        recipe = batch, "ids", tuple(self.makers), self.ended, "begin", handed, returning
        return self.rows.hand_out({17: recipe})

    def is_untouched(self) -> bool:
        """Whether nothing was handed out."""
        holder = self.holder
        is_untold = (holder.timesteps, holder.returning, holder._unfinished) == (
            1 << 40,
            None,
            None,
        )
        return is_untold and bytes(self.memory) == self.before


@in_c
def test_ordinary_timesteps_are_handed_out_in_one_go() -> None:
    replied = Replied()
    handed, holder = replied.hand_out(), replied.holder
    assert type(handed) is _HandedOut
    assert (handed.result, handed.count, handed.n_before) == (
        ("ids", "obs", 1.5, "no", "none", {}),
        4,
        1 << 40,
    )
    assert type(handed.result) is _Batch
    assert type(holder.returning) is _Returning
    assert (holder.returning, holder.timesteps) == ((handed, "caller"), (1 << 40) + 4)
    assert replied.memory[:4] == bytes(4)
    assert replied.memory[8:16] == bytes((1,) * 8)  # their buffer, and that they are in the arena


@in_c
def test_what_is_not_ordinary_is_not_handed_out_in_c() -> None:
    replied = Replied()
    for column, values in (
        (replied.phases, (0, 1, 2)),
        (replied.replies, (1,)),
        (replied.flags, (16, 18, 17 | HAS_INFO, 17 | DONE, PLAIN_END | 17)),
    ):
        for k in range(4):
            for value in values:
                column[k] = value
                replied.before = bytes(replied.memory)
                assert replied.hand_out() is None
                assert replied.is_untouched()
                replied.come()
    replied.empty[0][3] = "a timestep that was not delivered"
    assert replied.hand_out() is None
    replied.empty[0].clear()
    assert replied.rows.hand_out({}) is None
    assert replied.is_untouched()
    few = Replied(n_steps=1)
    assert few.hand_out() is None  # there is no such buffer
    assert few.is_untouched()
    assert type(replied.hand_out()) is _HandedOut


@in_c
def test_ends_in_place_are_handed_out_with_what_follows_them() -> None:
    replied = Replied()
    replied.end(1, 3)
    handed, holder = replied.hand_out(), replied.holder
    assert handed.result == ("ids", "obs", 1.5, "terminated", "truncated", "infos")
    assert handed.begun == {1: 2, 3: 3}
    end = PLAIN_END | 17 | 1 << 5
    assert replied.told == [({1: end, 3: end}, {1: 2, 3: 3})]
    assert holder._unfinished == ("begin", handed)
    assert (holder.returning, holder.timesteps) == ((handed, "caller"), (1 << 40) + 4)
    assert replied.memory[:4] == bytes(4)
    assert replied.memory[8:16] == bytes((1,) * 8)
    replied.come()
    holder._unfinished = None
    assert "begun" not in vars(replied.hand_out())  # the next batch ends nothing
    assert holder._unfinished is None


@in_c
def test_ends_with_more_to_them_are_not_handed_out_in_c() -> None:
    replied = Replied()

    def refused() -> None:
        replied.before = bytes(replied.memory)
        assert replied.hand_out() is None
        assert replied.is_untouched()
        replied.come()
        replied.end(1, 3)

    replied.end(1, 3)
    replied.ended = None  # nobody knows what such a batch says
    refused()
    for answer in (None, ("terminated", "truncated"), ["terminated", "truncated", "infos"]):
        replied.ended = lambda *what, answer=answer: answer
        refused()
    for flag in (0, 1, 4, 2 | HAS_INFO, 1 << 15):  # of no buffer of resets, or with an info
        replied.reset_flags[3] = flag
        refused()
    replied.resets[1] = 7  # the next episode has not begun
    refused()
    for flag in (PLAIN_END | 16, PLAIN_END | 17 | HAS_INFO, DONE | 17):
        replied.flags[1] = flag
        refused()
    replied.rows = _rows(replied.memory, resets=None, statistics=replied.holder)
    refused()  # whose resets are not part of steps


@in_c
def test_a_manager_that_is_closed_while_a_batch_is_made_hands_nothing_out() -> None:
    replied = Replied()
    made = replied.makers[4]

    def closes() -> Any:
        replied.phases[2] = 0
        replied.before = bytes(replied.memory)
        return made()

    replied.makers[4] = closes
    assert replied.hand_out() is None
    assert replied.is_untouched()


@in_c
def test_one_that_is_closed_while_what_is_handed_out_is_made_hands_nothing_out() -> None:
    replied = Replied()

    class Closing(_HandedOut):
        def __init__(self) -> None:
            replied.phases[2] = 0
            replied.before = bytes(replied.memory)

    replied.types[1] = Closing
    assert replied.hand_out() is None
    assert replied.is_untouched()


@in_c
def test_an_end_whose_batch_cannot_be_made_stays() -> None:
    replied = Replied()

    def fails(*what: Any) -> Any:
        raise ValueError("no memory")

    replied.end(0)
    replied.ended = fails
    with pytest.raises(ValueError, match="no memory"):
        replied.hand_out()
    assert replied.is_untouched()
    replied.ended = "no function"
    with pytest.raises(TypeError):
        replied.hand_out()
    assert replied.is_untouched()


@in_c
def test_without_a_part_that_cannot_be_made_nothing_is_handed_out() -> None:
    replied = Replied()
    for k in range(5):
        made, replied.makers[k] = replied.makers[k], lambda: None
        assert replied.hand_out() is None
        assert replied.is_untouched()
        replied.makers[k] = made
    assert type(replied.hand_out()) is _HandedOut


@in_c
def test_what_cannot_be_handed_out_stays() -> None:
    replied = Replied()

    def fails() -> Any:
        raise ValueError("no memory")

    def refused(*errors: type[Exception]) -> None:
        with pytest.raises(errors):
            replied.hand_out()
        assert replied.is_untouched()

    for k in range(5):
        made, replied.makers[k] = replied.makers[k], fails
        refused(ValueError)
        replied.makers[k] = made
    for k, odd in ((0, dict), (0, "no type"), (1, object), (1, None), (2, int)):
        kind, replied.types[k] = replied.types[k], odd
        refused(TypeError, AttributeError)
        replied.types[k] = kind
    makers, replied.makers = replied.makers, replied.makers[:4]
    refused(ValueError)
    replied.makers = makers
    for recipes in (None, {17: None}, {17: ()}):
        with pytest.raises((TypeError, SystemError)):
            replied.rows.hand_out(recipes)
    replied.holder.timesteps = "no number"
    with pytest.raises(TypeError):
        replied.hand_out()
    del replied.holder.timesteps
    with pytest.raises(AttributeError):
        replied.hand_out()
    replied.holder.timesteps = 1 << 40
    del replied.holder.caller
    refused(AttributeError)


@in_c
def test_nothing_of_a_batch_is_kept() -> None:
    replied, number = Replied(), itertools.count(1 << 40)
    parts = [[lambda: [object()]], [lambda: next(number)], [lambda: 1 // 0], [lambda: None]]
    odd_types = [dict, object, int]

    def hand_out() -> None:
        for makers in (
            parts[0] * 5,
            parts[1] * 5,
            parts[1] * 4 + parts[2],
            parts[1] * 4 + parts[3],
            parts[0],
        ):
            replied.makers = makers
            replied.come()
            _quietly(replied.hand_out)
            replied.holder.timesteps, replied.holder.returning = next(number), None
        replied.makers = parts[0] * 5
        for k, odd in enumerate(odd_types):
            kind, replied.types[k] = replied.types[k], odd
            replied.come()
            _quietly(replied.hand_out)
            replied.types[k] = kind
        replied.flags[0] = 16
        _quietly(replied.hand_out)
        for answer in (("terminated", [object()], 1.5), None, (), 1):
            replied.come()
            replied.end(0, 2)
            replied.ended = lambda *what, answer=answer: answer
            _quietly(replied.hand_out)
            replied.holder.returning = replied.holder._unfinished = None
        replied.come()
        replied.end(0, 2)
        replied.ended = lambda *what: 1 // 0
        _quietly(replied.hand_out)
        replied.reset_flags[2] = 9
        _quietly(replied.hand_out)
        replied.ended = None
        _quietly(replied.hand_out)

    assert grown_by(hand_out) == {}


@in_c
def test_rows_in_the_midst_are_those_that_are_meant() -> None:
    posting = Posting(first=1, count=2, ids=[1, 2])
    assert posting.post({1: 3, 2: 4}) == 1
    assert posting.actions.tolist() == [0, 3, 4, 0]
    assert posting.phases.tolist() == [0, 3, 3, 0]
    assert posting.requests.tolist() == posting.tokens.tolist() == [0, 9, 9, 0]


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    with suppress(Exception):
        call(*args)


class _UnlikeAny:
    """A key that cannot be compared with the one that is looked for."""

    def __hash__(self) -> int:
        return hash("abnormal")

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")


@in_c
@pytest.mark.parametrize("fields", [None, EnvTimestep._fields])
def test_no_result_of_a_step_is_kept(fields: Any) -> None:
    results = [result for result, *_ in (FOURS if fields else FIVES)]
    obs = np.ones(2, np.float32)
    for ends, info in (
        ((True, False), {}),
        ((False, False), {"a": 1}),
        ((False, False), {"abnormal": 1}),
    ):
        results.append(
            (obs, 1.5, *ends, info) if not fields else EnvTimestep(obs, 1.5, ends[0], info)
        )
    odd = {_UnlikeAny(): 1}
    results.append(
        (obs, 1.5, False, False, odd) if not fields else EnvTimestep(obs, 1.5, False, odd)
    )
    results.append(ValueError)
    answers: list[Any] = [lambda info: True, lambda info: False, lambda info: 1 // 0]
    for result in results:
        for write_info in (
            answers if isinstance(result, tuple) and result[-1] == {"a": 1} else answers[:1]
        ):
            columns = Columns()
            columns.env.gives = result
            keep_nothing = {name: lambda *args: None for name in ("rest", "failed", "end")}
            step = columns.step(fields=fields, write_info=write_info, **keep_nothing)
            batch, number = columns.batch(), itertools.count(1)

            def take(step: Any = step, batch: Any = batch, number: Any = number) -> None:
                _quietly(step, 1 << 40, 1 << 50)
                _quietly(batch, [step], [next(number)], [0], [object()], [1 << 40])

            assert grown_by(take) == {}, result


@in_c
def test_nothing_that_was_made_or_refused_is_kept() -> None:
    columns = Columns()

    def make() -> None:
        columns.step()
        columns.batch()
        for bad in BAD_STEPS:
            _quietly(partial(columns.step, **bad))
        _quietly(columns.batch, int)
        _quietly(columns.batch, None, 9)

    assert grown_by(make) == {}
    memory = bytearray(256)

    def make_rows() -> None:
        _rows(memory)
        for bad in BAD_ROWS:
            _quietly(partial(_rows, memory, **bad))

    assert grown_by(make_rows) == {}


@in_c
def test_no_action_and_no_timestep_is_kept() -> None:
    posting, number = Posting(), itertools.count(1 << 40)
    array = Posting(actions=np.zeros((4, 2), np.float32), is_number=False)
    rows = np.ones((4, 2), np.float32)

    def post() -> None:
        posting.phases[:] = array.phases[:] = 0
        posting.sleeping[0] = next(number) & 1
        posting.post({k: next(number) % 5 for k in range(4)})
        posting.post({0: object()})
        posting.phases[:] = 0
        posting.post(np.array([1, 2, 3, 4]), 1)
        posting.post({0: 1 << 80, 1: 1, 2: 1, 3: 1})
        array.post(dict(enumerate(rows)), 1)
        array.phases[:] = 0
        array.post(rows * 2, 1)
        array.post({**dict(enumerate(rows)), 3: np.zeros(2, "M8[s]")}, 1)
        posting.rows.deliver([object()], 0, True, next(number))
        hot.timesteps(
            EnvTimestep, [0, 1], [object(), object()], [1.5, next(number) * 0.5], {"a": 1}
        )
        _quietly(hot.timesteps, EnvTimestep, [0, []], [1, 1], [1.0, 1.0], {})

    assert grown_by(post) == {}
    replied = Posting()
    flags = np.ndarray((4,), "u2", replied.memory, 112)
    replied.phases[:] = 3

    def ask() -> None:
        for flag in (PLAIN_END, 0, 17, PLAIN_END | 16):
            flags[:] = 16
            flags[2] = flag
            replied.rows.said()
        flags[:] = PLAIN_END, PLAIN_END | 1, 0, 0
        replied.rows.said()

    assert grown_by(ask) == {}


# -- forged blocks --------------------------------------------------------------------------------


@in_c
def test_flags_and_replies_are_looked_at_before_anything_is_believed() -> None:
    memory = bytearray(256)
    rows = _rows(memory)
    flags = np.ndarray((4,), "u2", memory, 112)
    phases = np.ndarray((4,), "u1", memory, 0)
    replies, tokens = (np.ndarray((4,), "u8", memory, offset) for offset in (80, 16))
    phases[:] = 3
    believed = []
    ended = []
    for flag in range(1 << 16):
        flags[:] = flag
        said = rows.said()
        if type(said) is tuple:  # all end their episodes: no other flags say how they are told
            assert said == (flag & 15, flag & (16 | HAS_INFO), dict.fromkeys(range(4), flag))
            ended.append(flag)
        elif said is not None:
            assert said == flag
            believed.append(flag)
    assert believed == [0, 1, 16, 17, 256, 257, 272, 273]
    assert {flag & PLAIN_END_BITS for flag in ended} == {PLAIN_END, PLAIN_END | HAS_INFO}
    assert {flag & 15 for flag in ended} == {0, 1}
    assert len(ended) == 2 * 4 * 2  # terminated, truncated; with an info, without
    flags[:] = 16
    flags[2] = PLAIN_END | 1 << 5
    assert rows.said() == (0, 16, {2: PLAIN_END | 1 << 5})
    flags[2] |= HAS_INFO  # the others have none
    assert rows.said() is None
    flags[:2], flags[3] = 16 | HAS_INFO, 16 | HAS_INFO
    assert rows.said() == (0, 16 | HAS_INFO, {2: PLAIN_END | 1 << 5 | HAS_INFO})
    flags[:] = 16
    flags[2] = PLAIN_END | 1 << 5
    flags[3] = PLAIN_END | 1  # it is in another buffer
    assert rows.said() is None
    flags[3] = PLAIN_END
    resets = np.ndarray((4,), "u8", memory, 176)
    resets[3] = 9  # the next episode has not begun
    assert rows.said() is None
    resets[3] = 0
    assert _rows(memory, takes_ends=False).said() is None
    flags[:] = 0
    for k in range(4):
        flags[k] = 1
        assert rows.said() is None
        flags[k], replies[k] = 0, 5
        assert (rows.said(), rows.arrived()) == (None, False)
        tokens[k] = 5
        assert (rows.said(), rows.arrived()) == (0, True)
        phases[k] = 0
        assert (rows.said(), rows.is_posted()) == (None, False)
        phases[k] = 3
    assert (rows.said(), rows.is_posted()) == (0, True)


# -- whether it is used ---------------------------------------------------------------------------


def _be_python_with_a_stable_abi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "hexversion", 0x030B0000)
    monkeypatch.setattr(sys, "abiflags", "")


@pytest.mark.parametrize("version", [ABI + 1, None])
def test_a_stale_module_is_not_used_and_says_so(
    version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = types.SimpleNamespace() if version is None else types.SimpleNamespace(ABI=version)
    monkeypatch.setattr(importlib, "import_module", lambda name: stale)
    monkeypatch.delenv(PURE, raising=False)
    _be_python_with_a_stable_abi(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"version {version}, this envmgr needs {ABI}.*install"):
        found, why = envmgr.hot._imported()
    assert found is None
    assert why == f"not used: it is of version {version}, this envmgr needs {ABI}"


@pytest.mark.parametrize(
    ("value", "is_left_out"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_it_is_left_out_where_the_environment_says_so(
    value: str, is_left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(ABI=ABI)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    _be_python_with_a_stable_abi(monkeypatch)
    monkeypatch.setenv(PURE, value)
    found, why = envmgr.hot._imported()
    assert (found is None) is is_left_out
    assert why == (f"left out: {PURE} is set" if is_left_out else "used")


def test_it_is_no_error_that_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delenv(PURE, raising=False)
    _be_python_with_a_stable_abi(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert envmgr.hot._imported() == (None, "not there: no such module")
        monkeypatch.setattr(sys, "hexversion", 0x030A09F0)
        assert envmgr.hot._imported() == (None, "not there: it needs Python 3.11")


def test_a_free_threaded_python_does_not_load_what_another_one_has_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(name: str) -> Any:
        raise SystemError("init function of _hot returned uninitialized object")

    monkeypatch.setattr(importlib, "import_module", wrong)
    monkeypatch.delenv(PURE, raising=False)
    _be_python_with_a_stable_abi(monkeypatch)
    monkeypatch.setattr(sys, "abiflags", "t")
    assert envmgr.hot._imported() == (
        None,
        "not there: free-threaded Pythons have no stable ABI",
    )


def test_where_there_is_a_compiler_it_was_compiled_and_is_used() -> None:
    if hot is None:
        assert envmgr.hot.WHY != "used"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        could = shutil.which(compiler) is not None and header.exists() and block_is_possible()
        has_limited_api = sys.version_info >= (3, 11) and not sysconfig.get_config_var(
            "Py_GIL_DISABLED"
        )
        left_out = os.environ.get(PURE, "0") not in ("", "0")
        assert left_out or not (could and has_limited_api), envmgr.hot.WHY
    else:
        assert (hot.ABI, envmgr.hot.WHY, block_is_possible()) == (ABI, "used", True)


# -- infos ----------------------------------------------------------------------------------------


def _plain_infos(nbytes: int = 64) -> tuple[Any, bytearray, bytearray, Any]:
    record, numbers, versions = bytearray(nbytes), bytearray(3), array("q", [0])
    refused = hot.PlainInfos(lambda info: "otherwise", record, numbers, 1, versions)
    return refused, record, numbers, versions


FIELDS = (0, 7, 3, ("a", "b"), (float, int), "dq", (8, 16), 24)


@in_c
def test_infos_are_written_as_they_were_learnt_and_as_long_as_that_holds() -> None:
    infos, record, numbers, versions = _plain_infos()
    assert infos({"a": 1.5, "b": 2}) == "otherwise"  # nothing is known yet
    infos.learn(*FIELDS)
    assert infos({"a": 1.5, "b": 2}) is True
    assert bytes(record) == struct.pack("=I4xdq40x", 3, 1.5, 2)
    assert bytes(numbers) == b"\0\7\0"
    before = bytes(record)
    others: list[Any] = [
        {"a": 1.5},
        {"a": 1.5, "b": 2, "c": 3},
        {"b": 2, "a": 1.5},
        {"a": 1.5, "c": 2},
        {"a": 1, "b": 2},
        {"a": 1.5, "b": True},
        {"a": np.float64(1.5), "b": 2},
        {"a": 2.5, "b": 2**63},
        {1: 1.5, "b": 2},
        types.MappingProxyType({"a": 1.5, "b": 2}),
    ]
    for other in others:
        assert infos(other) == "otherwise"
        assert bytes(record) == before
    versions[0] += 1
    assert infos({"a": 1.5, "b": 2}) == "otherwise"


@in_c
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (3, ()),
        (3, ("a",)),
        (3, ("a", 2)),
        (4, (float,)),
        (5, "d"),
        (5, "ds"),
        (6, (8,)),
        (6, (8, 17)),
        (6, (0, 16)),
        (6, (-8, 16)),
        (6, (8, sys.maxsize)),
        (7, 2),
        (7, 65),
        (7, 4096),
    ],
)
def test_fields_that_do_not_lie_in_a_record_are_refused(at: int, value: Any) -> None:
    infos, record, _, _ = _plain_infos()
    with pytest.raises(ValueError, match="fields of an info"):
        infos.learn(*FIELDS[:at], value, *FIELDS[at + 1 :])
    assert infos({"a": 1.5, "b": 2}) == "otherwise"
    assert not any(record)


@in_c
def test_records_are_copied_of_rows_that_there_are_and_of_one_known_form() -> None:
    memory = np.arange(32, dtype=np.uint8).reshape(4, 8)
    memory[2, :4] = memory[1, :4]
    numbers, form = np.array([2, 1, 1, 1], np.uint8), types.SimpleNamespace(nbytes=6)
    assert hot.records(memory, numbers, 1, 2, {1: form}) == (
        form,
        bytearray(memory[1:3, :6].tobytes()),
        int(memory[1, :4].view(np.uint32)[0]),
    )
    assert hot.records(memory, numbers, 1, 3, {1: form})[2] is None
    assert hot.records(memory, numbers, 0, 2, {1: form, 2: form}) is None
    assert hot.records(memory, numbers, 0, 1, {1: form}) is None
    for nbytes in (3, 9):
        assert hot.records(memory, numbers, 1, 2, {1: types.SimpleNamespace(nbytes=nbytes)}) is None
    for first, count in ((1, 4), (-1, 2), (4, 1), (0, 0), (sys.maxsize, 1), (1, sys.maxsize)):
        with pytest.raises(ValueError, match="rows"):
            hot.records(memory, numbers, first, count, {1: form})
    with pytest.raises(ValueError, match="rows"):
        hot.records(memory[:, ::2], numbers, 1, 2, {1: form})


@in_c
def test_dicts_are_made_of_lists_that_fit() -> None:
    found = hot.dicts(("a", "b"), [[1, 2], ["x", "y"]], 2)
    assert found == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    unfit: list[Any] = [
        (("a",), [[1], [2]], 1),
        (("a",), [[1]], 2),
        (("a",), [[1]], -1),
        ((1,), [[1]], 1),
        (("a",), [(1,)], 1),
    ]
    for arguments in unfit:
        with pytest.raises(ValueError, match="a list for each key"):
            hot.dicts(*arguments)


@in_c
def test_dicts_are_seen_by_nobody_before_all_of_them_are_made() -> None:
    count, half_empty = 37, []

    def look(phase: str, about: Any) -> None:
        lists = [one for one in gc.get_objects() if type(one) is list and len(one) == count]
        half_empty.extend(one for one in lists if len(gc.get_referents(one)) < count)

    threshold = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(look)
    gc.set_threshold(5)
    try:
        found = hot.dicts(("a",), [[1] * count], count)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)
    assert len(half_empty) == 0  # not `== []`: that would show what is not there
    assert found == [{"a": 1}] * count
    assert gc.is_tracked(found)


@in_c
def test_tuples_that_c_makes_have_the_hashes_of_their_items() -> None:
    made = hot.timesteps(EnvTimestep, [3], [1.5], [2.5], {})[3]
    assert made == EnvTimestep(1.5, 2.5, False, {})
    with pytest.raises(TypeError, match="unhashable"):  # as its info is: it has no hash of its own
        hash(made)
    column = hot.columns(InfoColumn, ("a",), [1], [2], ("f",))["a"]
    assert hash(column) == hash((1, 2))
    replied = Replied()
    handed, returning = replied.hand_out(), replied.holder.returning
    with pytest.raises(TypeError, match="unhashable"):
        hash(handed.result)
    assert hash(returning) == hash(tuple(returning))


@in_c
def test_columns_are_made_of_as_many_parts_as_there_are_keys() -> None:
    values, present = np.arange(6.0).reshape(2, 3), np.ones((2, 3), np.bool_)
    found = hot.columns(InfoColumn, ("a", "b"), values, present, (float, np.float64))
    assert [*found] == ["a", "b"]
    for k, (column, kind) in enumerate(zip(found.values(), (float, np.float64), strict=True)):
        assert type(column) is InfoColumn
        assert (column.kind, len(column)) == (kind, 2)
        assert np.shares_memory(column.values, values[k])
        assert np.shares_memory(column.present, present[k])
    with pytest.raises(ValueError, match="a kind for each key"):
        hot.columns(InfoColumn, ("a", "b"), values, present, (float,))
    with pytest.raises(TypeError, match="type of tuples"):
        hot.columns(list, ("a",), values, present, (float,))
    with pytest.raises(AttributeError):
        hot.columns(tuple, ("a",), values, present, (float,))
    with pytest.raises(IndexError):
        hot.columns(InfoColumn, ("a", "b"), values[:1], present, (float, float))
    with pytest.raises(IndexError):
        hot.columns(InfoColumn, ("a", "b"), values, present[:1], (float, float))
    with pytest.raises(TypeError, match="unhashable"):
        hot.columns(InfoColumn, ([],), values, present, (float,))


@in_c
def test_no_info_is_kept() -> None:
    infos, _, _, _ = _plain_infos()
    value, key = 1e300, "".join(("a", "b"))
    infos.learn(0, 1, 1, (key,), (float,), "d", (8,), 16)

    def go() -> None:
        for _ in range(50):
            infos({key: value})
            infos({key: 2})
            infos.learn(0, 1, 1, (key,), (float,), "d", (8,), 16)
            hot.dicts((key,), [[value] * 3], 3)
            hot.columns(InfoColumn, (key,), [value], [value], (float,))
            _quietly(hot.columns, tuple, (key,), [value], [value], (float,))
            _quietly(hot.columns, InfoColumn, (key,), [value], [], (float,))
            _quietly(hot.columns, InfoColumn, ([],), [value], [value], (float,))
            memory, numbers = np.zeros((2, 8), np.uint8), np.zeros(2, np.uint8)
            hot.records(memory, numbers, 0, 2, {0: types.SimpleNamespace(nbytes=8)})
            _quietly(hot.records, memory, numbers, 0, 2, {0: None})

    go()
    gc.collect()  # what other tests have left refers to `float`, too
    before = sys.getrefcount(value), sys.getrefcount(key), sys.getrefcount(float)
    assert grown_by(go) == {}
    assert (sys.getrefcount(value), sys.getrefcount(key), sys.getrefcount(float)) == before
