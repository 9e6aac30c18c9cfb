"""Training with tianshou itself; run by `make test-trainers`, in its environment."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pettingzoo.classic.tictactoe import tictactoe
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import PettingZooEnv, SubprocVectorEnv, VectorEnvNormObs
from tianshou.highlevel.config import OnPolicyTrainingConfig
from tianshou.highlevel.env import EnvFactoryRegistered, VectorEnvType
from tianshou.highlevel.experiment import ExperimentConfig, PPOExperimentBuilder
from tianshou.highlevel.params.algorithm_params import PPOParams
from tianshou.utils.net.common import Net

import envmgr
from envmgr.adapters.tianshou import EnvmgrVectorEnv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def policy_for(env: Any) -> Any:
    torch.manual_seed(0)
    space, actions = env.observation_space[0], env.action_space[0]
    net = Net(state_shape=space.shape, action_shape=actions.n, hidden_sizes=[16])
    return DiscreteQLearningPolicy(model=net, action_space=actions, observation_space=space)


class Pushing(Policy):
    """Pushes right; has a state, which tianshou's AsyncCollector relies on."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Batch:
        n = len(batch.obs)
        return Batch(act=np.ones(n, int), state=np.zeros((n, 1)) if state is None else state)


def collected(cls: Any, **kwargs: Any) -> Any:
    """Return what a collector has put into its buffer."""
    env = cls([partial(gymnasium.make, "CartPole-v1")] * 4, **kwargs)
    env.seed(7)
    buffer = VectorReplayBuffer(4000, buffer_num=4)
    collector = Collector(policy_for(env), env, buffer)
    collector.reset()
    collector.collect(n_step=1000)
    batch = buffer[:]
    env.close()
    return batch


def test_the_same_is_collected_as_with_its_own_vector_env() -> None:
    theirs = collected(SubprocVectorEnv)
    ours = collected(EnvmgrVectorEnv, num_workers=2)
    for name in ("obs", "obs_next", "act", "rew", "terminated", "truncated"):
        assert np.array_equal(theirs[name], ours[name]), name
    assert theirs.done.any()


@pytest.mark.parametrize("kwargs", [{"wait_num": 3}, {"timeout": 0.01}])
def test_asynchronous_collectors(kwargs: dict[str, Any]) -> None:
    env = EnvmgrVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 4, **kwargs)
    buffer = VectorReplayBuffer(4000, buffer_num=4)
    collector = AsyncCollector(Pushing(env.action_space[0]), env, buffer)
    collector.reset()
    assert collector.collect(n_episode=10).n_collected_episodes >= 10
    assert collector.collect(n_step=50).n_collected_steps >= 50
    owners = np.repeat(np.arange(4), [len(part) for part in buffer.buffers])
    assert np.array_equal(buffer[:].info.env_id, owners)
    env.close()


def two_players() -> PettingZooEnv:
    return PettingZooEnv(tictactoe.env())


@dataclass
class OnEnvmgr:
    """What the page on tianshou shows as `venv_type` of its high-level API."""

    cfg: dict[str, Any] = field(default_factory=dict)

    def create_venv(self, factories: Any) -> EnvmgrVectorEnv:
        return EnvmgrVectorEnv(factories, **self.cfg)


def learned(venv_type: Any, folder: Path) -> dict[str, Any]:
    """Return the weights that its high-level PPO ends with."""
    training = OnPolicyTrainingConfig(
        max_epochs=2,
        epoch_num_steps=256,
        batch_size=64,
        num_training_envs=4,
        num_test_envs=2,
        test_step_num_episodes=2,
        buffer_size=256,
        collection_step_num_env_steps=128,
    )
    experiment = ExperimentConfig(watch=False, persistence_base_dir=str(folder))
    env_factory = EnvFactoryRegistered(task="CartPole-v1", venv_type=venv_type)
    builder = (
        PPOExperimentBuilder(env_factory, experiment, training)
        .with_ppo_params(PPOParams(lr=1e-3))
        .with_actor_factory_default((16,))
        .with_critic_factory_default((16,))
    )
    world = builder.build().run(run_name="run").world
    world.envs.training_envs.close()
    world.envs.test_envs.close()
    weights: dict[str, Any] = world.algorithm.policy.state_dict()
    return weights


def test_its_high_level_api_learns_the_same(tmp_path: Path) -> None:
    theirs = learned(VectorEnvType.SUBPROC_SHARED_MEM_AUTO, tmp_path / "theirs")
    ours = learned(OnEnvmgr({"num_workers": 2}), tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        assert torch.equal(values, ours[name]), name


def test_its_multi_agent_envs_have_a_reward_for_each_agent() -> None:
    manager = envmgr.create_env_manager(
        {"type": "subprocess", "auto_reset": False, "check_actions": False},
        env_fn=[two_players] * 2,
        observation_space=gymnasium.Space(),
    )
    envs = {"theirs": SubprocVectorEnv([two_players] * 2), "ours": envmgr.as_tianshou(manager)}
    told: dict[str, list[Any]] = {"theirs": [], "ours": []}
    for name, env in envs.items():
        env.reset()
        for actions in ([0, 1], [1, 2], [3, 4], [4, 5], [6, 7]):
            obs, rewards, terminated, truncated, _ = env.step(np.array(actions))
            players = [one["agent_id"] for one in obs]
            told[name].append((players, rewards.tolist(), terminated.tolist(), truncated.tolist()))
        env.close()
    assert told["ours"] == told["theirs"]
    assert told["ours"][-1][1:] == ([[1, -1]] * 2, [True] * 2, [False] * 2)


def test_its_wrappers_take_it() -> None:
    env = VectorEnvNormObs(EnvmgrVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2))
    obs, _ = env.reset()
    assert obs.shape == (2, 4)
    env.step(np.array([0, 1]))
    env.close()


@pytest.mark.timeout(900)
def test_dqn_learns_cartpole() -> None:
    example = EXAMPLES / "tianshou_dqn.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
