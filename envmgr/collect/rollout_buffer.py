"""The rollout buffer: T steps of n envs in preallocated arrays, and their advantages.

It decides what counts in them, and what follows a step, where envs failed or episodes were cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.collect.gae import Advantages, gae
from envmgr.collect.policies import check_names, check_rows, unfit
from envmgr.collect.records import EpisodeRecord, as_return
from envmgr.collect.statistics import CollectStatistics
from envmgr.core import ArrayBatch, InfoColumn
from envmgr.errors import ConfigError, StateError
from envmgr.spaces import (
    as_batch,
    codec_of,
    concatenated,
    indexed,
    leafwise,
    merged_axes,
    put_rows,
    zeros_for,
)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Ends(NamedTuple):
    """Episodes that ended with the timesteps of one gather.

    Attributes:
        steps: (m,) the step of each in the rollout.
        env_ids: (m,) ascending.
        obs: (m, *shape) their terminal observations.
        states: (m, ...) the states that the policy returned in these steps; None if it has none.
    """

    steps: Ints
    env_ids: Ints
    obs: Any
    states: Any


class Tally(NamedTuple):
    """Where the episodes under way began, and what was collected before; never changed in place.

    Attributes:
        begins: (n,): the step of this rollout that is the first of each env's episode; 0 if it
            began earlier.
        returns: (n, ...): the sums of the rewards of these episodes before this rollout.
        earlier: (n,): how many steps they had before this rollout.
        began_s: (n,): when their first actions were sent, on the clock.
        n_ended: (n,): how many episodes of each env have ended.
        statistics: the statistics of what was collected before this rollout, and of all episodes
            that ended.
    """

    begins: Ints
    returns: npt.NDArray[Any]
    earlier: Ints
    began_s: npt.NDArray[np.float64]
    n_ended: Ints
    statistics: CollectStatistics

    @classmethod
    def of(cls, n: int, statistics: CollectStatistics) -> Tally:
        """Return the tally of n envs whose episodes are about to begin."""
        nothing = np.zeros(n, np.int64)
        return cls(nothing, np.zeros(n), nothing, np.zeros(n), nothing, statistics)

    def begun(self, env_ids: Ints, now: float) -> Tally:
        """Return the tally after the first actions of episodes of `env_ids` are sent, at `now`."""
        began_s = self.began_s.copy()
        began_s[env_ids] = now
        return self._replace(began_s=began_s)

    def after(self, rollout: RolloutBuffer, steps: int) -> Tally:
        """Return the tally with which the next rollout begins.

        Args:
            rollout: the rollout that is complete.
            steps: the number of steps in it.
        """
        statistics = self.statistics.copied()
        statistics.steps += steps
        returns, lengths = self.returns, rollout.lengths
        if rollout.rewards is not None:
            given = _summed(rollout.rewards, self.begins, lengths)
            returns = given if returns.shape != given.shape else returns + given
        nothing = np.zeros_like(self.begins)
        earlier = self.earlier + lengths - self.begins
        return Tally(nothing, returns, earlier, self.began_s, self.n_ended, statistics)

    def ended(
        self,
        rollout: RolloutBuffer,
        ends: Ends,
        failures: Mapping[int, str],
        seeds: Mapping[int, int | None],
        now: float,
        elapsed_s: float,
    ) -> tuple[Tally, list[EpisodeRecord]]:
        """Return the tally after episodes have ended, and the records of these episodes.

        Args:
            rollout: the rollout with their steps up to their ends.
            ends: the episodes that have ended.
            failures: the failures that ended some of them, by env_id.
            seeds: the seeds of all envs.
            now: the time on the clock.
            elapsed_s: seconds of the collection so far.
        """
        begins, returns, earlier, _, n_ended = (column.copy() for column in self[:5])
        statistics = self.statistics.copied()
        records = []
        for step, i in zip(ends.steps.tolist(), ends.env_ids.tolist(), strict=True):
            begin = int(self.begins[i])
            given = rollout.rewards[begin : step + 1, i].sum(axis=0)
            carried = self.returns[i] if self.earlier[i] else 0.0
            failure = failures.get(i)
            record = EpisodeRecord(
                number=statistics.n_ended,
                env_id=i,
                nth=int(self.n_ended[i]),
                seed=seeds.get(i),
                generation=None,
                episode_return=as_return(given + carried),
                length=int(self.earlier[i]) + step + 1 - begin,
                terminated=bool(rollout.terminated[step, i]),
                truncated=bool(rollout.truncated[step, i]),
                abnormal=failure is not None,
                failure=failure,
                duration_s=now - float(self.began_s[i]),
                ended_s=elapsed_s,
            )
            statistics.add(record)
            records.append(record)
        begins[ends.env_ids] = ends.steps + 1
        earlier[ends.env_ids] = 0
        returns[ends.env_ids] = 0.0
        n_ended[ends.env_ids] += 1
        return Tally(begins, returns, earlier, self.began_s, n_ended, statistics), records


class Recorded(NamedTuple):
    """How much of a buffer is filled: replaced as a whole, so that it is always consistent.

    Attributes:
        even: the number of steps of each env, if all envs have the same number.
        lengths: (n,) the number of steps of each env; None if `even` says it.
        n_ends: how many gathers with ends of episodes there are.
        n_episodes: how many records of episodes there are.
        is_complete: see `RolloutBuffer`.
        starts: (n,): whether the next step of each env is an episode's first; None: none is.
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
    tally: Tally
    applied: ArrayBatch | None

    def where(self, env_ids: Ints, n: int) -> Any:
        """Return where the next steps of some of n envs go: a row, or (steps, env_ids)."""
        if self.lengths is not None:
            return self.lengths[env_ids], env_ids
        if len(env_ids) == n:
            return self.even
        return np.full(len(env_ids), self.even), env_ids


make_recorded = partial(tuple.__new__, Recorded)
"""Makes a `Recorded` from a tuple, in half the time that its constructor takes."""


class RolloutBuffer:
    """T steps of each of n envs, as arrays (T, n, ...), and what the last of them led to.

    Step t of env i consists of `obs[t, i]`, `actions[t, i]`, `rewards[t, i]`, and the observation
    that these led to: the terminal one if the episode ended there, else `obs[t + 1, i]`, or
    `last_obs[i]`. Observations are nested like their space. What a policy returns besides actions
    is in `extras`, in arrays that are allocated when it first returns any.

    A step in which the env failed is not a transition: `abnormal` is True there, `mask` is False,
    and it should not be learnt from. Its episode counts as cut off at `obs[t, i]`.

    Even if an interrupt comes while it is filled, the buffer holds as many steps as `recorded`
    says, each of them complete.

    Args:
        observation_space: the observation space of one env.
        n_steps: T.
        n_envs: n.
        value_fn: the value function that `gae` uses unless it is given another.

    Attributes:
        obs: (T, n, *shape): what the actions were chosen for.
        actions: (T, n, ...).
        rewards: (T, n) float64.
        terminated: (T, n) bool.
        truncated: (T, n) bool; True for failures, too.
        abnormal: (T, n) bool: whether the env failed.
        episode_starts: (T, n) bool: whether the step is the first of an episode.
        extras: (T, n, ...) by name.
        infos: by key, what the envs reported: values (T, n, ...) and present (T, n) bool, as in
            `ArrayBatch.info_columns`; for the collector's `info_keys`, each once an env has
            reported it.
        states: (T, n, ...): the states that a recurrent policy was given; None for other policies.
        last_obs: (n, *shape): what the last step of each env led to, when the rollout is complete;
            at the end of an episode, the terminal observation.
        last_states: (n, ...): the states that the policy returned in that step; None without
            states.
        lengths: (n,): the number of steps of each env. T, unless the rollout is not complete, or an
            env has no more episodes.
        recorded: how much of the buffer is filled; for the collector.
        has_form: whether there are arrays for actions, extras and states, with rows in shapes that
            the envs take; for the collector.
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
        self.infos: dict[str, InfoColumn] = {}
        self.terminated: Bools = np.zeros((n_steps, n_envs), np.bool_)
        self.truncated, self.abnormal = self.terminated.copy(), self.terminated.copy()
        self.episode_starts = self.terminated.copy()
        tally = Tally.of(n_envs, CollectStatistics())
        self.recorded = Recorded(0, None, 0, 0, False, None, None, tally, None)
        self._value_fn = value_fn
        self._all_ends: list[Ends] = []
        self._all_episodes: list[EpisodeRecord] = []
        self.has_form = False

    @property
    def lengths(self) -> Ints:
        """(n,): the number of steps of each env.

        This is T, unless the rollout is not complete, or an env has no more episodes.
        """
        even, lengths = self.recorded[:2]
        return np.full(self.n_envs, even) if lengths is None else lengths.copy()

    # -- how it is filled ---------------------------------------------------------------------

    def put_step(
        self, where: Any, count: int, actions: Any, extras: Mapping[str, Any], states: Any
    ) -> None:
        """Store what a policy has chosen; for collectors.

        Raises:
            ActionError: there is not one row for each observation, or the form differs from before.
        """
        if self.has_form:
            check_names(extras, self.extras)
        else:
            for name, rows in {"actions": actions, **extras}.items():
                check_rows(name, rows, count)
            self.extras = {name: self._room(rows) for name, rows in extras.items()}
            self.actions = self._room(actions)
            self.states = None if states is None else self._room(states)
            self.has_form = True
        room = self.actions
        is_plain = type(actions) is np.ndarray and type(room) is np.ndarray  # mostly
        if not is_plain or actions.shape != (count, *room.shape[2:]):
            check_rows("actions", actions, count, room, 2)
        for name, rows in extras.items():
            check_rows(name, rows, count, self.extras[name], 2)
        name = "actions"
        try:
            self.actions = put_in(room, where, actions)
            for name, rows in extras.items():
                self.extras[name] = put_in(self.extras[name], where, rows)
            if states is not None:
                name = "state"
                self.states = put_in(self.states, where, states)
        except (ValueError, TypeError, KeyError) as error:
            raise unfit(name, count, error) from error

    def put_rewards(self, where: Any, rewards: npt.NDArray[Any]) -> None:
        """Store the rewards of envs; for collectors.

        Raises:
            ConfigError: they are not numbers.
        """
        if self.rewards is None:
            if rewards.dtype.hasobject:
                raise ConfigError(
                    "rollouts hold rewards that are numbers, or arrays of one shape, and these "
                    "are neither: collect episodes with EpisodeCollector, or wrap the envs"
                )
            self.rewards = self._room(rewards)
        before = self.rewards
        if rewards.ndim == 1 and before.ndim > 2:  # of abnormal timesteps alone: 0.0 each
            rewards = rewards.reshape(-1, *(1,) * (before.ndim - 2))
        elif rewards.ndim > 1 and before.ndim == 2:  # only of such have there been any as yet
            room = self._room(rewards)
            room[...] = before.reshape(*before.shape, *(1,) * (rewards.ndim - 1))
            self.rewards = room
        self.rewards[where] = rewards

    def put_infos(self, where: Any, batch: ArrayBatch, keys: Sequence[str]) -> None:
        """Store what envs have reported in infos under some keys; for collectors."""
        columns = batch.info_columns
        for key in keys:
            column, room = columns.get(key), self.infos.get(key)
            if isinstance(column, Mapping):
                column = _of_dicts(batch.infos, key)
            if column is None:  # none has it
                if room is not None:
                    room.values[where] = None if room.values.dtype == object else 0
                    room.present[where] = False
                continue
            values, present = column
            if room is None:
                shape = self.n_steps, self.n_envs
                room = InfoColumn.of(self._room(values), np.zeros(shape, np.bool_), column.kind)
                self.infos[key] = room
            elif (room.values.dtype, room.values.shape[2:]) != (values.dtype, values.shape[1:]):
                room = self.infos[key] = _of_objects(room)
            if room.values.dtype == object and values.dtype != object:
                values = _objects(values)
            room.values[where] = values
            room.present[where] = present

    def put_ends(self, where: Any, batch: ArrayBatch, abnormal: Bools, ends: Ends) -> None:
        """Store which episodes have ended, and how; for collectors."""
        self.terminated[where] = batch.terminated
        self.truncated[where] = batch.truncated
        self.abnormal[where] = abnormal
        self._all_ends[self.recorded.n_ends :] = [ends]

    def put_episodes(self, records: list[EpisodeRecord]) -> None:
        """Store the records of episodes that have ended; for collectors."""
        self._all_episodes[self.recorded.n_episodes :] = records

    def put_last(self, where: Any, obs: Any, states: Any) -> None:
        """Store what steps have led to; for collectors."""
        put_rows(self.last_obs, where, obs)
        if states is not None:
            if self.last_states is None:
                self.last_states = zeros_for(states, self.n_envs)
            self.last_states = put_in(self.last_states, where, states)

    def begin(self, starts: Bools | None, states: Any, tally: Tally) -> None:
        """Start over, with arguments as in `Recorded`; for collectors."""
        self._all_ends, self._all_episodes = [], []
        for flags in (self.terminated, self.truncated, self.abnormal, self.episode_starts):
            flags.fill(False)
        for room in self.infos.values():
            room.present.fill(False)
        self.recorded = Recorded(0, None, 0, 0, False, starts, states, tally, None)

    def _room(self, rows: Any) -> Any:
        return zeros_for(rows, self.n_steps, self.n_envs)

    # -- what was collected -------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether `collect` has returned this rollout, and will not continue it."""
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
        """(m,): the steps in which episodes ended; `terminal_env_ids` has the envs."""
        return np.concatenate([_NONE, *(ends.steps for ends in self._ends)])

    @property
    def terminal_env_ids(self) -> Ints:
        """(m,): the envs whose episodes ended, in the order in which they ended."""
        return np.concatenate([_NONE, *(ends.env_ids for ends in self._ends)])

    @property
    def terminal_obs(self) -> Any:
        """(m, *shape): the terminal observations, in the order of `terminal_steps`.

        For an env that failed, this is its last good observation.
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

        A truncated episode, and one that continues after the rollout, is bootstrapped with the
        value of its last observation; a terminated one with 0. Steps outside `mask` have advantage
        0, and the episode of an env that failed is bootstrapped with the value of its last good
        observation.

        Args:
            value_fn: `(k, *shape) -> (k,)`, returns the values of observations; with a recurrent
                policy it is called as `value_fn(obs, states)`. None: the policy's `value`. One
                call is for all last observations together, another for `obs` if nothing else
                provides their values.
            gamma: discount per step.
            lam: weight of the longer estimates.
            values: (T, n): the values of `obs`; None: `extras["value"]`, or else those that
                `value_fn` returns.

        Raises:
            ConfigError: nothing provides values, or there is not one for each observation.
            StateError: the rollout is not complete: `collect` continues it.
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
        values, shape = np.asarray(values, np.float64), self.terminated.shape
        if values.shape not in (shape, (*shape, 1)):
            raise ConfigError(
                f"the values have shape {values.shape}; there should be one for each observation, "
                f"in the shape {shape}"
            )
        values = values.reshape(shape)
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
        """Return (T, n): the values of what the steps led to; arbitrary for terminated steps."""
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


def put_in(room: Any, where: Any, rows: Any) -> Any:
    """Put rows into a batch and return it, with arrays of a wider dtype where the rows need one.

    Otherwise floats would be truncated silently where ints came first. Where floats came first, the
    arrays keep their precision, which networks expect.
    """
    return leafwise(partial(_put_in_array, where), room, rows)


def _put_in_array(where: Any, room: npt.NDArray[Any], rows: Any) -> npt.NDArray[Any]:
    if type(rows) is np.ndarray and rows.dtype is not room.dtype:
        room = _widened(room, rows.dtype)
    room[where] = rows
    return room


def _widened(room: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array that can also hold numbers, or texts, of a dtype: the same one if it can.

    Raises:
        ValueError: one dtype is of texts, and the other is not.
    """
    of_floats = room.dtype.kind in "fc"
    if np.can_cast(dtype, room.dtype, "same_kind" if of_floats else "safe"):
        return room
    kinds = {room.dtype.kind, dtype.kind}
    if kinds & _TEXTS and not kinds <= _TEXTS:  # numpy would make one of the other
        raise ValueError(f"the dtype is {dtype}, and was {room.dtype} before")
    if not kinds <= _TEXTS and not kinds <= set("biufc"):  # putting it in will say so
        return room
    return room.astype(np.promote_types(dtype, room.dtype))


def _summed(rewards: npt.NDArray[Any], begins: Ints, ends: Ints) -> npt.NDArray[Any]:
    """Return (n, ...): the sums of `rewards[begins[i]:ends[i], i]`."""
    if not begins.any() and (ends == len(rewards)).all():
        total: npt.NDArray[Any] = rewards.sum(axis=0)
        return total
    t = np.arange(len(rewards))[:, None]
    counts = (t >= begins) & (t < ends)
    summed: npt.NDArray[Any] = rewards.sum(
        axis=0, where=counts.reshape(*counts.shape, *(1,) * (rewards.ndim - 2))
    )
    return summed


def _objects(values: npt.NDArray[Any], depth: int = 1) -> npt.NDArray[Any]:
    """Return the values of a column as objects: numbers and bools as Python's, arrays as such."""
    found: npt.NDArray[Any] = np.empty(values.shape[:depth], dtype=object)
    for index in np.ndindex(*found.shape):
        value = values[index]
        found[index] = value.item() if isinstance(value, np.generic) else value
    return found


def _of_dicts(infos: Sequence[Any], key: str) -> InfoColumn:
    """Return what infos have under a key that is a dict in some of them."""
    present = np.array([isinstance(info, dict) and key in info for info in infos], np.bool_)
    values = np.empty(len(infos), object)
    for k in present.nonzero()[0].tolist():
        values[k] = infos[k][key]
    return InfoColumn.of(values, present, None)


def _of_objects(room: InfoColumn) -> InfoColumn:
    """Return the stored values of a key as objects: new ones have another type or shape."""
    values = room.values if room.values.dtype == object else _objects(room.values, 2)
    values[~room.present] = None
    return InfoColumn.of(values, room.present, None)


def _merged(column: Any) -> Any:
    """Return a column with its first two axes as one."""
    return leafwise(merged_axes, column)


_NONE: Ints = np.empty(0, np.int64)
_TEXTS = set("US")
