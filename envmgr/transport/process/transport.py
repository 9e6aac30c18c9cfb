"""Hosts in worker processes: one connection each, and one wait for all of them.

Replies, deaths, doorbells and wake-ups are waited for together: with an epoll where there is shared
memory with a doorbell, else with `multiprocessing.connection.wait`. Data of fixed layout goes
through anonymous shared memory, everything else through the connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from signal import SIGKILL
from typing import Any

from envmgr.errors import LaunchError
from envmgr.proc import is_exiting
from envmgr.transport.base import HostDied, Transport, at_most
from envmgr.transport.fds import fill_standard_fds
from envmgr.transport.process.connections import Connections
from envmgr.transport.process.last_words import warn_of_fault
from envmgr.transport.process.shared_files import SharedFiles
from envmgr.transport.process.spawner import Spawner
from envmgr.transport.process.worker_setup import WorkerSetupWriter
from envmgr.transport.ready import ReadySet, Waker
from envmgr.types import EnvFactory
from envmgr.wire.channel import BELL, BELL_ASKED, BELL_VALUE, BELL_VALUE_ASKED, FrameChannel
from envmgr.wire.frames import Frame, encode
from envmgr.wire.hosts import HostSpec, WorkerSettings
from envmgr.wire.messages import UNANSWERED, Message, Op

_TERMINATE_S = 0.4
"""How long workers have to end after SIGTERM, and again after SIGKILL, when all are closed."""

_HAS_CLOSED = (
    "it closed its connection to the trainer, as code does that closes a file descriptor that is "
    "not its own, and was ended"
)


class ProcessTransport(Transport):
    """Workers as processes.

    Args:
        spawner: starts them.
        settings: how they are set up.
        shared_memory: whether observations of fixed layout go through shared memory.
        as_arrival: turns a frame into an arrival; a process that only passes frames on leaves them
            as they are.
    """

    def __init__(
        self,
        spawner: Spawner,
        settings: WorkerSettings,
        *,
        shared_memory: bool,
        as_arrival: Callable[[Frame], Any] = Frame.message,
    ) -> None:
        self._spawner = spawner
        self._has_main = spawner.inherits_factories
        self._worker_setup = WorkerSetupWriter(settings, with_factories=not self._has_main)
        self._alive: dict[int, int] = {}  # by host_id, which of the manager's hosts it is
        self._has_closed: set[int] = set()  # hosts that closed their connection and lived on
        self._any_died = False
        self._deaths: deque[tuple[int, HostDied]] = deque()  # not all that belongs to them was read
        self._hurried = False
        self._closed = False
        fill_standard_fds()
        with contextlib.ExitStack() as opened:  # closed again if there is not enough for all
            self._waker = opened.enter_context(contextlib.closing(Waker()))
            self._shared = opened.enter_context(
                contextlib.closing(SharedFiles(has_memory=shared_memory))
            )
            self._ready = opened.enter_context(contextlib.closing(ReadySet()))
            self._ready.add(self._waker)
            self._bell = self._shared.bell
            if self._bell is not None:
                self._ready.add(self._bell)
            opened.pop_all()
        # Frames that are only passed on have to be whole, without a part in a buffer.
        self._large_messages = self._shared.buffers if as_arrival is Frame.message else None
        self._connections = Connections(self._ready, as_arrival, self._large_messages)
        self.arrivals = self._connections.arrivals
        spawner.report_to(self._ready)

    # -- hosts ------------------------------------------------------------------------------

    def preload(self, factories: Sequence[EnvFactory]) -> None:
        """Begin to import once for all workers what they need, if their start method can do that.

        Raises:
            ConfigError: a factory cannot be pickled, or a module that was asked for is not there;
                no process was started.
        """
        spawner = self._spawner
        if spawner.inherits_factories and not spawner.preloads:
            return
        named = self._worker_setup.modules_named_by(factories)  # pickles all, before any is sent
        if spawner.preloads:
            with contextlib.suppress(OSError):  # `start` will say so
                self._spawner.preload(named)

    @property
    def must_wait_for_call(self) -> bool:
        """Whether the spawner must wait for the next call."""
        return self._spawner.must_wait_for_call

    @property
    def is_prepared(self) -> bool:
        """Whether the spawner is prepared."""
        return self._spawner.is_prepared

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Pickle all factories, then start the workers.

        Raises:
            ConfigError: a factory cannot be pickled; no process was started.
        """
        has_buffer = self._large_messages is not None
        setup = [self._worker_setup.setup_of(spec, has_buffer=has_buffer) for spec in specs]
        for spec, payload in zip(specs, setup, strict=True):
            try:
                self._start(spec)
            except (OSError, LaunchError) as error:
                self.arrivals.append((spec.host_id, HostDied(None, f"not started: {error}")))
                continue
            self.send(spec.host_id, encode(Message(Op.HELLO, 0, 0, UNANSWERED, payload)))

    def _start(self, spec: HostSpec) -> None:
        host_id = spec.host_id
        try:
            channel = self._spawner.start(spec, self._shared.prepare(spec))
            try:
                self._connections.add(host_id, spec.index, channel)
            except OSError:  # it counts as not started; its death is nothing more to anybody
                self._spawner.signal(host_id, SIGKILL)
                raise
        except BaseException:
            self._shared.drop_bell(host_id)
            raise
        self._alive[host_id] = spec.index

    def kill(self, host_id: int) -> None:
        """Send SIGKILL to the worker and its children; HostDied follows once it is reaped."""
        self._drop(host_id)
        if host_id in self._alive:
            self._spawner.signal(host_id, SIGKILL)

    def give_up(self, host_id: int) -> None:
        """Do what the spawner can still do about a worker that does not die."""
        if host_id in self._alive:
            self._spawner.give_up(host_id)

    def _drop(self, host_id: int) -> None:
        self._connections.drop(host_id)
        self._shared.drop_bell(host_id)

    def whereabouts(self, host_id: int) -> str:
        """Return the stacks of a worker; waits for them, for half a second at most."""
        pid = self.pids.get(host_id)
        return "" if pid is None else self._shared.stacks(pid)

    def running_in(self, host_id: int) -> int:
        """Return the async env whose code a worker runs now; -1 if there is none, or if unknown."""
        index = self._alive.get(host_id)
        return -1 if index is None else self._shared.running_in(index)

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers that are not known to be dead, by host_id."""
        return self._spawner.pids

    # -- messages ---------------------------------------------------------------------------

    def prepare(self, host_id: int, message: Message) -> bytes:
        """Encode a message."""
        return encode(message, has_main=self._has_main)

    def send(self, host_id: int, prepared: Any) -> None:
        """Send a frame without blocking."""
        self._connections.send(host_id, prepared)

    def send_each(self, requests: deque[tuple[int, Any]], *, again: bool) -> None:
        """Send requests, with only one write for each host."""
        self._connections.send_each(requests)

    def count_messages(self, counts: Any) -> None:
        """Count messages in `counts` from now on."""
        self._connections.count_messages(counts)

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Wait, then read what has come."""
        connections = self._connections
        connections.finish()
        if connections.unsent:
            connections.flush()
        if timeout_s == 0.0 or self.arrivals or self.needs_attention:
            ready = self._ready.ready()
        elif pivot is None and not connections.unsent:
            ready = self._ready.ready(at_most(timeout_s))
        else:
            connections.wait(self._watched(pivot), at_most(timeout_s))
            ready = self._ready.ready()
        channels = [item for item in ready if isinstance(item, FrameChannel)]
        if channels:
            connections.read(channels)
        if len(channels) < len(ready):
            self._notice(ready)

    def _notice(self, ready: Sequence[Any]) -> None:
        """Take note of what has become readable besides connections."""
        for item in ready:
            if item is self._bell:
                self._shared.silence_bell()
            elif item is self._waker:
                self._waker.silence()
            elif not isinstance(item, FrameChannel):
                self._any_died = True

    @property
    def needs_attention(self) -> bool:
        """Whether workers have died, or are to be ended."""
        connections = self._connections
        to_end = connections.ruined or connections.deaf
        return bool(self._any_died or to_end or self._deaths or self._spawner.has_deaths)

    def attend(self) -> None:
        """End workers that are of no use any more, and reap those that have died."""
        connections = self._connections
        for host_id, garbage in connections.ruined.items():
            if garbage is not None:
                self.arrivals.append((host_id, garbage))
            elif (pid := self.pids.get(host_id)) is not None and not is_exiting(pid):
                self._has_closed.add(host_id)
            self.kill(host_id)
        connections.ruined.clear()
        for host_id in connections.deaf:  # it takes nothing any more; what it has sent still counts
            connections.unsent.pop(host_id, None)
            if host_id in self._alive:
                self._spawner.signal(host_id, SIGKILL)
        connections.deaf.clear()
        if self._any_died or self._deaths or self._spawner.has_deaths:
            self._any_died = False
            self._collect_deaths()

    def await_ring(self, timeout_s: float) -> bool:
        """Wait for the doorbell alone."""
        bell, connections, poll = self._bell, self._connections, self._ready.poll
        # `needs_attention` and `silence_bell` are inlined here, since this runs for each batch.
        if bell is None or poll is None or self.arrivals or self._any_died or self._spawner.died:
            return False
        if connections.unsent or connections.ruined or connections.deaf or self._deaths:
            return False
        found = poll(timeout_s)
        if len(found) != 1 or found[0][0] != bell:
            return False
        try:  # noqa: SIM105 - `suppress` is a call more
            os.eventfd_read(bell)
        except BlockingIOError:
            pass
        return True

    def _watched(self, pivot: int | None) -> list[Any]:
        channel = None if pivot is None else self._connections.by_host.get(pivot)
        if pivot is None or channel is None:
            return self._ready.waitables()
        death = self._spawner.death_of(pivot) if pivot in self._alive else None
        return [channel, self._waker] if death is None else [channel, self._waker, death]

    def _collect_deaths(self) -> None:
        deaths = self._deaths
        deaths.extend(self._spawner.deaths())
        while deaths:
            host_id, died = deaths[0]  # it stays there if there is no memory for what follows
            self._connections.read_last(host_id)
            self._shared.drop_bell(host_id)
            if self._large_messages is not None:
                self._large_messages.give_back(host_id)
            index = self._alive.pop(host_id, None)
            if index is not None:
                running = self._shared.running_in(index)  # before the last words are taken
                died = died._replace(running=running, last_words=self._shared.last_words(index))
            if host_id in self._has_closed:  # it was not killed for want of memory, but by us
                self._has_closed.discard(host_id)
                died = died._replace(exit_status=None, detail=_HAS_CLOSED)
            self.arrivals.append((host_id, died))
            deaths.popleft()

    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return connections, and what reports the deaths of their hosts."""
        present = [i for i in dict.fromkeys(hosts) if i in self._alive]
        by_host = self._connections.by_host
        channels = [by_host[i] for i in present if i in by_host]
        deaths = {self._spawner.death_of(i) for i in present}
        return [*channels, *(item for item in deaths if item is not None)]

    def news(self) -> list[Any]:
        """Return all that is watched."""
        return self._ready.waitables()

    def any_death(self) -> list[Any]:
        """Return what becomes readable when any worker dies."""
        return self._spawner.any_death()

    @property
    def has_unsent(self) -> bool:
        """Whether a host has not yet taken all that it was sent."""
        return bool(self._connections.unsent)

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted in shared memory: there is a doorbell for the replies."""
        return self._bell is not None

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Tell hosts to look at the block, all in one loop, since this runs for each batch."""
        bells = self._shared.host_bells
        write = os.eventfd_write if bells else None
        value = BELL_VALUE_ASKED if asks else BELL_VALUE
        for host_id in host_ids:
            bell = bells.get(host_id)
            if bell is None or write is None:
                channel = self._connections.by_host.get(host_id)
                if channel is not None:
                    channel.ring(BELL_ASKED if asks else BELL)
                continue
            try:
                write(bell, value)
            except BlockingIOError:  # it has been rung for ever, and does not look
                continue

    def wake(self) -> None:
        """Make `poll` return."""
        self._waker.wake()

    def place(self, nbytes: int) -> memoryview | None:
        """Allocate shared memory with all of its pages, or raise."""
        return self._shared.allocate(nbytes)

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Ask all workers to end; terminate, kill and reap those that are left after `grace_s`."""
        if self._closed:
            return
        self._spawner.hurry()
        try:
            self._ask_to_end(grace_s)
        finally:  # also when Ctrl-C cuts the grace short
            for host_id in list(self._alive):
                self._spawner.signal(host_id, SIGKILL)
            self._await_deaths(_TERMINATE_S)
            for host_id in list(self._connections.by_host):
                self._drop(host_id)
            self._spawner.close()
            self._release()
            self._closed = True

    def _ask_to_end(self, grace_s: float) -> None:
        for host_id in list(self._connections.by_host):
            if grace_s > 0.0:
                self.send(host_id, encode(Message(Op.CLOSE, 0, 0, 0, None)))
            else:
                self._spawner.signal(host_id, signal.SIGTERM)
        if not self._await_deaths(grace_s, patiently=True):
            for host_id in list(self._alive):
                self._spawner.signal(host_id, signal.SIGTERM)
            self._await_deaths(_TERMINATE_S)

    def _await_deaths(self, limit_s: float, *, patiently: bool = False) -> bool:
        end = time.monotonic() + limit_s
        while self._alive:
            if patiently and self._hurried:
                return False
            if (remaining_s := end - time.monotonic()) <= 0.0:
                return False
            self.poll(remaining_s)
            self.attend()
            while self.arrivals:
                _, arrival = self.arrivals.popleft()
                if isinstance(arrival, HostDied):
                    warn_of_fault(arrival)
        return True

    def hurry(self) -> None:
        """Give workers that are asked to end no more time."""
        self._hurried = True
        self.wake()

    def _release(self) -> None:
        self._waker.close()
        self._ready.close()
        self._connections.count_messages(None)
        self._shared.close()
        self._bell = self._large_messages = None
