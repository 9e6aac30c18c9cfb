"""What the `reset` of an env is called with: what was asked for, as far as the env takes it.

gymnasium's interface has `reset(seed=None, options=None)`, but many envs take less. The loops of
most trainers pass only what was asked for, so such envs run there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envmgr.env.contract import EnvContractError, accepts, attribute, env_name, layers_of

_NAMES = ("seed", "options")


class ResetArguments:
    """The arguments for the resets of one env.

    Args:
        env: the env, with its wrappers. Each of these has to take what is passed on to it.

    Attributes:
        least: the arguments for a reset without a seed and without options.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        resets = [attribute(layer, "reset") for layer in layers_of(env)]
        self._taken = [name for name in _NAMES if _takes(resets, name)]
        required = [name for name in self._taken if _requires(resets, name)]
        self.least: dict[str, Any] = dict.fromkeys(required)

    @property
    def include_seeds(self) -> bool:
        """Whether the env can be seeded, by its reset or by a method `seed`."""
        return "seed" in self._taken or self._seed_method() is not None

    def of(self, seed: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments for a reset.

        Args:
            seed: the seed; None for none. An env whose `reset` takes no seed, but that has a method
                `seed`, is seeded by that method at once.
            options: the options; None for none.

        Raises:
            EnvContractError: the env takes no seed, or no options, and was given some.
        """
        arguments = self.least.copy()
        if options:
            if "options" not in self._taken:
                raise EnvContractError(
                    f"reset of {env_name(self._env)} takes no `options`, and is to be given "
                    f"{dict(options)!r}. Have the env take reset(*, seed=None, options=None), or "
                    "leave out its reset params"
                )
            arguments["options"] = dict(options)  # for the env to change: they may be used again
        if seed is not None:
            if "seed" in self._taken:
                arguments["seed"] = seed
            elif (method := self._seed_method()) is not None:
                method(seed)
            else:
                raise EnvContractError(
                    f"reset of {env_name(self._env)} takes no `seed`, it has no method `seed`, and "
                    f"is to be seeded with {seed}. Have the env take reset(*, seed=None), or leave "
                    "out the seed"
                )
        return arguments

    def _seed_method(self) -> Callable[[Any], Any] | None:
        methods = (getattr(layer, "seed", None) for layer in layers_of(self._env))
        return next(filter(callable, methods), None)


def _takes(resets: Sequence[Any], name: str) -> bool:
    """Return whether an argument gets, or may get, through all layers."""
    return all(accepts(reset, name) is not False for reset in resets)


def _requires(resets: Sequence[Any], name: str) -> bool:
    """Return whether an argument is required, according to the first layer that names it."""
    reset = next((reset for reset in resets if accepts(reset, name)), None)
    if reset is None:
        return False
    return inspect.signature(reset).parameters[name].default is inspect.Parameter.empty
