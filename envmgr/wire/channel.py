"""Frames over the two ends of a connection to a host.

On POSIX the connection is a pair of pipes, which cost half of what a socket pair does. The parent's
ends never block, so that a host which does not read cannot hold the trainer up. Elsewhere it is a
duplex pipe of `multiprocessing`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from envmgr.wire.frames import Frame, FrameError, needed_for, split_frame

_READ_BYTES = 1 << 16  # what a pipe holds; larger buffers cost more to allocate

BELL, BELL_ASKED = b"\0", b"\1"
"""Single bytes between frames, which begin otherwise: look at the block, and answer with a ring."""

_BELLS = BELL + BELL_ASKED

BELL_VALUE, BELL_VALUE_ASKED = 1, 1 << 32
"""The same, added to the eventfd of a host that has one. Who writes to a pipe tells the kernel that
it goes to sleep at once: the reader is woken on its processor, and keeps it from ringing others.
"""


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class _Incoming(NamedTuple):
    """What has been read.

    Attributes:
        frames: whole frames that were not taken.
        read: bytes that were read and are not in the others.
        parts: the beginning of a frame that is not whole.
        n_bytes: size of that.
        needed: bytes that it takes at least.
    """

    frames: deque[Frame]
    read: list[bytes]
    parts: Sequence[bytes] = ()
    n_bytes: int = 0
    needed: int = 0


class FrameChannel:
    """Frames over two pipes: the parent's ends never block, the host's do.

    Args:
        read_fd: what the other end writes comes out here; the channel owns it.
        write_fd: what is written here, the other end reads; the channel owns it.
        blocking: whether `receive` and `send` wait.

    Attributes:
        host_id: the host at the other end, for whoever waits for several channels.
        index: which of the manager's hosts that is.
        write_fd: becomes writable when `flush` can go on.
        asked: a bell that wants an answer has come since the owner has set this to False.
        first: one of them and what it was made, for whoever takes them one by one.
    """

    host_id = index = 0
    asked = False

    def __init__(self, read_fd: int, write_fd: int, *, blocking: bool) -> None:
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, blocking)
        self._read_fd = read_fd
        self.write_fd = write_fd
        # Each of these is replaced as a whole, so that an interrupt finds the one or the other.
        self._sending: tuple[list[bytes], list[int]] = ([], [])
        self._latest: bytes | None = None
        self._incoming = _Incoming(deque(), [])
        self.first: tuple[Frame | None, Any] = (None, None)
        self._broken: Exception | None = None

    def fileno(self) -> int:
        """Return the fd that becomes readable; -1 once closed."""
        return self._read_fd

    @property
    def fds(self) -> tuple[int, ...]:
        """The fds of this end."""
        return (self._read_fd, self.write_fd)

    @property
    def has_unsent(self) -> bool:
        """Whether the other end has not taken everything yet; call `flush` when it can."""
        return bool(self._sending[0])

    def send(self, frame: bytes) -> None:
        """Send a frame; without blocking, keep for `flush` what is not taken now.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        self._sending[0].append(frame)
        self._latest = frame
        self.flush()

    def has_sent(self, frame: bytes) -> bool:
        """Return whether this very object was given to `send` last, if that was interrupted."""
        frames = self._sending[0]
        return frame is self._latest or (bool(frames) and frames[-1] is frame)

    def ring(self, bell: bytes) -> None:
        """Have the other end look at the block; nothing happens if it is gone.

        A bell that finds no room in the pipe is not needed: the other end looks at the block before
        it waits for more, and there is something for it to read.
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
        """Send more of what is kept.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            while self._sending[0]:
                frames, taken = self._sending
                data: Any = frames[0]
                if taken or len(frames) > 1:
                    data = memoryview(b"".join(frames))[sum(taken) :]
                # In one go: no signal handler comes between the writing and the note of it.
                taken.extend(map(os.write, (self.write_fd,), (data,)))
                if taken[-1] == len(data):
                    self._sending = ([], [])
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def has_arrived(self) -> bool:
        """Return whether `receive` has something to read, or the end to report; does not wait."""
        return bool(wait([self._read_fd], 0.0))

    def receive(self) -> Sequence[Frame]:
        """Return the whole frames that have arrived; a blocking end waits for bytes once.

        Raises:
            ChannelClosedError: the other end is closed, and all frames before that were returned.
            FrameError: garbage arrived, and all frames before that were returned.
        """
        try:
            self.fill()
        except FrameError:
            if not self.frames:
                raise
        frames = list(self.frames)
        self.frames.clear()
        return frames

    def fill(self) -> None:
        """Put the whole frames that have arrived into `frames`; else as `receive`.

        Raises:
            ChannelClosedError: the other end is closed.
            FrameError: garbage arrived after what is in `frames`.
        """
        if self._broken is not None:
            raise self._broken
        kept, read, parts, n_bytes, needed = self._incoming
        try:
            if not read:  # else an interrupt has come since
                # In one go, as in `flush`.
                read.extend(map(os.read, (self._read_fd,), (_READ_BYTES,)))
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        data = read[0]
        if not data:
            raise ChannelClosedError("end of stream")
        if not parts and data[0] in _BELLS:
            data = self._without_bells(data)
        n_bytes += len(data)
        if n_bytes < needed:
            self._incoming = _Incoming(kept, [], [*parts, data], n_bytes, needed)
            return
        found, rest = self._split(b"".join([*parts, data]) if parts else data)
        frames = deque([*kept, *found]) if kept else deque(found)
        if rest:
            self._incoming = _Incoming(frames, [], [rest], len(rest), needed_for(rest))
        else:
            self._incoming = _Incoming(frames, [])
        if self._broken is not None:
            raise self._broken

    @property
    def frames(self) -> deque[Frame]:
        """What has arrived and was not taken."""
        return self._incoming.frames

    def _split(self, data: bytes) -> tuple[list[Frame], bytes]:
        """Return the frames in some bytes, and what is left."""
        found: list[Frame] = []
        try:
            while data and (parsed := split_frame(data)) is not None:
                found.append(parsed[0])
                data = data[parsed[1] :]
                if data and data[0] in _BELLS:
                    data = self._without_bells(data)
        except FrameError as error:
            self._broken = error
        return found, data

    def _without_bells(self, data: bytes) -> bytes:
        rest = data.lstrip(_BELLS)
        self.asked = self.asked or BELL_ASKED in data[: len(data) - len(rest)]
        return rest

    def close(self) -> None:
        """Close both pipes."""
        for fd in (self._read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self.write_fd = -1


class PipeChannel:
    """The same over a duplex pipe of `multiprocessing`, where fds cannot be passed (Windows).

    `send` may wait for the other end to read when a frame is large.

    Args:
        connection: one end of `multiprocessing.Pipe()`; the channel owns it.
        blocking: whether `receive` waits.

    Attributes:
        host_id: the host at the other end.
        index: which of the manager's hosts that is.
        has_unsent: always False: `send` keeps nothing back.
        asked: always False: there is no block where there are no pipes.
    """

    host_id = index = 0
    has_unsent = False
    asked = False

    def __init__(self, connection: Connection, *, blocking: bool) -> None:
        self._connection = connection
        self._blocking = blocking
        self.frames: deque[Frame] = deque()
        self.first: tuple[Frame | None, Any] = (None, None)

    @property
    def fds(self) -> tuple[int, ...]:
        """The handle of this end."""
        return (self._connection.fileno(),)

    @property
    def write_fd(self) -> int:
        """The same handle."""
        return self._connection.fileno()

    def fileno(self) -> int:
        """Return the handle, for waiting."""
        return self._connection.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            self._connection.send_bytes(frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def has_sent(self, frame: bytes) -> bool:
        """Return False: it cannot be told."""
        return False

    def ring(self, bell: bytes) -> None:
        """Do nothing: there is no block."""

    def flush(self) -> None:
        """Do nothing: `send` keeps nothing back."""

    def has_arrived(self) -> bool:
        """Return whether there is something to read, or the end to report; does not wait."""
        return bool(wait([self._connection], 0.0))

    def receive(self) -> Sequence[Frame]:
        """Return one frame, if one has arrived; a blocking end waits for it.

        Raises:
            ChannelClosedError: the other end is closed.
            FrameError: garbage arrived.
        """
        try:
            if not self._blocking and not self._connection.poll():
                return ()
            data = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ChannelClosedError(str(error)) from error
        parsed = split_frame(data)
        if parsed is None or parsed[1] != len(data):
            raise FrameError(f"a message of {len(data)} bytes is not one frame")
        return (parsed[0],)

    def fill(self) -> None:
        """As `receive`, into `frames`."""
        self.frames.extend(self.receive())

    def close(self) -> None:
        """Close the pipe."""
        self._connection.close()


Channel = FrameChannel | PipeChannel
