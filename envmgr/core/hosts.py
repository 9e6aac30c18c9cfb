"""Hosts of envs: which host serves which env_ids, requests to them, and their deadlines."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from envmgr.core.deadlines import Limits, announced_in
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.statistics import Tracer
from envmgr.core.table import NEVER, EnvSlot, HostGroup, Record, host_groups, names_of
from envmgr.policy import Deadlines
from envmgr.transport.base import Transport
from envmgr.types import Clock, EnvFactory
from envmgr.wire.block import RING_LAST, RING_MASK, Block
from envmgr.wire.hosts import EnvOrder, HostSettings, HostSpec
from envmgr.wire.messages import UNANSWERED, Message, Op

logger = logging.getLogger("envmgr")


def await_reset(hosts: Hosts, slot: EnvSlot, *, late: bool) -> None:
    """Await the reset that the host of an env begins by itself: now, or with a step of others."""
    slot.order = next(hosts.request_ids)
    hosts.await_reply(slot, Change.RESET, slot.request_id)  # another reply to the same request
    if late:
        hosts.record.late[slot.env_id] = 1
        slot.deadline = NEVER


def expect_late(hosts: Hosts, env_ids: Iterable[int]) -> None:
    """The episodes of others begin now that these envs take a step; can be done again."""
    record = hosts.record
    begun, limit_s = record.begun_with(env_ids), hosts.limits.of_phase(Phase.RESETTING)
    if limit_s is not None:
        for slot in map(record.slots.__getitem__, begun):
            if slot.phase is Phase.RESETTING:
                hosts.limits.set(slot, limit_s)
    for env_id in begun:
        record.late[env_id] = 0


def released(hosts: Hosts, env_id: int) -> None:
    """An env is let go of: who waited for its step may have no other to wait for."""
    if hosts.record.begins_alone(env_id):
        expect_late(hosts, (env_id,))


_LONG_PAUSE_S = 1.0
"""Who waits longer for something to follow is told so."""


class Hosts:
    """Sends requests for env slots and keeps track of what is awaited until when.

    Args:
        transport: carries the messages.
        factories: by env_id, those of the spares last.
        settings: for every host.
        deadlines: time limits.
        clock: monotonic seconds.
        num_workers: how many hosts share the envs; None: one for each.
        spare_num: how many of the envs are spares.

    Attributes:
        env_num: envs that are seen, and are not spares.
        record: what is known of all envs.
        slots: its details, by env_id, those of the spares last.
        phases: what hosts are busy with; changed here, and where steps are posted and handed out.
        groups: which envs share a host.
        group_of_host: those that a host serves, by host_id; without hosts that were given up.
        limits: how long hosts may take.
        request_ids: one for each request, in order, whatever way it goes.
        block: where steps are posted; None where they go by message.
        settings: for every host that serves one env.
        tracer: is told what hosts are at.
    """

    def __init__(
        self,
        transport: Transport,
        factories: Sequence[EnvFactory],
        settings: HostSettings,
        deadlines: Deadlines,
        clock: Clock,
        *,
        num_workers: int | None = None,
        spare_num: int = 0,
    ) -> None:
        self.transport, self.clock = transport, clock
        self.env_num = len(factories) - spare_num
        self.record = Record(self.env_num, spare_num)
        self.slots, self.phases = self.record.slots, self.record.phases
        self.record.join_rows(settings.batches)
        self.groups = host_groups(self.slots, num_workers)
        self._factories = factories
        self.settings = settings
        self.tracer: Tracer | None = None
        self._shared_settings = replace(settings, announced=announced_in(deadlines))
        self._host_ids = itertools.count(1)
        self.request_ids = itertools.count(UNANSWERED + 1)
        self.group_of_host: dict[int, HostGroup] = {}
        self._killed: set[int] = set()
        announces = Op.STEP in self._shared_settings.announced
        self.limits = Limits(self.record, self.groups, deadlines, clock, announces=announces)
        together, seen = transport.posts_together, self.slots[: self.env_num]
        self.record.index_of = [0 if together else slot.group.index for slot in seen]
        self.block: Block | None = None

    # -- which host serves which envs ---------------------------------------------------------

    def start(self, slots: Sequence[EnvSlot]) -> None:
        """Have envs built that have no host: in a new one for each group that has none either.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        served = [slot for slot in slots if slot.group.host_id is not None]
        starting: dict[int, list[EnvSlot]] = {}
        for slot in slots:
            if slot.group.host_id is None:
                starting.setdefault(slot.group.index, []).append(slot)
        specs = [self._spec(self.groups[index], built) for index, built in starting.items()]
        self.transport.start(specs)
        for spec, built in zip(specs, starting.values(), strict=True):
            self._await_start(spec, built)
        for slot in served:
            self.build(slot)

    def _spec(self, group: HostGroup, built: Sequence[EnvSlot]) -> HostSpec:
        orders = tuple(
            EnvOrder(
                slot.env_id,
                slot.generation,
                next(self.request_ids) if slot in built else UNANSWERED,
                self._factories[slot.env_id],
            )
            for slot in group.slots
        )
        settings = self._shared_settings if group.is_shared else self.settings
        return HostSpec(next(self._host_ids), group.index, orders, settings)

    def _await_start(self, spec: HostSpec, built: Sequence[EnvSlot]) -> None:
        group = self.groups[spec.index]
        group.host_id = spec.host_id
        self.group_of_host[spec.host_id] = group
        for order in spec.envs:
            if order.request_id != UNANSWERED:
                slot = group.by_id[order.env_id]
                slot.host_id = spec.host_id
                self.await_reply(slot, Change.BUILD, order.request_id)
        if group.is_shared:
            group.running = built[0]  # its limit counts from the start of the host

    def build(self, slot: EnvSlot) -> None:
        """Have the host of an env's group build it, in place of the one there was."""
        slot.host_id = slot.group.host_id
        self.request(slot, Op.RENEW, None, Change.BUILD)

    def release(self, slot: EnvSlot) -> None:
        """Have a host that others share let go of an env."""
        self.settle(slot)
        self.tell(slot, Op.RELEASE, None)
        slot.host_id = None

    # -- requests -----------------------------------------------------------------------------

    def prepare(self, slot: EnvSlot, op: Op, payload: Any) -> tuple[int, Any]:
        """Encode a request without sending it; return its id and what to send.

        Raises:
            FrameError: the payload cannot be sent.
        """
        request_id = next(self.request_ids)
        message = Message(op, slot.env_id, slot.generation, request_id, payload)
        return request_id, self.transport.prepare(host_of(slot), message)

    def submit(self, slot: EnvSlot, change: Change, prepared: tuple[int, Any]) -> None:
        """Send what `prepare` returned and await its reply."""
        request_id, frame = prepared
        self.await_reply(slot, change, request_id)
        self.transport.send(host_of(slot), frame)

    @property
    def resets_need_no_looking_after(self) -> bool:
        """Whether resets have no time limit, and workers none that has them replaced."""
        settings = self.settings
        unlimited = settings.max_episodes is None and settings.max_rss_bytes is None
        return unlimited and self.limits.of_phase(Phase.RESETTING) is None

    def request(self, slot: EnvSlot, op: Op, payload: Any, change: Change) -> None:
        """Send a request and await its reply."""
        self.submit(slot, change, self.prepare(slot, op, payload))

    def tell(self, slot: EnvSlot, op: Op, payload: Any) -> None:
        """Send a message whose reply, if there is one, is not awaited."""
        message = Message(op, slot.env_id, slot.generation, UNANSWERED, payload)
        host_id = host_of(slot)
        self.transport.send(host_id, self.transport.prepare(host_id, message))

    def await_reply(self, slot: EnvSlot, change: Change, request_id: int) -> None:
        """Await the reply to a request, from now on."""
        self._change(slot, change)
        slot.request_id = request_id
        slot.next_episode = slot.episode + 1
        self.limits.set(slot, self.limits.of_phase(slot.phase))

    def settle(self, slot: EnvSlot) -> None:
        """Nothing is awaited of this env any more."""
        self._change(slot, Change.SETTLE)
        slot.deadline = NEVER

    def cancel(self, slot: EnvSlot) -> None:
        """Nobody wants the step's timestep any more; its reply is still awaited."""
        self._change(slot, Change.CANCEL)

    def pause(self, slots: Sequence[EnvSlot], pause_s: float, following: Next) -> None:
        """Have `following` begin after `pause_s`, for all of these envs."""
        if pause_s >= _LONG_PAUSE_S:
            logger.warning("%s: %s follows in %g s", names_of(slots), following.value, pause_s)
        for slot in slots:
            self._change(slot, Change.PAUSE)
            slot.following = following
            self.limits.set_deadline(slot, pause_s)

    def _change(self, slot: EnvSlot, change: Change) -> None:
        self.record.changed(slot.env_id, change)
        if self.tracer is not None:
            self.tracer.changed(slot.env_id, slot.phase)
        self.record.late[slot.env_id] = 0
        self.limits.changes += 1

    # -- posted steps -------------------------------------------------------------------------

    def share(self, block: Block | None) -> None:
        """Steps are posted in this block from now on; None: not any more."""
        self.block = block
        self.limits.look_into(block)
        if block is not None:
            self.transport.count_mail(block.mail)

    def take_over(self, slot: EnvSlot) -> None:
        """Look after a posted step by itself; nothing if the env takes none."""
        block = self.block
        if block is None or slot.phase is not Phase.POSTED:
            return
        self.record.changed(slot.env_id, Change.TAKE_OVER)
        slot.order = slot.request_id
        if self.limits.step_s is not None:
            self.limits.set(slot, self.limits.step_s, slot.since)
        if self.may_stay_silent(slot.env_id):
            self.ask(self.record.index_of[slot.env_id])

    def may_stay_silent(self, env_id: int) -> bool:
        """Return whether an env's host may not ring for its posted step, which has not replied."""
        block = self.block
        if block is None:
            return False
        posting = int(block.posted[self.record.index_of[env_id]])
        tokens = self.record.tokens
        return posting & RING_MASK == RING_LAST and bool(block.replies[env_id] != tokens[env_id])

    def ask(self, index: int) -> None:
        """Have a host ring when it has done what was posted."""
        self.transport.ring((self.groups[index].host_id or 0,), asks=True)

    # -- the end of a host --------------------------------------------------------------------

    def leave(self, slot: EnvSlot, following: Next, pause_s: float = 0.0) -> None:
        """An env's host ends, or is gone: `following` begins when it is, after a pause.

        Call `end` for all of its envs together.
        """
        self._change(slot, Change.END)
        slot.following = following
        slot.pause_s = pause_s
        slot.waits = False
        slot.deadline = NEVER

    def join(self, slot: EnvSlot, other: EnvSlot) -> None:
        """Have an env without host wait for the new host that another env of its group awaits."""
        self._change(slot, Change.END if other.phase is Phase.ENDING else Change.PAUSE)
        slot.host_id = other.host_id
        slot.request_id = other.request_id
        slot.following = Next.RENEW_HOST
        slot.pause_s = 0.0
        slot.deadline = other.deadline

    def end(self, group: HostGroup, *, ask: bool) -> None:
        """End the host of envs that `leave` it.

        Args:
            group: the envs.
            ask: let the host close its envs first, within the limit for closing.
        """
        leaving = [slot for slot in group.slots if slot.phase is Phase.ENDING]
        group.is_ending = True
        group.running = None
        group.deadline = NEVER
        if ask:
            request_id, frame = self.prepare(leaving[0], Op.CLOSE, None)
            self.transport.send(host_of(leaving[0]), frame)
        else:
            request_id = UNANSWERED
            self._kill(host_of(leaving[0]))
        for slot in leaving:
            slot.request_id = request_id
            limit_s = self.limits.close_s if ask else self.transport.kill_patience_s
            self.limits.set_deadline(slot, limit_s)

    def _kill(self, host_id: int) -> None:
        if host_id in self._killed:
            self.transport.give_up(host_id)
        else:
            self._killed.add(host_id)
            self.transport.kill(host_id)

    def _retire(self, group: HostGroup) -> None:
        """Leave the memory of a host that goes on, though it was given up, to it for good."""
        if not self.record.observed.is_open:
            return  # it was told of none
        group.is_retired = True
        for slot in group.slots:
            if not slot.is_spare:
                self.record.retire(slot.env_id)

    def ended(self, group: HostGroup, *, lingers: bool = False) -> None:
        """The host of these envs is gone and reaped, or was given up and lingers."""
        if lingers:
            self._retire(group)
        if group.host_id is not None:
            self.group_of_host.pop(group.host_id, None)
            self._killed.discard(group.host_id)
        group.host_id = group.running = None
        group.is_ending = group.is_worn = False
        group.superseded.clear()
        group.deadline = NEVER

    def forget_all(self) -> None:
        """Have no host known any more: what still arrives is nobody's."""
        self.group_of_host.clear()


def host_of(slot: EnvSlot) -> int:
    """Return the host of an env that has one."""
    if slot.host_id is None:
        raise RuntimeError(f"env {slot.env_id} has no host: a defect of envmgr, please report it")
    return slot.host_id
