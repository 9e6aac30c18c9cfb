"""`make`, and what `envmgr` shows of itself at a prompt."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import gymnasium
import pytest
from gymnasium.wrappers import TimeLimit

import envmgr
from envmgr import create_env_manager, make
from envmgr.adapters.gymnasium import EnvmgrVectorEnv
from envmgr.config import ManagerConfig, keywords
from envmgr.config.kind_sections import Metrics, Trace, WorkerEnv
from envmgr.config.schema import Section, keys_of
from envmgr.env import BatchedEnvSpec
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.managers import BaseEnvManager

SHORT, LONG = (partial(gymnasium.make, "CartPole-v1", max_episode_steps=n) for n in (5, 50))


ROWS = BatchedEnvSpec(lambda: None, 1)
IN_TURN = "all envs run in this process, one after another"
TOLD = "gymnasium.wrappers:RecordEpisodeStatistics"


class Marked(gymnasium.Wrapper[Any, Any, Any, Any]):
    mark = 1


@pytest.mark.parametrize("env_num", [None, 2])
def test_a_list_of_functions_has_one_for_each_env(env_num: int | None) -> None:
    with make([SHORT, LONG], env_num, type="base") as manager:
        assert manager.env_num == 2
        limits = [spec.max_episode_steps for spec in manager.get_attr("spec")]
    assert limits == [5, 50]


def test_arguments_and_wrappers_are_of_each_env_however_it_is_built() -> None:
    given: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 7}, "wrappers": [TOLD]}
    for env in ("CartPole-v1", SHORT, [SHORT, LONG], [SHORT, SHORT]):
        with make(env, 2, type="base", **given) as manager:
            assert [spec.max_episode_steps for spec in manager.get_attr("spec")] == [7, 7]
            assert manager.get_attr("return_queue"), "it is wrapped"
    assert make(SHORT, type="base", env_kwargs={})._env_fn == [SHORT], "as it was given"


def test_wrappers_may_be_classes_and_functions_among_names() -> None:
    wrappers = [Marked, TOLD, lambda env: TimeLimit(env, 3)]
    for env in ("CartPole-v1", SHORT, [SHORT, LONG]):
        for kind in ("base", "subprocess"):
            with make(env, 2, type=kind, wrappers=wrappers) as manager:
                assert manager.get_attr("_max_episode_steps") == [3, 3], "the outermost"
                assert manager.get_attr("return_queue"), "the named one"
                assert manager.get_attr("mark") == [1, 1], "the class"


def test_one_env_is_the_default() -> None:
    assert make("CartPole-v1", type="base").env_num == 1
    assert make(SHORT, type="base").env_num == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": [SHORT, LONG], "env_num": 3}, r"env_num is 3, but env is a list of 2 functions"),
        ({"env": [SHORT, "CartPole-v1"]}, r"env\[1\] is 'CartPole-v1', but a list of envs is one"),
        ({"env": []}, "env is an empty list"),
        ({"env": [SHORT], "wrappers": ["a_b.c"]}, "there is no 'a_b'"),
        ({"env": SHORT, "wrappers": [TimeLimit, 3]}, r"env\.wrappers is .*entry 1: neither a name"),
        ({"env": SHORT, "wrappers": TimeLimit}, r"env\.wrappers is .*must be a list"),
        (
            {"env": SHORT, "wrappers": [(TimeLimit, {"max_episode_steps": 3})]},
            r"entry 0: .*write {'path': 'gymnasium.wrappers[\w.]*:TimeLimit', 'kwargs': {...}}",
        ),
        ({"env": SHORT, "env_kwargs": 3}, "env.kwargs is 3"),
        ({"env": ROWS, "env_kwargs": {"size": 3}}, "BatchedEnvSpec.*build"),
        ({"env": [ROWS], "wrappers": [TOLD]}, "BatchedEnvSpec.*build"),
        ({"env": "x.yaml"}, r"x.yaml.*cfg = load_config.*env_factories"),
        ({"env": Path("x.yml")}, "env_factories"),
        ({"env": {"manager": {}}}, "create_env_manager.cfg.manager, env_fn=env_factories"),
        ({"env": 3}, "a gymnasium id, .*, a function .*, or a list .*. Correct the value.$"),
        ({"env": "CartPole-v1", "num_envs": 4}, "'num_envs' in manager: did you mean env_num?"),
        ({"env": "CartPole-v1", "n_envs": 4}, "'n_envs' in manager: did you mean env_num?"),
        ({"env": "CartPole-v1", "render_mode": "human"}, "env_kwargs of `make`"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], says: str) -> None:
    error = UnknownKeyError if "did you mean" in says or "render_mode" in given else ConfigError
    with pytest.raises(error, match=says.replace("?", r"\?")):
        make(**given, type="base")


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"num_workers": 2, "step_timeout": 5}, "num_workers means nothing"),
        ({"context": "fork", "daemon": False}, "context and daemon mean nothing"),
        ({"num_workers": 2, "type": "base"}, None),  # somebody chose it
        ({"num_workers": None, "step_timeout": 5}, None),
    ],
)
def test_workers_without_a_type_are_remarked_on(
    cfg: dict[str, Any], says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    create_env_manager(cfg, env_fn=[SHORT] * 2)
    said = [record.message for record in caplog.records]
    assert len(said) == (says is not None)
    assert all(f"no type is given, so base: {IN_TURN}, and {says}" in one for one in said)


@pytest.mark.parametrize(
    ("key", "is_argument"),
    [("size", True), ("render_mode", True), ("num_envs", False), ("step_timout", False)],
)
def test_where_arguments_go_is_said_of_what_may_be_one(key: str, is_argument: bool) -> None:
    with pytest.raises(UnknownKeyError, match=f"unknown key '{key}'") as caught:
        make("CartPole-v1", **{key: 4})
    assert (f"env_kwargs={{'{key}': ...}}" in str(caught.value)) == is_argument


@pytest.mark.parametrize(
    "create", [create_env_manager, lambda cfg, **given: BaseEnvManager(**given)]
)
def test_keys_of_the_config_are_no_arguments(create: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed is a key of the config.*, 'seed': 0}, env_fn"):
        create({"type": "base"}, env_fn=[SHORT], seed=0)
    with pytest.raises(TypeError, match="'sied'"):
        create({"type": "base"}, env_fn=[SHORT], sied=0)


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ("subprocess", r"create_env_manager\({'type': 'subprocess'}, env_fn=\[make_env\] \* n\)"),
        ("c.yaml", "cfg = load_config"),
        (Path("c.yml"), "cfg = load_config"),
    ],
)
def test_a_text_is_no_config(cfg: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"cfg is .*, but must be a mapping.*{says}"):
        create_env_manager(cfg, env_fn=[SHORT])


def test_what_is_no_list_of_functions_is_named() -> None:
    with pytest.raises(ConfigError, match="env_fn is missing"):
        create_env_manager({"type": "subprocess"})
    manager: Any = make(SHORT, type="base")
    for build in (EnvmgrVectorEnv, BaseEnvManager):
        with pytest.raises(ConfigError, match=r"is a manager.*as_gymnasium\(manager\)"):
            build(manager)


def test_a_manager_says_what_it_is() -> None:
    manager = make("CartPole-v1", 3, type="base")
    assert repr(manager) == "<BaseEnvManager: 3 envs, type base, not launched>"
    with manager:
        assert repr(manager) == "<BaseEnvManager: 3 envs, type base, launched>"
    assert repr(make("CartPole-v1", type="base")) == (
        "<BaseEnvManager: 1 env, type base, not launched>"
    )


def test_names_of_the_package_are_the_public_ones() -> None:
    assert dir(envmgr) == sorted(envmgr.__all__)
    assert all(getattr(envmgr, name) is not None for name in dir(envmgr))


def test_a_lease_is_no_env() -> None:
    lease: Any = make(SHORT, type="base").lease()
    for name in ("reset", "step"):
        with pytest.raises(AttributeError, match=rf"`with manager.lease\(\) as env:`.*env\.{name}"):
            getattr(lease, name)
    assert not hasattr(lease, "seed")


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Collector", "envmgr.collect"),
        ("EpisodeCollector", "envmgr.collect"),
        ("StepCollector", "envmgr.collect"),
        ("EnvmgrVectorEnv", "envmgr.adapters.gymnasium"),
        ("EnvmgrVecEnv", "envmgr.adapters.sb3"),
    ],
)
def test_names_that_are_elsewhere_say_where(name: str, home: str) -> None:
    with pytest.raises(ImportError, match=f"from {home} import {name}"):
        __import__("envmgr", fromlist=[name])
    if not home.endswith("sb3"):
        assert hasattr(importlib.import_module(home), name)


def test_other_names_are_not_there() -> None:
    with pytest.raises(ImportError, match=r"as_gymnasium\(make\(env, n\)\)"):
        __import__("envmgr", fromlist=["make_vec"])
    assert not hasattr(envmgr, "nonsense")


@pytest.mark.parametrize(
    ("of_checkers", "of_the_schema", "left_out"),
    [
        (keywords.ManagerKeys, ManagerConfig, {"type", "env_num"}),
        (keywords.MetricsKeys, Metrics, set()),
        (keywords.TraceKeys, Trace, set()),
        (keywords.WorkerEnvKeys, WorkerEnv, set()),
    ],
)
def test_checkers_know_all_keys(
    of_checkers: type, of_the_schema: type[Section], left_out: set[str]
) -> None:
    types = get_type_hints(of_checkers)
    assert set(types) == {field.name for field in keys_of(of_the_schema)} - left_out


def test_types_of_keys_are_of_what_may_be_given() -> None:
    for name, given in get_type_hints(keywords.ManagerKeys).items():
        assert not re.search(r"\btuple\[", str(given)), f"{name}: a list may be given, too"
