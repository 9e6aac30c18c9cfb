"""Frames over one end of a connection to a host.

On POSIX the connection is a socket pair: the parent's end never blocks, so that a host which does
not read cannot hold the trainer up. Elsewhere it is a `multiprocessing` pipe.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

from envmgr.protocol import Frame, FrameError, split_frame

_READ_BYTES = 1 << 18


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class FrameChannel:
    """Frames over a stream socket: the parent's end never blocks, the host's end does.

    Args:
        sock: a connected stream socket; the channel owns it.
        blocking: whether `receive` and `send` wait.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self._sock = sock
        self._send = sock.send
        self._recv = sock.recv
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        """Return the fd, for waiting; -1 once closed."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the other end has not taken everything yet; call `flush` when it can."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame; without blocking, keep for `flush` what is not taken now.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        if not self._unsent:
            try:
                sent = self._send(frame)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if sent == len(frame):
                return  # the ordinary case
            frame = frame[sent:]
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send more of what is kept.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            while self._unsent:
                sent = self._send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Iterator[Frame]:
        """Yield the complete frames that have arrived; a blocking end waits for bytes once.

        Raises:
            ChannelClosedError: the other end is closed; whole frames before that were yielded.
            FrameError: garbage arrived.
        """
        while True:
            try:
                data = self._recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("end of stream")
            if not self._unread:
                parsed = split_frame(data)
                if parsed is not None and parsed[1] == len(data):
                    yield parsed[0]  # the ordinary case: one frame, whole
                    return
            self._unread += data
            yield from self._split()
            if len(data) < _READ_BYTES:
                return

    def _split(self) -> Iterator[Frame]:
        while (parsed := split_frame(self._unread)) is not None:
            del self._unread[: parsed[1]]
            yield parsed[0]

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class PipeChannel:
    """The same over a duplex pipe of `multiprocessing`, where sockets cannot be passed (Windows).

    `send` may wait for the other end to read when a frame is large.

    Args:
        connection: one end of `multiprocessing.Pipe()`; the channel owns it.
        blocking: whether `receive` waits.
    """

    has_unsent = False

    def __init__(self, connection: Connection, *, blocking: bool) -> None:
        self._connection = connection
        self._blocking = blocking

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

    def flush(self) -> None:
        """Do nothing: `send` keeps nothing back."""

    def receive(self) -> Iterator[Frame]:
        """Yield the frames that have arrived; a blocking end waits for one.

        Raises:
            ChannelClosedError: the other end is closed.
            FrameError: garbage arrived.
        """
        try:
            while self._blocking or self._connection.poll():
                data = self._connection.recv_bytes()
                parsed = split_frame(data)
                if parsed is None or parsed[1] != len(data):
                    raise FrameError(f"a message of {len(data)} bytes is not one frame")
                yield parsed[0]
                if self._blocking:
                    return
        except (EOFError, OSError) as error:
            raise ChannelClosedError(str(error)) from error

    def close(self) -> None:
        """Close the pipe."""
        self._connection.close()


Channel = FrameChannel | PipeChannel
