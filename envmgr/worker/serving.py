"""What a worker process does all day: waits, and runs what comes, by message or in the block.

It goes in rounds: the steps that are posted, then the messages that have come, then the resets that
have waited since the round before. So a reset waits for one batch of steps at most, and so does a
message, however eagerly the envs are stepped.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from envmgr.wire.channel import BELL_VALUE_ASKED, ChannelClosedError
from envmgr.wire.frames import Frame, FrameError, encode
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from envmgr.wire.pipe_channel import Channel
from envmgr.worker.host import Host
from envmgr.worker.posted import PostedSteps

_DURING = {Op.STEP: "step", Op.RESET: "reset", Op.HELLO: "construction"}


def unreadable(frame: Frame, error: FrameError) -> Message:
    """Return the reply to a request that cannot be unpickled."""
    during = _DURING.get(Op(frame.op), "call")
    failure = RemoteFailure(FailureKind.PROTOCOL, during, message=str(error))
    return Message(Op.FAILED, *frame[1:4], failure)


class Served(Protocol):
    """Where the requests to a host come from, and bells: see `Inbox`."""

    @property
    def is_empty(self) -> bool:
        """Whether no message has been read and not been run yet."""

    def take_asked(self) -> bool:
        """Return whether an answer to the latest bells is wanted; from now on none is."""

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once."""

    def read(self) -> None:
        """Read the messages that have come, without waiting."""

    def await_bell(self) -> bool:
        """Sleep until rung for; False if there is more to it: a message, or an answer is asked."""

    def answer(self, message: Message) -> None:
        """Send a reply of the host itself."""


def serve(host: Host, posted: PostedSteps | None, inbox: Served) -> None:
    """Run requests and posted steps until CLOSE.

    Raises:
        ChannelClosedError: the other end is closed.
    """
    resets = host.resets
    while True:
        waiting, is_asked = len(resets), posted is not None and inbox.take_asked()
        is_busy = waiting > 0 or is_asked or not inbox.is_empty
        if posted is not None and posted.has_seats:
            posted.run(None if is_busy else inbox.await_bell)
            if posted.has_mail():
                inbox.read()
        elif is_busy:
            inbox.read()
        else:
            inbox.await_bell()
        if is_asked and posted is not None:
            posted.ring()
        for message in inbox.messages():
            if message.op == Op.CLOSE:
                host.close()
                inbox.answer(message._replace(op=Op.CLOSED, payload=None))
                return
            host.handle(message)
        if waiting:
            host.run_resets(waiting)


class Inbox:
    """The messages that come over a connection, and bells.

    Args:
        channel: the connection.
        bell: an eventfd that is rung; None if bells come over the connection.
    """

    def __init__(self, channel: Channel, bell: int | None = None) -> None:
        self.channel = channel
        self._bell = bell
        self._frames: deque[Frame] = deque()
        if bell is not None:
            self._poll = select.poll()
            self._poll.register(bell, select.POLLIN)
            self._poll.register(channel.fileno(), select.POLLIN)

    @property
    def is_empty(self) -> bool:
        """Whether no message has been read and not been run yet."""
        return not self._frames

    def take_asked(self) -> bool:
        """Return whether an answer to the latest bells is wanted; from now on none is."""
        is_asked, self.channel.asked = self.channel.asked, False
        return is_asked

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once."""
        while self._frames:
            frame = self._frames.popleft()
            try:
                message = frame.message()
            except FrameError as error:
                self.answer(unreadable(frame, error))
            else:
                yield message

    def answer(self, message: Message) -> None:
        """Send a reply of the host itself."""
        self.channel.send(encode(message))

    def next(self) -> Message | None:
        """Wait for a message and return it; None if what came cannot be read.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        while not self._frames:
            self.await_bell()
        return next(self.messages(), None)

    def read(self) -> None:
        """Read the messages that have come, without waiting.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            while self.channel.has_arrived():
                self._frames.extend(self.channel.receive())
        except (ChannelClosedError, FrameError):
            if not self._frames:  # else it is raised again when these have been run
                raise

    def await_bell(self) -> bool:
        """Sleep until rung for; False if there is more to it: a message, or an answer is asked.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        channel = self.channel
        if self._bell is None:
            self._frames.extend(channel.receive())
            return not self._frames and not channel.asked
        for fd, _ in self._poll.poll():
            if fd != self._bell:
                self._frames.extend(channel.receive())
                continue
            try:  # not `suppress`: this runs for each step of a worker that sleeps between them
                channel.asked = os.eventfd_read(fd) >= BELL_VALUE_ASKED or channel.asked
            except BlockingIOError:
                continue
        return not self._frames and not channel.asked
