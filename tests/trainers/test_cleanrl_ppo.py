"""PPO in one file learns the same on our vector env as on Gymnasium's own, and through crashes.

Needs PyTorch, and is run by `make test-trainers`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from envmgr.adapters.gymnasium import EnvmgrVectorEnv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


sys.path.insert(0, str(EXAMPLES))  # where workers find the module, too

import cleanrl_ppo as ppo  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_same_seed_gives_the_same_curve(mode: str) -> None:
    curves = []
    for vector in ("envmgr", "async"):
        envs = ppo.make_envs(8, vector, mode)
        curves.append(ppo.train(envs, total_steps=12_000, seed=5))
        envs.close()
    assert curves[0].returns == curves[1].returns, "every number of it"
    assert len(curves[0].returns) == 11


class Crashing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Its process dies in one step of two thousand."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.0005:
            os._exit(7)
        return super().step(action)


def test_it_learns_while_envs_crash() -> None:
    envs = EnvmgrVectorEnv(
        [lambda: Crashing(ppo.make_env())] * 8,
        autoreset_mode="SameStep",
        max_failures=1000,
        max_failures_total=1000,
    )
    curve = ppo.train(envs, total_steps=40_960)
    failures = envs.manager.stats()["failures"]
    envs.close()
    assert failures > 5
    assert max(curve.returns[-10:]) > 4 * curve.returns[0]
