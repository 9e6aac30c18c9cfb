"""Actions as columns: what they take, they take as the check of single actions would."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from envmgr.spaces import codec_of
from envmgr.spaces.columns import (
    NUMBERS_IN_ARRAYS,
    NUMBERS_IN_POINTS,
    NUMPY_VALUES,
    PYTHON_NUMBERS,
    in_form,
    without_tensors,
)

SPACES: dict[str, Any] = {
    "discrete": Discrete(5),
    "discrete from -2": Discrete(4, start=-2),
    "box": Box(-1.0, 1.0, (2,), np.float32),
    "box of rows": Box(-np.inf, np.inf, (2, 3), np.float64),
    "point": Box(0.0, 1.0, (), np.float32),
    "bytes": Box(0, 255, (3,), np.uint8),
    "shorts": Box(-7, 7, (2,), np.int16),
    "half": Box(-1.0, 1.0, (2,), np.float16),
    "empty": Box(-1.0, 1.0, (0,), np.float32),
    "multidiscrete": MultiDiscrete([3, 4]),
    "multidiscrete from 5": MultiDiscrete([[2, 3]], start=[[5, -1]]),
    "multidiscrete of bytes": MultiDiscrete([255, 3], dtype=np.uint8, start=[1, 2]),
    "multibinary": MultiBinary([2, 2]),
    "dict": Dict(
        {
            "turn": Discrete(3, start=1),
            "push": Box(-1.0, 1.0, (2,), np.float32),
            "more": Tuple((MultiBinary(3), Dict({"x": MultiDiscrete([2, 2])}))),
        }
    ),
    "tuple": Tuple((Discrete(3), Box(0.0, 1.0, (), np.float64))),
    "lone in a tuple": Tuple((Discrete(3),)),
    "lone in a dict": Dict({"a": Box(0.0, 1.0, (1,), np.float32)}),
}
CHECKS = ("strict", True, False)
DTYPES = [
    np.dtype(name)
    for name in ("f2", "f4", "f8", ">f4", "i1", "i2", "i8", ">i8", "u1", "u8", "?", "c8")
]
NUMBERS: list[Any] = [
    *(-3, -2, -1, 0, 1, 2, 3, 5, 6, 300, 1 << 40, (1 << 63) - 1, 1 << 63, -(1 << 64)),
    *(0.5, 1.0, 1.0 + 1e-9, float("nan"), float("inf"), 1e30),
    *(True, None, "a", 1j, np.int64(1), np.int32(1), np.int64(-9), np.uint64(1), np.float32(0.5)),
    *(np.float64(1.0 + 1e-9), np.bool_(True), np.array(1), np.array([1]), [1]),
]


def columns_of(space: Any, check: Any) -> Any:
    """Return what packs actions of a space."""
    columns = codec_of(space, strict=check == "strict").action_columns(checked=bool(check))
    assert columns is not None
    return columns


def converting(space: Any, check: Any) -> Any:
    """Return what packs actions of a space for envs that take them in any form."""
    codec = codec_of(space, strict=check == "strict")
    columns = codec.action_columns(checked=bool(check), in_any_form=True)
    assert columns is not None
    return columns


def is_same(one: Any, other: Any) -> bool:
    """Whether two numbers are in the same form."""
    if type(one) is not type(other) or one != other:
        return False
    return isinstance(one, int) or (one.dtype, one.shape) == (other.dtype, other.shape)


def rows_of(space: Any, columns: Any, k: int) -> Any:
    """Return the k-th action that is in columns."""
    layout = codec_of(space).layout
    assert layout is not None
    return layout.unflatten([column[k, ...] for column in columns])


def means(space: Any, packed: Any, action: Any) -> bool:
    """Whether a packed action has the leaves of an action, cast to the space's dtypes."""
    layout = codec_of(space).layout
    assert layout is not None

    def leaves(value: Any, skeleton: Any) -> Any:
        if isinstance(skeleton, dict):
            return [x for key, part in skeleton.items() for x in leaves(value[key], part)]
        if isinstance(skeleton, tuple):
            return [x for i, part in enumerate(skeleton) for x in leaves(value[i], part)]
        return [value]

    pairs = zip(leaves(packed, layout.skeleton), leaves(action, layout.skeleton), strict=True)
    for leaf, (one, other) in zip(layout.leaves, pairs, strict=True):
        cast = np.asarray(other).astype(leaf.dtype)
        if np.asarray(one).dtype != leaf.dtype or np.asarray(one).shape != cast.shape:
            return False
        if not np.array_equal(one, cast, equal_nan=leaf.dtype.kind == "f"):
            return False
        if leaf.dtype.kind in "iu" and not np.array_equal(cast, other):
            return False
    return True


def oddly(draw: Any, sample: Any) -> Any:
    """Return something that is like a sample of a space, or not."""
    how = draw(st.sampled_from(["as it is"] * 6 + ["odd", "part", "part"]))
    if how == "as it is":
        return sample
    if isinstance(sample, dict):
        parts = {key: oddly(draw, part) if how == "part" else part for key, part in sample.items()}
        first = next(iter(parts))
        return draw(
            st.sampled_from(
                [
                    parts,
                    OrderedDict(parts),
                    dict(reversed(parts.items())),
                    {**parts, "another": 1},
                    {key: part for key, part in parts.items() if key != first},
                    tuple(parts.values()),
                    None,
                ]
            )
        )
    if isinstance(sample, tuple):
        items = tuple(oddly(draw, part) if how == "part" else part for part in sample)
        return draw(st.sampled_from([items, list(items), items[:-1], (*items, 1), None]))
    array = np.asarray(sample)
    return draw(
        st.one_of(
            st.sampled_from(NUMBERS),
            st.sampled_from(DTYPES).map(lambda dtype: np.asarray(sample).real.astype(dtype)),
            st.sampled_from(
                [
                    array.tolist(),
                    array[..., None],
                    np.concatenate([array.ravel(), array.ravel()]),
                    array.ravel(),
                    array.astype(np.float64) + 1e-9,
                    array.astype(np.float64) * 1000,
                    np.full_like(array, 100),
                    array.astype(object),
                    np.ma.masked_array(array),
                    array[()],
                ]
            ),
        )
    )


def sampled(draw: Any, space: Any) -> Any:
    """Return an action of a space."""
    space.seed(draw(st.integers(0, 1 << 16)))
    sample = space.sample()
    if isinstance(space, Discrete) and draw(st.booleans()):
        return int(sample)
    return sample


some_space = st.sampled_from(list(SPACES))
some_check = st.sampled_from(CHECKS)


class TestOfValues:
    @settings(max_examples=200)
    @given(some_space, some_check, st.data())
    def test_what_is_taken_is_what_the_check_accepts(
        self, name: str, check: Any, data: st.DataObject
    ) -> None:
        space = SPACES[name]
        n = data.draw(st.integers(1, 3))
        with np.errstate(all="ignore"):
            actions = [oddly(data.draw, sampled(data.draw, space)) for _ in range(n)]
        packed = columns_of(space, check).of_values(actions)
        if packed is None:
            return
        columns, form = packed
        accepts = codec_of(space, strict=check == "strict").refusal
        for k, action in enumerate(actions):
            if check:
                assert accepts(action) is None
            if isinstance(space, Discrete):
                (column,) = columns
                of_env = in_form(
                    int(column[k]), form if type(form) is int else form[k], column.dtype
                )
                assert is_same(of_env, without_tensors(action))
            else:
                assert means(space, rows_of(space, columns, k), action)
                assert form == NUMPY_VALUES

    @settings(max_examples=200)
    @given(some_space, some_check, st.data())
    def test_envs_that_convert_are_given_what_they_would_make_of_it(
        self, name: str, check: Any, data: st.DataObject
    ) -> None:
        space, codec = SPACES[name], codec_of(SPACES[name], strict=check == "strict")
        n = data.draw(st.integers(1, 3))
        with np.errstate(all="ignore"):
            actions = [oddly(data.draw, sampled(data.draw, space)) for _ in range(n)]
            packed = converting(space, check).of_values(actions)
        if packed is None:
            return
        columns, form = packed
        for k, action in enumerate(actions):
            if check:
                assert codec.refusal(action) is None
            wanted = codec.for_env(without_tensors(action))
            assert means(space, rows_of(space, columns, k), wanted)
        if isinstance(space, Discrete):
            assert form in (PYTHON_NUMBERS, NUMPY_VALUES, NUMBERS_IN_ARRAYS, NUMBERS_IN_POINTS)

    @pytest.mark.parametrize("check", [False, True, "strict"])
    @pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
    def test_a_number_that_does_not_fit_its_dtype_is_left_to_others(
        self, check: Any, number: int
    ) -> None:
        assert converting(SPACES["lone in a tuple"], check).of_values([(number,)]) is None

    @given(some_space, some_check, st.data())
    def test_samples_of_the_space_are_taken(
        self, name: str, check: Any, data: st.DataObject
    ) -> None:
        space = SPACES[name]
        space.seed(data.draw(st.integers(0, 1 << 16)))
        actions = [space.sample() for _ in range(data.draw(st.integers(1, 5)))]
        packed = columns_of(space, check).of_values(actions)
        assert packed is not None
        assert packed[1] == NUMPY_VALUES
        assert [means(space, rows_of(space, packed[0], k), a) for k, a in enumerate(actions)]

    def test_numbers_of_python_and_of_numpy(self) -> None:
        columns = columns_of(Discrete(5), True)
        for form, of in (
            (PYTHON_NUMBERS, int),
            (NUMPY_VALUES, np.int64),
            (NUMBERS_IN_ARRAYS, lambda number: np.array([number])),
            (NUMBERS_IN_POINTS, np.array),
        ):
            (column,), said = columns.of_values([of(1), of(4)])
            assert (column.tolist(), column.dtype, said) == ([1, 4], np.int64, form)
        (column,), forms = columns.of_values([1, np.int64(4), np.array(2)])
        assert column.tolist() == [1, 4, 2]  # each gets what its user gave
        assert forms.tolist() == [PYTHON_NUMBERS, NUMPY_VALUES, NUMBERS_IN_POINTS]

    def test_integers_of_other_types_come_out_as_they_are(self) -> None:
        columns = columns_of(Discrete(5), True)
        for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"):
            dtype = np.dtype(name)
            for action in (dtype.type(3), np.array(3, dtype), np.array([3], dtype)):
                (column,), form = columns.of_values([action] * 2)
                assert column.tolist() == [3, 3]
                assert is_same(in_form(3, form, column.dtype), action)

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize(
        "action",
        [True, np.True_, 1.0, np.array(1.0), np.array([1.0]), np.array([[1]]), "1", None, [1]],
    )
    def test_other_numbers_are_left_to_the_check(self, action: Any, check: Any) -> None:
        columns = columns_of(Discrete(5), check)
        assert columns.of_values([action]) is None
        assert columns.of_values([1, action]) is None

    @pytest.mark.parametrize("number", [-1, 5, 1 << 63, -(1 << 70)])
    def test_numbers_out_of_bounds(self, number: int) -> None:
        assert columns_of(Discrete(5), True).of_values([0, number, 1]) is None

    def test_unchecked_numbers_have_to_fit_their_column(self) -> None:
        columns = columns_of(Discrete(5), False)
        assert columns.of_values([(1 << 63) - 1, -(1 << 63)])[0][0].tolist() == [
            (1 << 63) - 1,
            -(1 << 63),
        ]
        assert columns.of_values([1 << 63]) is None
        assert columns.of_values([-(1 << 63) - 1]) is None

    def test_bounds_of_boxes_count_only_if_strict(self) -> None:
        action = np.array([0.0, 1.5], np.float32)
        for check, taken in (("strict", False), (True, True), (False, True)):
            assert (columns_of(SPACES["box"], check).of_values([action]) is not None) is taken
            for value in (np.nan, np.inf):
                odd = np.array([0.0, value], np.float32)
                assert (columns_of(SPACES["box"], check).of_values([odd]) is not None) is taken

    def test_the_columns_are_private(self) -> None:
        action = np.zeros(2, np.float32)
        columns, _ = columns_of(SPACES["box"], True).of_values([action])
        action[:] = 1
        assert columns[0].tolist() == [[0.0, 0.0]]


class TestOfBatch:
    @settings(max_examples=200)
    @given(some_space, some_check, st.data())
    def test_what_is_taken_is_what_the_check_accepts_of_each_row(
        self, name: str, check: Any, data: st.DataObject
    ) -> None:
        space = SPACES[name]
        count = data.draw(st.integers(1, 3))
        samples = [space.sample() for _ in range(count)]
        layout = codec_of(space).layout
        assert layout is not None
        leaves = [layout.flatten(sample) for sample in samples]
        stacked = layout.unflatten(
            [np.stack([row[j] for row in leaves]) for j in range(len(layout.leaves))]
        )
        with np.errstate(all="ignore"):
            batch = oddly(data.draw, stacked)
        columns = columns_of(space, check).of_batch(batch, count)
        if columns is None:
            return
        assert len(columns) == len(layout.leaves)
        accepts = codec_of(space, strict=check == "strict").refusal
        for k in range(count):
            row = row_of(batch, layout.skeleton, k)
            if check:
                assert accepts(row) is None
            assert means(space, rows_of(space, columns, k), row)

    @given(some_space, some_check, st.integers(1, 5))
    def test_stacked_samples_are_taken(self, name: str, check: Any, count: int) -> None:
        space = SPACES[name]
        layout = codec_of(space).layout
        assert layout is not None
        rows = [layout.flatten(space.sample()) for _ in range(count)]
        columns = [np.stack([row[j] for row in rows]) for j in range(len(layout.leaves))]
        taken = columns_of(space, check).of_batch(layout.unflatten(columns), count)
        assert taken is not None
        for one, other in zip(taken, columns, strict=True):
            assert np.array_equal(one, other)
            assert one.dtype == other.dtype

    @pytest.mark.parametrize("count", [0, 1, 3, 4])
    def test_the_number_of_rows_has_to_be_right(self, count: int) -> None:
        assert columns_of(Discrete(5), True).of_batch(np.array([1, 2]), count) is None
        batch = {"a": np.zeros((2, 1), np.float32)}
        assert columns_of(SPACES["lone in a dict"], True).of_batch(batch, count) is None

    def test_a_batch_of_many_rows_is_checked_to_the_last(self) -> None:
        columns = columns_of(Discrete(5), True)
        for count in (1, 255, 256, 257, 5000):
            batch = np.full(count, 4)
            assert columns.of_batch(batch, count) is not None
            for odd in (-1, 5):
                batch[-1] = odd
                assert columns.of_batch(batch, count) is None

    @pytest.mark.parametrize(
        ("dtype", "taken"), [("i4", True), (">i8", True), ("u1", True), ("f8", False), ("?", False)]
    )
    def test_integers_of_other_sizes_are_cast(self, dtype: str, taken: bool) -> None:
        columns = columns_of(Discrete(5), True).of_batch(np.array([1, 4], dtype), 2)
        assert (columns is not None) is taken
        if columns is not None:
            assert columns[0].dtype == np.int64
            assert columns[0].tolist() == [1, 4]

    def test_integers_that_would_wrap_are_not_cast(self) -> None:
        columns = columns_of(SPACES["bytes"], False)
        assert columns.of_batch(np.array([[0, 1, 256]]), 1) is None
        assert columns.of_batch(np.array([[0, 1, -1]]), 1) is None
        huge = np.array([(1 << 64) - 1], np.uint64)
        assert columns_of(Discrete(5), False).of_batch(huge, 1) is None

    def test_bounds_are_those_of_what_was_given_not_of_its_cast(self) -> None:
        batch = np.array([[0.0, 1.0 + 1e-9]])
        assert codec_of(SPACES["box"], strict=True).refusal(batch[0]) is not None
        assert columns_of(SPACES["box"], "strict").of_batch(batch, 1) is None
        assert columns_of(SPACES["box"], True).of_batch(batch, 1) is not None

    @pytest.mark.parametrize("dtype", [object, "c16", "M8[s]", "U3", [("a", "i8")]])
    def test_dtypes_of_other_kinds_are_left_to_others(self, dtype: Any) -> None:
        for name in ("discrete", "lone in a tuple", "multidiscrete", "box"):
            batch: Any = np.zeros((2, 2) if name in ("multidiscrete", "box") else 2, dtype)
            batch = (batch,) if name == "lone in a tuple" else batch
            assert columns_of(SPACES[name], "strict").of_batch(batch, 2) is None

    @pytest.mark.parametrize("batch", [[1, 2], (1, 2), None, "ab", {"a": 1}, np.ma.ones(2, int)])
    def test_what_is_no_array_is_left_to_others(self, batch: Any) -> None:
        assert columns_of(Discrete(5), True).of_batch(batch, 2) is None


def row_of(batch: Any, skeleton: Any, k: int) -> Any:
    """Return the k-th row of a batch."""
    if isinstance(skeleton, dict):
        return {key: row_of(batch[key], part, k) for key, part in skeleton.items()}
    if isinstance(skeleton, tuple):
        return tuple(row_of(batch[i], part, k) for i, part in enumerate(skeleton))
    return batch[k]


def test_spaces_without_fixed_layout_have_no_columns() -> None:
    assert codec_of(Text(3)).action_columns(checked=True) is None
    assert codec_of(Dict({"a": Discrete(2), "b": Text(3)})).action_columns(checked=True) is None


@given(some_space, st.data())
def test_actions_that_are_refused_are_not_taken(name: str, data: st.DataObject) -> None:
    space = SPACES[name]
    with np.errstate(all="ignore"):
        action = oddly(data.draw, space.sample())
    if codec_of(space, strict=False).refusal(action) is None:
        return
    columns = columns_of(space, True)
    assert columns.of_values([action]) is None
    assert columns.of_values([space.sample(), action]) is None
