"""Which template a manager's server is forked from, and when templates end, without any process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.transport.process import server, template_servers
from envmgr.transport.process.server_link import ServerLink

needs_pidfds = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds")
PATIENCE_S = 20.0
"""For what comes at once, unless something is wrong."""


class Servers:
    """Starts what templates take for servers."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.waited = 0

    def link(self) -> ServerLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends.append(theirs)
        return ServerLink(ours)

    def start(self) -> tuple[ServerLink, Any]:
        return self.link(), SimpleNamespace(wait=self._wait, kill=lambda: None)

    def _wait(self, timeout: float) -> None:
        self.waited += 1

    def has_ended(self, place: int) -> bool:
        """Whether the trainer has let go of it."""
        end = self.ends[place]
        end.setblocking(False)
        try:
            return end.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for end in servers.ends:
        end.close()
    assert template_servers._templates == []


def test_the_home_with_most_of_what_is_wanted_and_nothing_else(servers: Servers) -> None:
    first = template_servers.take("key", ["a", "b"], servers.start)
    assert first.modules == ()
    with_a = template_servers.settle(servers.link(), ["a"], first, shared=True)
    again = template_servers.take("key", ["a", "b"], servers.start)
    assert again is with_a
    with_both = template_servers.settle(servers.link(), ["b"], again, shared=True)
    assert with_both.modules == ("a", "b")
    assert template_servers.take("key", ["b", "c", "a"], servers.start) is with_both
    assert template_servers.take("key", ["b"], servers.start) is first, "nobody asked for a"
    other = template_servers.take("other key", ["a", "b"], servers.start)
    assert other is not first
    for template in (with_both, with_both, with_a, first, other):
        template_servers.give_back(template)
    assert servers.waited == 2


def test_a_home_ends_when_nobody_uses_it(servers: Servers) -> None:
    first = template_servers.take("key", ["a"], servers.start)
    with_a = template_servers.settle(servers.link(), ["a"], first, shared=True)
    assert template_servers.take("key", ["a"], servers.start) is with_a
    template_servers.give_back(with_a)
    assert not servers.has_ended(1)
    template_servers.give_back(with_a)
    assert servers.has_ended(1)
    assert servers.has_ended(0)
    assert servers.waited == 1


def test_one_that_is_dead_hidden_or_not_shared_is_not_taken(servers: Servers) -> None:
    first = template_servers.take("key", ["a"], servers.start)
    private = template_servers.settle(servers.link(), ["a"], first, shared=False)
    second = template_servers.take("key", ["a"], servers.start)
    assert second is first
    hidden = template_servers.settle(servers.link(), ["a"], second, shared=True)
    template_servers.hide(hidden)
    third = template_servers.take("key", ["a"], servers.start)
    assert third is first
    servers.ends[0].close()
    assert not first.is_alive
    fresh = template_servers.take("key", ["a"], servers.start)
    assert fresh is not first
    for template in (private, hidden, third, fresh):
        template_servers.give_back(template)


def test_what_a_process_inherits_says_who_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    before = template_servers.inheritance()
    assert template_servers.inheritance() == before
    monkeypatch.chdir("/")
    assert template_servers.inheritance() != before


def test_other_threads_give_back_theirs_while_a_server_is_started(servers: Servers) -> None:
    first = template_servers.take("key", [], servers.start)

    def start() -> tuple[ServerLink, Any]:
        thread = threading.Thread(target=template_servers.give_back, args=[first], daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert servers.has_ended(0)
        return servers.start()

    template_servers.give_back(template_servers.take("other key", [], start))


def test_nobody_waits_for_ever_for_who_looks_at_homes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_servers, "_GIVE_WAY_S", 0.001)
    first = template_servers.take("key", [], servers.start)
    second: list[Any] = []

    def in_another_thread() -> None:
        second.append(template_servers.take("key", [], servers.start))
        template_servers.give_back(first)
        template_servers.hide(second[0])

    with template_servers._lock:
        thread = threading.Thread(target=in_another_thread, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not servers.has_ended(0)
    assert second[0] is not first
    template_servers.give_back(second[0])
    assert servers.has_ended(0), "what could not be given back then is so now"
    assert servers.has_ended(1)


def test_what_a_collection_gives_back_meanwhile_is_not_taken_from_who_chooses_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_servers, "_GIVE_WAY_S", 0.001)
    first = template_servers.take("key", [], servers.start)
    receive, to_do = ServerLink.receive, [first]

    def collect(link: ServerLink) -> Any:
        """Close a dropped manager, in the thread that looks at template_servers."""
        while to_do:
            template_servers.give_back(to_do.pop())
        return receive(link)

    monkeypatch.setattr(ServerLink, "receive", collect)
    taken = template_servers.take("key", [], servers.start)
    assert taken.is_alive
    assert taken.n_users == 1
    template_servers.give_back(taken)
    assert all(servers.has_ended(place) for place in range(len(servers.ends)))


def test_a_home_that_does_not_end_is_not_waited_for_long(servers: Servers) -> None:
    waits: list[float] = []
    kills: list[None] = []

    def wait(timeout: float) -> None:
        waits.append(timeout)
        if not kills:
            raise subprocess.TimeoutExpired("it", timeout)

    link = servers.link()
    origin = SimpleNamespace(wait=wait, kill=lambda: kills.append(None))
    template_servers.give_back(template_servers.take("key", [], lambda: (link, origin)))
    assert len(kills) == 1
    waits.clear()

    ended, reaped = threading.Event(), threading.Event()

    def late(timeout: float | None = None) -> None:
        if timeout is not None:
            waits.append(timeout)
            raise subprocess.TimeoutExpired("it", timeout)
        ended.wait()
        reaped.set()

    origin = SimpleNamespace(wait=late, kill=lambda: None)
    link = servers.link()
    template_servers.give_back(template_servers.take("key", [], lambda: (link, origin)))
    assert sum(waits) <= 1.0
    assert not reaped.is_set()
    ended.set()
    assert reaped.wait(20.0), "it is reaped whenever it ends"


# -- the connection to a server -------------------------------------------------------------------


def test_a_connection_that_another_thread_has_closed_is_an_ordinary_error(
    servers: Servers,
) -> None:
    link = servers.link()
    link.close()
    with pytest.raises(BrokenPipeError):
        link.send(server.SIGNAL, 0, 0)
    assert link.receive() is None


def test_it_keeps_its_fd_while_somebody_sends(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = servers.link()
    fd = link.control.fileno()

    def close_meanwhile(control: socket.socket, *args: Any) -> None:
        link.close()
        assert not link.is_open
        assert control.fileno() == fd
        os.fstat(fd)

    monkeypatch.setattr(socket, "send_fds", close_meanwhile)
    link.send(server.SIGNAL, 0, 0)
    assert link.control.fileno() < 0
    assert servers.has_ended(0)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_record_of_another_thread_that_takes_the_room_is_no_reason_to_distrust(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, send, calls = servers.link(), socket.send_fds, [0]

    def be_late(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise BlockingIOError
        send(*args)

    monkeypatch.setattr(socket, "send_fds", be_late)
    link.send(server.SIGNAL, 3, 9)
    assert servers.ends[0].recv(server.MAX_RECORD) == server.RECORD.pack(server.SIGNAL, 3, 9)
    link.close()


def fill(link: ServerLink) -> None:
    """Leave no room in it."""
    with contextlib.suppress(TimeoutError):
        while True:
            link.send(server.SIGNAL, 0, 0, patience_s=0.0)


# -- servers that a template has forked ----------------------------------------------------------


def forked(
    servers: Servers,
) -> tuple[template_servers.TemplateServer, template_servers.ForkedServer, socket.socket]:
    """Return a template, a server of its and where that sends its pidfd."""
    template = template_servers.take("key", [], servers.start)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = template.fork(theirs)
    ours.close()
    record, fds, _, _ = socket.recv_fds(servers.ends[-1], server.MAX_RECORD, server.MAX_FDS)
    assert server.RECORD.unpack_from(record)[0] == server.BRANCH
    control, birth = fds
    os.close(control)
    return template, process, socket.socket(fileno=birth)


@needs_pidfds
def test_a_server_is_killed_whatever_its_home_does(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, process, birth = forked(servers)
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: killed.append(number))
    fill(template.link)
    process.kill(directly=True)  # it is not forked yet, and its template takes nothing
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    server._introduce(birth.detach())
    process.kill(directly=True)
    assert killed == [signal.SIGKILL]
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)  # this process has not ended
    process.forget()
    process.kill(directly=True)
    assert process.wait(0.0) == 0
    assert killed == [signal.SIGKILL]
    template_servers.give_back(template)


def test_a_server_that_could_not_be_forked_has_ended(servers: Servers) -> None:
    template, process, birth = forked(servers)
    birth.close()
    assert process.wait(0.0) == 0
    template_servers.give_back(template)


@needs_pidfds
def test_a_server_whose_manager_has_closed_says_so_to_nobody(servers: Servers) -> None:
    template, process, birth = forked(servers)
    process.forget()
    server._introduce(birth.detach())
    template_servers.give_back(template)


@needs_pidfds
def test_no_fd_for_a_pidfd_is_not_taken_for_an_end(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, process, birth = forked(servers)
    server._introduce(birth.detach())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: killed.append(number))
    process.kill(directly=True)
    assert killed, "it is not lost"
    process.forget()
    template_servers.give_back(template)
