"""Start methods: how worker processes begin, how their deaths are seen, how they are signalled.

`ServerSpawner` is the default (`context: server`, Linux); `MultiprocessingSpawner` covers the
standard `fork`, `spawn` and `forkserver`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from envmgr.errors import ConfigError, LaunchError, StateError
from envmgr.transport import server, worker
from envmgr.transport.base import HostDied, WorkerSettings
from envmgr.transport.channel import Channel, FrameChannel, PipeChannel
from envmgr.transport.ready import ReadySet
from envmgr.types import EnvFactory

BACKGROUND_THREAD = "envmgr-background"
"""Name of the thread that each manager has while work goes on without its caller."""

_SERVER_PATIENCE_S = 5.0
_BOOTSTRAP = (
    "import json, sys; sys.path[:], sys.argv[:], fd, pid = json.loads(sys.argv[1]); "
    "from envmgr.transport.server import main; main(fd, pid)"
)


class Spawner(ABC):
    """Starts worker processes, sees them die, signals and reaps them."""

    @abstractmethod
    def start(
        self, host_id: int, env_id: int, memory_fd: int | None, factory: EnvFactory
    ) -> Channel:
        """Start a worker and return the parent's end of the connection to it.

        Raises:
            OSError: no process or fd could be had.
        """

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factory without pickling."""
        return False

    def report_to(self, ready: ReadySet) -> None:
        """Keep in `ready` what becomes readable when a worker dies."""
        self._ready = ready

    @abstractmethod
    def death_of(self, host_id: int) -> Any:
        """Return what becomes readable when this worker dies; perhaps when others do, too."""

    @abstractmethod
    def deaths(self) -> list[tuple[int, HostDied]]:
        """Return the workers that have died since the last call, reaped; does not wait."""

    @abstractmethod
    def signal(self, host_id: int, number: int) -> None:
        """Send a signal to a worker and its children; nothing happens if it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Kill and reap what is left, and release everything."""


class ServerSpawner(Spawner):
    """Has workers forked by a server process of its own (see `envmgr.transport.server`)."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._alive: set[int] = set()
        self._died: list[tuple[int, HostDied]] = []

    def start(
        self, host_id: int, env_id: int, memory_fd: int | None, factory: EnvFactory
    ) -> Channel:
        """Have the server fork a worker."""
        control = self._ensure_server()
        ours, theirs = _pipe_pairs()
        try:
            fds = [*theirs] if memory_fd is None else [*theirs, memory_fd]
            _await_writable(control)
            socket.send_fds(control, [server.RECORD.pack(server.START, host_id, 0)], fds)
        except OSError:
            _close_all(ours)
            self._drop_server()
            raise
        finally:
            _close_all(theirs)
        self._alive.add(host_id)
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

    def death_of(self, host_id: int) -> Any:
        """Return the control socket."""
        return self._ensure_server()

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
            if kind == server.NOT_STARTED:
                self._died.append((host_id, HostDied(None, f"fork: {os.strerror(number)}")))
            elif kind == server.ENDED:
                self._died.append((host_id, HostDied(number)))
            if kind != server.STARTED:
                self._alive.discard(host_id)
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

    def _drop_server(self) -> None:
        """Let the kernel kill the workers of a server that is gone or does not answer."""
        self._died += [(i, HostDied(None, "the worker server ended")) for i in self._alive]
        self._alive.clear()
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


class MultiprocessingSpawner(Spawner):
    """Starts workers by one of the standard start methods of `multiprocessing`.

    Args:
        method: "fork", "spawn" or "forkserver".
        settings: of the workers.
    """

    def __init__(self, method: str, settings: WorkerSettings) -> None:
        if method not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(f"context: {method} does not exist on this platform; it has {known}")
        self._method = method
        self._context: BaseContext = multiprocessing.get_context(method)
        self._settings = settings
        self._processes: dict[int, BaseProcess] = {}
        self._pidfds: dict[int, int] = {}

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factory without pickling: by fork."""
        return self._method == "fork"

    def start(
        self, host_id: int, env_id: int, memory_fd: int | None, factory: EnvFactory
    ) -> Channel:
        """Start a process that ends with this one."""
        channel, theirs = self._connection()
        try:
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_run_process,
                args=(
                    theirs,
                    self._transferable(memory_fd),
                    factory if self.inherits_factories else None,
                    [*channel.fds, *_PARENT_FDS] if self.inherits_factories else [],
                ),
                name=f"envmgr-env-{env_id}",
                daemon=self._settings.daemon,
            )
            with self._start_conditions():
                process.start()
        except BaseException:
            channel.close()
            raise
        finally:
            for end in theirs:
                end.close()
        self._processes[host_id] = process
        if hasattr(os, "pidfd_open"):
            self._pidfds[host_id] = os.pidfd_open(process.pid)
        self._ready.add(self.death_of(host_id))
        return channel

    def _connection(self) -> tuple[Channel, tuple[Connection, ...]]:
        """Return the parent's channel, and the worker's ends."""
        if sys.platform == "win32":
            ours, theirs = self._context.Pipe()
            return PipeChannel(ours, blocking=False), (theirs,)
        ours, theirs = _pipe_pairs()
        read, write = Connection(theirs[0], writable=False), Connection(theirs[1], readable=False)
        return FrameChannel(*ours, blocking=False), (read, write)

    def _transferable(self, memory_fd: int | None) -> Any:
        if memory_fd is None or self._method == "fork":
            return memory_fd
        return _SharedFd(memory_fd)

    @contextlib.contextmanager
    def _start_conditions(self) -> Iterator[None]:
        if self._method == "fork":
            # Our own background thread holds no lock of the interpreter's; threads of others were
            # refused at launch.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
                yield
            return
        # Math libraries read their variables when they are loaded, before our code runs.
        before = dict(os.environ)
        worker.replace_environment(
            os.environ, worker.worker_environment(os.environ, self._settings)
        )
        try:
            yield
        finally:
            worker.replace_environment(os.environ, before)

    def death_of(self, host_id: int) -> Any:
        """Return a pidfd of the process, or its sentinel where there are no pidfds.

        A pidfd, because a sentinel stays silent while children of the worker keep its pipe open.
        """
        pidfd = self._pidfds.get(host_id)
        return self._processes[host_id].sentinel if pidfd is None else pidfd

    def deaths(self) -> list[tuple[int, HostDied]]:
        """Reap what has ended."""
        died: list[tuple[int, HostDied]] = []
        for host_id in self._ended():
            self._ready.discard(self.death_of(host_id))
            process = self._processes.pop(host_id)
            process.join()
            _kill_group(process.pid, signal.SIGKILL)  # what it started and left behind
            died.append((host_id, HostDied(process.exitcode)))
            process.close()
            if host_id in self._pidfds:
                os.close(self._pidfds.pop(host_id))
        return died

    def _ended(self) -> list[int]:
        if not self._pidfds:
            return [i for i, process in self._processes.items() if not process.is_alive()]
        poll = select.poll()
        host_of = {fd: host_id for host_id, fd in self._pidfds.items()}
        for fd in host_of:
            poll.register(fd, select.POLLIN)
        return [host_of[fd] for fd, _ in poll.poll(0)]

    def signal(self, host_id: int, number: int) -> None:
        """Signal the worker's process group."""
        process = self._processes.get(host_id)
        if process is None:
            return
        if sys.platform == "win32":
            process.terminate()
        else:
            _kill_group(process.pid, number)

    def close(self) -> None:
        """Kill and reap what is left."""
        for host_id in self._processes:
            self.signal(host_id, getattr(signal, "SIGKILL", signal.SIGTERM))
        for process in self._processes.values():
            process.join(1.0)
        self.deaths()


class _SharedFd:
    """An fd that travels to a process started by `spawn` or `forkserver`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _receive_fd, (DupFd(self._fd),)


def _receive_fd(duplicate: Any) -> int:
    fd: int = duplicate.detach()
    return fd


_PARENT_FDS: set[int] = set()
"""The parent's ends of all connections: what a forked worker must not keep open."""


def keep_from_children(fd: int) -> None:
    """Have forked workers close `fd`."""
    _PARENT_FDS.add(fd)


def forget_fd(fd: int) -> None:
    """Take back `keep_from_children`, before closing."""
    _PARENT_FDS.discard(fd)


def _pipe_pairs() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (read, write) fds of both ends of a new connection."""
    their_read, our_write = os.pipe()
    try:
        our_read, their_write = os.pipe()
    except OSError:
        _close_all((their_read, our_write))
        raise
    return (our_read, our_write), (their_read, their_write)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _kill_group(pid: int | None, number: int) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _run_process(
    ends: tuple[Connection, ...],
    memory_fd: int | None,
    factory: EnvFactory | None,
    not_ours: list[int],
) -> None:
    for fd in not_ours:
        with contextlib.suppress(OSError):
            os.close(fd)
    worker.isolate_process()
    worker.end_with_parent(_parent_waitable())
    channel: Channel
    if sys.platform == "win32":
        channel = PipeChannel(ends[0], blocking=True)
    else:
        channel = FrameChannel(*(os.dup(end.fileno()) for end in ends), blocking=True)
        for end in ends:
            end.close()
    code = worker.run_worker(channel, memory_fd, factory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handlers of the trainer's: they are not this process's to run


def _parent_waitable() -> Any:
    parent = multiprocessing.parent_process()
    if parent is None:  # only in tests that call this in the main process
        raise StateError("this is not a worker process")
    if hasattr(os, "pidfd_open") and parent.pid is not None:
        return os.pidfd_open(parent.pid)
    return parent.sentinel


def refuse_unsafe_fork() -> None:
    """Refuse to fork a process that has threads: their locks would stay locked in the child.

    Those of other managers do not count: they hold no lock that a worker needs.

    Raises:
        LaunchError: there are other threads.
    """
    here = threading.current_thread()
    threads = (thread for thread in threading.enumerate() if thread is not here)
    others = [thread.name for thread in threads if thread.name != BACKGROUND_THREAD]
    if others:
        raise LaunchError(
            f"context: fork with other threads running ({', '.join(others)}) can deadlock the "
            "workers, so it is refused. Use context: server (safe with threads, and as fast), or "
            "launch before the threads are started."
        )


def make_spawner(context: str, settings: WorkerSettings) -> Spawner:
    """Return the spawner for a `context` of the config.

    `server` needs Linux (pidfds, SEQPACKET sockets, parent-death signals); elsewhere `spawn` takes
    its place.
    """
    if context == "server":
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            return ServerSpawner(settings)
        context = "spawn"
    return MultiprocessingSpawner(context, settings)
