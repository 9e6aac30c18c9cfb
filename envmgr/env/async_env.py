"""Envs whose `reset` and `step` are coroutines, and functions that await these."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from envmgr.env import adapt
from envmgr.env.base import BaseEnv
from envmgr.env.contract import StepResult, awaited, timestep_of
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.steps import step_in_two
from envmgr.types import EnvTimestep

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


async def step_async(env: Any, action: Any) -> StepResult:
    """Take one action in an async env, as `steps.step_function` does for other envs.

    Args:
        env: the env, as `adapt.as_base_env` returned it.
        action: the action.

    Raises:
        EnvContractError: the env returned something that is not the result of a step.
    """
    halves = step_in_two(env)
    if type(env) is GymnasiumEnv:
        action = env.converted(action)
    return halves.step_result_of(await awaited(halves.env.step(action)))


async def reset_async(env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Reset an async env, as `adapt.reset_env` does for other envs.

    Args:
        env: the env, as `adapt.as_base_env` returned it.
        params: the reset params.

    Raises:
        EnvContractError: the env returned something that is not the result of a reset.
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


def use_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Have this loop await the async envs that are tried out in this process.

    The loop runs in a different thread from the code that tries them out.
    """
    global _shared_loop
    _shared_loop = loop


_shared_loop: asyncio.AbstractEventLoop | None = None


def as_blocking(built: Any) -> Any:
    """Return an env as `adapt.as_base_env` does, to be tried out here, one call after the other.

    Each call of an async env is awaited in an event loop, and so is an async factory. This is for
    checks and profiles: managers run async envs on the loops of workers.

    Args:
        built: what a factory returned; or an env as `adapt.as_base_env` returned it.

    Raises:
        EnvContractError: as for `adapt.as_base_env`.
    """
    if isinstance(built, GymnasiumEnv):
        return BlockingEnv(built, Blocking()) if adapt.is_async(built) else built
    blocking = None
    if inspect.isawaitable(built):
        blocking = Blocking()
        built = blocking.result_of(awaited(built))
    env = adapt.as_base_env(built, 0)
    return BlockingEnv(env, blocking or Blocking()) if adapt.is_async(env) else env


class Blocking:
    """A runner that waits for coroutines, in the loop of this worker or in one of its own."""

    def __init__(self) -> None:
        import asyncio  # workers import this module, and most of them need no loop

        self._asyncio = asyncio
        shared = _shared_loop
        self._is_own = shared is None or shared.is_closed()
        self._loop = asyncio.new_event_loop() if shared is None or self._is_own else shared

    def result_of(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        if self._is_own:
            return self._loop.run_until_complete(coroutine)
        return self._asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Close the loop, if nobody else uses it."""
        if self._is_own:
            self._loop.close()


class BlockingEnv(BaseEnv):
    """An async env whose methods return only when their work is done.

    Args:
        env: the env, as `adapt.as_base_env` returned it.
        blocking: waits for its coroutines.
    """

    def __init__(self, env: Any, blocking: Blocking) -> None:
        self.env, self._blocking = env, blocking
        self.observation_space, self.action_space, reward_space = adapt.spaces_of(env)
        if reward_space is not None:
            self.reward_space = reward_space
        self.reset_info = {}

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Seed the env, if it can be seeded."""
        adapt.seed_env(self.env, seed, dynamic_seed)

    def reset(self, **params: Any) -> Any:
        """Reset the env and return the observation."""
        obs, self.reset_info = self._blocking.result_of(reset_async(self.env, params))
        return obs

    def step(self, action: Any) -> EnvTimestep:
        """Take one action."""
        return timestep_of(self._blocking.result_of(step_async(self.env, action)))

    def random_action(self) -> Any:
        """Return the env's own random action, or a sample of its action space."""
        return self._blocking.result_of(awaited(adapt.random_action_of(self.env)))

    def close(self) -> None:
        """Close the env, and the loop."""
        try:
            self._blocking.result_of(close_async(self.env))
        finally:
            self._blocking.close()

    @property
    def unwrapped(self) -> Any:
        """The env without any wrapper."""
        built = adapt.as_built(self.env)
        return getattr(built, "unwrapped", built)

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that are not part of the protocol in the env."""
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return adapt.env_attribute(self.env, name)
