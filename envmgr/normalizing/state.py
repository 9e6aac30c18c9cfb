"""All that is known of what was handed out; replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.normalizing.moments import Floats, Moments, no_moments

OF_EPISODES = ("discounted", "returns", "lengths", "is_new")
"""What is known of the episodes that are under way."""


class State(NamedTuple):
    """All that is known of what was handed out.

    Attributes:
        obs: the moments of each array that is normalised.
        reward: the moments of discounted returns.
        discounted: the discounted return of each env's episode so far.
        returns: its sum of rewards so far.
        lengths: its number of steps so far.
        began_s: when the episode before it ended.
        is_new: whether the next observation that the env shows is the first of an episode.
        counted: envs whose next timestep was counted, and is handed out once more.
        told: the statistics of each env's episode that ended last, by env_id.
    """

    obs: tuple[Moments, ...]
    reward: Moments
    discounted: Floats
    returns: Floats
    lengths: npt.NDArray[np.int64]
    began_s: Floats
    is_new: npt.NDArray[np.bool_]
    counted: frozenset[int] = frozenset()
    told: Mapping[int, dict[str, Any]] = MappingProxyType({})

    def begun(self, env_ids: Sequence[int], now: float) -> State:
        """Return the state when these envs are at the beginning of an episode."""
        discounted, returns, lengths, began_s, is_new = (c.copy() for c in self[2:7])
        for column in (discounted, returns, lengths):
            column[env_ids] = 0
        began_s[env_ids], is_new[env_ids] = now, True
        columns = discounted, returns, lengths, began_s, is_new
        counted = self.counted.difference(env_ids)
        return State(self.obs, self.reward, *columns, counted, self.told)

    def with_rewards(
        self, ids: Any, rewards: Floats, counted: Any, done: Any, gamma: float
    ) -> State:
        """Return the state with the discounted returns after these rewards; those `counted` count.

        A NaN or an infinite reward is skipped, as nothing else would be left of its episode.
        """
        discounted, finite = self.discounted.copy(), np.isfinite(rewards)
        now = discounted[ids] * gamma + np.where(finite, rewards, 0.0)
        discounted[ids] = np.where(done, 0.0, now)
        return self._replace(reward=self.reward.seen(now[counted & finite]), discounted=discounted)

    def with_episodes(
        self, ids: Any, rewards: Floats, normal: Any, done: Any, now: float
    ) -> tuple[State, dict[int, dict[str, Any]]]:
        """Return the state with these rewards added, and the episodes that ended, by env_id."""
        returns, lengths = self.returns.copy(), self.lengths.copy()
        returns[ids] += rewards
        lengths[ids] += 1
        episodes = {}
        for k in done.nonzero()[0].tolist():
            i = int(ids[k])
            if normal[k]:  # else a failure has cut it short, and it says nothing
                took_s = round(now - float(self.began_s[i]), 6)
                episodes[i] = {"r": float(returns[i]), "l": int(lengths[i]), "t": took_s}
        returns[ids[done]] = 0.0
        lengths[ids[done]] = 0
        began_s = self.began_s.copy()
        began_s[ids[done]] = now
        told = {**self.told, **episodes} if episodes else self.told
        state = self._replace(returns=returns, lengths=lengths, began_s=began_s, told=told)
        return state, episodes


def no_state(env_num: int, now: float) -> State:
    """Return the state before anything was handed out."""
    zeros = np.zeros(env_num)
    lengths, is_new = np.zeros(env_num, np.int64), np.ones(env_num, np.bool_)
    return State((), no_moments(()), zeros, zeros, lengths, np.full(env_num, now), is_new)
