"""Observations are handed out whole, whoever writes others meanwhile or dies in the midst of it.

The long form is `python -m tests.fuzz.torn`.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmgr.wire.block import block_is_possible
from envmgr.worker.env_runner import EnvRunner
from envmgr.worker.sinks import BlockSink
from tests.fuzz.torn import contend, kill_writers

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="no block on this platform")


def test_contended_reads_are_whole() -> None:
    report = contend(20_000)
    assert report.n_contended >= 20_000
    assert report.n_torn == 0


def test_a_token_before_its_observation_is_seen_to_be_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see if the order of writes were wrong."""
    take_step = EnvRunner.take_step

    def too_early(running: EnvRunner, sink: BlockSink, token: int, *step: Any) -> Any:
        sink.replies[sink.row] = token
        return take_step(running, sink, token, *step)

    monkeypatch.setattr(EnvRunner, "take_step", too_early)
    monkeypatch.setattr(EnvRunner, "has_ordinary_steps", False)
    assert contend(2_000).n_torn > 0


def test_workers_killed_while_they_write_are_seen_and_nothing_torn_is_handed_out() -> None:
    report = kill_writers(8)
    assert report.n_kills == 8
    assert (report.n_torn, report.n_lost) == (0, 0)
    assert report.n_abnormal > 0
