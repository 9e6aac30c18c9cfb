"""The connections to workers: sends without blocking, and reads what has come."""

from __future__ import annotations

import itertools
import selectors
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from envmgr.transport.base import Arrival, Garbage
from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.ready import ReadySet
from envmgr.wire.block import items
from envmgr.wire.channel import Channel, ChannelClosedError
from envmgr.wire.frames import Frame, FrameError
from envmgr.wire.rooms import IN_ROOM, Rooms


class Connections:
    """A channel to each host, by host_id.

    Args:
        ready: watches them.
        as_arrival: makes of a frame what arrives.
        rooms: where hosts put what is large, if they have such.

    Attributes:
        by_host: the channels.
        arrivals: what has come; see `Transport`.
        unsent: channels of hosts that have not taken yet all that they were sent.
        ruined: hosts that are to be ended, and what is to be said of them, if anything.
        deaf: hosts that take nothing any more.
    """

    def __init__(
        self,
        ready: ReadySet,
        as_arrival: Callable[[Frame], Arrival] = Frame.message,
        rooms: Rooms | None = None,
    ) -> None:
        self._as_arrival = as_arrival
        self._rooms = rooms
        self.by_host: dict[int, Channel] = {}
        self.arrivals: deque[tuple[int, Arrival]] = deque()
        self.unsent: dict[int, Channel] = {}
        self.ruined: dict[int, Garbage | None] = {}
        self.deaf: set[int] = set()
        self._ready = ready
        self._reading: Channel | None = None
        self._mail: Any = None
        self._mail_numbers = itertools.count(1)

    def add(self, host_id: int, index: int, channel: Channel) -> None:
        """Take over the channel to a new host.

        Args:
            host_id: the host.
            index: which of the manager's hosts it is: where its messages are counted.
            channel: the parent's end.
        """
        for fd in channel.fds:
            keep_from_children(fd)
        self._ready.add(channel)
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

    # -- sending ----------------------------------------------------------------------------

    def count_mail(self, mail: Any) -> None:
        """Have hosts that take posted steps see in `Block.mail` that there is something to read."""
        self._mail = None if mail is None else items(mail)

    def _count(self, channel: Channel) -> None:
        if self._mail is not None:
            self._mail[channel.index] = next(self._mail_numbers)

    def send(self, host_id: int, frame: Any) -> None:
        """Send a frame without blocking; nothing happens if there is no channel."""
        channel = self.by_host.get(host_id)
        if channel is None:
            return  # killed, or its death has been seen; HostDied comes or has come
        self.unsent[host_id] = channel  # before: an interrupt may keep it from being sent
        try:
            channel.send(frame)
        except ChannelClosedError:
            self.deaf.add(host_id)
        else:
            self._count(channel)
        if not channel.has_unsent or host_id in self.deaf:
            self.unsent.pop(host_id, None)

    def wait(self, objects: list[Any], timeout_s: float | None) -> None:
        """Wait until one of some objects is readable, or what is unsent can be sent on."""
        if not self.unsent:
            wait(objects, timeout_s)
            return
        with selectors.DefaultSelector() as selector:
            for item in objects:
                selector.register(item, selectors.EVENT_READ)
            for channel in self.unsent.values():
                selector.register(channel.write_fd, selectors.EVENT_WRITE)
            selector.select(timeout_s)
        self.flush()

    def flush(self) -> None:
        """Send on what hosts did not take at once."""
        for host_id, channel in list(self.unsent.items()):
            try:
                channel.flush()
            except ChannelClosedError:
                self.unsent.pop(host_id, None)
                self.deaf.add(host_id)
            self._count(channel)  # also of a part: the rest waits until the host has read it
            if not channel.has_unsent:
                self.unsent.pop(host_id, None)

    # -- reading ----------------------------------------------------------------------------

    def finish_reading(self) -> None:
        """Read what an interrupt has left."""
        if self._reading is not None:
            self.read(self._reading)

    def read(self, channel: Channel) -> bool:
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
                frame = frames[0]
                rooms = self._rooms if frame.op & IN_ROOM else None
                known, item = channel.first
                if known is not frame:
                    made = rooms.message(frame, host_id) if rooms else self._as_arrival(frame)
                    item = (host_id, made)
                    channel.first = (frame, item)
                if not arrivals or arrivals[-1] is not item:
                    arrivals.append(item)
                if rooms is not None:
                    rooms.free(frame, host_id)  # not before: it is not read again
                frames.popleft()
                found = True
        except FrameError as error:
            frames.clear()
            broken = error
        if broken is not None:
            self.ruined[host_id] = Garbage(str(broken)) if isinstance(broken, FrameError) else None
        self._reading = None
        return found

    def read_last(self, host_id: int) -> None:
        """Read all that a dead host has sent, say what was wrong with it, and close its channel."""
        channel = self.by_host.get(host_id)
        while channel is not None and self.read(channel) and host_id not in self.ruined:
            pass
        garbage = self.ruined.pop(host_id, None)
        if garbage is not None:
            self.arrivals.append((host_id, garbage))
        self.drop(host_id)
