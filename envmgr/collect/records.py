"""What is recorded of each episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from envmgr.errors import EnvProtocolError

Return = float | list[float]
"""The sum of an episode's rewards; a list if a reward is an array of several numbers."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode that ended.

    Attributes:
        number: 0 for the first episode that ended in this collection, and so on.
        env_id: the env that ran it.
        nth: 0 for the first episode of this env in this collection, and so on.
        seed: what the env was seeded with at launch; None if it was not.
        generation: how often the env had been renewed when the episode began; with `seed` and
            `nth` it identifies the sequence of random numbers that the episode used. None for
            episodes in rollouts.
        episode_return: the sum of its rewards.
        length: the number of its timesteps, including an abnormal one.
        terminated: whether the env itself ended it; None if the env does not say.
        truncated: whether it was cut off, by a time limit or a failure; None if the env does not
            say.
        abnormal: whether a failure ended it; return and length are those up to the failure.
        failure: what failed, in words; None unless abnormal.
        duration_s: seconds from its first action to its last timestep.
        ended_s: seconds from the beginning of the collection to the end of the episode.
    """

    number: int
    env_id: int
    nth: int
    seed: int | None
    generation: int | None
    episode_return: Return
    length: int
    terminated: bool | None
    truncated: bool | None
    abnormal: bool
    failure: str | None
    duration_s: float
    ended_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the record as values that JSON can hold; non-finite numbers become None."""
        return {
            "episode": self.number,
            "env_id": self.env_id,
            "nth": self.nth,
            "seed": self.seed,
            "generation": self.generation,
            "return": as_json(self.episode_return),
            "length": self.length,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "abnormal": self.abnormal,
            "failure": self.failure,
            "duration_s": round(self.duration_s, 6),
            "ended_s": round(self.ended_s, 6),
        }


class OpenEpisode(NamedTuple):
    """An episode under way; never changed in place, except for `steps`.

    Attributes:
        generation: see `EpisodeRecord`.
        began: the time on the clock when its first action was sent.
        rewards: the sum of its rewards so far: a float, or an array.
        length: the number of its timesteps so far.
        state: the state that a recurrent policy is given next.
        steps: the steps that are kept: all from the one at `first` on, and perhaps one that does
            not count yet.
        first: see `steps`.
    """

    generation: int | None
    began: float
    rewards: Any = 0.0
    length: int = 0
    state: Any = None
    steps: list[Any] | None = None
    first: int = 0

    def after(self, reward: Any, env_id: int, state: Any = None) -> OpenEpisode:
        """Return the episode with one more timestep.

        Raises:
            EnvProtocolError: the reward is neither a number nor an array of numbers, nor a dict of
                these by agent, whose sum counts.
        """
        generation, began, rewards, length, _, steps, first = self
        rewards = rewards + (reward if type(reward) is float else _as_numbers(reward, env_id))
        return _episode((generation, began, rewards, length + 1, state, steps, first))


_episode = partial(tuple.__new__, OpenEpisode)  # in half the time


def _as_numbers(reward: Any, env_id: int) -> Any:
    if isinstance(reward, Mapping):  # by agent
        return sum(_as_numbers(of_one, env_id) for of_one in reward.values())
    try:
        numbers = np.asarray(reward, dtype=np.float64)
    except (TypeError, ValueError):
        raise EnvProtocolError(
            f"the reward of env {env_id} is a {type(reward).__name__}, neither a number nor an "
            "array of numbers, so the return of its episode cannot be summed up; wrap the env so "
            "that its reward is one",
            env_id=env_id,
            during="step",
        ) from None
    return float(numbers.item()) if numbers.size == 1 else numbers


def flag_of(info: Any, name: str) -> bool | None:
    """Return `terminated` or `truncated` of an info; None if it does not say."""
    value = info.get(name) if isinstance(info, Mapping) else None
    if isinstance(value, Mapping):  # by agent
        return any(value.values())
    return None if value is None else bool(value)


def as_return(rewards: Any) -> Return:
    """Return summed rewards as a float, or as a list of floats."""
    if isinstance(rewards, np.ndarray):
        return [float(one) for one in rewards.ravel()]
    return float(rewards)


def as_json(value: Any) -> Any:
    """Return numbers as JSON holds them: what is not finite becomes None."""
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    return value if math.isfinite(value) else None
