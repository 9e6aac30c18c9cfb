"""`context: fork | spawn | forkserver`: workers started by the standard library."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from envmgr.errors import ConfigError, StateError
from envmgr.transport import worker
from envmgr.transport.base import HostDied, HostSpec, WorkerSettings
from envmgr.transport.channel import Channel, FrameChannel, PipeChannel
from envmgr.transport.spawner import PARENT_FDS, SIGKILL, Spawner, pipe_pairs
from envmgr.types import EnvFactory


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
        self._pids: dict[int, int] = {}

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factories without pickling: by fork."""
        return self._method == "fork"

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the processes, by host_id."""
        return dict(self._pids)

    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> Channel:
        """Start a process that ends with this one."""
        channel, theirs = self._connection()
        try:
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_run_process,
                args=(
                    theirs,
                    self._transferable(shared_fds),
                    spec.factories if self.inherits_factories else None,
                    self._not_for_children(channel),
                    self._environment(),
                ),
                name=_name_of(spec),
                daemon=self._settings.daemon,
            )
            with self._start_conditions():
                process.start()
            if hasattr(os, "pidfd_open"):
                try:
                    self._pidfds[spec.host_id] = os.pidfd_open(process.pid)
                except OSError:
                    _kill_group(process.pid, SIGKILL)
                    process.join()
                    raise
        except BaseException:
            channel.close()
            raise
        finally:
            for end in theirs:
                end.close()
        _keep_from_exit_handler(process)
        self._processes[spec.host_id] = process
        if process.pid is not None:
            self._pids[spec.host_id] = process.pid
        self._ready.add(self.death_of(spec.host_id))
        return channel

    def _connection(self) -> tuple[Channel, tuple[Connection, ...]]:
        """Return the parent's channel, and the worker's ends."""
        if sys.platform == "win32":
            ours, theirs = self._context.Pipe()
            return PipeChannel(ours, blocking=False), (theirs,)
        ours, theirs = pipe_pairs()
        read, write = Connection(theirs[0], writable=False), Connection(theirs[1], readable=False)
        return FrameChannel(*ours, blocking=False), (read, write)

    def _not_for_children(self, channel: Channel) -> list[int]:
        """Return the fds that a forked worker closes, so that it holds none of its siblings'."""
        if not self.inherits_factories:
            return []
        return [*channel.fds, *self._pidfds.values(), *PARENT_FDS]

    def _environment(self) -> dict[str, str] | None:
        """Return the variables of a worker that would else get those of an older process.

        A fork server is started once, and keeps the environment that it found then.
        """
        if self._method != "forkserver":
            return None
        return worker.worker_environment(os.environ, self._settings)

    def _transferable(self, fds: tuple[int, ...]) -> tuple[Any, ...]:
        return fds if self._method == "fork" else tuple(map(_SharedFd, fds))

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
        during = worker.worker_environment(os.environ, self._settings)
        worker.replace_environment(os.environ, during)
        try:
            yield
        finally:  # only what is still as it was set here: the trainer may change others meanwhile
            for name in before.keys() | during.keys():
                if before.get(name) != during.get(name) == os.environ.get(name):
                    _set_or_delete(name, before.get(name))

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
            self._pids.pop(host_id, None)
            process.join()
            _kill_group(process.pid, SIGKILL)  # what it started and left behind
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
            self.signal(host_id, SIGKILL)
        for process in self._processes.values():
            process.join(1.0)
        self.deaths()


def _name_of(spec: HostSpec) -> str:
    first, last = spec.envs[0].env_id, spec.envs[-1].env_id
    return f"envmgr-env-{first}" if first == last else f"envmgr-envs-{first}-to-{last}"


def _keep_from_exit_handler(process: BaseProcess) -> None:
    """Take a worker out of the standard library's list of children.

    Its exit handler would end them in every fork of the trainer that ends in the ordinary way: the
    workers of the trainer itself. The manager's own finalizer ends them in the trainer.
    """
    children: set[BaseProcess] = getattr(multiprocessing.process, "_children", set())
    children.discard(process)


def _set_or_delete(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


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


def _kill_group(pid: int | None, number: int) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _run_process(
    ends: tuple[Connection, ...],
    shared_fds: tuple[int, ...],
    factories: Mapping[int, EnvFactory] | None,
    not_ours: list[int],
    environment: dict[str, str] | None,
) -> None:
    if environment is not None:
        worker.replace_environment(os.environ, environment)
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
    code = worker.run_worker(channel, shared_fds, factories)
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
