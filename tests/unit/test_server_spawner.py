"""What the trainer makes of what its worker servers say, without any process."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.transport.process import server
from envmgr.transport.process.preload import Preloads
from envmgr.transport.process.preloading import PreloadRules
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
