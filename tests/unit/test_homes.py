"""Which home a manager's server is forked from, and when homes end, without any process."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.transport.process.server_link import ServerLink

if sys.platform == "win32":
    pytest.skip("there are no worker servers", allow_module_level=True)

from envmgr.transport.process import homes


class Servers:
    """Starts what homes take for servers."""

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
    assert homes._homes == []


def test_the_home_with_most_of_what_is_wanted_and_nothing_else(servers: Servers) -> None:
    first = homes.take("key", ["a", "b"], servers.start)
    assert first.modules == ()
    with_a = homes.settle(servers.link(), ["a"], first, shared=True)
    again = homes.take("key", ["a", "b"], servers.start)
    assert again is with_a
    with_both = homes.settle(servers.link(), ["b"], again, shared=True)
    assert with_both.modules == ("a", "b")
    assert homes.take("key", ["b", "c", "a"], servers.start) is with_both
    assert homes.take("key", ["b"], servers.start) is first, "nobody asked for a"
    other = homes.take("other key", ["a", "b"], servers.start)
    assert other is not first
    for home in (with_both, with_both, with_a, first, other):
        homes.give_back(home)
    assert servers.waited == 2


def test_a_home_ends_when_nobody_uses_it(servers: Servers) -> None:
    first = homes.take("key", ["a"], servers.start)
    with_a = homes.settle(servers.link(), ["a"], first, shared=True)
    assert homes.take("key", ["a"], servers.start) is with_a
    homes.give_back(with_a)
    assert not servers.has_ended(1)
    homes.give_back(with_a)
    assert servers.has_ended(1)
    assert servers.has_ended(0)
    assert servers.waited == 1


def test_one_that_is_dead_hidden_or_not_shared_is_not_taken(servers: Servers) -> None:
    first = homes.take("key", ["a"], servers.start)
    private = homes.settle(servers.link(), ["a"], first, shared=False)
    second = homes.take("key", ["a"], servers.start)
    assert second is first
    hidden = homes.settle(servers.link(), ["a"], second, shared=True)
    homes.hide(hidden)
    third = homes.take("key", ["a"], servers.start)
    assert third is first
    servers.ends[0].close()
    assert not first.is_alive
    fresh = homes.take("key", ["a"], servers.start)
    assert fresh is not first
    for home in (private, hidden, third, fresh):
        homes.give_back(home)


def test_what_a_process_inherits_says_who_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    before = homes.inheritance()
    assert homes.inheritance() == before
    monkeypatch.chdir("/")
    assert homes.inheritance() != before
