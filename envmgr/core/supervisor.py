"""The supervisor: owns the hosts, matches replies to requests, and is the only writer of states.

It does not wait and has no threads: the engine calls `handle` with what arrived and `expire` when
time has passed. Nothing here depends on a process or a real clock, so the unit tests drive it with
a fake transport and a clock they move by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envmgr.core import failures
from envmgr.core.arrivals import Arrivals
from envmgr.core.delivery import Delivery, Hand
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.lanes import Lanes
from envmgr.core.orientation import Orientation
from envmgr.core.repair import Repair
from envmgr.core.rules import EpisodeRules
from envmgr.core.slots import EnvSlot, Next, Work
from envmgr.core.spares import Spares
from envmgr.core.stats import Statistics
from envmgr.core.taken import by_env_id
from envmgr.lifecycle import EnvState, Event, StateTable, is_ready
from envmgr.policy import FailurePolicy
from envmgr.spaces import codec_of
from envmgr.transport.base import Arrival
from envmgr.types import EnvTimestep, is_abnormal
from envmgr.wire.messages import EnvDescription, Message, Op

Submitted = tuple[EnvSlot, tuple[int, Any] | None]
"""An env and its encoded action; None for one whose host is gone: it will not be executed."""


class Supervisor:
    """The envs of one launched manager.

    Args:
        hosts: to speak to hosts.
        rules: of episodes and observations.
        policy: of failures.

    Attributes:
        states: the state of each env_id; changed only here and in `repair`.
        slots: what is known of each env_id; of spares, see `spares`.
        spares: envs that wait to take the place of others; None if there are none.
        statistics: counters since launch.
        repair: what follows failures.
        lanes: the envs in their ordinary course; None where steps go by message.
        delivery: what the call under way is about to return.
    """

    def __init__(self, hosts: Hosts, rules: EpisodeRules, policy: FailurePolicy) -> None:
        self.hosts = hosts
        self.rules = rules
        env_num = hosts.env_num
        self.slots = hosts.slots[:env_num]
        spare_num = len(hosts.slots) - env_num
        self.states = StateTable(env_num, spare_num)
        self.statistics = Statistics(num_workers=len(hosts.groups) - spare_num, slots=self.slots)
        self.delivery = Delivery()
        # What is to be the case when steps have been sent, also if an interrupt comes in between.
        self._submission: tuple[Sequence[Submitted], int] | None = None
        self._applying: object = None
        self.lanes: Lanes | None = None
        self._orientation = Orientation(hosts, env_num)
        self.spares: Spares | None = None
        if spare_num:
            self.spares = Spares(
                hosts,
                self.states,
                self.statistics,
                self._orientation,
                rules.spare_takers or (True,) * env_num,
                in_order=rules.spares_in_order,
            )
        self._episodes = Episodes(hosts, self.states, rules, self.statistics, self.spares)
        self.repair = Repair(
            hosts,
            self.states,
            policy,
            self.statistics,
            auto_reset=rules.auto_reset,
            begin_reset=self._episodes.begin,
            replace_worn_host=self._episodes.replace_worn_host,
            spares=self.spares,
        )
        self._arrivals = Arrivals(
            hosts,
            self.states,
            self.statistics,
            self._orientation,
            self._episodes,
            self.repair,
            raise_non_finite=rules.raise_non_finite,
            spares=self.spares,
        )

    @property
    def descriptions(self) -> dict[int, EnvDescription]:
        """What each env said of itself, by env_id."""
        known = self._orientation.descriptions
        return {i: known[i] for i in sorted(known) if i < len(self.slots)}

    # -- lanes ------------------------------------------------------------------------------

    def slot_of(self, env_id: int) -> EnvSlot:
        """Return what is known of an env, which leaves its lane."""
        if self.lanes is not None:
            self.lanes.leave(env_id)
        return self.slots[env_id]

    @property
    def all_owed_in_lanes(self) -> bool:
        """Whether every env that owes a timestep is in its lane, and at least one does."""
        lanes = self.lanes
        return lanes is not None and 0 < lanes.outstanding == self.statistics.outstanding

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        earliest = self.hosts.earliest_deadline
        return earliest if self.lanes is None else min(earliest, self.lanes.earliest_deadline)

    def collect(self) -> bool:
        """Apply what has arrived by another way than by message, as far as that is ordinary.

        Returns:
            Whether there is more: `collect_strays` applies it, which is not to be interrupted.
        """
        lanes, spares = self.lanes, self.spares
        if lanes is not None and (not lanes.begin_episodes() or lanes.strays_have_arrived):
            return True
        return spares is not None and spares.are_wanted and not (lanes and lanes.outstanding)

    def collect_strays(self) -> None:
        """Apply all that has arrived by another way than by message; not to be interrupted."""
        if self.lanes is not None:
            self.lanes.collect()
        if self.spares is not None and (self.lanes is None or not self.lanes.outstanding):
            self.spares.look()

    def sleep(self, *, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be woken."""
        if self.lanes is not None:
            self.lanes.sleep(soon=soon)

    def recover(self, undisturbed: Callable[[Callable[[], None]], None]) -> None:
        """Make up for an interrupt: can be interrupted itself, and called again.

        Args:
            undisturbed: does something that is not to be interrupted.
        """
        lanes, hand = self.lanes, self.delivery.in_hand
        if lanes is not None:
            lanes.finish_posting()
            if hand is not None:
                lanes.move_on(hand)
            lanes.begin_episodes()
        self._finish_submission()
        if self.doomed:
            undisturbed(self.settle_doomed)
        if hand is not None:
            undisturbed(self._take_back)

    def _take_back(self) -> None:
        """Have envs owe the timesteps that were handed out by a call that has not returned."""
        hand, self.delivery.in_hand = self.delivery.in_hand, None
        if hand is None:
            return
        if self.lanes is not None:
            self.lanes.follow_up(hand)
        timesteps = by_env_id(hand.result)
        for env_id, timestep in timesteps.items():
            slot = self.slot_of(env_id)
            slot.timestep = timestep
            slot.owed = True
        self.statistics.timesteps = hand.n_delivered - len(timesteps)

    def leave_lanes(self) -> None:
        """Take every env out of its lane, and apply what it has replied: slots are right now."""
        if self.lanes is not None:
            self.lanes.leave_all()
            self.lanes.collect()

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
        shared = self._orientation.place_observations(
            same_spaces=same_spaces, handed_out=self.rules.copy_on_get
        )
        if shared is None:
            return
        block, observed = shared
        check = self.rules.check_actions
        codec = codec_of(self.descriptions[0].action_space, strict=check == "strict")
        actions = codec.action_columns(checked=check is not False)
        if actions is not None:
            self.lanes = Lanes(
                block,
                actions,
                observed,
                self.slots,
                self.states,
                self.hosts,
                self.statistics,
                self._episodes,
                self._arrivals,
                self.delivery,
                reset_inplace=self.rules.reset_inplace,
            )
            if self.spares is not None:
                self.spares.has_moved = self.lanes.forget_selections

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

    @property
    def spare_slots(self) -> Sequence[EnvSlot]:
        """What is known of each spare."""
        return self.hosts.slots[len(self.slots) :]

    def spare_figures(self) -> dict[str, int]:
        """Return how many spares there are, and how many of them are ready; from any thread."""
        kept = [spare for spare in self.spare_slots if not spare.dropped]
        ready = sum(map(self.is_spare_ready, kept))
        return {"spare_env_num": len(kept), "spares_ready": ready}

    def is_spare_ready(self, spare: EnvSlot) -> bool:
        """Return whether a spare has been reset."""
        return self.spares is not None and self.spares.is_ready(spare)

    # -- steps ------------------------------------------------------------------------------

    def submit_steps(self, prepared: Sequence[Submitted]) -> None:
        """Send actions to ready envs; every one of them is owed a timestep from now on.

        Can be interrupted; `recover` does what is left.

        Args:
            prepared: envs with their encoded actions, from `prepare_step`.
        """
        if self._orientation.guard is not None:
            self._orientation.guard.count(slot.env_id for slot, _ in prepared)
        self._submission = prepared, self.statistics.actions + len(prepared)
        self._finish_submission()

    def _finish_submission(self) -> None:
        """Do what is left of sending actions; nothing if there is none."""
        if self._submission is None:
            return
        prepared, self.statistics.actions = self._submission
        for slot, frame in prepared:
            if frame is not None and slot.request_id != frame[0]:
                self.hosts.submit_step(slot, frame)
            slot.owed = True
        self._submission = None

    @property
    def doomed(self) -> list[EnvSlot]:
        """The envs that died while idle, and were sent an action since."""
        return [s for s in self.slots if s.doomed is not None and s.owed and s.timestep is None]

    def settle_doomed(self) -> None:
        """Give these envs their abnormal timesteps; not to be interrupted."""
        for slot in self.doomed:
            self._settle_doomed(slot)

    def prepare_step(self, slot: EnvSlot, action: Any) -> tuple[int, Any] | None:
        """Encode an action; None for an env whose host is gone (it will not be executed).

        Raises:
            FrameError: the action cannot be sent.
        """
        if slot.doomed is not None:
            return None
        return self.hosts.prepare(slot, Op.STEP, action)

    def _settle_doomed(self, slot: EnvSlot) -> None:
        """Give the action to an env that died while idle its abnormal timestep, and catch up."""
        failure, slot.doomed = slot.doomed, None
        if failure is None:
            raise RuntimeError("an env without failure: a defect of envmgr, please report it")
        env_id = slot.env_id
        slot.timestep = failures.abnormal_timestep(slot, failure)
        self.statistics.abnormal += 1
        self.states.apply(env_id, Event.FAILED)
        if slot.dropped:
            self.states.apply(env_id, Event.DROP)
        elif slot.fresh is not None:
            (slot.obs, slot.reset_info), slot.fresh = slot.fresh, None
            self.states.apply(env_id, Event.BEGIN_RESET)
            self.states.apply(env_id, Event.RESET_SUCCEEDED)
        elif slot.work is Work.RESETTING:
            self.states.apply(env_id, Event.BEGIN_RESET)
        elif slot.work is Work.STARTING:
            self.states.apply(env_id, Event.RENEW)
        elif slot.work is Work.NONE and slot.host_id is not None:  # renewed, auto_reset off
            self.states.apply(env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_worn_host(slot.group)

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        slots, lanes = self.slots, self.lanes
        if lanes is not None:
            lanes.enter()
            if lanes.are_all_in:
                return lanes.idle_ids()
            return [i for i in self.states.ids_in(EnvState.RUN) if self.is_ready(i)]
        return [i for i in self.states.ids_in(EnvState.RUN) if not slots[i].owed]

    def are_ready(self, env_ids: Sequence[int]) -> bool:
        """Return whether all of these envs take an action now."""
        lanes = self.lanes
        return (lanes is not None and lanes.hold_idle(env_ids)) or all(map(self.is_ready, env_ids))

    def is_ready(self, env_id: int) -> bool:
        """Return whether an env takes an action now."""
        return is_ready(self.states[env_id], pending=self.owes(env_id))

    def is_stepping(self, env_id: int) -> bool:
        """Return whether an env takes a step in its lane."""
        return self.lanes is not None and self.lanes.is_stepping(env_id)

    def is_resetting(self, env_id: int) -> bool:
        """Return whether an env is being reset in its lane."""
        return self.lanes is not None and self.lanes.is_resetting(env_id)

    def owes(self, env_id: int) -> bool:
        """Return whether an env owes a timestep."""
        return self.is_stepping(env_id) or self.slots[env_id].owed

    def owed_ids(self) -> list[int]:
        """Return the envs that owe a timestep, ascending."""
        return [slot.env_id for slot in self.slots if self.owes(slot.env_id)]

    def batch_of(self, env_ids: Sequence[int]) -> Any:
        """Return the newest observations of envs that are ready as one batch.

        Per leaf (k, *shape); None if they have to be put together from those of each env.
        """
        return None if self.lanes is None else self.lanes.newest_batch(env_ids)

    def observations(self, env_ids: Sequence[int]) -> list[Any]:
        """Return the newest observations of envs that are ready."""
        lanes, slots = self.lanes, self.slots
        if lanes is None:
            return [slots[i].obs for i in env_ids]
        if lanes.are_all_in:
            return lanes.observed.of(env_ids)
        return [lanes.observed.of([i])[0] if lanes.is_in(i) else slots[i].obs for i in env_ids]

    def deliver(self, env_ids: Iterable[int]) -> dict[int, EnvTimestep]:
        """Hand out the timesteps that have arrived, in the order of `env_ids`."""
        slots, statistics = self.slots, self.statistics
        delivered = {
            i: timestep
            for i in env_ids
            if (timestep := slots[i].timestep) is not None and not slots[i].held
        }
        self.delivery.in_hand = hand = Hand(
            delivered, None, (), statistics.timesteps + len(delivered), 0
        )
        for env_id in delivered:
            slots[env_id].timestep = None
            slots[env_id].owed = False
        statistics.timesteps = hand.n_delivered
        hand.is_done = True
        return delivered

    def follow_up(self) -> None:
        """Do what follows what was handed out; not to be interrupted."""
        hand = self.delivery.in_hand
        if hand is not None and self.lanes is not None:
            self.lanes.follow_up(hand)
        if self.spares is not None:
            self.spares.relieve()

    @property
    def must_follow_up(self) -> bool:
        """Whether `follow_up` has anything to do."""
        hand = self.delivery.in_hand
        if hand is not None and hand.endings:
            return True
        return self.spares is not None and self.spares.are_wanted

    # -- resets -----------------------------------------------------------------------------

    def begin_explicit_reset(self, env_id: int, params: dict[str, Any] | None) -> None:
        """Reset an env because its user says so.

        Args:
            env_id: which.
            params: keyword arguments of this and of later automatic resets; None keeps those
                that were given before.
        """
        slot = self.slot_of(env_id)
        joins = params is None and slot.new_seed is None
        if params is not None:
            slot.reset_params = dict(params)
        if slot.new_seed is not None:
            slot.seed = slot.base_seed = slot.new_seed
            slot.new_seed = None
        self._cancel(slot)
        self._revive(slot)
        slot.attended = True
        slot.waits = False
        self.states.apply(env_id, Event.BEGIN_RESET)
        if slot.work is Work.NONE:
            if slot.host_id is None:
                self.repair.bring_back(slot)
            else:
                self._episodes.begin(slot)
        elif slot.work is Work.ENDING and slot.following is Next.NOTHING:
            self.repair.forgive(slot)
            slot.following = Next.RENEW_HOST
        elif slot.work in (Work.RESETTING, Work.CANCELLING):
            slot.again = slot.again or not joins

    def seed(self, seeds: Mapping[int, int | None], of_spares: Sequence[int | None]) -> None:
        """Have the next explicit resets, and those of spares, use these seeds."""
        for env_id, seed in seeds.items():
            self.slots[env_id].new_seed = seed
        for spare, seed in zip(self.spare_slots, of_spares, strict=True):
            spare.new_seed = seed

    def begin_reseeded_spares(self) -> None:
        """Reset the spares that were given a seed since their last reset."""
        if self.spares is not None:
            self.spares.reseed(self._episodes.begin)

    def _cancel(self, slot: EnvSlot) -> None:
        """Give up the timestep that is owed, if there is one."""
        if not slot.owed:
            return
        slot.owed = slot.held = False
        self.statistics.cancelled += 1
        timestep, slot.timestep = slot.timestep, None
        if timestep is not None:
            if timestep.done and not is_abnormal(timestep.info):  # nobody saw that episode's end
                slot.episodes_done -= 1
                self.statistics.episodes -= 1
        else:
            self.hosts.cancel(slot)

    def _revive(self, slot: EnvSlot) -> None:
        """Take back what was decided about an env that its user now resets."""
        slot.doomed = None
        slot.fresh = None
        slot.dropped = False
        if self.states[slot.env_id] is EnvState.DONE:
            slot.episodes_done = 0

    # -- calls ------------------------------------------------------------------------------

    def is_callable(self, env_id: int) -> bool:
        """Return whether an env's host can take a call now."""
        if self.lanes is not None and self.lanes.is_in(env_id):
            return self.lanes.hold_idle((env_id,))
        slot = self.slots[env_id]
        return slot.work is Work.NONE and slot.host_id is not None

    def is_gone(self, env_id: int) -> bool:
        """Return whether an env's host was given up, so that there is nothing to wait for."""
        slot = self.slots[env_id]
        if slot.work is Work.ENDING:
            return slot.following is Next.NOTHING
        return slot.work is Work.NONE and slot.host_id is None

    def submit_calls(self, env_ids: Sequence[int], op: Op, payloads: Sequence[Any]) -> None:
        """Send one call to each of `env_ids`, or to none if one payload cannot be sent.

        Raises:
            FrameError: a payload cannot be sent.
        """
        slots = [self.slot_of(i) for i in env_ids]
        prepared = [self.hosts.prepare(s, op, p) for s, p in zip(slots, payloads, strict=True)]
        for slot, frame in zip(slots, prepared, strict=True):
            slot.result = None
            self.hosts.submit(slot, Work.CALLING, frame)

    def forget_results(self, env_ids: Iterable[int]) -> None:
        """Let go of what came of calls."""
        for env_id in env_ids:
            self.slots[env_id].result = None

    # -- arrivals ---------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host."""
        if self.lanes is not None:
            self.lanes.make_way(host_id, arrival)
        self._arrivals.handle(host_id, arrival)

    def handle_step(self, item: tuple[int, Arrival]) -> bool:
        """Apply an ordinary step that came by message; False if it is something else.

        Can be interrupted anywhere, and called again with the same item.
        """
        host_id, arrival = item
        group = self.hosts.group_of(host_id)
        if type(arrival) is not Message or arrival.op != Op.STEPPED or group is None:
            return False
        slot = group.by_id.get(arrival.env_id)
        if slot is None or group.is_shared or group.is_ending or self.is_in_lane(slot.env_id):
            return False
        if item is self._applying and slot.work is Work.NONE:
            return True  # it was applied before the interrupt
        self._applying = item
        return self._arrivals.stepped_on(slot, arrival)

    def is_in_lane(self, env_id: int) -> bool:
        """Return whether an env is in its lane."""
        return self.lanes is not None and env_id < len(self.slots) and self.lanes.is_in(env_id)

    # -- time -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Act on deadlines that have passed. What had arrived before has been handled."""
        if self.lanes is not None:
            self.lanes.expire()
        for slot in self.hosts.due():
            if not self.hosts.is_due(slot):
                continue  # settled together with another env of its host
            if slot.work is Work.ENDING:
                self.hosts.end(slot.group, ask=False)
            elif slot.work is Work.PAUSING:
                self.repair.proceed(slot)
            else:
                self._arrivals.time_out(slot)

    def stop(self) -> None:
        """All envs are VOID from now on; what was owed is cancelled."""
        self.hosts.forget_all()
        self.statistics.cancelled += self.statistics.outstanding
        self.delivery.in_hand = self._submission = None
        for slot in self.hosts.slots:
            slot.owed = False
            slot.timestep = slot.obs = slot.fresh = None  # they may be views of shared memory
            self.states.apply(slot.env_id, Event.CLOSE)
        self._orientation.detach()
        if self.lanes is not None:
            self.lanes.detach()
