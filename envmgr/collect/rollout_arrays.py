"""The arrays of a rollout, and how collectors fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.collect.records import EpisodeRecord
from envmgr.core import ArrayBatch
from envmgr.errors import ActionError, ConfigError
from envmgr.spaces import codec_of, put_rows, zeros_for

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Ends(NamedTuple):
    """Episodes that ended with the timesteps of one gather.

    Attributes:
        steps: (m,) the step of each in the rollout.
        env_ids: (m,) ascending.
        obs: (m, *shape) their terminal observations.
        states: (m, ...) what the policy went on with; None if it has no state.
    """

    steps: Ints
    env_ids: Ints
    obs: Any
    states: Any


class Recorded(NamedTuple):
    """How much of a buffer is filled: replaced as a whole, so that it is never half true.

    Attributes:
        even: how many steps of each env there are, if they are as many of all.
        lengths: (n,) how many of each; None if `even` says.
        n_ends: how many gathers with ends of episodes there are.
        n_episodes: how many records of episodes.
        is_complete: see `RolloutBuffer`.
        starts: (n,): whether the next step of each env is an episode's first; None: no one's is.
        states: (n, ...): what a recurrent policy is given next; None for others.
        tally: the accounts of episodes.
        applied: the batch that was recorded last.
    """

    even: int
    lengths: Ints | None
    n_ends: int
    n_episodes: int
    is_complete: bool
    starts: Bools | None
    states: Any
    tally: Any
    applied: ArrayBatch | None

    def where(self, env_ids: Ints, n: int) -> Any:
        """Return where the next steps of these of n envs go: a row, or (steps, env_ids)."""
        if self.lengths is not None:
            return self.lengths[env_ids], env_ids
        if len(env_ids) == n:
            return self.even
        return np.full(len(env_ids), self.even), env_ids


make_recorded = partial(tuple.__new__, Recorded)
"""Makes one of a tuple, in half the time."""


class RolloutArrays:
    """What `RolloutBuffer` holds, where it is described.

    Whatever interrupts its filling, it holds as many steps as `recorded` says, and these whole.
    """

    def __init__(
        self,
        observation_space: Any,
        n_steps: int,
        n_envs: int,
        value_fn: Callable[..., Any] | None = None,
    ) -> None:
        codec = codec_of(observation_space)
        self.n_steps, self.n_envs = n_steps, n_envs
        self.obs: Any = codec.zeros(n_steps, n_envs)
        self.last_obs: Any = codec.zeros(n_envs)
        self.actions: Any = None
        self.rewards: Any = None
        self.states: Any = None
        self.last_states: Any = None
        self.extras: dict[str, Any] = {}
        self.terminated: Bools = np.zeros((n_steps, n_envs), np.bool_)
        self.truncated, self.abnormal = self.terminated.copy(), self.terminated.copy()
        self.episode_starts = self.terminated.copy()
        self.recorded = Recorded(0, None, 0, 0, False, None, None, None, None)
        self._value_fn = value_fn
        self._all_ends: list[Ends] = []
        self._all_episodes: list[EpisodeRecord] = []
        self._is_put = False

    @property
    def lengths(self) -> Ints:
        """(n,): how many steps of each env there are.

        T, unless the rollout is not complete, or an env has no more episodes.
        """
        even, lengths = self.recorded[:2]
        return np.full(self.n_envs, even) if lengths is None else lengths.copy()

    # -- how it is filled ---------------------------------------------------------------------

    def put_step(
        self, where: Any, count: int, actions: Any, extras: Mapping[str, Any], states: Any
    ) -> None:
        """Put in what a policy has chosen; for collectors.

        Raises:
            ActionError: it has not one row for each observation, or differs from what was before.
        """
        if extras.keys() != self.extras.keys():
            if self._is_put:
                raise ActionError(
                    f"the policy returned the extras {sorted(extras)}, and {sorted(self.extras)} "
                    "before; it should return the same ones each time"
                )
            self.extras = {name: self._room(rows) for name, rows in extras.items()}
        if not self._is_put:
            self.actions = self._room(actions)
            self.states = None if states is None else self._room(states)
            self._is_put = True
        name = "actions"
        try:
            if type(actions) is np.ndarray and type(self.actions) is np.ndarray:  # mostly
                _check_rows(actions, count)
                self.actions[where] = actions
            else:
                put_rows(self.actions, where, actions)
            for name, rows in extras.items():
                _check_rows(rows, count)
                put_rows(self.extras[name], where, rows)
            if states is not None:
                name = "state"
                put_rows(self.states, where, states)
        except (ValueError, TypeError, KeyError) as error:
            raise ActionError(
                f"what the policy returned as {name} does not fit: {error}. It should have one row "
                f"for each of the {count} observations, and the same shape each time. Nothing was "
                "sent to any env."
            ) from error

    def put_rewards(self, where: Any, rewards: npt.NDArray[Any]) -> None:
        """Put in what envs gave; for collectors.

        Raises:
            ConfigError: they are no numbers.
        """
        if self.rewards is None:
            if rewards.dtype.hasobject:
                raise ConfigError(
                    "rollouts hold rewards that are numbers, or arrays of one shape, and these "
                    "are neither: collect episodes with EpisodeCollector, or wrap the envs"
                )
            self.rewards = self._room(rewards)
        room = self.rewards.ndim - 2
        if rewards.ndim == 1 and room:  # of abnormal timesteps alone: 0.0 each
            rewards = rewards.reshape(-1, *(1,) * room)
        self.rewards[where] = rewards

    def put_ends(self, where: Any, batch: ArrayBatch, abnormal: Bools, ends: Ends) -> None:
        """Put in that episodes have ended; for collectors."""
        self.terminated[where] = batch.terminated
        self.truncated[where] = batch.truncated
        self.abnormal[where] = abnormal
        self._all_ends[self.recorded.n_ends :] = [ends]

    def put_episodes(self, records: list[EpisodeRecord]) -> None:
        """Put in the records of episodes that have ended; for collectors."""
        self._all_episodes[self.recorded.n_episodes :] = records

    def put_last(self, where: Any, obs: Any, states: Any) -> None:
        """Put in what steps have led to; for collectors."""
        put_rows(self.last_obs, where, obs)
        if states is not None:
            if self.last_states is None:
                self.last_states = zeros_for(states, self.n_envs)
            put_rows(self.last_states, where, states)

    def begin(self, starts: Bools | None, states: Any, tally: Any) -> None:
        """Begin anew, with what `Recorded` says; for collectors."""
        self._all_ends, self._all_episodes = [], []
        for flags in (self.terminated, self.truncated, self.abnormal, self.episode_starts):
            flags.fill(False)
        self.recorded = Recorded(0, None, 0, 0, False, starts, states, tally, None)

    def _room(self, rows: Any) -> Any:
        return zeros_for(rows, self.n_steps, self.n_envs)


def _check_rows(rows: Any, count: int) -> None:
    if type(rows) is np.ndarray and len(rows) != count:
        raise ValueError(f"{len(rows)} rows")
