"""Whole configs: reading, overriding, defaults and presets, origins, imports, and the way back."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from easydict import EasyDict

from envmgr import config_file, registry
from envmgr.config import default_manager_config
from envmgr.config.origins import Origin, Source
from envmgr.config.yaml_text import dump_yaml
from envmgr.config_file import load_config, read_config_file, resolve_config
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.registry import Registry

DEFAULT, SET, CODE = Origin(Source.DEFAULT), Origin(Source.SET), Origin(Source.CODE)
NO_COLLECT = {"episodes": None, "output": None, "loggers": [], "videos": False}


class Base:
    @classmethod
    def default_config(cls) -> EasyDict:
        return default_manager_config({"type": "base"})


class Async:
    @classmethod
    def default_config(cls) -> EasyDict:
        return default_manager_config({"type": "async_subprocess", "wait_num": 2})


@pytest.fixture(autouse=True)
def _two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds `base` and `async_subprocess`, whatever the built-in ones are."""
    kinds = Registry("env manager")
    kinds.register("base")(Base)
    kinds.register("async_subprocess")(Async)
    monkeypatch.setattr(registry, "ENV_MANAGER_REGISTRY", kinds)
    monkeypatch.setattr(config_file, "ENV_MANAGER_REGISTRY", kinds)


@pytest.fixture(autouse=True)
def _imports_are_undone() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("cfgtest_"):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "my.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


CARTPOLE = """
env:
  id: CartPole-v1
  kwargs: {render_mode: rgb_array}
  wrappers:
    - gymnasium.wrappers.NormalizeObservation
    - {path: "gymnasium.wrappers:TimeLimit", kwargs: {max_episode_steps: 50}}
manager:
  type: async_subprocess
  env_num: 8
  episode_num: .inf
  step_timeout: 1e1
  seed: {0: 5, 3: null}
collect:
  steps: 1000
"""


def test_whole_file_with_all_defaults(tmp_path: Path) -> None:
    cfg = load_config(write(tmp_path, CARTPOLE))
    assert isinstance(cfg, EasyDict)
    assert list(cfg) == ["env", "manager", "collect"]
    assert cfg.env == {
        "id": "CartPole-v1",
        "entry": None,
        "kwargs": {"render_mode": "rgb_array"},
        "wrappers": [
            {"path": "gymnasium.wrappers.NormalizeObservation", "kwargs": {}},
            {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 50}},
        ],
    }
    assert cfg.manager == {
        **Async.default_config(),
        "env_num": 8,
        "step_timeout": 10.0,
        "seed": {0: 5, 3: None},
    }
    assert cfg.manager.wait_num == 2
    assert cfg.collect == {"policy": "random", "steps": 1000, **NO_COLLECT}


def test_everything_has_a_default() -> None:
    cfg = load_config({})
    assert cfg.manager == default_manager_config()
    assert cfg.env == {"id": None, "entry": None, "kwargs": {}, "wrappers": []}
    assert cfg.collect == {"policy": "random", "steps": None, **NO_COLLECT}
    assert load_config({"env": None, "manager": None, "collect": {}}) == cfg


@pytest.mark.parametrize("form", [dict, EasyDict])
def test_mapping_is_not_changed(form: Any) -> None:
    source = form(manager={"seed": [1, 2], "env_num": 2}, env={"id": "X", "kwargs": {"a": [1]}})
    before = copy.deepcopy(source)
    cfg = load_config(source, set=["manager.seed=[3, 4]", "env.kwargs.b=1"])
    cfg.env.kwargs.a.append(2)
    assert source == before
    assert cfg.manager.seed == [3, 4]


def test_awkward_mappings_are_held_by_the_result() -> None:
    cfg = load_config(
        {
            "env": {"id": "X", "kwargs": {"items": 3, "table": {0: "a"}, "pair": (1, {2: 3})}},
            "manager": {"seed": {0: 1}, "worker_env": {"set": {"update": "1"}}},
        }
    )
    again = copy.deepcopy(cfg)
    assert again == cfg
    assert again.env.kwargs.table[0] == "a"
    assert again.env.kwargs.pair == (1, {2: 3})
    assert dict(again.env.kwargs.items())["items"] == 3
    assert again.manager.seed[0] == 1
    assert load_config(cfg) == cfg


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("# only a comment", "is empty"),
        ("null", "is empty"),
        ("- 1", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("manager: [1]", r"manager is \[1\] .*must be a mapping"),
        ("env: CartPole-v1", "env is 'CartPole-v1' .*must be a mapping"),
        ("manager:\n\ttype: base", "line 2, column 1: .*tabs"),
        ("manager: {env_num: 1, env_num: 2}", "line 1, column 23: .*occurs twice"),
        ("manager: {env_num: many}", r"manager\.env_num is 'many' \(str\), but must be an integer"),
        ("manager: {reset_inplace: true, auto_reset: false}", "reset_inplace"),
        ("env: {id: X, entry: 'a:b'}", r"env\.id is 'X' and env\.entry is 'a:b'"),
        ("env: {kwargs: {a: 1}}", "neither"),
        ("env: {wrappers: [a.B]}", "neither"),
        ("env: {id: ''}", r"env\.id is ''"),
        ("env: {id: 5}", r"env\.id is 5 \(int\)"),
        ("env: {entry: my_module}", r"env\.entry is 'my_module' .*package\.module:callable"),
        ("env: {id: X, kwargs: [1]}", r"env\.kwargs is \[1\]"),
        ("env: {id: X, kwargs: {1: 2}}", r"env\.kwargs is .*1 cannot name an argument"),
        ("env: {id: X, wrappers: a.B}", r"env\.wrappers is 'a\.B'"),
        (
            "env: {id: X, wrappers: [B]}",
            r"env\.wrappers is .*entry 0: 'B' is not a name of the form",
        ),
        ("env: {id: X, wrappers: [a.B, {}]}", r"entry 1: exactly one of"),
        ("env: {id: X, wrappers: [{path: a.B, entry: a.B}]}", "entry 0: exactly one of"),
        ("env: {id: X, wrappers: [{path: a.B, kwarg: {}}]}", "entry 0: neither"),
        ("env: {id: X, wrappers: [{path: a.B, kwargs: [1]}]}", "entry 0"),
        ("collect: {steps: 1, episodes: 1}", r"collect\.steps is 1 and collect\.episodes is 1"),
        ("collect: {steps: 0}", r"collect\.steps is 0 .*an integer >= 1"),
        ("collect: {episodes: 1.5}", r"collect\.episodes is 1\.5"),
        ("collect: {policy: greedy}", r"collect\.policy is 'greedy' .*`random`"),
        ("collect: {output: 3}", r"collect\.output is 3"),
    ],
)
def test_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)
    if "line" in problem or "empty" in problem:
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "problem"),
    [
        ({"managr": {}}, "unknown key 'managr' in the config: did you mean 'manager'"),
        ({"env_num": 3}, r"'env_num' is at the top .* Write manager\.env_num instead"),
        ({"seed": 3}, r"Write manager\.seed instead"),
        ({"id": "X"}, r"Write env\.id instead"),
        ({7: {}}, "unknown key 7"),
        ({"env": {"idd": "X"}}, "unknown key 'idd' in env: did you mean 'id'"),
        (
            {"env": {"id": "X", "arguments": {}}},
            r"'arguments' in env\. Arguments of the env go into env\.kwargs\. Known keys: id,",
        ),
        ({"env": {"id": "X", "seed": 1}}, "unknown key 'seed' in env: did you mean manager.seed"),
        ({"env": {"env_id": "X"}}, "unknown key 'env_id' in env: did you mean id"),
        ({"manager": {"wait_nm": 1}}, "unknown key 'wait_nm' in manager: did you mean 'wait_num'"),
        ({"collect": {"step": 1}}, "unknown key 'step' in collect: did you mean 'steps'"),
        ({"manager": {"type": "asinc_subprocess"}}, "did you mean 'async_subprocess'.* base"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(cfg: Any, problem: str) -> None:
    with pytest.raises(UnknownKeyError, match=problem):
        load_config(cfg)


@pytest.mark.parametrize(("section", "key"), [("env", "entry"), ("collect", "policy")])
def test_a_dot_for_the_colon_is_seen(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is 'a\.b\.C' .*mean 'a\.b:C'"):
        load_config({section: {key: "a.b.C"}})


@pytest.mark.parametrize("name", ["a/b.py:C", "./a/b.py:C", "a.b.py:C"])
def test_a_file_for_a_module_is_seen(name: str) -> None:
    for section in ({"env": {"entry": name}}, {"collect": {"policy": name}}):
        with pytest.raises(ConfigError, match=r"write 'a\.b:C'"):
            load_config(section)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml' does not exist .*looked in"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")
    with pytest.raises(ConfigError, match=r"cannot be read|does not exist"):
        load_config(write(tmp_path, "env: {}") / "below.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"env:\n  id: caf\xe9\n")
    with pytest.raises(ConfigError, match="line 2, column 10: not UTF-8"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_config(tmp_path / "large.yaml")


def test_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfmanager: {env_num: 3}\n")
    assert load_config(tmp_path / "bom.yaml").manager.env_num == 3


# --- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("manager.env_num=16", ("manager", "env_num"), 16),
        ("manager.env_num=1e1", ("manager", "env_num"), 10),
        ("manager.episode_num=.inf", ("manager", "episode_num"), math.inf),
        ("manager.step_timeout=", ("manager", "step_timeout"), None),
        ("manager.step_timeout=null", ("manager", "step_timeout"), None),
        (" manager.type = async_subprocess ", ("manager", "wait_num"), 2),
        ("manager.seed=[1, 2, 3, 4, 5, 6, 7, 8]", ("manager", "seed"), [1, 2, 3, 4, 5, 6, 7, 8]),
        ("manager.seed=3", ("manager", "seed"), 3),
        ("manager.seed.0=9", ("manager", "seed"), {0: 9, 3: None}),
        ("manager.seed.7=9", ("manager", "seed"), {0: 5, 3: None, 7: 9}),
        ("manager.worker_env.set.A=b=c", ("manager", "worker_env", "set"), {"A": "b=c"}),
        ("env.kwargs.foo=1", ("env", "kwargs"), {"render_mode": "rgb_array", "foo": 1}),
        ("env.kwargs.a.b.c=x", ("env", "kwargs", "a"), {"b": {"c": "x"}}),
        ("env.kwargs={x: 1}", ("env", "kwargs"), {"x": 1}),
        ("env.wrappers=[]", ("env", "wrappers"), []),
        ("env.id=ALE/Pong-v5", ("env", "id"), "ALE/Pong-v5"),
        ("collect.output='1e3'", ("collect", "output"), "1e3"),
    ],
)
def test_override(tmp_path: Path, override: str, where: tuple[str, ...], value: Any) -> None:
    found: Any = load_config(write(tmp_path, CARTPOLE), set=[override])
    for key in where:
        found = found[key]
    assert found == value


def test_later_overrides_win_and_build_on_earlier_ones() -> None:
    cfg = load_config(
        {}, set=["manager.env_num=1", "manager.env_num=2", "env.id=X", "env.kwargs.a.b=1"]
    )
    assert (cfg.manager.env_num, cfg.env.kwargs) == (2, {"a": {"b": 1}})
    cfg = load_config({}, set=["env.id=X", "env.kwargs.a.b=1", "env.kwargs.a.c=2"])
    assert cfg.env.kwargs == {"a": {"b": 1, "c": 2}}


def test_override_below_null() -> None:
    cfg = load_config(
        {"manager": None, "env": {"id": "X", "kwargs": None}},
        set=["manager.env_num=3", "env.kwargs.a=1"],
    )
    assert (cfg.manager.env_num, cfg.env.kwargs) == (3, {"a": 1})


def test_override_does_not_reach_what_shares_an_alias(tmp_path: Path) -> None:
    text = "env: {id: X, kwargs: {a: &a {x: 1}, b: *a}}"
    cfg = load_config(write(tmp_path, text), set=["env.kwargs.b.x=2"])
    assert cfg.env.kwargs == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("manager.env_num", "section.key=value"),
        ("manager={}", "section.key=value"),
        ("=3", "section.key=value"),
        ("manager..env_num=3", "section.key=value"),
        ("manager.env_nm=3", "unknown key 'env_nm' in manager.*'env_num'"),
        ("managr.env_num=3", "unknown key 'managr'.*'manager'"),
        ("env.kwarg.foo=3", "unknown key 'kwarg' in env"),
        ("manager.env_num.x=3", r"needs a mapping at manager\.env_num, but that is 8"),
        ("manager.max_retry.x=3", r"manager\.max_retry"),
        ("env.wrappers.0.kwargs.x=1", r"needs a mapping at env\.wrappers"),
        ("manager.env_num=[", r"the override 'manager\.env_num=\[', line 1"),
        ("manager.env_num=0", r"manager\.env_num is 0"),
        ("env.entry=a:b", "one of the two"),
        ("collect.episodes=3", "one of the two"),
        ("env.kwargs=3", r"env\.kwargs is 3"),
        ("manager.worker_env.sett.A=b", "unknown key 'sett'"),
    ],
)
def test_bad_override(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(write(tmp_path, CARTPOLE), set=[override])


# --- origins -------------------------------------------------------------------------------------


def test_origin_of_every_value(tmp_path: Path) -> None:
    file = write(tmp_path, CARTPOLE)
    sets = ["manager.env_num=4", "env.kwargs.foo.bar=1", "manager.seed.1=7"]
    resolved = resolve_config(file, set=sets)
    origins = dict(resolved.origins)
    from_file = Origin(Source.FILE, str(file))
    assert origins.pop("env.id") == from_file
    assert origins.pop("env.entry") == DEFAULT
    assert origins.pop("env.kwargs.render_mode") == from_file
    assert origins.pop("env.kwargs.foo.bar") == SET
    assert origins.pop("env.wrappers") == from_file
    assert origins.pop("manager.type") == from_file
    assert origins.pop("manager.env_num") == SET
    assert origins.pop("manager.episode_num") == from_file
    assert origins.pop("manager.step_timeout") == from_file
    assert origins.pop("manager.wait_num") == Origin(Source.KIND, "async_subprocess")
    assert origins.pop("manager.seed.0") == from_file
    assert origins.pop("manager.seed.1") == SET
    assert origins.pop("manager.seed.3") == from_file
    assert origins.pop("collect.steps") == from_file
    assert set(origins.values()) == {DEFAULT}
    left_of_manager = len(default_manager_config()) - 6
    left_of_collect = 5
    assert len(origins) == left_of_manager + left_of_collect


def test_origin_of_arguments_and_partly_given_mappings() -> None:
    source = {"manager": {"worker_env": {"deny": ["A"]}, "wait_num": math.inf}}
    origins = resolve_config(source, set=["manager.type=async_subprocess"]).origins
    assert origins["manager.worker_env.deny"] == CODE
    assert origins["manager.worker_env.allow"] == DEFAULT
    assert origins["manager.wait_num"] == CODE
    assert origins["manager.type"] == SET
    assert origins["env.kwargs"] == DEFAULT
    assert resolve_config({"manager": None}).origins["manager.type"] == DEFAULT


def test_override_of_a_whole_mapping_forgets_what_the_file_gave(tmp_path: Path) -> None:
    file = write(tmp_path, CARTPOLE)
    origins = resolve_config(file, set=["manager.seed=3", "env.kwargs={}"]).origins
    assert origins["manager.seed"] == SET
    assert origins["env.kwargs"] == SET
    assert not any(key.startswith(("manager.seed.", "env.kwargs.")) for key in origins)


def test_override_of_a_part_or_a_whole_leaves_no_origin_of_what_it_replaced() -> None:
    source = {"manager": {"worker_env": {"allow": ["A"]}}}
    origins = resolve_config(source, set=["manager.worker_env={deny: [B]}"]).origins
    assert origins["manager.worker_env.allow"] == DEFAULT
    assert origins["manager.worker_env.deny"] == SET
    source = {"manager": {"worker_env": None}}
    origins = resolve_config(source, set=["manager.worker_env.deny=[B]"]).origins
    assert origins["manager.worker_env.allow"] == DEFAULT
    assert origins["manager.worker_env.deny"] == SET


# --- imports -------------------------------------------------------------------------------------

MODULE = "def make_env(): ...\nclass Wrapper: pass\ndef policy(): ...\n"


def test_file_runs_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, MODULE, "cfgtest_mine.py")
    text = (
        "env: {entry: 'cfgtest_mine:make_env', wrappers: [cfgtest_mine.Wrapper]}\n"
        "collect: {policy: 'cfgtest_mine:policy'}"
    )
    file = write(tmp_path, text)
    resolved = resolve_config(file)
    assert sys.path[-1] == str(tmp_path.resolve())
    assert resolved.file_policy is not None
    assert tmp_path.resolve() in resolved.file_policy.folders
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rename(file, elsewhere / "my.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_config("elsewhere/my.yaml").env.entry == "cfgtest_mine:make_env"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("env: {entry: 'cfgtest_lib:make_env'}", r"env\.entry"),
        ("env: {id: 'cfgtest_lib:Env-v0'}", r"env\.id"),
        ("env: {id: X, wrappers: [gymnasium.wrappers.TimeLimit, cfgtest_lib.Wrapper]}", "wrappers"),
        ("collect: {policy: 'cfgtest_lib:policy'}", r"collect\.policy"),
        ("manager: {import_names: [cfgtest_lib]}", r"manager\.import_names"),
        ("manager: {preload: [cfgtest_lib]}", r"manager\.preload"),
    ],
)
def test_file_imports_others_only_when_they_are_listed(tmp_path: Path, text: str, key: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write(site, MODULE, "cfgtest_lib.py")
    sys.path.append(str(site))
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"{key}.*--allow-import cfgtest_lib"):
        load_config(file)
    assert "cfgtest_lib" not in sys.modules
    load_config(file, allow_imports=["cfgtest_lib"])


def test_override_of_a_file_is_checked_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-import os"):
        load_config(write(tmp_path, "env: {id: X}"), set=["collect.policy=os:system"])


def test_mapping_is_trusted_and_imports_only_what_registers_kinds(tmp_path: Path) -> None:
    text = (
        "from envmgr import registry\n"
        "@registry.ENV_MANAGER_REGISTRY.register('cfgtest_kind')\nclass Kind: pass\n"
    )
    write(tmp_path, text, "cfgtest_kind.py")
    sys.path.append(str(tmp_path))
    cfg = {
        "env": {"entry": "cfgtest_not_there:make_env"},
        "manager": {"type": "cfgtest_kind", "import_names": ["cfgtest_kind"]},
    }
    assert load_config(cfg).manager.type == "cfgtest_kind"
    assert resolve_config(cfg).file_policy is None


def test_missing_entry_of_a_file_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, MODULE, "cfgtest_mine.py")
    with pytest.raises(ConfigError, match=r"'cfgtest_mine' has no 'mak_env': did you mean 'make_"):
        load_config(write(tmp_path, "env: {entry: 'cfgtest_mine:mak_env'}"))


# --- the way back --------------------------------------------------------------------------------


def test_resolved_config_comes_back_equal(tmp_path: Path) -> None:
    cfg = load_config(write(tmp_path, CARTPOLE), set=["manager.worker_env.set.MUJOCO_GL=egl"])
    again = load_config(write(tmp_path, dump_yaml(cfg), "again.yaml"))
    assert again == cfg
    assert dump_yaml(again) == dump_yaml(cfg)
    assert read_config_file(tmp_path / "again.yaml") == cfg


def test_default_config_comes_back_equal(tmp_path: Path) -> None:
    cfg = load_config({})
    assert load_config(write(tmp_path, dump_yaml(cfg))) == cfg
    assert "episode_num: .inf\n" in dump_yaml(cfg)
    assert "env_num: null\n" in dump_yaml(cfg)


def test_tuples_and_numbers_of_numpy_come_back(tmp_path: Path) -> None:
    kwargs = {"size": (64, 64), "nested": {"t": [(1, 2)]}, "scale": np.float64(0.5), "text": "1e3"}
    cfg = load_config({"env": {"id": "X", "kwargs": kwargs}})
    again = load_config(write(tmp_path, dump_yaml(cfg)))
    assert again.env.kwargs == kwargs
    assert type(again.env.kwargs.size) is tuple
    assert type(again.env.kwargs.text) is str


def test_value_that_yaml_cannot_hold_is_named(tmp_path: Path) -> None:
    cfg = load_config({"env": {"id": "X", "kwargs": {"fn": len}}})
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.fn is "):
        dump_yaml(cfg)
