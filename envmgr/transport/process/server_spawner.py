"""`context: server`: workers forked by a server process of our own.

What envs need is first imported in a branch of the server (see `preloading`), which then forks the
workers. Where there is nothing to import, or nothing that can be imported, the server itself forks
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from signal import SIGKILL
from typing import Any, Protocol

from envmgr.interpreters import command_of, path_of_texts
from envmgr.texts import exit_text
from envmgr.transport.base import HostDied
from envmgr.transport.fds import close_all, forget_fd, keep_from_children, pipe_pairs
from envmgr.transport.process import server, template_servers
from envmgr.transport.process.needed_modules import installed_among
from envmgr.transport.process.preloading import Preloading, PreloadRules
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.spawner import LEFT_BEHIND, Spawner
from envmgr.transport.process.template_servers import TemplateServer
from envmgr.transport.ready import ReadySet
from envmgr.wire.channel import FrameChannel
from envmgr.wire.hosts import HostSpec, WorkerSettings
from envmgr.worker import process as worker

_SERVER_PATIENCE_S = 5.0
_CLOSE_S = 0.5
_KILLED_S = _ENDED_S = 0.2
_BOOTSTRAP = (
    "import json; "
    "file = open(int(sys.argv[1])); "
    "sys.path[:], sys.argv[:], fd, pid = json.load(file); file.close(); "
    "from envmgr.transport.process.server import main; main(fd, pid)"
)


class ServerProcess(Protocol):
    """A process, with methods like those of `subprocess.Popen`."""

    def kill(self, *, directly: bool) -> None:
        """Send it SIGKILL.

        Args:
            directly: whether it is sent from here, and not by the process that has forked it, if
                that is another one.
        """

    def wait(self, timeout: float | None = None) -> int:
        """Reap it; raise `subprocess.TimeoutExpired` if it does not end in time."""

    def forget(self) -> None:
        """Release what is kept for it, whether it has ended or not."""


class ServerSpawner(Spawner):
    """Has workers forked by a server process of its own (see `envmgr.transport.process.server`).

    Args:
        rules: what to import before workers are forked; None: nothing.
    """

    def __init__(self, settings: WorkerSettings, rules: PreloadRules | None = None) -> None:
        super().__init__(settings)
        self._process: ServerProcess | None = None
        self._links: list[ServerLink] = []  # the server's own, then those of its branches
        self._link_of: dict[int, ServerLink] = {}  # of the workers that are alive, by host_id
        self._template: TemplateServer | None = None  # from which the server is forked
        self._is_closing = False
        self._preloading = Preloading(
            rules or PreloadRules(), self._watch, self._close_link, self._settle
        )

    @property
    def preloads(self) -> bool:
        """Whether what envs need may have to be imported before the first worker is started."""
        return self._preloading.is_on

    def preload(self, named: Iterable[str]) -> None:
        """Begin to import what envs need, unless that was begun before.

        Args:
            named: the modules that their factories name.

        Raises:
            ConfigError: a module that was asked for is not there; nothing was started.
            OSError: no process or fd could be had.
        """
        self._preloading.choose(named)
        self._preloading.go_on(self._first_link() or self._take_template().link)

    @property
    def is_prepared(self) -> bool:
        """Whether preloading is done, as far as it can be."""
        return self._preloading.opening is None

    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> FrameChannel:
        """Let the server fork a worker."""
        link = self._preloading.server_for_worker(self._ensure_server())
        ours, theirs = pipe_pairs()
        try:
            report = int(self._preloading.takes_report())
            link.send(server.START, spec.host_id, report, fds=[*theirs, *shared_fds])
        except OSError:
            close_all(ours)
            self._drop_server()
            raise
        finally:
            close_all(theirs)
        link.hosts.add(spec.host_id)
        self._link_of[spec.host_id] = link
        return FrameChannel(*ours, blocking=False)

    def _ensure_server(self) -> ServerLink:
        if (known := self._first_link()) is not None:
            return known
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = self._start_server(theirs, ours)
        except BaseException:
            ours.close()
            raise
        first = ServerLink(ours)
        try:
            self._watch(first)
        except BaseException:  # no fd, perhaps: the server is not to stay behind
            self._drop_server()
            raise
        return first

    def _first_link(self) -> ServerLink | None:
        """Return the connection to this manager's server, if there is one."""
        return next((link for link in self._links if link.parent is None), None)

    def _watch(self, link: ServerLink) -> None:
        self._links.append(link)  # first: who fails here lets go of it by that
        if self._endings is None:
            self._endings = ReadySet()  # stays the same for a new server
        keep_from_children(link.control.fileno())
        self._ready.add(link.control)
        self._endings.add(link.control)

    def _start_server(self, theirs: socket.socket, ours: socket.socket) -> ServerProcess:
        """Start a server with one end of the control socket; it must not keep the other one."""
        template = self._take_template()
        try:
            return template.fork(theirs)
        except OSError:
            self._leave_template(distrusted=True)
            raise

    def _take_template(self) -> TemplateServer:
        """Return the template from which servers of this manager are forked."""
        if self._template is not None and not self._template.is_alive:
            self._leave_template()
        if self._template is None:
            command = command_of(_BOOTSTRAP)
            variables = worker.worker_environment(os.environ, self._settings)
            told = _path_and_argv()
            given = (command, variables, *told, template_servers.inheritance())
            wanted = self._preloading.modules
            self._template = template_servers.take(
                given, wanted, lambda: _start_fresh(command, variables)
            )
            self._preloading.move_to(self._template)
        return self._template

    def _leave_template(self, *, distrusted: bool = False) -> None:
        template, self._template = self._template, None
        if template is not None:
            if distrusted:
                template_servers.hide(template)
            template_servers.give_back(template)

    def _settle(self, link: ServerLink, modules: tuple[str, ...]) -> None:
        """Make a branch of the template, which has imported `modules`, the new template."""
        self._unwatch(link)
        if self._template is not None:
            # The user may edit their own modules, which they have listed, before the next launch.
            shared = {*modules} <= {*installed_among(modules)}
            self._template = template_servers.settle(link, modules, self._template, shared=shared)
            self._preloading.move_to(self._template)

    def death_of(self, host_id: int) -> Any:
        """Return the control socket; all deaths are reported there."""
        link = self._link_of.get(host_id)
        return None if link is None else link.control

    @property
    def has_deaths(self) -> bool:
        """Whether there are deaths to return, or a branch of the server has to be given up."""
        opening = self._preloading.opening is not None  # asked for each batch
        return bool(self.died) or (opening and self._preloading.is_overdue)

    def deaths(self) -> list[tuple[int, HostDied]]:
        """Read what the servers report, and return the workers that have died."""
        for link in list(self._links):
            while link.is_open and self._read_one(link):
                pass
        self._preloading.expire()
        died, self.died = self.died, []
        return died

    def _read_one(self, link: ServerLink) -> bool:
        """Take note of what a server says next; False if there is nothing now."""
        try:
            record = link.receive()
        except BlockingIOError:
            return False
        if record is None:
            self._on_end(link)
            return False
        kind, host_id, number, data = record
        if kind in server.OF_PRELOADING:
            self._preloading.on_record(link, kind, number, data)
        elif host_id < 0:
            if kind in (server.ENDED, server.NOT_STARTED):
                self._on_branch_end(host_id)
        elif kind == server.STARTED:
            self._pids[host_id] = number
        elif kind == server.NOT_STARTED:
            self._on_death(host_id, HostDied(None, f"fork: {os.strerror(number)}"))
        elif kind == server.ENDED:
            self._on_death(host_id, HostDied(number))
        elif kind == server.LEFT:
            self._on_death(host_id, HostDied(None, LEFT_BEHIND))
        return True

    def _on_death(self, host_id: int, died: HostDied) -> None:
        self.died.append((host_id, died))
        link = self._link_of.pop(host_id, None)
        if link is not None:
            link.hosts.discard(host_id)
        self._left.discard(host_id)
        self._pids.pop(host_id, None)

    def _on_branch_end(self, number: int) -> None:
        for link in [link for link in self._links if link.number == number]:
            while link.is_open and self._read_one(link):  # what it said before
                pass
            if link.is_open:
                self._on_end(link)

    def _on_end(self, link: ServerLink) -> None:
        """Note that a server is gone; if it is the first one, all servers are gone."""
        if link.parent is None:
            self._drop_server()
            return
        self._close_link(link)
        self._preloading.on_end(link)

    def signal(self, host_id: int, number: int) -> None:
        """Let the server signal the worker's process group."""
        self._tell(server.SIGNAL, host_id, number)

    def _tell(self, kind: int, host_id: int, number: int) -> None:
        link = self._link_of.get(host_id)
        if link is None:
            return
        try:
            link.send(kind, host_id, number, patience_s=self._patience_s)
        except OSError:
            self._drop_server()

    @property
    def _patience_s(self) -> float | None:
        return _CLOSE_S if self._is_closing else None

    def give_up(self, host_id: int) -> None:
        """Let the server give the worker up; the second time, give up the servers themselves."""
        if host_id in self._left:
            self._drop_server()
        else:
            self._left.add(host_id)
            self._tell(server.GIVE_UP, host_id, 0)

    def _how_it_ended(self) -> str:
        """Return how the server has ended, which is known if it is a fork of this process."""
        if self._process is None or self._is_closing:  # nobody wants to know, or to wait
            return ""
        try:
            status = self._process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:  # it has closed its connection, and no more
            return ""
        return f": {exit_text(status)}" if status else ""

    def _drop_server(self) -> None:
        """Let the kernel kill the workers of servers that are gone or do not answer."""
        links, how = list(self._links), self._how_it_ended()
        for link in links:  # in order: nothing is begun any more in the first one
            while link.parent is not None and link.is_open and self._read_one(link):
                pass  # what it said before: which module took the servers with it
            self._close_link(link, how)
        for link in links:
            self._preloading.on_end(link)
        if self._process is not None:
            process, self._process = self._process, None
            process.kill(directly=self._is_closing)
            try:
                process.wait(_KILLED_S if self._is_closing else _SERVER_PATIENCE_S)
            except subprocess.TimeoutExpired:  # its template has not killed it: stopped, perhaps
                process.kill(directly=True)
                self._leave_template(distrusted=True)
            process.forget()

    def _close_link(self, link: ServerLink, how: str = "") -> None:
        """Close the connection to a server, which then ends along with its workers."""
        for host_id in list(link.hosts):
            self._on_death(host_id, HostDied(None, f"the worker server ended{how}"))
        if link in self._links:
            self._unwatch(link)
            link.close()
            if link.parent is not None and link.parent.is_open:
                args = (server.SIGNAL, link.number, SIGKILL)  # it may not notice
                with contextlib.suppress(OSError):  # its parent is gone
                    link.parent.send(*args, patience_s=self._patience_s)

    def _unwatch(self, link: ServerLink) -> None:
        self._links.remove(link)
        self._ready.discard(link.control)
        if self._endings is not None:
            self._endings.discard(link.control)
        forget_fd(link.control.fileno())

    def hurry(self) -> None:
        """From now on, wait no longer than `close` may take for servers that do not answer."""
        self._is_closing = True

    def close(self) -> None:
        """Let the servers kill their workers and end; kill them if they do not soon."""
        for link in list(self._links):
            self._close_link(link)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        self.hurry()
        self._drop_server()
        self._leave_template()
        self.died.clear()
        if self._endings is not None:
            self._endings.close()
            self._endings = None


def _path_and_argv() -> tuple[list[str], list[str]]:
    """Return `sys.path` and `sys.argv`, without entries that are not text."""
    given: Sequence[Any] = sys.argv
    return path_of_texts(), [one for one in given if isinstance(one, str)]


def _start_fresh(
    command: list[str], variables: dict[str, str]
) -> tuple[ServerLink, subprocess.Popen[bytes]]:
    """Start a server in a fresh interpreter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            setup = json.dumps([*_path_and_argv(), theirs.fileno(), os.getpid()])
            # In a file, since one argument may have 128 KiB at most, and `train.py data/*` more.
            with open(os.memfd_create("envmgr-setup"), "w+") as file:
                file.write(setup)
                file.seek(0)
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                    [*command, str(file.fileno())],
                    pass_fds=[theirs.fileno(), file.fileno()],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
    return ServerLink(ours), process
