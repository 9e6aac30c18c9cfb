"""Env factories from the section `env` of a config."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from easydict import EasyDict
from gymnasium.spaces import Discrete

from envmgr.config.env_factories import ConfiguredEnv, env_factories
from envmgr.config.imports import FilePolicy
from envmgr.config.sections import EnvConfig
from envmgr.env.adapt import as_base_env
from envmgr.errors import ConfigError, UnknownKeyError

MODULE = """
import gymnasium
from gymnasium.spaces import Discrete

class Env(gymnasium.Env):
    observation_space = Discrete(5)
    action_space = Discrete(2)
    def __init__(self, start=0, tags=None):
        self.start = start
        self.tags = tags
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.start, {}
    def step(self, action):
        return 1, 1.0, False, False, {}

class Shift(gymnasium.ObservationWrapper):
    def __init__(self, env, by=1, times=1):
        super().__init__(env)
        self.by, self.times = by, times
    def observation(self, observation):
        return (observation + self.by) * self.times

class Group:
    @staticmethod
    def build(**kwargs):
        return Env(**kwargs)

not_callable = 3
gymnasium.register("Named-v0", entry_point="gymnasium.envs.toy_text:BlackjackEnv")
gymnasium.register("VectorOnly-v0", vector_entry_point=Env)
gymnasium.register("Versions-v1", entry_point=Env)
gymnasium.register("Versions-v2", entry_point=Env)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an importable module with envs; imported by nobody yet."""
    name = "spec_test_envs"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registered = dict(gymnasium.registry)
    yield name
    sys.modules.pop(name, None)
    gymnasium.registry.clear()
    gymnasium.registry.update(registered)


def build(cfg: Any) -> Any:
    (factory,) = env_factories(cfg, 1)
    return factory()


# -- ids --------------------------------------------------------------------------------------


def test_an_id_is_made_as_gymnasium_does() -> None:
    factories = env_factories({"id": "CartPole-v1", "kwargs": {"max_episode_steps": 3}}, 4)
    assert len(factories) == 4
    first, second = factories[0](), factories[1]()
    assert first is not second
    assert first.spec == gymnasium.make("CartPole-v1", max_episode_steps=3).spec
    base = as_base_env(first, 0)
    base.reset()
    assert [base.step(0).done for _ in range(3)] == [False, False, True]


def test_kwargs_reach_the_env_and_gymnasium() -> None:
    env = build({"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "map_name": "8x8"}})
    assert env.observation_space.n == 64
    checked = build({"id": "CartPole-v1", "kwargs": {"disable_env_checker": True}})
    assert "PassiveEnvChecker" not in str(checked)
    assert "PassiveEnvChecker" in str(build({"id": "CartPole-v1"}))


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("Nope/CartPole-v1", "CartPole-v1"),
        ("frozenlake-v1", "FrozenLake-v1"),
        ("zzzqq", "no id is like it"),
        ("Cart Pole", "CartPole"),
    ],
)
def test_an_unknown_id_names_the_nearest(env_id: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)env.id is '{env_id}'.*{near}.*module:Name-v0"):
        env_factories({"id": env_id}, 2)


def test_a_class_is_no_id() -> None:
    with pytest.raises(ConfigError, match=r"it is env\.entry, not env\.id"):
        env_factories({"id": "json:Env"}, 2)


def test_an_id_may_name_the_module_that_registers_it(module: str) -> None:
    registered = dict(gymnasium.registry)
    data = pickle.dumps(env_factories({"id": f"{module}:Named-v0"}, 1))
    del sys.modules[module]  # now as in a worker that has imported nothing
    gymnasium.registry.clear()
    gymnasium.registry.update(registered)
    (factory,) = pickle.loads(data)
    assert module not in sys.modules
    assert factory().spec.id == "Named-v0"
    assert "Named-v0" in gymnasium.registry


def test_an_id_that_only_this_process_has_registered_works_elsewhere(module: str) -> None:
    gymnasium.register("Local-v0", entry_point=f"{module}:Env", max_episode_steps=2)
    data = pickle.dumps(env_factories({"id": "Local-v0", "kwargs": {"start": 2}}, 1))
    del gymnasium.registry["Local-v0"]
    env = pickle.loads(data)[0]()
    assert env.reset()[0] == 2
    assert env.spec.max_episode_steps == 2


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env\.id.*no_such_module"):
        env_factories({"id": "no_such_module:Env-v0"}, 1)


def test_vector_only_ids_are_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="vector env only"):
        env_factories({"id": f"{module}:VectorOnly-v0"}, 1)


def test_versions_are_settled_once_with_gymnasiums_warnings(
    module: str, recwarn: pytest.WarningsRecorder
) -> None:
    (latest,) = env_factories({"id": f"{module}:Versions"}, 1)
    assert "without a version" in str(recwarn.pop(UserWarning).message)
    (old,) = env_factories({"id": f"{module}:Versions-v1"}, 1)
    assert "out of date" in str(recwarn.pop(Warning).message)
    assert latest().spec.id == "Versions-v2"
    assert old().spec.id == "Versions-v1"
    assert not recwarn.list


# -- entries ----------------------------------------------------------------------------------


def test_an_entry_is_called_with_its_kwargs(module: str) -> None:
    env = build({"entry": f"{module}:Env", "kwargs": {"start": 3}})
    assert env.reset()[0] == 3
    nested = build(EnvConfig.from_mapping({"entry": f"{module}:Group.build"}))
    assert nested.reset()[0] == 0


def test_an_argument_that_nobody_takes_names_the_one_that_is_like_it(module: str) -> None:
    entry = f"{module}:Env"
    for cfg, says in (
        ({"entry": entry, "kwargs": {"strat": 1}}, "[Dd]id you mean 'start'"),
        ({"id": "CartPole-v1", "kwargs": {"sutton_bato_reward": 1}}, "mean 'sutton_barto_reward'"),
        ({"entry": entry, "wrappers": [{"path": f"{module}:Shift", "kwargs": {"bye": 2}}]}, "'by'"),
        ({"entry": entry, "kwargs": {"zzz": 1}}, "unexpected keyword argument 'zzz'$"),
        ({"entry": f"{module}:Group.build", "kwargs": {"tgas": 1}}, "argument 'tgas'"),
    ):
        with pytest.raises(TypeError, match=says) as caught:
            build(cfg)
        assert "mean" not in str(caught.value) or str(caught.value).lower().count("mean") == 1


def test_every_env_gets_its_own_kwargs(module: str) -> None:
    cfg = EasyDict(entry=f"{module}:Env", kwargs={"tags": {"x": [1]}})
    factories = env_factories(cfg, 2)
    first = factories[0]()
    first.tags["x"].append(2)
    assert type(first.tags) is dict
    assert factories[0]().tags == {"x": [1]}
    assert factories[1]().tags == {"x": [1]}
    assert cfg.kwargs.tags.x == [1]


@pytest.mark.parametrize("name", ["Missing", "not_callable"])
def test_an_entry_that_is_not_there_is_refused_before_anything_starts(
    module: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"env\.entry is '{module}:{name}'"):
        env_factories({"entry": f"{module}:{name}"}, 1)


# -- wrappers ---------------------------------------------------------------------------------


def test_wrappers_are_put_on_from_the_inside_out(module: str) -> None:
    cfg = {
        "entry": f"{module}:Env",
        "kwargs": {"start": 1},
        "wrappers": [
            {"path": f"{module}:Shift", "kwargs": {"by": 2}},
            {"path": f"{module}.Shift", "kwargs": {"by": 0, "times": 10}},
        ],
    }
    env = build(cfg)
    assert env.reset()[0] == 30
    assert env.times == 10


@pytest.mark.parametrize(
    "path", ["gymnasium.wrappers:FlattenObservation", "gymnasium.wrappers.FlattenObservation"]
)
def test_gymnasiums_wrappers(path: str) -> None:
    env = as_base_env(build({"id": "Blackjack-v1", "wrappers": [path]}), 0)
    env.seed(0)
    assert env.reset().shape == env.observation_space.shape
    assert len(env.observation_space.shape) == 1


@pytest.mark.parametrize(
    ("wrappers", "text"),
    [
        (["gymnasium.wrappers:FlatenObservation"], r"env\.wrappers\[0\].*FlattenObservation"),
        (["gymnasium.wrappers:TimeLimit", "nothing_here:X"], r"env\.wrappers\[1\].*nothing_here"),
        ("gymnasium.wrappers:TimeLimit", r"env\.wrappers"),
        ([3], r"env\.wrappers"),
    ],
)
def test_wrappers_that_are_not_there_are_refused(wrappers: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        env_factories({"id": "CartPole-v1", "wrappers": wrappers}, 1)


def test_a_config_as_a_mapping_has_wrappers_by_name() -> None:
    wrapper = gymnasium.wrappers.FlattenObservation
    with pytest.raises(ConfigError, match=r"entry 0: a class .*'gymnasium\.wrappers\S*:Flatten"):
        EnvConfig.from_mapping({"id": "Blackjack-v1", "wrappers": [wrapper]})
    with pytest.raises(ConfigError, match=r"by name: 'package\.module:Wrapper'"):
        EnvConfig.from_mapping({"id": "Blackjack-v1", "wrappers": [lambda env: env]})


# -- the section ------------------------------------------------------------------------------


def test_factories_can_be_pickled_and_pickle_small(module: str) -> None:
    cfg = {
        "entry": f"{module}:Env",
        "kwargs": {"start": 1},
        "wrappers": [{"path": f"{module}:Shift"}],
    }
    factories = env_factories(cfg, 64)
    data = pickle.dumps(factories)
    assert len(data) < 2000
    copies = pickle.loads(data)
    assert all(type(copy) is ConfiguredEnv for copy in copies)
    assert copies[63]().reset()[0] == 2


@pytest.mark.parametrize(
    ("cfg", "error", "text"),
    [
        ({}, ConfigError, r"env\.id .*or env\.entry"),
        ({"id": "CartPole-v1", "entry": "a:b"}, ConfigError, "one of the two"),
        ({"ids": "CartPole-v1"}, UnknownKeyError, "'id'"),
        ({"id": 3}, ConfigError, r"env\.id"),
        ({"entry": "no_colon"}, ConfigError, r"env\.entry"),
        ({"id": "CartPole-v1", "kwargs": [1]}, ConfigError, r"env\.kwargs"),
        ({"id": "CartPole-v1", "kwargs": {1: 2}}, ConfigError, r"env\.kwargs"),
        ([], ConfigError, "env"),
    ],
)
def test_malformed_sections(cfg: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        env_factories(cfg, 1)


@pytest.mark.parametrize("env_num", [0, -1, None, 1.0, True])
def test_env_num_is_a_positive_integer(env_num: Any) -> None:
    with pytest.raises(ConfigError, match="env_num"):
        env_factories({"id": "CartPole-v1"}, env_num)


@pytest.mark.parametrize(
    "cfg",
    [
        {"id": "spec_test_envs:Named-v0"},
        {"entry": "spec_test_envs:Env"},
        {"id": "CartPole-v1", "wrappers": ["spec_test_envs:Shift"]},
    ],
)
def test_only_allowed_modules_are_imported(module: str, cfg: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="spec_test_envs"):
        env_factories(cfg, 1, policy=FilePolicy())
    assert module not in sys.modules
    assert env_factories(cfg, 1, policy=FilePolicy((module,)))


def test_the_same_seed_gives_the_same_episode_in_every_env() -> None:
    envs = [
        as_base_env(factory(), i)
        for i, factory in enumerate(env_factories({"id": "CartPole-v1"}, 2))
    ]
    for env in envs:
        env.seed(3)
    np.testing.assert_array_equal(envs[0].reset(), envs[1].reset())
    assert envs[0].action_space == Discrete(2)
