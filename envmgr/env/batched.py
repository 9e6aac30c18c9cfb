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
    """Several envs that are stepped together; each is a row, counted from 0.

    A row is an env of the manager: it has its own env_id, episodes, seeds and resets. The methods
    are given the rows that they apply to, in ascending order, and return one entry for each.

    Attributes:
        observation_space: the space of one row.
        action_space: the space of one row.
        reward_space: the space of one row; None if the env does not say.
        resets_alone: whether rows can be reset while others are in an episode. If not, whatever
            requires a reset of one row requires a reset of all.
        begins_late: whether a row whose episode has ended begins the next one with the next step of
            the others.
        first_env_id: the env_id of row 0; set by the host of the env.
        step_whole: like `step`, for some of the rows, given as an array (k,), but actions and
            results have an entry for every row of the env; the entries of the other rows mean
            nothing. It saves envs that step all rows anyway from selecting rows. None if the env
            has no such method.
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

        The others are asked about again after each step, and when more rows are to be reset.

        Args:
            asked: the rows, each with whether its reset was requested; if not, its episode has
                ended.
            others: whether other rows are in an episode.
        """
        return list(asked)

    def leave(self, row: int) -> None:
        """Note that a row no longer takes part."""
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
            rows: the rows.
            seeds: a seed for each of them; None continues with the row's present generator.
            params: the manager's reset params for each.

        Returns:
            The first observations of these rows, and their infos, or None if all infos are empty.
            An array and None are the cheapest.
        """

    @abstractmethod
    def step(self, rows: Sequence[int], actions: Any) -> Sequence[Any]:
        """Take one action in each of some rows.

        These are the rows that were sent an action. Unless the spec says `partial_steps`, they are
        all rows in an episode: the others have ended theirs, and what becomes of them does not
        matter until they are reset.

        Args:
            rows: the rows.
            actions: one for each of them: a list, or an array (k, *shape).

        Returns:
            `(obs, rewards, terminated, truncated, infos)` with an entry for each of `rows`; infos
            may be None if they are all empty. The env may reuse the arrays in the next step.
            Arrays, and infos that are None or know which of them are not empty (`told`), are the
            cheapest.
        """

    def close(self) -> None:
        """Release the env's resources. Called once."""
        return

    def attribute(self, row: int, name: str) -> Any:
        """Return an attribute of a row: by default the env's own, where methods are given the row.

        So `manager.call("render", "rgb_array")` calls `render(row, "rgb_array")` for each row.

        Raises:
            AttributeError: there is no attribute of this name.
        """
        value = getattr(self, name)
        if not isinstance(value, MethodType):
            return value
        return lambda *args, **kwargs: value(row, *args, **kwargs)

    def set_attribute(self, row: int, name: str, value: Any) -> None:
        """Set an attribute of a row.

        Raises:
            EnvAttributeError: the rows of this env have no attributes of their own (the default).
        """
        raise EnvAttributeError(
            f"{name!r} cannot be set on row {row} of {type(self).__name__}: its rows share one "
            "object. Define set_attribute(row, name, value) in its class"
        )


class AsyncBatchedEnv(BatchedEnv):
    """A batched env whose rows begin steps and resets, and finish them in an order of its own.

    Results come for `batch_size` rows at a time (see `BatchedEnvSpec`), and not before that many
    are under way. Hence no row is reset by hand alone: others would have to be under way with it.
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
        """Have rows that are in no episode do something that has a result."""

    @abstractmethod
    def receive(self) -> tuple[Sequence[int], Sequence[Any]]:
        """Wait for the next results; return their rows, and what `step` would return for these.

        For a row whose episode has just begun, only the observation and the info count.
        """

    def may_begin(self, seeds: Mapping[int, int | None], *, others: bool) -> bool:
        """Return whether the rows whose reset was requested can be reset now; if not, they wait.

        Args:
            seeds: the seeds of these rows.
            others: whether something is under way in other rows.
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
        in_episode: an entry for each row of the env, 1 for those that take actions.

    Attributes:
        first: what its next `reset` returns or raises; if None, that `reset` resets the row.
        seeds: the seeds of its episodes, which say what its next reset is to use.
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
        """Whether the row takes actions."""
        return bool(self._in_episode[self.row])

    @is_in_episode.setter
    def is_in_episode(self, is_in_episode: bool) -> None:
        self._in_episode[self.row] = is_in_episode

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Seed the next resets, as for a gymnasium env."""
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
        EnvContractError: `reset` returned something else.
    """
    obs, infos = _parts(batched, "reset", result, ("obs",), n_rows)
    return [(one, dict(info)) for one, info in zip(obs, infos, strict=True)]


def step_rows(batched: BatchedEnv, rows: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
    """Step rows and return the result of each of them.

    Raises:
        EnvContractError: the env returned something else.
    """
    return step_results_of(batched, batched.step(rows, actions), len(rows))


def step_results_of(batched: BatchedEnv, result: Any, n_rows: int) -> list[StepResult]:
    """Return the result of a step for each row, given what `step` returned.

    Raises:
        EnvContractError: `step` returned something else.
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
    """Return a column of numbers as Python numbers, since they are read one by one."""
    return part.tolist() if isinstance(part, np.ndarray) and part.ndim == 1 else part
