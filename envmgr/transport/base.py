"""The interface through which `core` uses a transport; fakes in the unit tests implement it too."""

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
"""The longest that one wait lasts. A signal that comes just before the system call does not end it,
since Python has already checked for signals; and nothing else may come for a long time."""


def at_most(timeout_s: float | None) -> float:
    """Return how long one wait may last for a caller that waits `timeout_s`, or for ever (None)."""
    return NOTICE_S if timeout_s is None else min(timeout_s, NOTICE_S)


class HostDied(NamedTuple):
    """The report that a host is gone, or counts as gone.

    Attributes:
        exit_status: the exit code, or minus the signal number; None if it is unknown.
        detail: further details in words; may be empty.
        last_words: the end of what the host wrote to stderr, and where a fatal signal hit it.
        running: the async env that the host was running, or -1.
        is_interrupt: it was given up because the trainer was interrupted while the host's code ran.
        lingers: it was given up because nothing ends it. It may go on running, and write into the
            rows of its envs in the block, their observations and its own columns.
        with_others: other hosts have died of the same cause, and one of those is charged with the
            failure.
    """

    exit_status: int | None
    detail: str = ""
    last_words: str = ""
    is_interrupt: bool = False
    lingers: bool = False
    with_others: bool = False
    running: int = -1


class Garbage(NamedTuple):
    """The report that a host sent something that is not a message of the protocol."""

    reason: str


class TimedOut(NamedTuple):
    """The report that an env in the caller's thread was stopped at the transport's own time limit.

    Attributes:
        request_id: the request that took too long.
        where: the stack of the env when it was stopped.
    """

    request_id: int
    limit_s: float
    where: str = ""


Arrival = Message | HostDied | Garbage | TimedOut
"""What can come from a host; nothing comes after HostDied."""


class Transport(ABC):
    """Starts hosts, carries messages to and from them, and ends them.

    Only `core` calls it, under the engine's lock, except for `wake`.
    """

    works_alone: ClassVar[bool] = True
    """Whether hosts work while nobody polls; else no reset is hidden, and nothing ever waits."""

    packs_envs: bool = True
    """Whether one host may serve several envs that are not the rows of one batched env."""

    kill_patience_s: ClassVar[float] = 5.0
    """How long a host that was killed may take to be reported dead; then it is given up."""

    posts_together: ClassVar[bool] = False
    """Whether the steps of all hosts are posted in one place."""

    shares_objects: ClassVar[bool] = False
    """Whether replies hold the env's own objects, unless they are copied before they are sent."""

    is_mirrored: ClassVar[bool] = False
    """Whether hosts have copies of the memory that `place` returns. Posts and replies in it travel
    from copy to copy; messages cannot refer to it, so they carry observations."""

    spins: ClassVar[bool] = True
    """Whether the trainer may watch for replies without sleeping where there are cores to spare."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Config keys that do not apply to this transport, and why; only the defaults are accepted."""

    propagated: ClassVar[tuple[type[BaseException], ...]] = ()
    """Exceptions from env code that are not failures of the env; `poll` raises them."""

    def preload(self, factories: Sequence[EnvFactory]) -> None:
        """Begin what can be done once for all hosts, before the first is started.

        Raises:
            ConfigError: a factory, or something that the config names, cannot be used; nothing was
                started.
        """
        return

    @property
    def is_prepared(self) -> bool:
        """Whether what `preload` began is done; until then, `poll` and `attend` go on with it."""
        return True

    @property
    def must_wait_for_call(self) -> bool:
        """Whether hosts cannot be started now, in the background, but only in the next call."""
        return False

    @abstractmethod
    def start(self, specs: Sequence[HostSpec]) -> None:
        """Begin to start hosts; each answers HELLO or FAILED for each of its envs, or dies.

        Does not wait for them.
        """

    @abstractmethod
    def prepare(self, host_id: int, message: Message) -> Any:
        """Encode a message without sending it; all of a batch are encoded before any is sent.

        Raises:
            FrameError: the message cannot be sent.
        """

    @abstractmethod
    def send(self, host_id: int, prepared: Any) -> None:
        """Send what `prepare` returned. Never blocks; a dead host is reported by `poll`.

        Args:
            host_id: a host that has not been reported dead.
            prepared: what `prepare` returned.
        """

    def send_each(self, requests: deque[tuple[int, Any]], *, again: bool) -> None:
        """Send several requests, as `send` does; each is removed from the queue once it was sent.

        May be interrupted; it is then called again with the same queue.

        Args:
            requests: host_ids and what `prepare` returned for them.
            again: the last call was interrupted, so the first request may have been sent already.
        """
        while requests:
            host_id, prepared = requests[0]
            if not again or not self.has_sent(host_id, prepared):
                self.send(host_id, prepared)
            requests.popleft()
            again = False

    arrivals: deque[tuple[int, Arrival]]
    """What has come, with host_ids, in the order in which each host sent it; `core` takes it out.

    An interrupt in `poll` loses nothing: what is not here yet is found by the next `poll`.
    """

    @abstractmethod
    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Wait for arrivals and append them to `arrivals`.

        Args:
            timeout_s: 0 does not wait; None waits until something arrives or `wake` is called. This
                may return earlier, with nothing: see `NOTICE_S`.
            pivot: wait for this host only, which saves wake-ups.
        """

    @property
    def needs_attention(self) -> bool:
        """Whether `poll` has found something for `attend` to do."""
        return False

    def attend(self) -> None:
        """Do what `poll` leaves because it must not be interrupted: reap hosts, end broken ones."""
        return

    def hurry(self) -> None:
        """Make a `close` that is under way stop waiting for envs to close; from any thread."""
        return

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Return whether the latest `send` to a host sent this, although it was interrupted."""
        return False

    @abstractmethod
    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return objects that become readable when one of `hosts` has sent something or died."""

    def news(self) -> list[Any]:
        """Return what becomes readable when `poll` would find anything; for waits outside `poll`.

        Empty if nothing comes while nobody polls.
        """
        return []

    def any_death(self) -> list[Any]:
        """Return what becomes readable when any host dies, even one that is started later.

        Empty if a death is not noticed before `poll` is called.
        """
        return []

    @property
    def pids(self) -> dict[int, int]:
        """The pids of worker processes by host_id, empty where there are none; from any thread."""
        return {}

    def whereabouts(self, host_id: int) -> str:
        """Return in words where a host that has exceeded a limit hangs; takes a moment at most.

        Empty if that is not known, or if there is no such host.
        """
        return ""

    def running_in(self, host_id: int) -> int:
        """Return the async env whose code a host runs now; -1 if there is none, or if unknown."""
        return -1

    def figures(self) -> dict[str, Any]:
        """Return what `stats()` shows about the transport; from any thread, even once closed."""
        return {}

    @property
    def has_unsent(self) -> bool:
        """Whether a host has not yet taken all that it was sent; `poll` sends the rest."""
        return False

    def await_ring(self, timeout_s: float) -> bool:
        """Sleep until a host rings, and do nothing else.

        Args:
            timeout_s: how long at most.

        Returns:
            True if a host has rung and nothing else has happened; else `poll` finds out what has.
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
        """Tell hosts to look at what was posted for them. Never blocks.

        Args:
            host_ids: the hosts; those that are gone are skipped.
            asks: whether they ring back when they have done what was posted.

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

    def count_messages(self, counts: Any) -> None:
        """Let hosts that take posted steps see when messages were sent to them.

        Args:
            counts: `Block.messages_sent`; a host's item changes once it can read the message.
        """
        return

    @abstractmethod
    def kill(self, host_id: int) -> None:
        """End a host at once, without asking. The only arrival that still comes is HostDied."""

    def give_up(self, host_id: int) -> None:
        """Go further than `kill`: HostDied has not come for a long time, whatever the reason."""
        self.kill(host_id)

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """End all hosts and release every process, fd and memory. Idempotent.

        Each host is asked to close its envs; what has not ended after `grace_s` (for all of them
        together) is terminated, then killed, and reaped. Takes at most about one second more,
        unless the process that started the hosts is itself stopped.

        Args:
            grace_s: seconds; with 0 hosts are not asked, but terminated at once.
        """
