"""Connections to several hosts over real pipes: batches, and what interrupts leave of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from envmgr.transport.base import Garbage
from envmgr.transport.process.connections import Connections
from envmgr.transport.ready import ReadySet, await_any
from envmgr.wire.channel import FrameChannel
from envmgr.wire.frames import encode
from envmgr.wire.messages import Message, Op
from tests.faults.interrupting import at_each_point

HOSTS = (1, 2, 3)


def message(number: int, payload: Any = "hello") -> Message:
    return Message(Op.STEP, 1, 2, number, payload)


class World:
    """Connections, and the hosts' ends by host_id."""

    def __init__(self) -> None:
        self.ready = ReadySet()
        self.connections = Connections(self.ready)
        self.hosts: dict[int, FrameChannel] = {}
        for host_id in HOSTS:
            (down_out, down_in), (up_out, up_in) = os.pipe(), os.pipe()
            ours = FrameChannel(up_out, down_in, blocking=False)
            self.connections.add(host_id, host_id - 1, ours)
            self.hosts[host_id] = FrameChannel(down_out, up_in, blocking=False)

    def received(self, host_id: int) -> list[Any]:
        """Return the payloads that a host has got."""
        return [frame.message().payload for frame in self.hosts[host_id].receive()]

    def close(self) -> None:
        """Close all pipes."""
        for host_id in HOSTS:
            self.connections.drop(host_id)
            self.hosts[host_id].close()
        self.ready.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


# -- sending --------------------------------------------------------------------------------------


def test_what_is_for_one_host_is_one_write_and_in_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = os.write

    def count(fd: int, data: bytes) -> int:
        writes.append(fd)
        return write(fd, data)

    monkeypatch.setattr(os, "write", count)
    requests = deque(
        (host_id, encode(message(1, (host_id, n)))) for n in (1, 2) for host_id in HOSTS
    )
    world.connections.send_each(requests)
    assert len(writes) == len(set(writes)) == len(HOSTS)
    assert not requests
    assert not world.connections.unsent
    for host_id in HOSTS:
        assert world.received(host_id) == [(host_id, 1), (host_id, 2)]


def test_hosts_that_take_nothing_or_are_gone_do_not_keep_the_others_waiting(world: World) -> None:
    connections, large = world.connections, b"b" * 100_000
    connections.send(1, encode(message(1, large)))
    assert [*connections.unsent] == [1]
    world.hosts[2].close()
    connections.send_each(deque((h, encode(message(2, large[:h]))) for h in (*HOSTS, 9)))
    assert [*connections.unsent] == [1]
    assert connections.deaf == {2}
    assert world.received(3) == [large[:3]]
    found: list[Any] = []
    while connections.unsent:
        found += world.received(1)
        connections.wait((), 1.0)
    assert found + world.received(1) == [large, large[:1]]


def test_messages_are_counted_where_hosts_look_for_them(world: World) -> None:
    sent = memoryview(bytearray(8 * len(HOSTS))).cast("Q")
    world.connections._messages_sent = sent
    world.connections.send_each(deque([(1, encode(message(1))), (3, encode(message(1)))]))
    assert [number > 0 for number in sent] == [True, False, True]


@pytest.mark.parametrize("waits", [False, True])
def test_after_an_interrupt_anywhere_each_frame_is_sent_once(world: World, waits: bool) -> None:
    connections, large = world.connections, b"f" * 70_000
    requests: deque[tuple[int, bytes]] = deque()

    def prepare() -> None:
        connections.send(1, encode(message(0, large)))  # so that it has no room for more
        requests.extend((host_id, encode(message(1, host_id))) for host_id in (*HOSTS, 2))

    def send() -> None:
        connections.send_each(requests)

    n_points = 0
    for where in at_each_point(prepare, send):
        n_points += 1
        if waits:
            connections.finish()
        send()
        assert not requests, where
        found: list[Any] = []
        while connections.unsent:
            found += world.received(1)
            connections.flush()
        assert found + world.received(1) == [large, 1], where
        assert (world.received(2), world.received(3)) == ([2, 2], [3]), where
    assert n_points > 20


def test_what_a_handler_sends_in_the_midst_of_others_comes_after_them(world: World) -> None:
    connections, large = world.connections, b"f" * 200_000
    requests: deque[tuple[int, bytes]] = deque()

    def prepare() -> None:
        requests.append((1, encode(message(1, large))))

    n_points = 0
    for where in at_each_point(prepare, lambda: connections.send_each(requests)):
        n_points += 1
        n_left = len(requests)
        connections.send(1, encode(message(2, b"x")))  # the manager is being closed
        found: list[Any] = []
        while connections.unsent:
            found += world.received(1)
            connections.flush()
        found += world.received(1)
        # Nothing of it was sent yet, or all of it comes first.
        assert found == [large, b"x"] or (n_left and found == [b"x"]), where
        requests.clear()
    assert n_points > 10


# -- reading --------------------------------------------------------------------------------------


def payloads(world: World) -> list[tuple[int, Any]]:
    """Return what has arrived, and take it."""
    arrivals = world.connections.arrivals
    found = [(host_id, arrival.payload) for host_id, arrival in arrivals]  # type: ignore[union-attr]
    arrivals.clear()
    return found


@pytest.mark.parametrize("applies", [False, True])
def test_after_an_interrupt_anywhere_each_frame_arrives_once(world: World, applies: bool) -> None:
    connections = world.connections
    first, second = encode(message(1, "first")), encode(message(1, "second"))

    def prepare() -> None:
        for host_id in HOSTS:
            world.hosts[host_id].send(first)
        world.hosts[2].send(first)
        world.hosts[3].send(second[:40])

    def read() -> None:
        connections.read([*connections.by_host.values()])

    n_points = 0
    for where in at_each_point(prepare, read):
        n_points += 1
        before = payloads(world) if applies else []  # before the next wait
        world.hosts[3].send(second[40:])
        connections.finish()
        read()
        expected = [(1, "first"), (2, "first"), (2, "first"), (3, "first"), (3, "second")]
        assert sorted(before + payloads(world)) == expected, where
    assert n_points > 20


def test_what_is_no_message_ruins_its_host_and_no_other(world: World) -> None:
    connections, hosts = world.connections, world.hosts
    hosts[1].send(encode(message(1, "one")) + b"this is not a frame at all, it is text")
    hosts[2].close()
    hosts[3].send(encode(message(1, "three")))
    for _ in range(2):
        connections.read([*connections.by_host.values()])
    assert payloads(world) == [(1, "one"), (3, "three")]
    garbage = connections.ruined[1]
    assert isinstance(garbage, Garbage)
    assert "not a frame" in garbage.reason
    assert connections.ruined == {1: garbage, 2: None}


def test_what_a_dead_host_has_sent_last_arrives_before_its_channel_is_closed(world: World) -> None:
    connections = world.connections
    for number in range(3):
        world.hosts[1].send(encode(message(number, number)))
    world.hosts[1].close()
    connections.read_last(1)
    assert payloads(world) == [(1, 0), (1, 1), (1, 2)]
    assert not connections.ruined
    assert 1 not in connections.by_host
    world.hosts[2].send(encode(message(1)))  # and somebody else has its end of the pipe open
    connections.read_last(2)
    assert payloads(world) == [(2, "hello")]


# -- waiting --------------------------------------------------------------------------------------


def test_a_wait_ends_when_one_is_readable_or_can_be_written(world: World) -> None:
    channel = world.connections.by_host[1]
    await_any([channel], 0.0)
    await_any([channel], 60.0, [channel.write_fd])
    world.hosts[1].send(encode(message(1)))
    await_any([channel, world.connections.by_host[2]], 60.0)
    await_any([channel.fileno()], None)
