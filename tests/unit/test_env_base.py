"""The BaseEnv protocol and its defaults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from easydict import EasyDict
from gymnasium.spaces import Box, Discrete

from envmgr.env.base import BaseEnv
from envmgr.errors import ConfigError, EnvAttributeError
from envmgr.types import EnvTimestep


class Counter(BaseEnv):
    """Ends after three steps; spaces as plain attributes."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 3, (1,), np.float32)
        self.action_space = Discrete(2)
        self.n = 0

    def reset(self, **params: Any) -> Any:
        self.n = params.get("start", 0)
        return np.array([self.n], np.float32)

    def step(self, action: Any) -> EnvTimestep:
        self.n += 1
        return EnvTimestep(np.array([self.n], np.float32), 1.0, self.n >= 3, {})

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class LateSpaces(Counter):
    """Spaces as properties without setters, as many of DI-engine's envs have them."""

    def __init__(self) -> None:
        self.n = 0

    @property
    def observation_space(self) -> Any:
        return Box(0, 3, (1,), np.float32)

    @property
    def action_space(self) -> Any:
        return Discrete(2)

    @property
    def reward_space(self) -> Any:
        return Box(0, 1, (1,), np.float32)


@pytest.mark.parametrize("missing", ["reset", "step", "seed", "close"])
def test_a_class_without_one_of_the_four_methods_cannot_be_built(missing: str) -> None:
    methods = {n: lambda self: None for n in ("reset", "step", "seed", "close") if n != missing}
    with pytest.raises(TypeError, match=missing):
        type("Partial", (BaseEnv,), methods)()


def test_spaces_may_be_attributes_or_read_only_properties() -> None:
    assert Counter().observation_space.shape == (1,)
    assert LateSpaces().observation_space.shape == (1,)
    assert Counter().reward_space is None
    assert LateSpaces().reward_space.shape == (1,)


def test_defaults_that_work() -> None:
    env = Counter()
    env.action_space.seed(0)
    actions = {int(env.random_action()) for _ in range(50)}
    assert actions == {0, 1}
    transitions = [{"reward": 1.0}]
    assert env.reward_shaping(transitions) is transitions
    assert repr(env) == "Counter()"


@pytest.mark.parametrize(
    ("method", "argument"),
    [("render", "rgb_array"), ("enable_save_replay", "x"), ("enable_save_figure", "x")],
)
def test_what_an_env_cannot_do_is_refused_by_name(method: str, argument: str) -> None:
    with pytest.raises(EnvAttributeError, match=rf"Counter cannot .*{method}\("):
        getattr(Counter(), method)(argument)


@pytest.mark.parametrize("kind", ["collector", "evaluator"])
@pytest.mark.parametrize("make", [dict, EasyDict])
def test_env_configs_are_independent_copies(kind: str, make: Any) -> None:
    key = f"{kind}_env_num"
    cfg = make({key: 3, "scale": {"x": [1]}})
    copies = getattr(Counter, f"create_{kind}_env_cfg")(cfg)
    assert len(copies) == 3
    assert all(dict(one) == {"scale": {"x": [1]}} for one in copies)
    assert all(type(one) is make for one in copies)
    assert key not in cfg
    copies[0]["scale"]["x"].append(2)
    assert copies[1]["scale"]["x"] == [1]
    assert cfg["scale"]["x"] == [1]


@pytest.mark.parametrize("number", [None, 0, "2", 1.5, True])
def test_env_configs_need_a_positive_number(number: Any) -> None:
    cfg = {"collector_env_num": number}
    with pytest.raises(ConfigError, match="collector_env_num"):
        Counter.create_collector_env_cfg(cfg)
    assert "collector_env_num" in cfg
    with pytest.raises(ConfigError, match="evaluator_env_num"):
        Counter.create_evaluator_env_cfg({})
