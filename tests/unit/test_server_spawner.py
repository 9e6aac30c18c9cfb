"""What the trainer makes of what its worker servers say, without any process."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import envmgr
from envmgr.transport.process import server
from envmgr.transport.process.preloading import PreloadRules
from envmgr.transport.process.server_imports import Preloads
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.server_spawner import ServerSpawner
from envmgr.transport.ready import ReadySet
from envmgr.wire.hosts import WorkerSettings


def test_the_module_that_ends_all_servers_is_the_one_that_was_imported_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spawner: Any = ServerSpawner(WorkerSettings(), PreloadRules(("good", "bad")))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (ours, first), (control, branch) = pairs
    root = ServerLink(ours)
    link = ServerLink(control, root, -1, Preloads(("good", "bad"), ()))
    spawner._process = SimpleNamespace(
        kill=lambda directly: None, wait=lambda timeout: None, forget=lambda: None
    )
    ready = ReadySet()
    spawner.report_to(ready)
    spawner._links += [root, link]
    spawner._preloading.opening = link
    for place in (0, 1):
        branch.send(server.RECORD.pack(server.IMPORTING, -1, place))
    first.close()  # nobody has looked meanwhile: the end of the first server is seen first
    branch.close()
    with caplog.at_level(logging.WARNING, "envmgr"):
        assert spawner.deaths() == []
    assert spawner.is_prepared
    assert "cannot preload it: bad (the worker server ended meanwhile)" in caplog.text
    assert "good" not in caplog.text.replace("envmgr", "")
    spawner.close()
    ready.close()


def test_more_fds_than_may_be_on_the_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, send_fds, refused = ServerLink(ours), socket.send_fds, [0] * 3

    def limited(*args: Any) -> int:
        if refused:
            refused.pop()
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send_fds(*args)

    monkeypatch.setattr(socket, "send_fds", limited)
    link.send(server.START, 4, 0, fds=[0])
    assert server.RECORD.unpack_from(theirs.recv(server.MAX_RECORD))[:2] == (server.START, 4)
    refused.append(0)
    with pytest.raises(OSError, match="Too many references"):
        link.send(server.START, 5, 0, fds=[0], patience_s=0.0)
    link.close()
    theirs.close()


def test_a_manager_that_closes_does_not_wait_long_for_a_server_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envmgr.transport.process.server_link._PATIENCE_S", 1e6)
    monkeypatch.setattr("envmgr.transport.process.server_spawner._CLOSE_S", 0.0)
    spawner: Any = ServerSpawner(WorkerSettings())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ServerLink(ours)
    with contextlib.suppress(TimeoutError):
        while True:
            link.send(server.SIGNAL, 0, 0, patience_s=0.0)
    done: list[Any] = []

    def wait(timeout: float) -> None:
        done.append(timeout)
        raise subprocess.TimeoutExpired("it", timeout)

    spawner._process = SimpleNamespace(
        kill=lambda directly: done.append(directly), wait=wait, forget=lambda: None
    )
    ready = ReadySet()
    spawner.report_to(ready)
    spawner._links.append(link)
    spawner._link_of = dict.fromkeys(range(3), link)
    link.hosts |= {*range(3)}
    spawner.hurry()
    for host_id in range(3):
        spawner.signal(host_id, 9)
    killed, waited_s, again = done
    assert killed is again is True, "directly, whatever its template does"
    assert waited_s <= 0.5
    assert [host_id for host_id, _ in spawner.deaths()] == [0, 1, 2]
    spawner.close()
    ready.close()
    theirs.close()


@pytest.mark.parametrize("failing", ["__init__", "add"])
def test_a_server_that_cannot_be_watched_for_want_of_fds_does_not_stay_behind(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    spawner: Any = ServerSpawner(WorkerSettings())
    ready = ReadySet()
    spawner.report_to(ready)
    done: list[str] = []
    ends: list[socket.socket] = []
    process = SimpleNamespace(
        kill=lambda directly: done.append("killed"),
        wait=lambda timeout: done.append("reaped"),
        forget=lambda: done.append("forgotten"),
    )

    def start(theirs: socket.socket, ours: socket.socket) -> Any:
        ends.append(theirs.dup())
        return process

    def fail(*args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spawner, "_start_server", start)
    with monkeypatch.context() as patch:
        patch.setattr(ReadySet, failing, fail)
        with pytest.raises(OSError, match="Too many open files"):
            spawner._ensure_server()
    assert done[-3:] == ["killed", "reaped", "forgotten"]
    assert ends[0].recv(1) == b"", "its connection is closed"
    assert spawner._first_link() is None
    assert spawner._ensure_server().is_open, "the next one is another one"
    spawner.close()
    ready.close()
    for end in ends:
        end.close()


def test_a_branch_that_cannot_be_watched_for_want_of_fds_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawner: Any = ServerSpawner(WorkerSettings(), PreloadRules(("json",)))
    ready = ReadySet()
    spawner.report_to(ready)
    ours, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    spawner._watch(ServerLink(ours))

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "envmgr"):
        patch.setattr(ReadySet, "add", fail)
        spawner.preload(())
    assert spawner.is_prepared, "nobody waits for it"
    assert "cannot preload it: json ([Errno 28] No space left on device)" in caplog.text
    assert [link.number for link in spawner._links] == [0], "the first one is still there"
    spawner.close()
    ready.close()
    server_end.close()


def test_in_a_trainer_nobody_takes_the_exit_status_of_children_that_are_not_envmgrs() -> None:
    package = Path(envmgr.__file__).parent
    any_child = re.compile(r"\bwaitpid\(\s*(-1|0)\b|\bos\.wait[34]?\(|\bP_ALL\b")
    found = {p.name for p in package.rglob("*.py") if any_child.search(p.read_text("utf-8"))}
    assert found == {"server.py", "server_imports.py"}, "those are processes of their own"
