"""The parts of one launched manager, put together: table, hosts, submitting, collecting, repairing.

The supervisor does not wait and has no threads: the engine calls `handle` with what has arrived and
`expire` when time has passed. Nothing here depends on a process or a real clock, so the unit tests
drive it with a fake transport and a clock they move by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from envmgr.core.call_journal import CallJournal, is_run
from envmgr.core.collect import Collector, HandedOut
from envmgr.core.episodes import Episodes, ExplicitResets
from envmgr.core.failures import Repair
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Next, Phase
from envmgr.core.replies import BlockReplies, ReplyDispatcher, ReplyEffects
from envmgr.core.setup import EnvSetup
from envmgr.core.spares import Spares
from envmgr.core.starts import Starts
from envmgr.core.statistics import Statistics
from envmgr.core.submit import Submitter
from envmgr.core.table import EpisodeRules, ManagedEnv, Selections
from envmgr.lifecycle import EnvState, Event
from envmgr.policy import FailurePolicy
from envmgr.spaces import codec_of
from envmgr.wire.messages import EnvDescription, Op
from envmgr.worker.copies import copied_arguments

T = TypeVar("T")


class Supervisor:
    """The envs of one launched manager.

    Args:
        hosts: to send requests to hosts.
        rules: the rules of episodes and observations.
        journal: what is under way in the public call, and what that is about to return.

    Attributes:
        table: what is known of all envs.
        states: the state of each env_id.
        envs: the details of each env_id; for those of spares, see `spares`.
        spares: envs that wait to take the place of others; None if there are none.
        resets: begins the resets that users ask for.
        selections: envs that are stepped together.
        collector: finds what has arrived, and hands it out.
        step_on: applies ordinary steps that have come by message, as `ReplyEffects` does.
        handle: applies everything else that comes, as `ReplyDispatcher` does; not to be
            interrupted.
        time_out: likewise, times out an env that has exceeded the limit of what it is doing.
    """

    def __init__(
        self,
        hosts: Hosts,
        rules: EpisodeRules,
        policy: FailurePolicy,
        journal: CallJournal,
    ) -> None:
        self.hosts = hosts
        self.rules = rules
        self.table = hosts.table
        self.states = hosts.table.states
        env_num = hosts.env_num
        self.envs = hosts.envs[:env_num]
        spare_num = len(hosts.envs) - env_num
        self.journal = journal
        self.statistics = Statistics(
            num_workers=len(hosts.groups) - spare_num, envs=self.envs, journal=journal
        )
        self._setup = EnvSetup(hosts, env_num)
        self.spares: Spares | None = None
        if spare_num:
            self.spares = Spares(
                hosts,
                self.statistics,
                self._setup,
                rules.spare_takers or (True,) * env_num,
                in_order=rules.spares_in_order,
            )
        decides_here = self.spares is not None or hosts.starts is not None
        self.selections = selections = Selections(hosts.table)
        self._episodes = Episodes(hosts, rules, self.statistics, self.spares)
        self.submitter = Submitter(
            hosts,
            self.statistics,
            journal,
            selections,
            resets_inplace=rules.reset_inplace,
            has_spares=decides_here,
        )
        self.repair = Repair(
            hosts,
            policy,
            self.statistics,
            self._episodes,
            selections,
            self.spares,
            auto_reset=rules.auto_reset,
        )
        self.resets = ExplicitResets(
            hosts, self.statistics, self._episodes, self.repair, self.submitter, self.spares
        )
        answers = ReplyEffects(
            hosts,
            self.statistics,
            journal,
            self._setup,
            self._episodes,
            self.repair,
            self.spares,
        )
        self._dispatcher = ReplyDispatcher(
            hosts,
            self.statistics,
            journal,
            answers,
            self._episodes,
            self.repair,
            raise_non_finite=rules.raise_non_finite,
        )
        self.step_on = answers.step_on
        self.handle, self.time_out = self._dispatcher.handle, self._dispatcher.time_out
        self.collector = Collector(
            hosts,
            self._episodes,
            self.statistics,
            journal,
            selections,
            self._go_on,
            reset_inplace=rules.reset_inplace,
            has_spares=decides_here,
        )

    @property
    def descriptions(self) -> dict[int, EnvDescription]:
        """What each env said of itself, by env_id."""
        known = self._setup.descriptions
        return {i: known[i] for i in sorted(known) if i < len(self.envs)}

    # -- what comes -------------------------------------------------------------------------

    def apply_ordinary(self) -> bool:
        """Apply what has arrived otherwise than by message, as far as it is ordinary.

        Can be interrupted anywhere, and called again.

        Returns:
            Whether there is more: `apply_rest` applies it.
        """
        dispatcher, spares, starts = self._dispatcher, self.spares, self.hosts.starts
        if starts is not None and starts.has_turn:
            return True
        if not self.submitter.posts and spares is None:
            return False
        if not dispatcher.begin_episodes() or dispatcher.have_replied:
            return True
        if starts is not None and starts.has_turn:  # by one of these
            return True
        if spares is None or not spares.are_wanted:
            return False
        return self._waits_for_posted or not self.table.is_executing

    @property
    def _waits_for_posted(self) -> bool:
        """Whether a timestep waits for a spare, which comes when all posted steps are over."""
        return bool(self.table.awaits_reset) and Phase.POSTED in self.table.phases.column

    def apply_rest(self) -> None:
        """Apply all that has arrived otherwise than by message; not to be interrupted."""
        self._dispatcher.collect()
        if self.spares is not None:
            if self.spares.are_wanted and self._waits_for_posted:
                self._dispatcher.apply_posted()
            self.spares.look()
        if self.hosts.starts is not None:
            self._give_turns(self.hosts.starts)

    def _give_turns(self, starts: Starts) -> None:
        """Have envs begin that have waited for their turn, as many as may."""
        if starts.has_turn and self.hosts.transport.must_wait_for_call:
            return
        while not self.repair.launch_failures and (env := starts.take_turn()) is not None:
            if env.follow_up is Next.RESET:
                env.follow_up = Next.NOTHING
                self._episodes.begin(env)
                continue
            if self.states[env.env_id] is EnvState.ERROR:
                self.table.happened(env.env_id, Event.RENEW)
            self.hosts.build_in_turn(env)
        starts.all_given()

    def apply_alone(self) -> None:
        """Apply by itself the reply that `Collector.take` has left; not to be interrupted."""
        env_id, self.collector.left = self.collector.left, None
        if env_id is not None:
            self._dispatcher.apply_alone(env_id)

    def recover(self) -> None:
        """Make up for an interrupt: can be interrupted itself, and called again."""
        journal = self.journal
        journal.finish()
        if self.table.unexecuted:
            journal.uninterrupted(self.repair.answer_unexecuted)
        if journal.returning is not None:
            journal.uninterrupted(self._take_back)

    def _take_back(self) -> None:
        """Have envs owe the timesteps that were handed out by a call that has not returned."""
        journal = self.journal
        if journal.returning is not None:
            self.collector.give_back(journal.returning.timesteps)
            journal.returning = None  # last: until then it says what was delivered

    # -- launch -----------------------------------------------------------------------------

    def start_hosts(self, env_ids: Iterable[int]) -> None:
        """Begin to start hosts for envs that have none yet.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        envs, starts = map(self.hosts.envs.__getitem__, env_ids), self.hosts.starts
        missing = [s for s in envs if s.host_id is None and not (starts and starts.waits(s))]
        self.hosts.start(missing)
        self.table.launched([env.env_id for env in missing])

    def place_observations(self, *, same_spaces: bool) -> None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Raises:
            SpaceMismatchError: the spaces differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        block = self._setup.place_observations(
            same_spaces=same_spaces, handed_out=self.rules.copy_on_get
        )
        if block is None:
            return
        self.hosts.share(block)
        check, (spaces, kind_of) = self.rules.check_actions, self._setup.kinds
        codecs = [codec_of(space, strict=check == "strict") for space in spaces]
        converting = self._setup.kinds_that_convert
        columns = [
            codec.action_columns(checked=check is not False, in_any_form=kind in converting)
            for kind, codec in enumerate(codecs)
        ]
        packs = [each for each in columns if each is not None]
        replies = BlockReplies(
            block,
            self.table.observed.buffers,
            self.table.may_reset_in_next_step,
            self._setup.info_forms,
        )
        self._dispatcher.share(replies)
        self.collector.share(block, replies)
        self.submitter.share(block, packs, kind_of)

    def begin_episodes(self) -> None:
        """Have every env reset for the first time; the hosts of all have said HELLO."""
        for env in self.hosts.across(self.hosts.envs):
            self._setup.attach(env)  # what is repeated on later envs has been done on these
            env.seed, env.new_seed = env.new_seed, None
            self._episodes.begin(env)

    def repeat(self, env_ids: Sequence[int], op: Op, payloads: Sequence[Any]) -> None:
        """Have a request that was sent to envs repeated on every later env of these env_ids.

        A request that was sent to all envs is repeated on the spares, too, if it was the same one
        for all: an env that was not sent what the spares were sent takes no spare.

        Args:
            env_ids: the envs that it was sent to.
            op: SET_ATTR or CALL.
            payloads: the payload of each env; one and the same object, or different ones.
        """
        # What is repeated is what was given then, whatever the user has changed in it since.
        copies = {id(payload): copied_arguments(payload) for payload in payloads}
        payloads = [copies[id(payload)] for payload in payloads]
        for env_id, payload in zip(env_ids, payloads, strict=True):
            self._setup.repeat(env_id, op, payload)
        if len(payloads) == len(self.envs) and all(p is payloads[0] for p in payloads):
            self._setup.repeat_on_spares(op, payloads[0])

    # -- leased envs ------------------------------------------------------------------------

    def refresh(self, env_id: int, *, has_stepped: bool) -> None:
        """Have an env that was left in an episode begin another one, for whoever takes it next.

        A spare takes its place, if there is one for it; if its host is to be replaced, the
        replacement comes first.

        Args:
            env_id: the env.
            has_stepped: whether it has taken steps in that episode.
        """
        env, episodes = self.envs[env_id], self._episodes
        if self.spares is not None:
            self.spares.ended(env, episodes.leave if has_stepped else episodes.begin)
        elif env.group.is_to_be_replaced:
            episodes.await_new_host(env)
        else:
            self.resets.begin({env_id: None}, leaves=has_stepped)

    def is_restored(self, env_id: int) -> bool:
        """Return whether an env's episode began with a state that was saved within an episode."""
        restored = self._episodes.restorations.restored
        return restored.get(env_id) == self.table.episodes[env_id]

    # -- steps ------------------------------------------------------------------------------

    def _go_on(self, collected: HandedOut) -> None:
        """Do what follows timesteps that were handed out, for example ends of episodes."""
        self._dispatcher.begin_episodes()
        spares = self.spares
        if collected.odd or (spares is not None and spares.are_wanted):
            self.journal.uninterrupted(self._follow_up)

    def _follow_up(self) -> None:
        returning = self.journal.returning
        if returning is not None and returning.timesteps.odd:
            self.collector.follow_up(returning.timesteps)
            self._dispatcher.collect()  # the resets after them may be over
        if self.spares is not None:
            self.spares.replace_ended()

    # -- calls ------------------------------------------------------------------------------

    def forget_results(self, env_ids: Iterable[int]) -> None:
        """Let go of the results of calls."""
        for env_id in env_ids:
            self.envs[env_id].result = None

    # -- time -------------------------------------------------------------------------------

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        return self.hosts.limits.earliest

    def expire(self) -> None:
        """Act on deadlines that have passed; all that arrived before has been handled."""
        limits = self.hosts.limits
        now = limits.clock()
        try:
            for env_id in limits.timed_out_steps(now):
                self.hosts.look_after(self.envs[env_id])
            for env in limits.due(now):
                if limits.is_due(env):  # else settled together with another env of its host
                    self._act_on(env)
            if self.hosts.starts is not None:
                self._give_turns(self.hosts.starts)
        except MemoryError:  # what is due is due still
            limits.remember(now)
            raise

    def _act_on(self, env: ManagedEnv) -> None:
        """Act on the deadline of an env, which has passed."""
        if env.phase is Phase.ENDING:
            self.hosts.end(env.group, ask=False)
        elif env.phase is Phase.PAUSING:
            self.repair.renewals.proceed(env)
        else:
            self._dispatcher.time_out(env)

    def stop(self) -> None:
        """Make all envs VOID, and cancel the timesteps that were owed."""
        self.hosts.forget_all()
        if self.hosts.starts is not None:
            self.hosts.starts.forget()
        returning = self.journal.returning
        if returning is not None:
            handed = returning.timesteps
            is_returned = is_run(returning.caller)  # else an interrupt has ended its call
            self.statistics.timesteps = handed.n_before + (handed.count if is_returned else 0)
        self.statistics.cancelled += self.statistics.outstanding
        slots = self.statistics.of_slots
        slots.cancelled = slots.actions - slots.timesteps
        self.journal.forget()
        for env in self.hosts.envs:
            self.table.happened(env.env_id, Event.CLOSE)
            self.hosts.settle(env)
        self.table.clear()
        self.hosts.share(None)
        self._dispatcher.share(None)
        self.collector.share(None, None)
        self.submitter.detach()
