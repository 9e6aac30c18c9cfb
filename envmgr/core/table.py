"""The table of envs: every fact about an env that outlives a call."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envmgr.core.observations import Observed, RowsToRead
from envmgr.core.phases import (
    AWAITED,
    CHANGES,
    COMING,
    ENDS,
    REPAIRED,
    Change,
    Next,
    Phase,
)
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import TRANSITIONS, Column, EnvState, Event, TransitionTable
from envmgr.spaces import Array
from envmgr.types import EnvTimestep, Once
from envmgr.wire.arenas import CopyOnGet
from envmgr.wire.block import Block, items, request_of, token_of
from envmgr.wire.messages import UNANSWERED


@dataclass
class EpisodeRules:
    """Rules of episodes.

    Attributes:
        episode_num: episodes per env before DONE; may be inf.
        auto_reset: whether an env whose episode has ended is reset at once.
        reset_inplace: whether the timestep that ends an episode waits for that reset.
        copy_on_get: whether observations are copied out of shared memory, as in the config.
        check_actions: as in the config.
        raise_non_finite: whether NaN or infinite values end the manager rather than the episode.
        dynamic_seed: as in `BaseEnv.seed`; sent with each explicit seed.
        spare_takers: by env_id: whether the env is built as spares are; empty: all are.
        spares_in_order: see `Spares`.
    """

    episode_num: float = float("inf")
    auto_reset: bool = True
    reset_inplace: bool = False
    copy_on_get: CopyOnGet = True
    check_actions: Literal[True, False, "strict"] = True
    raise_non_finite: bool = False
    dynamic_seed: bool | None = None
    spare_takers: tuple[bool, ...] = ()
    spares_in_order: bool = True


class Pools:
    """The pools among batched envs, and whether more timesteps can come from them.

    A row that is in an episode and waits for its user, to send it an action or to take its timestep
    that has arrived, is not under way. All other rows are, or may be: rows that are in no episode
    are stepped to make up the `batch_size`.

    Args:
        table: what is known of all envs.
        batches: the batched envs that are pools; each has a `batch_size`.
    """

    def __init__(self, table: EnvTable, batches: Iterable[Batch]) -> None:
        self._table = table
        self._of = {i: batch for batch in batches for i in batch.env_ids}

    def gives(self, env_id: int, arrived: Collection[int] = ()) -> bool:
        """Return whether the pool of an env gives something without its user doing anything.

        Args:
            env_id: the env; the answer is true for an env that is in no pool.
            arrived: the envs whose timesteps can be taken.
        """
        batch = self._of.get(env_id)
        if batch is None:
            return True
        table, column = self._table, self._table.phases.column
        n_waiting = sum(
            i in arrived
            or i in table.undelivered
            or (column[i] == Phase.IDLE and table.states[i] is EnvState.RUN)
            for i in batch.env_ids
        )
        return batch.size - n_waiting >= (batch.batch_size or 1)

    def may_go_on(self, arrived: Iterable[int]) -> bool:
        """Return whether more timesteps than these come without the user doing anything."""
        known = set(arrived)
        waited_for = {self._of.get(i): i for i in self._table.owed_ids() if i not in known}
        return any(self.gives(env_id, known) for env_id in waited_for.values())

    def sizes(self) -> str:
        """Return, in words, how many envs of a pool have to be under way."""
        sizes = sorted({batch.batch_size or 1 for batch in self._of.values()})
        return " or ".join(map(str, sizes))


_QUIET = bytes((Phase.IDLE, Phase.CALLING))
_NOT_OWING = bytes(set(Phase) - {Phase.POSTED, Phase.STEPPING})


class Together:
    """The rows that are stepped together, and what that means for each of them.

    Args:
        table: what is known of all envs.
        batches: the batched envs that they are rows of.
    """

    def __init__(self, table: EnvTable, batches: Iterable[Batch]) -> None:
        self._table = table
        self._batches = [batch.env_ids for batch in batches]
        self._rows = {i: env_ids for env_ids in self._batches for i in env_ids}

    def __contains__(self, env_id: object) -> bool:
        """Return whether an env is stepped together with others."""
        return env_id in self._rows

    def _of(self, env_id: int) -> Sequence[int]:
        """Return the rows that an env is stepped together with, itself included."""
        return self._rows.get(env_id, ())

    def _is_mending(self, env_id: int) -> bool:
        """Return whether an env is in no episode, but will be without anybody doing anything."""
        table = self._table
        if table.states[env_id] is EnvState.RUN or table.resets_in_next_step[env_id]:
            return False
        return table.envs[env_id].is_coming

    def is_coming(self, env_id: int) -> bool:
        """Return whether an env will be ready without anybody doing anything.

        Such an env is on its way to an episode; or it is in one, and waits only for envs that are
        on their way to theirs.
        """
        table, rows = self._table, self._of(env_id)
        if table.envs[env_id].is_coming:
            return not table.resets_in_next_step[env_id] or self.begins(env_id)
        return any(map(self._is_mending, rows)) and not any(map(table.owes, rows))

    def is_settled(self, env_id: int) -> bool:
        """Return whether no env that is stepped with this one has still to become ready."""
        table, rows = self._table, self._rows.get(env_id, ())
        if isinstance(rows, range) and not (table.undelivered or table.unexecuted):
            busy = table.phases.column[rows.start : rows.stop].translate(None, _QUIET)
            # No row is busy, or the episodes of all that are begin with the next step.
            if table.resets_in_next_step[rows.start : rows.stop].count(1) == len(busy):
                return True
        return not any(table.owes(i) or self._is_mending(i) for i in rows)

    def settled(self, env_ids: Sequence[int]) -> list[int]:
        """Return those of some envs for which `is_settled` is true."""
        known = {rows.start: self.is_settled(rows.start) for rows in self._batches}
        if all(known.values()):
            return list(env_ids)
        return [i for i in env_ids if i not in self._rows or known[self._rows[i].start]]

    def missing(self, env_ids: Sequence[int]) -> list[int]:
        """Return the envs that would have to be sent an action together with these."""
        table, named = self._table, set(env_ids)
        others = {i for env_id in named for i in self._of(env_id)} - named
        return sorted(i for i in others if table.states[i] is EnvState.RUN)

    def may_be_stepped(self, env_ids: Sequence[int]) -> bool:
        """Return whether these envs include all envs that they are stepped together with.

        Args:
            env_ids: different env_ids, of envs that are in an episode.
        """
        table = self._table
        if len(env_ids) == table.env_num:
            return True
        ascending, states = sorted(env_ids), table.states.column
        for rows in self._batches:
            count = bisect_left(ascending, rows.stop) - bisect_left(ascending, rows.start)
            in_run = states[rows.start : rows.stop].count(EnvState.RUN)
            if count and (count != in_run or not self.is_settled(rows.start)):
                return False
        return True

    def complete(self, env_ids: Sequence[int]) -> list[int]:
        """Return those of these envs, which have arrived, whose batch owes nothing else."""
        table = self._table
        owed = len(table.phases.column.translate(None, _NOT_OWING))
        if owed + len(table.undelivered) + len(table.unexecuted) == len(env_ids):
            return list(env_ids)
        owes, arrived = table.owes, set(env_ids)
        incomplete = {self._of(i) for i in self._rows if i not in arrived and owes(i)}
        return [env_id for env_id in env_ids if self._of(env_id) not in incomplete]

    def goes_on(self, env_id: int) -> bool:
        """Return whether an env, once handed out, waits for no env that is stepped with it."""
        return not any(map(self._is_mending, self._of(env_id)))

    def begins(self, env_id: int) -> bool:
        """Return whether an env to be reset in the next step of others has no env to wait for."""
        return not any(
            self._table.states[i] is EnvState.RUN and not self._table.owes(i)
            for i in self._of(env_id)
        )

    def begun_with(self, env_ids: Iterable[int]) -> list[int]:
        """Return the envs whose next episodes begin with a step of these."""
        column, stepped = self._table.resets_in_next_step, list(env_ids)
        begun: list[int] = []
        for rows in self._batches:
            of_rows = column[rows.start : rows.stop]
            if 1 in of_rows and any(map(rows.__contains__, stepped)):
                begun += compress(rows, of_rows)
        return begun

    def lost_with(self, env_id: int) -> EnvFailure | None:
        """Return the failure of a lost env stepped with this one that is still shown as ready.

        The next actions of all these envs can only be left unexecuted together.
        """
        failed = self._table.failed_while_ready
        return next((failed[i] for i in self._of(env_id) if i in failed), None)


NEVER = math.inf

_UNREPAIRED = bytes(set(Phase) - set(REPAIRED))
_OWE_NONE = np.array([phase not in (Phase.POSTED, Phase.STEPPING) for phase in Phase])
_STEPS = bytes((Phase.POSTED, Phase.STEPPING))


class EnvTable:
    """What is known of all envs, and of the spares, whose ids follow.

    Args:
        spare_num: number of spares.

    Attributes:
        states: the state of each env, as its user sees it.
        phases: what the host of each env is busy with.
        tokens: for each env, the token of the request whose reply is awaited, or that was answered
            last.
        token_items: the same tokens, for reading and writing one by one.
        since: for each env, when its request was sent, if that has a time limit.
        steps: how many steps each env was asked for, without those that `Selections` still has to
            add. An interrupt may cause one of them to be counted twice.
        step_items: the same numbers, for reading and writing one by one.
        observed: the newest observations.
        undelivered: timesteps that are out of the ordinary, by env_id, until they are handed out.
        awaits_reset: those of them that wait for the reset that belongs to them (`reset_inplace`).
        failed_while_ready: by env_id, the failures of envs whose host died while they were ready.
        unexecuted: those of these envs that were sent an action since; it is not executed, and its
            timestep is still to come.
        retired: envs whose rows and buffers are left to a host that could not be killed.
        by_message: envs whose steps are not posted: retired ones, and those whose data has no fixed
            layout.
        leased: envs that calls for batches do not see, by env_id, each with the failure, if any,
            that it was not spared (by another attempt at a reset) since this was last looked at.
            They are in `by_message`, too, so that such calls look twice.
        posted_alone: leased envs whose steps are posted all the same, by whoever has leased them.
        resets_in_next_step: 1 for rows of batched envs whose next episodes begin with the next step
            of others.
        again: envs that are to be reset once more when the reset under way is over.
        episodes: for each env, how many resets have succeeded.
        next_episodes: what `episodes` will be once the reset that was begun last has succeeded.
        episodes_done: for each env, how many episodes were counted against `episode_num`.
        next_resets: by env_id, what is out of the ordinary about the next reset of an env. Few envs
            have an entry, and it is forgotten when that reset has succeeded.
        reset_params: by env_id, the keyword arguments of resets, for envs that have any.
        reset_infos: by env_id, the info of the newest reset, if it said anything.
        envs: everything else about each env, by env_id.
        index_of: where the steps of each env_id are posted: at the index of its host, or all in one
            place where they run in the caller.
        moves: how often an env_id has been given another index in `index_of`.
        has_batched: whether some envs are rows of batched envs that are stepped together.
        launching: true until the first resets are over.
        all_ids: the env_ids of all envs, ascending; without spares.
    """

    def __init__(self, env_num: int, spare_num: int = 0) -> None:
        count = env_num + spare_num
        self.env_num = env_num
        self._states = TransitionTable(TRANSITIONS, EnvState, count)
        self._phases = TransitionTable(CHANGES, Phase, count)
        self.states: Column[EnvState] = self._states
        self.phases: Column[Phase] = self._phases
        self.tokens: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        self.token_items = items(self.tokens)
        self.since: npt.NDArray[np.float64] = np.full(count, NEVER)
        self.steps: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.step_items = items(self.steps)
        self.observed = Observed(count)
        self.undelivered: dict[int, EnvTimestep] = {}
        self.awaits_reset: set[int] = set()
        self.failed_while_ready: dict[int, EnvFailure] = {}
        self.unexecuted: set[int] = set()
        self.launching = True
        self.retired: set[int] = set()
        self.by_message: set[int] = set()
        self.leased: dict[int, EnvFailure | None] = {}
        self.posted_alone: set[int] = set()
        self.resets_in_next_step = bytearray(count)
        self.again: set[int] = set()
        self.episodes, self.next_episodes, self.episodes_done = ([0] * count for _ in range(3))
        self.next_resets: dict[int, NextReset] = {}
        self.reset_params: dict[int, dict[str, Any]] = {}
        self.reset_infos: dict[int, dict[str, Any]] = {}
        self.has_batched = False
        self._together: Together | None = None
        self._pools: Pools | None = None
        self.envs = [ManagedEnv(i, self, is_spare=i >= env_num) for i in range(count)]
        self.index_of = [0] * env_num
        self.moves = 0
        self.all_ids = range(env_num)
        self._all_idle, self._all_run = (bytes([i]) * env_num for i in (Phase.IDLE, EnvState.RUN))
        self._seen = self.phases.view[:env_num], self.tokens[:env_num]
        self._found = np.empty(env_num, np.bool_), np.empty(env_num, np.bool_)

    def answered(self, column: npt.NDArray[np.uint64], phase: np.uint8) -> npt.NDArray[np.bool_]:
        """Return which envs are in a phase and have answered the request that it is about.

        Args:
            column: the tokens of the requests that were answered: (env_num,).
            phase: the phase.

        Returns:
            (env_num,) bool; valid until the next call of this method.
        """
        (phases, tokens), (found, also) = self._seen, self._found
        np.equal(phases, phase, out=also)
        return np.logical_and(np.equal(column, tokens, out=found), also, out=found)

    # -- what happens: nobody else changes states and phases ------------------------------------

    def happened(self, env_id: int, event: Event) -> None:
        """Change the state of an env, to which something has happened.

        Raises:
            IllegalTransitionError: the event cannot happen in its state; nothing was changed.
        """
        self._states.apply(env_id, event)

    def changed(self, env_id: int, change: Change) -> None:
        """Change the phase of an env, whose host is busy with something else now.

        Raises:
            IllegalTransitionError: the change cannot follow its phase; nothing was changed.
        """
        self._phases.apply(env_id, change)
        self.resets_in_next_step[env_id] = 0

    def launched(self, env_ids: Iterable[int]) -> None:
        """Note that the hosts of envs are being started."""
        self._states.apply_all(env_ids, Event.LAUNCH)

    def posted(self, selection: Selection, window: Window | None, tokens: Any) -> None:
        """Note that steps of envs are posted; can be done again.

        Args:
            selection: the envs.
            window: their rows of the block, if they are neighbours.
            tokens: the tokens of the requests: their bytes where the envs are neighbours, else an
                array, or the one token that all have.
        """
        if window is None:
            self.tokens[selection.rows] = tokens
            self._phases.apply_at(selection.array, Change.POST)
        else:
            window.token_bytes[:] = tokens
            self._phases.apply_rows(selection.rows, Change.POST)

    def sent(self, tokens: Mapping[int, int]) -> None:
        """Note that steps of envs are sent by message.

        Can be done again, but then a step may count twice.

        Args:
            tokens: the tokens of the requests, by env_id.
        """
        token_items, steps = self.token_items, self.step_items
        for env_id, token in tokens.items():
            token_items[env_id] = token
            steps[env_id] += 1
        self._phases.apply_all(tokens, Change.STEP)

    def arrived(self, timesteps: Mapping[int, EnvTimestep]) -> None:
        """Keep timesteps that came by message and end no episode; can be done again."""
        self.observed.keep_each(timesteps)
        self.undelivered.update(timesteps)
        self._phases.apply_all(timesteps, Change.SETTLE)

    def delivered(self, selection: Selection | None, kept: Iterable[int]) -> None:
        """Note that timesteps of envs were handed out; can be done again.

        Args:
            selection: the envs whose replies were taken out of the block; None if there are none.
            kept: the envs whose timesteps were kept here.
        """
        if selection is None:
            pass
        elif selection.is_slice:
            self._phases.apply_rows(selection.rows, Change.SETTLE)
        else:
            self._phases.apply_at(selection.array, Change.SETTLE)
        for env_id in kept:
            self.undelivered.pop(env_id, None)

    def episodes_ended(self, endings: Iterable[tuple[int, int, bool]]) -> None:
        """Note that episodes have ended, and that hosts begin the next ones by themselves.

        Can be done again.

        Args:
            endings: (env_id, number of episodes that the env has ended, this one included, whether
                its next one begins with the next step of others).
        """
        column, running, ended = self.states.column, EnvState.RUN, []
        begun, to_begin, done, in_next_step = (
            self.episodes,
            self.next_episodes,
            self.episodes_done,
            self.resets_in_next_step,
        )
        for env_id, episodes_done, begins_with_others in endings:
            done[env_id], to_begin[env_id] = episodes_done, begun[env_id] + 1
            in_next_step[env_id] = begins_with_others
            ended.append(env_id)
        self._states.apply_all([i for i in ended if column[i] == running], Event.EPISODE_ENDED)
        self._phases.apply_all(ended, Change.RESET)

    def episodes_begun(
        self, buffers: Mapping[int, int], infos: Mapping[int, dict[str, Any]]
    ) -> None:
        """Note that envs have been reset, and nothing besides; can be done again.

        Args:
            buffers: where their first observations are, by env_id.
            infos: the infos of those resets that said anything, by env_id.
        """
        self._note_resets(buffers, infos)
        self.awaits_reset.difference_update(buffers)
        column, running = self.states.column, EnvState.RUN
        episodes, next_episodes = self.episodes, self.next_episodes
        for env_id in buffers:
            episodes[env_id], self.resets_in_next_step[env_id] = next_episodes[env_id], 0
        resetting = [env_id for env_id in buffers if column[env_id] != running]
        self._states.apply_all(resetting, Event.RESET_SUCCEEDED)
        self.observed.began(buffers)
        self._phases.apply_all(buffers, Change.SETTLE)  # last: until then it is done again

    def ended_in_place(
        self,
        beginnings: Iterable[tuple[int, int, int, int]],
        infos: Mapping[int, dict[str, Any]],
    ) -> None:
        """Note that episodes have ended, and the next ones begun, within steps.

        Can be done again. The states and phases of the envs change as with any other timestep, and
        in no other way.

        Args:
            beginnings: (env_id, number of episodes that the env has ended, number of the new one,
                buffer of its first observation).
            infos: the infos of those resets that said anything, by env_id.
        """
        begun, to_begin, done, buffers = self.episodes, self.next_episodes, self.episodes_done, {}
        for env_id, episodes_done, episode, buffer in beginnings:
            done[env_id] = episodes_done
            begun[env_id] = to_begin[env_id] = episode
            buffers[env_id] = buffer
        self._note_resets(buffers, infos)
        self.observed.began(buffers)

    def _note_resets(self, env_ids: Collection[int], infos: Mapping[int, dict[str, Any]]) -> None:
        for kept in (self.next_resets, self.reset_infos):
            if kept:
                for env_id in env_ids:
                    kept.pop(env_id, None)
        if infos:
            self.reset_infos.update(infos)
        if self.reset_params:
            self.use_up_params(env_ids)

    def use_up_params(self, env_ids: Iterable[int]) -> None:
        """Forget reset params that were meant for one reset only, which has succeeded."""
        params = self.reset_params
        for env_id in env_ids:
            if isinstance(params.get(env_id), Once):
                del params[env_id]

    # -- rows of batched envs, which go together ------------------------------------------------

    def join_rows(self, batches: Sequence[Batch]) -> None:
        """Take note of which envs are rows of batched envs."""
        for batch in batches:
            for env_id in batch.env_ids:
                self.envs[env_id].batch = batch
        if lockstep := [batch for batch in batches if not batch.partial_steps]:
            self._together, self.has_batched = Together(self, lockstep), True
        if pools := [batch for batch in batches if batch.batch_size]:
            self._pools = Pools(self, pools)

    def go_together(self, env_ids: Sequence[int]) -> bool:
        """Return whether these envs, all in an episode, include all that they are stepped with."""
        return self._together is None or self._together.may_be_stepped(env_ids)

    def missing_beside(self, env_ids: Sequence[int]) -> list[int]:
        """Return the envs that would have to be sent an action together with these."""
        return [] if self._together is None else self._together.missing(env_ids)

    def complete(self, env_ids: list[int]) -> list[int]:
        """Return those of these envs, which have arrived, whose batch owes nothing else."""
        return env_ids if self._together is None else self._together.complete(env_ids)

    def goes_on(self, env_id: int) -> bool:
        """Return whether an env, once handed out, waits for no env that is stepped with it."""
        return self._together is None or self._together.goes_on(env_id)

    def may_reset_in_next_step(self, env_id: int) -> bool:
        """Return whether the next episode of an env may begin with the next step of others."""
        return self._together is not None and env_id in self._together

    def lost_beside(self, env_id: int) -> EnvFailure | None:
        """Return the failure of a lost env stepped with this one that is still shown as ready.

        The next actions of all these envs can only be left unexecuted together.
        """
        return None if self._together is None else self._together.lost_with(env_id)

    def begun_with(self, env_ids: Iterable[int]) -> list[int]:
        """Return the envs whose next episodes begin with a step of these."""
        if self._together is None or 1 not in self.resets_in_next_step:
            return []
        return self._together.begun_with(env_ids)

    def waits_for_step(self, env_id: int) -> None:
        """Note that the next episode of an env begins with the next step of others."""
        self.resets_in_next_step[env_id] = 1

    def rows_in_next_step(self, env_ids: Iterable[int]) -> list[int]:
        """Return those of some envs whose next episodes begin with the next step of others."""
        if 1 not in self.resets_in_next_step:
            return []
        return [env_id for env_id in env_ids if self.resets_in_next_step[env_id]]

    def waits_no_more(self, env_ids: Iterable[int]) -> None:
        """Note that the next episodes of envs wait for no step of others; can be done again."""
        for env_id in env_ids:
            self.resets_in_next_step[env_id] = 0

    def reset_with(self, env_id: int) -> Sequence[int]:
        """Return the env_ids that can only be reset all together with this one; itself included."""
        env = self.envs[env_id]
        return (env_id,) if env.batch is None or env.resets_alone else env.batch.env_ids

    def begins_alone(self, env_id: int) -> bool:
        """Return whether an env reset in the next step of others has no env left to wait for."""
        return self._together is not None and self._together.begins(env_id)

    @property
    def some_at_a_time(self) -> bool:
        """Whether there are pools, which give nothing before enough of their envs are under way."""
        return self._pools is not None

    def may_go_on(self, arrived: Iterable[int]) -> bool:
        """Return whether more timesteps than these come without the user doing anything."""
        return self._pools is None or self._pools.may_go_on(arrived)

    def needed_under_way(self) -> str:
        """Return, in words, how many envs of a pool must be under way for it to give anything."""
        return "" if self._pools is None else self._pools.sizes()

    # -- who is ready, and who owes a timestep ------------------------------------------------

    @property
    def are_all_ready(self) -> bool:
        """Whether every env takes an action now, and nothing is awaited of any."""
        n = self.env_num  # while an env is leased, `_all_run` is nothing that there is
        return (
            not self.undelivered
            and not self.failed_while_ready
            and self.phases.column[:n] == self._all_idle
            and self.states.column[:n] == self._all_run
        )

    @property
    def awaits_nothing(self) -> bool:
        """Whether all envs are ready, except those reset in the next step of others."""
        n_ready = len(self.resets_in_next_step) - self.resets_in_next_step.count(1)
        idle, in_run = self.phases.column.count(Phase.IDLE), self.states.column.count(EnvState.RUN)
        is_clear = not (self.undelivered or self.failed_while_ready or self.leased)
        return idle == in_run == n_ready and is_clear

    def is_ready(self, env_id: int) -> bool:
        """Return whether an env takes an action now."""
        if self.states.column[env_id] != EnvState.RUN or self.owes(env_id):
            return False
        if env_id in self.leased:
            return False
        return self._together is None or self._together.is_settled(env_id)

    def is_coming(self, env_id: int) -> bool:
        """Return whether an env that is not ready will become so without anybody doing anything."""
        together, pools = self._together, self._pools
        if env_id in self.leased or (pools is not None and not pools.gives(env_id)):
            return False
        return self.envs[env_id].is_coming if together is None else together.is_coming(env_id)

    def owes(self, env_id: int) -> bool:
        """Return whether an env has an accepted action whose timestep is not delivered yet."""
        has_sent = self.phases.column[env_id] in _STEPS
        return has_sent or env_id in self.undelivered or env_id in self.unexecuted

    def owed_ids(self) -> list[int]:
        """Return the envs that owe a timestep, ascending; without those that are leased."""
        leased = self.leased
        return [i for i in range(self.env_num) if self.owes(i) and i not in leased]

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        if self.are_all_ready:
            return list(self.all_ids)
        ready = self._owing_none_in(self.states.view == np.uint8(EnvState.RUN))
        if self.undelivered or self.unexecuted:
            ready = [i for i in ready if not self.owes(i)]
        if self.leased:
            ready = [i for i in ready if i not in self.leased]
        return ready if self._together is None else self._together.settled(ready)

    def _owing_none_in(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """Return those of the chosen envs whose hosts have no timestep under way, ascending."""
        found: list[int] = (chosen & _OWE_NONE[self.phases.view]).nonzero()[0].tolist()
        return found

    @property
    def any_repaired(self) -> bool:
        """Whether something goes on behind the caller that is more than a reset."""
        return bool(self.phases.column.translate(None, _UNREPAIRED))

    def env_states(self) -> tuple[EnvState, ...]:
        """Return the states of all envs, by env_id; without spares."""
        return tuple(map(self.states.members.__getitem__, self.states.column[: self.env_num]))

    @property
    def is_executing(self) -> bool:
        """Whether a step is under way, or its reply is still to be taken out of the block.

        Steps of leased envs do not count: there is always one under way.
        """
        if Phase.POSTED in self.phases.column or self.unexecuted:
            return True
        return not self.leased.keys() >= set(self.phases.ids_in(Phase.STEPPING))

    def retire(self, env_id: int) -> None:
        """Stop using the row and the buffers of an env."""
        self.retired.add(env_id)
        self.by_message.add(env_id)
        self.posted_alone.discard(env_id)
        self.observed.retire(env_id)

    # -- who is leased ------------------------------------------------------------------------

    def lease(self, env_id: int) -> None:
        """Hide an env from calls for batches."""
        self.leased[env_id] = None
        if env_id not in self.by_message:
            self.by_message.add(env_id)
            self.posted_alone.add(env_id)
        self._all_run = b""

    def unlease(self, env_id: int) -> None:
        """Show an env to calls for batches again."""
        del self.leased[env_id]
        if env_id in self.posted_alone:
            self.posted_alone.discard(env_id)
            self.by_message.discard(env_id)
        if not self.leased:
            self._all_run = bytes((EnvState.RUN,)) * self.env_num

    def clear(self) -> None:
        """Let go of all observations and timesteps: they may be views of shared memory."""
        self.undelivered.clear()
        self.awaits_reset.clear()
        self.failed_while_ready.clear()
        self.unexecuted.clear()
        self.observed.detach()
        for env in self.envs:
            env.fresh = None


def names_of(envs: Sequence[ManagedEnv]) -> str:
    """Return the names of envs for messages; of many, only the first ones, and how many more."""
    if len(envs) == 1 or any(env.is_spare for env in envs):
        return ", ".join(env.name for env in envs)
    more = f" and {len(envs) - _NAMED} more" if len(envs) > _NAMED else ""
    return f"envs {', '.join(str(env.env_id) for env in envs[:_NAMED])}{more}"


_NAMED = 16
_REPLACED = frozenset((Phase.ENDING, Phase.PAUSING, Phase.STARTING))


@dataclass(slots=True)
class NextReset:
    """What is out of the ordinary about the next reset of an env, or the one under way.

    Attributes:
        attempts: how many attempts at this reset have failed.
        seed: the seed for this reset, taken exactly as it is.
        new_generation: whether it is the first reset of a later generation, seeded accordingly.
    """

    attempts: int = 0
    renewals_in_a_row: int = 0
    seed: int | None = None
    new_generation: bool = False


_ORDINARY_RESET = NextReset()


def _put(members: set[int], env_id: int, is_member: bool) -> None:
    if is_member:
        members.add(env_id)
    else:
        members.discard(env_id)


def _keep(kept: dict[int, dict[str, Any]], env_id: int, value: dict[str, Any]) -> None:
    if value:
        kept[env_id] = value
    else:
        kept.pop(env_id, None)


@dataclass(slots=True, eq=False)
class ManagedEnv:
    """One env_id: its host, what is under way, and what its user has and is owed.

    Attributes:
        is_spare: whether the id is that of a spare, which nobody sees: see `spares.Spares`.
        batch: the batched env that this is a row of; None for an env of its own.
        group: the envs that share its host.
        generation: how often the env behind the id was renewed.
        host_id: its host; None if it has none, or takes no part in the one of its group.
        order: a number like a request's id, which says where something that the host does by itself
            comes in the order of requests.
        deadline: when what it does times out, or a pause ends. Requests to a shared host have none
            of their own (see `HostGroup.deadline`), and neither have posted steps.
        limit_s: the time limit that was set last.
        follow_up: what follows a pause or the end of a host.
        pause_s: how long to pause before that.
        base_seed: the seed it was given last, from which those of later generations are derived.
        new_seed: a seed that was given by `seed` and is not used yet; the next explicit reset takes
            it.
        has_plan: whether its host knows what to begin resets with, by itself or when one is posted.
        attended: whether an episode begins when its repair is over; else it goes to NEED_RESET.
        waits: whether its episode has ended and the next one begins only when its host has been
            replaced.
        leaves: whether its next reset ends an episode in which it has taken steps.
        left_with: the id of the reset that ended such an episode, until that reset is over, or has
            begun in the host that takes the place of the one that was asked.
        renewals_in_a_row: renewals since the last reset that succeeded.
        fresh: for an env that failed while it was ready: what it shows after the timestep that it
            gets for its next action.
        resets_alone: whether it can be reset while other rows of its batched env are in an episode.
        dropped: whether its failure budget is spent and it takes no more part.
        cancelled: the id of a request that its host was told to cancel, because it has exceeded its
            limit.
        called: what it was called for last, in words.
        result: what came of a call: the payload of its reply, or the failure.
    """

    env_id: int
    table: EnvTable = field(repr=False)
    is_spare: bool = False
    batch: Batch | None = None
    group: HostGroup = field(init=False, repr=False)
    generation: int = 0
    host_id: int | None = None
    order: int = 0
    deadline: float = NEVER
    limit_s: float = NEVER
    follow_up: Next = Next.NOTHING
    pause_s: float = 0.0
    base_seed: int | None = None
    new_seed: int | None = None
    has_plan: bool = False
    attended: bool = True
    waits: bool = False
    leaves: bool = False
    left_with: int = UNANSWERED
    fresh: tuple[Any, dict[str, Any]] | None = None
    dropped: bool = False
    cancelled: int = UNANSWERED
    resets_alone: bool = True
    called: str = ""
    result: Any = None

    @property
    def during(self) -> str:
        """What the env is busy with, as named in messages."""
        return self.called if self.phase is Phase.CALLING else self.phase.label

    @property
    def name(self) -> str:
        """What the env is called in messages."""
        return f"{'spare ' if self.is_spare else ''}env {self.env_id}"

    @property
    def shares_env(self) -> bool:
        """Whether other env_ids are rows of the same env, built and lost with all of them."""
        return self.batch is not None

    @property
    def is_callable(self) -> bool:
        """Whether its host can take a call now."""
        return self.phase is Phase.IDLE and self.host_id is not None

    @property
    def is_gone(self) -> bool:
        """Whether its host was given up, so that there is nothing to wait for."""
        phase = self.phase
        if phase is Phase.ENDING:
            return self.follow_up is Next.NOTHING
        return phase is Phase.IDLE and self.host_id is None

    @property
    def is_coming(self) -> bool:
        """Whether it will be in an episode without anybody doing anything."""
        return self.attended and self.is_under_way

    @property
    def is_replaced(self) -> bool:
        """Whether its host is being replaced instead of doing a reset that it was asked for."""
        return self.left_with != UNANSWERED and self.phase in _REPLACED

    @property
    def is_under_way(self) -> bool:
        """Whether it is being reset or repaired, and not given up."""
        phase = self.phase
        return phase in COMING and not (phase in ENDS and self.follow_up is Next.NOTHING)

    # -- what is in the columns ---------------------------------------------------------------

    @property
    def state(self) -> EnvState:
        """What the env is doing, as its user sees it."""
        return self.table.states[self.env_id]

    @property
    def attempts(self) -> int:
        """How many attempts at the present reset have failed."""
        return self.table.next_resets.get(self.env_id, _ORDINARY_RESET).attempts

    @attempts.setter
    def attempts(self, attempts: int) -> None:
        self._of_next_reset().attempts = attempts

    @property
    def renewals_in_a_row(self) -> int:
        """Renewals since the last reset that succeeded."""
        return self.table.next_resets.get(self.env_id, _ORDINARY_RESET).renewals_in_a_row

    @renewals_in_a_row.setter
    def renewals_in_a_row(self, renewals_in_a_row: int) -> None:
        self._of_next_reset().renewals_in_a_row = renewals_in_a_row

    @property
    def seed(self) -> int | None:
        """The seed for the reset under way, or the next one, taken exactly as it is."""
        return self.table.next_resets.get(self.env_id, _ORDINARY_RESET).seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._of_next_reset().seed = seed

    @property
    def new_generation(self) -> bool:
        """Whether the next reset is the first of a later generation, seeded accordingly."""
        return self.table.next_resets.get(self.env_id, _ORDINARY_RESET).new_generation

    @new_generation.setter
    def new_generation(self, new_generation: bool) -> None:
        self._of_next_reset().new_generation = new_generation

    def _of_next_reset(self) -> NextReset:
        return self.table.next_resets.setdefault(self.env_id, NextReset())

    @property
    def again(self) -> bool:
        """Whether it is reset once more when the running reset is over."""
        return self.env_id in self.table.again

    @again.setter
    def again(self, again: bool) -> None:
        _put(self.table.again, self.env_id, again)

    @property
    def awaits_reset(self) -> bool:
        """Whether its timestep waits for the reset that belongs to it (`reset_inplace`)."""
        return self.env_id in self.table.awaits_reset

    @awaits_reset.setter
    def awaits_reset(self, held: bool) -> None:
        _put(self.table.awaits_reset, self.env_id, held)

    @property
    def failed_while_ready(self) -> EnvFailure | None:
        """The failure with which its host died while the env was ready; None if it did not."""
        return self.table.failed_while_ready.get(self.env_id)

    @failed_while_ready.setter
    def failed_while_ready(self, failure: EnvFailure | None) -> None:
        if failure is None:
            self.table.failed_while_ready.pop(self.env_id, None)
        else:
            self.table.failed_while_ready[self.env_id] = failure

    @property
    def reset_info(self) -> dict[str, Any]:
        """Info of the newest reset."""
        return self.table.reset_infos.get(self.env_id, {})

    @reset_info.setter
    def reset_info(self, info: dict[str, Any]) -> None:
        _keep(self.table.reset_infos, self.env_id, info)

    @property
    def reset_params(self) -> dict[str, Any]:
        """Keyword arguments of its resets."""
        return self.table.reset_params.get(self.env_id, {})

    @reset_params.setter
    def reset_params(self, params: dict[str, Any]) -> None:
        _keep(self.table.reset_params, self.env_id, params)

    @property
    def episode(self) -> int:
        """How many resets have succeeded."""
        return self.table.episodes[self.env_id]

    @episode.setter
    def episode(self, episode: int) -> None:
        self.table.episodes[self.env_id] = episode

    @property
    def next_episode(self) -> int:
        """What `episode` will be once the reset that was begun last has succeeded."""
        return self.table.next_episodes[self.env_id]

    @next_episode.setter
    def next_episode(self, next_episode: int) -> None:
        self.table.next_episodes[self.env_id] = next_episode

    @property
    def episodes_done(self) -> int:
        """How many episodes were counted against `episode_num`."""
        return self.table.episodes_done[self.env_id]

    @episodes_done.setter
    def episodes_done(self, episodes_done: int) -> None:
        self.table.episodes_done[self.env_id] = episodes_done

    @property
    def phase(self) -> Phase:
        """What its host is busy with."""
        return self.table.phases[self.env_id]

    @property
    def token(self) -> int:
        """The token of the request whose reply is awaited, or that was answered last."""
        token: int = self.table.token_items[self.env_id]
        return token

    @property
    def request_id(self) -> int:
        """The id of the request whose reply is awaited, or that was answered last."""
        return request_of(self.table.token_items[self.env_id])[1]

    @request_id.setter
    def request_id(self, request_id: int) -> None:
        self.table.token_items[self.env_id] = token_of(self.generation, request_id)

    @property
    def since(self) -> float:
        """When the request was sent, if it has a limit and the host is shared."""
        return float(self.table.since[self.env_id])

    @since.setter
    def since(self, moment: float) -> None:
        self.table.since[self.env_id] = moment

    @property
    def owed(self) -> bool:
        """Whether an action was accepted and its timestep not yet delivered."""
        return self.table.owes(self.env_id)

    @property
    def timestep(self) -> EnvTimestep | None:
        """The timestep that it owes, if that has arrived in another way than in the block."""
        return self.table.undelivered.get(self.env_id)

    @timestep.setter
    def timestep(self, timestep: EnvTimestep) -> None:
        self.table.undelivered[self.env_id] = timestep

    @property
    def obs(self) -> Any:
        """The newest observation: what `ready_obs` shows in RUN."""
        return self.table.observed.of((self.env_id,))[0]

    @obs.setter
    def obs(self, obs: Any) -> None:
        self.table.observed.keep(self.env_id, obs)


@dataclass(slots=True, eq=False)
class HostGroup:
    """The envs that share a host, which may be replaced.

    Its envs never change, except where a spare takes the place of another env.

    Attributes:
        index: its index among the groups.
        envs: its envs, by ascending env_id.
        is_shared: whether it has several envs.
        is_async: whether its host goes on with other envs while one does what it was asked for.
        by_id: the same envs, by env_id.
        host_id: the host; None while there is none.
        is_ending: whether the host was killed or asked to end.
        is_to_be_replaced: whether a new host is wanted as soon as none of its envs is in an
            episode.
        running: for a shared host: the env that the host has said it works for.
        deadline: for a shared host: when what it does now times out, or its silence does; a moment
            that is too early is allowed while nothing is running.
        quiet_since: for a shared host: when it was last known to be done with something.
        overdue: for a shared host: the order of the request that it should have begun with, as far
            as could be told, and what had been posted for it when that request was first looked at.
        is_retired: whether what the block says of its host may be written by a host that was given
            up.
        is_spare: whether it serves a spare.
        obsolete_requests: requests to its host under the env_id that it served before; replies to
            them that still come are dropped.
    """

    index: int
    envs: tuple[ManagedEnv, ...]
    is_shared: bool = field(init=False)
    is_async: bool = False
    by_id: dict[int, ManagedEnv] = field(init=False)
    host_id: int | None = None
    is_ending: bool = False
    is_to_be_replaced: bool = False
    running: ManagedEnv | None = None
    deadline: float = NEVER
    quiet_since: float = 0.0
    overdue: tuple[int, float] = (0, 0.0)
    is_retired: bool = False
    is_spare: bool = field(init=False)
    obsolete_requests: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_shared = len(self.envs) > 1
        self.serve(self.envs)

    def serve(self, envs: tuple[ManagedEnv, ...]) -> None:
        """Make these the envs of the group."""
        self.envs = envs
        self.is_spare = envs[0].is_spare
        self.by_id = {env.env_id: env for env in envs}
        for env in envs:
            env.group = self

    @property
    def takes_turns(self) -> bool:
        """Whether what one env is asked for may wait until another env of the group is done."""
        return self.is_shared and not self.is_async

    def present(self) -> list[ManagedEnv]:
        """Return the envs that take part in the host."""
        return [env for env in self.envs if env.host_id is not None]

    def blamed(self) -> ManagedEnv:
        """Return the env that was running when something happened to the host.

        If the host has not said which: the first in the order in which requests were sent; if the
        host was idle, the first of its envs.
        """
        if self.running is not None:
            return self.running
        return next(iter((*self.awaited(), *self.present(), *self.envs)))

    def awaited(self) -> list[ManagedEnv]:
        """Return the envs whose replies are awaited, in the order in which they run, if known.

        Requests run in the order in which they were sent; a reset that the host begins by itself
        runs after the requests that were sent before that reset was known of. Envs whose steps are
        posted are left out, because the block says which of those is running; so are envs whose
        resets wait for a step of others.
        """
        return sorted(
            (
                s
                for s in self.envs
                if s.phase in AWAITED and not s.table.resets_in_next_step[s.env_id]
            ),
            key=lambda env: max(env.request_id, env.order),
        )


def host_groups(envs: Sequence[ManagedEnv], n_hosts: int | None) -> list[HostGroup]:
    """Divide envs into contiguous groups whose sizes differ by one at most, larger ones first.

    The rows of a batched env stay together: they count as one.

    Args:
        envs: all envs.
        n_hosts: how many groups to make; None: one for each env.
    """
    units: list[list[ManagedEnv]] = []
    for env in envs:
        if env.batch is None or env.env_id == env.batch.first:
            units.append([])
        units[-1].append(env)
    n_hosts = n_hosts or len(units)
    size, n_larger = divmod(len(units), n_hosts)
    groups: list[HostGroup] = []
    first = 0
    for index in range(n_hosts):
        end = first + size + (index < n_larger)
        groups.append(HostGroup(index, tuple(itertools.chain(*units[first:end]))))
        first = end
    return groups


_KNOWN_SELECTIONS = 256

NOBODY = np.empty(0, dtype=np.int64)
"""The env_ids of no envs at all."""

NOBODY.flags.writeable = False


class Window:
    """The rows of neighbours, cut out of the columns once: cheaper than indexing each time.

    Args:
        block: the columns that are shared.
        rows: the rows.
        tokens: for all envs, the tokens of the requests whose replies are awaited.

    Attributes:
        actions: their rows of the actions, per leaf.
        rewards: their rows of the rewards that are one number.
        flags: the flags of their replies.
        replies: the tokens that were replied, for comparing with `tokens`.
        tokens: the tokens that are awaited.
        token_bytes: the bytes of `tokens`, for writing them as a whole.
        request_bytes: the bytes of the tokens that are requested, likewise.
    """

    __slots__ = (
        "actions",
        "flags",
        "replies",
        "request_bytes",
        "rewards",
        "token_bytes",
        "tokens",
    )

    def __init__(self, block: Block, rows: slice, tokens: Array) -> None:
        self.actions = [column[rows] for column in block.actions]
        self.rewards = block.rewards[rows]
        self.replies = items(block.replies[rows])
        self.tokens = items(tokens[rows])
        self.flags = items(block.flags[rows])
        self.token_bytes = self.tokens.cast("B")
        self.request_bytes = items(block.requests[rows]).cast("B")


class Selection:
    """Envs that are stepped together, in the order their user named them.

    Attributes:
        ids: their env_ids.
        count: how many envs there are.
        array: the same env_ids, as a read-only array (k,) int64.
        rows: what indexes their rows: a slice if they are neighbours, else `array`.
        is_slice: whether they are neighbours.
        hosts: the indexes of their hosts.
        window: their rows of the columns, if they are neighbours and steps are posted.
        in_c: likewise, what takes ordinary steps of all of them in C; None where Python does.
        arenas: their rows of the arenas, by buffer, as far as they were asked for, if they are
            neighbours.
        is_ascending: whether the env_ids ascend.
        ordinary: what `Collector` has read from replies of ordinary steps, by their flags: equal
            flags say the same again.
        recipes: recipes of batches of ordinary timesteps, by flags, likewise: see
            `Collector.arrays`.
        fresh: bytes that say of each env that its newest observation is in the arena.
        stale: bytes that say of each env that it is not.
        posted: bytes that say of each env that its step is posted.
        none: an array with False for each env.
        n_posts: how often steps of all were posted since these were last added to the steps of
            each.
        idle: bytes that say of each env that nothing is asked of its host.
        run: bytes that say of each env that it is in RUN.
    """

    __slots__ = (
        "arenas",
        "array",
        "count",
        "fresh",
        "hosts",
        "idle",
        "ids",
        "in_c",
        "is_ascending",
        "is_slice",
        "n_posts",
        "none",
        "ordinary",
        "posted",
        "recipes",
        "rows",
        "run",
        "stale",
        "window",
    )

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.count = len(ids)
        self.array: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.array.flags.writeable = False
        first, count = ids[0], len(ids)
        self.hosts: list[int] = []
        self.is_ascending = 0 not in (self.array[1:] > self.array[:-1]).tobytes()
        self.is_slice = self.is_ascending and ids[-1] - first == count - 1
        self.rows: Any = slice(first, first + count) if self.is_slice else self.array
        self.fresh, self.stale = bytes((1,)) * count, bytes(count)
        self.none: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.posted, self.idle = bytes((Phase.POSTED,)) * count, bytes((Phase.IDLE,)) * count
        self.run = bytes((EnvState.RUN,)) * count
        self.window: Window | None = None
        self.in_c: Any = None
        self.arenas: dict[int, list[Array]] = {}
        self.ordinary: dict[bytes | int, Any] = {}
        self.recipes: dict[int, Any] = {}
        self.n_posts = 0

    def may_be_posted(self, table: EnvTable) -> bool:
        """Return whether all of these envs take an action now, which their hosts can execute."""
        ids, undelivered, failed = self.ids, table.undelivered, table.failed_while_ready
        if undelivered and not undelivered.keys().isdisjoint(ids):
            return False
        if failed and not failed.keys().isdisjoint(ids):
            return False
        if table.by_message and not table.by_message.isdisjoint(ids):
            return False
        if table.has_batched and not table.go_together(ids):
            return False
        rows, phases, states = self.rows, table.phases, table.states
        if self.is_slice:
            return bool(phases.column[rows] == self.idle and states.column[rows] == self.run)
        is_idle: bool = phases.view[rows].tobytes() == self.idle
        return is_idle and bool(states.view[rows].tobytes() == self.run)

    def is_posted(self, phases: Column[Phase]) -> bool:
        """Return whether the steps of all of these envs are posted."""
        if self.is_slice:
            return bool(phases.column[self.rows] == self.posted)
        return bool(phases.view[self.array].tobytes() == self.posted)


_PLAIN_SEQUENCES = frozenset((dict, list, tuple, type({}.keys())))
"""Types that can be read without running code of their own, and that come to an end."""


class Selections:
    """The known selections: mostly the same selection for the same envs.

    Args:
        table: says which host serves which env.

    Attributes:
        moves: what `EnvTable.moves` was when a selection was last asked for: if it is more by now,
            selections that were given before may not be used any more.
        in_c: makes what takes ordinary steps of a selection in C; None where nothing does.
    """

    def __init__(self, table: EnvTable) -> None:
        self._table = table
        self._known: dict[tuple[int, ...], Selection] = {}
        self._latest: Selection | None = None
        self._latest_array: Any = None
        self.moves = 0
        self._block: Block | None = None
        self.in_c: Callable[[Selection], Any] | None = None

    def share(self, block: Block | None) -> None:
        """Have steps of selections posted in this block from now on; None: not any more."""
        self._block, self.in_c = block, None
        self._forget()

    def steps_of(self, env_id: int) -> int:
        """Return how many steps an env has been asked for."""
        self._count_steps()
        return int(self._table.steps[env_id])

    def _count_steps(self) -> None:
        """Add the steps that were posted for envs together to the steps of each."""
        steps = self._table.steps
        for selection in self._known.values():
            if selection.n_posts:
                n_posts, selection.n_posts = selection.n_posts, 0
                steps[selection.rows] += n_posts

    def _forget(self) -> None:
        self._count_steps()
        for selection in self._known.values():
            selection.window = selection.in_c = None
            selection.arenas.clear()
            selection.ordinary.clear()
            selection.recipes.clear()
        self._known.clear()
        self._latest = self._latest_array = None

    def of(self, env_ids: Any) -> Selection | None:
        """Return envs as a selection.

        Args:
            env_ids: a sequence or an array of env_ids.

        Returns:
            The selection; None if there are no envs, or these are not all different env_ids.
        """
        if self.moves != self._table.moves:
            self._forget()
            self.moves = self._table.moves  # last: what an interrupt has left is forgotten anew
        if env_ids is self._latest_array:
            return self._latest
        kind = type(env_ids)
        if kind is np.ndarray and env_ids.ndim == 1 and env_ids.dtype.kind in "iu":
            key = tuple(env_ids.tolist())
        elif kind in _PLAIN_SEQUENCES or (kind is range and self._spans(env_ids)):
            key = tuple(env_ids)
        else:
            return None
        if kind is not np.ndarray and set(map(type, key)) != {int}:
            return None  # asked first: True and 1.0 are found as 1 is
        selection = self._known.get(key)
        if selection is None:
            selection = self._made(key)
        if selection is not None:
            self._latest, self._latest_array = selection, selection.array
        return selection

    def to_read(self, env_ids: list[int]) -> Selection | RowsToRead:
        """Return envs whose observations are read, and which need not be stepped together.

        Args:
            env_ids: at least one, and all of them different.
        """
        # Not `of`: the selection that it makes takes longer, and would be kept in place of one that
        # is used again.
        return self._known.get(tuple(env_ids)) or RowsToRead(env_ids)

    def _made(self, key: tuple[int, ...]) -> Selection | None:
        try:
            selection = Selection(list(key))
        except (IndexError, OverflowError):  # there are none, or what is no number of an env
            return None
        ascends = selection.is_ascending
        least, most = (key[0], key[-1]) if ascends else (min(key), max(key))
        if least < 0 or most >= self._table.env_num or not (ascends or len(set(key)) == len(key)):
            return None
        selection.hosts = list(dict.fromkeys(map(self._table.index_of.__getitem__, key)))
        if len(self._known) >= _KNOWN_SELECTIONS:
            self._count_steps()
            for known in self._known.values():
                known.recipes.clear()  # which know their selection: let go of it now, not later
                known.in_c = None  # nobody counts what is posted for it, or has it know of moves
            self._known.clear()
        if selection.is_slice and self._block is not None:
            selection.window = Window(self._block, selection.rows, self._table.tokens)
            if self.in_c is not None:
                selection.in_c = self.in_c(selection)
        self._known[key] = selection
        return selection

    def _spans(self, env_ids: range) -> bool:
        """Return whether a range lies within the env_ids; others may be too long to be read."""
        n = self._table.env_num
        return 0 <= env_ids.start <= n and -1 <= env_ids.stop <= n
