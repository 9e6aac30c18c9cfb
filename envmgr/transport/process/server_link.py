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
_LOOK_AGAIN_MS = 1


class ServerLink:
    """The connection to a server, and what the trainer knows about the server.

    Several threads may send, receive and close at once, and none of them ever waits for another
    one. There is no lock: a thread that is interrupted would hold it while its signal handler, or a
    garbage collection, waits for the other thread.

    Args:
        parent: the connection to the server that forks this one; None for the first one.
        number: the server's host_id in that parent.
        wanted: what the server imports before it is ready.

    Attributes:
        hosts: the host_ids of the server's workers that are alive.
        module_index: the index of the module that the server is importing; -1 before the first.
        due: when that import should have ended; inf once the server is ready.
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
        self.module_index = -1
        self.due = math.inf
        self._closed = False
        self._uses: set[object] = set()
        control.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether this end has not been closed."""
        return not self._closed

    @contextlib.contextmanager
    def _used(self) -> Iterator[socket.socket]:
        """Keep the socket's fd from being closed meanwhile: another file might get its number."""
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
        """Let the server end, even if forks of this process have its socket, too."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        if not self._uses and (fd := self.control.detach()) >= 0:  # else the last one to use it
            forget_fd(fd)
            os.close(fd)

    def begin(self, module_index: int, limit_s: float) -> None:
        """Note which module the server begins to import, and how long that may take."""
        self.module_index, self.due = module_index, monotonic() + limit_s

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
        """Send a record; wait for a server that is busy, but not for one that is stopped.

        Raises:
            OSError: the server is stopped or gone, or this connection was closed.
        """
        due = monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
        record = server.RECORD.pack(kind, host_id, number) + data
        while True:
            try:
                with self._used() as control:
                    socket.send_fds(control, [record], fds)
                return
            except BlockingIOError:
                self._await_writable(due)
            except OSError as error:
                # Linux lets a user who is not root have as many fds in flight as RLIMIT_NOFILE
                # says: those of a hundred workers and more, which the server has yet to take.
                if error.errno != errno.ETOOMANYREFS or monotonic() >= due:
                    raise
                select.poll().poll(_LOOK_AGAIN_MS)  # nothing becomes readable or writable by it

    def _await_writable(self, due: float) -> None:
        poll = select.poll()
        with self._used() as control:
            poll.register(control, select.POLLOUT)
        # A thread that closes this link meanwhile makes `poll` return, since it shuts the socket
        # down.
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
