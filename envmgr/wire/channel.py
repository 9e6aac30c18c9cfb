"""Frames over the two ends of a connection to a host.

On POSIX the connection is a pair of pipes, which cost half of what a socket pair does. The parent's
ends never block, so that a host which does not read cannot hold the trainer up. Elsewhere it is a
duplex pipe of `multiprocessing`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from envmgr.wire.frames import Frame, FrameError, split_frame

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


class FrameChannel:
    """Frames over two pipes: the parent's ends never block, the host's do.

    Args:
        read_fd: what the other end writes comes out here; the channel owns it.
        write_fd: what is written here, the other end reads; the channel owns it.
        blocking: whether `receive` and `send` wait.

    Attributes:
        host_id: the host at the other end, for whoever waits for several channels.
        write_fd: becomes writable when `flush` can go on.
        asked: a bell that wants an answer has come since the owner has set this to False.
    """

    host_id = 0
    asked = False

    def __init__(self, read_fd: int, write_fd: int, *, blocking: bool) -> None:
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, blocking)
        self._read_fd = read_fd
        self.write_fd = write_fd
        self._unsent = bytearray()
        self._unread = bytearray()
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
        return bool(self._unsent)

    @property
    def is_broken(self) -> bool:
        """Whether garbage arrived after the frames that were returned: `receive` raises now."""
        return self._broken is not None

    def send(self, frame: bytes) -> None:
        """Send a frame; without blocking, keep for `flush` what is not taken now.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        if not self._unsent:
            try:
                sent = os.write(self.write_fd, frame)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if sent == len(frame):
                return  # the ordinary case
            frame = frame[sent:]
        self._unsent += frame
        self.flush()

    def ring(self, bell: bytes) -> None:
        """Have the other end look at the block; nothing happens if it is gone.

        A bell that finds no room in the pipe is not needed: the other end looks at the block before
        it waits for more, and there is something for it to read.
        """
        if self._unsent:
            self._unsent += bell
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
            while self._unsent:
                sent = os.write(self.write_fd, self._unsent)
                del self._unsent[:sent]
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
        if self._broken is not None:
            raise self._broken
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return ()
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of stream")
        frames: list[Frame] = []
        try:
            if not self._unread:
                if data[0] in _BELLS and not (data := self._without_bells(data)):
                    return ()  # the ordinary case for steps in the block
                parsed = split_frame(data)
                if parsed is not None and parsed[1] == len(data):
                    return (parsed[0],)  # the ordinary case for messages: one frame, whole
            self._unread += data
            while (parsed := split_frame(self._unread)) is not None:
                del self._unread[: parsed[1]]
                frames.append(parsed[0])
                if self._unread and self._unread[0] in _BELLS:
                    self._unread[:] = self._without_bells(bytes(self._unread))
        except FrameError as error:
            self._broken = error
            if not frames:
                raise
        return frames

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
        has_unsent: always False: `send` keeps nothing back.
        asked: always False: there is no block where there are no pipes.
    """

    host_id = 0
    has_unsent = False
    is_broken = False
    asked = False

    def __init__(self, connection: Connection, *, blocking: bool) -> None:
        self._connection = connection
        self._blocking = blocking

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

    def close(self) -> None:
        """Close the pipe."""
        self._connection.close()


Channel = FrameChannel | PipeChannel
