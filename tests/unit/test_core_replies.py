"""What comes from hosts: only what was awaited counts, and what makes no sense costs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from envmgr.core import Phase
from envmgr.core.phases import Change
from envmgr.core.submit import submit_calls
from envmgr.core.table import NEVER
from envmgr.errors import EnvProtocolError, EnvTimeout
from envmgr.transport.base import Garbage, HostDied, TimedOut
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op
from tests.fake_hosts import description
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import FLOATS, STEP_LIMIT, recover, shared

pytestmark = over_routes


# -- calls ----------------------------------------------------------------------------------------


def test_a_call_keeps_its_result_for_the_caller() -> None:
    rig = Rig(2).launch()
    assert rig.slot(1).is_callable
    rig.call(1, "double")
    assert rig.requests(Op.CALL, 1)[0].payload == ("double", ())
    assert not rig.slot(1).is_callable
    rig.transport.reply(1, Op.RESULT, 8)
    rig.pump()
    assert rig.slot(1).result == 8
    assert rig.slot(1).phase is Phase.IDLE
    assert rig.ready() == [0, 1]


def test_a_call_that_raises_leaves_the_env_as_it_was() -> None:
    rig = Rig().launch()
    obs = rig.obs()
    rig.call()
    rig.fail(0, "call")
    assert "boom" in str(rig.slot().result)
    assert rig.ready() == [0]
    assert rig.obs() is obs
    assert rig.supervisor.statistics.failures_by_env == {}


def test_an_attribute_that_is_not_there_is_a_result() -> None:
    rig = Rig().launch()
    submit_calls(rig.hosts, rig.hosts.envs[:1], Op.GET_ATTR, ["colour"], "reading it")
    rig.fail(0, "call", kind=FailureKind.NO_ATTRIBUTE)
    assert rig.slot().result.kind is FailureKind.NO_ATTRIBUTE
    assert rig.ready() == [0]


# -- notices --------------------------------------------------------------------------------------


def test_notices_are_logged_once_and_disturb_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1, 0):
        rig.transport.reply(env_id, Op.NOTICE, "float64 is cast")
        rig.pump()
    assert caplog.text.count("observations of env 0: float64 is cast (reported once)") == 1
    assert "env 1" not in caplog.text
    rig.stepped(0)
    rig.stepped(1)
    assert list(rig.deliver()) == [0, 1]


# -- which replies count --------------------------------------------------------------------------


def test_what_arrives_from_hosts_that_nobody_knows_is_ignored() -> None:
    rig = Rig().launch()
    before = rig.slot().request_id
    rig.supervisor.handle(999, Message(Op.STEPPED, 0, 0, before, None))
    rig.supervisor.handle(999, HostDied(1))
    assert rig.ready() == [0]
    assert rig.slot().deadline == NEVER


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_step_that_an_interrupt_has_left_half_applied_is_delivered_once(
    monkeypatch: pytest.MonkeyPatch, is_applied: bool
) -> None:
    rig = Rig(3).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    odd = {"list": [1]}  # goes by message in any case
    for env_id in (2, 0):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, odd, 0))
    rig.transport.reply(1, Op.STEPPED, ("last", 1.0, True, odd, AfterStep.NOTHING))
    apply_all = rig.hosts.phases.apply_all

    def interrupt(env_ids: Iterable[int], change: Change) -> None:
        if is_applied:
            apply_all(env_ids, change)
        raise KeyboardInterrupt

    def collect() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rig.hosts.phases, "apply_all", interrupt)
            rig.engine.collect()

    with pytest.raises(KeyboardInterrupt), rig.engine.calling:
        collect()
    with rig.engine.calling:
        assert [step.obs for step in rig.exactly(0, 1, 2).values()] == ["next", "last", "next"]
    rig.pump()
    assert rig.deliver() == {}
    assert {0, 2} <= {*rig.ready()}
    assert rig.supervisor.statistics.dropped_replies == 0
    assert rig.identity_holds()


def test_messages_of_a_killed_host_are_dropped() -> None:
    rig = Rig(deadlines=STEP_LIMIT, kill_takes_s=None).launch()
    rig.send(0)
    request = rig.transport.host_of(0).request
    host_id = rig.transport.host_of(0).host_id
    rig.advance(2.0)
    late = request._replace(op=Op.STEPPED, payload=("late", 1.0, False, {}, 0))
    handle = rig.supervisor.handle
    handle(host_id, late)
    handle(host_id, late._replace(op=Op.FAILED, payload="?"))
    handle(host_id, late._replace(request_id=0, op=Op.RESULT))
    handle(host_id, Garbage("noise"))
    handle(host_id, TimedOut(request.request_id, 1.0))
    assert rig.slot().phase is Phase.ENDING
    assert rig.deliver(0)[0].info["abnormal"]
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert rig.supervisor.statistics.dropped_replies == 3
    rig.die()
    handle(host_id, late)
    handle(host_id, HostDied(0))
    assert rig.slot().phase is Phase.STARTING
    recover(rig, obs="of the new one")
    assert rig.obs() == "of the new one"
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": 10_000},
        {"request_id": 1},
        {"generation": 1},
        {"env_id": 1},
        {"op": Op.RESULT},
        {"op": Op.HELLO},
        {"op": Op.CLOSED},
        {"op": 99},
        {"op": Op.STEP},
    ],
    ids=str,
)
def test_a_reply_that_is_not_the_awaited_one_is_never_delivered(change: dict[str, int]) -> None:
    rig = Rig(2).launch()
    host = rig.transport.host_of(0)
    rig.send(0)
    payload = ("foreign", 1.0, False, {}, 0)
    reply = host.request._replace(op=Op.STEPPED, payload=payload)._replace(**change)
    rig.transport.arrive(host.host_id, reply)
    rig.pump()
    timestep = rig.deliver(0)[0]
    assert timestep.info["abnormal"]
    assert isinstance(timestep.info["error"], EnvProtocolError)
    assert "an unexpected reply" in str(timestep.info["error"])
    assert rig.supervisor.statistics.dropped_replies == 1
    assert host.killed
    assert rig.ready() == [1]


def test_a_reply_that_comes_twice_costs_its_host() -> None:
    rig = Rig().launch()
    host = rig.transport.host_of(0)
    rig.send(0)
    rig.stepped(0, "once")
    reply = host.request._replace(op=Op.STEPPED, payload=("twice", 1.0, False, {}, 0))
    rig.transport.arrive(host.host_id, reply, foreign=True)
    rig.pump()
    assert rig.deliver(0)[0].obs == "once"
    assert host.killed
    assert rig.slot().failed_while_ready is not None
    assert rig.obs() == "once"


@pytest.mark.parametrize(
    "payload",
    [None, (), (1, 2, 3, 4), "five!", [0, 1.0, False, {}, 0], (9, 1.0, False, {}, 0)],
    ids=str,
)
def test_a_malformed_timestep_is_never_delivered(payload: Any) -> None:
    rig = Rig(has_memory=True).launch(space=FLOATS)
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, payload)
    rig.pump()
    assert isinstance(rig.error(), EnvProtocolError)
    assert rig.deliver(0)[0].obs.tolist() == rig.obs().tolist()


@pytest.mark.parametrize(
    "payload", [None, description()._replace(resets_alone=np.zeros(2))], ids=["nothing", "no bool"]
)
def test_a_malformed_description_is_a_failure(payload: Any) -> None:
    rig = Rig().launch()
    rig.die()
    rig.transport.reply(0, Op.HELLO, payload)
    rig.pump()
    assert rig.supervisor.statistics.failures_by_kind == {"EnvCrash": 1, "EnvProtocolError": 1}
    rig.reset()  # what it said of itself is not believed, and so not looked at


@pytest.mark.parametrize("payload", [None, (1,), "ab", (9, {})], ids=str)
def test_a_malformed_reset_is_a_failure(payload: Any) -> None:
    rig = Rig(has_memory=True).launch(space=FLOATS)
    rig.reset()
    rig.transport.reply(0, Op.RESET_DONE, payload)
    rig.pump()
    assert rig.transport.host_of(0).generation_of(0) == 1
    assert rig.supervisor.statistics.failures_by_kind == {"EnvProtocolError": 1}


def test_a_malformed_hello_of_a_renewed_env_is_a_failure() -> None:
    rig = Rig().launch()
    rig.die()
    rig.transport.reply(0, Op.HELLO, "hello")
    rig.pump()
    assert rig.slot().generation == 1
    assert rig.slot().phase is Phase.PAUSING


def test_what_the_inline_transport_stopped_is_a_timeout() -> None:
    rig = Rig().launch()
    rig.send(0)
    host = rig.transport.host_of(0)
    rig.transport.arrive(host.host_id, TimedOut(host.request.request_id, 0.5, "in a.py"))
    rig.pump()
    failure = rig.error()
    assert isinstance(failure, EnvTimeout)
    assert (failure.limit_s, failure.stacks) == (0.5, "in a.py")


def test_an_alarm_about_an_earlier_request_means_nothing() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.supervisor.handle(rig.slot().host_id or 0, TimedOut(1, 0.5))
    assert rig.slot().phase is Phase.STEPPING


# -- notices, and replies that nobody awaits ------------------------------------------------------


def test_an_unawaited_reply_is_no_failure() -> None:
    rig = Rig().launch()
    host = rig.transport.host_of(0)
    for op, payload in ((Op.RESULT, 1), (Op.STEPPED, 2), (Op.FAILED, "?"), (Op.HELLO, None)):
        rig.transport.arrive(host.host_id, Message(op, 0, 0, 0, payload))
    rig.pump()
    assert rig.ready() == [0]
    assert rig.supervisor.statistics.failures_by_env == {}


@pytest.mark.parametrize("payload", [b"x", None, ["a"]])
def test_a_notice_may_be_anything(payload: Any) -> None:
    rig = Rig().launch()
    host = rig.transport.host_of(0)
    for _ in range(2):
        rig.transport.arrive(host.host_id, Message(Op.NOTICE, 0, 0, 0, payload))
    rig.pump()
    assert rig.ready() == [0]


# -- hosts of several envs ------------------------------------------------------------------------


def test_replies_are_told_apart_by_env_and_those_of_strangers_break_the_protocol() -> None:
    rig = shared(4, 2)
    rig.send({0: "a", 1: "b"})
    rig.stepped(1, "of 1")
    assert rig.deliver() == {1: ("of 1", 1.0, False, {})}
    host = rig.transport.host_of(0)
    rig.transport.arrive(host.host_id, Message(Op.STEPPED, 3, 0, 1, None))
    rig.pump()
    assert isinstance(rig.error(0), EnvProtocolError)
    assert "of env 3" in str(rig.error(0))
    assert rig.transport.killed == [host.host_id]
    assert rig.ready() == [1, 2, 3]
