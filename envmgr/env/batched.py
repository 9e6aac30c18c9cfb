"""Batched envs: one object that steps several envs at once, each a row of it with an env_id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Space

from envmgr.env.base import BaseEnv
from envmgr.env.contract import (
    EnvContractError,
    StepResult,
    describe,
    env_name,
    gymnasium_step_result,
    timestep_of,
)
from envmgr.env.seeds import EpisodeSeeds
from envmgr.env.vector_forms import own
from envmgr.errors import EnvAttributeError
from envmgr.types import EnvTimestep

First = tuple[Any, dict[str, Any]]
"""What a reset gave one row: its first observation, and the info of the reset."""


class BatchedEnv(ABC):
    """Several envs that are stepped together; each is a row, from 0 on.

    A row is an env of the manager: it has its own env_id, episodes, seeds and resets. The methods
    are told which rows they are about, in ascending order, and return as many entries.

    Attributes:
        observation_space: of one row.
        action_space: of one row.
        reward_space: of one row; None if the env does not say.
        resets_alone: rows can be reset while others are in an episode. If not, what takes the reset
            of one row takes that of all.
        begins_late: the next episode of a row whose episode has ended begins with the next step of
            the others.
        first_env_id: the env_id of row 0; set by what hosts it.
        step_whole: as `step`, for some of the rows, given as an array (k,); actions, and what is
            returned, have an entry for every row of the env, and those of the others mean nothing.
            It spares those who step all rows anyhow the selecting. None if there is none.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    reward_space: Space[Any] | None = None
    resets_alone: bool = True
    begins_late: bool = False
    first_env_id: int = 0
    step_whole: Callable[[Any, Any], Sequence[Any]] | None = None

    def resettable(self, asked: Mapping[int, bool], *, others: bool) -> Sequence[int]:
        """Return which of the rows that are to be reset can be reset now.

        The others are asked for again after each step, and when more rows are to be reset.

        Args:
            asked: which, and whether somebody has asked for it; else an episode has ended.
            others: other rows are in an episode.
        """
        return list(asked)

    def leave(self, row: int) -> None:
        """A row takes no part any more."""
        return

    @abstractmethod
    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any] | npt.NDArray[Any], Sequence[Mapping[str, Any]] | None]:
        """Begin an episode in some rows; the others go on as if nothing had happened.

        Args:
            rows: which.
            seeds: for each of them; None goes on with the generator that it has.
            params: the manager's reset params of each.

        Returns:
            Their first observations, and their infos; None for infos that are all empty. An array,
            and None, cost least.
        """

    @abstractmethod
    def step(self, rows: Sequence[int], actions: Any) -> Sequence[Any]:
        """Take one action in each of some rows.

        They are those that were sent one. Unless the spec says `partial_steps`, they are all rows
        that are in an episode: the others have ended theirs, and what becomes of these is of no
        interest until they are reset.

        Args:
            rows: which.
            actions: one for each of them: a list, or an array (k, *shape).

        Returns:
            `(obs, rewards, terminated, truncated, infos)` with an entry for each of `rows`; infos
            may be None if they are all empty. The arrays may be used again in the next step.
            Arrays, and infos that are None or know which of them are not empty (`told`), cost
            least.
        """

    def close(self) -> None:
        """Release what the env holds. Called once."""
        return

    def attribute(self, row: int, name: str) -> Any:
        """Return an attribute of a row; by default the env's own, and methods that get the row.

        So `manager.call("render", "rgb_array")` calls `render(row, "rgb_array")` for each row.

        Raises:
            AttributeError: there is none of this name.
        """
        value = getattr(self, name)
        if not isinstance(value, MethodType):
            return value
        return lambda *args, **kwargs: value(row, *args, **kwargs)

    def set_attribute(self, row: int, name: str, value: Any) -> None:
        """Set an attribute of a row.

        Raises:
            EnvAttributeError: the rows of this env have none of their own (the default).
        """
        raise EnvAttributeError(
            f"{name!r} cannot be set on row {row} of {type(self).__name__}: its rows share one "
            "object. Define set_attribute(row, name, value) in its class"
        )


class AsyncBatchedEnv(BatchedEnv):
    """Rows whose steps and resets are begun, and end in an order of the env's own.

    Results come for `batch_size` rows at a time (see `BatchedEnvSpec`), and not before so many are
    under way. Hence no row is reset by hand alone: others would have to be under way with it.
    """

    resets_alone = False

    @abstractmethod
    def send(self, rows: Sequence[int], actions: Sequence[Any]) -> None:
        """Begin a step of some rows."""

    @abstractmethod
    def begin(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> None:
        """Begin an episode in some rows; arguments are those of `reset`."""

    @abstractmethod
    def fill(self, rows: Sequence[int]) -> None:
        """Have rows that are in no episode do anything that has a result."""

    @abstractmethod
    def receive(self) -> tuple[Sequence[int], Sequence[Any]]:
        """Wait for the next results; return whose they are, and what `step` would return of these.

        Of a row whose episode was begun, the observation and the info count.
        """

    def may_begin(self, seeds: Mapping[int, int | None], *, others: bool) -> bool:
        """Return whether the rows that somebody has asked to have reset can be; else they wait.

        Args:
            seeds: of those.
            others: something is under way in other rows.
        """
        return True

    def own(self, observation: Any) -> Any:
        """Return an observation that no later result changes."""
        return own(observation)

    def reset(self, rows: Any, seeds: Any, params: Any) -> Any:
        """Refuse: rows are reset by `begin`."""
        raise EnvContractError("the rows of an asynchronous batch are not reset one at a time")

    def step(self, rows: Any, actions: Any) -> Any:
        """Refuse: rows are stepped by `send`."""
        raise EnvContractError("the rows of an asynchronous batch are not stepped one at a time")


class BatchRow(BaseEnv):
    """One row of a batched env, in the form of an env of its own.

    Args:
        in_episode: of all rows of the env, 1 for those that take actions.

    Attributes:
        first: what its next `reset` returns or raises; None has the row be reset then.
        seeds: which of them its next reset is to use.
    """

    def __init__(self, batched: BatchedEnv, row: int, in_episode: bytearray | None = None) -> None:
        self.batched = batched
        self.row = row
        self.first: First | BaseException | None = None
        self.seeds = EpisodeSeeds()
        self._in_episode = bytearray(row + 1) if in_episode is None else in_episode
        self.observation_space = batched.observation_space
        self.action_space = batched.action_space
        self.reward_space = batched.reward_space
        for name in ("metadata", "spec", "render_mode"):
            setattr(self, name, getattr(batched, name, None))

    @property
    def is_in_episode(self) -> bool:
        """Whether it takes actions."""
        return bool(self._in_episode[self.row])

    @is_in_episode.setter
    def is_in_episode(self, is_in_episode: bool) -> None:
        self._in_episode[self.row] = is_in_episode

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Give seeds to the next resets, as to a gymnasium env."""
        self.seeds.begin(seed, dynamic_seed)

    def reset(self, **params: Any) -> Any:
        """Return the first observation of the episode that was begun, or begin one."""
        first, self.first = self.first, None
        if first is None:
            result = self.batched.reset([self.row], [self.seeds.due()], [params])
            (first,) = firsts_of(self.batched, result, 1)
        if isinstance(first, BaseException):
            raise first
        self.seeds.reset_done()
        self._in_episode[self.row] = True
        obs, self.reset_info = first
        return obs

    def step(self, action: Any) -> EnvTimestep:
        """Step this row alone."""
        (step_result,) = step_rows(self.batched, [self.row], [action])
        return timestep_of(step_result)

    def close(self) -> None:
        """Do nothing: the env is closed with the last of its rows."""


def firsts_of(batched: BatchedEnv, result: Any, n_rows: int) -> list[First]:
    """Return what each row begins with, given what `reset` returned.

    Raises:
        EnvContractError: it is something else.
    """
    obs, infos = _parts(batched, "reset", result, ("obs",), n_rows)
    return [(one, dict(info)) for one, info in zip(obs, infos, strict=True)]


def step_rows(batched: BatchedEnv, rows: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
    """Step rows; return what it came to for each of them.

    Raises:
        EnvContractError: the env returned something else.
    """
    return step_results_of(batched, batched.step(rows, actions), len(rows))


def step_results_of(batched: BatchedEnv, result: Any, n_rows: int) -> list[StepResult]:
    """Return what a step came to for each row, given what `step` returned.

    Raises:
        EnvContractError: it is something else.
    """
    names = ("obs", "rewards", "terminated", "truncated")
    parts = _parts(batched, "step", result, names, n_rows)
    return [gymnasium_step_result(row, batched) for row in zip(*parts, strict=True)]


def _parts(
    batched: BatchedEnv, method: str, result: Any, names: Sequence[str], n_rows: int
) -> list[Any]:
    """Return what a method gave, each part with an entry for each row; the infos come last."""
    if not isinstance(result, (tuple, list)) or len(result) != len(names) + 1:
        raise EnvContractError(
            f"{method} of {env_name(batched)} should return ({', '.join(names)}, infos), it "
            f"returned {describe(result)}"
        )
    *parts, infos = result
    parts.append([{}] * n_rows if infos is None else infos)
    for name, part in zip((*names, "infos"), parts, strict=True):
        if not hasattr(part, "__len__") or isinstance(part, Mapping) or len(part) != n_rows:
            found = f"{len(part)}" if isinstance(part, Sized) else describe(part)
            raise EnvContractError(
                f"the {name} that {method} of {env_name(batched)} returns should have an entry "
                f"for each of {n_rows} rows, it has {found}"
            )
    return [_numbers(part) for part in parts]


def _numbers(part: Any) -> Any:
    """Return a column of numbers as Python's own: it is read one by one."""
    return part.tolist() if isinstance(part, np.ndarray) and part.ndim == 1 else part
