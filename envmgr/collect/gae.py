"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Advantages(NamedTuple):
    """What generalized advantage estimation gives.

    Attributes:
        advantages: float64, of the shape of the rewards.
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

    Nothing is carried across an episode's end. After `terminated` nothing is expected any more;
    after `truncated` what `next_values` says is.

    Args:
        rewards: (T,) or (T, n).
        values: of the observations that the actions were chosen for; likewise shaped.
        next_values: of the observations that the steps led to: at an episode's end, of its
            terminal observation, not of the one that the next episode begins with.
        terminated: whether the episode ended by itself.
        truncated: whether it was cut off.
        gamma: discount per step.
        lam: weight of the longer estimates; 0 is one-step TD, 1 is Monte Carlo.
        mask: False for padding, whose advantage is 0, and the step before ends with
            their value.
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
