"""The supervisor: what it holds together, and its end."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import envmgr
from envmgr.lifecycle import EnvState
from envmgr.wire.messages import Attribute, Op
from tests.rig import Rig, over_routes

pytestmark = over_routes


def test_a_result_of_an_earlier_call_is_forgotten() -> None:
    rig = Rig().launch()
    rig.call()
    rig.transport.reply(0, Op.RESULT, Attribute(False, 1))
    rig.pump()
    rig.call()
    assert rig.slot().result is None


# -- the end --------------------------------------------------------------------------------------


def test_stopping_makes_every_env_void_and_cancels_what_is_owed() -> None:
    rig = Rig(4, auto_reset=False).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    rig.stepped(1)
    rig.stepped(2)
    rig.deliver(2)
    rig.supervisor.stop()
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 4
    statistics = rig.supervisor.statistics
    assert (statistics.actions, statistics.timesteps, statistics.cancelled) == (3, 1, 2)
    assert statistics.outstanding == 0
    assert rig.identity_holds()
    assert rig.ready() == []
    assert rig.deliver() == {}


def test_a_cancelled_step_is_counted_once_though_the_manager_is_closed_before_its_reply() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.reset()
    assert rig.supervisor.statistics.cancelled == 1
    assert rig.identity_holds()
    rig.supervisor.stop()
    assert rig.supervisor.statistics.cancelled == 1


def test_what_a_call_had_in_hand_that_did_not_return_is_cancelled_at_the_end() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    rig.stepped(0)
    rig.exactly(0)
    rig.stepped(1)
    rig.supervisor.collector.timesteps(rig.gather.exactly(rig.selection([1])))
    supervisor = rig.supervisor
    accounts = {"actions": 2, "timesteps": 1, "cancelled": 0, "outstanding": 1}
    assert supervisor.statistics.accounts() == accounts
    rig.engine.close(0.0)
    assert supervisor.statistics.accounts() == {**accounts, "cancelled": 1, "outstanding": 0}


# -- what is logged -------------------------------------------------------------------------------


def test_nothing_is_logged_but_through_what_swallows_the_errors_of_handlers() -> None:
    folder = Path(envmgr.__file__).parent
    bare = [
        f"{path.relative_to(folder)}:{node.lineno}"
        for part in ("core", "manager", "observing")
        for path in sorted((folder / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("logger", "logging")
        if node.attr in ("log", "debug", "info", "warning", "error", "exception", "critical")
    ]
    assert bare == []


def test_a_handler_of_the_log_that_raises_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging.getLogger("envmgr"), "handlers", [Full()])
    rig = Rig().launch()
    rig.engine.warn_of_wait("step", 99.0)
