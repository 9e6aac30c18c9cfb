"""The one record of all envs: a row of columns for each, and what is out of the ordinary beside it.

What happens in every step is in columns, so that a batch of steps costs a few operations: states,
phases, tokens, moments, observations. All else that is known of an env is in its `EnvSlot`, which
reads and writes the columns for what is there. Nothing is known in two places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envmgr.core.facts import Item, Kept, Member, Passing
from envmgr.core.observed import Observed
from envmgr.core.phases import COMING, ENDS, Next, Phase, PhaseTable
from envmgr.core.pools import Pools
from envmgr.core.together import Together
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, StateTable
from envmgr.types import EnvTimestep
from envmgr.wire.block import items, request_of, token_of

if TYPE_CHECKING:  # a group has envs, and each of them knows its group
    from envmgr.core.groups import HostGroup

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
