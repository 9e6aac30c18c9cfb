"""Rows of batched envs whose `step` takes all of them: they are ready, and handed out, together.

Such an env cannot step the rows that were sent an action and leave out one that waits for its own.
So none of its rows is ready before all are that will be, and whoever sends one of them an action
has to send the others theirs in the same call.

Where the next episode of a row begins with the next step of the others (`Record.late`), they do not
wait for it: it is ready when they have been stepped once more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from envmgr.core.phases import Phase
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState

if TYPE_CHECKING:  # the record knows who is stepped together
    from envmgr.core.slots import Record

_QUIET = bytes((Phase.IDLE, Phase.CALLING))
_NOT_OWING = bytes(set(Phase) - {Phase.POSTED, Phase.STEPPING})


class Together:
    """Asks the record what it means for rows that are stepped together.

    Args:
        record: what is known of all envs.
        batches: whose rows they are.
    """

    def __init__(self, record: Record, batches: Iterable[Batch]) -> None:
        self._record = record
        self._batches = [batch.env_ids for batch in batches]
        self._rows = {i: env_ids for env_ids in self._batches for i in env_ids}

    def __contains__(self, env_id: object) -> bool:
        """Whether an env is stepped together with others."""
        return env_id in self._rows

    def _of(self, env_id: int) -> Sequence[int]:
        """Return the rows that an env is stepped together with, itself included."""
        return self._rows.get(env_id, ())

    def _is_mending(self, env_id: int) -> bool:
        """Whether an env is not in an episode, and will be without anybody doing anything."""
        record = self._record
        if record.states[env_id] is EnvState.RUN or record.late[env_id]:
            return False
        return record.slots[env_id].is_coming

    def is_coming(self, env_id: int) -> bool:
        """Whether an env will be ready without anybody doing anything.

        It is on its way, or in an episode, and waits only for those that are on theirs.
        """
        record, rows = self._record, self._of(env_id)
        if record.slots[env_id].is_coming:
            return not record.late[env_id] or self.begins(env_id)
        return any(map(self._is_mending, rows)) and not any(map(record.owes, rows))

    def is_settled(self, env_id: int) -> bool:
        """Whether none of the envs that go with this one is still to become ready."""
        record, rows = self._record, self._rows.get(env_id, ())
        if isinstance(rows, range) and not (record.undelivered or record.unexecuted):
            busy = record.phases.column[rows.start : rows.stop].translate(None, _QUIET)
            # None is, or they begin with the next step.
            if record.late[rows.start : rows.stop].count(1) == len(busy):
                return True
        return not any(record.owes(i) or self._is_mending(i) for i in rows)

    def settled(self, env_ids: Sequence[int]) -> list[int]:
        """Return those of some envs for which that is so."""
        known = {rows.start: self.is_settled(rows.start) for rows in self._batches}
        if all(known.values()):
            return list(env_ids)
        return [i for i in env_ids if i not in self._rows or known[self._rows[i].start]]

    def missing(self, env_ids: Sequence[int]) -> list[int]:
        """Return the envs that would have to be sent an action together with these."""
        record, named = self._record, set(env_ids)
        others = {i for env_id in named for i in self._of(env_id)} - named
        return sorted(i for i in others if record.states[i] is EnvState.RUN)

    def may_be_stepped(self, env_ids: Sequence[int]) -> bool:
        """Whether these envs have with them all that they are stepped together with.

        Args:
            env_ids: different ones, that are in an episode.
        """
        record = self._record
        if len(env_ids) == record.env_num:
            return True
        ascending, states = sorted(env_ids), record.states.column
        for rows in self._batches:
            count = bisect_left(ascending, rows.stop) - bisect_left(ascending, rows.start)
            in_run = states[rows.start : rows.stop].count(EnvState.RUN)
            if count and (count != in_run or not self.is_settled(rows.start)):
                return False
        return True

    def complete(self, env_ids: Sequence[int]) -> list[int]:
        """Return those of the envs that have arrived whose batch owes nothing besides."""
        record = self._record
        owed = len(record.phases.column.translate(None, _NOT_OWING))
        if owed + len(record.undelivered) + len(record.unexecuted) == len(env_ids):
            return list(env_ids)
        owes, arrived = record.owes, set(env_ids)
        late = {self._of(i) for i in self._rows if i not in arrived and owes(i)}
        return [env_id for env_id in env_ids if self._of(env_id) not in late]

    def goes_on(self, env_id: int) -> bool:
        """Whether an env, once it is handed out, waits for none that goes with it."""
        return not any(map(self._is_mending, self._of(env_id)))

    def begins(self, env_id: int) -> bool:
        """Whether an env whose episode begins late has no step of others to wait for."""
        return not any(
            self._record.states[i] is EnvState.RUN and not self._record.owes(i)
            for i in self._of(env_id)
        )

    def begun_with(self, env_ids: Iterable[int]) -> list[int]:
        """Return the envs whose next episodes begin with a step of these."""
        late, stepped = self._record.late, list(env_ids)
        begun: list[int] = []
        for rows in self._batches:
            of_rows = late[rows.start : rows.stop]
            if 1 in of_rows and any(map(rows.__contains__, stepped)):
                begun += compress(rows, of_rows)
        return begun

    def doomed_with(self, env_id: int) -> EnvFailure | None:
        """Return the failure by which an env that goes with this one was lost, but is shown still.

        The actions that they are sent next can only be left unexecuted together.
        """
        doomed = self._record.doomed
        return next((doomed[i] for i in self._of(env_id) if i in doomed), None)
