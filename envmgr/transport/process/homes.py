"""Servers that the managers of a trainer share: each has its own server forked from one of them.

A *home* is a worker server that starts no workers. The first is a fresh interpreter; others are
branches that have imported what a manager wants. A manager takes the home that has most of that
and nothing else, has it import the rest in a branch, which is a home then, and has its own server
forked there. So a manager beside another one with the same needs imports nothing, and gets nothing
that it would not have imported itself; its workers have a server that is nobody else's.

A home is there as long as managers, or homes that were forked from it, use it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.process import server
from envmgr.transport.process.server_imports import Preloads
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.spawner import SIGKILL

NUMBERS = itertools.count(-1, -1)
"""Of branches, in this process."""

_FD = struct.Struct("i")
_CLOSE_S = 0.5
_GIVE_WAY_S = 0.2
"""So long one thread waits for another one that looks at homes, which takes microseconds."""


class Home:
    """A server that others are forked from.

    Args:
        key: what it has inherited; only who would give the same to a server of its own may use it.
        link: to it.
        modules: what it has imported.
        origin: a process with the methods of `subprocess.Popen`, or the home it was forked from.
    """

    def __init__(
        self, key: Any, link: ServerLink, modules: Iterable[str], origin: Home | Any
    ) -> None:
        self.key = key
        self.link = link
        self.modules = tuple(modules)
        self.origin = origin
        self.n_users = 1

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as it has told; what it tells besides is of no use."""
        with contextlib.suppress(BlockingIOError):
            while self.link.is_open:
                if self.link.receive() is None:
                    self.link.close()
        return self.link.is_open

    def fork(self, control: socket.socket) -> ForkedServer:
        """Have a server forked from it.

        Args:
            control: the end of the control socket that is for it.

        Raises:
            OSError: it is stopped or gone, or there are no more fds.
        """
        number = next(NUMBERS)
        nothing = Preloads((), ()).to_bytes()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked = ForkedServer(self, number, ours)
        try:
            with theirs:
                fds = [control.fileno(), theirs.fileno()]
                self.link.send(server.BRANCH, number, 0, nothing, fds)
        except BaseException:
            forked.forget()
            raise
        return forked

    def end(self) -> None:
        """End it, and in the end those that it was forked from; nobody uses it any more."""
        self.link.close()
        if isinstance(self.origin, Home):
            give_back(self.origin)
            return
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.origin.wait(_CLOSE_S)
                return
            self.origin.kill()


class ForkedServer:
    """A server that a home has forked, with the methods of a process that the spawner needs.

    Args:
        home: that forks it.
        number: its host_id there.
        birth: it sends a pidfd of itself here, so that it can be killed and waited for whatever
            its home does.
    """

    def __init__(self, home: Home, number: int, birth: socket.socket) -> None:
        self._home = home
        self._number = number
        self._birth = birth
        self._pidfd = -1
        self._has_ended = False
        birth.setblocking(False)
        keep_from_children(birth.fileno())

    def kill(self, *, directly: bool) -> None:
        """Have its home kill it, or kill it whatever its home does if that has forked it."""
        known = directly and self._look()
        with contextlib.suppress(OSError):  # it is gone, or its home is
            if self._pidfd >= 0 and known:
                signal.pidfd_send_signal(self._pidfd, SIGKILL)
            elif not self._has_ended:
                args = (server.SIGNAL, self._number, SIGKILL)
                self._home.link.send(*args, patience_s=0.0 if directly else None)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, as it does when it is let go of."""
        due = None if timeout is None else monotonic() + timeout
        self._look()
        while not self._has_ended:
            poll = select.poll()
            poll.register(self._birth if self._pidfd < 0 else self._pidfd, select.POLLIN)
            if not poll.poll(None if due is None else max(due - monotonic(), 0.0) * 1000):
                raise subprocess.TimeoutExpired("the worker server", timeout or 0.0)
            if self._pidfd >= 0:
                self._has_ended = True
            elif not self._look():
                raise subprocess.TimeoutExpired("the worker server", timeout or 0.0)
        self.forget()
        return 0

    def _look(self) -> bool:
        """Return whether it is known, or known to have ended."""
        if self._has_ended or self._pidfd >= 0:
            return True
        try:
            # Left there: it would be lost if there is no fd for it now. (`socket.recv_fds` heeds no
            # flags.)
            peek = (1, socket.CMSG_LEN(_FD.size), socket.MSG_PEEK)
            data, ancillary, _, _ = self._birth.recvmsg(*peek)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        for _, kind, rights in ancillary:
            if kind == socket.SCM_RIGHTS:
                [self._pidfd] = _FD.unpack(rights)
                keep_from_children(self._pidfd)
        self._has_ended = not data
        return self._has_ended or self._pidfd >= 0

    def forget(self) -> None:
        """Release what is kept of it."""
        self._has_ended = True
        if self._pidfd >= 0:
            forget_fd(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._birth.fileno() >= 0:
            forget_fd(self._birth.fileno())
            self._birth.close()


_homes: list[Home] = []
# Held while homes are looked at and counted, and for nothing else. Nobody waits for it for ever:
# the main thread may be interrupted while it has it, and its signal handler may wait for whoever
# wants it; and a garbage collection may close a manager in the very thread that has it.
_lock = threading.Lock()
_given_back: queue.SimpleQueue[Home] = queue.SimpleQueue()


def _forget_all() -> None:
    """Begin anew in a fork of this process, whose servers end with the one it was forked from."""
    global _lock, _given_back
    _lock = threading.Lock()
    _given_back = queue.SimpleQueue()
    _homes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def take(key: Any, wanted: Iterable[str], start: Callable[[], tuple[ServerLink, Any]]) -> Home:
    """Return the home that has imported most of what is wanted, and nothing else.

    Args:
        key: see `Home`.
        wanted: names of modules.
        start: starts a server and returns the link to it and its process, if there is no home.

    Raises:
        OSError: no server could be started.
    """
    home = _find(key, {*wanted})
    if home is None:
        link, process = start()
        keep_from_children(link.control.fileno())
        home = Home(key, link, (), process)
        _homes.append(home)
    return home


def _find(key: Any, names: set[str]) -> Home | None:
    """Return the best one there is, with one user more."""
    if not _lock.acquire(timeout=_GIVE_WAY_S):
        return None  # see `_lock`; a server of its own is always right
    try:
        found = [home for home in _homes if home.key == key and names.issuperset(home.modules)]
        found = [home for home in found if home.n_users and home.is_alive]
        home = max(found, key=lambda home: len(home.modules), default=None)
        if home is not None:
            home.n_users += 1
        return home
    finally:
        _lock.release()
        _end_unused()


def settle(link: ServerLink, modules: Iterable[str], home: Home, *, shared: bool) -> Home:
    """Make a branch of a home a home itself, which takes that one's place for its user.

    Args:
        link: to the branch.
        modules: what it has imported.
        home: that it was forked from.
        shared: others may take it.
    """
    settled = Home(home.key, link, (*home.modules, *modules), home)
    keep_from_children(link.control.fileno())
    if shared:
        _homes.append(settled)
    return settled


def hide(home: Home) -> None:
    """Have nobody else take a home that does not do what it is told."""
    with contextlib.suppress(ValueError):  # it is not shared
        _homes.remove(home)


def give_back(home: Home) -> None:
    """Use a home no more; the last one to do so ends it.

    If another thread looks at homes and cannot go on, it does that when it can.
    """
    _given_back.put(home)
    _end_unused()


def _end_unused() -> None:
    # Looked at again when the lock is released: who could not have it meanwhile relies on that.
    while not _given_back.empty() and _lock.acquire(timeout=_GIVE_WAY_S):
        unused: Home | None = None
        try:
            with contextlib.suppress(queue.Empty):
                home = _given_back.get_nowait()
                home.n_users -= 1
                if not home.n_users:
                    hide(home)
                    unused = home
        finally:
            _lock.release()
        if unused is not None:
            unused.end()


def inheritance() -> tuple[Any, ...]:
    """Return what a process that is started now gets from this one, besides its environment."""
    import resource

    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in names)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return (os.getpid(), os.getresuid(), os.getresgid(), limits, priority, cores, *_files())


def _files() -> Iterable[Any]:
    for name in (".", 1, 2):
        try:
            stat = os.stat(name)
        except OSError:
            yield None
        else:
            yield stat.st_dev, stat.st_ino
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        yield next((line for line in file if line.startswith("Umask:")), None)
