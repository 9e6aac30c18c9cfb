"""Template servers, which managers share: the worker server of each manager is forked from one.

A *template* is a worker server that starts no workers. The first one is a fresh interpreter; others
are branches that have imported what a manager wants. A manager takes the template that has imported
most of what it wants and nothing that it does not want. The rest is imported in a branch of that
template, which becomes a template itself; the manager's own server is forked from it. So a second
manager with the same needs imports nothing; it gets nothing that it would not have imported itself;
and no other manager uses its server.

A template lives as long as managers, or templates that were forked from it, use it.
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
from signal import SIGKILL
from time import monotonic
from typing import Any

from envmgr.proc import status_of
from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.process import server
from envmgr.transport.process.server_imports import Preloads
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.threads import reap_behind

NUMBERS = itertools.count(-1, -1)
"""Numbers of branches, in this process."""

_FD = struct.Struct("i")
_CLOSE_S = 0.5
_GIVE_WAY_S = 0.2
"""How long a thread waits for another one that looks at templates, which takes microseconds."""


class TemplateServer:
    """A server from which others are forked.

    Args:
        key: what it has inherited; a manager whose own server would inherit the same may use it.
        link: the connection to it.
        modules: what it has imported.
        origin: its process, with the methods of `subprocess.Popen`, or the template from which it
            was forked.
    """

    def __init__(
        self, key: Any, link: ServerLink, modules: Iterable[str], origin: TemplateServer | Any
    ) -> None:
        self.key = key
        self.link = link
        self.modules = tuple(modules)
        self.origin = origin
        self.n_users = 1

    @property
    def is_alive(self) -> bool:
        """Whether it is not known to have ended; whatever it has sent until now is dropped."""
        with contextlib.suppress(BlockingIOError):
            while self.link.is_open:
                if self.link.receive() is None:
                    self.link.close()
        return self.link.is_open

    def fork(self, control: socket.socket) -> ForkedServer:
        """Have this template fork a server.

        Args:
            control: the new server's end of its control socket.

        Raises:
            OSError: the template is stopped or gone, or there are no more fds.
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
        """End this template, which is now unused, and give back the one it was forked from."""
        self.link.close()
        if isinstance(self.origin, TemplateServer):
            give_back(self.origin)
            return
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.origin.wait(_CLOSE_S)
                return
            self.origin.kill()
        reap_behind(self.origin.wait)


class ForkedServer:
    """A server that a template has forked, with the methods of a process that the spawner needs.

    Args:
        template: the one that forks it.
        number: its host_id in the template.
        birth: the socket on which it sends a pidfd of itself, so that it can be killed and waited
            for whatever its template does.
    """

    def __init__(self, template: TemplateServer, number: int, birth: socket.socket) -> None:
        self._template = template
        self._number = number
        self._birth = birth
        self._pidfd = -1
        self._has_ended = False
        birth.setblocking(False)
        keep_from_children(birth.fileno())

    def kill(self, *, directly: bool) -> None:
        """Have its template kill it, or kill it from here if the template has forked it."""
        known = directly and self._look()
        with contextlib.suppress(OSError):  # it is gone, or its template is
            if self._pidfd >= 0 and known:
                signal.pidfd_send_signal(self._pidfd, SIGKILL)
            elif not self._has_ended:
                args = (server.SIGNAL, self._number, SIGKILL)
                self._template.link.send(*args, patience_s=0.0 if directly else None)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, as it does when its control socket is closed."""
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
        """Return whether it has sent its pidfd, or is known to have ended."""
        if self._has_ended or self._pidfd >= 0:
            return True
        try:
            # The message stays in the socket: the pidfd would be lost if there is no fd for it now.
            # (`socket.recv_fds` ignores flags.)
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
        """Release the fds that are kept for it."""
        self._has_ended = True
        if self._pidfd >= 0:
            forget_fd(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._birth.fileno() >= 0:
            forget_fd(self._birth.fileno())
            self._birth.close()


_templates: list[TemplateServer] = []
# Held while templates are looked at and counted, and for nothing else. No thread waits for it for
# ever: the main thread may be interrupted while it holds the lock, and its signal handler may wait
# for the thread that wants it; and a garbage collection may close a manager in the thread that
# holds it.
_lock = threading.Lock()
_given_back: queue.SimpleQueue[TemplateServer] = queue.SimpleQueue()


def _forget_all() -> None:
    """Begin anew in a fork of this process: the servers end with the process that started them."""
    global _lock, _given_back
    _lock = threading.Lock()
    _given_back = queue.SimpleQueue()
    _templates.clear()


os.register_at_fork(after_in_child=_forget_all)


def take(
    key: Any, wanted: Iterable[str], start: Callable[[], tuple[ServerLink, Any]]
) -> TemplateServer:
    """Return the template that has imported most of what is wanted, and nothing unwanted.

    Args:
        key: see `TemplateServer`.
        wanted: names of modules.
        start: is called if there is no such template; starts a server, and returns the link to it
            and its process.

    Raises:
        OSError: no server could be started.
    """
    template = _find(key, {*wanted})
    if template is None:
        link, process = start()
        keep_from_children(link.control.fileno())
        template = TemplateServer(key, link, (), process)
        _templates.append(template)
    return template


def _find(key: Any, names: set[str]) -> TemplateServer | None:
    """Return the best existing template, and count one more user for it."""
    if not _lock.acquire(timeout=_GIVE_WAY_S):
        return None  # see `_lock`; a server of its own is always right
    try:
        found = [one for one in _templates if one.key == key and names.issuperset(one.modules)]
        found = [one for one in found if one.n_users and one.is_alive]
        best = max(found, key=lambda one: len(one.modules), default=None)
        if best is not None:
            best.n_users += 1
        return best
    finally:
        _lock.release()
        _end_unused()


def settle(
    link: ServerLink, modules: Iterable[str], template: TemplateServer, *, shared: bool
) -> TemplateServer:
    """Turn a branch of a template into a template that replaces the old one for its user.

    Args:
        link: the connection to the branch.
        modules: what the branch has imported.
        template: the one from which it was forked.
        shared: whether other managers may take it.
    """
    settled = TemplateServer(template.key, link, (*template.modules, *modules), template)
    keep_from_children(link.control.fileno())
    if shared:
        _templates.append(settled)
    return settled


def hide(template: TemplateServer) -> None:
    """Keep other managers from taking a template that does not do what it is told."""
    with contextlib.suppress(ValueError):  # it is not shared
        _templates.remove(template)


def give_back(template: TemplateServer) -> None:
    """Stop using a template; its last user ends it.

    If another thread holds the lock and cannot go on, that thread does this when it can.
    """
    _given_back.put(template)
    _end_unused()


def _end_unused() -> None:
    # Called again when the lock is released: a thread that could not get it relies on that.
    while not _given_back.empty() and _lock.acquire(timeout=_GIVE_WAY_S):
        unused: TemplateServer | None = None
        try:
            with contextlib.suppress(queue.Empty):
                template = _given_back.get_nowait()
                template.n_users -= 1
                if not template.n_users:
                    hide(template)
                    unused = template
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
    yield status_of("self").get("Umask")
