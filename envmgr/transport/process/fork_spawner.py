"""`context: fork` where there are pidfds: workers forked by a fork of the trainer.

That fork is made when the first worker is started, while the trainer has no other threads. It never
has more than one thread itself. So it is safe to fork workers from it later, too, whatever threads
the trainer has started meanwhile, and whatever thread asks for them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from signal import SIGKILL
from typing import NoReturn

from envmgr.transport.fds import forget_fd, keep_from_children, let_go_of, parent_fds
from envmgr.transport.process import server
from envmgr.transport.process.server_spawner import ServerProcess, ServerSpawner
from envmgr.transport.process.threads import (
    quiet_fork,
    reap_behind,
    refuse_unsafe_fork,
    waits_for_main_thread,
)
from envmgr.types import EnvFactory
from envmgr.wire.hosts import WorkerSettings


class ForkSpawner(ServerSpawner):
    """Lets a fork of this process fork the workers.

    Args:
        settings: how workers are set up.
        factories: those of all envs, by env_id.
    """

    def __init__(self, settings: WorkerSettings, factories: Mapping[int, EnvFactory]) -> None:
        super().__init__(settings)
        self._factories = factories

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factories without pickling: always."""
        return True

    @property
    def must_wait_for_call(self) -> bool:
        """Whether there is no fork to fork workers from, and this thread may not make one."""
        return self._first_link() is None and waits_for_main_thread()

    def _start_server(self, theirs: socket.socket, ours: socket.socket) -> ServerProcess:
        refuse_unsafe_fork()
        not_ours = [*parent_fds(), ours.fileno()]
        trainer_pid = os.getpid()
        with quiet_fork():
            pid = os.fork()
        if pid == 0:
            _serve(theirs, not_ours, trainer_pid, self._factories)
        return _ForkedServer(pid)


class _ForkedServer:
    """A fork of this process with the methods that the spawner needs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_reaped = False
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)
            raise
        keep_from_children(self._pidfd)

    def kill(self, *, directly: bool) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._pidfd is None:
            return 0
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        status = 0
        with contextlib.suppress(ChildProcessError):  # somebody else has reaped it
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._is_reaped = True
        self.forget()
        return status

    def forget(self) -> None:
        if self._pidfd is not None:
            forget_fd(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
            if not self._is_reaped:
                reap_behind(partial(os.waitpid, self._pid, 0))


def _serve(
    control: socket.socket,
    not_ours: list[int],
    trainer_pid: int,
    factories: Mapping[int, EnvFactory],
) -> NoReturn:
    code = 1
    try:
        let_go_of(not_ours)
        os.setsid()
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for good
        _begin_as_child()
        server.run_server(control, trainer_pid, factories)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # no exit handlers of the trainer's: they are not this process's to run


def _begin_as_child() -> None:
    """Do what `multiprocessing` does in its own forks: queues that factories hold need it."""
    getattr(multiprocessing.process, "_children", set()).clear()
    getattr(multiprocessing.util, "_finalizer_registry", {}).clear()
    getattr(multiprocessing.util, "_run_after_forkers", int)()
