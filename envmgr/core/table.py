"""The table of envs: every fact about an env that outlives a call."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from envmgr.core.observations import Observed
from envmgr.core.phases import AWAITED, COMING, ENDS, Next, Phase, PhaseTable
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, StateTable
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import CopyOnGet
from envmgr.wire.block import items, request_of, token_of

T = TypeVar("T")


@dataclass
class EpisodeRules:
    """Rules of episodes.

    Attributes:
        episode_num: episodes per env before DONE; may be inf.
        auto_reset: an ended env is reset at once.
        reset_inplace: the timestep that ends an episode waits for that reset.
        copy_on_get: whether observations are copied out of shared memory, as in the config.
        check_actions: as in the config.
        raise_non_finite: NaN or infinite values end the manager rather than the episode.
        dynamic_seed: as in `BaseEnv.seed`; goes with each explicit seed.
        spare_takers: whether an env is built as spares are, by env_id; empty: all are.
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


class Item:
    """A number that the record has for every env.

    Args:
        column: the list of them.
    """

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, slot: EnvSlot, kind: Any = None) -> int:
        number: int = getattr(slot.record, self._column)[slot.env_id]
        return number

    def __set__(self, slot: EnvSlot, number: int) -> None:
        getattr(slot.record, self._column)[slot.env_id] = number


class Member:
    """What is true of few envs.

    Args:
        members: the set of them.
    """

    def __init__(self, members: str) -> None:
        self._members = members

    def __get__(self, slot: EnvSlot, kind: Any = None) -> bool:
        return slot.env_id in getattr(slot.record, self._members)

    def __set__(self, slot: EnvSlot, is_true: bool) -> None:
        members: set[int] = getattr(slot.record, self._members)
        if is_true:
            members.add(slot.env_id)
        else:
            members.discard(slot.env_id)


class Kept(Generic[T]):
    """What there is of few envs.

    Args:
        kept: where it is, by env_id.
        nothing: returns what stands for nothing, and is not kept.
    """

    def __init__(self, kept: str, nothing: Callable[[], T]) -> None:
        self._kept = kept
        self._nothing = nothing

    def __get__(self, slot: EnvSlot, kind: Any = None) -> T:
        found: T | None = getattr(slot.record, self._kept).get(slot.env_id)
        return self._nothing() if found is None else found

    def __set__(self, slot: EnvSlot, value: T) -> None:
        kept: dict[int, T] = getattr(slot.record, self._kept)
        if value:
            kept[slot.env_id] = value
        else:
            kept.pop(slot.env_id, None)


class Passing(Generic[T]):
    """What holds for few envs, and no longer than until their next reset has succeeded.

    Args:
        otherwise: what holds for the others.
    """

    def __init__(self, otherwise: T) -> None:
        self._otherwise = otherwise
        self._name = ""

    def __set_name__(self, kind: Any, name: str) -> None:
        self._name = name

    def __get__(self, slot: EnvSlot, kind: Any = None) -> T:
        facts = slot.record.passing.get(slot.env_id)
        found: T = self._otherwise if facts is None else facts.get(self._name, self._otherwise)
        return found

    def __set__(self, slot: EnvSlot, value: T) -> None:
        passing = slot.record.passing
        if value != self._otherwise:
            passing.setdefault(slot.env_id, {})[self._name] = value
        elif slot.env_id in passing:
            passing[slot.env_id].pop(self._name, None)


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


NEVER = math.inf
_STEPS = bytes((Phase.POSTED, Phase.STEPPING))


class Record:
    """What is known of all envs, and of the spares, whose ids follow.

    Args:
        env_num: number of envs.
        spare_num: number of spares.

    Attributes:
        env_num: number of envs.
        states: of each env, as its user sees it.
        phases: what each host is busy with.
        tokens: of the request whose reply is awaited, or that was answered last.
        token_items: the same, for reading and writing one by one.
        since: when a request was sent, where that has a time limit.
        steps: that each env was asked for, without those that `Selections` still has to add. An
            interrupt may have one of them counted twice.
        step_items: the same, for reading and writing one by one.
        observed: the newest observations.
        undelivered: timesteps that are out of the ordinary, by env_id, until they are handed out.
        held: those of them that wait for the reset that belongs to them (`reset_inplace`).
        doomed: envs whose host died while they were ready, and with what failure.
        unexecuted: those of them that were sent that action, and whose timestep is still to come.
        retired: envs whose rows and places are left to a host that could not be killed.
        unposted: those, and envs whose data has no fixed layout: their steps are not posted.
        late: 1 for rows of batched envs whose next episodes begin with the next step of others.
        again: envs that are to be reset once more when the reset under way is over.
        episodes: of each env, resets that have succeeded.
        next_episodes: what that is when the reset that was begun last has succeeded.
        episodes_done: of each env, episodes that were counted against `episode_num`.
        passing: what holds for few envs until their next reset has succeeded, by env_id.
        reset_params: keyword arguments of resets, of envs that have any.
        reset_infos: of the newest resets, as far as they said anything.
        together: says which envs are ready only together; None if none are.
        pools: says which envs give nothing before others are under way; None if none do.
        slots: all else, by env_id.
        launching: the first resets are not over.
        all_ids: of all envs, ascending; without spares.
    """

    def __init__(self, env_num: int, spare_num: int = 0) -> None:
        count = env_num + spare_num
        self.env_num = env_num
        self.states = StateTable(env_num, spare_num)
        self.phases = PhaseTable(count)
        self.tokens: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        self.token_items = items(self.tokens)
        self.since: npt.NDArray[np.float64] = np.full(count, NEVER)
        self.steps: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.step_items = items(self.steps)
        self.observed = Observed(count)
        self.undelivered: dict[int, EnvTimestep] = {}
        self.held: set[int] = set()
        self.doomed: dict[int, EnvFailure] = {}
        self.unexecuted: set[int] = set()
        self.launching = True
        self.retired: set[int] = set()
        self.unposted: set[int] = set()
        self.late = bytearray(count)
        self.again: set[int] = set()
        self.episodes, self.next_episodes, self.episodes_done = ([0] * count for _ in range(3))
        self.passing: dict[int, dict[str, Any]] = {}
        self.reset_params: dict[int, dict[str, Any]] = {}
        self.reset_infos: dict[int, dict[str, Any]] = {}
        self.together: Together | None = None
        self.pools: Pools | None = None
        self.slots = [EnvSlot(i, self, is_spare=i >= env_num) for i in range(count)]
        self.all_ids = range(env_num)
        self._all_idle, self._all_run = (bytes([i]) * env_num for i in (Phase.IDLE, EnvState.RUN))
        self._seen = self.phases.view[:env_num], self.tokens[:env_num]
        self._found = np.empty(env_num, np.bool_), np.empty(env_num, np.bool_)

    def answered(self, column: npt.NDArray[np.uint64], phase: np.uint8) -> npt.NDArray[np.bool_]:
        """Return which envs are in a phase and have answered the request that it is about.

        Args:
            column: the tokens of what was answered: (env_num,).
            phase: which.

        Returns:
            (env_num,) bool; good until this is asked again.
        """
        (phases, tokens), (found, also) = self._seen, self._found
        np.equal(phases, phase, out=also)
        return np.logical_and(np.equal(column, tokens, out=found), also, out=found)

    # -- who is ready, and who owes a timestep ------------------------------------------------

    @property
    def are_all_ready(self) -> bool:
        """Whether every env takes an action now, and nothing is awaited of any."""
        n = self.env_num
        return (
            not self.undelivered
            and not self.doomed
            and self.phases.column[:n] == self._all_idle
            and self.states.column[:n] == self._all_run
        )

    @property
    def awaits_nothing(self) -> bool:
        """Whether all envs are ready but for those that begin with the next step of others."""
        n_ready = len(self.late) - self.late.count(1)
        idle, in_run = self.phases.column.count(Phase.IDLE), self.states.column.count(EnvState.RUN)
        return idle == in_run == n_ready and not (self.undelivered or self.doomed)

    def is_ready(self, env_id: int) -> bool:
        """Return whether an env takes an action now."""
        if self.states.column[env_id] != EnvState.RUN or self.owes(env_id):
            return False
        return self.together is None or self.together.is_settled(env_id)

    def is_coming(self, env_id: int) -> bool:
        """Return whether an env that is not ready will be without anybody doing anything."""
        together, pools = self.together, self.pools
        if pools is not None and not pools.gives(env_id):
            return False
        return self.slots[env_id].is_coming if together is None else together.is_coming(env_id)

    def owes(self, env_id: int) -> bool:
        """Return whether an env owes a timestep: an action was accepted, and it is undelivered."""
        has_sent = self.phases.column[env_id] in _STEPS
        return has_sent or env_id in self.undelivered or env_id in self.unexecuted

    def owed_ids(self) -> list[int]:
        """Return the envs that owe a timestep, ascending."""
        return [env_id for env_id in range(self.env_num) if self.owes(env_id)]

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        if self.are_all_ready:
            return list(self.all_ids)
        ready = self.phases.owing_none_in(self.states.view == np.uint8(EnvState.RUN))
        if self.undelivered or self.unexecuted:
            ready = [i for i in ready if not self.owes(i)]
        return ready if self.together is None else self.together.settled(ready)

    @property
    def is_executing(self) -> bool:
        """Whether a step is under way, or its reply is still to be taken out of the block."""
        column = self.phases.column
        return Phase.POSTED in column or Phase.STEPPING in column or bool(self.unexecuted)

    def retire(self, env_id: int) -> None:
        """Use the row and the places of an env no more."""
        self.retired.add(env_id)
        self.unposted.add(env_id)
        self.observed.retire(env_id)

    def clear(self) -> None:
        """Let go of all observations and timesteps: they may be views of shared memory."""
        self.undelivered.clear()
        self.held.clear()
        self.doomed.clear()
        self.unexecuted.clear()
        self.observed.detach()
        for slot in self.slots:
            slot.fresh = None


def names_of(slots: Sequence[EnvSlot]) -> str:
    """Return what envs are called in messages; of many only the first ones, and how many more."""
    if len(slots) == 1 or any(slot.is_spare for slot in slots):
        return ", ".join(slot.name for slot in slots)
    more = f" and {len(slots) - _NAMED} more" if len(slots) > _NAMED else ""
    return f"envs {', '.join(str(slot.env_id) for slot in slots[:_NAMED])}{more}"


_NAMED = 16


@dataclass(slots=True, eq=False)
class EnvSlot:
    """One env_id: its host, what is under way, and what its user has and is owed.

    Attributes:
        env_id: the id.
        record: the columns.
        is_spare: the id is that of a spare, which nobody sees: see `spares.Spares`.
        batch: the batched env that it is a row of; None for an env of its own.
        group: the envs that share its host.
        generation: how often the env behind the id was renewed.
        host_id: its host; None if it has none, or takes no part in the one of its group.
        order: place of what the host does by itself in the order of requests.
        deadline: when what it does times out, or a pause ends. Requests to a shared host have none
            of their own (see `HostGroup.deadline`), nor have posted steps.
        limit_s: the time limit that was set last.
        following: what follows a pause or the end of a host.
        pause_s: how long to pause before that.
        reset_info: info of the newest reset.
        reset_params: keyword arguments of its resets.
        base_seed: the seed it was given last, from which those of later generations are derived.
        new_seed: given by `seed` and not used yet; the next explicit reset takes it.
        seed: for the reset under way, exactly.
        new_generation: the next reset is the first of a later generation, seeded accordingly.
        has_plan: its host knows what resets it is to begin with, by itself or when one is ordered.
        attended: an episode is to begin when its repair is over; else it goes to NEED_RESET.
        waits: its episode has ended, and the next one begins when its host has been replaced.
        again: when the running reset is over, reset once more (new parameters or seed).
        attempts: failed attempts at the present reset.
        renewals_in_a_row: renewals since the last reset that succeeded.
        episode: resets that have succeeded.
        next_episode: what that is when the reset that was begun last has succeeded.
        episodes_done: episodes counted against `episode_num`.
        fresh: of a doomed env: what it shows after the timestep that it gets for its next action.
        resets_alone: it can be reset while other rows of its batched env are in an episode.
        dropped: its failure budget is spent and it takes no more part.
        result: what came of a call: `protocol.Message.payload`, or the failure.
    """

    env_id: int
    record: Record = field(repr=False)
    is_spare: bool = False
    batch: Batch | None = None
    group: HostGroup = field(init=False, repr=False)
    generation: int = 0
    host_id: int | None = None
    order: int = 0
    deadline: float = NEVER
    limit_s: float = NEVER
    following: Next = Next.NOTHING
    pause_s: float = 0.0
    base_seed: int | None = None
    new_seed: int | None = None
    has_plan: bool = False
    attended: bool = True
    waits: bool = False
    fresh: tuple[Any, dict[str, Any]] | None = None
    dropped: bool = False
    resets_alone: bool = True
    result: Any = None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{'spare ' if self.is_spare else ''}env {self.env_id}"

    @property
    def is_callable(self) -> bool:
        """Whether its host can take a call now."""
        return self.phase is Phase.IDLE and self.host_id is not None

    @property
    def is_gone(self) -> bool:
        """Whether its host was given up, so that there is nothing to wait for."""
        phase = self.phase
        if phase is Phase.ENDING:
            return self.following is Next.NOTHING
        return phase is Phase.IDLE and self.host_id is None

    @property
    def is_coming(self) -> bool:
        """Whether it will be in an episode without anybody doing anything."""
        return self.attended and self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether it is being reset or repaired, and not given up."""
        phase = self.phase
        return phase in COMING and not (phase in ENDS and self.following is Next.NOTHING)

    # -- what is in the columns ---------------------------------------------------------------

    attempts = Passing(0)
    renewals_in_a_row = Passing(0)
    seed = Passing[int | None](None)
    new_generation = Passing(False)
    again = Member("again")
    held = Member("held")
    doomed = Kept[EnvFailure | None]("doomed", lambda: None)
    reset_info = Kept[dict[str, Any]]("reset_infos", dict)
    reset_params = Kept[dict[str, Any]]("reset_params", dict)
    episode = Item("episodes")
    next_episode = Item("next_episodes")
    episodes_done = Item("episodes_done")

    @property
    def phase(self) -> Phase:
        """What its host is busy with."""
        return self.record.phases[self.env_id]

    @property
    def token(self) -> int:
        """Of the request whose reply is awaited, or that was answered last."""
        token: int = self.record.token_items[self.env_id]
        return token

    @property
    def request_id(self) -> int:
        """The request whose reply is awaited, or that was answered last."""
        return request_of(self.record.token_items[self.env_id])[1]

    @request_id.setter
    def request_id(self, request_id: int) -> None:
        self.record.token_items[self.env_id] = token_of(self.generation, request_id)

    @property
    def since(self) -> float:
        """When the request was sent, if it has a limit and the host is shared."""
        return float(self.record.since[self.env_id])

    @since.setter
    def since(self, moment: float) -> None:
        self.record.since[self.env_id] = moment

    @property
    def owed(self) -> bool:
        """Whether an action was accepted and its timestep not yet delivered."""
        return self.record.owes(self.env_id)

    @property
    def timestep(self) -> EnvTimestep | None:
        """That timestep, if it has arrived otherwise than in the block."""
        return self.record.undelivered.get(self.env_id)

    @timestep.setter
    def timestep(self, timestep: EnvTimestep) -> None:
        self.record.undelivered[self.env_id] = timestep

    @property
    def obs(self) -> Any:
        """The newest observation: what `ready_obs` shows in RUN."""
        return self.record.observed.of((self.env_id,))[0]

    @obs.setter
    def obs(self, obs: Any) -> None:
        self.record.observed.keep(self.env_id, obs)


@dataclass(slots=True, eq=False)
class HostGroup:
    """The envs that share a host, which may be replaced.

    Who belongs to it never changes, except where a spare takes the place of another env.

    Attributes:
        index: its place among the groups.
        slots: its envs, by ascending env_id.
        is_shared: there are several.
        by_id: the same envs, by env_id.
        host_id: the host; None while there is none.
        is_ending: the host was killed or asked to end.
        is_worn: the host wants to be replaced as soon as none of its envs is in an episode.
        running: of a shared host: the env that it has said it works for.
        deadline: of a shared host: when what it does now times out, or its silence does; a moment
            that is too early is allowed while nothing is running.
        quiet_since: of a shared host: when it was last known to be done with something.
        overdue: of a shared host: the order of the request that it should have begun with, as far
            as could be told, and what had been posted for it when that was first looked at.
        is_retired: what the block says of its host may be written by one that was given up.
        is_spare: it serves a spare.
        superseded: requests to its host under the id that it served before; what is still on its
            way in reply to them is nobody's.
    """

    index: int
    slots: tuple[EnvSlot, ...]
    is_shared: bool = field(init=False)
    by_id: dict[int, EnvSlot] = field(init=False)
    host_id: int | None = None
    is_ending: bool = False
    is_worn: bool = False
    running: EnvSlot | None = None
    deadline: float = NEVER
    quiet_since: float = 0.0
    overdue: tuple[int, float] = (0, 0.0)
    is_retired: bool = False
    is_spare: bool = field(init=False)
    superseded: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_shared = len(self.slots) > 1
        self.serve(self.slots)

    def serve(self, slots: tuple[EnvSlot, ...]) -> None:
        """Have these envs belong to it."""
        self.slots = slots
        self.is_spare = slots[0].is_spare
        self.by_id = {slot.env_id: slot for slot in slots}
        for slot in slots:
            slot.group = self

    def present(self) -> list[EnvSlot]:
        """Return the envs that take part in the host."""
        return [slot for slot in self.slots if slot.host_id is not None]

    def blamed(self) -> EnvSlot:
        """Return the env that was running when something happened to the host.

        Without a word of the host: the first in the order in which requests were sent; if it was
        idle, the first of its envs.
        """
        if self.running is not None:
            return self.running
        return next(iter((*self.awaited(), *self.present(), *self.slots)))

    def awaited(self) -> list[EnvSlot]:
        """Return the envs whose replies are awaited, in the order in which they run, if known.

        Requests run in the order in which they were sent; a reset that the host begins by itself
        runs after those that were sent before it was known of. Steps that are posted are not among
        them: the block says which of those is run. Nor are resets that wait for a step of others.
        """
        return sorted(
            (s for s in self.slots if s.phase in AWAITED and not s.record.late[s.env_id]),
            key=lambda slot: max(slot.request_id, slot.order),
        )


def host_groups(slots: Sequence[EnvSlot], n_hosts: int | None) -> list[HostGroup]:
    """Divide envs into contiguous groups whose sizes differ by one at most, larger ones first.

    The rows of a batched env stay together: they count as one.

    Args:
        slots: of the envs.
        n_hosts: how many groups; None: one for each.
    """
    units: list[list[EnvSlot]] = []
    for slot in slots:
        if slot.batch is None or slot.env_id == slot.batch.first:
            units.append([])
        units[-1].append(slot)
    n_hosts = n_hosts or len(units)
    size, n_larger = divmod(len(units), n_hosts)
    groups: list[HostGroup] = []
    first = 0
    for index in range(n_hosts):
        end = first + size + (index < n_larger)
        groups.append(HostGroup(index, tuple(itertools.chain(*units[first:end]))))
        first = end
    return groups
