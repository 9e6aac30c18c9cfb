"""How episodes begin (with which seed) and end, and how an env gets back a saved state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from envmgr.core.hosts import Hosts, await_own_reset, reset_in_step_of
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics
from envmgr.core.submit import Submitter
from envmgr.core.table import NEVER, EnvTable, EpisodeRules, HostGroup, ManagedEnv
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, Event
from envmgr.seeding import derived_seed
from envmgr.types import EnvTimestep, Once, is_abnormal
from envmgr.wire.block import AFTER_BITS, RESETS, RESETS_IN_NEXT_STEP
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EpisodePlan,
    Op,
    ResetRequest,
    SavedEnv,
)
from envmgr.worker.copies import copied_params


@dataclass(frozen=True)
class EnvRecord:
    """What the manager knows of an env at rest, besides what its host knows.

    Attributes:
        state: as its user sees it.
        obs: what `ready_obs` shows, or would show.
        timestep: a timestep that is not delivered yet; None if there is none.
        doomed: `failed_while_ready` of `ManagedEnv`, under its name in snapshot files; all the
            other fields have the same names as there.
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


def record_of(env: ManagedEnv) -> EnvRecord:
    """Return what is known of an env at rest."""
    return EnvRecord(
        state=env.table.states[env.env_id],
        obs=env.table.observed.shown_again(env.env_id),
        timestep=env.timestep,
        doomed=env.failed_while_ready,
        fresh=env.fresh,
        generation=env.generation,
        reset_info=env.reset_info,
        reset_params=env.reset_params,
        base_seed=env.base_seed,
        new_seed=env.new_seed,
        new_generation=env.new_generation,
        attended=env.attended,
        waits=env.waits,
        episode=env.episode,
        episodes_done=env.episodes_done,
    )


class Restoration(NamedTuple):
    """The state that an env is to have after its next reset.

    Attributes:
        saved: the part for its host.
        known: the part for its manager; None for an env that is resumed, which begins an episode.
    """

    saved: SavedEnv
    known: EnvRecord | None = None


class Restorations:
    """The envs that are to be restored, and the states that envs may be resumed from.

    Attributes:
        due: the restorations to come, by env_id; until the reset has succeeded, in whatever host.
        saved: the last state that each env had saved, by env_id.
        restored: the number of each env's latest episode that began with a saved state, by env_id.
    """

    def __init__(self) -> None:
        self.due: dict[int, Restoration] = {}
        self.saved: dict[int, SavedEnv] = {}
        self.restored: dict[int, int] = {}

    def saved_for(self, env: ManagedEnv) -> SavedEnv | None:
        """Return the state that an env's reset, which begins now, is to restore, if any."""
        restoration = self.due.get(env.env_id)
        return None if restoration is None else restoration.saved

    def resume(self, env: ManagedEnv) -> None:
        """Have an env whose host is lost go on in the next one where its episode was saved last.

        An env is resumed only once from the same state: it may be the state that its host dies of.
        """
        saved = self.saved.pop(env.env_id, None)
        in_episode = env.table.states[env.env_id] is EnvState.RUN
        if saved is not None and in_episode and saved.episode == env.episode:
            self.due[env.env_id] = Restoration(saved)

    def failed(self, env: ManagedEnv, *, is_lost: bool) -> None:
        """Note that an env has failed; `is_lost` says whether it or its host is lost."""
        due = self.due.get(env.env_id)
        if due is not None and due.known is None and env.phase is Phase.RESETTING:
            del self.due[env.env_id]  # it cannot be resumed from that: it is reset
        elif is_lost:
            self.resume(env)

    def succeeded(self, env: ManagedEnv) -> Restoration | None:
        """Note that an env's reset has succeeded and was counted; return what it restored."""
        restoration = self.due.pop(env.env_id, None)
        if restoration is not None:
            self.restored[env.env_id] = env.episode
        return restoration

    def forget(self, env_id: int) -> bool:
        """Have an env reset after all; return whether it was to be restored."""
        self.saved.pop(env_id, None)
        return self.due.pop(env_id, None) is not None


def hurry_to_rest(hosts: Hosts) -> None:
    """Have steps under way end though nobody gathers them; `is_at_rest` tells when they have."""
    for env_id in hosts.phases.ids_in(Phase.POSTED):
        hosts.look_after(hosts.envs[env_id])


def is_at_rest(table: EnvTable) -> bool:
    """Return whether no host is busy, and no action waits for its abnormal timestep."""
    idle = table.phases.column.count(Phase.IDLE)
    return idle == len(table.envs) and not table.unexecuted


_RESETS = (AfterStep.RESETS, AfterStep.RESETS_IN_NEXT_STEP)


class Ending(NamedTuple):
    """An episode that ended with a timestep that is handed out.

    Attributes:
        flag: the flag of the reply.
        episodes_done: how many episodes the env has ended with it.
    """

    env_id: int
    flag: int
    episodes_done: int


class Beginning(NamedTuple):
    """An episode that has begun within the step that ended the one before (`reset_inplace`).

    Attributes:
        episodes_done: how many episodes the env has ended with that step.
        episode: the number of this one.
        buffer: where its first observation is.
    """

    env_id: int
    episodes_done: int
    episode: int
    buffer: int


class Episodes:
    """The beginnings and ends of episodes, with the seeds and plans of their resets.

    Args:
        hosts: to send requests.
        rules: of episodes.
        statistics: where episodes are counted.
        spares: the spares that take the place of envs whose episodes end; None if there are none.

    Attributes:
        restorations: which envs are not reset, but restored.
        ends_in_place: whether a step that ends an episode is reported together with the beginning
            of the next one: see `may_end_in_place`.
    """

    def __init__(
        self,
        hosts: Hosts,
        rules: EpisodeRules,
        statistics: Statistics,
        spares: Spares | None,
    ) -> None:
        self._hosts = hosts
        self._table = hosts.table
        self._states = hosts.table.states
        self._rules = rules
        self._statistics = statistics
        self._spares = spares
        self.restorations = Restorations()
        # With spares, it is decided here which env is reset; with caps, when.
        self._hosts_begin = rules.auto_reset and spares is None and hosts.starts is None
        plainly = self._hosts_begin and hosts.resets_need_no_looking_after
        self.ends_in_place = plainly and rules.reset_inplace

    def begin(self, env: ManagedEnv) -> None:
        """Send the reset of an idle env, with the seed that is due, now or when it has its turn."""
        env.again = env.waits = False  # whatever was new goes with this one
        if env.failed_while_ready is None:
            self._table.happened(env.env_id, Event.BEGIN_RESET)
        starts = self._hosts.starts
        if starts is not None and not starts.may_begin(env):
            self._hosts.await_turn(env, Next.RESET)
            return
        seed = env.seed
        if seed is None and env.new_generation and env.base_seed is not None:
            seed = derived_seed(env.base_seed, env.env_id, env.generation, env.episode)
        rules = self._rules
        reset = ResetRequest(
            env.reset_params,
            seed,
            rules.dynamic_seed,
            self._plan(env),
            env.is_spare,
            self.restorations.saved_for(env),
            env.episode + 1,
            env.leaves,
        )
        self._hosts.request(env, Op.RESET, reset, Change.RESET)
        env.left_with = env.request_id if env.leaves else UNANSWERED
        env.leaves = False
        env.has_plan = not env.is_spare
        if self._spares is not None:
            self._spares.reset_begins(env)

    def leave(self, env: ManagedEnv) -> None:
        """Reset an idle env, or a spare in its place, that has taken steps in its episode.

        To its host, this is the end of an episode like any other, after which the host may want to
        be replaced. This does not hold for a row of a batched env, whose reset is that of other
        rows, too.
        """
        env.leaves = self._hosts.are_recycled and not env.shares_env
        self.begin(env)

    def _plan(self, env: ManagedEnv) -> EpisodePlan:
        left = self._rules.episode_num - env.episodes_done - 1
        # A reset that has a limit of its own, or none where steps have one, is no part of a step.
        inplace = self._rules.reset_inplace and not self._hosts.limits.limit_episodes
        params = {} if isinstance(env.reset_params, Once) else env.reset_params
        return EpisodePlan(self._hosts_begin and not self._holds_back(env), left, params, inplace)

    def _holds_back(self, env: ManagedEnv) -> bool:
        """Return whether the next episode of an env waits for the replacement of its host.

        A host that is worn says so at each end of an episode. One in which a run was restored does
        not know that there were envs that waited for that.
        """
        inplace = self._rules.reset_inplace  # then a user waits for the reset
        return env.group.is_to_be_replaced and not env.shares_env and not inplace

    def end(self, env: ManagedEnv, after: int) -> None:
        """End the episode that ended with the step that has just been reported.

        Args:
            env: the env.
            after: what its host does now by itself: an `AfterStep`.
        """
        env.episodes_done += 1
        self._statistics.episodes += 1
        if env.episodes_done >= self._rules.episode_num:
            self._table.happened(env.env_id, Event.BUDGET_SPENT)
            self._hosts.settle(env)
            self.replace_host(env.group)
            return
        if self._rules.auto_reset:
            self._table.happened(env.env_id, Event.EPISODE_ENDED)
            env.awaits_reset = self._rules.reset_inplace and after != AfterStep.RESETS_IN_NEXT_STEP
        else:
            self._table.happened(env.env_id, Event.EPISODE_ENDED_UNATTENDED)
        env.attended = self._rules.auto_reset
        if after in _RESETS and self._hosts_begin:  # else it does not know that it should
            await_own_reset(self._hosts, env, in_next_step=after == AfterStep.RESETS_IN_NEXT_STEP)
        elif self._spares is not None and self._rules.auto_reset:
            recycles = after == AfterStep.WANTS_RECYCLING
            self._spares.ended(env, self._await_new_host if recycles else self.begin)
        elif after == AfterStep.WANTS_RECYCLING:
            self._await_new_host(env)
        elif self._rules.auto_reset:
            begin = self._await_new_host if self._holds_back(env) else self.begin
            begin(env)
        else:
            self._hosts.settle(env)
            self.replace_host(env.group)

    def end_plainly(self, endings: Sequence[Ending]) -> Sequence[Ending]:
        """Note ended episodes whose envs are reset by their hosts; return those that need `end`.

        This is the short form of `end`, for envs about which there is nothing else to know. Here,
        and in `begun`, what is noted may have been noted already, before an interrupt.
        """
        if not self._hosts_begin:
            return endings
        plain, odd, episode_num = [], [], self._rules.episode_num
        for ending in endings:
            env_id, flag, episodes_done = ending
            after = flag & AFTER_BITS
            if after not in (RESETS, RESETS_IN_NEXT_STEP) or episodes_done >= episode_num:
                odd.append(ending)
                continue
            plain.append((env_id, episodes_done, after == RESETS_IN_NEXT_STEP))
        self._table.episodes_ended(plain)
        return odd

    def may_end_in_place(self, env_ids: Collection[int]) -> bool:
        """Return whether envs may end and begin episodes in a step without a closer look."""
        table, episode_num, failing = self._table, self._rules.episode_num, self._statistics.failing
        if not self.ends_in_place or table.failed_while_ready:
            return False
        if not (table.again.isdisjoint(env_ids) and failing.isdisjoint(env_ids)):
            return False
        done = table.episodes_done
        return episode_num == _UNLIMITED or all(done[i] + 1 < episode_num for i in env_ids)

    def beginnings(self, buffers: Mapping[int, int]) -> Sequence[Beginning]:
        """Return the episodes that have begun within steps; none of them has been noted yet.

        Args:
            buffers: where their first observations are, by env_id.
        """
        done, begun = self._table.episodes_done, self._table.episodes
        return [_make_beginning((i, done[i] + 1, begun[i] + 1, buffers[i])) for i in buffers]

    def begun(self, env: ManagedEnv, info: dict[str, Any]) -> None:
        """Note that the reset of an env has succeeded and its observation has arrived."""
        env.reset_info = info
        env.awaits_reset = False
        if self._states.column[env.env_id] != EnvState.RUN:
            self._table.happened(env.env_id, Event.RESET_SUCCEEDED)

    def begun_plainly(self, env_ids: Iterable[int]) -> None:
        """Note that resets of envs have succeeded, with nothing else to know about the envs."""
        hosts = self._hosts
        if hosts.limits.of_phase(Phase.RESETTING) is not None:
            for env_id in env_ids:
                hosts.envs[env_id].deadline = NEVER

    def count_reset(self, env: ManagedEnv) -> None:
        """Count the reset of an env, which has succeeded, whatever comes of it."""
        env.attempts = env.renewals_in_a_row = 0
        env.episode = env.next_episode

    def use_up_seed(self, env: ManagedEnv) -> None:
        """Drop the seed and `Once` params of the reset that has succeeded: they are used up."""
        self._table.next_resets.pop(env.env_id, None)
        self._table.use_up_params((env.env_id,))

    def restored(self, env: ManagedEnv, known: EnvRecord) -> None:
        """Restore all else about an env that has its state again and is in an episode."""
        env.new_seed, env.new_generation = known.new_seed, known.new_generation
        env.attended = known.attended
        timestep, statistics = known.timestep, self._statistics
        if timestep is not None:
            env.timestep = timestep if timestep.done else timestep._replace(obs=env.obs)
            statistics.actions += 1
            if is_abnormal(timestep.info):
                statistics.abnormal += 1
            elif timestep.done:
                statistics.episodes += 1
        if known.state is EnvState.DONE:
            self._table.happened(env.env_id, Event.BUDGET_SPENT)
        elif known.state is EnvState.NEED_RESET:
            self._table.happened(env.env_id, Event.EPISODE_ENDED_UNATTENDED)
        elif known.waits:
            self._table.happened(env.env_id, Event.EPISODE_ENDED)
            env.waits = env.group.is_to_be_replaced = True
        else:
            env.failed_while_ready, env.fresh = known.doomed, known.fresh
        self.replace_host(env.group)

    def abandon(self, env: ManagedEnv, after: int, *, done: bool) -> None:
        """Go on to the reset of an env after the end of a step that nobody wants any more."""
        if after in _RESETS:  # the host has begun one by itself
            await_own_reset(self._hosts, env, in_next_step=after == AfterStep.RESETS_IN_NEXT_STEP)
            return
        self._hosts.settle(env)
        if after == AfterStep.WANTS_RECYCLING:
            self.worn(env)
        elif done:
            self.begin(env)
        else:
            self.leave(env)

    def worn(self, env: ManagedEnv) -> None:
        """Replace the host, which wants it, of an env that is to be reset and is not busy.

        If the host cannot be replaced yet, the env is reset at once: its user waits for this reset,
        so that it cannot wait for the other envs of the host.
        """
        env.group.is_to_be_replaced = True
        self.replace_host(env.group)
        if not env.group.is_ending:
            self.begin(env)

    def await_new_host(self, env: ManagedEnv) -> None:
        """Have an env that was left in an episode wait for the replacement of its host.

        Nobody waits for its next episode as long as the episodes of its neighbours go on.
        """
        env.attended = True
        self._table.happened(env.env_id, Event.BEGIN_RESET)
        self._await_new_host(env)

    def _await_new_host(self, env: ManagedEnv) -> None:
        """Have the next episode of an env wait for the replacement of its host."""
        env.group.is_to_be_replaced = True
        env.waits = True
        self._hosts.settle(env)
        self.replace_host(env.group)
        if env.waits:
            env.awaits_reset = (
                False  # its neighbours' steps come first, and need a caller who has this
            )

    def replace_host(self, group: HostGroup) -> None:
        """Replace a host that wants it, if none of its envs is in an episode or busy."""
        if not group.is_to_be_replaced or group.is_ending:
            return
        present, states = group.present(), self._states
        if any(s.phase is not Phase.IDLE or states[s.env_id] is EnvState.RUN for s in present):
            return
        self._statistics.recycled += 1
        for env in present:
            env.attended = env.attended and states[env.env_id] is not EnvState.DONE
            self._hosts.leave(env, Next.RENEW_HOST)
        self._hosts.end(group, ask=True)


_make_beginning = partial(tuple.__new__, Beginning)
_UNLIMITED = float("inf")


class Repairs(Protocol):
    """What brings envs back that have failed for good."""

    def forgive(self, env: ManagedEnv) -> None:
        """Forget an env's failures: its user repairs it by hand."""

    def bring_back(self, env: ManagedEnv) -> None:
        """Renew an env that no host serves, because its user repairs it by hand."""


class ExplicitResets:
    """The resets that users ask for.

    Args:
        statistics: where cancelled steps are counted.
        repair: brings envs back that have failed for good.
        submitter: posts resets in the block.
        spares: the spares, which may have been given seeds; None if there are none.
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
        self._table = hosts.table
        self._states = hosts.table.states
        self._statistics = statistics
        self._episodes = episodes
        self._repair = repair
        self._spares = spares
        self._submitter = submitter

    @property
    def _can_be_posted(self) -> bool:
        """Whether it is enough to post resets, which their hosts know all about, in the block."""
        # Inline, a message costs no more, and can be interrupted safely.
        alone = self._hosts.transport.works_alone and self._spares is None
        return alone and self._submitter.posts and self._hosts.starts is None

    def seed(self, seeds: Mapping[int, int | None], of_spares: Sequence[int | None]) -> None:
        """Have the next explicit resets, and those of spares, use these seeds."""
        for env_id, seed in seeds.items():
            self._table.envs[env_id].new_seed = seed
        for spare, seed in zip(self._table.envs[self._table.env_num :], of_spares, strict=True):
            spare.new_seed = seed

    def begin(
        self,
        params: Mapping[int, dict[str, Any] | None],
        seed: int | None = None,
        *,
        leaves: bool = False,
    ) -> None:
        """Reset envs, and the spares that were given a seed since their last reset.

        Args:
            params: keyword arguments of this and of later automatic resets, by env_id; None keeps
                those that were given before.
            seed: for this reset alone: seeds of later generations do not follow from it.
            leaves: whether the envs have taken steps in their episodes, which is known of envs that
                are leased.
        """
        # Where all rows of a batched env are reset together, so are those that wait for a step.
        reset_in_step_of(self._hosts, [i for i in params if not self._table.envs[i].resets_alone])
        posted = [i for i, given in params.items() if self._begin(i, given, seed, leaves)]
        if posted:
            self._submitter.post_resets(posted)
        if self._spares is not None:
            self._spares.reseed(self._episodes.begin)

    def restore(self, restorations: Mapping[int, tuple[SavedEnv, EnvRecord]]) -> None:
        """Restore envs that are at rest to what they were."""
        self._statistics.has_generations = True
        for env_id, (_, known) in restorations.items():
            if known.waits:  # before its neighbours' plans are made
                self._table.envs[env_id].group.is_to_be_replaced = True
        for env_id, (saved, known) in restorations.items():
            env = self._table.envs[env_id]
            self._cancel(env)
            self._revive(env)
            env.generation, env.episodes_done = known.generation, known.episodes_done
            env.episode = known.episode - 1  # this counts as the reset that it has been in
            env.reset_params, env.base_seed = known.reset_params, known.base_seed
            env.attended = True
            env.seed, env.new_generation, env.waits = None, False, False
            due = self._episodes.restorations
            due.forget(env_id)
            due.due[env_id] = Restoration(saved, known)
            self._episodes.begin(env)

    def _begin(
        self, env_id: int, params: dict[str, Any] | None, seed: int | None, leaves: bool
    ) -> bool:
        """Begin the reset of one env; return whether it only has to be posted."""
        env = self._table.envs[env_id]
        self._hosts.look_after(env)
        restoring = self._episodes.restorations.forget(env.env_id)
        joins = params is None and seed is None and env.new_seed is None and not restoring
        if params is not None:
            env.reset_params = copied_params(params)  # later resets get them, too
        if env.new_seed is not None:
            env.seed = env.base_seed = env.new_seed
            env.new_seed = None
        if seed is not None:
            env.seed = seed
        self._cancel(env)
        self._revive(env)
        env.attended = True
        env.waits = False
        self._table.happened(env.env_id, Event.BEGIN_RESET)
        if env.phase is Phase.IDLE:
            if env.host_id is None:
                self._repair.forgive(env)
                self._repair.bring_back(env)
            elif joins and self._can_be_posted and self._is_planned(env):
                env.again = False
                return True
            elif leaves:
                self._episodes.leave(env)
            else:
                self._episodes.begin(env)
        elif env.phase is Phase.ENDING and env.follow_up is Next.NOTHING:
            self._repair.forgive(env)
            env.follow_up = Next.RENEW_HOST
        elif self._table.resets_in_next_step[env.env_id]:
            self._episodes.begin(env)  # at once: nobody steps the others meanwhile
        elif env.phase in (Phase.RESETTING, Phase.CANCELLING):
            env.again = env.again or not joins
        return False

    def _cancel(self, env: ManagedEnv) -> None:
        """Give up the timestep that an env owes, if it owes one."""
        if not env.owed:
            return
        env.awaits_reset = False
        if env.env_id in self._table.leased:
            self._statistics.of_slots.cancelled += 1
        else:
            self._statistics.cancelled += 1
        timestep = self._table.undelivered.pop(env.env_id, None)
        if timestep is None:
            self._hosts.cancel(env)
        elif is_abnormal(timestep.info):
            self._statistics.abnormal -= 1
        elif timestep.done:  # nobody saw that episode's end
            env.episodes_done -= 1
            env.has_plan = False
            self._statistics.episodes -= 1

    def _revive(self, env: ManagedEnv) -> None:
        """Take back what was decided about an env that its user now resets."""
        env.failed_while_ready = None
        env.fresh = None
        env.dropped = False
        if self._states[env.env_id] is EnvState.DONE:
            env.episodes_done = 0
            env.has_plan = False

    def _is_planned(self, env: ManagedEnv) -> bool:
        """Return whether an env's host knows all that there is to know about its next reset."""
        if env.env_id in self._table.by_message:
            return False
        return env.has_plan and env.seed is None and not env.new_generation
