"""Hosts of envs: which host serves which env_ids, requests to them, and their deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from envmgr.core.limits import HostLimits
from envmgr.core.slots import NEVER, EnvSlot, HostGroup, Next, Work, host_groups
from envmgr.policy import Deadlines
from envmgr.transport.base import Transport
from envmgr.types import Clock, EnvFactory
from envmgr.wire.hosts import EnvOrder, HostSettings, HostSpec
from envmgr.wire.messages import UNANSWERED, Message, Op

KILL_PATIENCE_S = 5.0
"""How long a host that was killed may take to be reported dead."""

_CONSTRUCTION = frozenset((Op.HELLO, Op.RENEW))
_ALL_WORK = _CONSTRUCTION | {Op.RESET, Op.STEP, Op.CALL, Op.GET_ATTR, Op.SET_ATTR, Op.RELEASE}


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
        slots: what is known of each env_id, those of the spares last.
        groups: which envs share a host.
        limits: how long hosts may take.
        background: the envs busy with something that no step waits for.
        background_changes: grows when there is something new to look after behind the caller.
        index_of: where steps of each env_id are posted: at the index of its host, or all in one
            place where they run in the caller.
        look: finds out what a shared host is running, where it does not say so by message.
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
        self.transport = transport
        self.clock = clock
        self.env_num = len(factories) - spare_num
        self.slots = [EnvSlot(i, is_spare=i >= self.env_num) for i in range(len(factories))]
        self.groups = host_groups(self.slots, num_workers or len(factories))
        self._factories = factories
        self._settings = settings
        self._shared_settings = replace(settings, announced=_announced(deadlines))
        self._host_ids = itertools.count(1)
        self._request_ids = itertools.count(UNANSWERED + 1)
        self._group_of_host: dict[int, HostGroup] = {}
        self._killed: set[int] = set()
        self.limits = HostLimits(deadlines, announces=Op.STEP in self._shared_settings.announced)
        self._step_limit_s = deadlines.step_s
        self._close_limit_s = deadlines.close_s
        self._earliest = NEVER
        self.background: dict[int, EnvSlot] = {}
        self.background_changes = 0
        together, seen = transport.posts_together, self.slots[: self.env_num]
        self.index_of = [0 if together else slot.group.index for slot in seen]
        self.look: Callable[[HostGroup], None] | None = None

    # -- which host serves which envs ---------------------------------------------------------

    def group_of(self, host_id: int) -> HostGroup | None:
        """Return the envs that a host serves; None for a host that was given up."""
        return self._group_of_host.get(host_id)

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
                next(self._request_ids) if slot in built else UNANSWERED,
                self._factories[slot.env_id],
            )
            for slot in group.slots
        )
        settings = self._shared_settings if group.is_shared else self._settings
        return HostSpec(next(self._host_ids), group.index, orders, settings)

    def _await_start(self, spec: HostSpec, built: Sequence[EnvSlot]) -> None:
        group = self.groups[spec.index]
        group.host_id = spec.host_id
        self._group_of_host[spec.host_id] = group
        for order in spec.envs:
            if order.request_id != UNANSWERED:
                slot = group.by_id[order.env_id]
                slot.host_id = spec.host_id
                self._await(slot, Work.STARTING, order.request_id)
        if group.is_shared:
            group.running = built[0]  # its limit counts from the start of the host

    def build(self, slot: EnvSlot) -> None:
        """Have the host of an env's group build it, in place of the one there was."""
        slot.host_id = slot.group.host_id
        self.request(slot, Op.RENEW, None, Work.STARTING)

    def release(self, slot: EnvSlot) -> None:
        """Have a host that others share let go of an env."""
        self.settle(slot)
        self.tell(slot, Op.RELEASE, None)
        slot.host_id = None

    def blamed(self, group: HostGroup) -> EnvSlot:
        """Return the env that was running when something happened to its host.

        Without a word of the host: the first in the order in which requests were sent; if it was
        idle, the first of its envs.
        """
        if group.running is not None:
            return group.running
        return next(iter((*group.awaited(), *group.present(), *group.slots)))

    # -- requests -----------------------------------------------------------------------------

    def prepare(self, slot: EnvSlot, op: Op, payload: Any) -> tuple[int, Any]:
        """Encode a request without sending it; return its id and what to send.

        Raises:
            FrameError: the payload cannot be sent.
        """
        request_id = next(self._request_ids)
        message = Message(op, slot.env_id, slot.generation, request_id, payload)
        return request_id, self.transport.prepare(_host_of(slot), message)

    def submit(self, slot: EnvSlot, work: Work, prepared: tuple[int, Any]) -> None:
        """Send what `prepare` returned and await its reply."""
        request_id, frame = prepared
        self._await(slot, work, request_id)
        self.transport.send(_host_of(slot), frame)

    def submit_step(self, slot: EnvSlot, prepared: tuple[int, Any]) -> None:
        """As `submit`, for an idle env and a step: what happens most.

        Can be interrupted, and called again: until the last of this it counts as not sent.
        """
        request_id, frame = prepared
        slot.work = Work.STEPPING
        if self._step_limit_s is not None:
            self._limit(slot, self._step_limit_s)
        host_id, transport = _host_of(slot), self.transport
        if not transport.has_sent(host_id, frame):
            transport.send(host_id, frame)
        slot.request_id = request_id

    @property
    def step_limit_s(self) -> float | None:
        """The time limit of steps."""
        return self._step_limit_s

    @property
    def resets_need_no_looking_after(self) -> bool:
        """Whether resets have no time limit, and workers none that has them replaced."""
        settings = self._settings
        unlimited = settings.max_episodes is None and settings.max_rss_bytes is None
        return unlimited and self.limits.by_work[Work.RESETTING] is None

    def limit_of(self, slot: EnvSlot) -> float:
        """Return the limit of what an env is busy with, in seconds; inf for none."""
        return self.limits.of(slot)

    def next_request_id(self) -> int:
        """Return the id of a request that goes another way than by message."""
        return next(self._request_ids)

    def take_over_step(self, slot: EnvSlot, request_id: int, posted_at: float) -> None:
        """Await the reply to a step that was posted before."""
        slot.request_id = request_id
        slot.work = Work.STEPPING
        slot.order = request_id
        if self._step_limit_s is not None:
            self._limit(slot, self._step_limit_s, posted_at)

    def request(self, slot: EnvSlot, op: Op, payload: Any, work: Work) -> None:
        """Send a request and await its reply."""
        self.submit(slot, work, self.prepare(slot, op, payload))

    def tell(self, slot: EnvSlot, op: Op, payload: Any) -> None:
        """Send a message whose reply, if there is one, is not awaited."""
        message = Message(op, slot.env_id, slot.generation, UNANSWERED, payload)
        host_id = _host_of(slot)
        self.transport.send(host_id, self.transport.prepare(host_id, message))

    def begin(self, slot: EnvSlot, work: Work) -> None:
        """Await another reply to the same request (the host goes on by itself)."""
        slot.order = next(self._request_ids)
        self._await(slot, work, slot.request_id)

    def settle(self, slot: EnvSlot) -> None:
        """Nothing is awaited of this env any more."""
        if slot.work is Work.STEPPING:
            slot.work = Work.NONE
        else:
            self._occupy(slot, Work.NONE)
        slot.deadline = NEVER

    def cancel(self, slot: EnvSlot) -> None:
        """Nobody wants the step's timestep any more; its reply is still awaited."""
        self._occupy(slot, Work.CANCELLING)

    def pause(self, slot: EnvSlot, pause_s: float, following: Next) -> None:
        """Have `following` begin after `pause_s`."""
        self._occupy(slot, Work.PAUSING)
        slot.following = following
        self._set_deadline(slot, pause_s)

    # -- spares -------------------------------------------------------------------------------

    def exchange(self, slot: EnvSlot, spare: EnvSlot) -> None:
        """Have an env and a spare, which have their hosts to themselves, change places.

        Their hosts are to be told with ADOPT. What is under way in them is the caller's to settle.
        """
        ours, theirs = slot.group, spare.group
        for group, before in ((ours, slot), (theirs, spare)):
            group.superseded.update((before.request_id, UNANSWERED))
        ours.serve((spare,))
        theirs.serve((slot,))
        slot.host_id, spare.host_id = spare.host_id, slot.host_id
        self.index_of[slot.env_id] = theirs.index

    def limit_until(self, slot: EnvSlot, deadline: float, limit_s: float) -> None:
        """Have what an env does time out at another moment than its request would."""
        slot.deadline, slot.limit_s = deadline, limit_s
        self._remember(deadline)

    # -- the end of a host --------------------------------------------------------------------

    def leave(self, slot: EnvSlot, following: Next, pause_s: float = 0.0) -> None:
        """An env's host ends, or is gone: `following` begins when it is, after a pause.

        Call `end` for all of its envs together.
        """
        self._occupy(slot, Work.ENDING)
        slot.following = following
        slot.pause_s = pause_s
        slot.waits = False
        slot.deadline = NEVER

    def join(self, slot: EnvSlot, other: EnvSlot) -> None:
        """Have an env without host wait for the new host that another env of its group awaits."""
        self._occupy(slot, other.work)
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
        leaving = [slot for slot in group.slots if slot.work is Work.ENDING]
        group.is_ending = True
        group.running = None
        group.deadline = NEVER
        if ask:
            request_id, frame = self.prepare(leaving[0], Op.CLOSE, None)
            self.transport.send(_host_of(leaving[0]), frame)
        else:
            request_id = UNANSWERED
            self._kill(_host_of(leaving[0]))
        for slot in leaving:
            slot.request_id = request_id
            self._set_deadline(slot, self._close_limit_s if ask else KILL_PATIENCE_S)

    def _kill(self, host_id: int) -> None:
        if host_id in self._killed:
            self.transport.give_up(host_id)
        else:
            self._killed.add(host_id)
            self.transport.kill(host_id)

    def ended(self, group: HostGroup) -> None:
        """The host of these envs is gone and reaped."""
        if group.host_id is not None:
            self._group_of_host.pop(group.host_id, None)
            self._killed.discard(group.host_id)
        group.host_id = group.running = None
        group.is_ending = group.is_worn = False
        group.superseded.clear()
        group.deadline = NEVER

    def forget_all(self) -> None:
        """Have no host known any more: what still arrives is nobody's."""
        self._group_of_host.clear()

    # -- time ---------------------------------------------------------------------------------

    def began(self, slot: EnvSlot) -> None:
        """A shared host has said that it begins with what it was asked for this env."""
        group = slot.group
        if group.running is not slot:  # as it is while the first one is built: see _await_start
            group.running = slot
            self._set_group_deadline(group, self.clock() + self.limits.of(slot))

    def finished(self, group: HostGroup) -> None:
        """A shared host is done with what it was running, and may begin with something else."""
        group.running = None
        group.quiet_since = self.clock()
        self._set_group_deadline(group, group.quiet_since + self.limits.least_s)

    def _await(self, slot: EnvSlot, work: Work, request_id: int) -> None:
        self._occupy(slot, work)
        slot.request_id = request_id
        self._limit(slot, self.limits.by_work.get(work))

    def _occupy(self, slot: EnvSlot, work: Work) -> None:
        slot.work = work
        if work is Work.NONE or work is Work.STEPPING or work is Work.CALLING:
            self.background.pop(slot.env_id, None)
        else:
            self.background[slot.env_id] = slot
            self.background_changes += 1

    def _limit(self, slot: EnvSlot, limit_s: float | None, asked_at: float | None = None) -> None:
        """Have what an env was asked time out; in a shared host only once it has begun."""
        group = slot.group
        asked_at = self.clock() if asked_at is None else asked_at
        if not group.is_shared:
            self._set_deadline(slot, limit_s, asked_at)
            return
        slot.deadline = NEVER
        if limit_s is not None:
            slot.since = asked_at
            if group.running is None and group.deadline == NEVER:
                self._set_group_deadline(group, slot.since + limit_s)

    def _set_deadline(
        self, slot: EnvSlot, limit_s: float | None, begin: float | None = None
    ) -> None:
        if limit_s is None:
            slot.deadline = slot.limit_s = NEVER
            return
        slot.limit_s = limit_s
        slot.deadline = (self.clock() if begin is None else begin) + limit_s
        self._remember(slot.deadline)

    def _set_group_deadline(self, group: HostGroup, moment: float) -> None:
        group.deadline = moment
        self._remember(moment)

    def _remember(self, moment: float) -> None:
        if moment < self._earliest:
            self._earliest = moment
            self.background_changes += 1

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        return self._earliest

    def due(self) -> list[EnvSlot]:
        """Return the envs whose deadline has passed.

        Acting on one may change what is due for others of its group: ask `is_due` again.
        """
        now = self.clock()
        if now < self._earliest:
            return []
        due = [slot for slot in self.slots if slot.deadline <= now]
        for group in self.groups:
            if group.deadline <= now:
                if self.look is not None:
                    self.look(group)
                late = self.limits.late_in(group, now)
                due += [] if late is None else [late]
        moments = (*(s.deadline for s in self.slots), *(g.deadline for g in self.groups))
        self._earliest = min((moment for moment in moments if moment > now), default=NEVER)
        return due

    def is_due(self, slot: EnvSlot) -> bool:
        """Return whether the deadline of an env, or of its host, has passed."""
        return min(slot.deadline, slot.group.deadline) <= self.clock()


def _announced(deadlines: Deadlines) -> frozenset[int]:
    """Return what a shared host has to announce, so that limits count from when it begins."""
    if deadlines.step_s is None and deadlines.reset_s is None:
        return _CONSTRUCTION
    return _ALL_WORK


def _host_of(slot: EnvSlot) -> int:
    if slot.host_id is None:
        raise RuntimeError(f"env {slot.env_id} has no host: a defect of envmgr, please report it")
    return slot.host_id
