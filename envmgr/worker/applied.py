"""Functions that are run in a host on one of its envs (APPLY), and what they get of the env."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from envmgr import pickles
from envmgr.env import adapt, states
from envmgr.env.contract import StepResult


class AppliedEnv(NamedTuple):
    """An env in its host, for a function that is applied to it.

    What the function does to the env is its own business: the manager does not hear of steps and
    resets that it takes.

    Attributes:
        env: the env, in the form that `envmgr.env.adapt` runs.
        step_result: takes one action in the env and returns the result of that step.
        action_space: the space that actions come from.
        reset_params: keyword arguments of its resets, as the last one had them.
        episodes: how many episodes the env has ended in this host.
    """

    env: Any
    step_result: Callable[[Any], StepResult]
    action_space: Any
    reset_params: Mapping[str, Any]
    episodes: int = 0


class EnvFunction:
    """A function that APPLY runs on an env as its factory built it.

    It is pickled whole where its module cannot be imported, as with a script's `__main__`.

    Args:
        args: its arguments besides the env.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args

    def __call__(self, applied: AppliedEnv) -> Any:
        """Return what the function returns for the env."""
        return self._function(adapt.as_built(applied.env), *self._args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (pickles.dumps((self._function, self._args)),)


def take_state(applied: AppliedEnv, copies: bool) -> tuple[bytes, int] | str:
    """Return an env's state and how many episodes it has ended, or a text on what is missing."""
    try:
        return states.take(applied.env, copies=copies), applied.episodes
    except states.NoStateError as error:
        return str(error)


def try_state(applied: AppliedEnv, copies: bool, state: bytes) -> str | None:
    """Put a state into an env, then restore its own state; return what is wrong, or None."""
    try:
        before = states.take(applied.env, copies=copies)
        try:
            states.put(applied.env, state)
        finally:
            states.put(applied.env, before)
    except states.NoStateError as error:
        return str(error)
    return None


def _loaded(pickled: bytes) -> EnvFunction:
    return EnvFunction(*pickle.loads(pickled))  # noqa: S301 - from the parent
