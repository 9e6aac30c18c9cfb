"""A manager as a `gymnasium.vector.VectorEnv`: `as_gymnasium`, `EnvmgrVectorEnv`, entry points.

The autoreset modes are implemented in `gym_autoreset`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium.wrappers import TimeLimit

from envmgr.adapters.gym_arguments import AutoresetMode, checked_mode
from envmgr.adapters.gym_autoreset import ManagerVectorEnv
from envmgr.adapters.gym_statistics import RecordEpisodeStatistics
from envmgr.config.env_factories import arguments_of, env_factories, with_arguments
from envmgr.errors import ConfigError
from envmgr.manager import EnvManager
from envmgr.shortcuts import create_env_manager

__all__ = [
    "EnvmgrVectorEnv",
    "ManagerVectorEnv",
    "RecordEpisodeStatistics",
    "as_gymnasium",
    "vector_entry_point",
]


def as_gymnasium(
    manager: EnvManager,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    *,
    observation_mode: Any = "same",
    on_failure: str | None = None,
    info_format: str = "gymnasium",
) -> ManagerVectorEnv:
    """Return a manager as a `gymnasium.vector.VectorEnv`.

    Args:
        manager: a manager of any kind. It need not be launched: the first `reset` launches it.
        autoreset_mode: NEXT_STEP, SAME_STEP, or DISABLED, which needs a manager with
            `auto_reset: false`.
        observation_mode: "same", "different" (spaces of the same shape with different bounds; needs
            a manager with `same_spaces: false`), or a pair of the batched and the single space.
        on_failure: "recover": the episode of an env that fails is truncated; "raise": its exception
            is raised; None: what the manager does.
        info_format: "gymnasium", or "gym029": infos as Gymnasium 0.29 had them, with SAME_STEP.

    Raises:
        ConfigError: the manager or another argument does not fit.
        LaunchError, SpaceMismatchError: the envs cannot be built, or are not alike.
        RuntimeError: their spaces do not fit `observation_mode`, or the action spaces differ.
    """
    return ManagerVectorEnv(
        manager,
        autoreset_mode,
        observation_mode=observation_mode,
        on_failure=on_failure,
        info_format=info_format,
    )


class EnvmgrVectorEnv(ManagerVectorEnv):
    """A `VectorEnv` from env factories, with the constructor of `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: functions that build the envs, one for each.
        shared_memory: as in the manager's config.
        copy: whether observations are copies. If not, they are views, valid through two steps.
        context: how workers are started; None: by the worker server.
        daemon: as in the manager's config.
        worker: must be None.
        observation_mode: see `as_gymnasium`.
        autoreset_mode: see `as_gymnasium`.
        max_concurrency: how many envs run at a time: the number of workers that share the envs.
        on_failure: "recover" or "raise": see `as_gymnasium`.
        info_format: see `as_gymnasium`.
        **cfg: further keys of the manager's config, such as `num_workers="auto"`.

    Raises:
        RuntimeError: the spaces of the envs differ.
        ConfigError, LaunchError: the arguments do not fit, or the envs cannot be built.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        on_failure: str = "recover",
        info_format: str = "gymnasium",
        **cfg: Any,
    ) -> None:
        mode = checked_mode(autoreset_mode)
        if worker is not None:
            raise ConfigError(
                "worker should be None: workers of envmgr run their own loop. What is special "
                "about an env's steps and resets belongs into a wrapper of the env; what is to be "
                "run beside them, manager.apply(function) runs in the worker"
            )
        if isinstance(max_concurrency, int):  # more than envs are as many as envs, as there
            max_concurrency = min(max_concurrency, len(env_fns))
        given = {
            "shared_memory": shared_memory,
            "copy_on_get": copy,
            "context": "server" if context is None else context,
            "daemon": daemon,
            "num_workers": max_concurrency,
            "same_spaces": False,  # the spaces are compared here
            "auto_reset": mode is not AutoresetMode.DISABLED,
            "reset_inplace": mode is AutoresetMode.SAME_STEP,
            **cfg,
        }
        manager = create_env_manager({"type": "subprocess", **given}, env_fn=env_fns)
        super().__init__(
            manager,
            mode,
            observation_mode=observation_mode,
            on_failure=on_failure,
            info_format=info_format,
        )


def vector_entry_point(
    num_envs: int = 1,
    *,
    env: str | Callable[..., Any],
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    manager: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> EnvmgrVectorEnv:
    """Return a vector env of `num_envs` identical envs, for `gymnasium.register` and RLlib.

    Example:
        >>> gymnasium.register(
        ...     "Fast/CartPole-v1",
        ...     vector_entry_point="envmgr.adapters.gymnasium:vector_entry_point",
        ...     kwargs={"env": "CartPole-v1", "manager": {"num_workers": 2}},
        ... )
        >>> envs = gymnasium.make_vec("Fast/CartPole-v1", num_envs=8)

    Args:
        num_envs: number of envs.
        env: a gymnasium id, with or without its module and its version, or a function that builds
            an env.
        autoreset_mode: see `as_gymnasium`.
        manager: keys of the manager's config, and `on_failure`.
        **kwargs: passed to `gymnasium.make`, or to the function. `max_episode_steps`, which
            `make_vec` passes on from a registration, limits episodes if the function has no such
            argument.

    Raises:
        ConfigError: there is no such id, or another argument does not fit.
        LaunchError: the envs cannot be built.
    """
    if isinstance(env, str):  # resolved here: a worker need not know of it
        env_fn = env_factories({"id": env, "kwargs": kwargs}, 1)[0]
    else:
        limits: list[Any] = []
        if "max_episode_steps" in kwargs and "max_episode_steps" not in arguments_of(env):
            steps = kwargs.pop("max_episode_steps")
            if steps not in (None, -1):  # as `gymnasium.make` has it
                limits = [functools.partial(TimeLimit, max_episode_steps=steps)]
        env_fn = with_arguments(env, kwargs, limits)
    return EnvmgrVectorEnv([env_fn] * num_envs, autoreset_mode=autoreset_mode, **(manager or {}))
