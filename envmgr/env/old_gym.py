"""Envs of the old `gym` package, and plain classes written like them, without importing gym.

gym's interface changed under one name: `reset` returned an observation up to 0.25 and
`(obs, info)` from 0.26, `step` four values and then five, seeds went through `seed()` and then
through `reset(seed=)`. What an env does is read from its signatures and from what it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from envmgr.env.contract import gymnasium_timestep
from envmgr.env.wrapped import WrappedEnv
from envmgr.types import EnvTimestep


def is_old_gym(obj: object) -> bool:
    """Return whether an object is an instance of the old package's `gym.Env`."""
    return any(
        cls.__name__ == "Env" and cls.__module__.partition(".")[0] == "gym"
        for cls in type(obj).__mro__
    )


def is_seeded_by_reset(obj: object) -> bool:
    """Return whether an env has no `seed` method, but a `reset` that takes `seed`."""
    return not callable(getattr(obj, "seed", None)) and _accepts(
        getattr(obj, "reset", None), "seed", explicitly=True
    )


def split_reset(result: Any, observation_space: Any) -> tuple[Any, dict[str, Any]]:
    """Return the observation and the info of what `reset` returned.

    A tuple of two whose second is a dict is `(obs, info)`, unless the observation space is a Tuple
    that contains it whole; anything else is an observation, with an empty info.
    """
    if not (type(result) is tuple and len(result) == 2 and isinstance(result[1], dict)):
        return result, {}
    if type(observation_space).__name__ == "Tuple" and observation_space.contains(result):
        return result, {}
    return result[0], dict(result[1])


class OldGymEnv(WrappedEnv):
    """Wraps an env of the old `gym` package, or a plain class written like one.

    Timesteps have both `terminated` and `truncated` in a new info dict; where the env returns only
    `done`, truncated is what gym's TimeLimit says (`info["TimeLimit.truncated"]`).

    Args:
        env: the env, with its wrappers.

    Raises:
        EnvContractError: it has no spaces, or some that cannot be converted.
    """

    def __init__(self, env: Any) -> None:
        self._layers = _layers(env)
        super().__init__(env)
        self._reset_takes_seed = self._reset_takes("seed")
        self._reset_takes_options = self._reset_takes("options")

    def reset(self, **params: Any) -> Any:
        """Start an episode and return its first observation; an info is kept in `reset_info`.

        Args:
            **params: become `options` where the env's `reset` has them, else its arguments.
        """
        arguments = dict(params)
        if self._reset_takes_options:
            arguments = {"options": arguments} if arguments else {}
        seed = self._seeds.due()
        if seed is not None and self._reset_takes_seed:
            arguments["seed"] = seed
        elif seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        obs, info = split_reset(self.env.reset(**arguments), self.observation_space)
        self._seeds.reset_done()
        self.reset_info = info
        return obs

    def step(self, action: Any) -> EnvTimestep:
        """Take one action; see the class for what the timestep holds.

        Raises:
            EnvContractError: the env returned neither four nor five values.
        """
        result = self.env.step(self._convert_action(action))
        if isinstance(result, (tuple, list)) and len(result) == 4:
            obs, reward, done, info = result
            truncated = (
                bool(done)
                and isinstance(info, dict)
                and bool(info.get("TimeLimit.truncated", False))
            )
            result = (obs, reward, bool(done) and not truncated, truncated, info)
        return gymnasium_timestep(result, self.env)

    def render(self, mode: str | None = None) -> Any:
        """Return what the env renders; `mode` counts only for envs built without a render mode."""
        if self.render_mode is not None:
            return self.env.render()
        return self.env.render(mode=mode or "rgb_array")

    def inner_attribute(self, name: str) -> Any:
        """Return an attribute from the outermost wrapper that has it, or from the env itself."""
        for layer in self._layers[:-1]:
            if _defines(layer, name):
                return getattr(layer, name)
        return getattr(self._layers[-1], name)

    def set_inner_attribute(self, name: str, value: Any) -> None:
        """Set an attribute where it is defined, else on the outermost wrapper."""
        for layer in self._layers:
            if _defines(layer, name):
                setattr(layer, name, value)
                return
        setattr(self.env, name, value)

    def _reset_takes(self, name: str) -> bool:
        # Wrappers hand keywords through; only the env itself shows whether it knows this one.
        *wrappers, innermost = self._layers
        return _accepts(innermost.reset, name, explicitly=True) and all(
            _accepts(wrapper.reset, name, explicitly=False) for wrapper in wrappers
        )


def _layers(env: Any) -> list[Any]:
    """The wrappers from the outermost inwards, then the env itself."""
    layers = [env]
    while any(cls.__name__ == "Wrapper" for cls in type(layers[-1]).__mro__):
        layers.append(layers[-1].env)
    return layers


def _defines(layer: Any, name: str) -> bool:
    # hasattr would not do: gym's wrappers hand on every attribute of what they wrap.
    return name in getattr(layer, "__dict__", {}) or hasattr(type(layer), name)


def _accepts(function: Callable[..., Any] | None, name: str, *, explicitly: bool) -> bool:
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin without a signature
        return False
    if name in parameters:
        return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    return not explicitly and any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
