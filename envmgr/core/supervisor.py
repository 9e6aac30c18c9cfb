"""The supervisor: owns the hosts, matches replies to requests, and is the only writer of states.

It does not wait and has no threads: the engine calls `handle` with what arrived and `expire` when
time has passed. Nothing here depends on a process or a real clock, so the unit tests drive it with
a fake transport and a clock they move by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envmgr.core.action_kinds import ActionKinds
from envmgr.core.answers import Answers
from envmgr.core.arrivals import Arrivals
from envmgr.core.delivery import Delivery, is_run
from envmgr.core.episodes import Episodes
from envmgr.core.handout import Handout
from envmgr.core.hosts import Hosts
from envmgr.core.orientation import Orientation
from envmgr.core.phases import Phase
from envmgr.core.posting import Posting
from envmgr.core.repair import Repair
from envmgr.core.replies import BlockReplies
from envmgr.core.resets import ExplicitResets
from envmgr.core.rules import EpisodeRules
from envmgr.core.selection import Selections
from envmgr.core.sending import Sending
from envmgr.core.spares import Spares
from envmgr.core.stats import Statistics
from envmgr.core.taken import ArrayBatch, Taken, by_env_id
from envmgr.lifecycle import Event
from envmgr.policy import FailurePolicy
from envmgr.spaces import codec_of
from envmgr.transport.base import Arrival
from envmgr.types import EnvTimestep
from envmgr.wire.messages import EnvDescription, Op

_RESETTING = Phase.RESETTING

Undisturbed = Callable[[Callable[[], None]], None]
"""Does something that is not to be interrupted."""


class Supervisor:
    """The envs of one launched manager.

    Args:
        hosts: to speak to hosts.
        rules: of episodes and observations.
        policy: of failures.

    Attributes:
        record: what is known of all envs.
        states: the state of each env_id.
        slots: the details of each env_id; of spares, see `spares`.
        spares: envs that wait to take the place of others; None if there are none.
        statistics: counters since launch.
        repair: what follows failures.
        resets: begins those that users ask for.
        posting: posts steps in the block; None where all go by message.
        sending: sends steps by message.
        handout: finds what has arrived, and hands it out.
        delivery: what the call under way is about to return.
        step_on: applies ordinary steps that have come by message, as `Answers` does.
    """

    def __init__(self, hosts: Hosts, rules: EpisodeRules, policy: FailurePolicy) -> None:
        self.hosts = hosts
        self.rules = rules
        self.record = hosts.record
        self.states = hosts.record.states
        env_num = hosts.env_num
        self.slots = hosts.slots[:env_num]
        spare_num = len(hosts.slots) - env_num
        self.delivery = Delivery()
        self.statistics = Statistics(
            num_workers=len(hosts.groups) - spare_num, slots=self.slots, delivery=self.delivery
        )
        self.posting: Posting | None = None
        self._orientation = Orientation(hosts, env_num)
        self.spares: Spares | None = None
        if spare_num:
            self.spares = Spares(
                hosts,
                self.statistics,
                self._orientation,
                rules.spare_takers or (True,) * env_num,
                in_order=rules.spares_in_order,
            )
        selections = Selections(hosts)
        self._episodes = Episodes(hosts, rules, self.statistics, self.spares)
        self.sending = Sending(hosts, self.statistics, self._episodes)
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
            hosts, self.statistics, self._episodes, self.repair, self.spares
        )
        answers = Answers(
            hosts, self.statistics, self._orientation, self._episodes, self.repair, self.spares
        )
        self._arrivals = Arrivals(
            hosts,
            self.statistics,
            answers,
            self._episodes,
            self.repair,
            raise_non_finite=rules.raise_non_finite,
        )
        self.step_on = answers.step_on
        self.handout = Handout(
            hosts,
            self._episodes,
            self.statistics,
            self.delivery,
            selections,
            reset_inplace=rules.reset_inplace,
            has_spares=self.spares is not None,
        )

    @property
    def descriptions(self) -> dict[int, EnvDescription]:
        """What each env said of itself, by env_id."""
        known = self._orientation.descriptions
        return {i: known[i] for i in sorted(known) if i < len(self.slots)}

    # -- what comes -------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host; not to be interrupted."""
        self._arrivals.handle(host_id, arrival)

    def collect(self) -> bool:
        """Apply what has arrived by another way than by message, as far as that is ordinary.

        Can be interrupted anywhere, and called again.

        Returns:
            Whether there is more: `collect_rest` applies it.
        """
        arrivals, spares = self._arrivals, self.spares
        if self.posting is None and spares is None:
            return False
        if not arrivals.begin_episodes() or arrivals.have_replied:
            return True
        if spares is None or not spares.are_wanted:
            return False
        return self._waits_for_posted or not self.record.is_executing

    @property
    def _waits_for_posted(self) -> bool:
        """Whether a timestep waits for a spare, which comes when all posted steps are over."""
        return bool(self.record.held) and Phase.POSTED in self.record.phases.column

    def collect_rest(self) -> None:
        """Apply all that has arrived by another way than by message; not to be interrupted."""
        self._arrivals.collect()
        if self.spares is not None:
            if self.spares.are_wanted and self._waits_for_posted:
                self._arrivals.set_aside_posted()
            self.spares.look()

    def set_aside(self) -> None:
        """Look at the reply by itself that `Handout.take` has left; not to be interrupted."""
        env_id, self.handout.left = self.handout.left, None
        if env_id is not None:
            self._arrivals.set_aside(env_id)

    def sleep(self, *, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be woken."""
        if self.posting is not None:
            self.posting.sleep(soon=soon)

    def recover(self, undisturbed: Undisturbed) -> None:
        """Make up for an interrupt: can be interrupted itself, and called again."""
        hand = self.delivery.in_hand
        if self.posting is not None:
            self.posting.finish()
        if hand is not None:
            self.handout.move_on(hand)
        self._arrivals.begin_episodes()
        self.sending.finish(again=True)
        if self.record.unexecuted:
            undisturbed(self.sending.settle_doomed)
        if hand is not None:
            undisturbed(self._take_back)

    def _take_back(self) -> None:
        """Have envs owe the timesteps that were handed out by a call that has not returned."""
        hand = self.delivery.in_hand
        if hand is None:
            return
        if hand.fate is not None:
            hand.fate.given_back = True
        self.handout.follow_up(hand)
        self.record.undelivered.update(by_env_id(hand.result))
        self.statistics.timesteps = hand.n_before
        self.delivery.in_hand = None  # last: until then it says what was delivered

    # -- launch -----------------------------------------------------------------------------

    def start_hosts(self, env_ids: Iterable[int]) -> None:
        """Begin to start hosts of envs that have none yet.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        missing = [s for s in map(self.hosts.slots.__getitem__, env_ids) if s.host_id is None]
        self.hosts.start(missing)
        self.states.apply_all([slot.env_id for slot in missing], Event.LAUNCH)

    def place_observations(self, *, same_spaces: bool) -> None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Raises:
            SpaceMismatchError: they differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        block = self._orientation.place_observations(
            same_spaces=same_spaces, handed_out=self.rules.copy_on_get
        )
        if block is None:
            return
        self.hosts.share(block)
        check, (spaces, kind_of) = self.rules.check_actions, self._orientation.kinds
        codecs = [codec_of(space, strict=check == "strict") for space in spaces]
        converting = self._orientation.kinds_that_convert
        columns = [
            codec.action_columns(checked=check is not False, in_any_form=kind in converting)
            for kind, codec in enumerate(codecs)
        ]
        packs = [each for each in columns if each is not None]
        replies = BlockReplies(block, self.record.observed.places, self.record.together or ())
        self._arrivals.share(replies)
        self.handout.share(block, replies)
        self.posting = Posting(block, packs[0], self.hosts, self.statistics, self.sending)
        if len(packs) > 1:
            self.posting.kinds = ActionKinds(block, packs, kind_of)
        self.resets.share(self.posting)

    def begin_episodes(self) -> None:
        """Have every env reset for the first time; its host has said HELLO."""
        for slot in self.hosts.slots:
            self._orientation.attach(slot)  # what is repeated on later envs has been done on these
            slot.seed, slot.new_seed = slot.new_seed, None
            self._episodes.begin(slot)

    def repeat(self, env_ids: Sequence[int], op: Op, payloads: Sequence[Any]) -> None:
        """Have a request that was sent to envs repeated on every later env of these env_ids.

        One that was sent to all envs is repeated on the spares, too, if it was one for all: an env
        that was not sent what the spares were sent takes no spare.

        Args:
            env_ids: whom it was sent to.
            op: SET_ATTR or CALL.
            payloads: of each env; one and the same object, or different ones.
        """
        for env_id, payload in zip(env_ids, payloads, strict=True):
            self._orientation.repeat(env_id, op, payload)
        if len(payloads) == len(self.slots) and all(p is payloads[0] for p in payloads):
            self._orientation.repeat_on_spares(op, payloads[0])

    # -- steps ------------------------------------------------------------------------------

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        return self.record.ready_ids()

    def timesteps(self, taken: Taken, undisturbed: Undisturbed) -> dict[int, EnvTimestep]:
        """Hand out what was taken, as timesteps by env_id."""
        timesteps = taken.timesteps()
        self.handout.hand_out(taken, timesteps)
        self._go_on(undisturbed)
        return timesteps

    def arrays(self, taken: Taken, undisturbed: Undisturbed) -> ArrayBatch | None:
        """Hand out what was taken as arrays; None if that needs `timesteps`."""
        batch = taken.arrays()
        if batch is not None:
            self.handout.hand_out(taken, batch)
            self._go_on(undisturbed)
        return batch

    def _go_on(self, undisturbed: Undisturbed) -> None:
        """Do what follows what was handed out."""
        if _RESETTING in self.record.phases.column:
            self._arrivals.begin_episodes()
        hand, spares = self.delivery.in_hand, self.spares
        if (hand is not None and hand.odd) or (spares is not None and spares.are_wanted):
            undisturbed(self._follow_up)

    def _follow_up(self) -> None:
        hand = self.delivery.in_hand
        if hand is not None and hand.odd:
            self.handout.follow_up(hand)
            self._arrivals.collect()  # the resets after them may be over
        if self.spares is not None:
            self.spares.relieve()

    # -- calls ------------------------------------------------------------------------------

    def forget_results(self, env_ids: Iterable[int]) -> None:
        """Let go of what came of calls."""
        for env_id in env_ids:
            self.slots[env_id].result = None

    # -- time -------------------------------------------------------------------------------

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        return self.hosts.limits.earliest

    def expire(self) -> None:
        """Act on deadlines that have passed. What had arrived before has been handled."""
        limits = self.hosts.limits
        now = limits.clock()
        for env_id in limits.late_steps(now):
            self.hosts.take_over(self.slots[env_id])
        for slot in limits.due(now):
            if not limits.is_due(slot):
                continue  # settled together with another env of its host
            if slot.phase is Phase.ENDING:
                self.hosts.end(slot.group, ask=False)
            elif slot.phase is Phase.PAUSING:
                self.repair.renewals.proceed(slot)
            else:
                self._arrivals.time_out(slot)

    def stop(self) -> None:
        """All envs are VOID from now on; what was owed is cancelled."""
        self.hosts.forget_all()
        hand = self.delivery.in_hand
        if hand is not None and not is_run(hand.caller):  # its call did not return
            self.statistics.timesteps = hand.n_before
        self.statistics.cancelled += self.statistics.outstanding
        self.delivery.in_hand = None
        self.sending.forget()
        for slot in self.hosts.slots:
            self.states.apply(slot.env_id, Event.CLOSE)
            self.hosts.settle(slot)
        self.record.clear()
        self.hosts.share(None)
        self._arrivals.share(None)
        self.handout.share(None, None)
        if self.posting is not None:
            self.posting.detach()
