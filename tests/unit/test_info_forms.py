"""Infos as records: what comes out is what went in, in type too; and garbage is recognised."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from envmgr.core.replies import MalformedReplyError, form_given
from envmgr.spaces import ValueMismatchError
from envmgr.wire.block import items
from envmgr.wire.info_columns import columns_of
from envmgr.wire.info_forms import (
    MOST_FIELDS,
    RECORD_BYTES,
    HostForms,
    InfoField,
    InfoForm,
    InfoWriter,
    RecordBatch,
    form_of,
)
from tests.cases import for_each
from tests.property.test_infos import InfoMaker
from tests.values import same_values

FIVE = {"x": 1.5, "v": -0.0, "r": 2.5, "c": float("inf"), "d": 0.1}


class Text(str):
    """Not a str that would come out as what it was."""


class Rows:
    """The records of some envs, in plain memory, and what writes them."""

    def __init__(self, n: int) -> None:
        self.memory = np.zeros((n, RECORD_BYTES), np.uint8)
        self.numbers = np.zeros(n, np.uint8)
        self.proposed: list[tuple[int, Any]] = []
        self.forms = HostForms(lambda env_id, fields: self.proposed.append((env_id, fields)))
        numbers = items(self.numbers)
        seeker = self.forms.of_steps
        self.writers = [
            InfoWriter(self.forms, seeker, i, items(self.memory[i]), numbers, i) for i in range(n)
        ]

    def learn(self, form: InfoForm | None) -> InfoForm:
        assert form is not None
        self.forms.learn([(len(self.forms.numbered) + 1, form.fields)])
        return form

    def told(self, i: int, info: dict[str, Any]) -> bool:
        """Whether an env has written a record of an info; it takes note if not."""
        if self.writers[i].function(info):
            return True
        self.writers[i].note_odd(info)
        return False

    def batch(self, form: InfoForm, odd: Sequence[int] = ()) -> RecordBatch:
        data = bytearray(self.memory[:, : form.nbytes].tobytes())
        return form.batch(data, len(self.memory), odd=odd)


def form_of_all(infos: Sequence[dict[str, Any]]) -> InfoForm | None:
    form = None
    for info in infos:
        one = form_of(info)
        if one is None:
            return None
        form = one if form is None else form.with_all_of(one)
        if form is None:
            return None
    return form


def test_what_comes_out_is_what_went_in() -> None:
    n_tested = n_written = 0
    for seed in range(1500):
        maker = InfoMaker(random.Random(seed))
        infos = [info for _ in range(6) if (info := maker.info())]
        form = form_of_all(infos) if infos else None
        if form is None:
            continue
        n_tested += 1
        rows = Rows(len(infos))
        rows.learn(pickle.loads(pickle.dumps(form)))
        # One that is of the form, but for the size of an int or a text, goes otherwise.
        odd = [i for i, info in enumerate(infos) if not rows.writers[i].function(info)]
        n_written += len(infos) - len(odd)
        assert rows.numbers.tolist() == [int(i not in odd) for i in range(len(infos))]
        batch = rows.batch(form, odd)
        expected = [{} if i in odd else info for i, info in enumerate(infos)]
        assert same_values(batch.dicts(), expected), seed
        assert same_values(batch.columns(), columns_of(expected, hidden=frozenset())), seed
        for i in set(range(len(infos))).difference(odd):
            assert same_values(form.read(rows.memory[i].tobytes()), infos[i])
    assert n_tested > 600
    assert n_written > 3000


def test_infos_are_nobody_elses() -> None:
    rows = Rows(2)
    form = rows.learn(form_of({"a": np.zeros(2), "in": {"b": np.array(1.0)}}))
    for writer in rows.writers:
        assert writer.function({"a": np.zeros(2), "in": {"b": np.array(1.0)}})
    batch = rows.batch(form)
    rows.memory[:] = 0xFF
    one, other = batch.dicts()
    columns, more = batch.columns(), batch.columns()
    one["a"][:] = 7
    one["in"]["b"][...] = 7
    columns["a"].values[:] = 8
    columns["a"].present[:] = False
    assert same_values(other, {"a": np.zeros(2), "in": {"b": np.array(1.0)}})
    assert same_values(batch.dicts()[0], other)
    assert more["a"].values.tolist() == [[0.0, 0.0]] * 2
    assert more["a"].present.all()
    assert columns["in"].present.all()


@for_each(
    "other",
    [
        {"x": 1.5, "r": 2.5, "v": -0.0, "c": 3.5, "d": 0.1},  # another order
        {**FIVE, "x": 1},
        {**FIVE, "x": np.float64(1)},
        {**FIVE, "x": True},
        {**FIVE, "x": None},
        {**FIVE, "x": "1.5"},
        {**FIVE, "x": np.array(1.5)},
        {**FIVE, "x": {}},
        {**FIVE, "x": {"y": 1.0}},
        {**FIVE, "more": 1.0},
        {1: 1.5, "v": -0.0, "r": 2.5, "c": 3.5, "d": 0.1},
        {**FIVE, "abnormal": False},
    ],
)
def test_an_info_that_is_not_of_the_form(other: dict[Any, Any]) -> None:
    rows = Rows(2)
    form = rows.learn(form_of(FIVE))
    assert rows.writers[0].function(FIVE)
    before = rows.memory[0].tobytes()
    for writer in rows.writers:
        assert not writer.function(other)
    assert rows.memory[0].tobytes() == before
    assert rows.writers[0].function(FIVE)
    assert same_values(form.read(rows.memory[0].tobytes()), FIVE)


def test_keys_that_are_equal_to_those_of_a_form() -> None:
    rows = Rows(1)
    rows.learn(form_of(FIVE))
    assert not rows.writers[0].function({Text(key): value for key, value in FIVE.items()})


@for_each(
    "value",
    [1 << 63, -(1 << 63) - 1, 1 << 200, "x" * 65, "ä" * 33, "half a pair: \ud800", np.zeros(4)],
)
def test_a_value_that_has_no_room(value: Any) -> None:
    rows = Rows(1)
    sound = {int: 1, str: "", np.ndarray: np.zeros(3)}[type(value)]
    form = rows.learn(form_of({"a": 1.5, "b": sound}))
    assert rows.writers[0].function({"a": 1.5, "b": sound})
    assert not rows.writers[0].function({"a": 1.5, "b": value})
    assert rows.writers[0].function({"a": 2.5, "b": sound})
    assert same_values(form.read(rows.memory[0].tobytes()), {"a": 2.5, "b": sound})


@for_each(
    "info",
    [
        {},
        {"a": [1]},
        {"a": (1, 2)},
        {"a": object()},
        {"a": 1j},
        {"a": np.complex64(1)},
        {"a": np.str_("a")},
        {"a": np.datetime64("2020-01-01")},
        {"a": np.longdouble(1)},
        {"a": np.array(["a"])},
        {"a": np.array([None])},
        {"a": np.zeros(2, dtype=[("a", "f4")])},
        {"a": np.ma.masked_array([1.0])},
        {"a": np.zeros(129)},
        {f"k{k}": 1.0 for k in range(MOST_FIELDS + 1)},
        {"abnormal": False},
        {"in": {1: 1.0}},
        {Text("a"): 1.0},
        {"k" * 300: 1.0},
    ],
)
def test_infos_that_are_no_records(info: Any) -> None:
    assert form_of(info) is None


def test_a_dict_that_holds_itself_is_no_record() -> None:
    info: dict[str, Any] = {"a": 1.0}
    info["me"] = info
    assert form_of(info) is None


def test_the_largest_infos_that_are_records() -> None:
    for info in ({f"k{k}": 1.0 for k in range(MOST_FIELDS)}, {"a": np.zeros(127)}):
        rows = Rows(1)
        form = rows.learn(form_of(info))
        assert form.nbytes <= RECORD_BYTES
        assert rows.writers[0].function(info)
        assert same_values(form.read(rows.memory[0].tobytes()), info)


# -- which forms there are ----------------------------------------------------------------------


def merged(*infos: dict[str, Any]) -> list[str] | None:
    form = form_of_all(infos)
    return None if form is None else [".".join(field.path) for field in form.fields]


def test_a_form_that_has_all_of_two_is_in_the_order_of_both() -> None:
    assert merged({"a": 1, "c": 2}, {"a": 1, "b": 1.0, "c": 2}) == ["a", "b", "c"]
    assert merged({"a": 1}, {"b": 1}) == ["a", "b"]
    assert merged({"a": 1, "in": {"x": 1}}, {"in": {"w": 1, "x": 1}, "z": 1}) == [
        *("a", "in.w", "in.x", "z")
    ]
    assert merged({"a": 1, "b": 1}, {"b": 1, "a": 1}) is None
    assert merged({"a": 1}, {"a": 1.0}) is None
    assert merged({"a": 1}, {"a": {"b": 1}}) is None
    assert merged({"a": {}}, {"a": {"b": 1}}) is None
    some, others = ({f"{name}{k}": 1 for k in range(20)} for name in "ab")
    assert merged(some, others) is None


def test_a_form_is_proposed_when_it_was_seen_several_times() -> None:
    rows = Rows(4)
    for k in range(7):
        assert not rows.told(k % 4, FIVE)
    rows.told(0, {"x": 1})  # not in a row
    for k in range(20):
        assert not rows.told(k % 4, FIVE)
    form = form_of(FIVE)
    assert form is not None
    assert rows.proposed == [(3, form.fields)]
    rows.learn(form)
    assert all(rows.told(k, FIVE) for k in range(4))
    assert rows.numbers.tolist() == [1] * 4


def test_what_comes_at_ends_only_is_added_to_the_form() -> None:
    rows = Rows(1)
    form, last = rows.learn(form_of(FIVE)), {**FIVE, "episode": {"r": 1.5, "l": 7}}
    for _ in range(8):
        assert rows.told(0, FIVE)
        assert not rows.told(0, last)
    whole = form.with_all_of(form_of(last) or form)
    assert whole is not None
    assert rows.proposed == [(0, whole.fields)]
    rows.learn(whole)
    for info in (FIVE, last, FIVE):
        assert rows.told(0, info)
        assert rows.numbers[0] == 2
        assert same_values(whole.read(rows.memory[0].tobytes()), info)


def test_what_is_absent_is_zero_whatever_was_there_before() -> None:
    rows = Rows(1)
    form = rows.learn(form_of({"a": 1, "b": 2.5, "c": np.ones(3)}))
    assert rows.writers[0].function({"a": 1, "b": 2.5, "c": np.ones(3)})
    assert rows.writers[0].function({"b": 1.5})
    columns = rows.batch(form).columns()
    assert list(columns) == ["b"]
    raw = rows.memory[0, 8 : form.nbytes].view(np.float64)
    assert raw.tolist() == [0.0, 1.5, 0.0, 0.0, 0.0]


def test_records_are_given_up_where_most_infos_have_no_form() -> None:
    rows = Rows(1)
    rows.learn(form_of(FIVE))
    for k in range(1200):
        rows.told(0, {"a": [k]})
        assert k % 500 or rows.told(0, FIVE)
    assert not rows.proposed
    rows = Rows(1)
    for k in range(2000):
        rows.told(0, {"a": [k]})
    assert rows.proposed == [(0, None)]
    rows.learn(form_of(FIVE))
    assert not rows.told(0, FIVE)


# -- what is not believed -----------------------------------------------------------------------


def test_garbage_is_refused_or_is_an_info() -> None:
    infos: list[dict[str, Any]] = [
        FIVE,
        {"b": True, "t": "text", "nb": np.bool_(False), "m": np.array([True, False])},
        {"e": {}, "none": None, "in": {"a": np.arange(3, dtype=np.int16)}},
        {f"k{k}": 1.0 for k in range(MOST_FIELDS)},
    ]
    rng, n_refused = np.random.default_rng(0), 0
    for k in range(3000):
        form = form_of(infos[k % len(infos)])
        assert form is not None
        records = rng.integers(0, 256, (3, form.nbytes), np.uint8)
        if k % 2:  # mostly sound
            records[:, 4:][rng.random((3, form.nbytes - 4)) < 0.98] = 0
            records[:, :4] = np.frombuffer((form.most_present).to_bytes(4, "little"), np.uint8)
        try:
            batch = form.batch(bytearray(records.tobytes()), len(records))
        except ValueMismatchError:
            n_refused += 1
            continue
        for info in batch.dicts():
            assert all(type(value) is not bool or value in (True, False) for value in info.values())
        batch.columns()
    assert 300 < n_refused < 2700


@for_each(
    "change",
    [
        lambda record: record.__setitem__(slice(0, 4), 0xFF),  # values that there are not
        lambda record: record.__setitem__(8, 2),  # a bool
        lambda record: record.__setitem__(9, 65),  # the length of a text
        lambda record: record.__setitem__(slice(9, 11), (1, 0xFF)),  # no text
    ],
)
def test_a_record_with_one_thing_wrong(change: Callable[[Any], None]) -> None:
    rows = Rows(2)
    form = rows.learn(form_of({"b": True, "t": "text"}))
    for writer in rows.writers:
        assert writer.function({"b": True, "t": "text"})
    assert form.offsets == (8, 9)
    change(rows.memory[1])
    with pytest.raises(ValueMismatchError):
        rows.batch(form)
    with pytest.raises(ValueMismatchError):
        form.read(rows.memory[1].tobytes())
    assert rows.batch(form, odd=[1]).dicts() == [{"b": True, "t": "text"}, {}]


FIELD = InfoField(("a",), "float")


@for_each(
    "payload",
    [
        (),
        (1,),
        "text",
        [FIELD],
        ((("a",), "float", None),),
        (FIELD, FIELD),
        (FIELD, InfoField(("a", "b"), "float")),
        (FIELD, InfoField(("b",), "float"), InfoField(("a",), "int")),
        (InfoField((), "float"),),
        (InfoField(("abnormal",), "bool"),),
        (InfoField(("a",) * 9, "float"),),
        (InfoField((1,), "float"),),  # type: ignore[arg-type]
        (InfoField((Text("a"),), "float"),),
        (InfoField(["a"], "float"),),  # type: ignore[arg-type]
        (InfoField(("a" * 1000,), "float"),),
        (InfoField(("a",), "float", ()),),
        (InfoField(("a",), 1),),  # type: ignore[arg-type]
        *((InfoField(("a",), kind, (1,)),) for kind in ("|O", "<M8[s]", "<U3", "|V8", "<c8", "x")),
        (InfoField(("a",), "<f8", [1]),),  # type: ignore[arg-type]
        (InfoField(("a",), "<f8", (-1,)),),
        (InfoField(("a",), "<f8", (1 << 40,)),),
        (InfoField(("a",), "<f8", (1000,) * 8),),
        (InfoField(("a",), "<f8", (True,)),),
        (InfoField(("a",), ">f8"),),
        tuple(InfoField((f"k{k}",), "None") for k in range(MOST_FIELDS + 1)),
        tuple(InfoField((f"k{k}",), "<f8", (10,)) for k in range(20)),
    ],
)
def test_what_is_no_form(payload: Any) -> None:
    with pytest.raises(MalformedReplyError):
        form_given(payload)
