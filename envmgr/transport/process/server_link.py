"""The trainer's end of the connection to a worker server, or to a branch of one."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Sequence
from time import monotonic

from envmgr.transport.process import server
from envmgr.transport.process.preload import Preloads

_PATIENCE_S = 5.0


class ServerLink:
    """The connection to a server, and what is known of it.

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
        control.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed here."""
        return self.control.fileno() >= 0

    def begin(self, place: int, limit_s: float) -> None:
        """Note which module it imports, and for how long it may."""
        self.place, self.due = place, monotonic() + limit_s

    def send(
        self, kind: int, host_id: int, number: int, data: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        """Send a record: wait for a server that is behind, but not for one that is stopped.

        Raises:
            OSError: it is stopped or gone.
        """
        poll = select.poll()
        poll.register(self.control, select.POLLOUT)
        if not poll.poll(_PATIENCE_S * 1000):
            raise TimeoutError("the worker server does not answer")
        record = server.RECORD.pack(kind, host_id, number) + data
        socket.send_fds(self.control, [record], fds)

    def receive(self) -> tuple[int, int, int, bytes] | None:
        """Return kind, host_id, number and data of the next record; None if the server is gone.

        Raises:
            BlockingIOError: there is none now.
        """
        try:
            record = self.control.recv(server.MAX_RECORD)
        except BlockingIOError:
            raise
        except OSError:
            record = b""
        if not record:
            return None
        return (*server.RECORD.unpack_from(record), record[server.RECORD.size :])
