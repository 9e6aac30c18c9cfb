"""envmgr's kinds in a real DI-engine: make test-trainers ARGS=ding."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gym
import numpy as np
import pytest
import torch
import treetensor.numpy as tnp
from ding.envs import (
    BaseEnv,
    BaseEnvManager,
    BaseEnvTimestep,
    create_env_manager,
    get_env_manager_cls,
)
from ding.envs import SubprocessEnvManagerV2 as DingsV2
from ding.framework import OnlineRLContext, task
from ding.framework.middleware import interaction_evaluator
from ding.policy import get_random_policy
from ding.torch_utils import to_ndarray, to_tensor
from ding.utils import ENV_MANAGER_REGISTRY
from easydict import EasyDict

from envmgr.adapters import ding
from envmgr.errors import EnvCrash

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROOM = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Inside(gym.Env):
    """What renders."""

    def render(self, mode: str = "human") -> Any:
        return np.full((4, 5, 3), 7, np.uint8) if mode == "rgb_array" else None


class Counter(BaseEnv):
    """Episodes of five steps; some action ends the process."""

    def __init__(self, cfg: Any = None) -> None:
        self.observation_space, self.action_space = ROOM, gym.spaces.Discrete(3)
        self.reward_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> Any:
        self._env, self.steps = Inside(), 0
        return self.rng.random(2, dtype=np.float32)

    def step(self, action: Any) -> Any:
        assert type(action) is np.ndarray
        assert action.shape == (1,), "what DI-engine's policies give arrives as it is"
        if action[0] == 2:
            os._exit(3)
        self.steps += 1
        done = self.steps == 5
        info = {"eval_episode_return": np.array([0.5 * self.steps], np.float32)} if done else {}
        reward = np.array([0.5], np.float32)
        return BaseEnvTimestep(self.rng.random(2, dtype=np.float32), reward, done, info)

    def close(self) -> None: ...

    def __repr__(self) -> str:
        return "Counter"


def built(key: str, n: int = 2, **settings: Any) -> Any:
    """Build a manager as DI-engine's entries do."""
    chosen = EasyDict(type=key, import_names=["envmgr.adapters.ding"])
    config = get_env_manager_cls(chosen).default_config()
    config.update(chosen)
    config.update(settings)
    return create_env_manager(config, [Counter] * n)


@pytest.fixture
def manager(request: Any) -> Iterator[Any]:
    found = built(request.param)
    found.seed(0)
    yield found
    found.close()


def acts(*numbers: int) -> dict[int, Any]:
    return {i: np.array([number]) for i, number in enumerate(numbers)}


@pytest.mark.parametrize("key", ding.KINDS)
def test_a_config_selects_each_kind_by_its_key(key: str) -> None:
    manager = built(key)
    assert type(manager) is ding.KINDS[key]
    assert isinstance(manager, BaseEnvManager)
    assert manager._episode_num == float("inf")
    assert manager.cfg.step_wait_timeout == (0.01 if "async" in key else 0)
    theirs = [name for name in vars(BaseEnvManager) if not name.startswith("_")]
    found = {name: inspect.getattr_static(type(manager), name) for name in theirs}
    inherited = [name for name in theirs if found[name] is vars(BaseEnvManager)[name]]
    assert inherited == ["config"], "all that is public of DI-engine's class is envmgr's here"


def test_the_kinds_take_over_if_the_user_says_so() -> None:
    before = dict(ENV_MANAGER_REGISTRY)
    try:
        ding.take_over()
        assert ENV_MANAGER_REGISTRY.get("subprocess") is ding.SyncSubprocessEnvManager
        assert ENV_MANAGER_REGISTRY.get("gym_vector") is before["gym_vector"]
        assert "async_subprocess_v2" not in ENV_MANAGER_REGISTRY
    finally:
        ENV_MANAGER_REGISTRY.update(before)


@pytest.mark.parametrize("manager", ["envmgr_subprocess"], indirect=True)
def test_spaces_pictures_and_refusals_are_those_of_di_engine(manager: Any) -> None:
    with pytest.raises(AssertionError):
        manager.reset([])
    policy = get_random_policy(EasyDict(policy={}), _collecting_policy(), manager)
    assert type(manager.action_space) is gym.spaces.Discrete  # before the launch, too
    assert policy.forward({0: None})[0]["action"].shape == (1,)
    manager.launch()
    assert manager.observation_space == ROOM
    assert type(manager.reward_space) is gym.spaces.Box
    assert {i: image.shape for i, image in manager.ready_imgs.items()} == {
        0: (4, 5, 3),
        1: (4, 5, 3),
    }
    with pytest.raises(AssertionError):
        manager.launch()
    manager.close()
    for call in (manager.step, manager.reset):
        with pytest.raises(AssertionError):
            call([])


def _collecting_policy() -> Any:
    names = ("process_transition", "get_train_sample", "reset", "get_attribute")
    return EasyDict(dict.fromkeys(names))


@pytest.mark.parametrize("manager", ["envmgr_subprocess"], indirect=True)
def test_after_a_crash_timesteps_can_be_made_tensors_and_have_a_return(manager: Any) -> None:
    manager.launch()
    for actions in (acts(0, 0), acts(1, 1), acts(2, 0)):
        timesteps = manager.step(actions)
    crashed, other = (to_tensor(timesteps)[i] for i in (0, 1))
    assert crashed.done
    assert not other.done
    assert crashed.reward.shape == other.reward.shape == (1,)
    assert torch.as_tensor(crashed.info["eval_episode_return"]).item() == 1.0
    assert crashed.info["error"].startswith("EnvCrash: the worker of env 0")
    assert type(manager.env_failures[0]) is EnvCrash
    while len(manager.ready_obs) < 2:  # it waits for one of them
        manager.step({1: np.array([0])} if 1 in manager.ready_obs else acts(0))
    assert manager.step(acts(0, 0)).keys() == {0, 1}


def test_an_evaluator_of_the_middleware_goes_on_when_an_env_crashes() -> None:
    manager = built("envmgr_subprocess_v2")
    cfg = EasyDict(
        seed=0,
        env={"n_evaluator_episode": 4, "stop_value": 100},
        policy={"eval": {"evaluator": {"eval_freq": 1}}},
    )

    class Policy:
        calls = 0

        def forward(self, obs: Any) -> Any:
            self.calls += 1
            return {
                i: {"action": torch.tensor([2 if self.calls == 3 and i == 1 else 0])} for i in obs
            }

        def reset(self, env_ids: Any = None) -> None: ...

    with task.start(async_mode=False, ctx=OnlineRLContext()):
        evaluate = interaction_evaluator(cfg, Policy(), manager)
        evaluate(task.ctx)
    manager.close()
    returns = (2.5, 2.5, 2.5, 1.0)  # one was cut short
    assert task.ctx.eval_value == pytest.approx(np.mean(returns))


def test_trees_are_those_of_di_engines_own_manager() -> None:
    ours = built("envmgr_subprocess_v2", reset_inplace=True)
    theirs = DingsV2([Counter] * 2, DingsV2.default_config())
    for manager in (ours, theirs):
        manager.seed(3)
        manager.launch()
    for _ in range(4):
        assert np.array_equal(ours.ready_obs, theirs.ready_obs)
        _assert_same(ours.step([np.array([0])] * 2), theirs.step([np.array([0])] * 2))
    _assert_same(ours.step([np.array([0])] * 2), theirs.step([np.array([0])] * 2))  # their ends
    for manager in (ours, theirs):
        manager.close()


def _assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs) is tnp.ndarray
        ours, theirs = to_ndarray(ours.json()), to_ndarray(theirs.json())
        assert ours.keys() == theirs.keys()
        assert ours.pop("info") == theirs.pop("info")
        for key, value in theirs.items():
            assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape), key
            assert np.array_equal(ours[key], value), key


def test_training_is_the_same_bit_for_bit_as_with_di_engines_own_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import ding_cartpole

    trained = []
    for manager in ("subprocess", "envmgr_subprocess"):
        result = ding_cartpole.train(manager, seed=0, max_env_step=600, folder=manager)
        del result["finish_time"]
        saved = torch.load(next(Path(manager, "ckpt").glob("*_[1-9]*")), weights_only=False)
        trained.append((result, saved["model"]))
    (theirs, their_weights), (ours, our_weights) = trained
    assert ours == theirs
    assert ours["env_step"] >= 600
    assert our_weights.keys() == their_weights.keys()
    assert all(torch.equal(our_weights[name], their_weights[name]) for name in their_weights)
