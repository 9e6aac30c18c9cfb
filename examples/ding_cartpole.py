"""Train on CartPole with DI-engine's own entry and config, on envmgr's workers.

    python examples/ding_cartpole.py
    python examples/ding_cartpole.py --manager subprocess    # DI-engine's own, to compare

The config is that of DI-engine's zoo. What runs the envs is changed, and an episode begins as soon
as the one before it has ended, so that the same seed gives the same training, with either manager.
How to install DI-engine is in docs/guide/di-engine.md.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from easydict import EasyDict
from plot_curves import write_curve


def train(
    manager: str, seed: int, max_env_step: int, folder: str, eval_freq: int | None = None
) -> dict[str, Any]:
    """Train PPO until CartPole-v0 is solved, and return what DI-engine says of the training.

    Args:
        manager: the key of the env manager in DI-engine's registry.
        seed: of the envs and of the training.
        max_env_step: give up after so many steps of the collector's envs.
        folder: where DI-engine puts its logs and checkpoints; it should not exist.
        eval_freq: iterations between evaluations; None: as in the config.
    """
    # Here, so that --help can be had without DI-engine.
    from ding.entry import serial_pipeline_onpolicy
    from dizoo.classic_control.cartpole.config.cartpole_ppo_config import create_config, main_config

    main, create = deepcopy(main_config), deepcopy(create_config)
    main.exp_name = folder
    main.env.manager = EasyDict(reset_inplace=True)
    if eval_freq is not None:
        main.policy.eval = EasyDict(evaluator=EasyDict(eval_freq=eval_freq))
    create.env_manager = EasyDict(type=manager, import_names=["envmgr.adapters.ding"])
    serial_pipeline_onpolicy((main, create), seed=seed, max_env_step=max_env_step)
    with open(Path(folder) / "result.pkl", "rb") as file:
        result: dict[str, Any] = pickle.load(file)  # noqa: S301 (written by the line before)
    return result


def curve_of(folder: str) -> tuple[list[int], list[float]]:
    """Return steps and mean returns of the evaluations, as DI-engine wrote them for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(folder) / "log" / "serial"))
    events.Reload()
    scalars = events.Scalars("evaluator_step/eval_episode_return_mean")
    return [scalar.step for scalar in scalars], [scalar.value for scalar in scalars]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line asks, and say what came of it."""
    parser = argparse.ArgumentParser(description="PPO of DI-engine on CartPole.")
    parser.add_argument("--manager", default="envmgr_subprocess", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-env-step", type=int, default=60_000)
    parser.add_argument("--folder", default="ding_cartpole", help="for logs and checkpoints")
    parser.add_argument("--curve", type=Path, help="write the learning curve into this file")
    parser.add_argument("--eval-freq", type=int, help="iterations between evaluations")
    asked = parser.parse_args(arguments)
    result = train(asked.manager, asked.seed, asked.max_env_step, asked.folder, asked.eval_freq)
    if asked.curve is not None:
        write_curve(asked.curve, *curve_of(asked.folder))
    solved = "solved" if result["stop"] else "not solved"
    print(
        f"{solved} after {result['env_step']} env steps and {result['train_iter']} iterations: "
        f"mean return {result['eval_value']:.1f}"
    )
    return 0 if result["stop"] else 1


if __name__ == "__main__":
    sys.exit(main())
