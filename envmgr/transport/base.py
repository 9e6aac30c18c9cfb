"""What the supervisor needs of a transport. Fakes in the unit tests implement the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from envmgr.types import EnvFactory
from envmgr.wire.hosts import HostSpec
from envmgr.wire.messages import Message

NOTICE_S = 0.5
"""So long a wait lasts at most: a signal that comes just before its system call does not end it, as
Python has looked for signals already; and nothing else may come for long."""


def at_most(timeout_s: float | None) -> float:
    """Return how long a wait may last that is to end after `timeout_s`, or with an arrival."""
    return NOTICE_S if timeout_s is None else min(timeout_s, NOTICE_S)


class HostDied(NamedTuple):
    """A host is gone, or is to be taken for gone.

    Attributes:
        exit_status: exit code, or minus the number of the signal; None if nobody could tell.
        detail: more, in words; may be empty.
        last_words: the end of what it wrote to stderr, and where a fatal signal found it.
        is_interrupt: it was given up because the trainer was interrupted in the midst of it.
        lingers: it was given up because it does not end, and cannot be made to. It may go on, and
            write into its envs' rows of the block, their places and its own columns.
        with_others: others have died of the same, and one of them is charged for it.
    """

    exit_status: int | None
    detail: str = ""
    last_words: str = ""
    is_interrupt: bool = False
    lingers: bool = False
    with_others: bool = False


class Garbage(NamedTuple):
    """A host sent something that is not a message of the protocol."""

    reason: str


class TimedOut(NamedTuple):
    """A transport that runs envs in the caller's thread stopped one at its own limit.

    Attributes:
        request_id: the request that took too long.
        limit_s: the limit.
        where: what the env was at when it was stopped.
    """

    request_id: int
    limit_s: float
    where: str = ""


Arrival = Message | HostDied | Garbage | TimedOut
"""What can come from a host. Nothing comes after HostDied."""


class Transport(ABC):
    """Starts hosts, carries messages to and from them, and ends them.

    Only the supervisor calls it, under the engine's lock, except for `wake`.
    """

    works_alone: ClassVar[bool] = True
    """Whether hosts work on while nobody polls; else no reset is hidden, and nothing ever waits."""

    packs_envs: bool = True
    """Whether one host may serve several envs, besides the rows of one batched env."""

    kill_patience_s: ClassVar[float] = 5.0
    """How long a host that was killed may take to be reported dead; then it is given up."""

    posts_together: ClassVar[bool] = False
    """Whether the steps of all hosts are posted in one place."""

    shares_objects: ClassVar[bool] = False
    """Whether replies hold the env's own objects, unless they are copied before they are sent."""

    is_mirrored: ClassVar[bool] = False
    """Whether hosts have the memory that `place` gives as a copy of their own. What is posted and
    replied there travels; what messages refer to does not, so they carry it."""

    spins: ClassVar[bool] = True
    """Whether watching for something without sleeping keeps nobody from working, where there are
    cores to spare."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of a config that mean nothing to it, and why; they are refused unless left alone."""

    propagated: ClassVar[tuple[type[BaseException], ...]] = ()
    """What env code may raise that is no failure of its own, and leaves through `poll`."""

    def preload(self, factories: Sequence[EnvFactory]) -> None:
        """Begin with what can be done once for all hosts before the first is started.

        Raises:
            ConfigError: a factory, or something that the config names, is of no use; nothing was
                started.
        """
        return

    @property
    def is_prepared(self) -> bool:
        """Whether that is done; `poll` and `attend` go on with it."""
        return True

    @abstractmethod
    def start(self, specs: Sequence[HostSpec]) -> None:
        """Begin to start hosts; each answers HELLO or FAILED for each of its envs, or dies.

        Does not wait for them.
        """

    @abstractmethod
    def prepare(self, host_id: int, message: Message) -> Any:
        """Encode a message without sending it: all of a batch, before any of it is sent.

        Raises:
            FrameError: it cannot be sent.
        """

    @abstractmethod
    def send(self, host_id: int, prepared: Any) -> None:
        """Send what `prepare` returned. Never blocks; a dead host is reported by `poll`.

        Args:
            host_id: a host that has not been reported dead.
            prepared: what `prepare` returned.
        """

    def send_each(self, requests: deque[tuple[int, Any]], *, again: bool) -> None:
        """Send several requests, as `send` does; each leaves the queue when it was sent.

        Can be interrupted, and called again with the same queue.

        Args:
            requests: host_ids and what `prepare` returned for them.
            again: it was interrupted, so that the first of them may have been sent.
        """
        while requests:
            host_id, prepared = requests[0]
            if not again or not self.has_sent(host_id, prepared):
                self.send(host_id, prepared)
            requests.popleft()
            again = False

    arrivals: deque[tuple[int, Arrival]]
    """What has come, and from which host; in the order of each host. Who applies it takes it out.

    An interrupt in `poll` loses nothing: what is not here yet is found by the next `poll`.
    """

    @abstractmethod
    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Wait for arrivals and append them to `arrivals`.

        Args:
            timeout_s: 0 does not wait; None waits until something arrives or `wake` is called. May
                return before, with nothing: see `NOTICE_S`.
            pivot: wait for this host rather than for any of them, which spares wake-ups.
        """

    @property
    def needs_attention(self) -> bool:
        """Whether `poll` has found something that `attend` is to look after."""
        return False

    def attend(self) -> None:
        """Do what `poll` leaves since it must not be interrupted: reap, and end what is broken."""
        return

    def hurry(self) -> None:
        """Have a `close` that is under way wait no longer for envs to close; from any thread."""
        return

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Return whether a `send` that was interrupted, the latest to a host, came to be."""
        return False

    @abstractmethod
    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return objects that become readable when one of `hosts` has sent something or died."""

    def any_death(self) -> list[Any]:
        """Return what becomes readable when any host dies, also one that is started later.

        Nothing where that is not known before `poll` is called.
        """
        return []

    @property
    def pids(self) -> dict[int, int]:
        """The pids of worker processes, by host_id; from any thread. Empty where there are none."""
        return {}

    def whereabouts(self, host_id: int) -> str:
        """Return what a host is at that has exceeded a limit, in words; takes a moment at most.

        Nothing where that cannot be told, or where there is no such host.
        """
        return ""

    def figures(self) -> dict[str, Any]:
        """Return what there is to say of it in `stats()`; from any thread, also once closed."""
        return {}

    @property
    def has_unsent(self) -> bool:
        """Whether a host has not taken yet all that it was sent; `poll` sends on."""
        return False

    def await_ring(self, timeout_s: float) -> bool:
        """Sleep until a host rings, and do nothing else.

        Args:
            timeout_s: for so long at most.

        Returns:
            Whether a host has rung and nothing else has happened; if not, `poll` says what has.
        """
        return False

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting `poll` return; from any thread."""

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted in the memory that `place` gives."""
        return False

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Have hosts look at what was posted for them. Never blocks.

        Args:
            host_ids: which; those that are gone are passed over.
            asks: they are to ring back when they have done that.

        Raises:
            RuntimeError: this transport has no block.
        """
        raise RuntimeError("there is no block to look at: a defect of envmgr, please report it")

    @abstractmethod
    def place(self, nbytes: int) -> memoryview | None:
        """Allocate the memory for observations, once for each launch.

        Returns:
            The memory, or None if this transport has none: then replies carry observations.

        Raises:
            OSError: there is not enough of it.
        """

    def count_mail(self, mail: Any) -> None:
        """Have hosts see that something was sent to them while they take posted steps.

        Args:
            mail: `Block.mail`; a host's item gets another value once it can read the message.
        """
        return

    @abstractmethod
    def kill(self, host_id: int) -> None:
        """End a host at once, without asking. The only arrival that still comes is HostDied."""

    def give_up(self, host_id: int) -> None:
        """Go further than `kill`: HostDied has not come for long, whatever the reason."""
        self.kill(host_id)

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """End all hosts and release every process, fd and memory. Idempotent.

        Each host is asked to close its envs; what has not ended after `grace_s` (for all of them
        together) is terminated, then killed, and reaped. Takes at most about one second more, if
        what has started the hosts is not stopped itself.

        Args:
            grace_s: seconds; 0 does not ask.
        """
