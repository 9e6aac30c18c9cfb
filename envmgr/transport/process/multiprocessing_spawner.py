"""`context: fork | spawn | forkserver`: workers started by the standard library."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.spawn import get_preparation_data
from signal import SIGKILL
from typing import Any

from envmgr.errors import ConfigError, StateError
from envmgr.interpreters import clean_children
from envmgr.transport.base import HostDied
from envmgr.transport.fds import (
    forget_fd,
    has_pidfds,
    keep_from_children,
    let_go_of,
    parent_fds,
    pipe_pairs,
)
from envmgr.transport.process.server import signal_group
from envmgr.transport.process.spawner import LEFT_BEHIND, Spawner
from envmgr.transport.process.threads import quiet_fork, reap_behind
from envmgr.transport.ready import ReadySet
from envmgr.types import EnvFactory
from envmgr.wire.channel import FrameChannel
from envmgr.wire.hosts import HostSpec, WorkerSettings
from envmgr.worker import process as worker
from envmgr.worker import process_name
from envmgr.worker.lifeline import Lifeline, die_with_owner, kill_with

_CLOSE_S = 0.5


class MultiprocessingSpawner(Spawner):
    """Starts workers by one of the standard start methods of `multiprocessing`.

    Args:
        method: "fork", "spawn" or "forkserver".
    """

    def __init__(self, method: str, settings: WorkerSettings) -> None:
        super().__init__(settings)
        if method not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(f"context: {method} does not exist on this platform; it has {known}")
        if method != "fork":
            _refuse_main_that_cannot_be_imported(method)
        self._method = method
        self._context: BaseContext = multiprocessing.get_context(method)
        self._processes: dict[int, BaseProcess] = {}
        self._pidfds: dict[int, int] = {}
        self._lifeline: Lifeline | None = None

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factories without pickling: by fork."""
        return self._method == "fork"

    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> FrameChannel:
        """Start a process that ends with this one."""
        self._prepare()
        channel, theirs = self._connection()
        lifeline: tuple[int, ...] = ()
        try:
            lifeline = self._own_lifeline()
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_run_process,
                args=(
                    theirs,
                    self._transferable(shared_fds),
                    self._transferable(lifeline),
                    spec.factories if self.inherits_factories else None,
                    self._not_for_children(channel, shared_fds),
                    self._environment(),
                ),
                name=_name_of(spec),
                daemon=self._settings.daemon,
            )
            with self._start_conditions():
                try:
                    process.start()
                except EOFError as error:
                    raise ChildProcessError("the fork server has ended, or cannot fork") from error
            if process.pid is not None:  # it may take long until it runs code of ours
                for end in lifeline:
                    kill_with(end, process.pid)
            try:
                self._watch(spec.host_id, process)
            except OSError:
                signal_group(process.pid, SIGKILL)
                _reap(process)
                raise
        except BaseException:
            channel.close()
            raise
        finally:
            for pipe_end in theirs:
                pipe_end.close()
            for fd in lifeline:
                os.close(fd)
        _keep_from_exit_handler(process)
        if process.pid is not None:
            self._pids[spec.host_id] = process.pid
        return channel

    def _prepare(self) -> None:
        """Create what all workers share, when the first one is started."""
        if self._endings is None and has_pidfds():
            self._endings = ReadySet()
            self._lifeline = Lifeline()
            self._lifeline.keep_to_this_process()

    def _own_lifeline(self) -> tuple[int, ...]:
        """Return a read end of the lifeline for one worker; empty where there is no lifeline."""
        try:
            return () if self._lifeline is None else (self._lifeline.read_end(),)
        except FileNotFoundError:  # no /proc
            return ()

    def _watch(self, host_id: int, process: BaseProcess) -> None:
        """Keep a process, and watch for its death."""
        if self._endings is not None and process.pid is not None:
            pidfd = os.pidfd_open(process.pid)
            try:
                self._endings.add(pidfd)
                self._ready.add(pidfd)
            except OSError:
                self._endings.discard(pidfd)
                os.close(pidfd)
                raise
            keep_from_children(pidfd)
            self._pidfds[host_id] = pidfd
        else:
            self._ready.add(process.sentinel)
        self._processes[host_id] = process

    def _connection(self) -> tuple[FrameChannel, tuple[Connection, ...]]:
        """Return the parent's channel, and the worker's ends."""
        ours, theirs = pipe_pairs()
        read, write = Connection(theirs[0], writable=False), Connection(theirs[1], readable=False)
        return FrameChannel(*ours, blocking=False), (read, write)

    def _not_for_children(self, channel: FrameChannel, shared_fds: tuple[int, ...]) -> list[int]:
        """Return the fds that a forked worker gives up, so that it has no fds of its siblings."""
        if not self.inherits_factories:
            return []
        return [*channel.fds, *({*parent_fds()} - {*shared_fds})]

    def _environment(self) -> dict[str, str] | None:
        """Return the variables of a worker that would otherwise get those of an older process.

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
            with quiet_fork():
                yield
            return
        # Math libraries read their variables when they are loaded, before our code runs.
        before = dict(os.environ)
        during = worker.worker_environment(os.environ, self._settings)
        worker.replace_environment(os.environ, during)
        try:
            with clean_children():
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
        """Reap the processes that have ended."""
        died, self.died = self.died, []
        for host_id in self._ended():
            self._ready.discard(self.death_of(host_id))
            process = self._processes.pop(host_id)
            self._pids.pop(host_id, None)
            pid, status = process.pid, _reap(process)
            signal_group(pid, SIGKILL)  # what it started and left behind
            if host_id in self._left:
                self._left.discard(host_id)  # reported before
            else:
                died.append((host_id, HostDied(status)))
            if host_id in self._pidfds:
                self._forget_pidfd(self._pidfds.pop(host_id))
        return died

    def _forget_pidfd(self, pidfd: int) -> None:
        if self._endings is not None:
            self._endings.discard(pidfd)  # closing it is not enough if a fork has it, too
        forget_fd(pidfd)
        os.close(pidfd)

    def _ended(self) -> list[int]:
        if self._endings is None:
            return [i for i, process in self._processes.items() if not process.is_alive()]
        ended = self._endings.ready()
        return [host_id for host_id, fd in self._pidfds.items() if fd in ended]

    def signal(self, host_id: int, number: int) -> None:
        """Signal the worker's process group."""
        process = self._processes.get(host_id)
        if process is not None:
            signal_group(process.pid, number)

    def give_up(self, host_id: int) -> None:
        """Report the worker dead, and reap it when it ends."""
        if host_id in self._processes and host_id not in self._left:
            self._left.add(host_id)
            self.died.append((host_id, HostDied(None, LEFT_BEHIND)))

    def close(self) -> None:
        """Kill and reap the remaining workers, all at the same time."""
        for host_id in self._processes:
            self.signal(host_id, SIGKILL)
        end = time.monotonic() + _CLOSE_S
        while self._processes and (left_s := end - time.monotonic()) > 0.0:
            wait([self.death_of(host_id) for host_id in self._processes], left_s)
            self.deaths()
        for host_id, process in self._processes.items():  # the kernel holds on to them
            self._ready.discard(self.death_of(host_id))
            reap_behind(process.join)
        for pidfd in self._pidfds.values():
            self._forget_pidfd(pidfd)
        self._processes.clear()
        self._pidfds.clear()
        self._pids.clear()
        self._left.clear()
        if self._endings is not None:
            self._endings.close()
            self._endings = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def _refuse_main_that_cannot_be_imported(method: str) -> None:
    """Refuse a main script that is not there: every process would end before it runs our code.

    Raises:
        ConfigError: it is not there.
    """
    path = get_preparation_data("envmgr").get("init_main_from_path")
    if path is not None and not os.path.exists(path):
        raise ConfigError(
            f"context: {method} starts workers by importing the main script again, but {path} does "
            "not exist (any more, or from here). Use context: server, which does not need it."
        )


def _name_of(spec: HostSpec) -> str:
    first, last = spec.envs[0].env_id, spec.envs[-1].env_id
    return f"envmgr-env-{first}" if first == last else f"envmgr-envs-{first}-to-{last}"


def _keep_from_exit_handler(process: BaseProcess) -> None:
    """Take a process out of the standard library's list of children.

    In every fork of the trainer that exits normally, the library's exit handler would end these
    children, which are workers of the trainer itself. In the trainer, the manager's own finalizer
    ends them.
    """
    children: set[BaseProcess] = getattr(multiprocessing.process, "_children", set())
    children.discard(process)


def _reap(process: BaseProcess) -> int | None:
    """Return the exit status of a process that has ended; None if somebody else has reaped it.

    A handler of SIGCHLD, or a library that waits for any child of this process, may have done so.
    """
    process.join()
    status = process.exitcode
    with contextlib.suppress(ValueError):  # without a status it counts as running
        process.close()
    return status


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


def _run_process(
    ends: tuple[Connection, ...],
    shared_fds: tuple[int, ...],
    lifelines: tuple[int, ...],
    factories: Mapping[int, EnvFactory] | None,
    not_ours: list[int],
    environment: dict[str, str] | None,
) -> None:
    if environment is not None:
        worker.replace_environment(os.environ, environment)
    let_go_of(not_ours)
    worker.isolate_process()
    for fd in lifelines:
        die_with_owner(fd)
        os.close(fd)
    worker.end_with_parent(_parent_waitable())
    channel = FrameChannel(*(os.dup(end.fileno()) for end in ends), blocking=True)
    for end in ends:
        end.close()
    process_name.load_titles()
    code = worker.run_worker(channel, shared_fds, factories)
    worker.flush_streams()
    os._exit(code)  # no exit handlers of the trainer's: they are not this process's to run


def _parent_waitable() -> Any:
    parent = multiprocessing.parent_process()
    if parent is None:  # only in tests that call this in the main process
        raise StateError("this is not a worker process")
    if parent.pid is not None and has_pidfds():
        return os.pidfd_open(parent.pid)
    return parent.sentinel
