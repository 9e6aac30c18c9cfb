"""Frames over the two ends of a connection to a host.

A connection is a pair of pipes, which cost half as much as a socket pair. The parent's ends never
block, so that a host which does not read cannot hold the trainer up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, repeat, takewhile
from multiprocessing.connection import wait
from typing import NamedTuple

from envmgr.wire.frames import Frame, FrameError, needed_for, split_frame

_PIPE_BYTES = 1 << 16
_READ_BYTES = _PIPE_BYTES  # larger buffers cost more to allocate

BELL, BELL_ASKED = b"\0", b"\1"
"""Single bytes between frames; no frame begins with either. The first one says: look at the block.
The second one says: look, and ring back."""

_BELLS = BELL + BELL_ASKED

BELL_VALUE, BELL_VALUE_ASKED = 1, 1 << 32
"""The same bells, as values added to the eventfd of a host that has one. When a process writes to a
pipe, the kernel expects the writer to sleep, and wakes the reader on the writer's core, before the
writer can ring for others.
"""


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Incoming(NamedTuple):
    """Bytes that were read but are not a whole frame.

    Attributes:
        parts: the beginning of a frame.
        n_bytes: how many bytes `parts` have.
        needed: how many bytes the frame has at least.
        broken: the error if what arrived is not a frame; nothing after it is trusted.
    """

    parts: Sequence[bytes] = ()
    n_bytes: int = 0
    needed: int = 0
    broken: FrameError | None = None


NOTHING_INCOMING = Incoming()
"""All bytes that were read belong to whole frames."""


class FrameChannel:
    """Frames over two pipes: the parent's ends never block, the host's do.

    Args:
        read_fd: the fd for reading what the other end writes; the channel owns it.
        write_fd: the fd for writing what the other end reads; the channel owns it.
        blocking: whether `receive` and `send` wait.

    Attributes:
        host_id: the host at the other end, for a wait for several channels.
        index: the index of that host.
        read_fd: becomes readable when there is something to receive.
        write_fd: becomes writable when `flush` can go on.
        asked: whether a bell that wants an answer has come since the owner set this to False.
        incoming: bytes that were read but are not a whole frame.
    """

    host_id = index = 0
    asked = False

    def __init__(self, read_fd: int, write_fd: int, *, blocking: bool) -> None:
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, blocking)
        self.read_fd = read_fd
        self.write_fd = write_fd
        # The frames that are kept, and how many bytes of them each write has taken. Together these
        # are less than the first frame, except for what `flush` has just written. The tuple is
        # replaced as a whole, so that an interrupt finds either the old one or the new one.
        self._sending: tuple[list[bytes], list[int]] = ([], [])
        self.incoming = NOTHING_INCOMING

    def fileno(self) -> int:
        """Return the fd that becomes readable; -1 once closed."""
        return self.read_fd

    @property
    def fds(self) -> tuple[int, ...]:
        """The fds of this end."""
        return (self.read_fd, self.write_fd)

    # -- sending ----------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Whether the other end has not taken everything yet; call `flush` once it can."""
        return bool(self._sending[0])

    def send(self, frame: bytes) -> None:
        """Send a frame; an end that does not block keeps for `flush` what is not taken now.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        if self._sending[0]:
            self._sending[0].append(frame)
        else:
            try:
                n_bytes = os.write(self.write_fd, frame)
            except BlockingIOError:
                n_bytes = 0
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if n_bytes == len(frame):
                return  # the ordinary case
            self._sending = ([frame], [n_bytes])
        self.flush()

    @staticmethod
    def write_each(
        channels: Sequence[FrameChannel], frames: Sequence[bytes], written: list[int]
    ) -> None:
        """Write to several channels, none of which has anything unsent.

        The call can be interrupted, and repeated with the same arguments.

        Args:
            channels: ends that never block.
            frames: one for each.
            written: how many bytes each has taken; -1 if the other end is closed.
        """
        fds = [channel.write_fd for channel in channels]
        while len(written) < len(fds):
            start = len(written)
            try:
                # In one go: no signal handler can run between a write and the note of it.
                written.extend(map(os.write, fds[start:], frames[start:]))
            except BlockingIOError:
                written.append(0)
            except OSError:
                written.append(-1)

    def keep(self, frame: bytes, n_bytes: int) -> None:
        """Keep a frame for `flush`; only once, however often this is called with it.

        Args:
            frame: the frame.
            n_bytes: how many bytes of it were taken; used only if no other frame is kept.
        """
        frames = self._sending[0]
        if not frames:
            self._sending = ([frame], [n_bytes])
        elif frames[-1] is not frame:
            frames.append(frame)

    def ring(self, bell: bytes) -> None:
        """Tell the other end to look at the block; do nothing if that end is gone.

        A bell that finds no room in the pipe is not needed: the other end then has something to
        read, and looks at the block before it waits for more.
        """
        frames = self._sending[0]
        if frames:
            frames.append(bell)
            return
        try:
            os.write(self.write_fd, bell)
        except OSError:
            return

    def flush(self) -> None:
        """Send more of the frames that are kept.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            while self._sending[0]:
                frames, taken = self._sending
                offset, n_sent = sum(taken), 0
                while n_sent < len(frames) and offset >= len(frames[n_sent]):
                    offset -= len(frames[n_sent])
                    n_sent += 1
                if n_sent:
                    self._sending = (frames[n_sent:], [offset])
                    continue
                # Small frames are joined. A large one is written alone, and so is not copied: if
                # joined with others, it would be copied for each part that the pipe takes.
                fits = takewhile(lambda size: size <= _PIPE_BYTES, accumulate(map(len, frames)))
                n_frames = max(sum(1 for _ in fits), 1)
                data = memoryview(b"".join(frames[:n_frames]))[offset:]
                # In one go, as in `write_each`.
                taken.extend(map(os.write, (self.write_fd,), (data,)))
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    # -- receiving --------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Return whether `receive` has bytes to read or a closed end to report; does not wait."""
        return bool(wait([self.read_fd], 0.0))

    def receive(self) -> Sequence[Frame]:
        """Return the whole frames that have arrived; a blocking end waits for bytes once.

        Raises:
            ChannelClosedError: the other end is closed, and all frames before that were returned.
            FrameError: garbage arrived, and all frames before that were returned.
        """
        if self.incoming.broken is not None:
            raise self.incoming.broken
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return ()
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of stream")
        frames, self.incoming = self.split(data)
        if self.incoming.broken is not None and not frames:
            raise self.incoming.broken
        return frames

    @staticmethod
    def read_each(channels: Sequence[FrameChannel], found: list[bytes | None]) -> None:
        """Read once from each of several channels.

        The call can be interrupted, and repeated with the same arguments.

        Args:
            channels: ends that never block.
            found: the bytes read from each; None if there were none, empty if the other end is
                closed.
        """
        fds = [channel.read_fd for channel in channels]
        while len(found) < len(fds):
            try:
                # In one go, as in `write_each`.
                found.extend(map(os.read, fds[len(found) :], repeat(_READ_BYTES)))
            except BlockingIOError:
                found.append(None)
            except OSError:
                found.append(b"")

    def split(self, data: bytes) -> tuple[Sequence[Frame], Incoming]:
        """Return the frames that are whole with these bytes, and the new value of `incoming`.

        It is left to the caller to replace `incoming`: until then, this can be called again.
        """
        parts, n_bytes, needed, broken = self.incoming
        if broken is not None:
            return (), self.incoming
        if not parts and data[0] in _BELLS:
            data = self._without_bells(data)
        n_bytes += len(data)
        if n_bytes < needed:
            return (), Incoming([*parts, data], n_bytes, needed)
        if parts:
            data = b"".join([*parts, data])
        found: list[Frame] = []
        try:
            while data and (parsed := split_frame(data)) is not None:
                found.append(parsed[0])
                data = data[parsed[1] :]
                if data and data[0] in _BELLS:
                    data = self._without_bells(data)
        except FrameError as error:
            return found, Incoming(broken=error)
        return found, Incoming([data], len(data), needed_for(data)) if data else NOTHING_INCOMING

    def _without_bells(self, data: bytes) -> bytes:
        rest = data.lstrip(_BELLS)
        self.asked = self.asked or BELL_ASKED in data[: len(data) - len(rest)]
        return rest

    def close(self) -> None:
        """Close both pipes."""
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1
