"""Envs in the caller's own thread: for debugging, cheap envs, and places without processes."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from envmgr.policy import Deadlines
from envmgr.transport.alarm import Alarm, TimeIsUp
from envmgr.transport.base import Arrival, HostDied, TimedOut, Transport, at_most
from envmgr.wire.hosts import HostSpec, hellos
from envmgr.wire.messages import Message, Op
from envmgr.worker.block_steps import BlockStepper, TimedBlockStepper
from envmgr.worker.copies import copied_reply, copied_request
from envmgr.worker.host import EnvsInUse, Host

_LEAST_GRACE_S = 1.0
"""How long envs may take to close even without a grace: nothing else cleans up after them."""

_LEAST_SHARE_S = 0.05
"""The least time that each env has to close, even if the others have used up all of the time."""


class _InlineHost:
    """One host and the work it has been given."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.resets = host.pending_resets
        self.inbox: deque[Message] = deque()
        self.request_id = 0

    def has_work(self) -> bool:
        """Return whether a request or a reset is waiting."""
        return bool(self.inbox or self.resets)

    def next_op(self) -> int:
        """Return the operation that `run_next` runs."""
        if self.inbox:
            return self.inbox[0].op
        return Op.STEP if self.host.has_pending_steps else Op.RESET

    def run_next(self) -> None:
        """Run one request, or one waiting reset, which belongs to the request that was run last."""
        if self.inbox:
            message = self.inbox.popleft()
            self.request_id = message.request_id
            self.host.handle(message)
        else:
            self.host.run_resets(1)

    def give_up(self) -> None:
        """Forget what has not been run."""
        self.inbox.clear()
        self.resets.clear()


class InlineTransport(Transport):
    """Runs requests inside `poll`, each to its end, in the order in which they were sent.

    Each host serves one env, or the rows of a batched env, so that what happens to one host does
    not affect the others; steps that are posted in the block are taken for all hosts together. With
    time limits on steps or resets, steps go by message, since an alarm can then be set for each.

    Time limits: in the main thread an alarm interrupts the env's code. In other threads, and in C
    code that does not return to Python, an exceeded limit is only noticed afterwards. Either way
    the env is given up, as with every other transport.
    """

    works_alone = False
    packs_envs = False
    posts_together = True
    shares_objects = True
    propagated = (KeyboardInterrupt, TimeIsUp)

    def __init__(self, deadlines: Deadlines) -> None:
        self._hosts: dict[int, _InlineHost] = {}
        self._alarm = Alarm()
        self._limits_s: dict[int, float | None] = {
            Op.STEP: deadlines.step_s,
            Op.RESET: deadlines.reset_s,
            Op.CALL: deadlines.reset_s,
            Op.HELLO: deadlines.connect_s,
            Op.RENEW: deadlines.connect_s,
        }
        self._close_s = deadlines.close_s
        self.arrivals: deque[tuple[int, Arrival]] = deque()
        self._abandoned: list[Host] = []
        self._to_close: deque[Host] = deque()
        # Whether a request or a reset may be waiting in a host.
        self._has_work = False
        self._memory: memoryview | None = None
        self._stepper = BlockStepper(0, None, timed=False)
        self._envs_in_use = EnvsInUse()
        self._host_of: dict[int, int] = {}
        # Not an Event: a thread that is interrupted while it sets one leaves it locked.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Queue the building of envs; it happens in `poll`."""
        if not self._stepper.has_rows and any(spec.settings.measures for spec in specs):
            self._stepper = TimedBlockStepper(0, None, timed=False)
        for spec in specs:
            host = Host(
                spec.factories,
                spec.settings,
                encode=copied_reply,
                send=partial(self._take, spec.host_id),
                memory=self._open_memory,
                stepper=self._stepper,
                envs_in_use=self._envs_in_use,
            )
            self._hosts[spec.host_id] = entry = _InlineHost(host)
            self._has_work = True
            self._host_of.update((env.env_id, spec.host_id) for env in spec.envs)
            entry.inbox.extend(hellos(spec.envs))

    def prepare(self, host_id: int, message: Message) -> Message:
        """Return the message with arrays and containers of its own."""
        return copied_request(message)

    def send(self, host_id: int, prepared: Any) -> None:
        """Queue a request; CLOSE ends the host at once."""
        entry = self._hosts.get(host_id)
        if entry is None:
            return
        if prepared.op == Op.CLOSE:
            self.kill(host_id)
        else:
            self._has_work = True  # first: an interrupt may come in between
            entry.inbox.append(prepared)

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Return whether this very request is queued."""
        entry = self._hosts.get(host_id)
        return entry is not None and any(message is prepared for message in entry.inbox)

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Run all queued and posted work, or sleep for `timeout_s` if there is none."""
        if self._alarm.before is not None:  # an interrupt has kept it from being put back
            self._alarm.restore()
        if self._to_close:
            self._close_killed()
        stepper, had_work = self._stepper, self._has_work
        self._has_work = True  # until it is known that no reset follows
        try:
            follows = stepper.take_posted()
        except BaseException as error:  # as in `_advance`
            if stepper.interrupted_env_id is not None:
                self._abandon(self._host_of[stepper.interrupted_env_id], error)
                stepper.interrupted_env_id = None
            raise
        if not follows:
            self._has_work = had_work
        ran = follows is not None
        if self._has_work and self._run_all(waits=timeout_s != 0.0):
            ran = True
        if not ran and not self.arrivals and timeout_s != 0.0:
            with contextlib.suppress(queue.Empty):
                self._woken.get(timeout=at_most(timeout_s))
        while not self._woken.empty():
            with contextlib.suppress(queue.Empty):
                self._woken.get_nowait()

    def _close_killed(self) -> None:
        while self._to_close:
            host = self._to_close.popleft()  # first: env code that was interrupted is not run again
            self._alarm.bound(max(self._close_s, _LEAST_SHARE_S), host.close)

    def _run_all(self, *, waits: bool) -> bool:
        """Run what hosts have to do besides posted steps; return whether there was anything.

        Waits only once for results of envs that go on working meanwhile, and only if the caller
        waits.
        """
        ran = False
        busy = [(i, entry) for i, entry in self._hosts.items() if entry.inbox or entry.resets]
        for host_id, entry in busy:
            is_async = entry.host.is_async
            while not (is_async and (ran or not waits) and entry.host.only_receives):
                if not self._advance(host_id, entry):
                    break
                ran = True
        self._has_work = any(entry.has_work() for entry in self._hosts.values())
        return ran

    def _take(self, host_id: int, message: Message) -> None:
        self.arrivals.append((host_id, message))

    def _abandon(self, host_id: int, error: BaseException) -> None:
        """Give up an env that was interrupted: it is unknown how much of its request it had run."""
        entry = self._hosts.pop(host_id, None)
        if entry is not None:
            self._abandoned.append(entry.host)
            died = HostDied(None, f"interrupted by {type(error).__name__}", is_interrupt=True)
            self.arrivals.append((host_id, died))

    def _advance(self, host_id: int, entry: _InlineHost) -> bool:
        """Run one request or waiting reset of a host; return False if there is none."""
        try:
            if not entry.has_work():
                return False
            limit_s = self._limits_s.get(entry.next_op())
            began, n_before = time.monotonic(), len(self.arrivals)
            was_ended = self._alarm.bound(limit_s, entry.run_next)
            if limit_s is not None and (was_ended or time.monotonic() - began > limit_s):
                entry.give_up()
                while len(self.arrivals) > n_before:
                    self.arrivals.pop()
                timed_out = TimedOut(entry.request_id, limit_s, self._alarm.where)
                self.arrivals.append((host_id, timed_out))
        except BaseException as error:  # Ctrl-C
            self._abandon(host_id, error)
            raise
        return True

    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return an empty list: nothing happens here by itself."""
        return []

    def wake(self) -> None:
        """End a sleeping `poll`."""
        self._woken.put(None)

    def place(self, nbytes: int) -> memoryview | None:
        """Allocate private memory."""
        self._memory = memoryview(bytearray(nbytes))
        return self._memory

    def _open_memory(self, nbytes: int) -> memoryview | None:
        return self._memory

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted: there are no time limits to keep for each of them."""
        return self._limits_s[Op.STEP] is None and self._limits_s[Op.RESET] is None

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Do nothing: `poll` looks in any case."""

    def kill(self, host_id: int) -> None:
        """Let the next `poll` close the envs, since there is no process to end."""
        entry = self._hosts.pop(host_id, None)
        if entry is not None:
            self.arrivals.append((host_id, HostDied(None)))
            self._to_close.append(entry.host)

    def close(self, grace_s: float) -> None:
        """Close the envs one after another; an alarm bounds them as it does in `poll`."""
        end = time.monotonic() + max(grace_s, _LEAST_GRACE_S)
        self._abandoned += [*self._to_close, *(entry.host for entry in self._hosts.values())]
        self._to_close.clear()
        self._hosts.clear()
        while self._abandoned:
            host = self._abandoned.pop()
            self._alarm.bound(max(end - time.monotonic(), _LEAST_SHARE_S), host.close)
        self._alarm.restore()
        self.arrivals = deque()
        self._memory = None
