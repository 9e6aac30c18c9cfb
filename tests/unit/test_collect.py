"""Submitting and collecting while a signal handler closes the manager in the midst of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.journal import Journal
from envmgr.wire.messages import Op
from tests.rig import Rig


def test_what_was_taken_is_read_also_when_the_manager_was_closed_since() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    for env_id in range(2):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0 + env_id, False, {}, 0))
    collected = rig.supervisor.collector.take(rig.selection([0, 1]))
    assert collected is not None
    rig.engine.close(0.0)
    timesteps = rig.supervisor.collector.timesteps(collected)
    assert {i: timestep.reward for i, timestep in timesteps.items()} == {0: 1.0, 1: 2.0}


def test_what_was_packed_is_committed_though_the_block_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(2, has_block=True).launch()
    do = Journal.do

    def closed_before(journal: Journal, redo: Any, note: Any) -> None:
        rig.supervisor.selections.share(None)
        do(journal, redo, note)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "do", closed_before)
        rig.send({0: 1, 1: 1})
    assert rig.supervisor.statistics.actions == 2


def test_messages_that_a_close_has_taken_away_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(2, has_block=False).launch()
    rig.send({0: 1, 1: 1})
    for env_id in range(2):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.transport.poll(0.0)
    arrivals = rig.transport.arrivals
    assert len(arrivals) == 2
    observed = rig.supervisor.table.observed
    read = observed.read

    def closed_meanwhile(env_id: int, reference: Any) -> Any:
        arrivals.clear()
        return read(env_id, reference)

    monkeypatch.setattr(observed, "read", closed_meanwhile)
    rig.supervisor.step_on(arrivals)
    assert sorted(rig.supervisor.table.undelivered) == [0, 1]


def test_a_call_of_which_a_part_goes_by_message_returns_its_envs_whatever_their_type() -> None:
    rig = Rig(3, has_block=True).launch()
    rig.supervisor.table.by_message.add(1)
    sent = rig.send({2: 0, np.int64(1): 1, 0: 1})
    assert sent is not None
    assert sent.ids == [2, 1, 0]
