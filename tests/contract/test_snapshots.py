"""Runs that go on from a snapshot, in the same manager and in another process, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envmgr import create_env_manager
from envmgr.errors import EnvNotReadyError
from tests.contract.snapshot_runs import ENV_NUM, KINDS, N_STEPS, go_on, launched, send_all
from tests.values import same_values
from tests.walkers import Walker

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(180)  # eleven launches; most of it is waiting for a core
def test_runs_of_all_kinds_go_on_in_another_process(tmp_path: Path) -> None:
    expected = {}
    for kind in KINDS:
        with launched(kind, seed=3) as manager:
            go_on(manager, 9)
            send_all(manager)
            snapshot = manager.snapshot()
            snapshot.save(tmp_path / kind)
            expected[kind] = go_on(manager, N_STEPS)
            manager.restore(snapshot)
            assert manager.stats()["outstanding"] == ENV_NUM
            assert go_on(manager, N_STEPS) == expected[kind], kind
            stats = manager.stats()
            delivered = stats["timesteps"] + stats["cancelled"]
            assert stats["actions"] == delivered + stats["outstanding"]
    command = [sys.executable, "-m", "tests.contract.snapshot_runs", str(tmp_path)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, timeout=150)
    assert ended.returncode == 0, ended.stderr.decode()
    found = json.loads(ended.stdout)
    for kind in KINDS:
        assert found[kind] == json.loads(json.dumps(expected[kind])), kind


def test_a_worker_that_dies_while_a_run_is_restored_costs_nobody_else() -> None:
    cfg = {"type": "subprocess", "seed": 3, "snapshot_copy": True}
    with create_env_manager(cfg, env_fn=[Walker] * 2) as manager:
        snapshot = manager.snapshot()
        manager.step({0: 0, 1: 0})
        before = manager.ready_obs
        ask = manager._run_in_hosts

        def and_dies(supervisor: Any, *what: Any) -> Any:
            found = ask(supervisor, *what)
            os.kill(manager.stats()["workers"][0]["pid"], signal.SIGKILL)
            env = supervisor.envs[0]
            manager._running.engine.wait_until(lambda: not env.is_callable, doing="this")
            return found

        manager._run_in_hosts = and_dies
        with pytest.raises(EnvNotReadyError, match="call it again"):
            manager.restore(snapshot)
        assert same_values(manager.ready_obs[1], before[1]), "nothing was changed"
        manager._run_in_hosts = ask
        manager.step({0: 0})  # which says that its worker has died
        manager.restore(snapshot)
        assert manager.ready_env == [0, 1]
