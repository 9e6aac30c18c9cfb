"""Submitting: all actions and calls of a call are taken, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.core import Phase, table
from envmgr.core.submit import submit_calls
from envmgr.errors import ActionError
from envmgr.journal import Journal
from envmgr.spaces.columns import PYTHON_NUMBERS
from envmgr.wire.block import RING_EACH
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Op
from tests.rig import Rig, over_routes

# -- actions --------------------------------------------------------------------------------------


@over_routes
def test_a_batch_that_cannot_be_prepared_whole_sends_nothing() -> None:
    rig = Rig(2).launch()
    rig.transport.refused[1] = FrameError("no")
    sent = len(rig.transport.sent)
    with pytest.raises(ActionError):
        rig.supervisor.submitter.checked({0: 1, 1: 1}, RING_EACH, None)
    assert len(rig.transport.sent) == sent
    assert rig.ready() == [0, 1]


@over_routes
def test_the_kind_of_an_action_is_known_after_an_interrupt() -> None:
    rig = Rig(has_block=True).launch()
    submitter = rig.supervisor.submitter
    rig.send({0: 1})
    rig.stepped()
    rig.deliver()
    block = submitter._block

    class Interrupting:
        def __setitem__(self, rows: Any, kind: int) -> None:
            block.kinds = before
            block.kinds[rows] = kind
            raise KeyboardInterrupt

    before, block.kinds = block.kinds, Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), rig.engine.calling:
        rig.send({0: np.int64(1)})
    rig.send({0: 1})
    assert block.kinds[0] == PYTHON_NUMBERS


@over_routes
def test_what_was_posted_last_is_known_while_nothing_else_is_outstanding() -> None:
    rig = Rig(3, has_block=True).launch()
    submitter = rig.supervisor.submitter
    sent = rig.send({0: 1, 1: 1})
    assert submitter.latest(2) is sent
    assert submitter.latest(3) is None
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.exactly(1)
    assert submitter.latest(1) is submitter.latest(2) is None


# -- selections that are known no more ------------------------------------------------------------


def _step_all(rig: Rig, *, ended: int | None = None) -> None:
    """Take a step of all envs, whose selection is not known any more before they have replied."""
    actions = dict.fromkeys(range(len(rig.supervisor.envs)), 1)
    assert rig.supervisor.submitter.by_id(actions, RING_EACH) is not None
    for env_id in (0, 1, 0):
        rig.selection([env_id])
    for env_id in actions:
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, env_id == ended, {}, 0))
    assert list(rig.exactly(*actions)) == list(actions)


def test_steps_are_counted_whichever_selections_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_KNOWN_SELECTIONS", 2)
    rig = Rig(3, has_block=True).launch()
    for _ in range(3):
        _step_all(rig)
    assert [rig.supervisor.selections.steps_of(env_id) for env_id in range(3)] == [3] * 3


def test_the_host_of_a_spare_that_has_come_is_rung_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_KNOWN_SELECTIONS", 2)
    rig = Rig(2, spare_num=1, has_block=True).launch()
    _step_all(rig, ended=0)
    assert rig.hosts.table.moves == 1
    rig.reset_done(0)
    assert rig.selection([0]).hosts == [2]
    assert rig.supervisor.submitter.by_id({0: 1, 1: 1}, RING_EACH) is not None
    assert [len(rig.requests(Op.STEP, env_id)) for env_id in range(2)] == [2, 2]


# -- calls ----------------------------------------------------------------------------------------


def test_calls_are_sent_to_all_or_to_none() -> None:
    rig = Rig(2).launch()
    rig.transport.refused[1] = FrameError("it is a lock")
    sent = len(rig.transport.sent)
    with pytest.raises(
        ActionError, match=r"call has arguments that cannot be sent .* it is a lock"
    ):
        submit_calls(rig.hosts, rig.hosts.envs[:2], Op.CALL, [("x", ())] * 2, "call")
    assert len(rig.transport.sent) == sent
    assert [slot.phase for slot in rig.supervisor.envs] == [Phase.IDLE] * 2
    rig.transport.refused.clear()
    submit_calls(rig.hosts, rig.hosts.envs[:2], Op.CALL, [("x", (0,)), ("x", (1,))], "call")
    assert [m.payload for _, m in rig.transport.sent[sent:]] == [("x", (0,)), ("x", (1,))]


# -- while a manager is closed --------------------------------------------------------------------


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
