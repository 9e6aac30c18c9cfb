"""PPO in one file learns the same on our vector env as on Gymnasium's own, and through crashes.

Needs PyTorch, and is run by `make test-trainers`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_it_learns_while_workers_die(mode: str) -> None:
    envs = ppo.make_envs(8, "envmgr", mode, crash_every=500)
    curve = ppo.train(envs, total_steps=24_576, seed=5)
    failures = envs.manager.stats()["failures"]
    envs.close()
    assert failures >= 10  # 34 to 57 in eight trainings
    assert np.mean(curve.returns[:3]) < 27  # 21 to 24 in these
    assert np.mean(curve.returns[-5:]) > 33  # 41 to 52 in these
