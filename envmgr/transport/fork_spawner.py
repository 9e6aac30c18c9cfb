"""`context: fork` where there are pidfds: workers forked by a fork of the trainer.

That fork is made when the first worker is started, while the trainer has no other threads. It has
one thread for all its life, so workers are forked from it as safely later as at launch, whatever
threads the trainer has started meanwhile, and from whatever thread they are asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess

from envmgr.transport import server
from envmgr.transport.base import WorkerSettings
from envmgr.transport.fds import PARENT_FDS, let_go_of
from envmgr.transport.server_spawner import ServerProcess, ServerSpawner
from envmgr.transport.threads import refuse_unsafe_fork
from envmgr.types import EnvFactory


class ForkSpawner(ServerSpawner):
    """Has workers forked by a fork of this process.

    Args:
        settings: of the workers.
        factories: of all envs, by env_id.
    """

    def __init__(self, settings: WorkerSettings, factories: Mapping[int, EnvFactory]) -> None:
        super().__init__(settings)
        self._factories = factories

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factories without pickling: always."""
        return True

    def _start_server(self, theirs: socket.socket, ours: socket.socket) -> ServerProcess:
        refuse_unsafe_fork()
        process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(theirs, [*PARENT_FDS, ours.fileno()], os.getpid(), self._factories),
            name="envmgr-fork-server",
        )
        with quiet_fork():
            process.start()
        keep_from_exit_handler(process)
        return _ForkedServer(process)


class _ForkedServer:
    """A fork of this process with the methods that the spawner needs."""

    def __init__(self, process: BaseProcess) -> None:
        self._process: BaseProcess | None = process

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        process = self._process
        if process is None:
            return 0
        process.join(timeout)
        status = process.exitcode
        # Without a status the process may be gone all the same: somebody else has reaped it.
        if status is None and _is_running(process.pid):
            raise subprocess.TimeoutExpired(process.name, timeout or 0.0)
        with contextlib.suppress(ValueError):  # as long as it has no status it counts as running
            process.close()
        self._process = None
        return status or 0


def _is_running(pid: int | None) -> bool:
    try:
        return pid is not None and os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Have Python not warn of the background threads of other managers, which hold no lock."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        yield


def keep_from_exit_handler(process: BaseProcess) -> None:
    """Take a process out of the standard library's list of children.

    Its exit handler would end them in every fork of the trainer that ends in the ordinary way: the
    workers of the trainer itself. The manager's own finalizer ends them in the trainer.
    """
    children: set[BaseProcess] = getattr(multiprocessing.process, "_children", set())
    children.discard(process)


def _serve(
    control: socket.socket,
    not_ours: list[int],
    trainer_pid: int,
    factories: Mapping[int, EnvFactory],
) -> None:
    code = 1
    try:
        let_go_of(not_ours)
        os.setsid()
        server.run_server(control, trainer_pid, factories)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # no exit handlers of the trainer's: they are not this process's to run
