"""Batched envs that give the results of some rows at a time: those that are done first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.env.batched import BatchedEnv
from envmgr.env.contract import EnvContractError
from envmgr.env.vector_forms import own


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
