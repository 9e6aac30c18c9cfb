"""Envs whose `reset` and `step` are coroutines: what to await in place of calling them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from envmgr.env import adapt
from envmgr.env.contract import StepResult
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.steps import step_in_two


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


async def awaited(value: Any) -> Any:
    """Return a value, or what it gives when it is awaited, if it can be."""
    return await value if inspect.isawaitable(value) else value
