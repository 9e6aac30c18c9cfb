"""`context: server`: workers forked by a server process of our own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from typing import Any, Protocol

from envmgr.transport.base import HostDied
from envmgr.transport.fds import close_all, forget_fd, keep_from_children, pipe_pairs
from envmgr.transport.process import server
from envmgr.transport.process.ready import ReadySet
from envmgr.transport.process.spawner import LEFT_BEHIND, Spawner
from envmgr.wire.channel import Channel, FrameChannel
from envmgr.wire.hosts import HostSpec, WorkerSettings
from envmgr.worker import process as worker

_SERVER_PATIENCE_S = 5.0
_CLOSE_S = 0.5
_BOOTSTRAP = (
    "import json, sys; sys.path[:], sys.argv[:], fd, pid = json.loads(sys.argv[1]); "
    "from envmgr.transport.process.server import main; main(fd, pid)"
)


class ServerProcess(Protocol):
    """A process with the methods that `subprocess.Popen` has."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Reap it; raise `subprocess.TimeoutExpired` if it does not end in time."""


class ServerSpawner(Spawner):
    """Has workers forked by a server process of its own (see `envmgr.transport.process.server`)."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._process: ServerProcess | None = None
        self._control: socket.socket | None = None
        self._alive: set[int] = set()

    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> Channel:
        """Have the server fork a worker."""
        control = self._ensure_server()
        ours, theirs = pipe_pairs()
        try:
            fds = [*theirs, *shared_fds]
            _await_writable(control)
            socket.send_fds(control, [server.RECORD.pack(server.START, spec.host_id, 0)], fds)
        except OSError:
            close_all(ours)
            self._drop_server()
            raise
        finally:
            close_all(theirs)
        self._alive.add(spec.host_id)
        return FrameChannel(*ours, blocking=False)

    def _ensure_server(self) -> socket.socket:
        if self._control is not None:
            return self._control
        if self._endings is None:
            self._endings = ReadySet()  # stays the same for a new server
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = self._start_server(theirs, ours)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._control = ours
        keep_from_children(ours.fileno())
        self._ready.add(ours)
        self._endings.add(ours)
        return ours

    def _start_server(self, theirs: socket.socket, ours: socket.socket) -> ServerProcess:
        """Start a server with one end of the control socket; the other one is not for it."""
        flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        orders = json.dumps([sys.path, sys.argv, theirs.fileno(), os.getpid()])
        return subprocess.Popen(  # noqa: S603 - our own interpreter and code
            [sys.executable, *flags, "-c", _BOOTSTRAP, orders],
            pass_fds=[theirs.fileno()],
            env=worker.worker_environment(os.environ, self._settings),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def death_of(self, host_id: int) -> Any:
        """Return the control socket; all deaths are reported there."""
        return self._control

    def deaths(self) -> list[tuple[int, HostDied]]:
        """Read what the server reports."""
        while self._control is not None:
            try:
                record = self._control.recv(server.RECORD.size)
            except BlockingIOError:
                break
            except OSError:
                record = b""
            if not record:
                self._drop_server()
                break
            kind, host_id, number = server.RECORD.unpack(record)
            if kind == server.STARTED:
                self._pids[host_id] = number
                continue
            if kind == server.NOT_STARTED:
                self._died.append((host_id, HostDied(None, f"fork: {os.strerror(number)}")))
            elif kind == server.ENDED:
                self._died.append((host_id, HostDied(number)))
            elif kind == server.LEFT:
                self._died.append((host_id, HostDied(None, LEFT_BEHIND)))
            self._alive.discard(host_id)
            self._left.discard(host_id)
            self._pids.pop(host_id, None)
        died, self._died = self._died, []
        return died

    def signal(self, host_id: int, number: int) -> None:
        """Have the server signal the worker's process group."""
        self._tell(server.SIGNAL, host_id, number)

    def _tell(self, kind: int, host_id: int, number: int) -> None:
        if self._control is None or host_id not in self._alive:
            return
        try:
            _await_writable(self._control)
            self._control.send(server.RECORD.pack(kind, host_id, number))
        except OSError:
            self._drop_server()

    def give_up(self, host_id: int) -> None:
        """Have the server leave the worker; the second time, give the server itself up."""
        if host_id in self._left:
            self._drop_server()
        else:
            self._left.add(host_id)
            self._tell(server.GIVE_UP, host_id, 0)

    def _drop_server(self) -> None:
        """Let the kernel kill the workers of a server that is gone or does not answer."""
        self._died += [(i, HostDied(None, "the worker server ended")) for i in self._alive]
        self._alive.clear()
        self._left.clear()
        self._pids.clear()
        self._close_control()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SERVER_PATIENCE_S)
            self._process = None

    def _close_control(self) -> None:
        if self._control is not None:
            self._ready.discard(self._control)
            if self._endings is not None:
                self._endings.discard(self._control)
            forget_fd(self._control.fileno())
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Let the server kill its workers and end; kill it if it does not soon."""
        self._close_control()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        self._drop_server()
        self._died.clear()
        if self._endings is not None:
            self._endings.close()
            self._endings = None


def _await_writable(control: socket.socket) -> None:
    """Wait for a server that is behind with its records, but not for one that is stopped.

    Raises:
        TimeoutError: it is.
    """
    poll = select.poll()
    poll.register(control, select.POLLOUT)
    if not poll.poll(_SERVER_PATIENCE_S * 1000):
        raise TimeoutError("the worker server does not answer")
