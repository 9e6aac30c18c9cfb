"""Taking one action in an env of any kind: what its `step` returns, checked, as a timestep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from envmgr.env.contract import (
    EnvContractError,
    StepResult,
    as_flag,
    describe,
    env_name,
    gymnasium_step_result,
    timestep_of,
)
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.types import EnvTimestep


def step_env(env: Any, action: Any) -> EnvTimestep:
    """Take one action and return the timestep.

    The env may return an `EnvTimestep`; anything else with `obs`, `reward`, `done` and `info`, such
    as DI-engine's timesteps (further fields of a named tuple are put into the info); a tuple of
    these four; or gymnasium's five values.

    Raises:
        EnvContractError: the env returned something else; the message says what.
    """
    if type(env) is GymnasiumEnv:  # checks its timesteps itself
        return env.step(action)
    return _checked_timestep(env, env.step(action))


def _checked_timestep(env: Any, result: Any) -> EnvTimestep:
    timestep: Any = result if type(result) is EnvTimestep else _as_timestep(env, result)
    if type(timestep.done) is not bool:
        timestep = timestep._replace(done=as_flag(timestep.done, "done"))
    if type(timestep.info) is not dict and not _is_info(timestep.info):
        raise EnvContractError(
            f"the info of {env_name(env)} should be a dict, or a list of dicts, it is "
            f"{describe(timestep.info)}"
        )
    return cast("EnvTimestep", timestep)


class StepInTwo(NamedTuple):
    """How an env takes an action: `step_env` in two halves.

    Attributes:
        env: the env whose own `step` is called.
        step_result_of: makes a `StepResult` of what this `step` returned, checked as in `step_env`.
        gives_five: whether this `step` returns gymnasium's five values, so that results say how
            episodes end; if not, it mostly returns a named tuple with the fields of an
            `EnvTimestep`.
    """

    env: Any
    step_result_of: Callable[[Any], StepResult]
    gives_five: bool


def step_in_two(env: Any) -> StepInTwo:
    """Return how an env takes an action."""
    if type(env) is GymnasiumEnv:
        return StepInTwo(env.env, env.step_result_of, gives_five=True)

    def step_result_of(result: Any) -> StepResult:
        obs, reward, done, info = _checked_timestep(env, result)
        return obs, reward, done, 0, info

    return StepInTwo(env, step_result_of, gives_five=False)


def step_function(env: Any) -> Callable[[Any], StepResult]:
    """Return a function that does what `step_env` does at less cost: it returns a `StepResult`."""
    if type(env) is GymnasiumEnv:  # which converts actions, too
        return env.step_result
    halves = step_in_two(env)
    return lambda action: halves.step_result_of(env.step(action))


def _as_timestep(env: Any, result: Any) -> EnvTimestep:
    if isinstance(result, tuple) and getattr(result, "_fields", None) == EnvTimestep._fields:
        return EnvTimestep(*result)  # DI-engine's, in each of its steps
    if all(hasattr(result, name) for name in EnvTimestep._fields):
        return EnvTimestep(result.obs, result.reward, result.done, _info_with_extras(result))
    if isinstance(result, (tuple, list)) and len(result) == 4:
        return EnvTimestep(*result)
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return timestep_of(gymnasium_step_result(result, env))
    raise EnvContractError(
        f"step of {env_name(env)} should return an EnvTimestep (obs, reward, done, info) or "
        f"gymnasium's (obs, reward, terminated, truncated, info), it returned {describe(result)}"
    )


def _info_with_extras(result: Any) -> Any:
    names = [name for name in getattr(result, "_fields", ()) if name not in EnvTimestep._fields]
    if not names or not isinstance(result.info, Mapping):
        return result.info
    return {**{name: getattr(result, name) for name in names}, **result.info}


def _is_info(info: Any) -> bool:
    if isinstance(info, (list, tuple)):
        return all(isinstance(part, Mapping) for part in info)
    return isinstance(info, Mapping)
