"""Merging and copying of configs, and what EasyDict cannot hold by itself."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from easydict import EasyDict
from hypothesis import given
from hypothesis import strategies as st

from envmgr.config import deep_merge, to_easydict, to_plain
from envmgr.config.env_factories import env_factories, with_arguments
from envmgr.config_file import load_config
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


class Given:
    """What an env was built with; also a wrapper's."""

    def __init__(self, *_: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs


def test_envs_share_no_argument_that_can_be_changed(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "grid": np.arange(6).reshape(2, 3).T,
        "names": {"a", "b"},
        "data": bytearray(b"xy"),
        "queue": deque([[1], [2]], maxlen=2),
        "nested": [{"grid": np.zeros(2)}],
    }
    section = {"entry": f"{__name__}:Given", "kwargs": kwargs}
    factories = [*env_factories(section, 2), with_arguments(Given, kwargs, [])]
    envs = [factory() for factory in factories]
    for one in envs:
        for other in (kwargs, *(env.kwargs for env in envs if env is not one)):
            assert not any(one.kwargs[name] is other[name] for name in kwargs)
            assert not np.shares_memory(one.kwargs["grid"], other["grid"])
            assert one.kwargs["nested"][0]["grid"] is not other["nested"][0]["grid"]
            assert one.kwargs["queue"][0] is not other["queue"][0]
        assert repr(one.kwargs) == repr(kwargs)
        assert one.kwargs["grid"].strides == kwargs["grid"].strides
        assert one.kwargs["queue"].maxlen == 2
    (tmp_path / "c.yaml").write_text(
        f"env:\n  entry: {__name__}:Given\n  kwargs: {{names: !!set {{a, b}}}}\n"
    )
    env_cfg = load_config(tmp_path / "c.yaml", allow_imports=[__name__]).env
    one, other = (factory() for factory in env_factories(env_cfg, 2))
    assert one.kwargs["names"] == {"a", "b"}
    one.kwargs["names"].clear()
    assert other.kwargs["names"] == {"a", "b"} == env_cfg.kwargs["names"]


def test_what_is_meant_to_be_shared_is() -> None:
    readable = np.zeros(3)
    readable.flags.writeable = False
    for value in (threading.Lock(), Given(), readable):
        assert to_plain({"x": [value]})["x"][0] is value
