"""Batched envs: one object that steps several envs at once, each a row of it with an env_id.

Such an env is a `BatchedEnv`, and `env_fn` names a `BatchedEnvSpec` once for each of its rows, so
that how many these are is known before anything is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Space

from envmgr.env.base import BaseEnv
from envmgr.env.contract import (
    EnvContractError,
    Outcome,
    describe,
    env_name,
    gymnasium_outcome,
    timestep_of,
)
from envmgr.env.seeds import EpisodeSeeds
from envmgr.errors import ConfigError, EnvAttributeError
from envmgr.types import EnvFactory, EnvTimestep

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
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    reward_space: Space[Any] | None = None

    @abstractmethod
    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]] | None]:
        """Begin an episode in some rows; the others go on as if nothing had happened.

        Args:
            rows: which.
            seeds: for each of them; None goes on with the generator that it has.
            params: the manager's reset params of each.

        Returns:
            Their first observations, and their infos; None for infos that are all empty.
        """

    @abstractmethod
    def step(self, rows: Sequence[int], actions: Sequence[Any]) -> Sequence[Any]:
        """Take one action in each of some rows.

        They are those that were sent one. Unless the spec says `partial_steps`, they are all rows
        that are in an episode: the others have ended theirs, and what becomes of these is of no
        interest until they are reset.

        Args:
            rows: which.
            actions: one for each of them.

        Returns:
            `(obs, rewards, terminated, truncated, infos)` with an entry for each of `rows`; infos
            may be None if they are all empty. The arrays may be used again in the next step.
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


@dataclass(frozen=True)
class BatchedEnvSpec:
    """The entry in `env_fn` of each row of a batched env: `env_fn=[spec] * (size * batches)`.

    Attributes:
        build: builds the env with all of its rows.
        size: how many rows it has.
        partial_steps: its `step` takes some of the rows in an episode, and leaves the others. If
            not, all of them have to be sent their actions in one call.
    """

    build: Callable[[], BatchedEnv]
    size: int
    partial_steps: bool = False

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: one is of no use.
        """
        if not callable(self.build):
            raise ConfigError(f"the `build` of a BatchedEnvSpec is {self.build!r}, not a function")
        if type(self.size) is not int or self.size < 1:
            raise ConfigError(f"the `size` of a BatchedEnvSpec is {self.size!r}, not 1 or more")

    def __call__(self) -> BatchedEnv:
        """Return a new env.

        Raises:
            EnvContractError: `build` returned something else than a `BatchedEnv`.
        """
        env = self.build()
        if not isinstance(env, BatchedEnv):
            raise EnvContractError(
                f"the `build` of a BatchedEnvSpec returned {describe(env)}, not a BatchedEnv"
            )
        return env


class Batch(NamedTuple):
    """The env_ids of a batched env's rows: `first` is row 0.

    Attributes:
        first: the lowest.
        size: how many there are.
        partial_steps: see `BatchedEnvSpec`.
    """

    first: int
    size: int
    partial_steps: bool

    @property
    def env_ids(self) -> range:
        """All of them."""
        return range(self.first, self.first + self.size)


def batches_of(factories: Sequence[EnvFactory]) -> tuple[Batch, ...]:
    """Return the batched envs that factories, one for each env_id, are about.

    Raises:
        ConfigError: one of them has not all of its rows.
    """
    batches: list[Batch] = []
    env_id = 0
    while env_id < len(factories):
        spec = factories[env_id]
        if not isinstance(spec, BatchedEnvSpec):
            env_id += 1
            continue
        rows = factories[env_id : env_id + spec.size]
        n_rows = next((n for n, other in enumerate(rows) if other is not spec), len(rows))
        if n_rows != spec.size:
            raise ConfigError(
                f"env_fn has a batched env of {spec.size} rows from env {env_id} on, but names it "
                f"for {n_rows} envs there. Every batch needs all of its rows, side by side: "
                f"env_fn=[spec] * ({spec.size} * n) for n batches"
            )
        batches.append(Batch(env_id, spec.size, spec.partial_steps))
        env_id += spec.size
    return tuple(batches)


class BatchRow(BaseEnv):
    """One row of a batched env, in the form of an env of its own.

    Args:
        batched: the env.
        row: which.

    Attributes:
        first: what its next `reset` returns or raises; None has the row be reset then.
        seeds: which of them its next reset is to use.
        is_in_episode: it takes actions.
    """

    def __init__(self, batched: BatchedEnv, row: int) -> None:
        self.batched = batched
        self.row = row
        self.first: First | BaseException | None = None
        self.seeds = EpisodeSeeds()
        self.is_in_episode = False
        self.observation_space = batched.observation_space
        self.action_space = batched.action_space
        self.reward_space = batched.reward_space
        for name in ("metadata", "spec", "render_mode"):
            setattr(self, name, getattr(batched, name, None))

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Give seeds to the next resets, as to a gymnasium env."""
        self.seeds.begin(seed, dynamic_seed)

    def reset(self, **params: Any) -> Any:
        """Return the first observation of the episode that was begun, or begin one."""
        first, self.first = self.first, None
        if first is None:
            (first,) = reset_rows(self.batched, [self.row], [self.seeds.due()], [params])
        if isinstance(first, BaseException):
            raise first
        self.seeds.reset_done()
        self.is_in_episode = True
        obs, self.reset_info = first
        return obs

    def step(self, action: Any) -> EnvTimestep:
        """Step this row alone."""
        (outcome,) = step_rows(self.batched, [self.row], [action])
        return timestep_of(outcome)

    def close(self) -> None:
        """Do nothing: the env is closed with the last of its rows."""


def reset_rows(
    batched: BatchedEnv,
    rows: Sequence[int],
    seeds: Sequence[int | None],
    params: Sequence[Mapping[str, Any]],
) -> list[First]:
    """Reset rows; return what each of them begins with.

    Raises:
        EnvContractError: the env returned something else.
    """
    result = batched.reset(rows, seeds, params)
    obs, infos = _parts(batched, "reset", result, ("obs",), len(rows))
    return [(one, dict(info)) for one, info in zip(obs, infos, strict=True)]


def step_rows(batched: BatchedEnv, rows: Sequence[int], actions: Sequence[Any]) -> list[Outcome]:
    """Step rows; return what it came to for each of them.

    Raises:
        EnvContractError: the env returned something else.
    """
    result = batched.step(rows, actions)
    names = ("obs", "rewards", "terminated", "truncated")
    parts = _parts(batched, "step", result, names, len(rows))
    return [gymnasium_outcome(row, batched) for row in zip(*parts, strict=True)]


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
