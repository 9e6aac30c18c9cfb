"""Layouts of spaces, checks of values and actions, batches."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
)

from envmgr.spaces import (
    Leaf,
    ValueMismatchError,
    codec_of,
    finite_test,
    has_samples,
    indexed,
    leafwise,
    merged_axes,
    path_text,
    same_space,
    split_batch,
    stacked,
)
from tests.cases import for_each

FLOATS = Box(-1, 1, (2,), np.float32)
NESTED = Dict(
    {
        "image": Box(0, 255, (2, 3), np.uint8),
        "parts": Tuple((Discrete(5), Dict({"speed": Box(-1, 1, (), np.float64)}))),
    }
)


def nested_value() -> dict[str, Any]:
    return {
        "image": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "parts": (np.int64(3), {"speed": np.array(0.5)}),
    }


class OddSpace(spaces.Space[Any]):
    """A custom space: even ints; asking it about text raises."""

    def contains(self, x: Any) -> bool:
        return bool(x % 2 == 0)

    def __repr__(self) -> str:
        return "OddSpace()"


class OddText(Text):
    """A custom space that derives from a known one: texts of even length."""

    def contains(self, x: Any) -> bool:
        return len(x) % 2 == 0

    def __repr__(self) -> str:
        return "OddText()"


class OwnBox(Box):
    """A custom space that derives from a known one."""


# -- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (FLOATS, (2,), "f4"),
        (Box(0, 1, (), np.float64), (), "f8"),
        (Box(0, 1, (0,), np.float32), (0,), "f4"),
        (Box(0, 1, (3, 0, 2), np.float32), (3, 0, 2), "f4"),
        (Box(0, 1, (2,), ">f4"), (2,), ">f4"),
        (Box(0, 9, (2,), ">i2"), (2,), ">i2"),
        (Box(0, 1, (2,), np.bool_), (2,), "?"),
        (OwnBox(0, 1, (4,)), (4,), "f4"),
        (Discrete(3), (), "i8"),
        (Discrete(3, start=-1), (), "i8"),
        (MultiDiscrete([2, 3]), (2,), "i8"),
        (MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16), (2, 2), "i2"),
        (MultiBinary(4), (4,), "i1"),
        (MultiBinary((2, 2)), (2, 2), "i1"),
    ],
    ids=str,
)
def test_simple_spaces_have_one_leaf(space: Any, shape: tuple[int, ...], dtype: str) -> None:
    layout = codec_of(space).layout
    assert layout is not None
    assert layout.leaves == (Leaf((), shape, np.dtype(dtype)),)
    assert layout.leaves[0].nbytes == np.empty(shape, dtype).nbytes
    sample = space.sample()
    (found,) = layout.flatten(sample)
    np.testing.assert_array_equal(found, sample)
    assert layout.unflatten([found]) is found


@pytest.mark.parametrize(
    "space",
    [
        Text(5),
        Sequence(Discrete(2)),
        Graph(Discrete(2), None),
        OneOf((Discrete(2), FLOATS)),
        OddSpace(),
        Dict({}),
        Tuple(()),
        Dict({"a": Discrete(2), "b": Text(3)}),
        Tuple((Discrete(2), Dict({"deep": OddSpace()}))),
        Tuple((Discrete(2), Tuple(()))),
    ],
    ids=str,
)
def test_other_spaces_have_no_layout(space: Any) -> None:
    assert codec_of(space).layout is None


def test_nested_layouts_have_a_leaf_for_each_array_in_the_order_of_the_space() -> None:
    layout = codec_of(NESTED).layout
    assert layout is not None
    assert [leaf.path for leaf in layout.leaves] == [
        ("image",),
        ("parts", 0),
        ("parts", 1, "speed"),
    ]
    assert [path_text(leaf.path) for leaf in layout.leaves] == [
        "['image']",
        "['parts'][0]",
        "['parts'][1]['speed']",
    ]
    value = nested_value()
    leaves = layout.flatten(value)
    assert [leaf.dtype.str for leaf in leaves] == ["|u1", "<i8", "<f8"]
    again = layout.unflatten(leaves)
    assert list(again) == ["image", "parts"]
    assert type(again["parts"]) is tuple
    assert again["image"] is value["image"]
    assert again["parts"][1]["speed"] == 0.5


def test_equal_spaces_have_equal_layouts_and_others_do_not() -> None:
    assert codec_of(NESTED).layout == codec_of(NESTED).layout
    assert hash(codec_of(NESTED).layout) == hash(codec_of(NESTED).layout)
    assert codec_of(FLOATS).layout != codec_of(Box(-1, 1, (2,), np.float64)).layout
    assert codec_of(FLOATS).layout != codec_of(Box(-1, 1, (2,), ">f4")).layout
    assert codec_of(Dict({"a": FLOATS})).layout != codec_of(Dict({"b": FLOATS})).layout
    assert codec_of(Dict({"0": FLOATS})).layout != codec_of(Tuple((FLOATS,))).layout


def test_keys_of_dicts_need_not_be_text() -> None:
    layout = codec_of(Dict({1: Discrete(2), 0: FLOATS})).layout
    assert layout is not None
    value = {0: np.zeros(2, np.float32), 1: 1}
    assert layout.unflatten(layout.flatten(value)).keys() == value.keys()


# -- values ---------------------------------------------------------------------------------------


def flatten(space: Any, value: Any, **options: Any) -> Any:
    layout = codec_of(space).layout
    assert layout is not None
    return layout.flatten(value, **options)


@pytest.mark.parametrize(
    "mapping", [dict, OrderedDict, MappingProxyType], ids=["dict", "OrderedDict", "proxy"]
)
def test_any_mapping_serves_as_dict_in_any_order(mapping: Any) -> None:
    space = Dict({"a": Discrete(2), "b": Discrete(2)})
    leaves = flatten(space, mapping({"b": 1, "a": 0}))
    assert [int(leaf) for leaf in leaves] == [0, 1]


def test_lists_serve_as_tuples() -> None:
    assert [int(x) for x in flatten(Tuple((Discrete(2), Discrete(9))), [1, 8])] == [1, 8]


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (NESTED, {"image": 0}, "value should be a dict of ['image', 'parts'], found a dict of "),
        (NESTED, [1, 2], "value should be a dict of ['image', 'parts'], found 2 items"),
        (NESTED, None, "value should be a dict of ['image', 'parts'], found NoneType"),
        (
            NESTED,
            {**nested_value(), "parts": (1,)},
            "value['parts'] should be 2 items, found 1 items",
        ),
        (
            NESTED,
            {**nested_value(), "parts": (1, 2)},
            "value['parts'][1] should be a dict of ['speed'], found int",
        ),
        (
            NESTED,
            {**nested_value(), "parts": np.zeros(2)},
            "value['parts'] should be 2 items, found ndarray",
        ),
        (
            NESTED,
            {**nested_value(), "parts": "ab"},
            "value['parts'] should be 2 items, found str",
        ),
        (
            NESTED,
            {**nested_value(), "image": np.zeros((3, 2), np.uint8)},
            "value['image'] has shape (3, 2), the space says (2, 3)",
        ),
        (
            NESTED,
            {**nested_value(), "image": np.zeros((2, 3))},
            "value['image'] has dtype float64, the space says uint8: the cast would lose",
        ),
        (NESTED, {**nested_value(), "parts": (1, {"speed": None})}, "['speed'] is None"),
        (FLOATS, None, "value is None"),
        (FLOATS, np.zeros(3, np.float32), "value has shape (3,), the space says (2,)"),
        (FLOATS, np.zeros((2, 1), np.float32), "value has shape (2, 1), the space says (2,)"),
        (FLOATS, 0.5, "value has shape (), the space says (2,)"),
        (FLOATS, [[1], [1, 2]], "value (list) is not an array: "),
        (FLOATS, ["a", "b"], "value has dtype <U1, the space says float32"),
        (FLOATS, np.array([None, 1], dtype=object), "value has dtype object, the space says"),
        (FLOATS, np.array([1j, 2]), "value has dtype complex128, the space says float32"),
        (Discrete(3), 1.0, "value has dtype float64, the space says int64"),
        (Discrete(3), [1], "value has shape (1,), the space says ()"),
    ],
)
def test_what_does_not_fit_is_refused_and_said_where(space: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueMismatchError) as caught:
        flatten(space, value)
    assert message in str(caught.value)


class OddArray:
    """Something whose conversion to an array raises."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("not today")


def test_a_value_that_cannot_become_an_array_is_refused() -> None:
    with pytest.raises(ValueMismatchError, match=r"OddArray.*is not an array: not today"):
        flatten(FLOATS, OddArray())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.float32, np.array([1, 2], np.float64)),
        (np.float32, np.array([1, 2], np.int64)),
        (np.float32, np.array([True, False])),
        (np.float32, [0.25, 0.5]),
        (np.float32, (1, 2)),
        (np.float64, np.array([1, 2], np.float32)),
        (">f4", np.array([1, 2], "<f4")),
        (np.int64, np.array([1, 2], np.uint8)),
        (np.int8, np.array([1, 127], np.int64)),
        (np.uint8, np.array([0, 255], np.int64)),
        (np.uint8, [0, 255]),
        (np.uint64, np.array([0, 1], np.int8)),
        (np.int64, np.array([0, 2**63 - 1], np.uint64)),
        (np.uint8, np.array([True, False])),
    ],
    ids=str,
)
def test_casts_that_keep_the_numbers_are_made(dtype: Any, value: Any) -> None:
    low, high = (0, 1) if np.dtype(dtype).kind == "f" else _range(dtype)
    (leaf,) = flatten(Box(low, high, (2,), dtype), value)
    cast = np.array(leaf, dtype=dtype)
    np.testing.assert_array_equal(cast, np.asarray(value))


def _range(dtype: Any) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


@pytest.mark.parametrize(
    ("dtype", "value", "why"),
    [
        (np.int8, np.array([0, 128], np.int64), "a number does not fit"),
        (np.int8, np.array([0, -129], np.int64), "a number does not fit"),
        (np.uint8, np.array([0, 256], np.int64), "a number does not fit"),
        (np.uint8, np.array([0, -1], np.int64), "a number does not fit"),
        (np.uint8, np.array([0, -1], np.int8), "a number does not fit"),
        (np.int64, np.array([0, 2**63], np.uint64), "a number does not fit"),
        (np.uint8, [0, 256], "a number does not fit"),
        (np.uint8, np.array([0.0, 1.0]), "the cast would lose information"),
        (np.bool_, np.array([0, 1]), "the cast would lose information"),
        (np.bool_, np.array([0.0, 1.0]), "the cast would lose information"),
    ],
    ids=str,
)
def test_casts_that_change_numbers_are_refused(dtype: Any, value: Any, why: str) -> None:
    with pytest.raises(ValueMismatchError, match=why):
        flatten(Box(0, 1, (2,), dtype), value)


def test_an_empty_array_of_another_integer_type_fits() -> None:
    (leaf,) = flatten(Box(0, 1, (0,), np.uint8), np.array([], np.int64))
    assert leaf.shape == (0,)


def test_casts_are_told_once_per_leaf_and_value_with_the_place() -> None:
    told: list[str] = []
    value = {**nested_value(), "image": np.zeros((2, 3), np.int32)}
    flatten(NESTED, value, on_cast=told.append)
    assert told == ["value['image'] has dtype int32, the space says uint8: it is cast"]


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_python_numbers_have_no_dtype_and_are_never_told_or_refused(value: Any) -> None:
    told: list[str] = []
    space = Box(0, 2, (), np.float32)
    (leaf,) = flatten(space, value, strict_dtype=True, on_cast=told.append)
    assert float(leaf) == value
    assert told == []


@pytest.mark.parametrize("value", [np.zeros(2), [0.0, 1.0], np.zeros(2, ">f4"), np.zeros(2, "i4")])
def test_strict_dtype_refuses_every_other_dtype(value: Any) -> None:
    with pytest.raises(ValueMismatchError, match="strict_dtype is on"):
        flatten(FLOATS, value, strict_dtype=True)
    flatten(FLOATS, np.zeros(2, np.float32), strict_dtype=True)


def test_values_out_of_the_bounds_of_a_box_are_no_mismatch() -> None:
    flatten(FLOATS, np.array([7, np.nan], np.float32))  # envs exceed their bounds all the time


def test_subclasses_of_arrays_and_views_are_taken() -> None:
    flatten(FLOATS, np.zeros((2, 4), np.float32)[:, 1])
    flatten(FLOATS, np.ma.masked_array(np.zeros(2, np.float32)))
    flatten(Discrete(3), np.int64(2))
    flatten(Discrete(3), np.array(2))


# -- values without layout ------------------------------------------------------------------------


def test_the_space_itself_checks_what_has_no_layout() -> None:
    codec_of(Text(5)).check_value("abc")
    codec_of(None).check_value(object())
    with pytest.raises(ValueMismatchError, match="value 'abcdef' is not in Text"):
        codec_of(Text(5)).check_value("abcdef")
    for space, value, why in (
        (Text(5), "abcdef", "its length is 6"),
        (Text(5, min_length=2), "a", "its length is 1"),
        (Text(5), "a b-c", r"its charset lacks ' -'.*: Text\(5, charset=string.printable\)"),
        (Text(5), "née", r"its charset lacks 'é'.*: Text\(5, charset=\.\.\.\)"),
    ):
        with pytest.raises(ValueMismatchError, match=f"is not in Text.*: {why}$"):
            codec_of(space).check_value(value)
    with pytest.raises(ValueMismatchError, match="value is None"):
        codec_of(None).check_value(None)


def test_an_error_in_the_check_of_a_custom_space_is_a_mismatch() -> None:
    for value in (3, 4, {}):  # spaces of classes that nobody knows are not asked
        codec_of(OddSpace()).check_value(value)
    codec_of(OddText(3)).check_value("ab")
    with pytest.raises(ValueMismatchError, match=r"'a' is not in OddText\(\)"):
        codec_of(OddText(3)).check_value("a")
    with pytest.raises(ValueMismatchError, match=r"value 1 cannot be checked by OddText.*Type"):
        codec_of(OddText(3)).check_value(1)
    with pytest.raises(ValueMismatchError, match=r"value\['a'\]\[0\] 'long' is not in Text"):
        codec_of(Dict({"a": Tuple((Text(3),))})).check_value({"a": ("long",)})
    with pytest.raises(ValueMismatchError, match="2 items"):
        codec_of(Tuple((Text(3), Text(3)))).check_value(("a",))


def test_long_values_are_shown_short() -> None:
    with pytest.raises(ValueMismatchError) as caught:
        codec_of(Text(5)).check_value("a" * 1000)
    assert len(str(caught.value)) < 200


# -- actions --------------------------------------------------------------------------------------

ONE_OF = OneOf((Discrete(3), Box(-1, 1, (2,), np.float32)))
TREE = Dict({"move": Discrete(3), "aim": Tuple((Box(-1, 1, (2,), np.float32), MultiBinary(2)))})


def tree_action(move: Any = 1, aim: Any = (0.0, 0.5), flags: Any = (0, 1)) -> dict[str, Any]:
    return {"move": move, "aim": (np.array(aim), np.array(flags))}


@pytest.mark.parametrize("strict", [False, True])
@for_each(
    "space, action",
    [
        (Discrete(3), 0),
        (Discrete(3), 2),
        (Discrete(3), np.int64(2)),
        (Discrete(3), np.uint8(2)),
        (Discrete(3), np.array(2)),
        (Discrete(3), np.array([2])),
        (Discrete(3), np.array([[2]])),
        (Discrete(3), [2]),
        (Discrete(3, start=-1), -1),
        (Discrete(3, start=-1), 1),
        (FLOATS, np.array([0.5, -0.5], np.float32)),
        (FLOATS, np.array([0.5, -0.5])),
        (FLOATS, [0, 1]),
        (FLOATS, (True, False)),
        (Box(0, 9, (2,), np.int32), [1, 2]),
        (Box(-1, 1, ()), 0.5),
        (Box(0, 1, (0,)), []),
        (MultiDiscrete([2, 3]), [1, 2]),
        (MultiDiscrete([2, 3], start=[5, 5]), np.array([6, 7])),
        (MultiBinary(2), [0, 1]),
        (MultiBinary(2), np.array([True, False])),
        (TREE, tree_action()),
        (TREE, {**tree_action(), "aim": [[0.0, 0.5], [1, 1]]}),
        (Text(5), "abc"),
        (ONE_OF, (0, np.int64(1))),
        (Sequence(Discrete(2)), (np.int64(0),)),
        (OddSpace(), 4),
        (None, object()),
    ],
)
def test_good_actions_pass(space: Any, action: Any, strict: bool) -> None:
    assert codec_of(space, strict=strict).refusal(action) is None


@pytest.mark.parametrize("strict", [False, True])
@for_each(
    "space, action, reason",
    [
        (Discrete(3), 3, "3 is outside Discrete(3): 0..2"),
        (Discrete(3), -1, "-1 is outside Discrete(3): 0..2"),
        (Discrete(3, start=-1), 2, "2 is outside Discrete(3, start=-1): -1..1"),
        (Discrete(3), 1.0, "1.0 is not one integer, which Discrete(3) needs"),
        (Discrete(3), np.float32(1), "is not one integer"),
        (Discrete(3), True, "True is not one integer"),
        (Discrete(3), None, "None is not one integer"),
        (Discrete(3), "1", "'1' is not one integer"),
        (Discrete(3), [1, 2], "[1, 2] is not one integer"),
        (Discrete(3), [[1], [2, 3]], "is not one integer"),
        (Discrete(3), [], "[] is not one integer"),
        (Discrete(3), {"a": 1}, "is not one integer"),
        (FLOATS, [0.5], "shape (1,) is not the (2,) of Box"),
        (FLOATS, 0.5, "shape () is not the (2,) of Box"),
        (FLOATS, ["a", "b"], "dtype <U1 does not fit Box"),
        (FLOATS, [None, 1], "dtype object does not fit Box"),
        (FLOATS, np.array([1j, 0]), "dtype complex128 does not fit Box"),
        (FLOATS, [[1.0], [1.0, 2.0]], "is not an array"),
        (Box(0, 9, (2,), np.int32), [0.5, 1.0], "dtype float64 does not fit Box"),
        (MultiDiscrete([2, 3]), [2, 0], "[2, 0] is outside the bounds of MultiDiscrete"),
        (MultiDiscrete([2, 3]), [0, -1], "is outside the bounds"),
        (MultiDiscrete([2, 3]), [0], "shape (1,) is not the (2,)"),
        (MultiDiscrete([2, 3]), [0.0, 1.0], "dtype float64 does not fit"),
        (MultiDiscrete([2, 3]), [[0], [1, 2]], "is not an array"),
        (MultiDiscrete([2, 3], start=[5, 5]), [4, 5], "is outside the bounds"),
        (MultiBinary(2), [0, 2], "is outside the bounds of MultiBinary"),
        (MultiBinary(2), 1, "shape () is not the (2,)"),
        (TREE, tree_action(move=3), "at ['move']: 3 is outside Discrete(3): 0..2"),
        (TREE, tree_action(aim=(0.0,)), "at ['aim']: at [0]: shape (1,) is not the (2,) of Box"),
        (TREE, tree_action(flags=(0, 2)), "at ['aim']: at [1]: "),
        (TREE, {"move": 1}, "value should be a dict of ['aim', 'move'], found a dict of ['move']"),
        (TREE, {**tree_action(), "more": 1}, "value should be a dict of ['aim', 'move'], found"),
        (TREE, 1, "value should be a dict of ['aim', 'move'], found int"),
        (TREE, {"move": 1, "aim": (1,)}, "at ['aim']: value should be 2 items, found 1 items"),
        (TREE, {"move": 1, "aim": 7}, "at ['aim']: value should be 2 items, found int"),
        (Text(5), "abcdef", "'abcdef' is not in Text"),
        (Text(5), "a b", "its charset lacks ' '. Give the space one that has it"),
        (Text(5), 1, "1 is not in Text"),
        (ONE_OF, (2, np.int64(1)), "is not in OneOf"),
        (ONE_OF, 1, "is not in OneOf"),
    ],
)
def test_bad_actions_are_refused_with_a_reason(
    space: Any, action: Any, reason: str, strict: bool
) -> None:
    found = codec_of(space, strict=strict).refusal(action)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("space", "action", "reason"),
    [
        (FLOATS, [0.0, 1.5], "is outside the bounds of Box"),
        (FLOATS, [0.0, -1.5], "is outside the bounds of Box"),
        (FLOATS, [0.0, np.nan], "is outside the bounds of Box"),
        (FLOATS, [0.0, np.inf], "is outside the bounds of Box"),
        (TREE, tree_action(aim=(0.0, 1.5)), "at ['aim']: at [0]: "),
        (Sequence(Discrete(2)), (7,), "is not in Sequence"),
        (OddSpace(), 3, "3 is not in OddSpace()"),
        (OddSpace(), {}, "cannot be checked by OddSpace(): TypeError"),
    ],
    ids=str,
)
def test_bounds_of_boxes_and_custom_spaces_count_only_when_strict(
    space: Any, action: Any, reason: str
) -> None:
    assert codec_of(space, strict=False).refusal(action) is None
    found = codec_of(space, strict=True).refusal(action)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    "space",
    [Discrete(4), Discrete(4, start=3), FLOATS, MultiDiscrete([2, 9]), MultiBinary(3), TREE],
    ids=str,
)
@pytest.mark.parametrize("strict", [False, True])
def test_samples_of_a_space_pass_its_check(space: Any, strict: bool) -> None:
    check = codec_of(space, strict=strict).refusal
    space.seed(7)
    for _ in range(20):
        assert check(space.sample()) is None


def test_the_action_that_is_checked_is_not_changed() -> None:
    action = np.array([0.25, 0.5])
    action.flags.writeable = False
    assert codec_of(FLOATS, strict=True).refusal(action) is None


# -- actions as envs get them ----------------------------------------------------------------------


@pytest.mark.parametrize("action", [1.0, np.array([1.0]), np.array([0, 1]), True, "up", None])
def test_what_is_not_one_integer_reaches_the_env_unchanged(action: Any) -> None:
    assert codec_of(Discrete(3)).for_env(action) is action


@pytest.mark.parametrize("action", [[0.5, 1], (0.5, 1), np.array([0.5, 1.0]), np.array([0, 1])])
def test_box_actions_become_arrays_of_its_dtype(action: Any) -> None:
    converted = codec_of(Box(-1, 1, (2,), np.float32)).for_env(action)
    assert type(converted) is np.ndarray
    assert converted.dtype == np.float32
    np.testing.assert_allclose(converted, np.asarray(action))


def test_box_actions_that_fit_are_handed_on_without_a_copy() -> None:
    action = np.zeros(2, np.float32)
    assert codec_of(Box(-1, 1, (2,), np.float32)).for_env(action) is action


def test_box_actions_that_would_lose_information_are_handed_on() -> None:
    convert = codec_of(Box(0, 255, (2,), np.uint8)).for_env
    for action in (np.array([0.5, 1.0]), np.array([0, 256]), np.array([-1, 0]), "up", None):
        assert convert(action) is action
    assert convert(np.array([0, 255])).dtype == np.uint8


def test_nested_actions_are_converted_part_by_part() -> None:
    space = Dict(
        move=Discrete(3),
        aim=Tuple((Box(-1, 1, (1,), np.float32), Discrete(2))),
        multi=MultiDiscrete([2, 2]),
    )
    multi = np.array([0, 1])
    action = {"move": np.array([2]), "aim": [np.array([0.5]), np.int64(1)], "multi": multi}
    converted = codec_of(space).for_env(action)
    assert type(converted["move"]) is int
    assert converted["aim"][0].dtype == np.float32
    assert type(converted["aim"]) is tuple
    assert type(converted["aim"][1]) is int
    assert converted["multi"] is multi
    assert space.contains(converted)
    assert type(action["move"]) is np.ndarray
    for wrong in (5, {"move": 1}, {"other": 2}):
        assert codec_of(space).for_env(wrong) == wrong
    assert codec_of(space["aim"]).for_env([1]) == [1]


# -- batches --------------------------------------------------------------------------------------


def test_values_with_a_layout_are_stacked_leaf_by_leaf() -> None:
    batch = codec_of(NESTED).stack([nested_value(), nested_value()])
    assert batch["image"].shape == (2, 2, 3)
    assert batch["image"].dtype == np.uint8
    assert batch["parts"][0].tolist() == [3, 3]
    assert batch["parts"][1]["speed"].shape == (2,)


@pytest.mark.parametrize("order", [1, -1])
def test_values_with_other_keys_are_no_batch(order: int) -> None:
    rows = [{"a": 1.0}, {"a": 2.0, "b": 3.0}][::order]
    with pytest.raises(KeyError):
        stacked(rows)
    with pytest.raises(KeyError):
        stacked([{"of": row} for row in rows])


def test_no_values_make_an_empty_batch_of_the_right_shape() -> None:
    batch = codec_of(NESTED).stack([])
    assert batch["image"].shape == (0, 2, 3)
    assert batch["parts"][0].dtype == np.int64
    assert codec_of(None).stack([]).shape == (0,)


def test_values_without_layout_become_an_object_array() -> None:
    values = [[1, 2], "text", {"a": 1}]
    batch = codec_of(None).stack(values)
    assert batch.dtype == object
    assert batch.shape == (3,)
    assert list(batch) == values


def test_a_batch_can_be_written_without_changing_the_values() -> None:
    value = np.zeros(2, np.float32)
    codec_of(FLOATS).stack([value])[0] = 7
    assert value.tolist() == [0, 0]


def test_batches_are_split_into_rows() -> None:
    assert split_batch([1, 2, 3], 3) == [1, 2, 3]
    rows = split_batch(np.arange(6).reshape(3, 2), 3)
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    rows = split_batch({"a": np.arange(2), "b": (np.arange(2), [5, 6])}, 2)
    assert rows == [{"a": 0, "b": (0, 5)}, {"a": 1, "b": (1, 6)}]
    assert split_batch([], 0) == []


@pytest.mark.parametrize(
    "batch",
    [[1, 2, 3], np.zeros((3, 2)), {"a": [1, 2], "b": [1, 2, 3]}, ([1, 2], [1])],
    ids=["list", "array", "dict", "tuple"],
)
def test_a_batch_of_another_length_is_refused(batch: Any) -> None:
    with pytest.raises(ValueMismatchError, match=r"\d rows for 2 envs"):
        split_batch(batch, 2)


def test_stacking_and_splitting_are_inverse() -> None:
    space = gymnasium.spaces.Dict({"a": FLOATS, "b": Tuple((Discrete(3), MultiBinary(2)))})
    space.seed(3)
    values = [space.sample() for _ in range(5)]
    rows = split_batch(codec_of(space).stack(values), 5)
    for value, row in zip(values, rows, strict=True):
        np.testing.assert_array_equal(row["a"], value["a"])
        assert row["b"][0] == value["b"][0]
        np.testing.assert_array_equal(row["b"][1], value["b"][1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0)])
@pytest.mark.filterwarnings("error")
def test_a_finite_test_finds_any_number_that_is_not(dtype: Any, shape: tuple[int, ...]) -> None:
    test = finite_test(np.dtype(dtype), shape)
    assert test is not None
    for number in (0.0, -1.5, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal):
        assert test(np.full(shape, number, dtype)) == 0.0
    for number in (np.nan, np.inf, -np.inf):
        for place in np.ndindex(shape):
            array = np.full(shape, np.finfo(dtype).max, dtype)
            array[place] = number
            assert test(array) != 0.0


def test_there_is_no_finite_test_of_what_is_always_finite_or_too_large() -> None:
    assert finite_test(np.dtype(np.uint8), (3,)) is None
    assert finite_test(np.dtype(np.float32), (1000, 1000)) is None
    assert finite_test(np.dtype(np.complex64), (3,)) is None


# -- spaces of any class ----------------------------------------------------------------------


class Loose(gymnasium.Space[Any]):
    """Does not compare itself."""

    def __init__(self, limits: Any) -> None:
        super().__init__()
        self.limits = limits


class Proud(Loose):
    """Compares itself, badly."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not with me")


def sent(space: Any) -> Any:
    """Return a space as it arrives from a worker."""
    return pickle.loads(pickle.dumps(space))


def test_spaces_of_any_class_are_compared() -> None:
    seeded = gymnasium.Space()
    seeded.seed(3)
    one = Loose({"low": np.zeros(2), "of": [Discrete(3), gymnasium.Space()]})
    for space in (seeded, one, Dict({"a": one, "b": Discrete(2)}), Tuple((one, seeded))):
        assert same_space(space, sent(space))
        assert space != sent(space), "what it is there for"
    for other in (
        Loose({"low": np.ones(2), "of": one.limits["of"]}),
        Loose({"low": np.zeros(2), "of": [Discrete(4), gymnasium.Space()]}),
        Loose({"low": np.zeros(2), "of": [Discrete(3)]}),
        Loose({"low": np.zeros(2)}),
        gymnasium.Space(),
        Discrete(2),
    ):
        assert not same_space(one, other)
        assert not same_space(Dict({"a": one}), Dict({"a": other}))
    assert not same_space(Dict({"a": one}), Dict({"b": one}))
    assert not same_space(Discrete(2), one)
    with pytest.raises(RuntimeError, match="not with me"):
        same_space(Proud(1), Proud(1))


def test_a_bare_space_has_any_value_but_none_and_no_samples() -> None:
    codec = codec_of(gymnasium.Space())
    codec.check_value({"any": "object"})
    with pytest.raises(ValueMismatchError, match="is None"):
        codec.check_value(None)
    assert codec_of(gymnasium.Space(), strict=True).refusal(object()) is None
    assert has_samples(Text(3))
    assert not has_samples(gymnasium.Space())


UNIT = np.dtype([("hp", np.float32), ("at", np.int16, (2,))])


@pytest.mark.parametrize("kind", [UNIT, np.dtype("U4"), np.dtype("datetime64[s]")], ids=str)
def test_a_space_of_any_class_that_says_what_arrays_it_has_is_laid_out(kind: Any) -> None:
    space = gymnasium.Space((2,), kind)
    codec = codec_of(space)
    assert codec.layout is not None
    assert codec.layout.leaves == (Leaf((), (2,), kind),)
    actions = codec.action_columns(checked=True)
    assert actions is not None
    good, short = np.zeros(2, kind), np.zeros(1, kind)
    columns, _ = actions.of_values([good, good]) or ([], 0)
    assert columns[0].shape == (2, 2)
    assert columns[0].dtype == kind
    assert actions.of_batch(np.zeros((2, 2), kind), 2) is not None
    for odd in (short, np.zeros(2, np.float32), object()):
        assert codec.refusal(odd) is not None
        assert actions.of_values([good, odd]) is None
    assert codec.refusal(good) is None
    assert codec.zeros(3).dtype == kind
    for other in (Loose(1), gymnasium.Space((2,)), gymnasium.Space(None, np.float32)):
        assert codec_of(other).layout is None
    assert codec_of(gymnasium.Space((2,), np.dtype(object))).layout is None
    assert codec_of(gymnasium.Space((2,), str)).layout is None


def test_what_is_made_of_the_parts_of_named_tuples_is_one_too() -> None:
    graph = spaces.GraphInstance(np.zeros((2, 1)), np.ones(3), np.ones((3, 2), np.int32))
    for made in (
        leafwise(np.copy, graph),
        indexed(graph, slice(None)),
        leafwise(np.copy, {"a": (graph,)})["a"][0],
    ):
        assert type(made) is spaces.GraphInstance
        assert made.edges.tolist() == [1.0] * 3


@for_each("shape", [(2, 3), (2, 3, 0), (0, 3, 2), (2, 0, 1)])
def test_axes_are_merged_whatever_their_lengths(shape: tuple[int, ...]) -> None:
    assert merged_axes(np.zeros(shape)).shape == (shape[0] * shape[1], *shape[2:])
