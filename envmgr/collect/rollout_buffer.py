"""The rollout buffer: T steps of n envs in preallocated arrays, and their advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.collect.gae import Advantages, gae
from envmgr.collect.records import EpisodeRecord
from envmgr.collect.rollout_arrays import Bools, Ends, Ints, RolloutArrays
from envmgr.errors import ConfigError, StateError
from envmgr.spaces import as_batch, concatenated, indexed, leafwise, merged_axes


class RolloutBuffer(RolloutArrays):
    """T steps of each of n envs, as arrays (T, n, ...), and what follows the last of them.

    Step t of env i is `obs[t, i]`, `actions[t, i]`, `rewards[t, i]`, and what they led to: the
    terminal observation, if the episode ended there, else `obs[t + 1, i]`, or `last_obs[i]`.
    Observations are nested as their space. What a policy returns besides actions is in `extras`, in
    arrays that are allocated when it first does.

    The step of an env that failed is none: `abnormal` is True there, `mask` is False, and it should
    not be learnt from. Its episode counts as cut off at `obs[t, i]`.

    Args:
        observation_space: of one env.
        n_steps: T.
        n_envs: n.
        value_fn: what `gae` uses unless it is given another.

    Attributes:
        obs: (T, n, *shape): what the actions were chosen for.
        actions: (T, n, ...).
        rewards: (T, n) float64.
        terminated: (T, n) bool.
        truncated: (T, n) bool; of failures, too.
        abnormal: (T, n) bool: the env failed.
        episode_starts: (T, n) bool: the first step of an episode.
        extras: (T, n, ...) by name.
        infos: by key, what envs have told: values (T, n, ...), and present (T, n) bool, as
            `ArrayBatch.info_columns` has them; of the collector's `info_keys`, once an env has
            told any.
        states: (T, n, ...): what a recurrent policy was given; None for others.
        last_obs: (n, *shape): what the last step of each env led to, when the rollout is complete;
            at an episode's end, the terminal observation.
        last_states: (n, ...): what the policy returned with it; None without states.
        lengths: (n,): how many steps of each env there are. T, unless the rollout is not complete,
            or an env has no more episodes.
        recorded: how much of it is filled; the collector's.
    """

    # -- what was collected -------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether `collect` has returned it, and does not go on with it."""
        return self.recorded.is_complete

    @property
    def episodes(self) -> list[EpisodeRecord]:
        """The records of the episodes that ended in this rollout, in order."""
        return self._all_episodes[: self.recorded.n_episodes]

    @property
    def mask(self) -> Bools:
        """(T, n) bool: where there is a step that can be learnt from."""
        recorded: Bools = np.arange(self.n_steps)[:, None] < self.lengths
        recorded &= ~self.abnormal
        return recorded

    @property
    def _ends(self) -> list[Ends]:
        return self._all_ends[: self.recorded.n_ends]

    @property
    def terminal_steps(self) -> Ints:
        """(m,): the steps with which episodes ended; `terminal_env_ids` says of which env."""
        return np.concatenate([_NONE, *(ends.steps for ends in self._ends)])

    @property
    def terminal_env_ids(self) -> Ints:
        """(m,): the envs whose episodes ended, in the order in which they did."""
        return np.concatenate([_NONE, *(ends.env_ids for ends in self._ends)])

    @property
    def terminal_obs(self) -> Any:
        """(m, *shape): the terminal observations, in the order of `terminal_steps`.

        Of an env that failed, the last good one.
        """
        if not self._ends:
            return indexed(self.last_obs, slice(0, 0))
        return concatenated([ends.obs for ends in self._ends])

    def flatten(self, column: Any) -> Any:
        """Return the rows of a column where `mask` is True: (T, n, ...) becomes (N, ...).

        Args:
            column: `obs`, `actions`, `extras["value"]`, advantages ...; nested or not.
        """
        return indexed(column, self.mask)

    # -- advantages ---------------------------------------------------------------------------

    def gae(
        self,
        value_fn: Callable[..., Any] | None = None,
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
        values: npt.ArrayLike | None = None,
    ) -> Advantages:
        """Return generalized advantages and returns, (T, n) each; see `envmgr.collect.gae`.

        An episode that was truncated, and one that goes on after the rollout, ends with the value
        of its last observation; one that terminated with 0. Steps outside of `mask` have advantage
        0, and the episode of an env that failed ends with the value of its last good observation.

        Args:
            value_fn: `(k, *shape) -> (k,)`, the values of observations; with a recurrent policy
                called as `value_fn(obs, states)`. None: `policy.value`. It is called once for all
                of them together.
            gamma: discount per step.
            lam: weight of the longer estimates.
            values: (T, n) those of `obs`; None: `extras["value"]`, or else what `value_fn` says.

        Raises:
            ConfigError: nothing gives values, or they are not one for each observation.
            StateError: the rollout is not complete: `collect` goes on with it.
        """
        value_fn = value_fn or self._value_fn
        if not self.is_complete:
            raise StateError("this rollout is not complete: collect() goes on with it")
        if value_fn is None:
            raise ConfigError(
                "gae() needs the values of the last observations: give it a value_fn that returns "
                "them, or the policy a method `value`"
            )
        rewards = self._numbers()
        values = self.extras.get("value") if values is None else values
        if values is None:
            states = None if self.states is None else _merged(self.states)
            values = self._valued(value_fn, _merged(self.obs), states, self.terminated.shape)
        values = np.asarray(values, np.float64).reshape(self.terminated.shape)
        return gae(
            rewards,
            values,
            self._next_values(values, value_fn),
            self.terminated,
            self.truncated,
            gamma=gamma,
            lam=lam,
            mask=self.mask,
        )

    def _numbers(self) -> Any:
        """Return (T, n): the rewards, of one number each."""
        rewards = np.zeros(self.terminated.shape) if self.rewards is None else self.rewards
        if rewards.ndim != 2:
            raise ConfigError(
                "gae() needs rewards of one number, and these have shape "
                f"{rewards.shape[2:]}: call envmgr.collect.gae with the rewards that count"
            )
        return rewards

    def _next_values(self, values: Any, value_fn: Callable[..., Any]) -> Any:
        """Return (T, n): the values of what the steps led to; of terminated ones, anything."""
        following = np.zeros_like(values)
        following[:-1] = values[1:]
        steps, env_ids = self.terminal_steps, self.terminal_env_ids
        wanted = ~(self.terminated | self.abnormal)[steps, env_ids]
        steps, env_ids = steps[wanted], env_ids[wanted]
        last = np.maximum(self.lengths - 1, 0)
        ids = np.arange(self.n_envs)
        goes_on = (self.lengths > 0) & ~(self.terminated | self.truncated)[last, ids]
        ids, last = ids[goes_on], last[goes_on]
        if not len(steps) and not len(ids):
            return following
        obs = concatenated([indexed(self.terminal_obs, wanted), indexed(self.last_obs, ids)])
        states = None
        if self.states is not None:
            ended = [ends.states for ends in self._ends]
            parts = [indexed(concatenated(ended), wanted)] if ended else []
            states = concatenated([*parts, indexed(self.last_states, ids)])
        found = self._valued(value_fn, obs, states, (len(steps) + len(ids),))
        following[steps, env_ids] = found[: len(steps)]
        following[last, ids] = found[len(steps) :]
        return following

    def _valued(
        self, value_fn: Callable[..., Any], obs: Any, states: Any, shape: tuple[int, ...]
    ) -> Any:
        count = int(np.prod(shape))
        found = as_batch(value_fn(obs) if states is None else value_fn(obs, states))
        if found.size != count:
            raise ConfigError(
                f"the value function gave values of shape {found.shape} for {count} observations; "
                "it should give one for each"
            )
        return found.astype(np.float64).reshape(shape)


def _merged(column: Any) -> Any:
    """Return a column with its first two axes as one."""
    return leafwise(merged_axes, column)


_NONE: Ints = np.empty(0, np.int64)
