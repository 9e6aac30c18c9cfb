"""What a function that is run in a host, on one of its envs, is given of it (APPLY)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from envmgr.env.contract import Outcome


class AppliedEnv(NamedTuple):
    """An env in its host, for a function that is applied to it.

    What the function does to the env is its own business: the manager does not hear of steps and
    resets that it takes.

    Attributes:
        env: the env, in the form that `envmgr.env.adapt` runs.
        outcome: takes one action in it.
        action_space: where actions come from.
        reset_params: keyword arguments of its resets, as the last one had them.
    """

    env: Any
    outcome: Callable[[Any], Outcome]
    action_space: Any
    reset_params: Mapping[str, Any]
