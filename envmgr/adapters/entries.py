"""`as_sb3` and `as_tianshou`, which import their trainers when they are called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envmgr.manager import EnvManager

if TYPE_CHECKING:
    from envmgr.adapters.sb3 import ManagerVecEnv
    from envmgr.adapters.tianshou import ManagerVectorEnv


def as_sb3(manager: EnvManager, *, on_failure: str | None = None) -> ManagerVecEnv:
    """Return a manager as a `VecEnv` of Stable-Baselines3.

    With `reset_inplace: true`, an episode begins within the step that ended the previous one, as in
    SubprocVecEnv; without it, spare envs can hide slow resets.

    Args:
        manager: a manager with `auto_reset` and without `episode_num`; the first `reset` launches
            it. With kinds that gather only some timesteps, all are gathered.
        on_failure: "recover": the episode of an env that fails is truncated, and the env repaired;
            "raise": the exception is raised in the trainer; None: what the manager does.

    Raises:
        MissingDependencyError: stable-baselines3 is not installed.
        ConfigError: the manager's config or a space does not fit; the message says what to do.
        LaunchError: an env cannot be built.
    """
    module: Any = importlib.import_module("envmgr.adapters.sb3")
    env: ManagerVecEnv = module.ManagerVecEnv(manager, on_failure=on_failure)
    return env


def as_tianshou(
    manager: EnvManager,
    *,
    wait_num: int | None = None,
    timeout: float | None = None,
    on_failure: str | None = None,
) -> ManagerVectorEnv:
    """Return a manager as a vector env of tianshou.

    Args:
        manager: a manager with `auto_reset: false`, as tianshou resets envs itself, and without
            `episode_num`; the first `reset` launches it.
        wait_num: how many timesteps a step waits for; None for those of all actions it was given.
            Waiting for fewer is for `AsyncCollector`.
        timeout: seconds after which a step returns what has arrived, if anything has.
        on_failure: "recover": the episode of an env that fails is truncated, and the env repaired;
            "raise": the exception is raised in the trainer; None: what the manager does.

    Raises:
        MissingDependencyError: tianshou is not installed.
        ConfigError: the manager's config or a space does not fit; the message says what to do.
        AssertionError: `wait_num` or `timeout` is out of range.
        LaunchError: an env cannot be built.
    """
    module: Any = importlib.import_module("envmgr.adapters.tianshou")
    env: ManagerVectorEnv = module.ManagerVectorEnv(
        manager, wait_num=wait_num, timeout=timeout, on_failure=on_failure
    )
    return env
