"""Functions that hide the differences between kinds of envs from the code that runs them.

Known kinds: `BaseEnv` and DI-engine's own, plain classes with the same methods, gymnasium envs,
multi-agent envs in PettingZoo's form, and envs of the old `gym` package. `as_base_env` is called on
what a factory built; the other functions take what it returned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Space

from envmgr.env.agent_dicts import AgentDicts, MultiAgentEnv
from envmgr.env.agents import is_multi_agent
from envmgr.env.base import BaseEnv
from envmgr.env.batched import BatchedEnv, BatchRow
from envmgr.env.contract import (
    EnvContractError,
    attribute,
    describe,
    env_name,
)
from envmgr.env.gym_spaces import convert_space
from envmgr.env.gymnasium_env import GymnasiumEnv, set_through_wrappers
from envmgr.env.old_gym import (
    AsyncOldGymEnv,
    OldGymEnv,
    is_old_gym,
    is_seeded_by_reset,
    renders,
    split_reset,
)
from envmgr.env.vector_batch import VectorBatch
from envmgr.spaces import has_samples, is_sampled_alone
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.types import EnvFactory

__all__ = [
    "EnvContractError",
    "as_base_env",
    "as_built",
    "close_env",
    "convert_space",
    "env_attribute",
    "params_are_options",
    "random_action_of",
    "reset_env",
    "sampler_of",
    "seed_env",
    "serve_env_id",
    "set_env_attribute",
    "spaces_of",
    "takes_seeds",
]

PROTOCOL_NAMES = frozenset(
    name for name in {*vars(BaseEnv), *BaseEnv.__annotations__} if not name.startswith("_")
)
"""Attributes that the wrapper of an env has itself; all others are those of the env inside."""


def as_base_env(obj: Any, env_id: int) -> Any:
    """Return what a factory built in a form that the other functions here can run.

    Args:
        obj: the env: a `BaseEnv`, a plain class with `reset` and `step`, a `gymnasium.Env`, a
            multi-agent env in PettingZoo's form, or an env of the old `gym` package.
        env_id: the id of the env, for messages.

    Returns:
        `obj` itself if it follows the `BaseEnv` protocol, else a `BaseEnv` around it.

    Raises:
        EnvContractError: `obj` is none of these; the message says what to do.
    """
    problem = _why_not_an_env(obj)
    if problem is not None:
        raise EnvContractError(f"the factory of env {env_id} returned {problem}")
    if isinstance(obj, BaseEnv) or _follows_ding(obj):
        return obj
    if is_multi_agent(obj):
        return MultiAgentEnv(obj, env_id)
    if not isinstance(obj, gymnasium.Env) and (is_old_gym(obj) or is_seeded_by_reset(obj)):
        obj = AsyncOldGymEnv(obj) if is_async(obj) else OldGymEnv(obj)
    return GymnasiumEnv(obj, env_id) if isinstance(obj, gymnasium.Env) else obj


def as_built(env: Any) -> Any:
    """Return what the factory built, given what `as_base_env` made of it."""
    built = env.env if isinstance(env, GymnasiumEnv) else env
    return built.env if isinstance(built, (OldGymEnv, AgentDicts)) else built


def serve_env_id(env: Any, env_id: int) -> None:
    """Have an env continue under another env_id."""
    if isinstance(env, GymnasiumEnv):
        env.pictures.serve(env_id)


def finish_video(env: Any) -> None:
    """Finish the video of an episode that an env does not continue."""
    if isinstance(env, GymnasiumEnv):
        env.pictures.close()


def as_reference(factory: EnvFactory) -> Any:
    """Return an env like env 0, to look at; for a batched env, its first row."""
    built = factory()
    return BatchRow(built, 0) if isinstance(built, BatchedEnv) else as_base_env(built, 0)


def _follows_ding(obj: Any) -> bool:
    # DI-engine's BaseEnv derives from gym.Env and yet has its own reset and step.
    return callable(getattr(type(obj), "create_collector_env_cfg", None))


def _why_not_an_env(obj: Any) -> str | None:
    if obj is None:
        return "None; does it lack a `return`?"
    if inspect.isclass(obj):
        return (
            f"the class {obj.__name__} and not an instance of it; give the class itself as the "
            "factory, or call it"
        )
    if isinstance(obj, BatchedEnv):
        return (
            f"a batched env ({type(obj).__name__}); wrap its factory in a BatchedEnvSpec, and name "
            "that in env_fn for each of its rows"
        )
    if isinstance(obj, gymnasium.vector.VectorEnv) or hasattr(obj, "single_observation_space"):
        return (
            f"a vector env ({type(obj).__name__}); wrap its factory in a BatchedEnvSpec, and name "
            "that in env_fn for each of its rows, or use type: gym_vector"
        )
    missing = [name for name in ("reset", "step") if not callable(getattr(obj, name, None))]
    if not missing:
        return None
    if callable(obj):
        name = getattr(obj, "__qualname__", type(obj).__name__)
        return f"another callable ({name}) and not an env; call it inside of the factory"
    return (
        f"{describe(obj)}, which has no {' and no '.join(missing)} method; it should be an "
        "envmgr.BaseEnv, a gymnasium.Env, or an object with their methods"
    )


def reset_env(env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Reset an env with its reset params and return the observation and the reset's info.

    The info of a `BaseEnv` is its attribute `reset_info`, if it has one; plain classes may also
    return `(obs, info)` as gymnasium envs do.
    """
    if type(env) is GymnasiumEnv:  # first: to find out what it is not takes as long as its reset
        return env.reset_with_info(params or {})
    return reset_result_of(env, env.reset(**params) if params else env.reset())


def reset_result_of(env: Any, result: Any) -> tuple[Any, dict[str, Any]]:
    """Return what `reset_env` does, given what `reset` of a non-gymnasium env returned."""
    if not isinstance(env, BaseEnv) and not _follows_ding(env):
        result, returned = split_reset(result, attribute(env, "observation_space"))
        if returned:
            return result, returned
    info = attribute(env, "reset_info")
    return result, dict(info) if type(info) is dict or isinstance(info, Mapping) else {}


def is_async(env: Any) -> bool:
    """Return whether the `reset` or the `step` of an env is a coroutine, to be awaited."""
    own = env.env if type(env) is GymnasiumEnv else env
    methods = (getattr(own, name, None) for name in ("reset", "step"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def params_are_options(env: Any) -> bool:
    """Return whether `reset` of an env takes reset params as `options`, not as its arguments."""
    if isinstance(env, BatchRow):
        return isinstance(env.batched, VectorBatch)
    inner = env.env if isinstance(env, GymnasiumEnv) else None
    return inner is not None and (not isinstance(inner, OldGymEnv) or inner.takes_options)


def takes_seeds(env: Any) -> bool:
    """Return whether an env can be seeded."""
    return env.takes_seeds if isinstance(env, GymnasiumEnv) else callable(attribute(env, "seed"))


def seed_env(env: Any, seed: int, dynamic_seed: bool | None) -> bool:
    """Seed an env, with effect from its next reset.

    `dynamic_seed` is handed on only when it is not None: the default of the env's own `seed` stays
    in force, and envs whose `seed` takes one argument work.

    Returns:
        False if the env has no `seed` method and cannot be seeded.
    """
    method = getattr(env, "seed", None)
    if not callable(method):
        return False
    if dynamic_seed is None:
        method(seed)
    else:
        method(seed, dynamic_seed)
    return True


def spaces_of(
    env: Any, observation_space: Any = None, action_space: Any = None
) -> tuple[Space[Any], Space[Any], Space[Any] | None]:
    """Return the observation, action and reward space of an env, as gymnasium spaces.

    An env whose spaces are not there yet (reading one raises or gives None, as with DI-engine's
    envs that build themselves in their first reset) is reset once, without a seed and without
    params, and asked again. The launch's own seed and reset come after that. A space that is still
    missing then is taken to be `gymnasium.Space()`, which contains any object.

    Args:
        env: the env.
        observation_space: the space that the user gave, if any; the env is not asked for its own.
        action_space: likewise.

    Returns:
        The three spaces; the reward space is None if the env has none, or none that can be read.

    Raises:
        EnvContractError: a space is not a known kind of space.
    """
    given = {"observation_space": observation_space, "action_space": action_space}
    # A wrapped env of the old gym is asked itself, as its wrapper has a space in any case.
    own = env.env if isinstance(env, GymnasiumEnv) and isinstance(env.env, OldGymEnv) else env
    is_late = any(attribute(own, n) is None for n, space in given.items() if space is None)
    if is_late and not is_async(env):
        reset_env(env, None)
        if own is not env:
            env.read_spaces()
    found = {n: attribute(env, n) if space is None else space for n, space in given.items()}
    observations, actions = (
        Space() if space is None else convert_space(space) for space in found.values()
    )
    return observations, actions, _reward_space_of(env)


def _reward_space_of(env: Any) -> Space[Any] | None:
    space = attribute(env, "reward_space")
    try:
        return None if space is None else convert_space(space)
    except Exception as error:  # it informs and nothing depends on it
        pass_interrupt_on(error)
        return None


def close_env(env: Any) -> None:
    """Close an env, if it has a `close` method."""
    method = getattr(env, "close", None)
    if callable(method):
        method()


def random_action_of(env: Any) -> Any:
    """Return the env's own random action, or a sample of its action space if it gives none.

    Raises:
        EnvContractError: there is neither.
    """
    method = getattr(env, "random_action", None)
    try:
        action = method() if callable(method) else None
    except NotImplementedError:  # of a space without values, which the default asks
        action = None
    if action is not None:
        return action
    if not has_samples(env.action_space):
        raise EnvContractError(
            f"{env_name(env)} has no random actions: its action space has no values of its own. "
            "Give the env a method random_action"
        )
    return env.action_space.sample()


def sampler_of(env: Any, action_space: Space[Any]) -> Callable[[], Any]:
    """Return a function for random actions: the space's or, where it has none, the env's.

    The random actions of agents are the env's, as it knows which agents are living.
    """
    if is_sampled_alone(action_space):
        return action_space.sample
    return functools.partial(random_action_of, env)


def env_attribute(env: Any, name: str) -> Any:
    """Return an attribute of an env by its name.

    For wrapped envs (gymnasium's and gym's) the names of the `BaseEnv` protocol are those of the
    wrapper; every other name is looked up through the env's own wrappers down to the env. For other
    envs it is the env's attribute; the protocol's methods that have a working default
    (`random_action`, `reward_shaping`) are there even if the env's class lacks them. If an env of
    DI-engine does not render itself, its `render` renders the env inside of it (`_env`).

    Raises:
        AttributeError: there is no attribute of this name.
    """
    if isinstance(env, GymnasiumEnv) and name not in PROTOCOL_NAMES:
        return env.env.get_wrapper_attr(name)
    if isinstance(env, BatchRow):
        try:
            return env.batched.attribute(env.row, name)
        except AttributeError:
            if name not in PROTOCOL_NAMES:
                raise
    if name == "random_action":
        return lambda: random_action_of(env)
    if name == "reward_shaping" and not callable(getattr(env, name, None)):
        return lambda transitions: transitions
    if name == "render" and _follows_ding(env) and not renders(env):
        return functools.partial(_render_inside, env)
    return getattr(env, name)


def _render_inside(env: Any, mode: str | None = None) -> Any:
    inside = getattr(env, "_env", None)
    if inside is None:
        text = "has no render method, and no env inside (`_env`; it comes with the first reset)"
        raise EnvContractError(f"{env_name(env)} {text}")
    return (OldGymEnv(inside) if is_old_gym(inside) else as_base_env(inside, 0)).render(mode)


def set_env_attribute(env: Any, name: str, value: Any) -> bool:
    """Set an attribute of an env: where `env_attribute` finds it, else as a new one.

    Returns:
        Whether the attribute is a new one.

    Raises:
        AttributeError: it cannot be set, or belongs to the protocol of a wrapped env.
    """
    is_new = not _has_attribute(env, name)
    if isinstance(env, BatchRow):
        env.batched.set_attribute(env.row, name, value)
    elif not isinstance(env, GymnasiumEnv):
        setattr(env, name, value)
    elif name in PROTOCOL_NAMES:
        raise AttributeError(
            f"{name!r} belongs to the protocol of every env and cannot be set on {env}"
        )
    else:
        set_through_wrappers(env.env, name, value)
    return is_new


def _has_attribute(env: Any, name: str) -> bool:
    try:
        env_attribute(env, name)
    except AttributeError:
        return False
    except Exception:  # of a property that cannot be read now; it may be set all the same
        return True
    return True
