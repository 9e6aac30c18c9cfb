"""What envs are said to be at: on boards, and in the warning of a long wait."""

from __future__ import annotations

import pytest

from envmgr.core.activities import activities_of
from envmgr.core.board_writer import BoardWriter
from envmgr.texts import env_ids_text
from envmgr.wire.board import Activity
from tests.rig import Rig

QUEUED, STEPPING = Activity.QUEUED, Activity.STEPPING


def test_users_read_of_workers() -> None:
    assert not [what.label for what in Activity if "host" in what.label]


def test_the_envs_of_a_shared_host_wait_for_the_one_that_runs() -> None:
    rig = Rig(4, has_block=True, num_workers=2)
    rig.launch()
    rig.send({0: 0, 1: 0, 2: 0})
    block = rig.hosts.block
    assert block is not None
    block.running[0] = 1 + 1
    assert activities_of(rig.hosts).tolist() == [QUEUED, STEPPING, STEPPING, Activity.READY]
    block.replies[2] = block.requests[2]
    answered = Activity.ANSWERED
    assert activities_of(rig.hosts).tolist() == [QUEUED, STEPPING, answered, Activity.READY]


def test_the_warning_of_a_long_wait_says_who_hangs_and_who_has_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envmgr.core.board_writer.LOOK_EVERY_S", 3600.0)  # the test looks itself
    rig = Rig(7, has_block=True, num_workers=3)
    rig.launch()
    block = rig.hosts.block
    assert block is not None
    rig.engine.watch = watch = BoardWriter("subprocess", rig.clock)
    watch.begin(rig.engine)
    rig.send(dict.fromkeys(range(6), 0))
    hung, queued = 0, [i for i in rig.hosts.groups[0].by_id if i != 0]
    block.running[0] = hung + 1
    answered = sorted({*range(6)} - {hung, *queued})
    block.replies[answered] = block.requests[answered]
    rig.clock.advance(4.0)
    watch.look()
    rig.engine.wait_until(lambda: False, deadline=rig.clock() + 31.0, doing="step")
    watch.end()
    (text,) = [r.getMessage() for r in caplog.records if "has been waiting" in r.getMessage()]
    assert text.startswith(
        "step has been waiting for 30 s: env 0 has been in step for 30 s; "
        f"{env_ids_text(queued)} wait for their turn; {env_ids_text(answered)} have answered."
    ), text
