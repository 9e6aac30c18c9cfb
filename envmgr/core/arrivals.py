"""What comes from hosts: replies are matched to requests, and everything is applied to the envs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.orientation import Orientation
from envmgr.core.payloads import (
    MAX_NOTICES,
    MalformedReplyError,
    description_of,
    failure_of,
    notice_of,
    reset_fields,
    step_fields,
)
from envmgr.core.repair import Repair
from envmgr.core.slots import NEVER, EnvSlot, HostGroup, Lost, Work
from envmgr.core.spares import Spares
from envmgr.core.stats import Statistics
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, Event, StateTable
from envmgr.spaces import ValueMismatchError
from envmgr.transport.base import Arrival, Garbage, HostDied, TimedOut
from envmgr.transport.process.last_words import warn_of_fault
from envmgr.types import EnvTimestep
from envmgr.wire.messages import UNANSWERED, FailureKind, Message, Op, RemoteFailure

logger = logging.getLogger("envmgr")

_AWAITED_IN: dict[int, frozenset[Work]] = {
    Op.HELLO: frozenset((Work.STARTING,)),
    Op.STEPPED: frozenset((Work.STEPPING, Work.CANCELLING)),
    Op.RESET_DONE: frozenset((Work.RESETTING,)),
    Op.RESULT: frozenset((Work.CALLING,)),
    Op.CLOSED: frozenset((Work.ENDING,)),
    Op.FAILED: frozenset(Work) - {Work.NONE, Work.PAUSING, Work.ENDING},
    Op.BEGAN: frozenset(Work) - {Work.NONE, Work.PAUSING, Work.ENDING},
}

_GOES_ON = frozenset((Op.BEGAN, Op.NOTICE))
"""Messages that do not say that a host is done with something."""


class Arrivals:
    """Applies arrivals.

    Args:
        hosts: which host serves which env.
        states: the states of all envs.
        statistics: where things are counted.
        orientation: spaces, and how observations are read.
        episodes: how they begin and end.
        repair: what follows failures.
        raise_non_finite: NaN or infinite values end the run.
        spares: told when they have been reset; None if there are none.

    Attributes:
        take_out: has all that is known of the envs of a host written into their slots, before the
            host is given up.
    """

    def __init__(
        self,
        hosts: Hosts,
        states: StateTable,
        statistics: Statistics,
        orientation: Orientation,
        episodes: Episodes,
        repair: Repair,
        *,
        raise_non_finite: bool,
        spares: Spares | None = None,
    ) -> None:
        self._hosts = hosts
        self._states = states
        self._statistics = statistics
        self._orientation = orientation
        self._episodes = episodes
        self._repair = repair
        self._raise_non_finite = raise_non_finite
        self._spares = spares
        self._noticed: set[str] = set()
        self.take_out: Callable[[HostGroup], None] = _leave_them
        self._handlers: dict[int, Callable[[EnvSlot, Any], None]] = {
            Op.HELLO: self._on_hello,
            Op.STEPPED: self.stepped,
            Op.RESET_DONE: self.reset_done,
            Op.RESULT: self._on_result,
            Op.FAILED: self._on_failed,
            Op.CLOSED: self._on_closed,
            Op.BEGAN: self._on_began,
        }

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host."""
        group = self._hosts.group_of(host_id)
        if group is None:
            return
        if type(arrival) is Message:
            slot = group.by_id.get(arrival.env_id)
            if slot is not None:
                self._on_message(slot, arrival)
            else:
                self._on_unexpected(self._hosts.blamed(group), arrival)
        elif type(arrival) is HostDied:
            self._on_death(group, arrival)
        elif type(arrival) is TimedOut:
            for slot in group.slots:
                if slot.request_id == arrival.request_id:
                    self._fail(slot, failures.timeout(slot, arrival.limit_s), Lost.HOST)
        elif type(arrival) is Garbage:
            self.break_off(self._hosts.blamed(group), arrival.reason)

    def _on_message(self, slot: EnvSlot, message: Message) -> None:
        op, _, generation, request_id, payload = message
        group = slot.group
        running = group.running
        if running is not None and op not in _GOES_ON:
            self._hosts.finished(group)
        if op == Op.NOTICE:
            self._checked(self._notice, slot, payload)
        elif group.is_ending and op != Op.CLOSED:
            self._statistics.dropped_replies += 1
        elif request_id == UNANSWERED:
            self._on_unawaited(slot, op, payload)
        elif (
            request_id != slot.request_id
            or generation != slot.generation
            or slot.work not in _AWAITED_IN.get(op, ())
        ):
            culprit = running or (self._hosts.blamed(group) if group.is_shared else slot)
            self._on_unexpected(culprit, message)
        else:
            self._checked(self._handlers[op], slot, payload)

    def _checked(
        self, handler: Callable[[EnvSlot, Any], None], slot: EnvSlot, payload: Any
    ) -> None:
        try:
            handler(slot, payload)
        except (ValueMismatchError, MalformedReplyError) as error:
            self.break_off(slot, str(error))

    def _on_unexpected(self, culprit: EnvSlot, message: Message) -> None:
        if message.request_id in culprit.group.superseded:  # asked of it before it changed places
            if message.op == Op.NOTICE:
                self._checked(self._notice, culprit, message.payload)
            return
        self._statistics.dropped_replies += 1
        op, env_id, generation, request_id, _ = message
        self.break_off(
            culprit,
            f"an unexpected reply (operation {op} to request {request_id} of env {env_id}, "
            f"generation {generation})",
        )

    def _notice(self, slot: EnvSlot, payload: Any) -> None:
        text = notice_of(payload)
        if self._repair.quiet:
            return
        if text not in self._noticed and len(self._noticed) < MAX_NOTICES:
            self._noticed.add(text)
            logger.warning("observations of %s: %s (reported once)", slot.name, text)

    def _on_unawaited(self, slot: EnvSlot, op: int, payload: Any) -> None:
        if op == Op.BEGAN:
            self._on_began(slot, payload)
        elif op == Op.FAILED and type(payload) is RemoteFailure:
            self._checked(self._on_unawaited_failure, slot, payload)

    def _on_unawaited_failure(self, slot: EnvSlot, payload: Any) -> None:
        logger.warning("repeating a request on a renewed env: %s", failure_of(payload).message)

    def _on_began(self, slot: EnvSlot, payload: Any) -> None:
        if slot.group.is_shared:
            self._hosts.began(slot)

    def _on_hello(self, slot: EnvSlot, payload: Any) -> None:
        slot.group.superseded.clear()
        description = description_of(payload)
        fits = self._orientation.fits(slot, description)
        if self._repair.launching and slot.generation == 0:
            self._hosts.settle(slot)
            return  # the engine goes on when all of them are there
        if not fits:
            reason = "a renewed env has other spaces than the one before it"
            self._fail(slot, failures.protocol(slot, reason), Lost.ENV)
            return
        self._hosts.settle(slot)
        self._orientation.introduce(slot)
        if slot.attended:
            self._episodes.begin(slot)
            return
        if self._states[slot.env_id] is EnvState.INIT:
            self._states.apply(slot.env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_worn_host(slot.group)

    def reset_done(self, slot: EnvSlot, payload: Any) -> None:
        """Apply the payload of RESET_DONE."""
        slot.group.superseded.clear()
        if slot.is_spare:
            self._kept(slot, payload)
            return
        reference, info = reset_fields(payload)
        obs = self._orientation.read(slot, reference)
        self._episodes.count_reset(slot)
        if slot.again:
            self._episodes.begin(slot)
            return
        self._episodes.use_up_seed(slot)
        self._hosts.settle(slot)
        if self._statistics.failing:
            self._statistics.note_ready(slot.env_id, slot.generation, self._hosts.clock())
        if slot.doomed is not None:
            slot.fresh = (obs, info)
            return
        slot.obs = obs
        slot.held = False
        self._episodes.begun(slot, info)

    def _kept(self, spare: EnvSlot, payload: Any) -> None:
        if payload is not None or self._spares is None:
            raise MalformedReplyError("it hands out what it was told to keep")
        self._spares.kept(spare)

    def stepped(self, slot: EnvSlot, payload: Any) -> None:
        """Apply the payload of STEPPED."""
        reference, reward, done, info, after = step_fields(payload)
        if slot.work is Work.CANCELLING:
            self._episodes.abandon(slot, after)
            return
        obs = self._orientation.read(slot, reference)
        slot.obs = obs
        slot.timestep = EnvTimestep(obs, reward, done, info)
        if not done:
            self._hosts.settle(slot)
            self._states.apply(slot.env_id, Event.STEPPED)
        else:
            self._episodes.end(slot, after)

    def stepped_on(self, slot: EnvSlot, message: Message) -> bool:
        """Apply a step after which an episode goes on; False if that is not all there is to it.

        Can be interrupted anywhere: until the last of this it counts as not applied.
        """
        _, _, generation, request_id, payload = message
        if (
            slot.work is not Work.STEPPING
            or request_id != slot.request_id
            or generation != slot.generation
        ):
            return False
        try:
            reference, reward, done, info, _ = step_fields(payload)
            if done:
                return False
            obs = self._orientation.read(slot, reference)
        except (ValueMismatchError, MalformedReplyError):
            return False
        slot.obs = obs
        slot.timestep = EnvTimestep(obs, reward, done, info)
        slot.deadline = NEVER
        slot.work = Work.NONE
        return True

    def _on_result(self, slot: EnvSlot, payload: Any) -> None:
        slot.result = payload
        self._repair.call_ended(slot)

    def _on_closed(self, slot: EnvSlot, payload: Any) -> None:
        """Nothing to do: its death follows, or the limit for closing passes."""

    def _on_failed(self, slot: EnvSlot, payload: Any) -> None:
        remote = failure_of(payload)
        if slot.work is Work.CALLING and remote.kind is FailureKind.NO_ATTRIBUTE:
            slot.result = remote
            self._repair.call_ended(slot)
            return
        failure = failures.reported(slot, remote)
        slot.group.superseded.clear()
        raises = self._raise_non_finite and not slot.is_spare
        if remote.kind is FailureKind.NON_FINITE and raises:
            self._repair.raise_at_once(failure)
        lost = Lost.ENV if remote.kind is FailureKind.EXITED else Lost.NOTHING
        self._fail(slot, failure, lost, remote.info)

    def _on_death(self, group: HostGroup, died: HostDied) -> None:
        was_ending = group.is_ending
        culprit = self._hosts.blamed(group)
        self._hosts.ended(group)
        if was_ending:
            warn_of_fault(died)
            self._repair.host_ended(group)
        else:
            self._fail(
                culprit, failures.crash(culprit, died), Lost.HOST, charged=not died.is_interrupt
            )

    def break_off(self, slot: EnvSlot, reason: str) -> None:
        """The host of an env has broken the protocol."""
        self.take_out(slot.group)
        self._fail(slot, failures.protocol(slot, reason), Lost.HOST)

    def time_out(self, slot: EnvSlot) -> None:
        """An env has exceeded the limit of what it is doing."""
        self._fail(slot, failures.timeout(slot, slot.limit_s), Lost.HOST)

    def _fail(
        self,
        slot: EnvSlot,
        failure: EnvFailure,
        lost: Lost,
        env_info: Any = None,
        *,
        charged: bool = True,
    ) -> None:
        if not slot.group.is_ending:  # else it has failed already, and its host is being replaced
            if lost is not Lost.NOTHING:
                self.take_out(slot.group)
            self._repair.fail(slot, failure, lost, env_info, charged=charged)


def _leave_them(group: HostGroup) -> None:
    """All that is known of envs is in their slots."""
