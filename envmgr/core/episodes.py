"""How episodes begin and end, and how an env is given back a state that was saved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from envmgr.core.hosts import Hosts, await_reset, expect_late
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics
from envmgr.core.submit import Submitter
from envmgr.core.table import NEVER, EnvSlot, EpisodeRules, HostGroup, Record
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, Event
from envmgr.seeding import derived_seed
from envmgr.types import EnvTimestep, Once, is_abnormal
from envmgr.wire.block import AFTER_BITS, AFTER_SHIFT
from envmgr.wire.messages import AfterStep, EpisodePlan, Op, ResetOrder, SavedEnv


@dataclass(frozen=True)
class EnvRecord:
    """What the manager knows of an env at rest, besides what its host knows.

    Attributes:
        state: as its user sees it.
        obs: what `ready_obs` shows, or would show.
        timestep: one that is not delivered yet; None if there is none.
        doomed: as in `EnvSlot`; so are all the others.
    """

    state: EnvState
    obs: Any
    timestep: EnvTimestep | None
    doomed: EnvFailure | None
    fresh: tuple[Any, dict[str, Any]] | None
    generation: int
    reset_info: dict[str, Any]
    reset_params: dict[str, Any]
    base_seed: int | None
    new_seed: int | None
    new_generation: bool
    attended: bool
    waits: bool
    episode: int
    episodes_done: int


def record_of(slot: EnvSlot) -> EnvRecord:
    """Return what is known of an env at rest."""
    return EnvRecord(
        state=slot.record.states[slot.env_id],
        obs=slot.obs,
        timestep=slot.timestep,
        doomed=slot.doomed,
        fresh=slot.fresh,
        generation=slot.generation,
        reset_info=slot.reset_info,
        reset_params=slot.reset_params,
        base_seed=slot.base_seed,
        new_seed=slot.new_seed,
        new_generation=slot.new_generation,
        attended=slot.attended,
        waits=slot.waits,
        episode=slot.episode,
        episodes_done=slot.episodes_done,
    )


class Restoration(NamedTuple):
    """What an env is to be at its next reset.

    Attributes:
        saved: for its host.
        record: for its manager; None for an env that is resumed, which begins an episode.
    """

    saved: SavedEnv
    record: EnvRecord | None = None


class Restorations:
    """Who is to be restored, and what envs may be resumed from.

    Attributes:
        due: by env_id; until the reset has succeeded, in whatever host.
        saved: the last state that each env had saved, by env_id.
    """

    def __init__(self) -> None:
        self.due: dict[int, Restoration] = {}
        self.saved: dict[int, SavedEnv] = {}

    def saved_for(self, slot: EnvSlot) -> SavedEnv | None:
        """Return what an env is to be when its reset, which now begins, is over."""
        restoration = self.due.get(slot.env_id)
        return None if restoration is None else restoration.saved

    def resume(self, slot: EnvSlot) -> None:
        """The host of an env is lost: the next one goes on where its episode was saved last.

        From one state an env is resumed once: it may be the state that its host dies of.
        """
        saved = self.saved.pop(slot.env_id, None)
        in_episode = slot.record.states[slot.env_id] is EnvState.RUN
        if saved is not None and in_episode and saved.episode == slot.episode:
            self.due[slot.env_id] = Restoration(saved)

    def failed(self, slot: EnvSlot, *, is_lost: bool) -> None:
        """An env has failed, and it or its host is lost, or not."""
        due = self.due.get(slot.env_id)
        if due is not None and due.record is None and slot.phase is Phase.RESETTING:
            del self.due[slot.env_id]  # it cannot be resumed from that: it is reset
        elif is_lost:
            self.resume(slot)

    def forget(self, env_id: int) -> bool:
        """An env is to be reset after all; return whether it was to be restored."""
        self.saved.pop(env_id, None)
        return self.due.pop(env_id, None) is not None


def hurry_to_rest(hosts: Hosts) -> None:
    """Have what is under way end without anybody who gathers it: `is_at_rest` tells when it has."""
    for env_id in hosts.phases.ids_in(Phase.POSTED):
        hosts.take_over(hosts.slots[env_id])


def is_at_rest(record: Record) -> bool:
    """Whether nothing is under way in any host, and no action waits for its abnormal timestep."""
    idle = record.phases.column.count(Phase.IDLE)
    return idle == len(record.slots) and not record.unexecuted


_RESETS = (AfterStep.RESETS, AfterStep.RESETS_LATE)
_SOON, _LATE = (after << AFTER_SHIFT for after in _RESETS)


class Ending(NamedTuple):
    """An episode that ended with a timestep that is handed out.

    Attributes:
        env_id: the env.
        flag: of the reply.
        episodes_done: how many episodes the env has ended with it.
    """

    env_id: int
    flag: int
    episodes_done: int


class Episodes:
    """Begins resets, with their seeds and plans, and ends episodes.

    Args:
        hosts: to send requests.
        rules: of episodes.
        statistics: where episodes are counted.
        spares: what takes the place of envs whose episodes end; None if there is nothing.

    Attributes:
        restorations: who is not reset, but restored.
    """

    def __init__(
        self,
        hosts: Hosts,
        rules: EpisodeRules,
        statistics: Statistics,
        spares: Spares | None = None,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._rules = rules
        self._statistics = statistics
        self._spares = spares
        self.restorations = Restorations()
        # With spares, which env is reset is decided here.
        self._hosts_begin = rules.auto_reset and spares is None

    def begin(self, slot: EnvSlot) -> None:
        """Send the reset of an idle env."""
        slot.again = slot.waits = False  # whatever was new goes with this one
        if slot.doomed is None:
            self._record.happened(slot.env_id, Event.BEGIN_RESET)
        seed = slot.seed
        if seed is None and slot.new_generation and slot.base_seed is not None:
            seed = derived_seed(slot.base_seed, slot.env_id, slot.generation, slot.episode)
        rules = self._rules
        order = ResetOrder(
            slot.reset_params,
            seed,
            rules.dynamic_seed,
            self._plan(slot),
            slot.is_spare,
            self.restorations.saved_for(slot),
            slot.episode + 1,
        )
        self._hosts.request(slot, Op.RESET, order, Change.RESET)
        slot.has_plan = not slot.is_spare
        if self._spares is not None:
            self._spares.is_reset(slot)

    def _plan(self, slot: EnvSlot) -> EpisodePlan:
        left = self._rules.episode_num - slot.episodes_done - 1
        # A reset that has a limit of its own, or none where steps have one, is no part of a step.
        inplace = self._rules.reset_inplace and not self._hosts.limits.limit_episodes
        params = {} if isinstance(slot.reset_params, Once) else slot.reset_params
        return EpisodePlan(self._hosts_begin, left, params, inplace)

    def end(self, slot: EnvSlot, after: int) -> None:
        """An episode ended with the step that has just been reported.

        Args:
            slot: the env.
            after: what its host does now by itself: an `AfterStep`.
        """
        slot.episodes_done += 1
        self._statistics.episodes += 1
        if slot.episodes_done >= self._rules.episode_num:
            self._record.happened(slot.env_id, Event.BUDGET_SPENT)
            self._hosts.settle(slot)
            self.replace_worn_host(slot.group)
            return
        if self._rules.auto_reset:
            self._record.happened(slot.env_id, Event.EPISODE_ENDED)
            slot.held = self._rules.reset_inplace and after != AfterStep.RESETS_LATE
        else:
            self._record.happened(slot.env_id, Event.EPISODE_ENDED_UNATTENDED)
        slot.attended = self._rules.auto_reset
        if after in _RESETS and self._hosts_begin:  # else nobody told it to
            await_reset(self._hosts, slot, late=after == AfterStep.RESETS_LATE)
        elif self._spares is not None and self._rules.auto_reset:
            worn = after == AfterStep.WANTS_RECYCLING
            self._spares.ended(slot, self._await_new_host if worn else self.begin)
        elif after == AfterStep.WANTS_RECYCLING:
            self._await_new_host(slot)
        elif self._rules.auto_reset:
            self.begin(slot)
        else:
            self._hosts.settle(slot)
            self.replace_worn_host(slot.group)

    def end_plainly(self, endings: Sequence[Ending]) -> Sequence[Ending]:
        """Episodes ended and hosts reset the envs: note that; return those with more to it.

        The short form of `end`, for envs about which there is nothing else to know. Here, and in
        `begun`, what is noted may have been noted already, before an interrupt.
        """
        if not self._hosts_begin:
            return endings
        plain, odd, episode_num = [], [], self._rules.episode_num
        for ending in endings:
            env_id, flag, episodes_done = ending
            after = flag & AFTER_BITS
            if (after != _SOON and after != _LATE) or episodes_done >= episode_num:
                odd.append(ending)
                continue
            plain.append((env_id, episodes_done, after == _LATE))
        self._record.episodes_ended(plain)
        return odd

    def begun(self, slot: EnvSlot, info: dict[str, Any]) -> None:
        """The reset of an env has succeeded, and its observation is there."""
        record = self._hosts.record
        slot.reset_info = info
        slot.deadline = NEVER
        record.held.discard(slot.env_id)
        record.late[slot.env_id] = 0
        if self._states.column[slot.env_id] != EnvState.RUN:
            self._record.happened(slot.env_id, Event.RESET_SUCCEEDED)

    def begun_plainly(self, env_ids: Iterable[int]) -> None:
        """The resets of envs, about which there is nothing else to know, have succeeded."""
        hosts = self._hosts
        if hosts.limits.of_phase(Phase.RESETTING) is not None:
            for env_id in env_ids:
                hosts.slots[env_id].deadline = NEVER

    def count_reset(self, slot: EnvSlot) -> None:
        """The reset of an env has succeeded, whatever comes of it."""
        slot.attempts = slot.renewals_in_a_row = 0
        slot.episode = slot.next_episode

    def use_up_seed(self, slot: EnvSlot) -> None:
        """The seed of the reset that has succeeded is not that of the next one, nor are `Once`."""
        self._record.next_resets.pop(slot.env_id, None)
        self._record.use_up_params((slot.env_id,))

    def restored(self, slot: EnvSlot, record: EnvRecord) -> None:
        """An env has its state again, and is in an episode: all else becomes as it was."""
        slot.new_seed, slot.new_generation = record.new_seed, record.new_generation
        slot.attended = record.attended
        timestep, statistics = record.timestep, self._statistics
        if timestep is not None:
            slot.timestep = timestep if timestep.done else timestep._replace(obs=slot.obs)
            statistics.actions += 1
            if is_abnormal(timestep.info):
                statistics.abnormal += 1
            elif timestep.done:
                statistics.episodes += 1
        if record.state is EnvState.DONE:
            self._record.happened(slot.env_id, Event.BUDGET_SPENT)
        elif record.state is EnvState.NEED_RESET:
            self._record.happened(slot.env_id, Event.EPISODE_ENDED_UNATTENDED)
        elif record.waits:
            self._record.happened(slot.env_id, Event.EPISODE_ENDED)
            slot.waits = slot.group.is_worn = True
        else:
            slot.doomed, slot.fresh = record.doomed, record.fresh
        self.replace_worn_host(slot.group)

    def abandon(self, slot: EnvSlot, after: int) -> None:
        """A step is over that nobody wants any more, because the env is to be reset."""
        if after in _RESETS:  # the host has begun one by itself
            await_reset(self._hosts, slot, late=after == AfterStep.RESETS_LATE)
            return
        self._hosts.settle(slot)
        if after == AfterStep.WANTS_RECYCLING:
            slot.group.is_worn = True
            self.replace_worn_host(slot.group)
        if not slot.group.is_ending:  # its user waits for this reset: it cannot wait for others
            self.begin(slot)

    def _await_new_host(self, slot: EnvSlot) -> None:
        """Have the next episode of an env wait for the replacement of its host."""
        slot.group.is_worn = True
        slot.waits = True
        self._hosts.settle(slot)
        self.replace_worn_host(slot.group)
        if slot.waits:
            slot.held = False  # its neighbours' steps come first, and need a caller who has this

    def replace_worn_host(self, group: HostGroup) -> None:
        """Replace a host that wants it, if none of its envs is in an episode or busy."""
        if not group.is_worn or group.is_ending:
            return
        present, states = group.present(), self._states
        if any(s.phase is not Phase.IDLE or states[s.env_id] is EnvState.RUN for s in present):
            return
        self._statistics.recycled += 1
        for slot in present:
            slot.attended = slot.attended and states[slot.env_id] is not EnvState.DONE
            self._hosts.leave(slot, Next.RENEW_HOST)
        self._hosts.end(group, ask=True)


class Repairs(Protocol):
    """What brings envs back that have failed for good."""

    def forgive(self, slot: EnvSlot) -> None:
        """Forget an env's failures: its user repairs it by hand."""

    def bring_back(self, slot: EnvSlot) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""


class ExplicitResets:
    """Begins the resets that users ask for.

    Args:
        hosts: to send requests.
        statistics: where cancelled steps are counted.
        episodes: begins them.
        repair: brings envs back that have failed for good.
        submitter: orders resets in the block.
        spares: which may have been given seeds; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        repair: Repairs,
        submitter: Submitter,
        spares: Spares | None,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._episodes = episodes
        self._repair = repair
        self._spares = spares
        self._submitter = submitter

    @property
    def _can_be_ordered(self) -> bool:
        """Whether resets that hosts know of are ordered in the block, which is enough."""
        # In line a message costs no more, and can be interrupted safely.
        alone = self._hosts.transport.works_alone and self._spares is None
        return alone and self._submitter.posts

    def seed(self, seeds: Mapping[int, int | None], of_spares: Sequence[int | None]) -> None:
        """Have the next explicit resets, and those of spares, use these seeds."""
        for env_id, seed in seeds.items():
            self._record.slots[env_id].new_seed = seed
        for spare, seed in zip(self._record.slots[self._record.env_num :], of_spares, strict=True):
            spare.new_seed = seed

    def begin(self, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Reset envs, and the spares that were given a seed since their last reset.

        Args:
            params: keyword arguments of this and of later automatic resets, by env_id; None keeps
                those that were given before.
        """
        # Where all rows of a batched env are reset together, those are, too, that wait for a step.
        expect_late(self._hosts, [i for i in params if not self._record.slots[i].resets_alone])
        ordered = [i for i, given in params.items() if self._begin(self._record.slots[i], given)]
        if ordered:
            self._submitter.order_resets(ordered)
        if self._spares is not None:
            self._spares.reseed(self._episodes.begin)

    def restore(self, restorations: Mapping[int, tuple[SavedEnv, EnvRecord]]) -> None:
        """Have envs that are at rest be what they were."""
        self._statistics.has_generations = True
        for env_id, (saved, record) in restorations.items():
            slot = self._record.slots[env_id]
            self._cancel(slot)
            self._revive(slot)
            slot.generation, slot.episodes_done = record.generation, record.episodes_done
            slot.episode = record.episode - 1  # this counts as the reset that it has been in
            slot.reset_params, slot.base_seed = record.reset_params, record.base_seed
            slot.attended = True
            slot.seed, slot.new_generation, slot.waits = None, False, False
            due = self._episodes.restorations
            due.forget(env_id)
            due.due[env_id] = Restoration(saved, record)
            self._episodes.begin(slot)

    def _begin(self, slot: EnvSlot, params: dict[str, Any] | None) -> bool:
        """Begin the reset of one env; whether it is only to be ordered."""
        self._hosts.take_over(slot)
        restoring = self._episodes.restorations.forget(slot.env_id)
        joins = params is None and slot.new_seed is None and not restoring
        if params is not None:
            slot.reset_params = copy.copy(params)  # as what it is
        if slot.new_seed is not None:
            slot.seed = slot.base_seed = slot.new_seed
            slot.new_seed = None
        self._cancel(slot)
        self._revive(slot)
        slot.attended = True
        slot.waits = False
        self._record.happened(slot.env_id, Event.BEGIN_RESET)
        if slot.phase is Phase.IDLE:
            if slot.host_id is None:
                self._repair.forgive(slot)
                self._repair.bring_back(slot)
            elif joins and self._can_be_ordered and self._is_planned(slot):
                slot.again = False
                return True
            else:
                self._episodes.begin(slot)
        elif slot.phase is Phase.ENDING and slot.following is Next.NOTHING:
            self._repair.forgive(slot)
            slot.following = Next.RENEW_HOST
        elif slot.phase in (Phase.RESETTING, Phase.CANCELLING):
            slot.again = slot.again or not joins
        return False

    def _cancel(self, slot: EnvSlot) -> None:
        """Give up the timestep that is owed, if there is one."""
        if not slot.owed:
            return
        slot.held = False
        self._statistics.cancelled += 1
        timestep = self._record.undelivered.pop(slot.env_id, None)
        if timestep is None:
            self._hosts.cancel(slot)
        elif timestep.done and not is_abnormal(timestep.info):  # nobody saw that episode's end
            slot.episodes_done -= 1
            slot.has_plan = False
            self._statistics.episodes -= 1

    def _revive(self, slot: EnvSlot) -> None:
        """Take back what was decided about an env that its user now resets."""
        slot.doomed = None
        slot.fresh = None
        slot.dropped = False
        if self._states[slot.env_id] is EnvState.DONE:
            slot.episodes_done = 0
            slot.has_plan = False

    def _is_planned(self, slot: EnvSlot) -> bool:
        """Whether the host of an env knows all that there is to know of its next reset."""
        if slot.env_id in self._record.unposted:
            return False
        return slot.has_plan and slot.seed is None and not slot.new_generation
