"""Stable-Baselines3's PPO learns CartPole while workers are killed under it.

    pip install rl-env-manager stable-baselines3
    python examples/sb3_ppo_killed_workers.py

Every few seconds a worker process is killed with SIGKILL. The episode that it was in ends as a
truncated one, its env is built again behind the others, and PPO goes on: it stops when the policy
reaches a mean return of 450.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import torch
from plot_curves import write_curve
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env

from envmgr.adapters.sb3 import EnvmgrVecEnv

GOAL = 450.0
MOST_STEPS = 60_000


class KillWorkers(BaseCallback):
    """Kills a worker of the training envs every few seconds.

    Args:
        every_s: how often; 0: never.
    """

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s
        self._random = random.Random(0)
        self.killed = 0

    def _on_step(self) -> bool:
        if self._every_s and time.monotonic() >= self._next_s:
            self._next_s += self._every_s
            workers = self.training_env.manager.stats()["workers"]
            with contextlib.suppress(IndexError, ProcessLookupError):  # they may all be dead now
                os.kill(self._random.choice(workers)["pid"], signal.SIGKILL)
                self.killed += 1
        return True


class Curve(BaseCallback):
    """Notes the mean return of each evaluation, after which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        self.steps.append(self.num_timesteps)
        self.returns.append(float(self.parent.last_mean_reward))
        return True


def main() -> int:
    """Train, and say what came of it; 0 if the goal was reached."""
    parser = argparse.ArgumentParser(description="PPO on CartPole while workers are killed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every-s", type=float, default=2.0, help="0: never")
    parser.add_argument("--curve", type=Path, help="write the learning curve into this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the workers need the other cores

    failures_allowed = {"max_failures": 1000, "max_failures_total": 1000}
    env = make_vec_env(
        "CartPole-v1",
        n_envs=8,
        seed=asked.seed,
        vec_env_cls=EnvmgrVecEnv,
        vec_env_kwargs={"num_workers": 4, **failures_allowed},
    )
    evaluation_env = make_vec_env("CartPole-v1", n_envs=4, seed=1000, vec_env_cls=EnvmgrVecEnv)
    killer, curve = KillWorkers(asked.kill_every_s), Curve()
    enough = StopTrainingOnRewardThreshold(GOAL, verbose=0)
    evaluation = EvalCallback(
        evaluation_env,
        callback_on_new_best=enough,
        callback_after_eval=curve,
        n_eval_episodes=20,
        eval_freq=256,
        verbose=0,
    )
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=1e-3,
        seed=asked.seed,
    )
    model.learn(MOST_STEPS, callback=[killer, evaluation])
    if curve.steps[-1:] != [model.num_timesteps]:  # it is not told of the one that was good enough
        curve.steps.append(model.num_timesteps)
        curve.returns.append(float(evaluation.last_mean_reward))
    write_curve(asked.curve, curve.steps, curve.returns)

    failures = env.manager.stats()["failures"]
    env.close()
    evaluation_env.close()
    reached = evaluation.best_mean_reward >= GOAL
    print(
        f"mean return {evaluation.best_mean_reward:.1f} after {model.num_timesteps} steps; "
        f"{killer.killed} workers killed, {failures} failures seen"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
