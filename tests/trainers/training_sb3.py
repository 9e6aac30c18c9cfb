"""Training with Stable-Baselines3 itself; run by `make test-trainers`, in its environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, is_vecenv_wrapped
from stable_baselines3.common.vec_env import VecMonitor as TheirVecMonitor

import envmgr
from envmgr.adapters.sb3 import EnvmgrVecEnv, VecMonitor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def curve(cls: Any, env_id: str, **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Return the episodes of a short training, and the parameters that it ends with."""
    env = make_vec_env(env_id, n_envs=4, seed=3, vec_env_cls=cls, vec_env_kwargs=kwargs)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=128, n_epochs=4, seed=3)
    model.ep_info_buffer = None
    episodes: list[Any] = []

    def note(local: dict[str, Any], _: Any) -> bool:
        found = [info["episode"] for info in local["infos"] if "episode" in info]
        episodes.extend((model.num_timesteps, one["r"], one["l"]) for one in found)
        return True

    model.learn(4096, callback=note)
    parameters = [p.detach().numpy().copy() for p in model.policy.parameters()]
    env.close()
    return episodes, parameters


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])  # Pendulum's are truncated
def test_the_learning_curve_is_that_of_its_own_vec_envs_bit_for_bit(env_id: str) -> None:
    episodes, parameters = curve(SubprocVecEnv, env_id, start_method="fork")
    assert len(episodes) >= 16
    for cls, kwargs in (
        (EnvmgrVecEnv, {}),
        (EnvmgrVecEnv, {"num_workers": 2, "reset_inplace": False}),
        *([(DummyVecEnv, {})] if env_id == "CartPole-v1" else []),  # its rewards are float32
    ):
        found, ours = curve(cls, env_id, **kwargs)
        assert found == episodes
        assert all(np.array_equal(a, b) for a, b in zip(parameters, ours, strict=True))


def test_as_sb3_is_evaluated_as_other_vec_envs_are() -> None:
    manager = envmgr.make("CartPole-v1", env_num=2, type="subprocess", reset_inplace=True)
    env = envmgr.as_sb3(manager)
    model = PPO("MlpPolicy", env, n_steps=64, seed=0)
    with pytest.warns(UserWarning, match="Monitor"):  # env_is_wrapped says that there is none
        mean, _ = evaluate_policy(model, env, n_eval_episodes=4)
    assert mean > 0
    env.close()
    assert manager.closed


def test_an_exception_of_an_env_can_be_had_in_the_trainer() -> None:
    class Failing(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("in the env")

    env = make_vec_env(
        lambda: Failing(gymnasium.make("CartPole-v1")),
        n_envs=2,
        vec_env_cls=EnvmgrVecEnv,
        vec_env_kwargs={"on_failure": "raise"},
    )
    with pytest.raises(ZeroDivisionError, match="in the env"):
        PPO("MlpPolicy", env, n_steps=16).learn(64)
    env.close()


@pytest.mark.timeout(900)
def test_ppo_learns_cartpole_while_workers_are_killed() -> None:
    """To a mean return of 450 in less than 60 000 steps, or its exit code is 1."""
    example = EXAMPLES / "sb3_ppo_killed_workers.py"
    command = [sys.executable, example, "--kill-every-s", "0.5"]  # a fast machine is done in 8 s
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = int(done.stdout.rpartition("; ")[2].split()[0])
    assert killed >= 2


def test_statistics_leave_out_what_failures_have_cut_short(tmp_path: Path) -> None:
    class Fragile(gymnasium.Wrapper):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps % 7 == 0:
                raise ZeroDivisionError("in the env")
            return super().step(action)

    venv = EnvmgrVecEnv(
        [lambda: Fragile(gymnasium.make("CartPole-v1"))] * 2,
        **{"type": "base", "max_failures": 1000, "max_failures_total": 1000},
    )
    env = VecMonitor(venv, str(tmp_path / "log"), info_keywords=("TimeLimit.truncated",))
    model = PPO("MlpPolicy", env, n_steps=64, seed=0)
    model.learn(256)
    assert is_vecenv_wrapped(env, TheirVecMonitor)
    assert venv.manager.stats()["failures"] > 20
    assert env.episode_count == len(model.ep_info_buffer or ())
    lines = (tmp_path / "log.monitor.csv").read_text().splitlines()
    assert len(lines) == 2 + env.episode_count
    env.close()
