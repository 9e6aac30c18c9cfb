"""Frames over duplex pipes of `multiprocessing`, where fds cannot be passed on (Windows)."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from envmgr.wire.channel import NOTHING_INCOMING, ChannelClosedError, FrameChannel, Incoming
from envmgr.wire.frames import Frame, FrameError, split_frame


class PipeChannel:
    """As `FrameChannel`, but that `send` may wait for the other end when a frame is large.

    Args:
        connection: one end of `multiprocessing.Pipe()`; the channel owns it.
        blocking: whether `receive` waits.

    Attributes:
        host_id: the host at the other end.
        index: which of the manager's hosts that is.
        has_unsent: always False: `send` keeps nothing back.
        asked: always False: there is no block where there are no pipes.
        incoming: whether what has been read was no frame.
    """

    host_id = index = 0
    has_unsent = False
    asked = False
    incoming = NOTHING_INCOMING

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

    @staticmethod
    def write_each(
        channels: Sequence[PipeChannel], frames: Sequence[bytes], written: list[int]
    ) -> None:
        """As `FrameChannel.write_each`."""
        for channel, frame in list(zip(channels, frames, strict=True))[len(written) :]:
            try:
                channel.send(frame)
                written.append(len(frame))
            except ChannelClosedError:
                written.append(-1)

    def keep(self, frame: bytes, n_bytes: int) -> None:
        """Do nothing: `send` keeps nothing back."""

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
        data = self._read()
        if data is None:
            return ()
        if not data:
            raise ChannelClosedError("end of stream")
        frames, self.incoming = self.split(data)
        if self.incoming.broken is not None:
            raise self.incoming.broken
        return frames

    def _read(self) -> bytes | None:
        try:
            if not self._blocking and not self._connection.poll():
                return None
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return b""

    @staticmethod
    def read_each(channels: Sequence[PipeChannel], found: list[bytes | None]) -> None:
        """As `FrameChannel.read_each`."""
        found.extend(channel._read() for channel in channels[len(found) :])

    def split(self, data: bytes) -> tuple[Sequence[Frame], Incoming]:
        """As `FrameChannel.split`, of what is to be one frame."""
        try:
            parsed = split_frame(data)
        except FrameError as error:
            return (), Incoming(broken=error)
        if parsed is None or parsed[1] != len(data):
            text = f"a message of {len(data)} bytes is not one frame"
            return (), Incoming(broken=FrameError(text))
        return (parsed[0],), NOTHING_INCOMING

    def close(self) -> None:
        """Close the pipe."""
        self._connection.close()


Channel = FrameChannel | PipeChannel
