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

    With `reset_inplace: true` an episode begins within the step that ended the one before, as in
    SubprocVecEnv; without, spare envs can hide slow resets.

    Args:
        manager: with `auto_reset`, without `episode_num`; the first `reset` launches it. Of those
            that gather some timesteps, all are gathered.
        on_failure: "recover": an env that fails ends its episode as a truncated one, and is
            repaired; "raise": the exception is raised in the trainer; None: as the manager does.

    Raises:
        MissingDependencyError: stable-baselines3 is not installed.
        ConfigError: the manager's config does not fit, or a space; the message says what to do.
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
        manager: with `auto_reset: false`, as tianshou resets envs itself, and without
            `episode_num`; the first `reset` launches it.
        wait_num: how many timesteps a step waits for; None for those of all actions it was given.
            Less than all is for `AsyncCollector`.
        timeout: seconds after which a step returns what has come, if that is anything.
        on_failure: "recover": an env that fails ends its episode as a truncated one, and is
            repaired; "raise": the exception is raised in the trainer; None: as the manager does.

    Raises:
        MissingDependencyError: tianshou is not installed.
        ConfigError: the manager's config does not fit, or a space; the message says what to do.
        AssertionError: `wait_num` or `timeout` is out of range.
        LaunchError: an env cannot be built.
    """
    module: Any = importlib.import_module("envmgr.adapters.tianshou")
    env: ManagerVectorEnv = module.ManagerVectorEnv(
        manager, wait_num=wait_num, timeout=timeout, on_failure=on_failure
    )
    return env
