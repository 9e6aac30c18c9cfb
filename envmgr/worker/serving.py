"""The loop of a worker: it waits for messages and posted steps, and runs them.

Each round of the loop runs the posted steps, then the messages that have come, then the resets that
have waited since the previous round. So a reset waits for one batch of steps at most, and so does a
message, however eagerly the envs are stepped.

Requests come into an inbox: that of a process reads a connection (`ConnectionInbox`), that of a
thread is a queue (`QueueInbox`). `run_on_thread` is everything that a thread does that hosts envs
in the trainer's process; what a worker process does in addition is in `process`.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

from envmgr.wire.channel import BELL_VALUE_ASKED, ChannelClosedError, FrameChannel
from envmgr.wire.frames import Frame, FrameError, encode
from envmgr.wire.hosts import HostSpec, hellos
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from envmgr.worker.block_steps import BlockStepper, block_stepper
from envmgr.worker.copies import copied_reply
from envmgr.worker.event_loop import WorkerLoop
from envmgr.worker.host import EnvsInUse, Host

_DURING = {Op.STEP: "step", Op.RESET: "reset", Op.HELLO: "construction"}


class Inbox(Protocol):
    """Where a host's requests come from, and the bells that are rung for it."""

    fds: tuple[int, ...]
    """File descriptors that can be read when there is something new; empty if there are none."""

    @property
    def is_empty(self) -> bool:
        """Whether no message that was read is still to be run."""

    def take_ring_request(self) -> bool:
        """Return whether the latest bells ask for a ring in return, and clear that request."""

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once."""

    def read(self) -> None:
        """Read the messages that have come, without waiting."""

    def await_bell(self) -> bool:
        """Sleep until woken; return False if a message has come, or a ring in return is due."""

    def answer(self, message: Message) -> None:
        """Send a reply of the host itself."""


def serve(host: Host, stepper: BlockStepper | None, inbox: Inbox) -> None:
    """Run requests and posted steps until CLOSE.

    Raises:
        ChannelClosedError: the other end is closed.
    """
    resets = host.pending_resets
    while host.loop is None or not host.loop.is_used:
        waiting, ring_is_due = len(resets), stepper is not None and inbox.take_ring_request()
        is_busy = waiting > 0 or ring_is_due or not inbox.is_empty
        if stepper is not None and stepper.has_rows:
            if is_busy:
                stepper.take_posted()
            else:
                stepper.run(inbox.await_bell)
            if stepper.has_new_messages():
                inbox.read()
        elif is_busy:
            inbox.read()
        else:
            inbox.await_bell()
        if ring_is_due and stepper is not None:
            stepper.ring()
        for message in inbox.messages():
            if message.op == Op.CLOSE:
                host.close()
                inbox.answer(message._replace(op=Op.CLOSED, payload=None))
                return
            host.handle(message)
        if waiting:
            host.run_resets(waiting)
    _serve_in_loop(host, host.loop, inbox)


def _serve_in_loop(host: Host, loop: WorkerLoop, inbox: Inbox) -> None:
    """Run requests as `serve` does, in the event loop of a host that has async envs.

    No steps are posted for async envs.
    """
    closing: list[Message] = []

    def run_round() -> bool:
        inbox.read()
        for message in inbox.messages():
            if message.op == Op.CLOSE:
                closing.append(message)
                return True
            host.handle(message)
        host.run_resets(len(host.pending_resets))
        if host.pending_resets:  # by what was run just now: messages that have come are next
            loop.wake()
        return False

    loop.serve(run_round, host.close_async, inbox.fds)
    for message in closing:
        inbox.answer(message._replace(op=Op.CLOSED, payload=None))


def unreadable_reply(frame: Frame, error: FrameError) -> Message:
    """Return the reply to a request that cannot be unpickled."""
    during = _DURING.get(Op(frame.op), "call")
    failure = RemoteFailure(FailureKind.PROTOCOL, during, message=str(error))
    return Message(Op.FAILED, *frame[1:4], failure)


class ConnectionInbox:
    """The messages that come over a connection, and bells.

    Args:
        bell: an eventfd that is rung; None if bells come over the connection.
    """

    def __init__(self, channel: FrameChannel, bell: int | None = None) -> None:
        self.channel = channel
        self.fds: tuple[int, ...] = (channel.fileno(),)
        self._bell = bell
        self._frames: deque[Frame] = deque()
        if bell is not None:
            self._poll = select.poll()
            self._poll.register(bell, select.POLLIN)
            self._poll.register(channel.fileno(), select.POLLIN)

    @property
    def is_empty(self) -> bool:
        """Whether no message that was read is still to be run."""
        return not self._frames

    def take_ring_request(self) -> bool:
        """Return whether the latest bells ask for a ring in return, and clear that request."""
        is_due, self.channel.asked = self.channel.asked, False
        return is_due

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once."""
        while self._frames:
            frame = self._frames.popleft()
            try:
                message = frame.message()
            except FrameError as error:
                self.answer(unreadable_reply(frame, error))
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
        """Sleep until woken; return False if a message has come, or a ring in return is due.

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


# -- hosts on threads ---------------------------------------------------------------------------


class QueueInbox:
    """The messages and bells for a host on a thread, in one queue.

    The trainer's side can be interrupted anywhere: it takes no Python lock.

    Args:
        reply: takes the host's replies.
    """

    fds: tuple[int, ...] = ()

    def __init__(self, reply: Callable[[Any], None]) -> None:
        self._reply = reply
        self._queue: SimpleQueue[Message | bool] = SimpleQueue()
        self._latest: tuple[Message | None, list[None]] = (None, [])
        self._is_over = False
        self._messages: deque[Message] = deque()
        self._ring_is_due = False

    # -- the trainer's side -------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Have the host run a request."""
        was_put: list[None] = []
        self._latest = (message, was_put)
        # In one go, so that no signal handler runs between the put and the note of it.
        was_put.extend(map(self._queue.put, (message,)))

    def has_sent(self, message: Message) -> bool:
        """Return whether this very object was sent last; asked after an interrupted `send`."""
        latest, was_put = self._latest
        return latest is message and bool(was_put)

    def ring(self, *, asks: bool) -> None:
        """Have the host look at the block, and ring in return if `asks` is true."""
        self._queue.put(asks)

    def end(self) -> None:
        """Have the host end as soon as it is not running env code."""
        self._is_over = True
        self._queue.put(False)

    # -- the host's side ----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no message that was read is still to be run."""
        return not self._messages

    def take_ring_request(self) -> bool:
        """Return whether the latest bells ask for a ring in return, and clear that request."""
        is_due, self._ring_is_due = self._ring_is_due, False
        return is_due

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once.

        Raises:
            ChannelClosedError: the host is to end.
        """
        while self._messages:
            self._check_not_over()
            yield self._messages.popleft()

    def read(self) -> None:
        """Read the messages that have come, without waiting.

        Raises:
            ChannelClosedError: the host is to end.
        """
        while not self._queue.empty():
            self._take(self._queue.get())
        self._check_not_over()

    def await_bell(self) -> bool:
        """Sleep until woken; return False if a message has come, or a ring in return is due.

        Raises:
            ChannelClosedError: the host is to end.
        """
        self._take(self._queue.get())
        self.read()
        return not self._messages and not self._ring_is_due

    def answer(self, message: Any) -> None:
        """Send a reply, encoded.

        Raises:
            ChannelClosedError: the host is to end, and nobody wants its replies.
        """
        self._check_not_over()
        self._reply(message)

    def _take(self, item: Message | bool) -> None:
        if type(item) is Message:
            self._messages.append(item)
        else:
            self._ring_is_due = bool(item) or self._ring_is_due

    def _check_not_over(self) -> None:
        if self._is_over:
            raise ChannelClosedError("the worker was given up")


def run_on_thread(
    spec: HostSpec,
    inbox: QueueInbox,
    *,
    memory: Callable[[int], Any],
    ring: Callable[[], None] | None,
    encode: Callable[[Message], Any] = copied_reply,
    rss_bytes: Callable[[], int] = lambda: 0,
    envs_in_use: EnvsInUse | None = None,
) -> None:
    """Build the envs of a host, and run the requests for them until it is told to end.

    It sets up nothing that belongs to the process: no random generators, signals, streams, fds or
    environment variables. Messages in both directions are handed over as they are, with arrays and
    containers of their own.

    Args:
        spec: the host.
        inbox: where requests come from.
        memory: opens the memory that observations are placed in.
        ring: rings the trainer's bell; None if no steps are posted.
        encode: see `Host`.
        rss_bytes: see `Host`.
        envs_in_use: see `Host`.
    """
    settings = spec.settings
    timed = bool(settings.announced)
    measures, stepper = settings.measures, None
    if ring is not None:
        stepper = block_stepper(spec.index, ring, timed=timed, measures=measures)
    host = Host(
        spec.factories,
        settings,
        encode=encode,
        send=inbox.answer,
        memory=memory,
        rss_bytes=rss_bytes,
        stepper=stepper,
        envs_in_use=envs_in_use,
    )
    try:
        for message in hellos(spec.envs):
            host.handle(message)
        serve(host, stepper, inbox)
    except ChannelClosedError:  # given up: nobody else closes the envs
        host.close()
