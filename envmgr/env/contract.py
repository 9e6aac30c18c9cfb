"""What an env has to return, and the conversion of gymnasium's step results to `EnvTimestep`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, SupportsFloat

import numpy as np

from envmgr.types import EnvTimestep


class EnvContractError(TypeError):
    """An env, or what it returned, does not follow the protocol; a failure of that env."""


def describe(value: Any) -> str:
    """Return what a value is, in a few words, for messages about an unexpected value."""
    if isinstance(value, (tuple, list)):
        parts = ", ".join(type(part).__name__ for part in value[:6])
        more = ", ..." if len(value) > 6 else ""
        return f"a {type(value).__name__} of {len(value)} ({parts}{more})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def env_name(env: object) -> str:
    """Return the name of an env's class; if the env is wrapped, that of the innermost env."""
    return type(getattr(env, "unwrapped", env)).__name__


async def awaited(value: Any) -> Any:
    """Return a value or, if it is awaitable, the result of awaiting it."""
    return await value if inspect.isawaitable(value) else value


def attribute(env: Any, name: str) -> Any:
    """Return an attribute of an env; None if it has none, or cannot give it."""
    try:
        return getattr(env, name, None)
    except Exception:  # a property of an env that has not built itself yet may raise anything
        return None


def takes(function: Any, *arguments: Any) -> bool:
    """Return whether a function can be called with these arguments; True if that is unknown."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # of C: it does not tell
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def accepts(function: Any, name: str) -> bool | None:
    """Return whether a function takes a keyword argument of this name.

    None if it takes any keyword (`**kwargs`), or if that is unknown.
    """
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # of C: it does not tell
        return None
    if name in parameters:
        return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if takes_all else False


def layers_of(env: Any) -> list[Any]:
    """Return the wrappers of an env from the outermost inwards, then the env itself."""
    layers = [env]
    while any(cls.__name__ == "Wrapper" for cls in type(layers[-1]).__mro__):
        inside = attribute(layers[-1], "env")
        if inside is None:
            break
        layers.append(inside)
    return layers


def as_flag(value: Any, name: str) -> bool:
    """Return `done`, `terminated` or `truncated` as a bool.

    Raises:
        EnvContractError: the value is None or has no single truth value.
    """
    try:
        flag = None if value is None else bool(value)
    except (ValueError, TypeError, RuntimeError):  # what array libraries raise for many elements
        flag = None
    if flag is None:
        raise EnvContractError(f"`{name}` should be one bool, the env gave {describe(value)}")
    return flag


def scalar_reward(reward: Any) -> Any:
    """Return a gymnasium reward as a float, or as an array if it has one number for each agent.

    Arrays are returned unchanged; lists and tuples of numbers, as vector envs elsewhere stack them,
    become arrays.

    Raises:
        EnvContractError: it is not a number.
    """
    given = reward
    if isinstance(reward, (list, tuple)):
        reward = _as_array(reward)
    if isinstance(reward, np.ndarray):
        if reward.size == 1 and reward.dtype.kind in "biuf":
            return float(reward.item())
        if reward.dtype.kind in "biuf":
            return reward
    elif isinstance(reward, (float, int, np.floating, SupportsFloat)):  # the last is slow to check
        return float(reward)
    raise EnvContractError(f"the reward should be a number, the env gave {describe(given)}")


def _as_array(rewards: Any) -> Any:
    try:
        return np.array(rewards)
    except ValueError:  # of unequal lengths
        return rewards


ENDING_GIVEN, TERMINATED, TRUNCATED = 1, 2, 4
"""Bits of `ending` in a `StepResult`: that the env says how episodes end, and how this one did."""

StepResult = tuple[Any, Any, bool, int, Any]
"""The checked result of a step in its cheapest form: `(obs, reward, done, ending, info)`.

If `ending` is 0, `info` is the whole info of the timestep. Otherwise `info` is the env's own dict,
and the bools `terminated` and `truncated`, which `ending` holds, belong to the timestep's info too.
"""


def gymnasium_step_result(result: Any, source: object) -> StepResult:
    """Return what a gymnasium-style `step` returned as a `StepResult`, checked.

    `done` is `terminated or truncated`. A reward that is one number becomes a float.

    Args:
        result: `(obs, reward, terminated, truncated, info)`.
        source: the env that returned it, for messages.

    Raises:
        EnvContractError: `result` is something else.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 5:
        refuse_coroutine(result, source, "step")
        raise EnvContractError(
            f"step of {env_name(source)} should return (obs, reward, terminated, truncated, "
            f"info) as gymnasium envs do, it returned {describe(result)}; an env that returns "
            "(obs, reward, done, info) should derive from envmgr.BaseEnv instead of gymnasium.Env"
        )
    obs, reward, terminated, truncated, info = result
    # The types are compared first, as most envs get them right and this runs in every step.
    if type(terminated) is not bool:
        terminated = as_flag(terminated, "terminated")
    if type(truncated) is not bool:
        truncated = as_flag(truncated, "truncated")
    if type(info) is not dict and not isinstance(info, Mapping):
        raise EnvContractError(
            f"the info of {env_name(source)} should be a dict, it is {describe(info)}"
        )
    if type(reward) is not float and not info.get("abnormal"):  # an abnormal step may have none
        reward = scalar_reward(reward)
    if not (terminated or truncated):
        return obs, reward, False, ENDING_GIVEN, info
    ending = ENDING_GIVEN | (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
    return obs, reward, True, ending, info


def timestep_of(step_result: StepResult) -> EnvTimestep:
    """Return the result of a step as a timestep; an info that gets more entries is a new dict."""
    obs, reward, done, ending, info = step_result
    return EnvTimestep(obs, reward, done, info_of(ending, info))


def info_of(ending: int, info: Any) -> Any:
    """Return the info of a timestep: the env's, with `terminated` and `truncated` if given."""
    if not ending:
        return info
    return {
        **info,
        "terminated": bool(ending & TERMINATED),
        "truncated": bool(ending & TRUNCATED),
    }


def refuse_coroutine(result: Any, source: object, method: str) -> None:
    """Raise if a method that is not async has returned a coroutine.

    Raises:
        EnvContractError: the method has returned a coroutine.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise EnvContractError(
            f"{method} of {env_name(source)} is `async def`, but what calls it does not await it: "
            "a wrapper around it, most likely. Wrappers of async envs have to be async, too; "
            "gymnasium.make adds some that are not"
        )
