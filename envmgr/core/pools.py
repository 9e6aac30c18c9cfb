"""Rows of batched envs that give nothing before so many of them are under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from envmgr.core.phases import Phase
from envmgr.core.together import Together
from envmgr.env.batch_specs import Batch
from envmgr.lifecycle import EnvState

if TYPE_CHECKING:  # the record knows them
    from envmgr.core.slots import Record


class Pools:
    """Asks the record whether anything can come.

    Rows that are in an episode and wait for their user, for an action or for the timestep that has
    arrived to be taken, are not under way. All others are, or may be: those in no episode are
    stepped to make up the number.

    Args:
        record: what is known of all envs.
        batches: whose rows they are; each has a `batch_size`.
    """

    def __init__(self, record: Record, batches: Iterable[Batch]) -> None:
        self._record = record
        self._of = {i: batch for batch in batches for i in batch.env_ids}

    def gives(self, env_id: int, arrived: Collection[int] = ()) -> bool:
        """Whether something comes of the pool of an env without its user doing anything.

        Args:
            env_id: which; true of one that is in no pool.
            arrived: the envs whose timesteps can be taken.
        """
        batch = self._of.get(env_id)
        if batch is None:
            return True
        record, column = self._record, self._record.phases.column
        n_waiting = sum(
            i in arrived
            or i in record.undelivered
            or (column[i] == Phase.IDLE and record.states[i] is EnvState.RUN)
            for i in batch.env_ids
        )
        return batch.size - n_waiting >= (batch.batch_size or 1)

    def may_go_on(self, arrived: Iterable[int]) -> bool:
        """Whether more timesteps than these come without their user doing anything."""
        known = set(arrived)
        waited_for = {self._of.get(i): i for i in self._record.owed_ids() if i not in known}
        return any(self.gives(env_id, known) for env_id in waited_for.values())

    def sizes(self) -> str:
        """Return what has to be under way, in words."""
        sizes = sorted({batch.batch_size or 1 for batch in self._of.values()})
        return " or ".join(map(str, sizes))


def note_rows(record: Record, batches: Sequence[Batch]) -> None:
    """Have the record know which envs are rows of batched envs."""
    for batch in batches:
        for env_id in batch.env_ids:
            record.slots[env_id].batch = batch
    if lockstep := [batch for batch in batches if not batch.partial_steps]:
        record.together = Together(record, lockstep)
    if pools := [batch for batch in batches if batch.batch_size]:
        record.pools = Pools(record, pools)
