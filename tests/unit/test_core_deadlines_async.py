"""Time limits of async envs: each has its own, is cancelled first, and costs its env alone."""

from __future__ import annotations

from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.errors import EnvProtocolError, EnvTimeout
from envmgr.policy import Deadlines
from envmgr.wire.messages import FailureKind, Op, RemoteFailure
from tests.fake_hosts import description
from tests.rig import Rig
from tests.unit.core_rigs import generations, recover

LIMITS = Deadlines(step_s=2.0, reset_s=4.0, connect_s=8.0, close_s=1.0)


def launched(env_num: int = 3, **options: Any) -> Rig:
    """Return launched async envs that share a host."""
    rig = Rig(env_num, num_workers=1, deadlines=LIMITS, **options).launch()
    rig.hosts.limits.goes_on(rig.slot(0).group)
    return rig


def cancelled(rig: Rig, env_id: int, during: str = "step") -> None:
    """The host has cancelled what it was told to."""
    failure = RemoteFailure(FailureKind.CANCELLED, during, traceback_text="in step, line 7")
    rig.transport.reply(env_id, Op.FAILED, failure)
    rig.settle(env_id)


def test_a_host_that_says_that_an_env_is_async_is_known_to_go_on_meanwhile() -> None:
    rig = Rig(2, num_workers=1, deadlines=LIMITS)
    rig.supervisor.start_hosts([0, 1])
    assert rig.slot(0).group.takes_turns
    rig.transport.reply(0, Op.HELLO, description()._replace(is_async=True))
    rig.settle(0)
    assert not rig.slot(0).group.takes_turns
    assert rig.slot(1).deadline == rig.clock() + 8.0, "it has a limit of its own"


def test_a_host_that_awaits_a_factory_goes_on_meanwhile() -> None:
    rig = Rig(2, num_workers=1, deadlines=LIMITS)
    rig.supervisor.start_hosts([0, 1])
    rig.advance(3.0)
    rig.transport.reply(1, Op.BEGAN, True)
    rig.settle(1)
    assert not rig.slot(0).group.takes_turns
    assert [rig.slot(i).deadline for i in (0, 1)] == [rig.clock() + 8.0] * 2


def test_each_step_has_a_limit_of_its_own() -> None:
    rig = launched()
    rig.send({0: 1})
    rig.advance(1.5)
    rig.send({1: 1})
    rig.advance(0.5)
    assert [m.request_id for m in rig.requests(Op.CANCEL, 0)] == [rig.slot(0).request_id]
    assert not rig.requests(Op.CANCEL, 1)
    rig.advance(0.9)
    assert rig.slot(1).phase is Phase.STEPPING
    rig.stepped(1)
    assert rig.deliver(1)[1].info == {}


def test_a_cancelled_step_costs_its_env_alone() -> None:
    rig = launched()
    rig.send({1: 1})
    rig.advance(1.0)
    rig.send({0: 1})
    rig.advance(1.0)
    assert [m.payload for m in rig.requests(Op.CANCEL, 1)] == ["step"]
    cancelled(rig, 1)
    error = rig.error(1)
    assert isinstance(error, EnvTimeout)
    assert (error.limit_s, error.during, error.stacks) == (2.0, "step", "in step, line 7")
    assert "shared its worker" not in str(error)
    assert not rig.transport.killed
    rig.stepped(0)
    rig.run(1.0)
    recover(rig, 1)
    assert generations(rig) == [0, 1, 0]


def test_a_step_that_ends_before_it_can_be_cancelled_counts() -> None:
    rig = launched()
    rig.send({0: 1})
    rig.advance(2.0)
    rig.stepped(0, "in time")
    assert rig.deliver(0)[0].obs == "in time"
    rig.send({0: 1})
    rig.advance(1.9)
    assert len(rig.requests(Op.CANCEL, 0)) == 1


def test_the_reset_that_follows_a_step_is_cancelled_by_itself() -> None:
    rig = launched()
    rig.send({0: 1})
    rig.advance(2.0)
    rig.stepped(0, "last", done=True, after=1)
    rig.deliver(0)
    assert rig.slot(0).phase is Phase.RESETTING
    rig.advance(4.0)
    assert [m.payload for m in rig.requests(Op.CANCEL, 0)] == ["step", "reset"]
    assert not rig.transport.killed


def test_a_host_that_does_not_cancel_in_time_is_ended() -> None:
    rig = launched()
    rig.send({0: 1, 1: 1})
    rig.advance(2.0)
    rig.advance(0.9)
    assert not rig.transport.killed
    rig.stepped(1)
    rig.advance(0.1)
    assert len(rig.transport.killed) == 1
    error = rig.error(0)
    assert isinstance(error, EnvTimeout)
    assert error.limit_s == 2.0, "the limit that it has exceeded first"
    assert "envs 1, 2 shared its worker" in str(error)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_who_keeps_the_host_from_going_on_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = launched()
    rig.send({0: 1, 1: 1})
    rig.advance(2.0)
    monkeypatch.setattr(rig.transport, "running_in", lambda host_id: 1)
    rig.advance(1.0)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}


def test_who_is_running_but_in_time_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = launched()
    rig.send({0: 1})
    rig.advance(2.0)
    rig.send({1: 1})
    monkeypatch.setattr(rig.transport, "running_in", lambda host_id: 1)
    rig.advance(1.0)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_what_nobody_has_asked_to_cancel_is_no_sensible_reply() -> None:
    rig = launched()
    rig.send({0: 1})
    cancelled(rig, 0)
    assert isinstance(rig.error(0), EnvProtocolError)
    assert "it has cancelled what it was not told to" in str(rig.error(0))


def test_an_env_that_is_renewed_as_async_and_was_not_before_is_another_env() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1})
    rig.die(0)
    rig.run(1.0)
    rig.transport.reply(0, Op.HELLO, description()._replace(is_async=True))
    rig.settle(0)
    assert rig.supervisor.statistics.failures_by_env == {0: 2}
