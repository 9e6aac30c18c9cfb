"""Hosts of envs: which host serves which env_id, requests to them, and their deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from envmgr.host import HostSettings
from envmgr.policy import Deadlines
from envmgr.protocol import UNANSWERED, Message, Op
from envmgr.supervisor.slots import NEVER, EnvSlot, Next, Work
from envmgr.transport.base import EnvOrder, HostSpec, Transport
from envmgr.types import Clock, EnvFactory

KILL_PATIENCE_S = 5.0
"""How long a host that was killed may take to be reported dead."""


class Hosts:
    """Sends requests for env slots and keeps track of what is awaited until when.

    Args:
        transport: carries the messages.
        factories: by env_id.
        settings: for every host.
        deadlines: time limits.
        clock: monotonic seconds.

    Attributes:
        background: the envs busy with something that no step waits for.
        background_changes: grows when there is something new to look after behind the caller.
    """

    def __init__(
        self,
        transport: Transport,
        factories: Sequence[EnvFactory],
        settings: HostSettings,
        deadlines: Deadlines,
        clock: Clock,
    ) -> None:
        self.transport = transport
        self.clock = clock
        self._factories = factories
        self._settings = settings
        self._host_ids = itertools.count(1)
        self._request_ids = itertools.count(UNANSWERED + 1)
        self._slot_of_host: dict[int, EnvSlot] = {}
        self._killed: set[int] = set()
        self._limits_s: dict[Work, float | None] = {
            Work.STARTING: deadlines.connect_s,
            Work.RESETTING: deadlines.reset_s,
            Work.STEPPING: deadlines.step_s,
            Work.CALLING: deadlines.reset_s,
            Work.ENDING: deadlines.close_s,
        }
        self._step_limit_s = deadlines.step_s
        self._earliest = NEVER
        self.background: dict[int, EnvSlot] = {}
        self.background_changes = 0

    def slot_of(self, host_id: int) -> EnvSlot | None:
        """Return the env that a host serves; None for a host that was given up."""
        return self._slot_of_host.get(host_id)

    def start(self, slots: Sequence[EnvSlot]) -> None:
        """Start a host for each of `slots`, which have none.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        specs = [self._spec(slot) for slot in slots]
        self.transport.start(specs)
        for slot, spec in zip(slots, specs, strict=True):
            slot.host_id = spec.host_id
            self._slot_of_host[spec.host_id] = slot
            self._await(slot, Work.STARTING, spec.envs[0].request_id)

    def _spec(self, slot: EnvSlot) -> HostSpec:
        factory = self._factories[slot.env_id]
        order = EnvOrder(slot.env_id, slot.generation, next(self._request_ids), factory)
        return HostSpec(next(self._host_ids), slot.env_id, (order,), self._settings)

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
        """As `submit`, for an idle env and a step: what happens most."""
        slot.request_id, frame = prepared
        slot.work = Work.STEPPING
        if self._step_limit_s is not None:
            self._set_deadline(slot, self._step_limit_s)
        self.transport.send(_host_of(slot), frame)

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

    def end(self, slot: EnvSlot, following: Next, pause_s: float = 0.0, *, ask: bool) -> None:
        """End the env's host; `following` begins when it is gone, after a pause.

        Args:
            slot: the env.
            following: what comes then.
            pause_s: seconds to wait before that.
            ask: let the host close its env first, within the limit for closing.
        """
        host_id = _host_of(slot)
        slot.following = following
        slot.pause_s = pause_s
        if ask:
            self.request(slot, Op.CLOSE, None, Work.ENDING)
        else:
            self._occupy(slot, Work.ENDING)
            self._set_deadline(slot, KILL_PATIENCE_S)
            if host_id in self._killed:
                self.transport.give_up(host_id)
            else:
                self._killed.add(host_id)
                self.transport.kill(host_id)

    def ended(self, slot: EnvSlot) -> None:
        """The env's host is gone and reaped."""
        if slot.host_id is not None:
            self._slot_of_host.pop(slot.host_id, None)
            self._killed.discard(slot.host_id)
            slot.host_id = None

    def forget_all(self) -> None:
        """Have no host known any more: what still arrives is nobody's."""
        self._slot_of_host.clear()

    def _await(self, slot: EnvSlot, work: Work, request_id: int) -> None:
        self._occupy(slot, work)
        slot.request_id = request_id
        self._set_deadline(slot, self._limits_s.get(work))

    def _occupy(self, slot: EnvSlot, work: Work) -> None:
        slot.work = work
        if work is Work.NONE or work is Work.STEPPING or work is Work.CALLING:
            self.background.pop(slot.env_id, None)
        else:
            self.background[slot.env_id] = slot
            self.background_changes += 1

    def _set_deadline(self, slot: EnvSlot, limit_s: float | None) -> None:
        if limit_s is None:
            slot.deadline = slot.limit_s = NEVER
            return
        slot.limit_s = limit_s
        slot.deadline = self.clock() + limit_s
        if slot.deadline < self._earliest:
            self._earliest = slot.deadline
            self.background_changes += 1

    @property
    def earliest_deadline(self) -> float:
        """A moment before which no deadline passes; may be too early, never too late."""
        return self._earliest

    def due(self, slots: Sequence[EnvSlot]) -> list[EnvSlot]:
        """Return the envs whose deadline has passed."""
        now = self.clock()
        if now < self._earliest:
            return []
        due = [slot for slot in slots if slot.deadline <= now]
        self._earliest = min((s.deadline for s in slots if s.deadline > now), default=NEVER)
        return due


def _host_of(slot: EnvSlot) -> int:
    if slot.host_id is None:
        raise RuntimeError(f"env {slot.env_id} has no host: a defect of envmgr, please report it")
    return slot.host_id
