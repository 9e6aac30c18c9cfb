"""What comes from hosts: replies are matched to requests, and everything is applied to the envs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from envmgr.core import failures
from envmgr.core.answers import Answers
from envmgr.core.episodes import Episodes
from envmgr.core.failures import Lost
from envmgr.core.groups import HostGroup
from envmgr.core.hosts import Hosts
from envmgr.core.payloads import MalformedReplyError, failure_of
from envmgr.core.phases import Change, Phase
from envmgr.core.repair import Repair
from envmgr.core.replies import BlockReplies
from envmgr.core.slots import EnvSlot
from envmgr.core.stats import Statistics
from envmgr.errors import EnvFailure
from envmgr.spaces import ValueMismatchError
from envmgr.transport.base import Arrival, Garbage, HostDied, TimedOut
from envmgr.transport.process.last_words import warn_of_fault
from envmgr.wire.messages import UNANSWERED, FailureKind, Message, Op, RemoteFailure

logger = logging.getLogger("envmgr")

_NOT_BUSY = {Phase.IDLE, Phase.PAUSING, Phase.ENDING}
_STEPS = (Phase.STEPPING, Phase.CANCELLING)
AWAITED_IN: dict[int, frozenset[Phase]] = {
    Op.HELLO: frozenset((Phase.STARTING,)),
    Op.STEPPED: frozenset(_STEPS),
    Op.RESET_DONE: frozenset((Phase.RESETTING,)),
    Op.RESULT: frozenset((Phase.CALLING,)),
    Op.CLOSED: frozenset((Phase.ENDING,)),
    **dict.fromkeys((Op.FAILED, Op.BEGAN), frozenset(Phase) - _NOT_BUSY),
}

_ASIDE = frozenset((Op.NOTICE, Op.SAVED))
_GOES_ON = frozenset((Op.BEGAN, *_ASIDE))
"""Messages that do not say that a host is done with something; those aside answer nothing."""


class Arrivals:
    """Applies what arrives by message, and what the block holds besides posted steps.

    Args:
        hosts: which host serves which env.
        statistics: where things are counted.
        answers: what the answers of hosts mean.
        episodes: how they begin.
        repair: what follows failures.
        raise_non_finite: NaN or infinite values end the run.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        answers: Answers,
        episodes: Episodes,
        repair: Repair,
        *,
        raise_non_finite: bool,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._statistics = statistics
        self._answers = answers
        self._episodes = episodes
        self._repair = repair
        self._raise_non_finite = raise_non_finite
        self._replies: BlockReplies | None = None
        self._handlers: dict[int, Callable[[EnvSlot, Any], None]] = {
            Op.HELLO: self._on_hello,
            Op.STEPPED: answers.stepped,
            Op.RESET_DONE: answers.reset_done,
            Op.RESULT: answers.result,
            Op.FAILED: self._on_failed,
            Op.CLOSED: self._on_closed,
            Op.BEGAN: self._on_began,
            Op.NOTICE: answers.notice,
            Op.SAVED: answers.saved,
        }

    def share(self, replies: BlockReplies | None) -> None:
        """Look at what envs reply in the block, too, from now on; None: not any more."""
        self._replies = replies

    # -- messages -----------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host; what it had replied in the block comes before that."""
        group = self._hosts.group_of_host.get(host_id)
        if group is None:
            return
        if type(arrival) is Message:
            slot = group.by_id.get(arrival.env_id)
            if slot is None:
                self._on_unexpected(group.blamed(), arrival)
                return
            if arrival.op not in _ASIDE:
                self._apply_replied((slot,))
            self._on_message(slot, arrival)
            return
        self._apply_replied(group.slots)
        self._find_running(group)
        if type(arrival) is HostDied:
            self._on_death(group, arrival)
        elif type(arrival) is TimedOut:
            for slot in (s for s in group.slots if s.request_id == arrival.request_id):
                self._fail(slot, failures.timeout(slot, *arrival[1:]), Lost.HOST)
        elif type(arrival) is Garbage:
            self._break_off(group.blamed(), arrival.reason)

    def _on_message(self, slot: EnvSlot, message: Message) -> None:
        op, _, generation, request_id, payload = message
        group, running = slot.group, slot.group.running
        if running is not None and op not in _GOES_ON:
            self._hosts.limits.finished(group)
        if op in _ASIDE:
            self._checked(self._handlers[op], slot, payload)
        elif group.is_ending and op != Op.CLOSED:
            self._statistics.dropped_replies += 1
        elif request_id == UNANSWERED:
            self._on_unawaited(slot, op, payload)
        elif (
            request_id != slot.request_id
            or generation != slot.generation
            or slot.phase not in AWAITED_IN.get(op, ())
        ):
            culprit = running or (group.blamed() if group.is_shared else slot)
            self._on_unexpected(culprit, message)
        else:
            self._checked(self._handlers[op], slot, payload)

    def _checked(
        self, handler: Callable[[EnvSlot, Any], None], slot: EnvSlot, payload: Any
    ) -> None:
        try:
            handler(slot, payload)
        except (ValueMismatchError, MalformedReplyError) as error:
            self._break_off(slot, str(error))

    def _on_unexpected(self, culprit: EnvSlot, message: Message) -> None:
        if message.request_id in culprit.group.superseded:  # asked of it before it changed places
            if message.op == Op.NOTICE:
                self._checked(self._answers.notice, culprit, message.payload)
            return
        self._statistics.dropped_replies += 1
        op, env_id, generation, request_id, _ = message
        self._break_off(
            culprit,
            f"an unexpected reply (operation {op} to request {request_id} of env {env_id}, "
            f"generation {generation})",
        )

    def _on_unawaited(self, slot: EnvSlot, op: int, payload: Any) -> None:
        if op == Op.BEGAN:
            self._on_began(slot, payload)
        elif op == Op.FAILED and type(payload) is RemoteFailure:
            self._checked(self._on_unawaited_failure, slot, payload)

    def _on_unawaited_failure(self, slot: EnvSlot, payload: Any) -> None:
        logger.warning("repeating a request on a renewed env: %s", failure_of(payload).message)

    def _on_began(self, slot: EnvSlot, payload: Any) -> None:
        if slot.group.is_shared:
            self._hosts.limits.began(slot)

    def _on_hello(self, slot: EnvSlot, payload: Any) -> None:
        if not self._answers.hello(slot, payload):
            reason = "a renewed env has other spaces than the one before it"
            self._fail(slot, failures.protocol(slot, reason, loses_host=False), Lost.ENV)

    def _on_closed(self, slot: EnvSlot, payload: Any) -> None:
        """Nothing to do: its death follows, or the limit for closing passes."""

    # -- failures -----------------------------------------------------------------------------

    def _on_failed(self, slot: EnvSlot, payload: Any) -> None:
        remote = failure_of(payload)
        if slot.phase is Phase.CALLING and remote.kind is FailureKind.NO_ATTRIBUTE:
            self._answers.result(slot, remote)
            return
        failure = failures.reported(slot, remote)
        slot.group.superseded.clear()
        raises = self._raise_non_finite and not slot.is_spare
        if remote.kind is FailureKind.NON_FINITE and raises:
            self._repair.raise_at_once(failure)
        lost = Lost.ENV if remote.kind is FailureKind.EXITED else Lost.NOTHING
        lost = Lost.HOST if remote.of_batch else lost
        self._fail(slot, failure, lost, remote.info)

    def _on_death(self, group: HostGroup, died: HostDied) -> None:
        was_ending, culprit = group.is_ending, group.blamed()
        self._hosts.ended(group, lingers=died.lingers)
        if was_ending:
            warn_of_fault(died)
            self._repair.renewals.host_ended(group)
        else:
            charged = not (died.is_interrupt or died.with_others)
            self._fail(culprit, failures.crash(culprit, died), Lost.HOST, charged=charged)

    def _find_running(self, group: HostGroup) -> None:
        """Something has happened to a host: which of its envs was running then?"""
        if self._replies is not None and group.is_shared and not group.is_retired:
            group.running = group.running or group.by_id.get(self._replies.running_in(group.index))

    def _break_off(self, slot: EnvSlot, reason: str) -> None:
        """The host of an env has broken the protocol."""
        self._apply_replied(other for other in slot.group.slots if other is not slot)
        self._hosts.take_over(slot)
        self._fail(slot, failures.protocol(slot, reason), Lost.HOST)

    def time_out(self, slot: EnvSlot) -> None:
        """An env has exceeded the limit of what it is doing, unless it has just done it."""
        before, group = slot.phase, slot.group
        self._apply_replied(group.slots)
        if slot.phase not in (before, Phase.STEPPING):
            self._hosts.limits.finished(group)
        elif not group.is_ending:
            where = self._hosts.transport.whereabouts(group.host_id or 0)
            self._fail(slot, failures.timeout(slot, slot.limit_s, where), Lost.HOST)

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
            if lost is not Lost.NOTHING or slot.batch is not None:  # whose rows may all be lost
                self._apply_replied(other for other in slot.group.slots if other is not slot)
            self._repair.fail(slot, failure, lost, env_info, charged=charged)

    # -- the block ----------------------------------------------------------------------------

    def begin_episodes(self) -> bool:
        """Have envs be ready whose hosts have reset them, as far as there is nothing else to it.

        Can be interrupted anywhere, and called again.

        Returns:
            Whether all is said; if not, one of the resets has more to it: `collect` looks at it.
        """
        replies, record = self._replies, self._record
        n_resetting, n_late = record.phases.column.count(Phase.RESETTING), record.late.count(1)
        if replies is None or n_resetting == n_late:  # these reply with the next step of others
            return True
        replied = replies.resets_of(record)
        if not replied:
            return True
        begun, infos = replies.resets(replied)
        if record.again or record.doomed or self._statistics.failing:
            begun = {env_id: place for env_id, place in begun.items() if self._is_well(env_id)}
            infos = {env_id: info for env_id, info in infos.items() if env_id in begun}
        self._episodes.begun_plainly(begun, infos)
        record.observed.began(begun)
        record.phases.apply_all(begun, Change.SETTLE)  # last: until then it is done again
        return len(begun) == len(replied)

    def _is_well(self, env_id: int) -> bool:
        record = self._record
        together = record.together if record.doomed else None
        if together is not None and together.doomed_with(env_id) is not None:
            return False
        odd = (record.again, record.doomed, self._statistics.failing)
        return not any(env_id in some for some in odd)

    @property
    def have_replied(self) -> bool:
        """Whether `collect` finds steps in the block that are looked after by themselves."""
        replies, column = self._replies, self._record.phases.column
        if replies is None or not (Phase.STEPPING in column or Phase.CANCELLING in column):
            return False
        return bool(replies.steps_of(self._record))

    def collect(self) -> None:
        """Apply what has arrived in the block, but for posted steps; not to be interrupted."""
        replies, slots = self._replies, self._record.slots
        if replies is None:
            return
        if not self.begin_episodes():
            for env_id in replies.resets_of(self._record):
                self._apply_reply(slots[env_id])
        for env_id in replies.steps_of(self._record):
            self._apply_reply(slots[env_id])

    def set_aside(self, env_id: int) -> None:
        """Apply the reply to a posted step that cannot be taken with others."""
        slot = self._record.slots[env_id]
        self._hosts.take_over(slot)
        self._apply_reply(slot)

    def set_aside_posted(self) -> None:
        """Look after all posted steps by themselves: nobody takes them before something else."""
        for env_id in self._record.phases.ids_in(Phase.POSTED):
            self.set_aside(env_id)

    def _apply_reply(self, slot: EnvSlot) -> None:
        reason = self._reply_of(slot)
        if reason is not None:
            self._break_off(slot, reason)

    def _apply_replied(self, slots: Iterable[EnvSlot]) -> None:
        """Apply what envs have replied, and look after their posted steps from now on.

        What is malformed is left: their host is about to be given up.
        """
        if self._replies is not None:
            for slot in slots:
                if not slot.is_spare:
                    self._hosts.take_over(slot)
                    self._reply_of(slot)

    def _reply_of(self, slot: EnvSlot) -> str | None:
        """Apply what an env has replied in the block, if anything; return what is wrong with it."""
        replies, env_id = self._replies, slot.env_id
        if replies is None:
            return None
        try:
            if slot.phase in _STEPS and replies.has_step(env_id, slot.token):
                self._answers.stepped(slot, replies.step(env_id))
            if slot.phase is Phase.RESETTING and replies.has_reset(env_id, slot.token):
                self._answers.reset_done(slot, replies.reset(env_id))
        except (ValueMismatchError, MalformedReplyError) as error:
            return str(error)
        return None
