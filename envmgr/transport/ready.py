"""Finding which of many connections can be read, at a cost that does not grow with their number.

`multiprocessing.connection.wait` registers every object anew at each call: 50 us for 64 of them. On
Linux they are registered once with an epoll, which `wait` then sees as one single object; elsewhere
`wait` is given all of them.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from envmgr.transport.fds import forget_fd, keep_from_children

_MOST_S = 86_400.0
"""The longest that one wait may last."""


class ReadySet:
    """A set of objects with a `fileno()`, which finds out which of them are readable.

    Attributes:
        poll: waits at most the given number of seconds, and returns (fd, event) of the objects that
            are readable; None where there is no epoll.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self.poll: Callable[[float], list[tuple[int, int]]] | None = None
        if self._epoll is not None:
            self.poll = self._epoll.poll
            keep_from_children(self._epoll.fileno())

    def add(self, item: Any) -> None:
        """Watch an object or an fd."""
        fd = _fd_of(item)
        if self._epoll is not None:
            self._epoll.register(fd, select.EPOLLIN)
        self._objects[fd] = item

    def discard(self, item: Any) -> None:
        """Stop watching an object or an fd; call this before it is closed."""
        fd = _fd_of(item)
        if self._objects.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):  # closed by somebody else
                self._epoll.unregister(fd)

    def waitables(self) -> list[Any]:
        """Return what `wait` has to be given in order to notice any of the objects."""
        return list(self._objects.values()) if self._epoll is None else [self._epoll]

    def ready(self, timeout_s: float | None = 0.0) -> list[Any]:
        """Return the objects that are readable; wait until one is, or `timeout_s` is over.

        Args:
            timeout_s: 0 does not wait; None waits for ever.
        """
        if self._epoll is None:
            return wait(list(self._objects.values()), timeout_s)
        objects = self._objects
        return [objects[fd] for fd, _ in self._epoll.poll(timeout_s) if fd in objects]

    def close(self) -> None:
        """Release the epoll."""
        self._objects.clear()
        if self._epoll is not None and not self._epoll.closed:
            forget_fd(self._epoll.fileno())
            self._epoll.close()


def await_any(
    readable: Sequence[Any], timeout_s: float | None, writable: Sequence[int] = ()
) -> None:
    """Wait until one of some objects can be read, or one of some fds can be written.

    This does what `multiprocessing.connection.wait` does, which makes and registers ten objects for
    each item.

    Args:
        readable: objects with a `fileno()`, or fds.
        timeout_s: None waits for ever.
        writable: fds; only where there is `poll`.
    """
    if not hasattr(select, "poll"):
        wait(readable, timeout_s)
        return
    poll = select.poll()
    for item in readable:
        poll.register(item, select.POLLIN)
    for fd in writable:
        poll.register(fd, select.POLLOUT)
    poll.poll(_in_ms(timeout_s))


def _in_ms(timeout_s: float | None) -> int | None:
    """Return a timeout in the form that `poll` takes; it refuses more than some 24 days."""
    return None if timeout_s is None else math.ceil(min(timeout_s, _MOST_S) * 1000.0)


class Watch:
    """Waits for the same few fds again and again.

    Attributes:
        fds: the fds that are watched; they are fixed when the object is made.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = list(fds)
        self._poll = None
        if hasattr(select, "poll"):
            self._poll = select.poll()
            for fd in fds:
                self._poll.register(fd, select.POLLIN)

    def ready(self, timeout_s: float | None) -> list[int]:
        """Return the readable fds; wait until there is one, for `timeout_s` or for ever (None)."""
        if self._poll is None:
            return [fd if isinstance(fd, int) else fd.fileno() for fd in wait(self.fds, timeout_s)]
        return [fd for fd, _ in self._poll.poll(_in_ms(timeout_s))]


def fds_of(items: Sequence[Any]) -> list[int]:
    """Return the fds of items that have a `fileno()`, or are fds themselves."""
    return list(map(_fd_of, items))


class Waker:
    """An object that becomes readable when it is woken, from any thread.

    It closes itself when it is collected, if nobody has: its creator may have been interrupted
    before anybody else knew of it, and threads that were given up keep it for as long as they may
    wake it.
    """

    _ends: tuple[socket.socket, ...] = ()

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
            keep_from_children(end.fileno())

    def fileno(self) -> int:
        """Return the fd that becomes readable."""
        return self._ends[0].fileno()

    def wake(self) -> None:
        """Make it readable."""
        with contextlib.suppress(OSError):  # full: a wake-up is on its way; closed: nobody waits
            self._ends[1].send(b"w")

    def silence(self) -> None:
        """Make it readable no longer."""
        with contextlib.suppress(OSError):  # it is not readable, or closed
            self._ends[0].recv(4096)

    def close(self) -> None:
        """Release it."""
        for end in self._ends:
            if end.fileno() >= 0:  # else it was closed before
                forget_fd(end.fileno())
                end.close()

    def __del__(self) -> None:
        self.close()


def _fd_of(item: Any) -> int:
    return item if isinstance(item, int) else int(item.fileno())
