"""Texts in observations: through shared memory if there is room, and what is read of them there."""

from __future__ import annotations

import itertools
import string
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, Graph, Text, Tuple
from hypothesis import example, given
from hypothesis import strategies as st

from envmgr.core.observations import Arena, Arenas, ObservationReader, ViewGuard
from envmgr.core.table import Selection
from envmgr.spaces import TextLeaf, TextReader, ValueMismatchError, codec_of
from envmgr.spaces.layouts import MOST_TEXT_BYTES
from envmgr.wire.arenas import (
    COPIED,
    VIEWED,
    ObservationRules,
    Placement,
    arena_arrays,
    plan_placements,
)
from envmgr.worker.observations import ObservationWriter
from tests.cases import for_each


class Missions(spaces.Space[str]):
    """Any texts, as MiniGrid's MissionSpace: no class of gymnasium's, and no largest length."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "".join(map(chr, self.np_random.integers(32, 0x3000, self.np_random.integers(9))))


class Word(str):
    """A text that is none to who looks closely."""


IMAGE = Box(0, 255, (2, 2), np.uint8)
GRID = Dict({"image": IMAGE, "mission": Missions(), "n": Discrete(4)})
LONG = "ü" * (MOST_TEXT_BYTES // 2)  # exactly as long as there is room


def grid(text: Any, n: int = 1) -> dict[str, Any]:
    return {"image": np.full((2, 2), n, np.uint8), "mission": text, "n": np.int64(n)}


def same(one: Any, other: Any) -> bool:
    """Compare observations: values and types."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return type(one) is type(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(np.array_equal(one, other))


def writer(space: Any, **rules: Any) -> ObservationWriter:
    return ObservationWriter(space, ObservationRules(**rules), lambda text: None)


class Rig:
    """Envs of some spaces that write into one memory, and an arena that reads there."""

    def __init__(self, *of_envs: Any, copies: bool = True, guard: ViewGuard | None = None) -> None:
        layouts = [ObservationReader(space).layout for space in of_envs]
        placements, nbytes = plan_placements(layouts, COPIED if copies else VIEWED)
        self.memory = bytearray(nbytes)
        self.placements = [placement for placement in placements if placement is not None]
        assert len(self.placements) == len(of_envs)
        self.writers = list(map(writer, of_envs))
        self.readers = list(map(ObservationReader, of_envs))
        for write, read, placed in zip(self.writers, self.readers, self.placements, strict=True):
            write.attach(self.memory, placed)
            read.attach(self.memory, placed, copy_on_get=copies)
        made: dict[Any, Arena] = {}
        for placed in self.placements:
            ids = [i for i, other in enumerate(self.placements) if other.layout == placed.layout]
            arrays = arena_arrays(self.memory, placed)
            made[placed.layout] = Arena(
                arrays, placed.layout, placed.buffers, ids, copies=copies, guard=guard
            )
        self.arena: Any = made[self.placements[0].layout]
        if len(made) > 1:
            self.arena = Arenas([(made[placed.layout], placed.row) for placed in self.placements])

    def write(self, *values: Any) -> bytes:
        """Have each env write an observation; return where they are."""
        pairs = zip(self.writers, values, strict=True)
        return bytes(write.write(value) for write, value in pairs)

    def text_bytes(self, env_id: int, buffer: int) -> Any:
        """Return the bytes of the first text in an observation."""
        placed: Placement = self.placements[env_id]
        arrays = zip(placed.layout.leaves, arena_arrays(self.memory, placed), strict=True)
        return next(a[buffer, placed.row] for leaf, a in arrays if isinstance(leaf, TextLeaf))


# -- which spaces have texts, and how much room these have ----------------------------------------

ROOM = {
    "as its longest text takes": (Text(5), 20),
    "the shortest": (Text(0, min_length=0), 0),
    "as much as there is": (Text(10_000), MOST_TEXT_BYTES),
    "of no largest length": (Missions(), MOST_TEXT_BYTES),
    "a bare space of texts": (spaces.Space(dtype=str), MOST_TEXT_BYTES),
    "of one shape": (spaces.Space(shape=(), dtype=str), MOST_TEXT_BYTES),
}


@for_each("space, room", ROOM.values())
def test_a_text_has_room(space: Any, room: int) -> None:
    structure = codec_of(space).structure
    assert codec_of(space).layout is None, "as ever: it has no fixed layout"
    placed = structure.placed
    assert placed is not None
    (leaf,) = placed.leaves
    assert isinstance(leaf, TextLeaf)
    assert (leaf.max_bytes, leaf.shape) == (room, (4 + room,))
    nested = codec_of(Dict({"a": space, "b": IMAGE})).structure
    assert nested.is_placed
    assert nested.placed is not None
    assert [isinstance(leaf, TextLeaf) for leaf in nested.placed.leaves] == [True, False]


@for_each(
    "space",
    [
        spaces.Space(),
        spaces.Space(dtype=object),
        spaces.Space(dtype=bytes),
        spaces.Space(shape=(2,), dtype=str),
        spaces.Sequence(Text(3)),
        spaces.OneOf((Text(3), Discrete(2))),
        Dict({}),
        Dict({"a": Text(3), "b": Graph(Box(-1, 1, (2,)), None)}),
        Dict({"a": Text(3), "b": spaces.Space(), "c": IMAGE}),
    ],
)
def test_what_is_no_text_or_has_other_parts_besides_has_none(space: Any) -> None:
    structure = codec_of(space).structure
    assert not structure.is_placed
    assert structure.placed == structure.fixed


def test_texts_of_fixed_length_are_arrays() -> None:
    structure = codec_of(spaces.Space(shape=(), dtype=np.dtype("U8"))).structure
    assert structure.is_fixed
    assert structure.placed is structure


def test_a_text_is_not_taken_for_an_array_of_as_many_bytes() -> None:
    text = codec_of(Text(5)).structure.placed
    array = codec_of(Box(0, 255, (24,), np.uint8)).structure.placed
    assert text is not None
    assert array is not None
    assert text.leaves[0].shape == array.leaves[0].shape
    assert text != array
    assert len({text: 1, array: 2}) == 2
    # And yet the structures of texts are equal, however long they are: they are batched as objects.
    assert codec_of(Text(5)).structure == codec_of(Text(6)).structure


# -- what is written is what is read --------------------------------------------------------------


def texts() -> st.SearchStrategy[str]:
    """Return texts of any characters, halves of surrogate pairs too, some of them too long."""
    characters = st.characters(exclude_categories=())
    edges = st.sampled_from(["", "\0", "a\0", "\ud800", "\udfff\ud800", "\U0010ffff", "ü", "€"])
    pieces = st.one_of(st.text(characters, max_size=9), edges)
    return st.one_of(pieces, st.builds(str.__mul__, pieces, st.integers(1, 600)))


@given(texts(), texts(), st.booleans())
@example(LONG, LONG + "a", True)
@example("€" * 340, "a" + "€" * 340, False)
@example("\U0010ffff" * 255, "\U0010ffff" * 256, False)
@example("\ud800" * 340, "\ud800" * 341, False)
def test_every_text_is_read_as_it_was_written(one: str, other: str, of_reset: bool) -> None:
    rig, plain = Rig(GRID), writer(GRID)
    write, read = rig.writers[0], rig.readers[0]
    for text in (one, other, one):
        observation = grid(text)
        reference = write.write(observation, of_reset=of_reset)
        fits = len(text.encode("utf-8", "surrogatepass")) <= MOST_TEXT_BYTES
        assert (type(reference) is int) == fits
        assert same(read.read(reference), observation)
        carried = write.with_bytes(reference)
        assert type(carried) is tuple
        for other_reader in (read, ObservationReader(GRID)):
            assert same(other_reader.read(carried), observation)
        assert same(ObservationReader(GRID).read(plain.write(observation)), observation)
        if type(reference) is int:
            assert rig.arena.read_texts([0], reference) is None
            (found,) = rig.arena.rows([0], slice(0, 1), reference)
            assert same(found, observation)


@for_each("odd", [5, 1.5, b"ab", ("a",), Word("a"), np.str_("a"), True])
def test_what_is_not_exactly_a_text_goes_as_it_is(odd: Any) -> None:
    rig = Rig(GRID)
    alone = Rig(Missions())
    for copies in (False, True):
        rig.writers[0]._rules = ObservationRules(copy_free_form=copies)
        reference = rig.writers[0].write(grid(odd))
        assert type(reference) is tuple
        assert same(rig.readers[0].read(reference), grid(odd))
    found = alone.readers[0].read(alone.writers[0].write(odd))
    assert type(found) is type(odd)
    assert found == odd


def test_an_array_of_as_many_bytes_as_a_text_has_is_no_text() -> None:
    rig = Rig(Missions())
    (leaf,) = rig.placements[0].layout.leaves
    array = np.ones(leaf.shape, leaf.dtype)
    reference = rig.writers[0].write(array)
    assert rig.writers[0].single_array is None
    assert rig.readers[0].read(reference) is array


def test_a_text_that_does_not_fit_its_space_is_refused_and_none_is_written() -> None:
    space = Dict({"a": Text(3, charset="ab"), "b": IMAGE})
    rig = Rig(space)
    image = np.ones((2, 2), np.uint8)
    buffer = rig.write({"a": "ab", "b": image})[0]
    before = bytes(rig.memory)
    for odd in ("abab", "c", "", 5, None):
        with pytest.raises(ValueMismatchError, match=r"value\['a'\]"):
            rig.writers[0].write({"a": odd, "b": image})
    assert bytes(rig.memory) == before
    assert rig.readers[0].read(buffer)["a"] == "ab"
    with pytest.raises(ValueMismatchError, match="value is None"):
        writer(Missions()).write(None)


def test_a_long_text_takes_no_buffer_and_leaves_what_is_there() -> None:
    rig = Rig(GRID, copies=False)
    first = rig.write(grid("one", 1))
    before = bytes(rig.memory)
    reference = rig.writers[0].write(grid(LONG + "a", 2))
    assert type(reference) is tuple
    assert bytes(rig.memory) == before
    assert same(rig.readers[0].read(reference), grid(LONG + "a", 2))
    assert same(rig.readers[0].read(first[0]), grid("one", 1))
    assert rig.write(grid("two", 3))[0] == first[0] + 1


def test_after_detaching_texts_are_sent() -> None:
    rig = Rig(GRID)
    rig.writers[0].detach()
    reference = rig.writers[0].write(grid("go"))
    assert reference[1] == ["go"]
    assert rig.writers[0].with_bytes(reference) == reference
    assert same(rig.readers[0].read(reference), grid("go"))
    rig.readers[0].detach()
    assert same(rig.readers[0].read(reference), grid("go"))
    with pytest.raises(ValueMismatchError, match="not a list of leaves"):
        rig.readers[0].read(0)


# -- batches --------------------------------------------------------------------------------------

BATCHED: dict[str, tuple[Any, Any]] = {
    "beside arrays": (GRID, lambda k: grid(f"do {k}", k % 4)),
    "alone": (Missions(), lambda k: f"do {k}"),
    "in a dict": (Dict({"a": Text(9), "b": Missions()}), lambda k: {"a": f"a{k}", "b": f"b{k}"}),
    "in a tuple": (Tuple((Text(9), Missions())), lambda k: (f"a{k}", f"b{k}")),
    "further down": (
        Tuple((Dict({"a": Text(9), "x": IMAGE}), Discrete(9))),
        lambda k: ({"a": f"a{k}", "x": np.full((2, 2), k, np.uint8)}, np.int64(k)),
    ),
}


@pytest.mark.parametrize("form", BATCHED)
@pytest.mark.parametrize("shown", ["copied", "viewed", "checked"])
def test_batches_are_those_of_the_same_observations_by_message(form: str, shown: str) -> None:
    space, make = BATCHED[form]
    guard = ViewGuard(5) if shown == "checked" else None
    rig = Rig(*[space] * 5, copies=shown == "copied", guard=guard)
    numbers = itertools.count()
    alike = rig.write(*[make(next(numbers)) for _ in range(5)])
    rig.writers[1].write(make(99))  # from now on it is in another buffer than the others
    for buffers in (alike, rig.write(*[make(next(numbers)) for _ in range(5)])):
        assert rig.arena.has_texts
        for ids in ([0, 1, 2, 3, 4], [2, 3], [0, 3, 4], [1]):
            selection = Selection(ids)
            where: Any = bytes(buffers[i] for i in ids)
            where = where[0] if len(set(where)) == 1 else where
            assert rig.arena.read_texts(ids, where) is None
            each = [rig.readers[i].read(buffers[i]) for i in ids]
            rows = rig.arena.rows_of(selection, where)
            assert [type(row) for row in rows] == [type(one) for one in each]
            expected = codec_of(space).stack(each)
            found = rig.arena.batch(selection, where)
            assert same_batch(found, expected)
            assert same_batch(codec_of(space).stack(rows), expected)


def same_batch(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_batch(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_batch, one, other))
    a, b = np.asarray(one), np.asarray(other)
    types = [type(x) for x in a.flat] == [type(x) for x in b.flat]
    return a.dtype == b.dtype and a.shape == b.shape and types and a.tolist() == b.tolist()


def test_a_batch_of_texts_is_nobody_elses() -> None:
    guard = ViewGuard(2)
    rig = Rig(GRID, GRID, copies=False, guard=guard)
    selection, kept = Selection([0, 1]), []
    for k in range(4):
        (buffer, _) = buffers = rig.write(grid(f"do {k}"), grid(f"go {k}"))
        assert rig.arena.read_texts([0, 1], buffer) is None
        kept += [rig.arena.batch(selection, buffer)["mission"], rig.arena.batch(selection, buffers)]
        guard.count([0, 1], k)
    assert [batch.tolist() for batch in kept[::2]] == [[f"do {k}", f"go {k}"] for k in range(4)]
    assert [type(batch) for batch in kept[::2]] == [np.ndarray] * 4  # and no views that are checked
    assert kept[1]["mission"].tolist() == ["do 0", "go 0"]


def test_envs_of_several_layouts_have_their_own_texts() -> None:
    rig = Rig(Text(5), GRID, Text(6), Box(0, 1, (1,)), GRID)
    box = np.zeros(1, np.float32)
    values = ["a", grid("b"), "c", box, grid("d")]
    buffers = rig.write(*values)
    ids = [0, 1, 2, 3, 4]
    assert rig.arena.has_texts
    assert rig.arena.read_texts(ids, buffers[0]) is None
    rows = rig.arena.rows(ids, np.array(ids), buffers[0])
    assert all(map(same, rows, values))
    assert rig.arena.batch(Selection(ids), buffers[0]) is None
    assert rig.arena.batch(Selection([1, 4]), buffers[0])["mission"].tolist() == ["b", "d"]
    rig.text_bytes(4, buffers[4])[:4] = 255
    assert rig.arena.read_texts(ids, buffers) == 4
    assert rig.arena.read_texts([0, 1, 2, 3], buffers) is None
    plain = Rig(IMAGE, Box(0, 1, (1,)))
    assert not plain.arena.has_texts


# -- what is in shared memory is not trusted ------------------------------------------------------


def framed(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(data) if length is None else length) + data


FORGED = {
    "longer than its room": framed(b"", MOST_TEXT_BYTES + 1),
    "as long as can be": framed(b"", 2**32 - 1),
    "negative, to who reads it so": framed(b"", 2**31),
    "no UTF-8": framed(b"a\xff"),
    "a character cut off": framed("ü".encode()[:1]),
    "cut off in the midst of one": framed("aü".encode(), 2),
    "a zero of two bytes": framed(b"\xc0\x80"),
    "a character that there is not": framed(b"\xf4\x90\x80\x80"),
    "a byte that goes on with nothing": framed(b"\x80"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_text_that_makes_no_sense_is_found_and_shown_nowhere(name: str) -> None:
    rig = Rig(GRID, GRID)
    buffers = rig.write(grid("good"), grid("good too"))
    assert rig.arena.read_texts([0, 1], buffers) is None
    forged = np.frombuffer(FORGED[name], np.uint8)
    rig.text_bytes(1, buffers[1])[: len(forged)] = forged
    with pytest.raises(ValueMismatchError, match=r"value\['mission'\] is (a|no) text"):
        rig.readers[1].read(buffers[1])
    assert rig.arena.read_texts([0, 1], buffers) == 1
    assert rig.arena.read_texts([1], buffers[1]) == 1
    assert rig.arena.read_texts([0], buffers[0]) is None
    rows = rig.arena.rows([0, 1], slice(0, 2), buffers)
    assert [row["mission"] for row in rows] == ["good", "good too"]


@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_any_bytes_are_a_text_or_are_refused(data: bytes, length: int) -> None:
    rig = Rig(Text(5))
    text_bytes = rig.text_bytes(0, 0)
    text_bytes[:] = np.frombuffer(framed(data, length).ljust(24, b"a")[:24], np.uint8)
    inside = bytes(text_bytes[4 : 4 + length]) if length <= 20 else None
    try:
        expected = None if inside is None else inside.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        expected = None
    assert rig.arena.read_texts([0], 0) == (0 if expected is None else None)
    if expected is None:
        with pytest.raises(ValueMismatchError):
            rig.readers[0].read(0)
    else:
        assert rig.readers[0].read(0) == expected
        assert rig.arena.rows([0], slice(0, 1), 0) == [expected]


@for_each(
    "reference",
    [4, -1, True, None, "go", ["go"], [], (0, ["go"]), ([], ["go"]), ([bytearray(4)] * 2, ["go"])]
    + [([bytearray(4), bytearray(8)], part) for part in ([], ["a", "b"], ("a",), None, "a")],
)
def test_references_that_a_writer_does_not_make_are_refused(reference: Any) -> None:
    rig = Rig(GRID)
    with pytest.raises(ValueMismatchError):
        rig.readers[0].read(reference)


def test_what_changes_after_it_was_read_is_not_read_again() -> None:
    rig = Rig(GRID)
    (buffer,) = rig.write(grid("as it was"))
    assert rig.arena.read_texts([0], buffer) is None
    rig.text_bytes(0, buffer)[:] = 255
    assert rig.arena.rows([0], slice(0, 1), buffer)[0]["mission"] == "as it was"
    assert rig.arena.batch(Selection([0]), buffer)["mission"].tolist() == ["as it was"]


# -- the same texts, again and again --------------------------------------------------------------


def test_equal_texts_are_one_object_and_not_all_are_kept() -> None:
    (leaf,) = Rig(Text(5)).placements[0].layout.leaves
    assert isinstance(leaf, TextLeaf)
    reader = TextReader(leaf)

    def read(texts: Sequence[str]) -> list[str]:
        packed = [leaf.packed(text) for text in texts]
        assert None not in packed
        return [reader.read(memoryview(data)) for data in packed if data is not None]

    one, other = read(["again", "again"])
    assert one is other
    many = [a + b for a in string.ascii_letters for b in string.ascii_letters]
    assert read(many) == many
    assert len(reader._known) <= 1024
    assert read(["again"]) == ["again"]
