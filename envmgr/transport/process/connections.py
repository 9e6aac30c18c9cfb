"""The connections to workers: frames are sent without blocking, and read when they have come.

Frames for several hosts are written in one go, and what has come from several hosts is read in one
go. So an interrupt finds one batch, with a record of how much of it was done.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envmgr.journal import Journal
from envmgr.transport.base import Arrival, Garbage
from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.ready import ReadySet, await_any
from envmgr.wire.block import items
from envmgr.wire.channel import ChannelClosedError, FrameChannel, Incoming
from envmgr.wire.frames import Frame, FrameError
from envmgr.wire.large_messages import IN_BUFFER, LargeMessageBuffers


class _Writing(NamedTuple):
    """A batch of frames that is being written to several channels.

    Attributes:
        requests: the given queue; it is emptied when all frames are written, or kept for later.
        channels: where the frames go; first those that have not taken all that they were sent
            before.
        frames: the bytes for each channel.
        written: how many of these bytes each channel has taken, for the channels tried so far.
    """

    requests: deque[tuple[int, bytes]]
    channels: Sequence[Any]
    frames: Sequence[bytes]
    written: list[int]


class _Reading:
    """What is being read from several channels.

    Attributes:
        found: the bytes of each channel, for the channels tried so far.
        came: what these bytes contain, once all were read.
    """

    __slots__ = ("came", "channels", "found")

    def __init__(self, channels: Sequence[Any]) -> None:
        self.channels = channels
        self.found: list[bytes | None] = []
        self.came: _Came | None = None


class _Came(NamedTuple):
    """What was read from several channels, and has not been stored yet.

    Attributes:
        incoming: the new values of `FrameChannel.incoming`, where that changes.
        ruined: hosts that have to be ended.
        in_buffers: frames whose messages were in the buffers of their hosts.
    """

    arrivals: deque[tuple[int, Arrival]]
    incoming: list[tuple[FrameChannel, Incoming]]
    ruined: dict[int, Garbage | None]
    in_buffers: list[tuple[Frame, int]]


class Connections:
    """A channel to each host, by host_id.

    Args:
        ready: the set in which the channels are watched.
        as_arrival: turns a frame into what arrives.
        buffers: where hosts put large messages, if they have such buffers.

    Attributes:
        arrivals: what has come; see `Transport`.
        unsent: channels of hosts that have not yet taken all that they were sent.
        ruined: hosts that have to be ended, and the garbage that they have sent, if any.
        deaf: hosts that have closed their end, and take nothing any more.
    """

    def __init__(
        self,
        ready: ReadySet,
        as_arrival: Callable[[Frame], Arrival] = Frame.message,
        buffers: LargeMessageBuffers | None = None,
    ) -> None:
        self._as_arrival = as_arrival
        self._large_messages = buffers
        self.by_host: dict[int, FrameChannel] = {}
        self.arrivals: deque[tuple[int, Arrival]] = deque()
        self.unsent: dict[int, FrameChannel] = {}
        self.ruined: dict[int, Garbage | None] = {}
        self.deaf: set[int] = set()
        self._ready = ready
        self._messages_sent: Any = None
        self._message_numbers = itertools.count(1)
        self._journal = Journal()

    def add(self, host_id: int, index: int, channel: FrameChannel) -> None:
        """Take over the channel to a new host.

        Args:
            host_id: the host.
            index: the index of the host, at which its messages are counted.
            channel: the parent's end.

        Raises:
            OSError: the channel cannot be watched; it was closed.
        """
        try:
            self._ready.add(channel)
        except OSError:
            channel.close()
            raise
        for fd in channel.fds:
            keep_from_children(fd)
        channel.host_id, channel.index = host_id, index
        self.by_host[host_id] = channel

    def drop(self, host_id: int) -> None:
        """Close the channel to a host, if there is one."""
        channel = self.by_host.pop(host_id, None)
        self.unsent.pop(host_id, None)
        if channel is not None:
            self._ready.discard(channel)
            for fd in channel.fds:
                forget_fd(fd)
            channel.close()

    def finish(self) -> None:
        """Complete the writing and reading that an interrupt has left."""
        self._journal.finish()

    # -- sending ----------------------------------------------------------------------------

    def count_messages(self, counts: Any) -> None:
        """Count messages in `Block.messages_sent`, where hosts that take posted steps look."""
        self._messages_sent = None if counts is None else items(counts)

    def _count(self, channel: FrameChannel) -> None:
        if self._messages_sent is not None:
            self._messages_sent[channel.index] = next(self._message_numbers)

    def send(self, host_id: int, frame: Any) -> None:
        """Send a frame without blocking; nothing happens if there is no channel.

        This must not be interrupted.
        """
        self._journal.finish()  # a handler that closes may have come while frames were written
        channel = self.by_host.get(host_id)
        if channel is None:
            return  # killed, or its death has been seen; HostDied comes or has come
        try:
            channel.send(frame)
        except ChannelClosedError:
            self.deaf.add(host_id)
            return
        self._count(channel)
        if channel.has_unsent:
            self.unsent[host_id] = channel
        else:
            self.unsent.pop(host_id, None)

    def send_each(self, requests: deque[tuple[int, Any]]) -> None:
        """Send frames to several hosts; all frames for one host are written together.

        May be interrupted; it is then called again with the same queue. The queue is empty when all
        was sent.
        """
        self._journal.finish()  # these, perhaps
        if requests:
            self._journal.do(self._write, self._to_write(requests))

    def _to_write(self, requests: deque[tuple[int, bytes]]) -> _Writing:
        by_host = self.by_host
        parts: dict[int, list[bytes]] = {}
        for host_id, frame in requests:
            parts.setdefault(host_id, []).append(frame)
        channels = [by_host[host_id] for host_id in parts if host_id in by_host]
        written: list[int] = []
        if self.unsent:
            channels.sort(key=lambda channel: not channel.has_unsent)
            written = [0 for channel in channels if channel.has_unsent]
        frames = [b"".join(parts[channel.host_id]) for channel in channels]
        return _Writing(requests, channels, frames, written)

    def _write(self, writing: _Writing, again: bool) -> None:
        """Write the rest of the batch; what a channel does not take now is kept."""
        requests, channels, frames, written = writing
        if channels:
            channels[0].write_each(channels, frames, written)
            if written != [*map(len, frames)]:
                self._keep_rest(channels, frames, written)
            if self._messages_sent is not None:
                for channel in channels:
                    self._count(channel)
        requests.clear()

    def _keep_rest(
        self, channels: Sequence[FrameChannel], frames: Sequence[bytes], written: Sequence[int]
    ) -> None:
        for channel, frame, n_bytes in zip(channels, frames, written, strict=True):
            if n_bytes < 0:
                self.deaf.add(channel.host_id)
            elif n_bytes < len(frame):
                channel.keep(frame, n_bytes)
                self.unsent[channel.host_id] = channel

    def wait(self, objects: Sequence[Any], timeout_s: float | None) -> None:
        """Wait until one of some objects is readable, or more of what is unsent can be sent."""
        await_any(objects, timeout_s, [channel.write_fd for channel in self.unsent.values()])
        if self.unsent:
            self.flush()

    def flush(self) -> None:
        """Send more of what hosts did not take at once."""
        for host_id, channel in list(self.unsent.items()):
            try:
                channel.flush()
            except ChannelClosedError:
                self.unsent.pop(host_id, None)
                self.deaf.add(host_id)
            self._count(channel)  # for a part, too: the rest waits until the host has read it
            if not channel.has_unsent:
                self.unsent.pop(host_id, None)

    # -- reading ----------------------------------------------------------------------------

    def read(self, channels: Sequence[FrameChannel]) -> None:
        """Append what hosts have sent to `arrivals`.

        After an interrupt at any point, `finish` completes it.
        """
        self._journal.do(self._read, _Reading(channels))

    def _read(self, reading: _Reading, again: bool) -> None:
        if reading.came is None:  # so nothing has come of it so far
            reading.came = self._taken_apart(reading.channels, reading.found)
        arrivals, changes, ruined, in_buffers = reading.came
        for channel, incoming in changes:
            channel.incoming = incoming
        self.ruined.update(ruined)
        # In one go: at any moment, each of them is in one of the two queues.
        self.arrivals.extend(map(deque.popleft, itertools.repeat(arrivals, len(arrivals))))
        if self._large_messages is not None:
            for frame, host_id in in_buffers:
                self._large_messages.free(frame, host_id)  # not before: it is not read again

    def _taken_apart(self, channels: Sequence[Any], found: list[bytes | None]) -> _Came:
        """Return what has come on channels; their bytes are read first, unless that was done."""
        channels[0].read_each(channels, found)
        came, as_arrival, buffers = (
            _Came(deque(), [], {}, []),
            self._as_arrival,
            self._large_messages,
        )
        for channel, data in zip(channels, found, strict=True):
            if not data:
                if data is not None:  # a worker that has closed its connection is of no use
                    came.ruined[channel.host_id] = None
                continue
            frames, incoming = channel.split(data)
            try:
                for frame in frames:
                    if frame.op & IN_BUFFER and buffers is not None:
                        arrival: Arrival = buffers.message(frame, channel.host_id)
                        came.in_buffers.append((frame, channel.host_id))
                    else:
                        arrival = as_arrival(frame)
                    came.arrivals.append((channel.host_id, arrival))
            except FrameError as error:
                came.ruined[channel.host_id] = Garbage(str(error))
                continue
            if incoming is not channel.incoming:
                came.incoming.append((channel, incoming))
                if incoming.broken is not None:
                    came.ruined[channel.host_id] = Garbage(str(incoming.broken))
        return came

    def read_last(self, host_id: int) -> None:
        """Read all that a dead host has sent, report garbage in it, and close its channel."""
        self.finish()
        channel, n_read = self.by_host.get(host_id), -1
        while channel is not None and host_id not in self.ruined and n_read < len(self.arrivals):
            n_read = len(self.arrivals)
            self.read([channel])
        garbage = self.ruined.pop(host_id, None)
        if garbage is not None:
            self.arrivals.append((host_id, garbage))
        self.drop(host_id)
