"""Mistakes that type checkers find in programs: each is one, or its mark is too much.

Nothing here is run. `python -m tests.docs.typed` gives it to mypy and basedpyright, with the
examples.
"""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np

from envmgr import EnvTimestep, RolloutCollector, create_env_manager, make

factory = partial(gymnasium.make, "CartPole-v1")


def what_is_known() -> None:
    """Use what checkers know the types of."""
    manager = make([factory, factory], seed=0, step_timeout=1.0, worker_env={"set": {"A": "1"}})
    observations: dict[int, np.ndarray] = manager.ready_obs
    timesteps: dict[int, EnvTimestep] = manager.step(dict.fromkeys(observations, 0))
    gathered: dict[int, EnvTimestep] = manager.recv()
    timesteps.update(gathered)
    trees = make("CartPole-v1", env_num=2, type="subprocess_v2", seed=0)
    print(trees.ready_obs.shape, trees.step([0, 1])[0].env_id)
    RolloutCollector(manager, n_steps=4)


def mistakes() -> None:
    """Make mistakes that checkers have to find."""
    make("CartPole-v1", num_envs=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    make("CartPole-v1", seed="one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    make(  # type: ignore[call-overload]
        "CartPole-v1",
        on_failure="retry",  # pyright: ignore[reportArgumentType]
    )
    make(  # type: ignore[call-overload]
        "CartPole-v1",
        type="subprocess_v2",
        num_envs=2,  # pyright: ignore[reportCallIssue]
    )
    created = create_env_manager({"type": "base", "env_num": 1}, env_fn=[factory])
    created.stepp({})  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    manager = make("CartPole-v1")
    manager.stepp({})  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    _ = manager.step({})[0].observation  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    _ = manager.ready_obs.shape  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    manager.reset(seed=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    manager.step([0, 1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
