"""What comes from hosts: replies are matched to requests, and everything is applied to the envs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState, Event, StateTable
from envmgr.protocol import UNANSWERED, EnvDescription, FailureKind, Message, Op, RemoteFailure
from envmgr.spaces import ValueMismatchError
from envmgr.supervisor import failures
from envmgr.supervisor.episodes import Episodes
from envmgr.supervisor.hosts import Hosts
from envmgr.supervisor.orientation import Orientation
from envmgr.supervisor.repair import Repair
from envmgr.supervisor.slots import EnvSlot, Work
from envmgr.supervisor.stats import Statistics
from envmgr.transport.base import Arrival, Garbage, HostDied, TimedOut
from envmgr.types import EnvTimestep

logger = logging.getLogger("envmgr")

_AWAITED_IN: dict[int, frozenset[Work]] = {
    Op.HELLO: frozenset((Work.STARTING,)),
    Op.STEPPED: frozenset((Work.STEPPING, Work.CANCELLING)),
    Op.RESET_DONE: frozenset((Work.RESETTING,)),
    Op.RESULT: frozenset((Work.CALLING,)),
    Op.CLOSED: frozenset((Work.ENDING,)),
    Op.FAILED: frozenset(Work) - {Work.NONE, Work.PAUSING, Work.ENDING},
}


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
    ) -> None:
        self._hosts = hosts
        self._states = states
        self._statistics = statistics
        self._orientation = orientation
        self._episodes = episodes
        self._repair = repair
        self._raise_non_finite = raise_non_finite
        self._noticed: set[str] = set()
        self._handlers: dict[int, Callable[[EnvSlot, Any], None]] = {
            Op.HELLO: self._on_hello,
            Op.STEPPED: self._on_stepped,
            Op.RESET_DONE: self._on_reset_done,
            Op.RESULT: self._on_result,
            Op.FAILED: self._on_failed,
            Op.CLOSED: self._on_closed,
        }

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host."""
        slot = self._hosts.slot_of(host_id)
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
            self._statistics.dropped_replies += 1
        elif request_id == UNANSWERED:
            self._on_unawaited(slot, op, payload)
        elif (
            request_id != slot.request_id
            or generation != slot.generation
            or env_id != slot.env_id
            or slot.work not in _AWAITED_IN.get(op, ())
        ):
            self._statistics.dropped_replies += 1
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
        fits = self._orientation.fits(slot, description)
        if self._repair.launching and slot.generation == 0:
            self._hosts.settle(slot)
            return  # the engine goes on when all of them are there
        if not fits:
            self._break_off(slot, "a renewed env has other spaces than the one before it")
            return
        self._hosts.settle(slot)
        self._orientation.introduce(slot)
        if slot.attended:
            self._episodes.begin(slot)
        elif self._states[slot.env_id] is EnvState.INIT:
            self._states.apply(slot.env_id, Event.REPAIRED_UNATTENDED)

    def _on_reset_done(self, slot: EnvSlot, payload: Any) -> None:
        reference, info = _fields(payload, 2)
        obs = self._orientation.read(slot, reference)
        slot.attempts = 0
        slot.renewals_in_a_row = 0
        slot.episode += 1
        self._statistics.resets += 1
        if slot.again:
            self._episodes.begin(slot)
            return
        slot.seed = None
        slot.new_generation = False
        self._hosts.settle(slot)
        if slot.doomed is not None:
            slot.fresh = (obs, info)
            return
        slot.obs = obs
        slot.reset_info = info
        slot.held = False
        self._states.apply(slot.env_id, Event.RESET_SUCCEEDED)

    def _on_stepped(self, slot: EnvSlot, payload: Any) -> None:
        reference, reward, done, info, after = _fields(payload, 5)
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

    def _on_result(self, slot: EnvSlot, payload: Any) -> None:
        slot.result = payload
        self._repair.call_ended(slot)

    def _on_closed(self, slot: EnvSlot, payload: Any) -> None:
        """Nothing to do: its death follows, or the limit for closing passes."""

    def _on_failed(self, slot: EnvSlot, remote: Any) -> None:
        if not isinstance(remote, RemoteFailure):
            raise _MalformedReplyError("it reports a failure that is none")
        if slot.work is Work.CALLING and remote.kind is FailureKind.NO_ATTRIBUTE:
            slot.result = remote
            self._repair.call_ended(slot)
            return
        failure = failures.reported(slot, remote)
        if remote.kind is FailureKind.NON_FINITE and self._raise_non_finite:
            self._repair.raise_at_once(failure)
        lost = remote.kind is FailureKind.EXITED
        self._fail(slot, failure, host_lost=lost, env_info=remote.info)

    def _on_death(self, slot: EnvSlot, died: HostDied) -> None:
        self._hosts.ended(slot)
        if slot.work is Work.ENDING:
            self._repair.host_ended(slot)
        else:
            self._fail(slot, failures.crash(slot, died), host_lost=True)

    def _break_off(self, slot: EnvSlot, reason: str) -> None:
        self._fail(slot, failures.protocol(slot, reason), host_lost=True)

    def time_out(self, slot: EnvSlot) -> None:
        """An env has exceeded the limit of what it is doing."""
        self._fail(slot, failures.timeout(slot, slot.limit_s), host_lost=True)

    def _fail(
        self, slot: EnvSlot, failure: EnvFailure, *, host_lost: bool, env_info: Any = None
    ) -> None:
        if slot.work is Work.ENDING:
            return  # it has failed already, and its host is being replaced
        self._repair.fail(slot, failure, host_lost=host_lost, env_info=env_info)


class _MalformedReplyError(ValueError):
    """A reply whose payload is not what the protocol says."""


def _fields(payload: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(payload, tuple) or len(payload) != count:
        raise _MalformedReplyError(f"a payload of {type(payload).__name__} is malformed")
    return payload
