"""YAML within limits: what is read how, what is refused, and the way back."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmgr.config import to_easydict
from envmgr.config.yaml_text import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_KEY,
    MAX_NODES,
    dump_yaml,
    load_yaml,
)
from envmgr.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("1E-5", 1e-5),
        ("2.5e4", 25000.0),
        ("-.5e+1", -5.0),
        ("1_000e0", 1000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("null", None),
        ("~", None),
        ("", None),
        ("# nothing", None),
        ("true", True),
        ("16", 16),
        ("0.1", 0.1),
        ("'1e3'", "1e3"),
        ("'None'", "None"),
        ("Nonesuch", "Nonesuch"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("1e3x", "1e3x"),
        ("CartPole-v1", "CartPole-v1"),
        ("my_pkg.envs:make", "my_pkg.envs:make"),
        ("{0: 1, 2: null}", {0: 1, 2: None}),
        ("!!python/tuple [1, [2]]", (1, [2])),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_value_is_read_naturally(text: str, value: Any) -> None:
    found = load_yaml(text, "file")
    assert found == value
    assert type(found) is type(value)


def test_merge_keys_may_be_overridden() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {c: &b {<<: *a, x: 3}}\nd: {<<: *b, z: 1, x: 4}"
    assert load_yaml(text, "file") == {
        "a": {"x": 1, "y": 2},
        "b": {"c": {"x": 3, "y": 2}},
        "d": {"x": 4, "y": 2, "z": 1},
    }


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("a: 1\na: 2", "line 2, column 1", "'a' occurs twice"),
        ("{b: {a: 1, a: 2}}", "line 1, column 12", "'a' occurs twice"),
        ("0: 1\n0x0: 2", "line 2, column 1", "occurs twice"),
        ("<<: {a: 1}\n<<: {b: 1}", "line 2, column 1", "occurs twice"),
        ("a:\n\tb: 1", "line 2, column 1", "spaces, not with tabs"),
        ("a: [1,\nb: 2", "line 2, column 5", "a flow sequence (begun in line 1)"),
        ("a: b: c", "line 1, column 5", "not allowed here"),
        ("a: *nope", "line 1, column 4", "undefined alias"),
        ("a: &a [*a]", "line 1, column 4", "contains itself"),
        ("a: &a {<<: *a}", "line 1, column 4", "contains itself"),
        ("a: !foo x", "line 1, column 4", "constructor"),
        ("!!python/object/apply:os.system [x]", "line 1, column 1", "constructor"),
        ("!!python/name:os.system x", "line 1, column 1", "constructor"),
        ("{[1]: 2}", "line 1, column 2", "unhashable"),
        ("? !!python/tuple [x]\n: 2\n" * 101, "line 201, column 3", "100 keys of a mapping"),
        ("2147483648: 1", "line 1, column 1", "a number beyond 2,147,483,648: quote it"),
        ("!!set {1, -2147483648}", "line 1, column 11", "a number beyond"),
        ("{a: {2.5e9: 1}}", "line 1, column 6", "a number beyond"),
        (".inf: 1", "line 1, column 1", "a number beyond"),
        (".nan: 1", "line 1, column 1", "a number beyond"),
        ("--- 1\n--- 2", "line 2, column 1", "single document"),
        ("a\x01b", "line 1, column 2", "special characters"),
        ("ab\nc\x01", "line 2, column 2", "special characters"),
        ("- 1\n- 2001-99-99", "line 2, column 3", "does not fit"),
        ("!!int ''", "line 1, column 1", "does not fit"),
        ("!!bool foo", "line 1, column 1", "does not fit"),
        ("!!timestamp x", "line 1, column 1", "does not fit"),
        ("!!map [a]", "line 1, column 1", "expected a mapping"),
        ("a: =", "line 1, column 4", "constructor"),
        ("a: 1\nb: {c: None}", "line 2, column 8", "write null, or 'None' in quotes"),
    ],
)
def test_what_is_refused_is_found_by_line_and_column(text: str, where: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_yaml(text, "my.yaml")
    assert str(caught.value).startswith(f"my.yaml, {where}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_depth_is_limited() -> None:
    fits = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    load_yaml(f"a: {fits}", "file")
    with pytest.raises(ConfigError, match=f"line 1, column .*more than {MAX_DEPTH} levels"):
        load_yaml(f"a: [{fits}]", "file")
    with pytest.raises(ConfigError, match="levels"):
        load_yaml("[" * 500_000, "file")


def test_depth_counts_through_aliases() -> None:
    levels = [f"a{i}: &a{i} [[[[[[[[[*a{i - 1}]]]]]]]]]" for i in range(1, 7)]
    with pytest.raises(ConfigError, match="levels"):
        load_yaml("\n".join(["a0: &a0 x", *levels]), "file")


def test_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_NODES >= 100_000  # as in a config of long lists
    monkeypatch.setattr("envmgr.config.yaml_text.MAX_NODES", 100)
    # Where the limit is reached: the rest of a large file is not even read.
    with pytest.raises(ConfigError, match=r"line 1, column 200.*at most 100 values"):
        load_yaml("[" + "a," * 1000 + "]", "file")


def bomb(template: str, width: int, n_levels: int) -> str:
    """Each level names the one below `width` times; expanded it is `width ** n_levels` large."""
    levels = [
        f"a{level}: &a{level} " + template % ", ".join([f"*a{level - 1}"] * width)
        for level in range(1, n_levels + 1)
    ]
    return "\n".join(["a0: &a0 {}", *levels])


@pytest.mark.parametrize("template", ["[%s]", "[[%s]]", "{x: [%s]}", "{<<: [%s], y: 1}"])
def test_alias_bombs_are_refused_before_they_grow(template: str) -> None:
    assert load_yaml(bomb(template, 9, 2), "file")
    with pytest.raises(ConfigError, match="too large with its aliases expanded"):
        load_yaml(bomb(template, 9, 12), "file")


def test_text_multiplied_by_aliases_is_limited() -> None:
    times = MAX_CHARACTERS // 100_000 + 1
    text = f"a: &a {'x' * 100_000}\nb: [" + "*a, " * times + "]"
    with pytest.raises(ConfigError, match="too large with its aliases expanded"):
        load_yaml(text, "file")


def test_size_is_limited() -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_BYTES}"):
        load_yaml("#" * (MAX_BYTES + 1), "file")


@pytest.mark.parametrize(
    "values",
    [
        {"a": math.inf, "b": -math.inf, "c": None, "d": True, "e": 1e-7, "f": 1e22},
        {"a": (1, ({"b": (2,)},)), "c": [[], {}, ()]},
        {"a": "1e3", "b": ".inf", "c": "null", "d": "true", "e": "16", "f": "", "g": "a: b"},
        {"a": "None", "None": ["None"]},
        {
            "a": "x\ny\n",
            "b": " x ",
            "c": "é\u2028",
            "\x85": "\x85",
            "d": "# no",
            "e": "@x",
            "f": "*x",
            "g": "1e5",
        },
        {"seed": {0: 1, 2: None}, "kw": {(1, 2): 3, 1.5: "x"}},
        {"a": datetime.date(2020, 1, 2), "b": b"\x00\xff", "c": {1, 2}},
    ],
)
def test_values_come_back_equal(values: dict[str, Any]) -> None:
    text = dump_yaml(values)
    assert load_yaml(text, "file") == values
    assert list(load_yaml(text, "file")) == list(values)


def test_dump_is_plain_yaml() -> None:
    text = dump_yaml({"manager": {"episode_num": math.inf, "seed": None, "type": "base"}})
    assert text == "manager:\n  episode_num: .inf\n  seed: null\n  type: base\n"


def test_dump_writes_out_what_occurs_twice_and_takes_easydicts_and_numpy() -> None:
    shared = [1]
    cfg = to_easydict({"a": shared, "b": shared})
    cfg.c = np.float32(0.5)
    cfg.d = np.int64(3)
    cfg.e = np.str_("x")
    cfg.f = np.True_
    text = dump_yaml(cfg)
    assert "&" not in text
    found = load_yaml(text, "file")
    assert found == {"a": [1], "b": [1], "c": 0.5, "d": 3, "e": "x", "f": True}


def test_dump_names_the_key_of_what_yaml_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.fs\[1\] is <built-in function len>"):
        dump_yaml({"env": {"kwargs": {"fs": [1, len]}}})


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["1e3", "1_0e2", "yes", "0x1", "1:30", "=", "<<", "2020-01-01", "~"])
)
_env_ids = st.integers(1 - MAX_KEY, MAX_KEY - 1)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=4) | _env_ids, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), _values, max_size=3))
def test_any_config_comes_back_equal(values: dict[str, Any]) -> None:
    assert load_yaml(dump_yaml(values), "file") == values


_TYPES = ["bool", "int", "float", "str", "null", "binary", "timestamp", "merge", "value"]
_COLLECTIONS = ["map", "seq", "set", "omap", "pairs", "python/tuple"]
_MARKS = ["&a ", "*a ", "? ", ": ", "- ", "{", "}", "[", "]", ", ", "<<: ", "\n", "  ", "#", "\t"]
_SCALARS = ["x", "1", "2020-01-01", "0x", "1:2", "=", "'", '"', "|\n", "%TAG ! x\n--- ", "!<x> "]
_TOKENS = [*(f"!!{tag} " for tag in (*_TYPES, *_COLLECTIONS)), *_MARKS, *_SCALARS]


@given(st.lists(st.sampled_from(_TOKENS), max_size=12).map("".join))
def test_any_text_is_read_or_refused_with_a_config_error(text: str) -> None:
    try:
        load_yaml(text, "file")
    except ConfigError as error:
        assert str(error).startswith("file")  # noqa: PT017 (refusal is one of two good outcomes)


@pytest.mark.parametrize("text", ["9" * 1001, "1" + ":1" * 300_000, "0x" + "f" * 2000, "-1_" * 900])
def test_a_number_of_absurd_length_is_refused_before_it_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="has more than 1000 digits"):
        load_yaml(f"a: !!int '{text}'", "test.yaml")
    assert load_yaml("a: " + "9" * 1000, "test.yaml")["a"] == int("9" * 1000)
