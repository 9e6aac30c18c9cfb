"""Observations from host to trainer, by the arena or in the reply: checked before committed."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from envmgr.core.observations import (
    STEPS,
    Arena,
    Arenas,
    CheckedView,
    ObservationReader,
    Observed,
    ViewGuard,
)
from envmgr.core.table import Selection
from envmgr.errors import StaleViewError
from envmgr.spaces import NonFiniteError, ValueMismatchError, codec_of
from envmgr.wire.arenas import (
    COPIED,
    VIEWED,
    ObservationRules,
    Placement,
    arena_arrays,
    buffer_arrays,
    plan_placements,
)
from envmgr.worker.observations import ObservationWriter
from tests.cases import for_each

FLOATS = Box(-1, 1, (2,), np.float32)
NESTED = Dict(
    {
        "image": Box(0, 255, (3, 3), np.uint8),
        "parts": Tuple((Discrete(5), Box(-1, 1, (), np.float64), Box(0, 1, (0,), np.float32))),
    }
)


def ignore(text: str) -> None:
    """Take note of a cast."""


def writer(space: Any, **rules: Any) -> ObservationWriter:
    return ObservationWriter(space, ObservationRules(**rules), ignore)


def pair(
    space: Any, *, copy_on_get: bool = True, rows: int = 3, row: int = 1
) -> tuple[ObservationWriter, ObservationReader, bytearray]:
    """Return a writer and a reader of one env in the same memory."""
    write, read = writer(space), ObservationReader(space)
    placements, nbytes = plan_placements([read.layout] * rows, COPIED if copy_on_get else VIEWED)
    memory = bytearray(nbytes)
    placement = placements[row]
    assert (placement is None) == (codec_of(space).structure.placed is None)
    if placement is not None:
        write.attach(memory, placement)
        read.attach(memory, placement, copy_on_get=copy_on_get)
    return write, read, memory


def equal(one: Any, other: Any) -> bool:
    """Compare nested observations: the same structure, shapes, kinds of numbers and numbers.

    The order of bytes may differ: numpy's scalars have always that of the machine.
    """
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype.kind in "VUO":
        return a.dtype == b.dtype and np.array_equal(a, b)
    same_type = a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")
    return a.shape == b.shape and same_type and np.array_equal(a, b, equal_nan=True)


# -- round trips ----------------------------------------------------------------------------------


@st.composite
def leaf_spaces(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["box", "discrete", "multi discrete", "multi binary"]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if kind == "box":
        dtype = draw(st.sampled_from(["f4", "f8", ">f4", "f2", "u1", "i2", ">i4", "i8", "?"]))
        return Box(0, 1, shape, np.dtype(dtype))  # type: ignore[arg-type]
    if kind == "discrete":
        return Discrete(draw(st.integers(1, 9)), start=draw(st.integers(-5, 5)))
    if kind == "multi discrete":
        return MultiDiscrete(np.full([n + 1 for n in shape] or [1], 7))
    return MultiBinary([n + 1 for n in shape] or 1)


def fixed_spaces() -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text("abc ", max_size=3), st.sampled_from(["obs", "é"]))
    return st.recursive(
        leaf_spaces(),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(Dict),
            st.lists(inner, min_size=1, max_size=3).map(Tuple),
        ),
        max_leaves=5,
    )


class Records(spaces.Space[Any]):
    """Arrays of records, or of texts of fixed length: of a class that nobody knows."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        assert self.shape is not None
        codes = self.np_random.integers(65, 90, (*self.shape, self.dtype.itemsize // 4))
        return codes.astype(np.uint32).view(self.dtype).reshape(self.shape)


RECORD = np.dtype([("n", np.int32), ("at", np.int16, (2, 3)), ("name", "U3")])


def any_spaces() -> st.SearchStrategy[Any]:
    """Return spaces of every form: of arrays of any kind, of objects, and trees of both."""
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    records = st.builds(Records, shapes, st.sampled_from([RECORD, np.dtype("U2")]))
    free = st.sampled_from([Text(5), spaces.Sequence(Discrete(3))])
    leaves = st.one_of(leaf_spaces(), records, free)
    return st.one_of(
        fixed_spaces(),
        leaves,
        st.lists(leaves, max_size=4).map(Tuple),
        st.lists(leaves, min_size=2).map(tree),
    )


def tree(leaves: list[Any]) -> Any:
    """Return a space with such parts, one of them further down."""
    return Dict({"down": Dict({"last": leaves[-1]}), **{str(i): x for i, x in enumerate(leaves)}})


@given(any_spaces(), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_form_is_read_as_it_was_written(space: Any, in_memory: bool, seed: int) -> None:
    write, read, _ = pair(space)
    if not in_memory:
        write, read = writer(space), ObservationReader(space)
    space.seed(seed)
    samples = [space.sample() for _ in range(2)]
    found = [read.read(write.write(sample)) for sample in samples]
    assert all(map(equal, found, map(_as_arrays, samples)))
    carried = [read.read(write.with_bytes(write.write(sample))) for sample in samples]
    assert all(map(equal, carried, map(_as_arrays, samples)))
    structure = codec_of(space).structure
    assert repr(codec_of(space).stack(found)) == repr(codec_of(space).stack(samples))
    if structure.fixed:
        assert structure.zeros(2, 3) is not None
        with pytest.raises(ValueMismatchError):
            write.write(None)


SCENE = Dict(
    {
        "n": Discrete(3),
        "seen": spaces.Sequence(Discrete(3)),
        "task": Text(9),
        "xy": Box(-1, 1, (2,), np.float32),
    }
)


def test_a_mixed_observation_is_refused_whole_and_what_refers_to_it_is_checked() -> None:
    write, read, memory = pair(SCENE)
    good = {"n": 1, "seen": (2,), "task": "go", "xy": np.ones(2, np.float32)}
    buffer, free = write.write(good)
    assert (type(buffer), free) == (int, [(2,), "go"])
    before = bytes(memory)
    for key, odd in {"seen": (3,), "task": "#", "xy": np.zeros(3), "n": None}.items():
        with pytest.raises(ValueMismatchError, match=rf"value\['{key}'\]"):
            write.write({**good, key: odd})
    with pytest.raises(ValueMismatchError, match="a dict of"):
        write.write({**good, "more": 1})
    assert bytes(memory) == before
    for odd in (
        buffer,
        (buffer,),
        (buffer, (1, 2)),
        (buffer, [1]),
        (99, [1, 2]),
        ([], [1, 2]),
        None,
    ):
        with pytest.raises(ValueMismatchError):
            read.read(odd)
    write.detach()
    arrays, free = write.write(good)
    assert free == [(2,), "go"]
    assert arrays[1] is not good["xy"]


@pytest.mark.parametrize("kind", ["<U4", "S2", RECORD], ids=str)
def test_records_and_texts_are_cast_only_where_nothing_is_lost(kind: Any) -> None:
    dtype = np.dtype(kind)
    write, read, _ = pair(spaces.Space((2,), dtype))
    longer = {"U": "<U5", "S": "S3", "V": [("n", np.int64)]}[dtype.kind]
    with pytest.raises(ValueMismatchError, match="would lose"):
        write.write(np.zeros(2, longer))
    if dtype.kind != "V":
        shorter = np.array(["ab", "c"], f"{dtype.kind}2")
        assert read.read(write.write(shorter)).tolist() == shorter.tolist()


def test_numbers_that_are_not_finite_are_found_in_fields_of_records() -> None:
    space = spaces.Space((2,), np.dtype([("id", "U2"), ("at", np.float32, (2,))]))
    write = writer(space, refuse_non_finite=True)
    units = np.zeros(2, space.dtype)
    write.write(units)
    units["at"][1, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"\['at'\]"):
        write.write(units)


@given(fixed_spaces(), st.booleans(), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_what_is_written_into_the_arena_is_what_is_read(
    space: Any, copy_on_get: bool, row: int, seed: int
) -> None:
    write, read, _ = pair(space, copy_on_get=copy_on_get, row=row)
    space.seed(seed)
    for number in range(9):
        sample = space.sample()
        slot = write.write(sample, of_reset=number % 3 == 0)
        assert equal(read.read(slot), _as_arrays(sample))


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_arrays(part) for key, part in value.items()}
    return tuple(map(_as_arrays, value)) if isinstance(value, tuple) else np.asarray(value)


@pytest.mark.parametrize("in_memory", [False, True])
def test_observations_are_private_and_writable(in_memory: bool) -> None:
    source = np.array([0.25, 0.5], np.float32)
    write, read, _ = pair(FLOATS)
    if not in_memory:
        write, read = writer(FLOATS), ObservationReader(FLOATS)
    first = read.read(write.write(source))
    source[:] = 0
    assert first.tolist() == [0.25, 0.5]
    first[:] = 7
    assert read.read(write.write(source)).tolist() == [0, 0]
    assert first.tolist() == [7, 7]


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1, 2, 3], [4, 5, 6]], np.int16)[:, ::2],
        np.array(7, np.int16),
        np.zeros((0, 3), np.int16),
    ],
    ids=["not contiguous", "one number", "nothing"],
)
def test_an_array_that_travels_in_a_reply_is_a_copy_of_any_layout(value: Any) -> None:
    space = Box(-9, 9, value.shape, np.int16)
    reference = writer(space).write(value)
    expected = value.copy()
    if value.size:
        value[...] = 8
    observation = ObservationReader(space).read(reference)
    assert equal(observation, expected)
    assert observation.flags.writeable


@pytest.mark.parametrize("in_memory", [False, True])
def test_single_numbers_have_one_form_however_they_travel(in_memory: bool) -> None:
    write, read, _ = pair(Discrete(5))
    if not in_memory:
        write, read = writer(Discrete(5)), ObservationReader(Discrete(5))
    for value in (3, np.int64(3), np.array(3), np.int8(3)):
        observation = read.read(write.write(value))
        assert type(observation) is np.int64
        assert observation == 3


def test_without_layout_the_observation_itself_travels() -> None:
    space = spaces.Sequence(Discrete(3))
    write, read = writer(space), ObservationReader(space)
    assert read.layout is None
    assert write.write((1, 2)) == read.read((1, 2)) == (1, 2)
    with pytest.raises(ValueMismatchError, match="is not in Sequence"):
        write.write((3,))


def test_without_a_space_nothing_is_checked_but_none() -> None:
    write, read = writer(None), ObservationReader(None)
    value = object()
    assert read.read(write.write(value)) is value
    with pytest.raises(ValueMismatchError, match="value is None"):
        write.write(None)


def test_free_forms_are_copied_where_no_process_boundary_does_it() -> None:
    value = {"text": ["a"]}
    assert ObservationReader(None).read(value) is value
    write = ObservationWriter(None, ObservationRules(copy_free_form=True), ignore)
    copied = write.write(value)
    assert copied == value
    assert copied["text"] is not value["text"]
    with pytest.raises(
        ValueMismatchError, match="the observation, a dict, cannot be copied: TypeError"
    ):
        write.write({"lock": threading.Lock()})


# -- checks before anything is written ------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"image": np.zeros((3, 3), np.uint8)},
        {"image": np.zeros((3, 3), np.uint8), "parts": (1, 0.5)},
        {"image": np.ones((3, 3), np.uint8), "parts": (1, 0.5, np.zeros(1, np.float32))},
        {"image": np.ones((3, 3), np.uint8), "parts": (1, None, np.zeros(0, np.float32))},
        None,
    ],
    ids=range(5),
)
def test_what_does_not_fit_is_refused_whole(bad: Any) -> None:
    write, read, memory = pair(NESTED)
    NESTED.seed(1)
    good = NESTED.sample()
    slot = write.write(good)
    before = bytes(memory)
    with pytest.raises(ValueMismatchError):
        write.write(bad)
    assert bytes(memory) == before
    assert equal(read.read(slot), _as_arrays(good))
    assert write.write(good) == slot + 1  # the refused one has used up no slot


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("in_memory", [False, True])
def test_non_finite_numbers_are_refused_if_so_ruled(bad: float, in_memory: bool) -> None:
    space = Dict({"n": Discrete(3), "x": FLOATS})
    value = {"n": 1, "x": np.array([0, bad], np.float32)}
    allowed, _, _ = pair(space)
    allowed.write(value)
    write, _, memory = pair(space)
    if not in_memory:
        write = writer(space)
    write._rules = ObservationRules(refuse_non_finite=True)
    before = bytes(memory)
    with pytest.raises(NonFiniteError, match=r"value\['x'\] has NaN or infinite numbers"):
        write.write(value)
    assert bytes(memory) == before
    write.write({"n": 1, "x": np.zeros(2, np.float32)})


def test_casts_are_made_and_told() -> None:
    told: list[str] = []
    write = ObservationWriter(FLOATS, ObservationRules(), told.append)
    reference = write.write(np.array([0.25, 0.5]))
    assert ObservationReader(FLOATS).read(reference).tolist() == [0.25, 0.5]
    assert told == ["value has dtype float64, the space says float32: it is cast"]
    strict = writer(FLOATS, strict_dtype=True)
    with pytest.raises(ValueMismatchError, match="strict_dtype is on"):
        strict.write(np.array([0.25, 0.5]))


def test_casts_into_the_arena_keep_the_numbers() -> None:
    space = Box(0, 255, (3,), ">u2")
    write, read, _ = pair(space)
    observation = read.read(write.write([1, 2, 255]))
    assert observation.dtype == np.dtype(">u2")
    assert observation.tolist() == [1, 2, 255]


# -- references are not trusted -------------------------------------------------------------------


@pytest.mark.parametrize("reference", [-1, 4, 10**9, None, "0", 0.0, True, np.int64(0), (0,)])
def test_buffers_that_a_writer_does_not_name_are_refused(reference: Any) -> None:
    _, read, _ = pair(FLOATS)
    with pytest.raises(ValueMismatchError, match=r"is not a buffer of 0\.\.3"):
        read.read(reference)


@for_each(
    "reference",
    [
        0,
        None,
        "ab",
        bytearray(8),
        (bytearray(8),),
        [],
        [bytearray(8)] * 2,
        [None],
        ["ab"],
        [[0.0, 0.0]],
        [bytearray(7)],
        [bytearray(9)],
        [bytearray()],
        [bytes(8)],
        pytest.param([memoryview(bytearray(8))], id="a view of them"),
        [np.zeros(2, np.float32)],
    ],
)
def test_leaves_that_a_writer_does_not_send_are_refused(reference: Any) -> None:
    with pytest.raises(ValueMismatchError):
        ObservationReader(FLOATS).read(reference)


# -- slots ----------------------------------------------------------------------------------------


def test_steps_and_resets_take_buffers_of_their_own() -> None:
    write, _, _ = pair(FLOATS, copy_on_get=False)
    value = np.zeros(2, np.float32)
    assert [write.write(value) for _ in range(4)] == [0, 1, 2, 0]
    assert [write.write(value, of_reset=True) for _ in range(4)] == [3, 4, 5, 3]
    assert write.write(value) == 1  # resets do not move the ring of steps
    write, _, _ = pair(FLOATS, copy_on_get=True)
    assert [write.write(value) for _ in range(3)] == [0, 1, 0]
    assert [write.write(value, of_reset=True) for _ in range(3)] == [2, 3, 2]


@given(st.lists(st.booleans(), min_size=3, max_size=12))
def test_views_stay_as_they_are_through_two_more_steps(ends: list[bool]) -> None:
    # Each of these steps may end an episode, and a reset follows, with an observation of its own.
    write, read, _ = pair(FLOATS, copy_on_get=False)
    number = itertools.count(1)
    views: list[list[tuple[Any, int]]] = []

    def observe(*, of_reset: bool) -> tuple[Any, int]:
        value = next(number)
        slot = write.write(np.array([value, -value], np.float32), of_reset=of_reset)
        return read.read(slot), value

    views.append([observe(of_reset=True)])
    for end in ends:
        views.append([observe(of_reset=False)])
        if end:
            views[-1].append(observe(of_reset=True))
        for view, value in itertools.chain(*views[-3:]):
            assert view.tolist() == [value, -value]


def test_a_slot_is_used_again_after_that_because_it_is_a_view() -> None:
    write, read, _ = pair(FLOATS, copy_on_get=False)
    view = read.read(write.write(np.array([0, 0], np.float32)))
    for number in (1, 2, 3):
        write.write(np.array([number, number], np.float32))
    assert view.tolist() == [3, 3]


def test_copies_stay_as_they_are_for_ever() -> None:
    write, read, _ = pair(FLOATS, copy_on_get=True)
    copies = [read.read(write.write(np.array([n, n], np.float32))) for n in range(12)]
    assert [copy.tolist() for copy in copies] == [[n, n] for n in range(12)]


def test_a_new_env_spares_the_slots_that_were_read_last() -> None:
    write, read, memory = pair(FLOATS, rows=1, row=0, copy_on_get=False)
    placement = plan_placements([codec_of(FLOATS).layout], VIEWED)[0][0]
    assert placement is not None
    assert read.placed_anew(placement) == placement
    first = read.read(write.write(np.array([1, 2], np.float32), of_reset=True))
    view = read.read(write.write(np.array([3, 4], np.float32)))
    anew = read.placed_anew(placement)
    assert (anew.step_buffer, anew.reset_buffer) == (1, 4)
    write.attach(memory, anew)
    assert write.write(np.array([5, 6], np.float32), of_reset=True) == 4
    assert write.write(np.array([7, 8], np.float32)) == 1
    assert (first.tolist(), view.tolist()) == ([1, 2], [3, 4]), "views that are still shown"


def test_a_new_env_spares_the_slot_of_the_step_before_a_reset_too() -> None:
    _, read, _ = pair(FLOATS, copy_on_get=False)
    placement = plan_placements([codec_of(FLOATS).layout], VIEWED)[0][0]
    assert placement is not None
    observed = Observed(1)
    observed.open([read])
    lone = Selection([0])
    observed.began({0: 3})
    observed.taken_as_rows(lone, 1, [np.zeros(2, np.float32)])
    observed.began({0: 4})
    anew = observed.placed_anew(0, placement)
    assert (anew.step_buffer, anew.reset_buffer) == (2, 5)
    observed.taken_as_rows(lone, 2, [np.zeros(2, np.float32)])
    assert observed.placed_anew(0, placement).step_buffer == 0


def test_detaching_lets_go_of_the_memory() -> None:
    write, read, memory = pair(FLOATS, copy_on_get=False)
    read.read(write.write(np.zeros(2, np.float32)))
    write._slots = None
    read.detach()
    memory.clear()  # BufferError if anything still held it


# -- batches of envs --------------------------------------------------------------------------


def arena_of(space: Any, rows: int, env_ids: list[int], **how: Any) -> tuple[Arena, list[Any]]:
    """Return the observations of envs, and who writes them."""
    layout = codec_of(space).layout
    placements, nbytes = plan_placements([layout] * rows, COPIED)
    memory, writers = bytearray(nbytes), [writer(space) for _ in range(rows)]
    for write, placement in zip(writers, placements, strict=True):
        write.attach(memory, placement)
    arrays = arena_arrays(memory, placements[0])
    how = {"copies": True, "guard": None, **how}
    return Arena(arrays, layout, placements[0].buffers, env_ids, **how), writers


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 0]])
def test_single_numbers_of_batches_are_numbers_and_arrays_without_axes_are_arrays(
    copies: bool, ids: list[int]
) -> None:
    for space, kind in ((Discrete(5), np.int64), (Box(0, 9, (), np.float64), np.ndarray)):
        arena, writers = arena_of(space, 3, [0, 1, 2], copies=copies)
        buffers = {write.write(space.dtype.type(k)) for k, write in enumerate(writers)}
        rows = arena.rows_of(Selection(ids), buffers.pop())
        assert [type(row) for row in rows] == [kind] * len(ids)
        assert [float(row) for row in rows] == ids
        buffer = writers[0].write(space.dtype.type(7))
        batch = arena.batch(Selection(ids), buffer)
        assert batch.shape == (len(ids),)
        assert batch[ids.index(0)] == 7


def test_envs_of_several_layouts_are_read_in_their_order() -> None:
    (some, write_some), (others, write_others) = (
        arena_of(space, 2, [0, 2] if space is FLOATS else [1, 3]) for space in (FLOATS, Discrete(9))
    )
    arenas = Arenas([(some, 0), (others, 0), (some, 1), (others, 1)])
    for k in range(2):
        buffer = write_some[k].write(np.full(2, k / 2, np.float32))
        assert write_others[k].write(5 + k) == buffer
    expected = {0: [0.0, 0.0], 1: 5, 2: [0.5, 0.5], 3: 6}
    for ids in ([0, 1, 2, 3], [3, 2, 0], [1]):
        for buffers in (buffer, bytes([buffer] * len(ids))):
            rows = arenas.rows_of(Selection(ids), buffers)
            assert [row.tolist() for row in rows] == [expected[i] for i in ids]
    assert arenas.batch(Selection([0, 1]), buffer) is None
    assert arenas.batch(Selection([2, 0]), buffer).tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert arenas.batch(Selection([1, 3]), bytes([buffer] * 2)).tolist() == [5, 6]


# -- placements -----------------------------------------------------------------------------------


def test_envs_of_one_layout_share_a_block_and_have_rows_of_their_own() -> None:
    floats, nested = codec_of(FLOATS).layout, codec_of(NESTED).layout
    placements, nbytes = plan_placements([floats, nested, None, floats], COPIED)
    assert placements[2] is None
    first, second, third = placements[0], placements[1], placements[3]
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.offset, first.rows, first.row) == (0, 2, 0)
    assert (third.offset, third.rows, third.row) == (0, 2, 1)
    assert (second.rows, second.row) == (1, 0)
    assert second.offset > 0
    assert {p.nbytes for p in (first, second, third)} == {nbytes}


def test_nothing_to_place() -> None:
    assert plan_placements([None, None], COPIED) == ([None, None], 0)
    assert plan_placements([], COPIED) == ([], 0)


def test_what_comes_before_the_arenas_is_left_alone() -> None:
    placements, nbytes = plan_placements([codec_of(FLOATS).layout], COPIED, offset=65)
    assert placements[0] is not None
    assert (placements[0].offset, nbytes) == (128, 192)


def test_only_empty_arrays_need_no_memory() -> None:
    space = Box(0, 1, (0,), np.float32)
    write, read, memory = pair(space)
    assert len(memory) == 0
    assert read.read(write.write(np.zeros(0, np.float32))).shape == (0,)


@given(st.lists(st.one_of(st.none(), fixed_spaces()), min_size=1, max_size=5))
def test_no_two_arrays_of_any_two_envs_share_a_byte(given_spaces: list[Any]) -> None:
    layouts = [None if space is None else codec_of(space).layout for space in given_spaces]
    placements, nbytes = plan_placements(layouts, VIEWED)
    memory = bytearray(nbytes)
    arrays = [a for p in placements if p is not None for a in buffer_arrays(memory, p)]
    assert all(array.shape[0] == VIEWED.count for array in arrays)
    assert sum(array.nbytes for array in arrays) <= nbytes
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)


def test_blocks_and_leaves_are_aligned() -> None:
    space = Dict({"a": Box(0, 1, (3,), np.uint8), "b": Box(0, 1, (1,), np.float64)})
    placements, nbytes = plan_placements([codec_of(space).layout, codec_of(FLOATS).layout], COPIED)
    assert nbytes % 64 == 0
    offsets = [p.offset for p in placements if p is not None]
    assert all(offset % 64 == 0 for offset in offsets)
    base = np.zeros(nbytes, np.uint8)
    placement = placements[0]
    assert placement is not None
    _, floats = buffer_arrays(base.data, placement)
    assert (floats.ctypes.data - base.ctypes.data) % 64 == 0


def test_memory_that_is_too_small_is_refused() -> None:
    layout = codec_of(FLOATS).layout
    assert layout is not None
    placement = Placement(layout, COPIED, 0, nbytes=8, rows=1, row=0, step_buffer=0, reset_buffer=2)
    with pytest.raises((TypeError, ValueError)):
        buffer_arrays(bytearray(8), placement)


def test_spaces_of_values_need_not_be_the_same_objects_on_both_sides() -> None:
    write, _, memory = pair(NESTED)
    read = ObservationReader(spaces.Dict(dict(NESTED.spaces)))
    assert read.layout == codec_of(NESTED).layout
    placement = plan_placements([read.layout] * 3, COPIED)[0][1]
    assert placement is not None
    read.attach(memory, placement, copy_on_get=True)
    NESTED.seed(2)
    sample = NESTED.sample()
    assert equal(read.read(write.write(sample)), _as_arrays(sample))


# -- views that refuse to be used after their time ------------------------------------------------


class Pair(NamedTuple):
    one: Any
    other: Any


USES: dict[str, Callable[[Any], Any]] = {
    "index": lambda view: view[0],
    "slice": lambda view: view[1:],
    "iterate": list,
    "add": lambda view: view + 1,
    "add from the left": lambda view: 1 + view,
    "compare": lambda view: view == 0,
    "sum": lambda view: view.sum(),
    "np.sum": np.sum,
    "mean": lambda view: view.mean(),
    "max": lambda view: view.max(),
    "a product": lambda view: view.dot(view),
    "cumsum": lambda view: view.cumsum(),
    "flatten": lambda view: view.flatten(),
    "ravel": lambda view: view.ravel() + 1,
    "another shape": lambda view: view.reshape(-1)[0],
    "transposed": lambda view: view.T[0],
    "sort in place": lambda view: view.sort(),
    "fill": lambda view: view.fill(1.0),
    "a number of it": lambda view: float(view[:1].reshape(())),
    "truth": lambda view: bool(view[:1]),
    "contains": lambda view: 3.0 in view,
    "format": lambda view: f"{view}",
    "deep copy": copy.deepcopy,
    "stack": lambda view: np.stack([view, view]),
    "concatenate": lambda view: np.concatenate((view, np.zeros(1))),
    "a named tuple": lambda view: np.stack(Pair(view, view)),
    "copy": lambda view: view.copy(),
    "astype": lambda view: view.astype(np.float32),
    "tolist": lambda view: view.tolist(),
    "tobytes": lambda view: view.tobytes(),
    "item": lambda view: view.item(0),
    "repr": repr,
    "str": str,
    "pickle": pickle.dumps,
    "write": lambda view: view.__setitem__(0, 1.0),
    "write into": lambda view: np.add(1, 1, out=view),
    "a part of it": lambda view: view[1:] + 1,
}


def checked() -> tuple[ViewGuard, Any]:
    guard = ViewGuard(3)
    return guard, guard.wrap([1], np.arange(4.0))


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_every_use_is_allowed_in_time_and_refused_after_it(use: Callable[[Any], Any]) -> None:
    guard, view = checked()
    part = view[:]
    for request in range(1, STEPS + 1):
        guard.count([1], request)
        use(view)
    guard.count([1], STEPS + 1)
    for stale in (view, part):
        with pytest.raises(StaleViewError, match=r"env 1 .* 3 actions"):
            use(stale)


def test_a_request_that_an_interrupt_had_sent_twice_counts_once() -> None:
    guard, view = checked()
    for request in range(1, STEPS + 1):
        for _ in range(3):
            guard.count([1], request)
    assert view.tolist() == [0, 1, 2, 3]


def test_who_holds_the_observations_counts_what_is_sent() -> None:
    guard, view = checked()
    observed = Observed(3)
    observed.open([], guard)
    for request in range(STEPS + 1):
        view.tolist()
        observed.counted([1], request + 1)
    with pytest.raises(StaleViewError):
        view.tolist()


def test_steps_of_other_envs_do_not_matter() -> None:
    guard, view = checked()
    for request in range(1, 10):
        guard.count([0, 2], request)
    assert view.tolist() == [0, 1, 2, 3]


def test_a_batch_is_as_old_as_its_oldest_row() -> None:
    guard = ViewGuard(2)
    batch = guard.wrap([0, 1], np.zeros((2, 3)))
    for request in range(1, STEPS + 2):
        guard.count([1], request)
    with pytest.raises(StaleViewError, match="env 1"):
        batch.sum()


def test_what_is_computed_is_an_ordinary_array() -> None:
    guard, view = checked()
    results = [
        view + 1,
        view.copy(),
        view.astype(int),
        view.flatten(),
        view.cumsum(),
        copy.deepcopy(view),
        np.stack([view]),
        pickle.loads(pickle.dumps(view)),
    ]
    assert [type(result) for result in results] == [np.ndarray] * len(results)
    assert type(view[1:]) is CheckedView
    for request in range(1, STEPS + 2):
        guard.count([1], request)
    assert results[0].tolist() == [1, 2, 3, 4]


def test_numbers_are_left_as_they_are() -> None:
    number = np.int64(3)
    assert ViewGuard(1).wrap([0], number) is number
