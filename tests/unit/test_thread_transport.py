"""The transport over threads by itself: what is sent, what is lost, and who may still write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest

from envmgr.transport.base import Arrival, HostDied
from envmgr.transport.thread import ThreadTransport
from envmgr.wire.hosts import EnvToBuild, HostSettings, HostSpec
from envmgr.wire.messages import Message, Op

PATIENCE_S = 40.0


class Gated(gymnasium.Env[Any, Any]):
    """Waits in its calls until it is let go."""

    observation_space = action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, came: threading.Event, go: threading.Event) -> None:
        self._came, self._go = came, go

    def wait(self) -> str:
        """Be in env code."""
        self._came.set()
        assert self._go.wait(PATIENCE_S)
        return "back"


@pytest.fixture
def came() -> threading.Event:
    return threading.Event()


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def transport(came: threading.Event, go: threading.Event) -> Iterator[ThreadTransport]:
    """One with a host whose env is built."""
    transport = ThreadTransport(shared_memory=True)
    order = EnvToBuild(0, 0, 1, lambda: Gated(came, go))
    transport.start([HostSpec(7, 0, (order,), HostSettings())])
    assert op_of(arrival_at(transport)) == Op.HELLO
    yield transport
    go.set()
    transport.close(PATIENCE_S)


def arrival_at(transport: ThreadTransport) -> Arrival:
    while not transport.arrivals:
        transport.poll(PATIENCE_S)
    host_id, arrival = transport.arrivals.popleft()
    assert host_id == 7
    return arrival


def op_of(arrival: Arrival) -> int:
    assert type(arrival) is Message
    return arrival.op


def call(transport: ThreadTransport, request_id: int, name: str = "wait") -> Message:
    message: Message = transport.prepare(7, Message(Op.CALL, 0, 0, request_id, (name, ())))
    transport.send(7, message)
    return message


def test_requests_are_answered_in_their_order(
    transport: ThreadTransport, go: threading.Event
) -> None:
    go.set()
    messages = [call(transport, number) for number in (2, 3)]
    assert [transport.has_sent(7, message) for message in messages] == [False, True]
    answers = [arrival_at(transport), arrival_at(transport)]
    assert [(a.request_id, a.payload) for a in answers] == [(2, "back"), (3, "back")]  # type: ignore[union-attr]


def test_a_host_that_is_killed_while_it_waits_ends(transport: ThreadTransport) -> None:
    transport.kill(7)
    assert arrival_at(transport) == HostDied(None)
    assert transport.figures() == {"threads_abandoned": 0}
    transport.send(7, Message(Op.CALL, 0, 0, 9, None))  # nobody: nothing happens
    transport.ring([7])
    transport.give_up(7)
    assert not transport.arrivals


def test_a_host_that_is_killed_in_env_code_ends_after_it_and_says_no_more(
    transport: ThreadTransport, came: threading.Event, go: threading.Event
) -> None:
    call(transport, 2)
    assert came.wait(PATIENCE_S)
    transport.kill(7)
    go.set()
    assert arrival_at(transport) == HostDied(None)


def test_a_host_that_does_not_end_is_given_up_and_lingers(
    transport: ThreadTransport, came: threading.Event, go: threading.Event
) -> None:
    call(transport, 2)
    assert came.wait(PATIENCE_S)
    transport.kill(7)
    transport.give_up(7)
    assert arrival_at(transport) == HostDied(None, lingers=True)
    assert transport.figures() == {"threads_abandoned": 1}
    (thread,) = [t for t in threading.enumerate() if t.name == "envmgr-envs-0"]
    transport.close(0.0)
    assert transport.figures() == {"threads_abandoned": 1}
    go.set()
    thread.join(PATIENCE_S)
    assert transport.figures() == {"threads_abandoned": 0}


def test_what_ends_a_host_by_mistake_is_told(
    transport: ThreadTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(host: Any, message: Message) -> None:
        raise SystemExit("a defect")

    monkeypatch.setattr("envmgr.worker.host.Host.handle", fail)
    call(transport, 2)
    died = arrival_at(transport)
    assert type(died) is HostDied
    assert "SystemExit: a defect" in died.detail


def test_a_ring_and_a_message_are_told_apart(
    transport: ThreadTransport, go: threading.Event
) -> None:
    transport.wake()
    assert transport.await_ring(PATIENCE_S)
    go.set()
    call(transport, 2)
    while transport.await_ring(PATIENCE_S):
        pass
    assert op_of(arrival_at(transport)) == Op.RESULT
    assert not transport.await_ring(0.0)


def test_once_closed_it_can_be_woken_and_nothing_else(transport: ThreadTransport) -> None:
    transport.close(PATIENCE_S)
    transport.close(0.0)
    transport.wake()
    with pytest.raises(ValueError, match="closed"):
        transport.poll(0.0)
