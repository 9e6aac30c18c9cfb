"""Which spawner serves which `context`, and where none can."""

from __future__ import annotations

import sys

import pytest

from envmgr.errors import ConfigError
from envmgr.transport.process import start_methods
from envmgr.transport.process.multiprocessing_spawner import MultiprocessingSpawner
from envmgr.transport.process.server_spawner import ServerSpawner
from envmgr.transport.process.start_methods import make_spawner
from envmgr.wire.hosts import WorkerSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no server")


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_without_pidfds_workers_are_spawned(
    has_pidfds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_methods, "has_pidfds", lambda: has_pidfds)
    found = make_spawner("server", WorkerSettings(), [])
    assert type(found) is (ServerSpawner if has_pidfds else MultiprocessingSpawner)


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", "")])
def test_a_frozen_program_is_not_run_as_a_server(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ConfigError, match=r"frozen or embeds Python\. Choose context: fork"):
        make_spawner("server", WorkerSettings(), [])
