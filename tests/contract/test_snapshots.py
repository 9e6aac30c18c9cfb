"""Runs that go on from a snapshot, in the same manager and in another process, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.snapshot_runs import ENV_NUM, KINDS, N_STEPS, go_on, launched, send_all

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
