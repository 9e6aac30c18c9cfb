"""Rows of batched envs whose `step` takes all of them: they are ready, and handed out, together.

Such an env cannot step the rows that were sent an action and leave out one that waits for its own.
So none of its rows is ready before all are that will be, and whoever sends one of them an action
has to send the others theirs in the same call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from envmgr.env.batched import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState

if TYPE_CHECKING:  # the record knows who is stepped together
    from envmgr.core.slots import Record


class Together:
    """Asks the record what it means for rows that are stepped together.

    Args:
        record: what is known of all envs.
        batches: whose rows they are.
    """

    def __init__(self, record: Record, batches: Iterable[Batch]) -> None:
        self._record = record
        self._rows = {i: batch.env_ids for batch in batches for i in batch.env_ids}

    def _of(self, env_id: int) -> Sequence[int]:
        """Return the rows that an env is stepped together with, itself included."""
        return self._rows.get(env_id, ())

    def _is_mending(self, env_id: int) -> bool:
        """Whether an env is not in an episode, and will be without anybody doing anything."""
        record = self._record
        return record.states[env_id] is not EnvState.RUN and record.slots[env_id].is_coming

    def is_coming(self, env_id: int) -> bool:
        """Whether an env is in an episode, and waits only for those that are coming as well."""
        record, rows = self._record, self._of(env_id)
        return any(map(self._is_mending, rows)) and not any(map(record.owes, rows))

    def is_settled(self, env_id: int) -> bool:
        """Whether none of the envs that go with this one is still to become ready."""
        return not any(self._record.owes(i) or self._is_mending(i) for i in self._of(env_id))

    def settled(self, env_ids: Iterable[int]) -> list[int]:
        """Return those of some envs for which that is so."""
        known: dict[Sequence[int], bool] = {}
        found = []
        for env_id in env_ids:
            rows = self._of(env_id)
            if rows not in known:
                known[rows] = self.is_settled(env_id)
            if known[rows]:
                found.append(env_id)
        return found

    def missing(self, env_ids: Sequence[int]) -> list[int]:
        """Return the envs that would have to be sent an action together with these."""
        record, named = self._record, set(env_ids)
        others = {i for env_id in named for i in self._of(env_id)} - named
        return sorted(i for i in others if record.states[i] is EnvState.RUN)

    def may_be_stepped(self, env_ids: Sequence[int]) -> bool:
        """Whether these envs have with them all that they are stepped together with."""
        if len(env_ids) == self._record.env_num:
            return True
        return not self.missing(env_ids) and len(self.settled(env_ids)) == len(env_ids)

    def complete(self, env_ids: Sequence[int]) -> list[int]:
        """Return those of the envs that have arrived whose batch owes nothing besides."""
        owes, arrived = self._record.owes, set(env_ids)
        late = {self._of(i) for i in self._rows if i not in arrived and owes(i)}
        return [env_id for env_id in env_ids if self._of(env_id) not in late]

    def goes_on(self, env_id: int) -> bool:
        """Whether an env, once it is handed out, waits for none that goes with it."""
        return not any(map(self._is_mending, self._of(env_id)))

    def doomed_with(self, env_id: int) -> EnvFailure | None:
        """Return the failure by which an env that goes with this one was lost, but is shown still.

        The actions that they are sent next can only be left unexecuted together.
        """
        doomed = self._record.doomed
        return next((doomed[i] for i in self._of(env_id) if i in doomed), None)
