"""Envs of the old `gym` package, and plain classes written like them, without importing gym.

gym's interface changed under one name: `reset` returned an observation up to 0.25 and
`(obs, info)` from 0.26, `step` four values and then five, seeds went through `seed()` and then
through `reset(seed=)`. What an env does is read from its signatures and from what it returns.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from envmgr.env.contract import accepts, attribute, awaited, layers_of


def is_old_gym(obj: object) -> bool:
    """Return whether an object is an instance of the old package's `gym.Env`."""
    return any(map(_is_gyms_env, type(obj).__mro__))


def _is_gyms_env(cls: type) -> bool:
    return cls.__name__ == "Env" and cls.__module__.partition(".")[0] == "gym"


def renders(env: object) -> bool:
    """Return whether a class of an env defines `render`; that of `gym.Env` renders nothing."""
    owner = next((cls for cls in type(env).__mro__ if "render" in vars(cls)), None)
    return owner is not None and not _is_gyms_env(owner)


def is_seeded_by_reset(obj: object) -> bool:
    """Return whether an env has no `seed` method, but a `reset` that takes `seed`."""
    return (
        not callable(getattr(obj, "seed", None))
        and accepts(getattr(obj, "reset", None), "seed") is True
    )


def split_reset(result: Any, observation_space: Any) -> tuple[Any, dict[str, Any]]:
    """Return the observation and the info of what `reset` returned.

    A tuple of two whose second element is a dict is `(obs, info)`, unless the observation space is
    a Tuple that contains the whole tuple; anything else is an observation, with an empty info.
    """
    if not (type(result) is tuple and len(result) == 2 and isinstance(result[1], dict)):
        return result, {}
    if type(observation_space).__name__ == "Tuple" and observation_space.contains(result):
        return result, {}
    return result[0], dict(result[1])


class OldGymEnv(gymnasium.Env[Any, Any]):
    """An env of the old `gym` package, or a plain class written like one, as a `gymnasium.Env`.

    Where the env returns only `done`, truncated is what gym's TimeLimit says
    (`info["TimeLimit.truncated"]`). The spaces are not converted: they are those that the env has
    at the moment.

    Args:
        env: the env, with its wrappers.

    Attributes:
        takes_options: whether its `reset` takes `options`; if not, they become arguments of it.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        for name in ("metadata", "render_mode", "spec"):
            if (value := attribute(env, name)) is not None:
                setattr(self, name, value)
        self._layers = layers_of(env)
        self._reset_takes_seed = self._reset_takes("seed")
        self.takes_options = self._reset_takes("options")

    @property
    def observation_space(self) -> Any:  # type: ignore[override]
        """The env's observation space; None as long as it has none."""
        return attribute(self.env, "observation_space")

    @property
    def action_space(self) -> Any:  # type: ignore[override]
        """The env's action space; None as long as it has none."""
        return attribute(self.env, "action_space")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env; if its `reset` does not take `options`, they become arguments of it."""
        result = self.env.reset(**self._arguments_of_reset(seed, options))
        return split_reset(result, self.observation_space)

    def _arguments_of_reset(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> dict[str, Any]:
        arguments = dict(options or {})
        if self.takes_options:
            arguments = {"options": arguments} if arguments else {}
        if seed is not None and self._reset_takes_seed:
            arguments["seed"] = seed
        elif seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        return arguments

    def step(self, action: Any) -> Any:
        """Take one action and return gymnasium's five values; a malformed result stays as it is."""
        return _five_values(self.env.step(action))

    def render(self, mode: str | None = None) -> Any:
        """Return what the env renders; `mode` counts only for envs built without a render mode."""
        if self.render_mode is not None:
            return self.env.render()
        return self.env.render(mode=mode or "rgb_array")

    def close(self) -> Any:
        """Close the env, if it has such a method, whose result may have to be awaited."""
        method = getattr(self.env, "close", None)
        return method() if callable(method) else None

    @property
    def unwrapped(self) -> Any:
        """The env without any wrapper."""
        return getattr(self.env, "unwrapped", self.env)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute from the outermost wrapper that has it, or from the env itself."""
        for layer in self._layers[:-1]:
            if defines(layer, name):
                return getattr(layer, name)
        return getattr(self._layers[-1], name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute where it is defined, else on the env inside of all wrappers."""
        layer = next((one for one in self._layers if defines(one, name)), self._layers[-1])
        setattr(layer, name, value)
        return True

    def _reset_takes(self, name: str) -> bool:
        # Wrappers pass keywords through; only the env itself shows whether it takes this one.
        *wrappers, innermost = self._layers
        return accepts(innermost.reset, name) is True and all(
            accepts(wrapper.reset, name) is not False for wrapper in wrappers
        )


def _five_values(result: Any) -> Any:
    if not isinstance(result, (tuple, list)) or len(result) != 4:
        return result
    obs, reward, done, info = result
    cut = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
    return obs, reward, bool(done) and not cut, cut, info


class AsyncOldGymEnv(OldGymEnv):
    """An `OldGymEnv` for a plain class whose `reset` and `step` are coroutines.

    Args:
        env: the env, without wrappers.
    """

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Reset the env, as `OldGymEnv` does."""
        result = await awaited(self.env.reset(**self._arguments_of_reset(seed, options)))
        return split_reset(result, self.observation_space)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        """Take one action, as `OldGymEnv` does."""
        return _five_values(await awaited(self.env.step(action)))


def defines(layer: Any, name: str) -> bool:
    """Return whether an attribute is an object's own, and not one of the env that it wraps."""
    # hasattr would not do: gym's wrappers pass on every attribute of the env that they wrap.
    return name in getattr(layer, "__dict__", {}) or hasattr(type(layer), name)
