"""The transport in the caller's own thread by itself: what becomes of a request that was ended."""

from __future__ import annotations

from typing import Any

import gymnasium

from envmgr.policy import Deadlines
from envmgr.transport.alarm import TimeIsUp
from envmgr.transport.base import TimedOut
from envmgr.transport.inline import InlineTransport
from envmgr.wire.hosts import EnvToBuild, HostSettings, HostSpec
from envmgr.wire.messages import Message, Op


class Ended(gymnasium.Env[Any, Any]):
    """Is ended by the alarm in its calls, on a clock by which the limit is not over."""

    observation_space = action_space = gymnasium.spaces.Discrete(3)

    def end(self) -> None:
        raise TimeIsUp


def test_a_request_that_the_alarm_has_ended_is_answered_whatever_the_clock_says() -> None:
    transport = InlineTransport(Deadlines(reset_s=1000.0))
    order = EnvToBuild(0, 0, 1, Ended)
    transport.start([HostSpec(7, 0, (order,), HostSettings(propagate=transport.propagated))])
    transport.poll(0.0)
    _, built = transport.arrivals.popleft()
    assert type(built) is Message
    assert built.op == Op.HELLO
    transport.send(7, transport.prepare(7, Message(Op.CALL, 0, 0, 2, ("end", ()))))
    transport.poll(0.0)
    ((host_id, arrival),) = transport.arrivals
    assert (host_id, type(arrival)) == (7, TimedOut)
    assert arrival.request_id == 2  # type: ignore[union-attr]
    transport.close(0.0)
