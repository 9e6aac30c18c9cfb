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
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.process import server
from envmgr.transport.process.preload import Preloads
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.spawner import SIGKILL

NUMBERS = itertools.count(-1, -1)
"""Of branches, in this process."""

_CLOSE_S = 0.5
_PATIENCE_S = 5.0


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
                    self._close_link()
        return self.link.is_open

    def _close_link(self) -> None:
        if self.link.is_open:
            forget_fd(self.link.control.fileno())
            with contextlib.suppress(OSError):
                self.link.control.shutdown(socket.SHUT_RDWR)  # forks of this process have it, too
            self.link.control.close()

    def fork(self, control: socket.socket, ours: socket.socket) -> ForkedServer:
        """Have a server forked from it.

        Args:
            control: the end of the control socket that is for it.
            ours: the other one.

        Raises:
            OSError: it is stopped or gone.
        """
        number = next(NUMBERS)
        nothing = Preloads((), ()).to_bytes()
        self.link.send(server.BRANCH, number, 0, nothing, [control.fileno()])
        return ForkedServer(self, number, ours)

    def end(self) -> None:
        """End it, and in the end those that it was forked from; nobody uses it any more."""
        self._close_link()
        if isinstance(self.origin, Home):
            give_back(self.origin)
            return
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.origin.wait(_CLOSE_S)
                return
            self.origin.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.origin.wait(_PATIENCE_S)


class ForkedServer:
    """A server that a home has forked, with the methods of a process that the spawner needs."""

    def __init__(self, home: Home, number: int, control: socket.socket) -> None:
        self._home = home
        self._number = number
        self._control = control.dup()
        keep_from_children(self._control.fileno())

    def kill(self) -> None:
        """Have the home kill it."""
        with contextlib.suppress(OSError):  # both are gone
            if self._home.link.is_open:
                self._home.link.send(server.SIGNAL, self._number, SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, as it does when it is let go of."""
        if self._control.fileno() < 0:
            return 0
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        poll = select.poll()
        poll.register(self._control, 0)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("the worker server", timeout or 0.0)
        self.forget()
        return 0

    def forget(self) -> None:
        """Close the connection."""
        if self._control.fileno() >= 0:
            forget_fd(self._control.fileno())
            self._control.close()


_homes: list[Home] = []
_lock = threading.RLock()


def _forget_all() -> None:
    """Begin anew in a fork of this process, whose servers end with the one it was forked from."""
    global _lock
    _lock = threading.RLock()
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
    names = {*wanted}
    with _lock:
        found = [home for home in _homes if home.key == key and names.issuperset(home.modules)]
        found = [home for home in found if home.is_alive]
        if found:
            home = max(found, key=lambda home: len(home.modules))
            home.n_users += 1
        else:
            home = Home(key, *_opened(start()))
            _homes.append(home)
        return home


def _opened(started: tuple[ServerLink, Any]) -> tuple[ServerLink, tuple[str, ...], Any]:
    link, process = started
    keep_from_children(link.control.fileno())
    return link, (), process


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
        with _lock:
            _homes.append(settled)
    return settled


def hide(home: Home) -> None:
    """Have nobody else take a home that does not do what it is told."""
    with _lock, contextlib.suppress(ValueError):  # it is not shared
        _homes.remove(home)


def give_back(home: Home) -> None:
    """Use a home no more; the last one to do so ends it."""
    with _lock:
        home.n_users -= 1
        if home.n_users:
            return
        hide(home)
    home.end()


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
