"""The worker server: a small single-threaded process that forks clean workers in milliseconds.

It has imported what workers need and nothing else, has one thread, and no fd but the ones it is
sent; so forking it is safe whatever the trainer does with threads, GPUs or MPI. It runs no env:
factories reach the workers over their own connections. It reaps its workers, reports how they
ended, and kills them and ends when the trainer closes the control socket or dies.

Control messages are records of a SEQPACKET socket. To the server: START (with the worker's ends of
its connection and, perhaps, the shared memory as file descriptors), SIGNAL, and GIVE_UP for a
worker that was killed long ago. From it: NOT_STARTED, ENDED, and LEFT, which answers GIVE_UP: that
worker is still in the kernel, and is reaped whenever the kernel lets go of it. A worker itself
sends STARTED on this socket, before anything else.

BRANCH makes the server fork a server like itself, with a control socket of its own, which imports
modules before it serves: see `server_imports`. If a second socket came with BRANCH, the branch
sends a pidfd of itself on that. It sends IMPORTING for each module, then READY, or SPOILT with the
reason why it is of no use. To the server that forked it, the branch is a worker with a negative
host_id: code that hangs, crashes or leaves threads behind when it is imported costs a branch, never
a server with workers.

With `context: fork` the server is not a fresh interpreter but a fork of the trainer, made while the
trainer has a single thread. Workers then inherit their factories, and the server holds whatever the
trainer held.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NoReturn

from envmgr.transport.process import server_imports
from envmgr.types import EnvFactory
from envmgr.wire.channel import FrameChannel
from envmgr.worker import process as worker
from envmgr.worker import process_name
from envmgr.worker.lifeline import Lifeline, die_with_owner

RECORD = struct.Struct("<Bqq")
"""Kind, host_id, and a number: a signal, a pid, an errno or an exit status."""

START, SIGNAL, NOT_STARTED, ENDED, STARTED, GIVE_UP, LEFT = range(7)
BRANCH, IMPORTING, READY, SPOILT, REPORT = range(7, 12)
"""BRANCH, SPOILT and REPORT are followed by data. The number of IMPORTING is the module's index."""

OF_PRELOADING = (IMPORTING, READY, SPOILT, REPORT)
MAX_FDS = 6
MAX_RECORD = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 0.5
"""How long to wait, at the end, until the next of the killed processes is gone."""


class WorkerServer:
    """Forks, signals and reaps workers.

    Args:
        control: the SEQPACKET socket to the trainer.
        trainer: a pidfd of it.
        factories: of envs, by env_id, if workers inherit them.
        births: sockets on which this server has yet to introduce itself.
    """

    def __init__(
        self,
        control: socket.socket,
        trainer: int,
        factories: Mapping[int, EnvFactory] | None = None,
        births: Sequence[int] = (),
    ) -> None:
        self._control = control
        self._births = list(births)
        self._factories = factories
        self._pid = os.getpid()
        self._untold: deque[bytes] = deque()
        self._reports: dict[int, int] = {}  # host_ids, by the fd that their worker reports to
        self._host_of: dict[int, int | None] = {}  # by pid; None for those that were given up
        self._pid_of: dict[int, int] = {}
        self._prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
        # Processes that workers leave behind when they end become children of this process, and of
        # no other: they are killed and reaped here. Pid 1 often reaps nothing in containers.
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._lifeline = Lifeline()
        self._child_ended, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._poll = select.poll()
        for fd in (control.fileno(), self._child_ended):
            self._poll.register(fd, select.POLLIN)
        self._trainer = trainer
        self._poll.register(self._trainer, select.POLLIN)

    def serve(self) -> None:
        """Do what the trainer asks until it is gone; then kill the remaining workers."""
        try:
            while True:
                events = dict(self._poll.poll())
                ready = {fd for fd, event in events.items() if event & ~select.POLLOUT}
                if self._untold:
                    self._send_untold()
                if self._births:
                    self._births = [fd for fd in self._births if not _introduce(fd)]
                if self._child_ended in ready:
                    self._reap()
                for fd in ready & self._reports.keys():
                    self._take_report(fd)
                if self._trainer in ready:
                    return
                if self._control.fileno() in ready and not self._serve_one():
                    return
        except ConnectionError:
            return
        finally:
            self._kill_all()

    def _serve_one(self) -> bool:
        record, fds, _, _ = socket.recv_fds(self._control, MAX_RECORD, MAX_FDS)
        if not record:
            return False
        kind, host_id, number = RECORD.unpack_from(record)
        if kind == START:
            self._start_worker(host_id, fds, reports=bool(number))
        elif kind == BRANCH:
            self._fork(host_id, fds, lambda: self._run_branch(fds, record[RECORD.size :]))
        elif host_id not in self._pid_of:
            return True  # its end has been reported
        elif kind == GIVE_UP:
            self._host_of[self._pid_of.pop(host_id)] = None
            self._tell(LEFT, host_id, 0)
        else:
            signal_group(self._pid_of[host_id], number)
        return True

    def _start_worker(self, host_id: int, fds: list[int], *, reports: bool) -> None:
        report = None
        if reports:
            with contextlib.suppress(OSError):  # no more fds: no report
                read_end, report = os.pipe()
                self._reports[read_end] = host_id
                self._poll.register(read_end, select.POLLIN)
        self._fork(host_id, fds, lambda: self._run_worker(fds, report))
        if report is not None:
            os.close(report)

    def _fork(self, host_id: int, fds: list[int], run: Callable[[], int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(NOT_STARTED, host_id, error.errno or 0)
        else:
            if pid == 0:
                self._become_child(host_id, run)
            self._host_of[pid] = host_id
            self._pid_of[host_id] = pid
        finally:
            for fd in fds:
                os.close(fd)

    def _become_child(self, host_id: int, run: Callable[[], int]) -> NoReturn:
        code = 1
        try:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._pid:  # it died before the kernel knew that we care
                os._exit(1)
            # The child itself sends this, before anything else: so whoever has heard of its envs
            # knows its pid.
            self._control.send(RECORD.pack(STARTED, host_id, os.getpid()))
            worker.isolate_process()
            for fd in (self._child_ended, self._wakeup, *self._births, *self._reports):
                os.close(fd)
            self._control.close()
            code = run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            worker.flush_streams()
            os._exit(code)

    def _run_worker(self, fds: list[int], report: int | None) -> int:
        # Processes that its envs start belong to the worker for all its life, even those that have
        # lost their own parent and left its group. So nothing of a worker that lives is ever a
        # child of the server.
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        die_with_owner(self._lifeline.read_fd)
        self._lifeline.close()
        os.close(self._trainer)
        channel = FrameChannel(fds[0], fds[1], blocking=True)
        return worker.run_worker(channel, tuple(fds[2:]), self._factories, report)

    def _run_branch(self, fds: list[int], wanted: bytes) -> int:
        self._lifeline.close()
        births = [fd for fd in fds[1:] if not _introduce(fd)]

        def tell(kind: int, number: int, data: bytes = b"") -> None:
            control.send(RECORD.pack(kind, 0, number) + data)

        # The branch ends when nobody receives any more what it tells.
        with contextlib.suppress(ConnectionError), socket.socket(fileno=fds[0]) as control:
            # Processes that imports leave behind become children of the branch and are noticed;
            # nobody else adopts them.
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                preloads = server_imports.Preloads.from_bytes(wanted)
                server_imports.import_all(preloads, lambda index: tell(IMPORTING, index))
            except ConnectionError:  # an OSError, but not one of the imports
                raise
            except (server_imports.SpoiltError, OSError) as error:  # or it cannot look at itself
                tell(SPOILT, 0, str(error).encode(errors="replace"))
                return 0
            worker.flush_streams()  # or each worker would print what modules have printed
            tell(READY, 0)
            _serve(control, self._trainer, self._factories, births)
        return 0

    def _take_report(self, fd: int) -> None:
        """Pass on a worker's report of the modules that it has imported."""
        host_id = self._reports.pop(fd)
        self._poll.unregister(fd)
        report = os.read(fd, MAX_RECORD - RECORD.size)
        os.close(fd)
        self._tell(REPORT, host_id, 0, report)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._child_ended, 4096)
        with contextlib.suppress(ChildProcessError):  # there are none left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._on_end(*ended)
        # Children that are not workers were left behind by a worker that has ended. If such a child
        # forks while it is killed, its own children come here before its end is known, and so are
        # found by the next look.
        _kill_children(besides=self._host_of)

    def _on_end(self, pid: int, status: int) -> None:
        if pid not in self._host_of:
            return  # what a worker has left behind
        host_id = self._host_of.pop(pid)
        signal_group(pid, signal.SIGKILL)  # what it started and left behind
        if host_id is not None:
            del self._pid_of[host_id]
            self._tell(ENDED, host_id, os.waitstatus_to_exitcode(status))

    def _kill_all(self) -> None:
        """Kill and reap all children, but do not wait for those that the kernel holds on to."""
        for pid in self._host_of:
            signal_group(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # there are none left
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid:
                    self._host_of.pop(pid, None)
                    continue
                _kill_children()  # those that left their worker's group as well
                ended = select.poll()  # `select` takes no fd above 1023
                ended.register(self._child_ended, select.POLLIN)
                if ended.poll(_PATIENCE_S * 1000):
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._child_ended, 4096)
                elif self._host_of:
                    self._host_of.clear()
                else:
                    return

    def _tell(self, kind: int, host_id: int, number: int, data: bytes = b"") -> None:
        self._untold.append(RECORD.pack(kind, host_id, number) + data)
        self._send_untold()

    def _send_untold(self) -> None:
        """Send what the trainer takes now: waiting for it here could make it wait for us."""
        try:
            while self._untold:
                self._control.send(self._untold[0], socket.MSG_DONTWAIT)
                self._untold.popleft()
        except BlockingIOError:
            events = select.POLLIN | select.POLLOUT
        else:
            events = select.POLLIN
        self._poll.modify(self._control.fileno(), events)


def _kill_children(besides: Container[int] = ()) -> None:
    """Kill children of this process: nobody else gets their pids before they are reaped here.

    Args:
        besides: pids of those that are not to be killed.
    """
    with contextlib.suppress(OSError):  # a kernel that does not list children
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with open(path) as file:
            for pid in map(int, file.read().split()):
                if pid not in besides:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)


def signal_group(pid: int | None, number: int) -> None:
    """Signal a worker and the processes that it has started; nothing happens if it is gone."""
    if pid is None:
        return
    # A worker leads its own group from its first moments; before that, only the pid is right.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _introduce(fd: int) -> bool:
    """Send a pidfd of this process, and close the socket.

    Returns:
        False if that has to be tried again: the trainer has sent as many fds as may be in flight,
        and this process has to take some of them first.
    """
    pidfd = os.pidfd_open(os.getpid())
    birth = socket.socket(fileno=fd)
    try:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(birth, [b"p"], [pidfd])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        birth.detach()
        return False
    finally:
        os.close(pidfd)
    birth.close()
    return True


def main(control_fd: int, trainer_pid: int) -> None:
    """Run a server; called in a fresh interpreter."""
    import gymnasium  # noqa: F401 - so that workers need not import it each by itself

    run_server(socket.socket(fileno=control_fd), trainer_pid)


def run_server(
    control: socket.socket, trainer_pid: int, factories: Mapping[int, EnvFactory] | None = None
) -> None:
    """Serve until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process_name.load_titles()
    process_name.name_server()
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    with control:
        try:
            # Other children of the trainer may have inherited the control socket: that its other
            # end is open does not prove that the trainer lives.
            trainer = os.pidfd_open(trainer_pid)
        except ProcessLookupError:
            return  # the trainer is gone already
        _serve(control, trainer, factories)


def _serve(
    control: socket.socket,
    trainer: int,
    factories: Mapping[int, EnvFactory] | None,
    births: Sequence[int] = (),
) -> None:
    server = WorkerServer(control, trainer, factories, births)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it touches
    server.serve()
