"""What has become of a step, a reset or an episode: what a trainer may train on, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from envmgr.errors import EnvCallAbandoned, EnvCrash, EnvFailure, EnvManagerError, EnvTimeout


class OutcomeStatus(str, Enum):
    """What is known of a request to an env. It is a str, so that it goes into JSON as it is."""

    COMPLETED = "completed"
    """The env has done it and answered."""
    FAILED = "failed"
    """It was tried and did not succeed, or was not even tried; either way that is known."""
    UNRESOLVED = "unresolved"
    """Whether it was done is unknown: the env hung or died in it, or nobody awaited the answer."""


_UNRESOLVED = (EnvTimeout, EnvCrash, EnvCallAbandoned)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of a step, a reset or an episode of one env.

    Attributes:
        status: completed, failed or unresolved.
        during: "step", "reset" or "episode".
        env_id: the env.
        generation: how often the env behind the env_id had been renewed when it was asked.
        attempt: how many resets the lease has asked for so far: another try, after a failure or an
            episode, has the next number.
        began_s: when it was asked for, in seconds of `time.monotonic`.
        ended_s: when the outcome was known.
        reward: the env's reward; of an episode, the sum of its rewards. None unless it was
            completed.
        cause: why it was not completed: mostly an `EnvFailure`. None if it was.
    """

    status: OutcomeStatus
    during: str
    env_id: int
    generation: int
    attempt: int
    began_s: float
    ended_s: float
    reward: Any = None
    cause: EnvManagerError | None = None

    @property
    def is_completed(self) -> bool:
        """Whether the env has answered: only then is there something to train on."""
        return self.status is OutcomeStatus.COMPLETED

    @property
    def seconds(self) -> float:
        """How long the step, reset or episode took."""
        return self.ended_s - self.began_s

    def of_episode(self, *, began_s: float, reward: Any) -> Outcome:
        """Return the outcome of the episode that has ended with this outcome.

        Args:
            began_s: when the episode's reset was asked for.
            reward: the sum of the rewards of its steps.
        """
        reward = reward if self.is_completed else None
        return replace(self, during="episode", began_s=began_s, reward=reward)


def status_of(cause: EnvManagerError | None, *, was_sent: bool = True) -> OutcomeStatus:
    """Return what is known of a request, given why it was not completed.

    Args:
        cause: why it was not completed; None if it was.
        was_sent: whether the env was asked at all.
    """
    if cause is None:
        return OutcomeStatus.COMPLETED
    resolved = isinstance(cause, EnvFailure) and not isinstance(cause, _UNRESOLVED)
    return OutcomeStatus.FAILED if resolved or not was_sent else OutcomeStatus.UNRESOLVED


def summed(total: Any, reward: Any) -> Any:
    """Return the sum of a total and a reward; if they cannot be added, the reward alone.

    Rewards by agent, or in lists, are added one by one: agents may come and go.
    """
    if total is None:
        return reward
    if isinstance(total, Mapping) and isinstance(reward, Mapping):
        return {**total, **{key: summed(total.get(key), part) for key, part in reward.items()}}
    if isinstance(total, (list, tuple)) and isinstance(reward, (list, tuple)):
        are_alike = len(total) == len(reward)
        return [summed(*pair) for pair in zip(total, reward, strict=True)] if are_alike else reward
    try:
        return total + reward
    except Exception:  # rewards of different forms
        return reward


def failure_in(info: Any) -> EnvFailure | None:
    """Return the failure in the info of a timestep, or in one of its infos; None if none is."""
    parts = info if isinstance(info, (list, tuple)) else (info,)
    for part in parts:
        error = part.get("error") if isinstance(part, Mapping) else None
        if isinstance(error, EnvFailure):
            return error
    return None
