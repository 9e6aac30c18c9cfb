"""`context: server`: workers forked by a server process of our own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from typing import Any

from envmgr.transport import server, worker
from envmgr.transport.base import HostDied, HostSpec, WorkerSettings
from envmgr.transport.channel import Channel, FrameChannel
from envmgr.transport.spawner import Spawner, close_all, pipe_pairs

_SERVER_PATIENCE_S = 5.0
_BOOTSTRAP = (
    "import json, sys; sys.path[:], sys.argv[:], fd, pid = json.loads(sys.argv[1]); "
    "from envmgr.transport.server import main; main(fd, pid)"
)


class ServerSpawner(Spawner):
    """Has workers forked by a server process of its own (see `envmgr.transport.server`)."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._alive: set[int] = set()
        self._pids: dict[int, int] = {}
        self._died: list[tuple[int, HostDied]] = []

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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        with theirs:
            orders = json.dumps([sys.path, sys.argv, theirs.fileno(), os.getpid()])
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [sys.executable, *flags, "-c", _BOOTSTRAP, orders],
                pass_fds=[theirs.fileno()],
                env=worker.worker_environment(os.environ, self._settings),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        self._ready.add(ours)
        return ours

    @property
    def pids(self) -> dict[int, int]:
        """The pids that the server has reported, by host_id."""
        return dict(self._pids)

    def death_of(self, host_id: int) -> Any:
        """Return the control socket; all deaths are reported there."""
        return self._control

    @property
    def has_deaths(self) -> bool:
        """Whether the server was given up, and so its workers."""
        return bool(self._died)

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
            self._alive.discard(host_id)
            self._pids.pop(host_id, None)
        died, self._died = self._died, []
        return died

    def signal(self, host_id: int, number: int) -> None:
        """Have the server signal the worker's process group."""
        if self._control is None or host_id not in self._alive:
            return
        try:
            _await_writable(self._control)
            self._control.send(server.RECORD.pack(server.SIGNAL, host_id, number))
        except OSError:
            self._drop_server()

    def give_up(self, host_id: int) -> None:
        """Give the whole server up: it does not do what it is told."""
        self._drop_server()

    def _drop_server(self) -> None:
        """Let the kernel kill the workers of a server that is gone or does not answer."""
        self._died += [(i, HostDied(None, "the worker server ended")) for i in self._alive]
        self._alive.clear()
        self._pids.clear()
        self._close_control()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _close_control(self) -> None:
        if self._control is not None:
            self._ready.discard(self._control)
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Let the server kill its workers and end; kill it if it does not within a second."""
        self._close_control()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._drop_server()
        self._died.clear()


def _await_writable(control: socket.socket) -> None:
    """Wait for a server that is behind with its records, but not for one that is stopped.

    Raises:
        TimeoutError: it is.
    """
    poll = select.poll()
    poll.register(control, select.POLLOUT)
    if not poll.poll(_SERVER_PATIENCE_S * 1000):
        raise TimeoutError("the worker server does not answer")
