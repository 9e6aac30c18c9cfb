"""What a thread of the trainer's process does that hosts envs: it runs requests until told to end.

It sets up nothing that belongs to the process: no generators, signals, streams, fds or environment
variables. What is sent either way is handed over as it is, with arrays and containers of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from envmgr.wire.channel import ChannelClosedError
from envmgr.wire.hosts import HostSpec, hellos
from envmgr.wire.messages import Message
from envmgr.worker.host import Host
from envmgr.worker.in_service import InService
from envmgr.worker.measured import posted_steps
from envmgr.worker.private import private_reply
from envmgr.worker.serving import serve


class ThreadInbox:
    """The messages and bells for a host on a thread, in one queue; see `serving.Inbox`.

    The trainer's side can be interrupted anywhere: it takes no lock of Python's.

    Args:
        reply: takes the host's replies.
    """

    def __init__(self, reply: Callable[[Any], None]) -> None:
        self._reply = reply
        self._queue: SimpleQueue[Message | bool] = SimpleQueue()
        self._latest: tuple[Message | None, list[None]] = (None, [])
        self._is_over = False
        self._messages: deque[Message] = deque()
        self._asked = False

    # -- the trainer's side -------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Have the host run a request."""
        was_put: list[None] = []
        self._latest = (message, was_put)
        # In one go: no signal handler comes between the putting and the note of it.
        was_put.extend(map(self._queue.put, (message,)))

    def has_sent(self, message: Message) -> bool:
        """Return whether this very object was sent last, if that was interrupted."""
        latest, was_put = self._latest
        return latest is message and bool(was_put)

    def ring(self, *, asks: bool) -> None:
        """Have the host look at the block, and answer with a ring if that is asked."""
        self._queue.put(asks)

    def end(self) -> None:
        """Have the host end as soon as it is not in env code."""
        self._is_over = True
        self._queue.put(False)

    # -- the host's side ----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no message has been read and not been run yet."""
        return not self._messages

    def take_asked(self) -> bool:
        """Return whether an answer to the latest bells is wanted; from now on none is."""
        is_asked, self._asked = self._asked, False
        return is_asked

    def messages(self) -> Iterator[Message]:
        """Return the messages that were read, each once.

        Raises:
            ChannelClosedError: the host is to end.
        """
        while self._messages:
            self._go_on()
            yield self._messages.popleft()

    def read(self) -> None:
        """Read the messages that have come, without waiting.

        Raises:
            ChannelClosedError: the host is to end.
        """
        while not self._queue.empty():
            self._take(self._queue.get())
        self._go_on()

    def await_bell(self) -> bool:
        """Sleep until rung for; False if there is more to it: a message, or an answer is asked.

        Raises:
            ChannelClosedError: the host is to end.
        """
        self._take(self._queue.get())
        self.read()
        return not self._messages and not self._asked

    def answer(self, message: Any) -> None:
        """Send a reply, encoded.

        Raises:
            ChannelClosedError: the host is to end, and nobody wants its replies.
        """
        self._go_on()
        self._reply(message)

    def _take(self, item: Message | bool) -> None:
        if type(item) is Message:
            self._messages.append(item)
        else:
            self._asked = bool(item) or self._asked

    def _go_on(self) -> None:
        if self._is_over:
            raise ChannelClosedError("the host was given up")


def run_on_thread(
    spec: HostSpec,
    inbox: ThreadInbox,
    *,
    memory: Callable[[int], Any],
    ring: Callable[[], None] | None,
    encode: Callable[[Message], Any] = private_reply,
    rss_bytes: Callable[[], int] = lambda: 0,
    in_service: InService | None = None,
) -> None:
    """Build the envs of a host, and run what comes for them until it is told to end.

    Args:
        spec: the host.
        inbox: where requests come from.
        memory: opens the memory that observations are placed in.
        ring: rings for the trainer; None where no steps are posted.
        encode: see `Host`.
        rss_bytes: see `Host`.
        in_service: see `Host`.
    """
    settings = spec.settings
    timed = bool(settings.announced)
    measures, posted = settings.measures, None
    if ring is not None:
        posted = posted_steps(spec.index, ring, timed=timed, measures=measures)
    host = Host(
        spec.factories,
        settings,
        encode=encode,
        send=inbox.answer,
        memory=memory,
        rss_bytes=rss_bytes,
        posted=posted,
        in_service=in_service,
    )
    try:
        for message in hellos(spec.envs):
            host.handle(message)
        serve(host, posted, inbox)
    except ChannelClosedError:  # given up: nobody else closes the envs
        host.close()
