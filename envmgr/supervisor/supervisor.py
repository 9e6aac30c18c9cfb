"""The supervisor: owns the hosts, matches replies to requests, and is the only writer of states.

It does not wait and has no threads: the engine calls `handle` with what arrived and `expire` when
time has passed. Nothing here depends on a process or a real clock, so the unit tests drive it with
a fake transport and a clock they move by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envmgr.errors import EnvFailure, LaunchError, SpaceMismatchError
from envmgr.lifecycle import EnvState, Event, StateTable, is_ready
from envmgr.observations import ObservationReader, plan_placements
from envmgr.policy import FailurePolicy
from envmgr.protocol import (
    AfterStep,
    EnvDescription,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetOrder,
)
from envmgr.spaces import ValueMismatchError
from envmgr.supervisor import failures
from envmgr.supervisor.hosts import UNANSWERED, Hosts
from envmgr.supervisor.repair import Repair
from envmgr.supervisor.rules import EpisodeRules
from envmgr.supervisor.slots import EnvSlot, Next, Work
from envmgr.supervisor.stats import Statistics
from envmgr.transport.base import Arrival, Garbage, HostDied, TimedOut
from envmgr.types import EnvTimestep

logger = logging.getLogger("envmgr")


class Supervisor:
    """The envs of one launched manager.

    Args:
        hosts: to speak to hosts.
        rules: of episodes and observations.
        policy: of failures.
        env_num: number of envs.

    Attributes:
        states: the state of each env_id; changed only here and in `repair`.
        slots: what is known of each env_id.
        statistics: counters since launch.
        repair: what follows failures.
        descriptions: what each env said of itself, by env_id.
    """

    def __init__(
        self, hosts: Hosts, rules: EpisodeRules, policy: FailurePolicy, env_num: int
    ) -> None:
        self.hosts = hosts
        self.rules = rules
        self.states = StateTable(env_num)
        self.slots = [EnvSlot(i) for i in range(env_num)]
        self.statistics = Statistics()
        self.repair = Repair(
            hosts,
            self.states,
            policy,
            self.statistics,
            auto_reset=rules.auto_reset,
            begin_reset=self._begin_reset,
        )
        self.descriptions: dict[int, EnvDescription] = {}
        self._replayed: dict[int, list[tuple[Op, Any]]] = {}
        self._readers: list[ObservationReader] = []
        self._placements: list[Any] = [None] * env_num
        self._noticed: set[str] = set()
        self._handlers: dict[int, Callable[[EnvSlot, Any], None]] = {
            Op.HELLO: self._on_hello,
            Op.STEPPED: self._on_stepped,
            Op.RESET_DONE: self._on_reset_done,
            Op.RESULT: self._on_result,
            Op.FAILED: self._on_failed,
            Op.CLOSED: self._on_closed,
        }
        self._replies: dict[int, frozenset[Work]] = {
            Op.HELLO: frozenset((Work.STARTING,)),
            Op.STEPPED: frozenset((Work.STEPPING, Work.CANCELLING)),
            Op.RESET_DONE: frozenset((Work.RESETTING,)),
            Op.RESULT: frozenset((Work.CALLING,)),
            Op.CLOSED: frozenset((Work.ENDING,)),
            Op.FAILED: frozenset(Work) - {Work.NONE, Work.PAUSING, Work.ENDING},
        }

    # -- launch -----------------------------------------------------------------------------

    def start_hosts(self, env_ids: Iterable[int]) -> None:
        """Begin to start hosts of envs that have none yet.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        missing = [s for s in map(self.slots.__getitem__, env_ids) if s.host_id is None]
        self.hosts.start(missing)
        self.states.apply_all([slot.env_id for slot in missing], Event.LAUNCH)

    def place_observations(self, *, same_spaces: bool) -> None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Raises:
            SpaceMismatchError: they differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        described = [self.descriptions[slot.env_id] for slot in self.slots]
        if same_spaces:
            _check_same_spaces(described)
        in_caller = self.hosts.transport.runs_in_caller
        self._readers = [
            ObservationReader(d.observation_space, copy_free_form=in_caller) for d in described
        ]
        placements, nbytes = plan_placements([reader.layout for reader in self._readers])
        try:
            memory = self.hosts.transport.place(nbytes)
        except OSError as error:
            raise LaunchError(
                f"{nbytes / 2**20:.1f} MiB of shared memory for the observations of "
                f"{len(self.slots)} envs cannot be had: {error}. Free memory, use fewer envs, or "
                "set shared_memory: false."
            ) from error
        if memory is None:
            return
        for reader, placement in zip(self._readers, placements, strict=True):
            if placement is not None:
                reader.attach(memory, placement, copy_on_get=self.rules.copy_on_get)
        self._placements = placements

    def begin_episodes(self) -> None:
        """Have every env reset for the first time; its host has said HELLO."""
        for slot in self.slots:
            self._attach(slot)  # what is repeated on later envs has been done on these
            slot.seed, slot.new_seed = slot.new_seed, None
            self._begin_reset(slot)

    def _introduce(self, slot: EnvSlot) -> None:
        """Tell a renewed env what it has to know before its first reset."""
        self._attach(slot)
        for op, payload in self._replayed.get(slot.env_id, ()):
            self.hosts.tell(slot, op, payload)

    def _attach(self, slot: EnvSlot) -> None:
        placement = self._placements[slot.env_id]
        if placement is not None:
            self.hosts.tell(slot, Op.ATTACH, placement)

    def replay(self, env_id: int, op: Op, payload: Any) -> None:
        """Have a request repeated on every later env of this env_id, before its first reset."""
        self._replayed.setdefault(env_id, []).append((op, payload))

    # -- steps ------------------------------------------------------------------------------

    def submit_steps(self, prepared: Sequence[tuple[EnvSlot, tuple[int, Any] | None]]) -> None:
        """Send actions to ready envs; every one of them is owed a timestep from now on.

        Args:
            prepared: envs with their encoded actions, from `prepare_step`.
        """
        for slot, frame in prepared:
            slot.owed = True
            if slot.doomed is None and frame is not None:
                self.hosts.submit_step(slot, frame)
            else:
                self._settle_doomed(slot)
        self.statistics.actions += len(prepared)

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

    def ready_ids(self) -> list[int]:
        """Return the envs that take an action now, ascending."""
        slots = self.slots
        return [i for i in self.states.ids_in(EnvState.RUN) if not slots[i].owed]

    def is_ready(self, env_id: int) -> bool:
        """Return whether an env takes an action now."""
        return is_ready(self.states[env_id], pending=self.slots[env_id].owed)

    def owed_ids(self) -> list[int]:
        """Return the envs that owe a timestep, ascending."""
        return [slot.env_id for slot in self.slots if slot.owed]

    def deliver(self, env_ids: Iterable[int]) -> dict[int, EnvTimestep]:
        """Hand out the timesteps that have arrived, in the order of `env_ids`."""
        delivered: dict[int, EnvTimestep] = {}
        slots = self.slots
        for env_id in env_ids:
            slot = slots[env_id]
            timestep = slot.timestep
            if timestep is not None and not slot.held:
                delivered[env_id] = timestep
                slot.timestep = None
                slot.owed = False
        self.statistics.timesteps += len(delivered)
        return delivered

    # -- resets -----------------------------------------------------------------------------

    def begin_explicit_reset(self, env_id: int, params: dict[str, Any] | None) -> None:
        """Reset an env because its user says so.

        Args:
            env_id: which.
            params: keyword arguments of this and of later automatic resets; None keeps those
                that were given before.
        """
        slot = self.slots[env_id]
        joins = params is None and slot.new_seed is None
        if params is not None:
            slot.reset_params = dict(params)
        if slot.new_seed is not None:
            slot.seed = slot.base_seed = slot.new_seed
            slot.new_seed = None
        self._cancel(slot)
        self._revive(slot)
        slot.attended = True
        self.states.apply(env_id, Event.BEGIN_RESET)
        if slot.work is Work.NONE:
            if slot.host_id is None:
                self.repair.forgive(slot)
                self.repair.renew(slot, new_host=True)
            else:
                self._begin_reset(slot)
        elif slot.work is Work.ENDING and slot.following is Next.NOTHING:
            self.repair.forgive(slot)
            slot.following = Next.RENEW_HOST
        elif slot.work in (Work.RESETTING, Work.CANCELLING):
            slot.again = slot.again or not joins

    def _cancel(self, slot: EnvSlot) -> None:
        """Give up the timestep that is owed, if there is one."""
        if not slot.owed:
            return
        slot.owed = slot.held = False
        self.statistics.cancelled += 1
        if slot.timestep is not None:
            slot.timestep = None
        else:
            self.hosts.cancel(slot)

    def _revive(self, slot: EnvSlot) -> None:
        """Take back what was decided about an env that its user now resets."""
        slot.doomed = None
        slot.fresh = None
        slot.dropped = False
        if self.states[slot.env_id] is EnvState.DONE:
            slot.episodes_done = 0

    def _begin_reset(self, slot: EnvSlot) -> None:
        slot.again = False  # whatever was new goes with this one
        if slot.doomed is None:
            self.states.apply(slot.env_id, Event.BEGIN_RESET)
        seed = slot.seed
        if seed is None and slot.new_generation and slot.base_seed is not None:
            seed = derived_seed(slot.base_seed, slot.env_id, slot.generation, slot.episode)
        order = ResetOrder(slot.reset_params, seed, self.rules.dynamic_seed, self._plan(slot))
        self.hosts.request(slot, Op.RESET, order, Work.RESETTING)

    def _plan(self, slot: EnvSlot) -> EpisodePlan:
        left = self.rules.episode_num - slot.episodes_done - 1
        return EpisodePlan(self.rules.auto_reset, left, slot.reset_params)

    # -- calls ------------------------------------------------------------------------------

    def is_callable(self, env_id: int) -> bool:
        """Return whether an env's host can take a call now."""
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
        slots = [self.slots[i] for i in env_ids]
        prepared = [self.hosts.prepare(s, op, p) for s, p in zip(slots, payloads, strict=True)]
        for slot, frame in zip(slots, prepared, strict=True):
            slot.result = None
            self.hosts.submit(slot, Work.CALLING, frame)

    # -- arrivals ---------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host."""
        slot = self.hosts.slot_of(host_id)
        if slot is None:
            return
        if type(arrival) is Message:
            self._on_message(slot, arrival)
        elif type(arrival) is HostDied:
            self._on_death(slot, arrival)
        elif type(arrival) is TimedOut and arrival.request_id == slot.request_id:
            self._fail(slot, failures.timeout(slot, arrival.limit_s), host_lost=True)
        elif type(arrival) is Garbage:
            self._break_off(slot, arrival.reason)

    def _on_message(self, slot: EnvSlot, message: Message) -> None:
        op, env_id, generation, request_id, payload = message
        if op == Op.NOTICE:
            self._notice(slot, payload)
        elif slot.work is Work.ENDING and op != Op.CLOSED:
            self.statistics.dropped_replies += 1
        elif request_id == UNANSWERED:
            self._on_unawaited(slot, op, payload)
        elif (
            request_id != slot.request_id
            or generation != slot.generation
            or env_id != slot.env_id
            or slot.work not in self._replies.get(op, ())
        ):
            self.statistics.dropped_replies += 1
            self._break_off(
                slot,
                f"an unexpected reply (operation {op} to request {request_id} of env {env_id}, "
                f"generation {generation})",
            )
        else:
            try:
                self._handlers[op](slot, payload)
            except (ValueMismatchError, _MalformedReplyError) as error:
                self._break_off(slot, str(error))

    def _notice(self, slot: EnvSlot, payload: Any) -> None:
        text = str(payload)
        if text not in self._noticed:
            self._noticed.add(text)
            logger.warning("observations of env %d: %s (reported once)", slot.env_id, text)

    def _on_unawaited(self, slot: EnvSlot, op: int, payload: Any) -> None:
        if op == Op.FAILED and isinstance(payload, RemoteFailure):
            logger.warning("repeating a request on a renewed env: %s", payload.message)

    def _on_hello(self, slot: EnvSlot, description: Any) -> None:
        if not isinstance(description, EnvDescription):
            raise _MalformedReplyError("its first reply does not describe an env")
        known = self.descriptions.setdefault(slot.env_id, description)
        if self.repair.launching and slot.generation == 0:
            self.hosts.settle(slot)
            return  # the engine goes on when all of them are there
        if not _same_spaces(known, description):
            self._break_off(slot, "a renewed env has other spaces than the one before it")
            return
        self.hosts.settle(slot)
        self._introduce(slot)
        if slot.attended:
            self._begin_reset(slot)
        elif self.states[slot.env_id] is EnvState.INIT:
            self.states.apply(slot.env_id, Event.REPAIRED_UNATTENDED)

    def _on_reset_done(self, slot: EnvSlot, payload: Any) -> None:
        reference, info = _fields(payload, 2)
        obs = self._readers[slot.env_id].read(reference)
        slot.attempts = 0
        slot.renewals_in_a_row = 0
        slot.episode += 1
        self.statistics.resets += 1
        if slot.again:
            self._begin_reset(slot)
            return
        slot.seed = None
        slot.new_generation = False
        self.hosts.settle(slot)
        if slot.doomed is not None:
            slot.fresh = (obs, info)
            return
        slot.obs = obs
        slot.reset_info = info
        slot.held = False
        self.states.apply(slot.env_id, Event.RESET_SUCCEEDED)

    def _on_stepped(self, slot: EnvSlot, payload: Any) -> None:
        reference, reward, done, info, after = _fields(payload, 5)
        if slot.work is Work.CANCELLING:
            self._after_cancelled_step(slot, after)
            return
        obs = self._readers[slot.env_id].read(reference)
        slot.obs = obs
        slot.timestep = EnvTimestep(obs, reward, done, info)
        if not done:
            self.hosts.settle(slot)
            self.states.apply(slot.env_id, Event.STEPPED)
        else:
            self._end_episode(slot, after)

    def _end_episode(self, slot: EnvSlot, after: int) -> None:
        slot.episodes_done += 1
        self.statistics.episodes += 1
        if slot.episodes_done >= self.rules.episode_num:
            self.states.apply(slot.env_id, Event.BUDGET_SPENT)
            self.hosts.settle(slot)
            return
        if self.rules.auto_reset:
            self.states.apply(slot.env_id, Event.EPISODE_ENDED)
            slot.held = self.rules.reset_inplace
        else:
            self.states.apply(slot.env_id, Event.EPISODE_ENDED_UNATTENDED)
        slot.attended = self.rules.auto_reset
        if after == AfterStep.RESETS:
            self.hosts.begin(slot, Work.RESETTING)
        elif after == AfterStep.WANTS_RECYCLING:
            self.statistics.recycled += 1
            self.hosts.end(slot, Next.RENEW_HOST, ask=True)
        elif self.rules.auto_reset:
            self._begin_reset(slot)
        else:
            self.hosts.settle(slot)

    def _after_cancelled_step(self, slot: EnvSlot, after: int) -> None:
        if after == AfterStep.RESETS:  # the host has begun one by itself
            self.hosts.begin(slot, Work.RESETTING)
        elif after == AfterStep.WANTS_RECYCLING:
            self.statistics.recycled += 1
            self.hosts.end(slot, Next.RENEW_HOST, ask=True)
        else:
            self._begin_reset(slot)

    def _on_result(self, slot: EnvSlot, payload: Any) -> None:
        slot.result = payload
        self.repair.call_ended(slot)

    def _on_closed(self, slot: EnvSlot, payload: Any) -> None:
        """Nothing to do: its death follows, or the limit for closing passes."""

    def _on_failed(self, slot: EnvSlot, remote: Any) -> None:
        if not isinstance(remote, RemoteFailure):
            raise _MalformedReplyError("it reports a failure that is none")
        if slot.work is Work.CALLING and remote.kind is FailureKind.NO_ATTRIBUTE:
            slot.result = remote
            self.repair.call_ended(slot)
            return
        failure = failures.reported(slot, remote)
        if remote.kind is FailureKind.NON_FINITE and self.rules.raise_non_finite:
            self.repair.raise_at_once(failure)
        lost = remote.kind is FailureKind.EXITED
        self._fail(slot, failure, host_lost=lost, env_info=remote.info)

    def _on_death(self, slot: EnvSlot, died: HostDied) -> None:
        self.hosts.ended(slot)
        if slot.work is Work.ENDING:
            self.repair.host_ended(slot)
        else:
            self._fail(slot, failures.crash(slot, died), host_lost=True)

    def _break_off(self, slot: EnvSlot, reason: str) -> None:
        self._fail(slot, failures.protocol(slot, reason), host_lost=True)

    def _fail(
        self, slot: EnvSlot, failure: EnvFailure, *, host_lost: bool, env_info: Any = None
    ) -> None:
        if slot.work is Work.ENDING:
            return  # it has failed already, and its host is being replaced
        self.repair.fail(slot, failure, host_lost=host_lost, env_info=env_info)

    # -- time -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Act on deadlines that have passed. What had arrived before has been handled."""
        for slot in self.hosts.due(self.slots):
            if slot.work is Work.PAUSING:
                self.repair.proceed(slot)
            elif slot.work is Work.ENDING:
                self.hosts.end(slot, slot.following, slot.pause_s, ask=False)
            else:
                self._fail(slot, failures.timeout(slot, slot.limit_s), host_lost=True)

    def stop(self) -> None:
        """All envs are VOID from now on; what was owed is cancelled."""
        self.hosts.forget_all()
        self.statistics.cancelled += sum(slot.owed for slot in self.slots)
        for slot in self.slots:
            slot.owed = False
            slot.timestep = None
            self.states.apply(slot.env_id, Event.CLOSE)
        for reader in self._readers:
            reader.detach()


class _MalformedReplyError(ValueError):
    """A reply whose payload is not what the protocol says."""


def _fields(payload: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(payload, tuple) or len(payload) != count:
        raise _MalformedReplyError(f"a payload of {type(payload).__name__} is malformed")
    return payload


def derived_seed(base_seed: int, env_id: int, generation: int, episode: int) -> int:
    """Return the seed of the first reset of a generation after the first one: 32 bits."""
    sequence = np.random.SeedSequence((base_seed, env_id, generation, episode))
    return int(sequence.generate_state(1)[0])


def _same_spaces(one: EnvDescription, other: EnvDescription) -> bool:
    return bool(
        one.observation_space == other.observation_space and one.action_space == other.action_space
    )


def _check_same_spaces(described: Sequence[EnvDescription]) -> None:
    first = described[0]
    for env_id, description in enumerate(described):
        for name in ("observation_space", "action_space"):
            expected, found = getattr(first, name), getattr(description, name)
            if expected != found:
                raise SpaceMismatchError(
                    f"env {env_id} has {name} {found}, env 0 has {expected}. All envs of a "
                    "manager need equal spaces; set same_spaces: false if this is intended."
                )
