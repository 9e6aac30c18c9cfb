"""Merging and copying of configs, and what EasyDict cannot hold by itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from easydict import EasyDict
from hypothesis import given
from hypothesis import strategies as st

from envmgr.config import deep_merge, to_easydict, to_plain
from envmgr.errors import ConfigError


def test_mappings_merge_key_by_key_and_lists_are_replaced() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    update = {"a": {"c": [9], "e": 4}, "f": {"g": 5}}
    merged = deep_merge(base, update)
    assert merged == {"a": {"b": 1, "c": [9], "e": 4}, "d": 3, "f": {"g": 5}}


def test_merge_shares_nothing_and_changes_nothing() -> None:
    base: dict[str, Any] = {"a": {"b": [1, {"x": 2}]}, "t": ({"y": 1},)}
    update: dict[str, Any] = {"c": {"d": [3]}, "l": [{"z": 1}]}
    before = copy.deepcopy((base, update))
    merged = deep_merge(base, update)
    merged["a"]["b"][1]["x"] = 0
    merged["t"][0]["y"] = 0
    merged["c"]["d"].append(0)
    merged["l"][0]["z"] = 0
    assert (base, update) == before


def test_null_replaces_and_is_replaced() -> None:
    assert deep_merge({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert deep_merge({"a": None}, {"a": {"b": 1}}) == {"a": {"b": 1}}
    assert deep_merge({"a": 3}, {"a": None}) == {"a": None}


@pytest.mark.parametrize(
    ("base", "update"),
    [({"x": {"a": {"b": 1}}}, {"x": {"a": 5}}), ({"x": {"a": 5}}, {"x": {"a": {"b": 1}}})],
)
def test_mapping_and_single_value_do_not_replace_each_other(base: Any, update: Any) -> None:
    with pytest.raises(ConfigError, match=r"^manager\.x\.a is "):
        deep_merge(base, update, "manager")


def test_seed_is_one_value_of_any_form() -> None:
    assert deep_merge({"seed": 3}, {"seed": {0: 1}}, "manager") == {"seed": {0: 1}}
    assert deep_merge({"seed": {0: 1}}, {"seed": {1: 2}}, "manager") == {"seed": {1: 2}}
    whole = deep_merge({"manager": {"seed": {0: 1}}}, {"manager": {"seed": 4}})
    assert whole == {"manager": {"seed": 4}}


def test_easydicts_merge_with_dicts() -> None:
    merged = deep_merge(EasyDict(a={"b": 1}, l=[{"c": 2}]), {"a": {"d": 3}})
    assert merged == {"a": {"b": 1, "d": 3}, "l": [{"c": 2}]}
    assert type(merged["a"]) is dict
    assert type(merged["l"][0]) is dict


def test_easydict_whose_key_hides_a_method() -> None:
    # EasyDict makes `items` an attribute, after which it has no method of that name.
    cfg = EasyDict()
    cfg["items"] = 3
    assert to_plain(cfg) == {"items": 3}
    assert deep_merge({"a": {}}, {"a": cfg}) == {"a": {"items": 3}}


AWKWARD: dict[Any, Any] = {
    "seed": {0: 1, 2: None},
    "entries": [{"items": 3, 1: 2}, [{"update": 1}]],
    "pair": (1, {"a": {"b": 2}}),
    "kwargs": {"items": 3, "update": {"x": 1}, "__class__": 2, None: 4, "plain": {"y": 1}},
}


@pytest.mark.parametrize("duplicate", [lambda c: c, copy.deepcopy, copy.copy])
def test_easydict_holds_what_easydict_alone_cannot(duplicate: Any) -> None:
    cfg = duplicate(to_easydict(AWKWARD))
    assert cfg == AWKWARD
    assert isinstance(cfg, EasyDict)
    assert cfg.seed[0] == 1
    assert cfg.pair[1].a.b == 2
    assert cfg.kwargs.plain.y == 1
    assert dict(cfg.kwargs.items())["items"] == 3
    assert isinstance(cfg.entries[0], EasyDict)
    assert to_plain(cfg) == AWKWARD


def test_easydict_can_be_pickled_and_put_into_another() -> None:
    cfg = to_easydict(AWKWARD)
    assert pickle.loads(pickle.dumps(cfg)) == AWKWARD
    outer = EasyDict(manager=cfg)
    assert outer.manager.seed == {0: 1, 2: None}
    assert copy.deepcopy(outer) == {"manager": AWKWARD}


def test_easydict_is_a_deep_copy_and_takes_changes() -> None:
    source: dict[str, Any] = {"a": {"b": [1]}}
    cfg = to_easydict(source)
    cfg.a.b.append(2)
    cfg.a.c = {3: 4}
    cfg.update({"d": {"e": 5}}, f=6)
    assert source == {"a": {"b": [1]}}
    assert cfg == {"a": {"b": [1, 2], "c": {3: 4}}, "d": {"e": 5}, "f": 6}
    assert cfg.d.e == 5
    assert cfg.pop("f") == 6
    assert not hasattr(cfg, "f")
    assert cfg.pop("f", None) is None
    with pytest.raises(KeyError):
        cfg.pop("f")


_keys = st.sampled_from(["a", "b", "items", "pop", "x y"]) | st.integers(0, 3)
_trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(_keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(_keys, _trees, max_size=4))
def test_any_tree_survives_the_way_through_easydict(values: dict[Any, Any]) -> None:
    cfg = to_easydict(values)
    assert cfg == values
    assert copy.deepcopy(cfg) == values
    assert pickle.loads(pickle.dumps(cfg)) == values
    assert deep_merge({}, cfg) == values
    assert deep_merge(cfg, cfg) == values
