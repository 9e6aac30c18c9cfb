"""EnvPool, which has envs of its own, in C++, behind the interface of a vector env."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import envpool
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from spec import Runner, Spec, UnavailableError

from adapters.actions import array_batches
from envmgr.tuning.loops import GymnasiumLoop

_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", {}),
    "halfcheetah": ("HalfCheetah-v5", {}),
    "minigrid": ("MiniGrid-Empty-8x8-v0", {}),
    "pong": ("Pong-v5", {"use_fire_reset": False}),
}


class EnvPoolVector(VectorEnv[Any, Any, Any]):
    """A pool as a vector env: the step after an episode's end resets.

    Args:
        task: the name that EnvPool has for the env.
        env_num: how many; they are stepped together.
        arguments: of the task.
    """

    def __init__(self, task: str, env_num: int, arguments: dict[str, Any]) -> None:
        self._pool = envpool.make(task, env_type="gymnasium", num_envs=env_num, **arguments)
        self.num_envs = env_num
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, env_num)
        self.action_space = batch_space(self.single_action_space, env_num)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs."""
        found: tuple[Any, dict[str, Any]] = self._pool.reset(seed=seed)
        return found

    def step(self, actions: Any) -> Any:
        """Step all envs, and reset those whose episode has ended."""
        return self._pool.step(actions.astype(self.single_action_space.dtype, copy=False))

    def close(self, **kwargs: Any) -> None:
        """Close the pool."""
        self._pool.close()


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return the pool of the same task; `factory` is not used.

    Raises:
        UnavailableError: EnvPool has no such env.
    """
    if spec.env not in _TASKS:
        raise UnavailableError("it has no such env")
    task, arguments = _TASKS[spec.env]
    return EnvPoolVector(task, spec.env_num, arguments)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of it."""
    build = functools.partial(vector_env, spec, factory)
    return GymnasiumLoop(build, spec.env_num, array_batches(spec))
