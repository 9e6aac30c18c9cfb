"""tianshou's DQN learns CartPole on envmgr's workers.

    pip install rl-env-manager tianshou
    python examples/tianshou_dqn.py

The vector env is the only line that differs from a script for tianshou's own SubprocVectorEnv.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from plot_curves import write_curve
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from envmgr.adapters.tianshou import EnvmgrVectorEnv

TASK = "CartPole-v1"
GOAL = 195.0
N_TRAINING, N_TEST = 8, 20


class TestCollector(Collector):  # type: ignore[type-arg]
    """A collector that notes the mean return of each of its collections."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returns: list[float] = []

    def collect(self, **kwargs: Any) -> Any:
        """Collect."""
        stats = super().collect(**kwargs)
        if stats.returns_stat is not None:
            self.returns.append(float(stats.returns_stat.mean))
        return stats


def main() -> int:
    """Train, and say what came of it; 0 if the goal was reached."""
    parser = argparse.ArgumentParser(description="DQN on CartPole with tianshou.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=Path, help="write the learning curve into this file")
    asked = parser.parse_args()
    seed = asked.seed
    torch.set_num_threads(1)  # the workers need the other cores
    np.random.seed(seed)
    torch.manual_seed(seed)

    make_env = partial(gymnasium.make, TASK)
    training_envs = EnvmgrVectorEnv([make_env] * N_TRAINING, num_workers=2)
    test_envs = EnvmgrVectorEnv([make_env] * N_TEST, num_workers=2)
    training_envs.seed(seed)
    test_envs.seed(1000 + seed)

    observation_space = training_envs.observation_space[0]
    action_space = training_envs.action_space[0]
    net = Net(
        state_shape=observation_space.shape,
        action_shape=action_space.n,
        hidden_sizes=[128, 128, 128],
    )
    policy = DiscreteQLearningPolicy(
        model=net,
        action_space=action_space,
        observation_space=observation_space,
        eps_training=0.1,
        eps_inference=0.0,
    )
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.99,
        n_step_return_horizon=3,
        target_update_freq=320,
    )
    buffer = VectorReplayBuffer(20_000, buffer_num=N_TRAINING)
    training_collector = Collector(algorithm, training_envs, buffer, exploration_noise=True)
    test_collector = TestCollector(algorithm, test_envs)
    tested_at: list[int] = []
    training_collector.reset()
    training_collector.collect(n_step=64 * N_TRAINING)
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=training_collector,
            test_collector=test_collector,
            max_epochs=20,
            epoch_num_steps=5000,
            collection_step_num_env_steps=N_TRAINING,
            test_step_num_episodes=N_TEST,
            batch_size=64,
            update_step_num_gradient_steps_per_sample=0.2,
            test_fn=lambda _, env_step: tested_at.append(env_step or 0),
            stop_fn=lambda mean_return: mean_return >= GOAL,
            show_progress=False,
        )
    )
    write_curve(asked.curve, tested_at, test_collector.returns[: len(tested_at)])
    training_envs.close()
    test_envs.close()
    print(f"mean return {result.best_reward:.1f} after {result.train_step} steps")
    return 0 if result.best_reward >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
