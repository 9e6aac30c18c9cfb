"""When a collection is complete."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from envmgr.collect.statistics import CollectStatistics
from envmgr.errors import ConfigError
from envmgr.spaces import codec_of
from envmgr.spaces.reading import short_text


class Goal:
    """The goal of a collection: when it is complete, and what it may still begin.

    Args:
        statistics: the statistics when the collection begins.
        steps: how many more timesteps to collect; None for any number.
        episodes: how many more episodes that end normally; None for any number.
    """

    def __init__(
        self, statistics: CollectStatistics, steps: int | None, episodes: int | None
    ) -> None:
        self._steps = math.inf if steps is None else statistics.steps + steps
        self._episodes = math.inf if episodes is None else statistics.episodes + episodes

    def is_reached(self, statistics: CollectStatistics) -> bool:
        """Return whether there is nothing left to collect."""
        return statistics.steps >= self._steps or statistics.episodes >= self._episodes

    def may_send(self, statistics: CollectStatistics, n_pending: int) -> int:
        """Return how many actions may be sent besides those under way."""
        if math.isinf(self._steps):
            return sys.maxsize
        return max(int(self._steps) - statistics.steps - n_pending, 0)

    def may_join(self, statistics: CollectStatistics, n_under_way: int, n_waiting: int) -> int:
        """Return how many of the waiting envs may take part besides those under way."""
        if math.isinf(self._episodes):
            return n_waiting
        return max(int(self._episodes) - statistics.episodes - n_under_way, 0)


def check_manager(manager: Any, collector: str) -> None:
    """Refuse what is not a manager, such as a policy that is passed in its place.

    Raises:
        ConfigError: it has no `env_num`, which managers have.
    """
    if not hasattr(manager, "env_num"):
        raise ConfigError(
            f"{collector} got {short_text(manager)} for a manager: the first argument is the "
            f"manager, the second the policy, as in {collector}(manager, policy)"
        )


def spaces_of(manager: Any) -> list[tuple[Any, Any]]:
    """Return the observation and the action space of each env of a manager."""
    if manager.cfg.same_spaces:
        return [(manager.observation_space, manager.action_space)] * manager.env_num
    return list(manager.env_spaces)


def seeds_of(manager: Any) -> dict[int, int | None]:
    """Return what each env of a manager was seeded with, in the config or by `seed`."""
    return dict(manager._seeds.of_envs)


def check_layouts(manager: Any, collector: str) -> None:
    """Refuse envs whose observations, or actions, cannot be rows of one array.

    Raises:
        ConfigError: their spaces have different layouts.
    """
    spaces_by_env = spaces_of(manager)
    for k, name in enumerate(("observation", "action")):
        spaces = [pair[k] for pair in spaces_by_env]
        layouts = [codec_of(space).structure for space in spaces]
        odd = [env_id for env_id, layout in enumerate(layouts) if layout != layouts[0]]
        if odd:
            raise ConfigError(
                f"{collector} has one array for all envs, but the {name} space of env {odd[0]} is "
                f"{short_text(spaces[odd[0]])}, and that of env 0 {short_text(spaces[0])}. Collect "
                "with StepCollector or EpisodeCollector, or wrap the envs so that they are alike."
            )


def check_count(name: str, value: Any) -> None:
    """Refuse a number of steps or episodes that makes no sense.

    Raises:
        ConfigError: it is not an integer >= 1.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < 1:
        raise ConfigError(f"{name} is {value!r}, but must be an integer >= 1")


def check_goal(steps: int | None, episodes: int | None) -> None:
    """Refuse a goal that makes no sense.

    Raises:
        ConfigError: both are given, or one is not an integer >= 1.
    """
    if steps is not None and episodes is not None:
        raise ConfigError(
            f"steps is {steps} and episodes is {episodes}, but a collection ends with one of the "
            "two. Leave the other out."
        )
    for name, value in (("steps", steps), ("episodes", episodes)):
        if value is not None:
            check_count(name, value)


def keys_of_infos(keys: Sequence[str]) -> tuple[str, ...]:
    """Return keys of infos, each once.

    Raises:
        ConfigError: they are not keys.
    """
    if isinstance(keys, (list, tuple, set, frozenset)) and all(type(key) is str for key in keys):
        return tuple(dict.fromkeys(keys))
    raise ConfigError(
        "info_keys should be a list of keys of infos, such as ['episode'], it is "
        f"{short_text(keys)}"
    )
