"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

This knows steps alone. What it is given for envs that failed is up to `RolloutBuffer.gae`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Advantages(NamedTuple):
    """The result of generalized advantage estimation.

    Attributes:
        advantages: float64, in the shape of the rewards.
        returns: advantages plus values: the targets of a value function.
    """

    advantages: Floats
    returns: Floats


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    next_values: npt.ArrayLike,
    terminated: npt.ArrayLike,
    truncated: npt.ArrayLike,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: npt.ArrayLike | None = None,
) -> Advantages:
    """Return the advantages and returns of T steps, or of T steps of n envs.

    Nothing is carried across the end of an episode: a terminated step is bootstrapped with 0, a
    truncated one with its `next_values`.

    Args:
        rewards: (T,) or (T, n).
        values: values of the observations that the actions were chosen for, in the same shape.
        next_values: values of the observations that the steps led to: at the end of an episode, of
            its terminal observation, not of the first observation of the next episode.
        terminated: whether the episode ended by itself.
        truncated: whether it was cut off.
        gamma: discount per step.
        lam: weight of the longer estimates; 0 is one-step TD, 1 is Monte Carlo.
        mask: False for padding, and for steps in which the env failed: the advantage is 0, and the
            `next_values` of the step before have to be right all the same.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    ended = np.logical_or(terminated, truncated)
    expected = np.where(terminated, 0.0, np.asarray(next_values, np.float64))
    deltas = rewards + gamma * expected - values
    decay = gamma * lam * ~ended
    if mask is not None:
        deltas = np.where(mask, deltas, 0.0)
        decay = np.where(mask, decay, 0.0)
    advantages = np.zeros_like(deltas)
    following: Floats = np.zeros(deltas.shape[1:])
    carries = decay != 0.0  # across an end 0 times NaN would be NaN
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] + decay[t] * np.where(carries[t], following, 0.0)
        advantages[t] = following
    return Advantages(advantages, advantages + values)
