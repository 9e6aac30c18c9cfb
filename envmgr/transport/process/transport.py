"""Hosts in worker processes: one connection each, and one wait for all of them.

Replies, deaths, doorbells and wake-ups are waited for together: with an epoll where there is shared
memory with a doorbell, else with `multiprocessing.connection.wait`. Data of fixed layout goes
through anonymous shared memory, everything else through the connections.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

import cloudpickle

from envmgr.errors import ConfigError, LaunchError
from envmgr.transport.base import Arrival, Garbage, HostDied, Transport
from envmgr.transport.fds import fill_standard_fds, forget_fd, keep_from_children
from envmgr.transport.process.last_words import LastWords, warn_of_fault
from envmgr.transport.process.preflight import refuse_more_than_there_is
from envmgr.transport.process.ready import ReadySet
from envmgr.transport.process.spawner import SIGKILL, Spawner
from envmgr.wire.block import block_is_possible, items
from envmgr.wire.channel import (
    BELL,
    BELL_ASKED,
    BELL_VALUE,
    BELL_VALUE_ASKED,
    Channel,
    ChannelClosedError,
    FrameChannel,
    PipeChannel,
)
from envmgr.wire.frames import FrameError, encode
from envmgr.wire.hosts import EnvOrder, HostSpec, Orders, WorkerSettings
from envmgr.wire.messages import UNANSWERED, Message, Op
from envmgr.worker.last_words import ARE_KEPT

_TERMINATE_S = 0.4
_MOST_HOST_BELLS = 128
"""With more hosts, fds get scarce: the others have no bell of their own, but one in their pipe."""

_CHANNELS = (FrameChannel, PipeChannel)


class ProcessTransport(Transport):
    """Workers as processes.

    Args:
        spawner: starts them.
        settings: how they are set up.
        shared_memory: whether observations of fixed layout go through shared memory.
    """

    def __init__(self, spawner: Spawner, settings: WorkerSettings, *, shared_memory: bool) -> None:
        self._spawner = spawner
        self._settings = settings
        self._channels: dict[int, Channel] = {}
        self._unsent: dict[int, Channel] = {}
        self._alive: set[int] = set()
        self._host_bells: dict[int, int] = {}
        self._pickled: dict[int, tuple[Any, bytes]] = {}
        self.arrivals: deque[tuple[int, Arrival]] = deque()
        # For `attend`: hosts that are to be ended, and what is to be said of them, if anything.
        self._ruined: dict[int, Garbage | None] = {}
        self._deaf: set[int] = set()
        self._any_died = False
        self._reading: Channel | None = None
        self._hurried = False
        self._closed = False
        self._memory: mmap.mmap | None = None
        self._index_of: dict[int, int] = {}
        self._mail: Any = None
        self._mail_numbers = itertools.count(1)
        fill_standard_fds()
        with contextlib.ExitStack() as opened:  # closed again if there is not enough for all
            self._wake_end, self._wake_signal = map(opened.enter_context, socket.socketpair())
            self._last_words = LastWords() if ARE_KEPT else None
            if self._last_words is not None:
                opened.callback(os.close, self._last_words.fd)
            self._memory_fd = _anonymous_file() if shared_memory else None
            if self._memory_fd is not None:
                opened.callback(os.close, self._memory_fd)
            self._bell = _doorbell() if self._memory_fd is not None else None
            if self._bell is not None:
                opened.callback(os.close, self._bell)
            self._ready = ReadySet()
            opened.callback(self._ready.close)
            self._watch_own()
            opened.pop_all()
        spawner.report_to(self._ready)

    def _watch_own(self) -> None:
        for end in (self._wake_end, self._wake_signal):
            end.setblocking(False)
        self._ready.add(self._wake_end)
        if self._bell is not None:
            self._ready.add(self._bell)
        for fd in (self._wake_end.fileno(), self._wake_signal.fileno(), *self._shared_fds):
            keep_from_children(fd)

    # -- hosts ------------------------------------------------------------------------------

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Pickle all factories, then start the workers.

        Raises:
            ConfigError: a factory cannot be pickled; no process was started.
        """
        orders = [self._orders(spec) for spec in specs]
        for spec, payload in zip(specs, orders, strict=True):
            try:
                channel = self._start(spec)
            except (OSError, LaunchError) as error:
                self.arrivals.append((spec.host_id, HostDied(None, f"not started: {error}")))
                continue
            for fd in channel.fds:
                keep_from_children(fd)
            self._ready.add(channel)
            channel.host_id = spec.host_id
            self._channels[spec.host_id] = channel
            self._alive.add(spec.host_id)
            self.send(spec.host_id, encode(Message(Op.HELLO, 0, 0, UNANSWERED, payload)))

    def _start(self, spec: HostSpec) -> Channel:
        bell = None
        if self._bell is not None and len(self._host_bells) < _MOST_HOST_BELLS:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            if self._last_words is not None:
                self._last_words.prepare(spec.index)
            fds = self._shared_fds if bell is None else (*self._shared_fds, bell)
            channel = self._spawner.start(spec, fds)
        except BaseException:
            if bell is not None:
                os.close(bell)
            raise
        if bell is not None:
            keep_from_children(bell)
            self._host_bells[spec.host_id] = bell
        self._index_of[spec.host_id] = spec.index
        return channel

    @property
    def _shared_fds(self) -> tuple[int, ...]:
        words = None if self._last_words is None else self._last_words.fd
        return tuple(fd for fd in (words, self._memory_fd, self._bell) if fd is not None)

    def _orders(self, spec: HostSpec) -> Orders:
        pickled: dict[bytes, int] = {}  # equal factories travel once
        envs: list[tuple[int, int, int, int]] = []
        for order in spec.envs:
            factory = b""
            if not self._spawner.inherits_factories:
                factory = self._pickle(order.factory, order)
            place = pickled.setdefault(factory, len(pickled))
            envs.append((order.env_id, order.generation, order.request_id, place))
        settings = self._pickle(spec.settings, spec.envs[0])
        return Orders(tuple(envs), tuple(pickled), spec.index, settings, self._settings)

    def _pickle(self, value: Any, order: EnvOrder) -> bytes:
        known = self._pickled.get(id(value))
        if known is None:
            try:
                known = (value, cloudpickle.dumps(value))
            except Exception as error:  # whatever a __reduce__ may raise
                raise ConfigError(
                    f"the env_fn of env {order.env_id} ({order.factory!r}), or a space that was "
                    f"given with it, cannot be sent to a worker process: {type(error).__name__}: "
                    f"{error}. Build such objects inside the function, or use context: fork or "
                    "type: base."
                ) from error
            self._pickled[id(value)] = known
        return known[1]

    def kill(self, host_id: int) -> None:
        """Send SIGKILL to the worker and its children; HostDied follows once it is reaped."""
        self._drop_channel(host_id)
        if host_id in self._alive:
            self._spawner.signal(host_id, SIGKILL)

    def give_up(self, host_id: int) -> None:
        """Do what the spawner can still do about a worker that does not die."""
        if host_id in self._alive:
            self._spawner.give_up(host_id)

    def _drop_channel(self, host_id: int) -> None:
        channel = self._channels.pop(host_id, None)
        bell = self._host_bells.pop(host_id, None)
        if bell is not None:
            forget_fd(bell)
            os.close(bell)
        self._unsent.pop(host_id, None)
        if channel is not None:
            self._ready.discard(channel)
            for fd in channel.fds:
                forget_fd(fd)
            channel.close()

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers that are not known to be dead, by host_id."""
        return self._spawner.pids

    # -- messages ---------------------------------------------------------------------------

    def prepare(self, host_id: int, message: Message) -> bytes:
        """Encode a message."""
        return encode(message)

    def send(self, host_id: int, prepared: Any) -> None:
        """Send a frame without blocking."""
        channel = self._channels.get(host_id)
        if channel is None:
            return  # killed, or its death has been seen; HostDied comes or has come
        self._unsent[host_id] = channel  # before: an interrupt may keep it from being sent
        try:
            channel.send(prepared)
        except ChannelClosedError:
            self._deaf.add(host_id)
        else:
            self._count(host_id)
        if not channel.has_unsent or host_id in self._deaf:
            self._unsent.pop(host_id, None)

    def _count(self, host_id: int) -> None:
        """Have a host that takes posted steps see that there is something to read."""
        if self._mail is not None:
            self._mail[self._index_of[host_id]] = next(self._mail_numbers)

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Ask the connection."""
        channel = self._channels.get(host_id)
        return channel is not None and channel.has_sent(prepared)

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Wait, then read what has come."""
        if self._reading is not None:
            self._read(self._reading)  # what an interrupt has left
        if self._unsent:
            self._flush()
        if timeout_s == 0.0 or self.arrivals or self.needs_attention:
            ready = self._ready.ready()
        elif self._bell is not None and pivot is None and not self._unsent:
            ready = self._ready.ready(timeout_s)
        else:
            self._wait(self._watched(pivot), timeout_s)
            ready = self._ready.ready()
        for item in ready:
            if item is self._bell:
                self._silence_bell()
            elif isinstance(item, _CHANNELS):
                self._read(item)
            elif item is self._wake_end:
                self._silence_wake()
            else:
                self._any_died = True

    @property
    def needs_attention(self) -> bool:
        """Whether workers have died, or are to be ended."""
        return bool(self._any_died or self._ruined or self._deaf or self._spawner.has_deaths)

    def attend(self) -> None:
        """End workers that are of no use any more, and reap those that have died."""
        for host_id, garbage in self._ruined.items():
            if garbage is not None:
                self.arrivals.append((host_id, garbage))
            self.kill(host_id)
        self._ruined.clear()
        for host_id in self._deaf:  # it takes nothing any more; what it has sent still counts
            self._unsent.pop(host_id, None)
            if host_id in self._alive:
                self._spawner.signal(host_id, SIGKILL)
        self._deaf.clear()
        if self._any_died or self._spawner.has_deaths:
            self._any_died = False
            self._collect_deaths()

    def await_ring(self, timeout_s: float) -> bool:
        """Wait for the doorbell alone."""
        bell = self._bell
        if bell is None or self._unsent or self.arrivals or self.needs_attention:
            return False
        if self._ready.only_ready(timeout_s) != bell:
            return False
        self._silence_bell()
        return True

    def _watched(self, pivot: int | None) -> list[Any]:
        if pivot is None or pivot not in self._channels:
            return self._ready.waitables()
        return [*self.waitables([pivot]), self._wake_end]

    def _collect_deaths(self) -> None:
        for host_id, died in self._spawner.deaths():
            channel = self._channels.get(host_id)
            while channel is not None and self._read(channel) and host_id not in self._ruined:
                pass  # what it sent before it died
            garbage = self._ruined.pop(host_id, None)
            if garbage is not None:
                self.arrivals.append((host_id, garbage))
            self._drop_channel(host_id)
            self._alive.discard(host_id)
            index = self._index_of.pop(host_id, None)
            if self._last_words is not None and index is not None:
                died = died._replace(last_words=self._last_words.take(index))
            self.arrivals.append((host_id, died))

    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return connections, and what reports the deaths of their hosts."""
        present = [i for i in dict.fromkeys(hosts) if i in self._alive]
        channels = [self._channels[i] for i in present if i in self._channels]
        deaths = {self._spawner.death_of(i) for i in present}
        return [*channels, *(item for item in deaths if item is not None)]

    def any_death(self) -> list[Any]:
        """Return what becomes readable when any worker dies."""
        return self._spawner.any_death()

    def _wait(self, objects: list[Any], timeout_s: float | None) -> None:
        if not self._unsent:
            wait(objects, timeout_s)
            return
        with selectors.DefaultSelector() as selector:
            for item in objects:
                selector.register(item, selectors.EVENT_READ)
            for channel in self._unsent.values():
                selector.register(channel.write_fd, selectors.EVENT_WRITE)
            selector.select(timeout_s)
        self._flush()

    @property
    def has_unsent(self) -> bool:
        """Whether a host has not taken yet all that it was sent."""
        return bool(self._unsent)

    def _flush(self) -> None:
        """Send on what hosts did not take at once."""
        for host_id, channel in list(self._unsent.items()):
            try:
                channel.flush()
            except ChannelClosedError:
                self._unsent.pop(host_id, None)
                self._deaf.add(host_id)
            self._count(host_id)  # also of a part: the rest waits until the host has read it
            if not channel.has_unsent:
                self._unsent.pop(host_id, None)

    def _read(self, channel: Channel) -> bool:
        """Append what a host has sent to `arrivals`; False if that is nothing.

        After an interrupt at any point of it, it goes on where it was: see `FrameChannel.frames`.
        """
        host_id, arrivals = channel.host_id, self.arrivals
        self._reading = channel
        found = False
        try:
            channel.fill()
        except FrameError as error:
            broken: FrameError | ChannelClosedError | None = error
        except ChannelClosedError as error:
            broken = error  # a worker that has let go of its connection is of no use
        else:
            broken = None
        frames = channel.frames
        try:
            while frames:
                frame, item = channel.first
                if frame is not frames[0]:
                    item = (host_id, frames[0].message())
                    channel.first = (frames[0], item)
                if not arrivals or arrivals[-1] is not item:
                    arrivals.append(item)
                frames.popleft()
                found = True
        except FrameError as error:
            frames.clear()
            broken = error
        if broken is not None:
            self._ruined[host_id] = Garbage(str(broken)) if isinstance(broken, FrameError) else None
        self._reading = None
        return found

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted in shared memory: there is a doorbell for the replies."""
        return self._bell is not None

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Have hosts look at the block: all in one loop, for this runs for each batch."""
        bells, write = self._host_bells, os.eventfd_write if self._host_bells else None
        value = BELL_VALUE_ASKED if asks else BELL_VALUE
        for host_id in host_ids:
            bell = bells.get(host_id)
            if bell is None or write is None:
                channel = self._channels.get(host_id)
                if channel is not None:
                    channel.ring(BELL_ASKED if asks else BELL)
                continue
            try:
                write(bell, value)
            except BlockingIOError:  # it has been rung for ever, and does not look
                continue

    def _silence_bell(self) -> None:
        if self._bell is not None:
            try:  # not `suppress`: this runs for each batch
                os.eventfd_read(self._bell)
            except BlockingIOError:
                return

    def wake(self) -> None:
        """Make `poll` return."""
        with contextlib.suppress(OSError):  # full: a wake-up is on its way; closed: no one waits
            self._wake_signal.send(b"w")

    def _silence_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)

    # -- memory -----------------------------------------------------------------------------

    def place(self, nbytes: int) -> memoryview | None:
        """Allocate shared memory; every page is there or this raises."""
        if self._memory_fd is None or nbytes == 0:
            return None
        refuse_more_than_there_is(nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._memory_fd, 0, nbytes)
        else:
            os.ftruncate(self._memory_fd, nbytes)
        self._memory = mmap.mmap(self._memory_fd, nbytes)
        return memoryview(self._memory)

    def count_mail(self, mail: Any) -> None:
        """Write there what counts the messages."""
        self._mail = items(mail)

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Ask, terminate, kill, reap; all workers side by side."""
        if self._closed:
            return
        try:
            self._ask_to_end(grace_s)
        finally:  # also when Ctrl-C cuts the grace short
            for host_id in list(self._alive):
                self._spawner.signal(host_id, SIGKILL)
            self._await_deaths(_TERMINATE_S)
            for host_id in list(self._channels):
                self._drop_channel(host_id)
            self._spawner.close()
            self._release()
            self._closed = True

    def _ask_to_end(self, grace_s: float) -> None:
        for host_id in list(self._channels):
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
            remaining_s = end - time.monotonic()
            if remaining_s <= 0.0:
                return False
            self.poll(remaining_s)
            self.attend()
            arrived, self.arrivals = self.arrivals, deque()
            for _, arrival in arrived:
                if isinstance(arrival, HostDied):
                    warn_of_fault(arrival)
        return True

    def hurry(self) -> None:
        """Give workers that are asked to end no more time."""
        self._hurried = True
        self.wake()

    def _release(self) -> None:
        for end in (self._wake_end, self._wake_signal):
            forget_fd(end.fileno())
            end.close()
        self._ready.close()
        # Not closed: arrays that were handed out do not keep it open, they keep it alive, and it is
        # unmapped with the last of them.
        self._memory = self._mail = None
        for fd in self._shared_fds:
            forget_fd(fd)
            os.close(fd)
        self._memory_fd = self._bell = self._last_words = None


def _doorbell() -> int | None:
    """Return an fd that hosts ring; None where steps cannot be posted."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if block_is_possible() else None


def _anonymous_file() -> int | None:
    """Return an fd of shared memory without a name, or None where there is none."""
    if sys.platform == "win32":
        return None
    if hasattr(os, "memfd_create"):
        return os.memfd_create("envmgr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
