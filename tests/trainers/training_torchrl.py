"""TorchRL's own checks, rollouts and collectors; run by `make test-trainers`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper
from torchrl.envs.utils import check_env_specs

import envmgr
from envmgr.adapters.torchrl import EnvmgrEnv, as_torchrl
from envmgr.errors import ConfigError

N = 3


class Sample(gymnasium.Env[Any, Any]):
    """Draws from its spaces; some actions end the process."""

    def __init__(self, observed: Any, acted: Any, ends_process: bool = False) -> None:
        self.observation_space, self.action_space = copy.deepcopy(observed), acted
        self.observation_space.seed()  # each draws its own
        self.ends_process = ends_process

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = 4 + (options or {}).get("longer", 0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        if self.ends_process and action == 1:
            os._exit(3)
        self.left -= 1
        return self.observation_space.sample(), 0.5, self.left == 0, False, {}


class Drawn:
    """A policy that draws, the same each time."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def __call__(self, td: Any) -> Any:
        return td.set("action", torch.from_numpy(self._generator.integers(0, 2, N)))


LONGER = {"options": {"longer": 3}}
UNIT = Box(-1, 1, (2,), np.float32)
TREE = Dict({"a": UNIT, "in": Dict({"n": Discrete(3), "bits": MultiBinary(2)})})


@pytest.fixture
def cartpoles() -> Iterator[Any]:
    fns = [partial(gymnasium.make, "CartPole-v1")] * N
    env = EnvmgrEnv(fns, num_workers=2, categorical_action_encoding=True)
    yield env
    if not env.is_closed:
        env.close()


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    ("observed", "acted"),
    [(UNIT, Discrete(4)), (TREE, MultiDiscrete([2, 3])), (Box(0, 255, (4, 4), np.uint8), UNIT)],
)
def test_check_env_specs_passes(observed: Any, acted: Any, categorical: bool) -> None:
    manager = envmgr.make(partial(Sample, observed, acted), N, type="base")
    env = as_torchrl(manager, categorical_action_encoding=categorical)
    assert env.batch_size == (N,)
    check_env_specs(env)
    env.close()
    assert manager.closed


def test_rollouts_are_those_of_gym_wrapper(cartpoles: Any) -> None:
    wrapped = GymWrapper(
        envmgr.as_gymnasium(envmgr.make("CartPole-v1", N, type="base"), "SameStep"),
        categorical_action_encoding=True,
    )
    found = []
    for env in (cartpoles, wrapped):
        how = {"break_when_any_done": False, "auto_reset": False, "tensordict": env.reset(seed=5)}
        found.append(env.rollout(150, Drawn(), **how))
    ours, theirs = found
    assert ours["next", "done"].sum() > 10
    for key in ("observation", "done", ("next", "observation"), ("next", "reward")):
        assert torch.equal(ours[key], theirs[key]), key
    for key in ("terminated", "truncated", "done"):
        assert torch.equal(ours["next", key], theirs["next", key]), key
    wrapped.close()


def test_a_mask_resets_some_envs_in_the_middle_of_their_episodes(cartpoles: Any) -> None:
    td = cartpoles.reset(seed=[1, 2, 3])
    first = td["observation"].clone()
    td = cartpoles.step(td.set("action", torch.tensor([0, 1, 0])))["next"]
    stepped = td["observation"].clone()
    mask = torch.tensor([[False], [True], [False]])
    td = cartpoles.reset(td.set("_reset", mask))
    assert torch.equal(td["observation"][[0, 2]], stepped[[0, 2]])
    assert not torch.equal(td["observation"][1], first[1])
    cartpoles.set_seed(1)
    assert torch.equal(cartpoles.reset()["observation"], first), "seeds are 1, 2, 3"
    assert not torch.equal(cartpoles.reset()["observation"], first), "and are used once"


def test_transforms_and_collectors(cartpoles: Any) -> None:
    env = TransformedEnv(cartpoles, RewardSum())
    env.append_transform(StepCounter(max_steps=12))  # truncates and resets in mid-episode
    collector = Collector(env, None, frames_per_batch=N * 40, total_frames=N * 80, device="cpu")
    for batch in collector:
        assert batch.batch_size == (N, 40)
        counted = batch["next", "step_count"]
        assert counted.max() == 12
        assert torch.equal(batch["next", "episode_reward"], counted.float())
    collector.shutdown()


def test_an_env_that_fails_ends_its_episode_as_a_truncated_one() -> None:
    env = EnvmgrEnv(
        [partial(Sample, UNIT, Discrete(2), True)] * N, categorical_action_encoding=True
    )
    td = env.reset()
    before = td["observation"].clone()
    out, td = env.step_and_maybe_reset(td.set("action", torch.tensor([0, 1, 0])))
    after = out["next"]
    assert after["abnormal"].view(-1).tolist() == [False, True, False]
    assert torch.equal(after["abnormal"], after["truncated"])
    assert not after["terminated"].any()
    assert after["reward"].view(-1).tolist() == [0.5, 0.0, 0.5]
    assert torch.equal(after["observation"][1], before[1]), "the last good one"
    assert env.errors[1].startswith("EnvCrash: the worker of env 1")
    assert not td["done"].any()
    assert not torch.equal(td["observation"][1], before[1])
    env.step(td.set("action", torch.tensor([0, 0, 0])))
    env.close()


def test_what_it_cannot_take_is_refused(cartpoles: Any) -> None:
    manager = envmgr.make(partial(Sample, Text(3), Discrete(2)), N, type="base")
    with pytest.raises(ConfigError, match="FlattenObservation"):
        as_torchrl(manager)
    assert manager.closed
    td = cartpoles.reset().set("action", torch.zeros(N, dtype=torch.int64))
    with pytest.raises(ConfigError, match="_step"):
        cartpoles.step(td.set("_step", torch.tensor([True, False, True])))


def test_actions_may_have_gradients() -> None:
    env = as_torchrl(envmgr.make(partial(Sample, UNIT, UNIT), N, type="base"))
    weight = torch.zeros(2, requires_grad=True)
    out = env.rollout(3, lambda td: td.set("action", td["observation"] * weight))
    assert out["action"].requires_grad
    env.close()


@pytest.mark.parametrize("key", ["reward", "action", "done", "terminated", "abnormal"])
def test_keys_of_observations_that_are_taken_are_refused(key: str) -> None:
    manager = envmgr.make(partial(Sample, Dict({key: UNIT, "x": UNIT}), UNIT), N, type="base")
    with pytest.raises(ConfigError, match=f"keys \\['{key}'\\], which are TorchRL's own"):
        as_torchrl(manager)
    assert manager.closed


def test_rewards_of_several_numbers_are_refused() -> None:
    class Several(Sample):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, np.ones(2), *rest

    env = as_torchrl(envmgr.make(partial(Several, UNIT, UNIT), N, type="base"))
    with pytest.raises(ConfigError, match=r"as_torchrl takes one number .* the shape \(2,\)"):
        env.rollout(1)
    env.close()


@pytest.mark.parametrize("extra", [False, True])
def test_ended_episodes_are_followed_as_torchrl_has_it(extra: bool) -> None:
    found = []
    for generic in (False, True):
        env = as_torchrl(envmgr.make(partial(Sample, TREE, Discrete(2)), N, type="base"))
        td = env.reset(seed=3)
        td = env.reset(td.set("_reset", torch.tensor([[True], [False], [False]])), **LONGER)
        steps = []
        for _ in range(9):
            td.set("action", env.action_spec.zero())
            td = env.step(td)
            steps.append(td["next"].clone())
            td = env._step_mdp(td)
            if extra:
                td.set("hidden", torch.ones(N, 2))
            td = EnvBase.maybe_reset(env, td) if generic else env.maybe_reset(td)
            steps.append(td.clone())
        env.close()
        found += [torch.stack(steps[::2]), torch.stack(steps[1::2])]
    assert found[0]["done"].any()
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert (ours == theirs).all()
