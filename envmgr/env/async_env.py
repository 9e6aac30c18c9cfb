"""Envs whose `reset` and `step` are coroutines: what to await in place of calling them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envmgr.env import adapt
from envmgr.env.base import BaseEnv
from envmgr.env.contract import StepResult, timestep_of
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.old_gym import awaited
from envmgr.env.steps import step_in_two
from envmgr.types import EnvTimestep

if TYPE_CHECKING:
    import asyncio


async def step_async(env: Any, action: Any) -> StepResult:
    """Take one action in an async env; what `steps.step_function` does for others.

    Args:
        env: what `adapt.as_base_env` returned.
        action: the action.

    Raises:
        EnvContractError: the env returned something that is no step's result.
    """
    halves = step_in_two(env)
    if type(env) is GymnasiumEnv:
        action = env.converted(action)
    return halves.step_result_of(await awaited(halves.env.step(action)))


async def reset_async(env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Reset an async env; what `adapt.reset_env` does for others.

    Args:
        env: what `adapt.as_base_env` returned.
        params: the reset params.

    Raises:
        EnvContractError: the env returned something that is no reset's result.
    """
    if type(env) is GymnasiumEnv:
        result = env.env.reset(**env.reset_arguments_of(params or {}))
        return env.reset_result_of(await awaited(result))
    result = env.reset(**params) if params else env.reset()
    return adapt.reset_result_of(env, await awaited(result))


async def close_async(env: Any) -> None:
    """Close an async env, whose `close` need not be a coroutine."""
    if type(env) is GymnasiumEnv:
        env.pictures.close()
        env = env.env
    method = getattr(env, "close", None)
    if callable(method):
        await awaited(method())


def as_blocking(built: Any) -> Any:
    """Return what a factory built as `adapt.as_base_env` does, to be tried out here, one by one.

    Each call of an async env is awaited in a loop of its own, and an async factory likewise: for
    checks and profiles. Managers run them on the loops of workers.

    Raises:
        EnvContractError: as of `adapt.as_base_env`.
    """
    import asyncio  # workers import this module, and most of them need no loop

    loop: asyncio.AbstractEventLoop | None = None
    if inspect.isawaitable(built):
        loop = asyncio.new_event_loop()
        built = loop.run_until_complete(awaited(built))
    env = adapt.as_base_env(built, 0)
    return BlockingEnv(env, loop or asyncio.new_event_loop()) if adapt.is_async(env) else env


class BlockingEnv(BaseEnv):
    """An async env whose methods return when what they do is done.

    Args:
        env: what `adapt.as_base_env` returned.
        loop: runs it.
    """

    def __init__(self, env: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.env, self._loop = env, loop
        self.observation_space, self.action_space, reward_space = adapt.spaces_of(env)
        if reward_space is not None:
            self.reward_space = reward_space
        self.reset_info = {}

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Seed the env, if it can be seeded."""
        adapt.seed_env(self.env, seed, dynamic_seed)

    def reset(self, **params: Any) -> Any:
        """Reset the env and return the observation."""
        obs, self.reset_info = self._loop.run_until_complete(reset_async(self.env, params))
        return obs

    def step(self, action: Any) -> EnvTimestep:
        """Take one action."""
        return timestep_of(self._loop.run_until_complete(step_async(self.env, action)))

    def close(self) -> None:
        """Close the env, and the loop."""
        try:
            self._loop.run_until_complete(close_async(self.env))
        finally:
            self._loop.close()

    def __getattr__(self, name: str) -> Any:
        """Look up what is not of the protocol in the env."""
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return adapt.env_attribute(self.env, name)
