"""Training with tianshou itself; run by `make test-trainers`, in its environment."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import SubprocVectorEnv, VectorEnvNormObs
from tianshou.utils.net.common import Net

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
