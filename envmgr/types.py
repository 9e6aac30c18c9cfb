"""Types that every part of envmgr shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class EnvTimestep(NamedTuple):
    """The result of one env step: four fields, in the order of DI-engine's `BaseEnvTimestep`.

    Attributes:
        obs: the observation after the step; at an episode's end, the terminal observation.
        reward: what the env returned (a float for gymnasium envs).
        done: whether the episode ended (`terminated or truncated` for gymnasium envs).
        info: the env's info. For gymnasium envs it also holds `terminated` and `truncated`; in an
            abnormal timestep it holds `abnormal=True` and `error`. The properties `terminated` and
            `truncated` read the info.
    """

    obs: Any
    reward: Any
    done: bool
    info: Any

    @property
    def terminated(self) -> Any:
        """Whether the info says that the episode ended in a terminal state; else False."""
        return self._said("terminated")

    @property
    def truncated(self) -> Any:
        """Whether the info says that the episode was cut off, as by a time limit; else False."""
        return self._said("truncated")

    def _said(self, name: str) -> Any:
        """Return what the info has under a name; for several agents, a dict by agent."""
        info = self.info
        return info.get(name, False) if isinstance(info, Mapping) else False


class Once(dict[str, Any]):
    """Reset params for a single reset: `manager.reset({0: Once(level=3)})`, or those of `launch`.

    Otherwise an env keeps its params for later automatic resets; after this reset it has none.
    """


EnvFactory = Callable[[], Any]
"""Builds one env: a `BaseEnv` or a `gymnasium.Env`."""


EnvIds = Iterable[int | np.integer[Any]]
"""Several env_ids: a list, a range, a set, an array (k,) of integers such as `batch.env_ids`."""


class Clock(Protocol):
    """Monotonic seconds. Tests pass a clock that they move by hand."""

    def __call__(self) -> float:
        """Return the present moment in seconds; never goes back."""
        ...


monotonic: Clock = time.monotonic


def is_abnormal(info: Any) -> bool:
    """Return whether an info, or one in a list or tuple of infos, marks its step as abnormal."""
    if type(info) is dict or isinstance(info, Mapping):
        return bool(info.get("abnormal", False))
    if isinstance(info, (list, tuple)):
        return any(is_abnormal(part) for part in info)
    return False
