"""The trainer's end of the connection to a worker server, or to a branch of one."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
from collections.abc import Iterator, Sequence
from time import monotonic

from envmgr.transport.fds import forget_fd
from envmgr.transport.process import server
from envmgr.transport.process.server_imports import Preloads

_PATIENCE_S = 5.0


class ServerLink:
    """The connection to a server, and what is known of it.

    Several threads may send, receive and close at once, and none of them ever waits for another
    one: not with a lock, for one that is interrupted would keep it as long as its signal handler,
    or its garbage collection, waits for the other one.

    Args:
        control: its socket.
        parent: the connection to the server that forks it; None for the first one.
        number: its host_id there.
        wanted: what it imports before it is ready.

    Attributes:
        hosts: host_ids of its workers that are alive.
        place: of the module that it is importing; -1 before the first.
        due: when it should have come further; inf once it is ready.
    """

    def __init__(
        self,
        control: socket.socket,
        parent: ServerLink | None = None,
        number: int = 0,
        wanted: Preloads | None = None,
    ) -> None:
        self.control = control
        self.parent = parent
        self.number = number
        self.wanted = wanted or Preloads((), ())
        self.hosts: set[int] = set()
        self.place = -1
        self.due = math.inf
        self._closed = False
        self._uses: set[object] = set()
        control.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed here."""
        return not self._closed

    @contextlib.contextmanager
    def _used(self) -> Iterator[socket.socket]:
        """Have the socket keep its fd meanwhile, which might be somebody else's afterwards."""
        use = object()
        try:
            self._uses.add(use)
            if self._closed:
                raise BrokenPipeError(errno.EPIPE, "the connection to the worker server is closed")
            yield self.control
        finally:
            self._uses.discard(use)
            if self._closed:
                self._release()

    def close(self) -> None:
        """Let go of the server, also where forks of this process have the socket, too."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        if not self._uses and (fd := self.control.detach()) >= 0:  # else the last one to use it
            forget_fd(fd)
            os.close(fd)

    def begin(self, place: int, limit_s: float) -> None:
        """Note which module it imports, and for how long it may."""
        self.place, self.due = place, monotonic() + limit_s

    def send(
        self,
        kind: int,
        host_id: int,
        number: int,
        data: bytes = b"",
        fds: Sequence[int] = (),
        *,
        patience_s: float | None = None,
    ) -> None:
        """Send a record: wait for a server that is behind, but not for one that is stopped.

        Raises:
            OSError: it is stopped or gone, or was let go of.
        """
        due = monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
        record = server.RECORD.pack(kind, host_id, number) + data
        while True:
            with contextlib.suppress(BlockingIOError), self._used() as control:
                socket.send_fds(control, [record], fds)
                return
            self._await_room(due)

    def _await_room(self, due: float) -> None:
        poll = select.poll()
        with self._used() as control:
            poll.register(control, select.POLLOUT)
        # Who closes it meanwhile has this return, as it shuts it down.
        if not poll.poll(max(due - monotonic(), 0.0) * 1000):
            raise TimeoutError("the worker server does not answer")

    def receive(self) -> tuple[int, int, int, bytes] | None:
        """Return kind, host_id, number and data of the next record; None if the server is gone.

        Raises:
            BlockingIOError: there is none now.
        """
        try:
            with self._used() as control:
                record = control.recv(server.MAX_RECORD)
        except BlockingIOError:
            raise
        except OSError:
            record = b""
        if not record:
            return None
        return (*server.RECORD.unpack_from(record), record[server.RECORD.size :])
