"""What a worker does in which order, and where its requests come from."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep
from envmgr.wire.channel import (
    BELL,
    BELL_ASKED,
    BELL_VALUE,
    BELL_VALUE_ASKED,
    ChannelClosedError,
    FrameChannel,
)
from envmgr.wire.frames import encode
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import EpisodePlan, Message, Op, ResetRequest
from envmgr.worker.event_loop import WorkerLoop
from envmgr.worker.host import Host
from envmgr.worker.serving import ConnectionInbox, QueueInbox, serve

N = 3


class Logging(BaseEnv):
    """Notes what it does; an episode ends with action 1."""

    observation_space, action_space = Box(-9, 9, (2,), np.float32), Discrete(3)
    reward_space = Box(-1, 1, (1,), np.float64)

    def __init__(self, env_id: int, world: World) -> None:
        self._env_id = env_id
        self._world = world

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None: ...

    def reset(self, **params: Any) -> Any:
        self._world.note((self._env_id, "reset"))
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> EnvTimestep:
        self._world.note((self._env_id, "step"))
        return EnvTimestep(np.zeros(2, np.float32), 0.0, action == 1, {})

    def close(self) -> None:
        self._world.note((self._env_id, "close"))


class World:
    """A host over pipes; `then` says what the parent does when the env has done something."""

    def __init__(self) -> None:
        requests, replies = os.pipe(), os.pipe()
        self._parent = FrameChannel(replies[0], requests[1], blocking=False)
        self.channel = FrameChannel(requests[0], replies[1], blocking=True)
        self.log: list[tuple[int, str]] = []
        self.then: list[Callable[[], None]] = []
        self._request_id = 0

    def note(self, entry: tuple[int, str]) -> None:
        self.log.append(entry)
        if self.then:
            self.then.pop(0)()

    def send(self, env_id: int, op: Op, payload: Any = None) -> None:
        self._request_id += 1
        self._parent.send(encode(Message(op, env_id, 0, self._request_id, payload)))

    def step(self, env_id: int, action: int = 0) -> None:
        self.send(env_id, Op.STEP, action)

    def serve(self) -> list[tuple[int, str]]:
        """Run what was sent, up to CLOSE; return what the envs have done."""
        host = Host(
            {i: lambda i=i: Logging(i, self) for i in range(N)},
            HostSettings(),
            encode=encode,
            send=self.channel.send,
            memory=lambda nbytes: None,
        )
        serve(host, None, ConnectionInbox(self.channel))
        return [entry for entry in self.log if entry[1] != "close"]

    def ring(self, bell: bytes) -> None:
        self._parent.ring(bell)

    def end(self) -> None:
        """Send no more."""
        os.close(self._parent.write_fd)
        self._parent.write_fd = -1

    def close(self) -> None:
        self._parent.close()
        self.channel.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    for env_id in range(N):
        world.send(env_id, Op.HELLO)
        plan = EpisodePlan(True, float("inf"), {})
        world.send(env_id, Op.RESET, ResetRequest({}, None, None, plan))
    try:
        yield world
    finally:
        world.close()


def test_automatic_resets_wait_for_the_steps_that_have_come(world: World) -> None:
    def ask_for_more() -> None:
        world.step(1)
        world.step(2)
        world.send(0, Op.CLOSE)

    world.then = [lambda: None] * N + [ask_for_more]
    world.step(0, 1)
    assert world.serve()[N:] == [(0, "step"), (1, "step"), (2, "step")]


def test_an_automatic_reset_begins_however_eagerly_the_others_are_stepped(world: World) -> None:
    """By message, too: there is always another step in the pipe."""

    def go_on() -> None:
        world.step(1)
        if world.log[-1] == (0, "reset") or len(world.log) > 50:
            world.send(0, Op.CLOSE)

    world.then = [lambda: None] * N + [go_on] * 100
    world.step(0, 1)
    assert world.serve()[N : N + 3] == [(0, "step"), (1, "step"), (0, "reset")]


def test_what_came_before_the_end_of_the_connection_is_run(world: World) -> None:
    world.step(0)
    world.end()
    with pytest.raises(ChannelClosedError):
        world.serve()
    assert (0, "step") in world.log


def test_a_message_that_cannot_be_read_is_answered_and_the_others_are_run(world: World) -> None:
    world.send(0, Op.CALL, Unreadable())
    world.step(1)
    world.send(0, Op.CLOSE)
    assert world.serve()[N:] == [(1, "step")]
    replies = [frame.message() for frame in world._parent.receive()]
    (failed,) = (reply for reply in replies if reply.op == Op.FAILED)
    assert failed.env_id == 0
    assert "cannot be unpickled" in failed.payload.message


class Unreadable:
    """Refuses to be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("no")


def test_an_inbox_that_is_over_gives_and_takes_nothing() -> None:
    replies: list[Message] = []
    inbox = QueueInbox(replies.append)
    message = Message(Op.CALL, 0, 0, 1, None)
    inbox.send(message)
    assert not inbox.await_bell()
    inbox.end()
    for refused in (lambda: list(inbox.messages()), inbox.read, lambda: inbox.answer(message)):
        with pytest.raises(ChannelClosedError):
            refused()
    assert replies == []


def test_an_interrupted_send_is_known_to_have_been_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = QueueInbox(lambda message: None)
    first, second = (Message(Op.STEP, 0, 0, number, None) for number in (1, 2))
    inbox.send(first)
    inbox._latest = (second, [])  # an interrupt has come before it was put
    assert [inbox.has_sent(first), inbox.has_sent(second)] == [False, False]
    inbox.send(second)
    assert inbox.has_sent(second)


def test_a_queue_tells_bells_from_messages_and_from_bells_that_ask_for_a_ring() -> None:
    inbox = QueueInbox(lambda message: None)
    inbox.ring(asks=False)
    assert inbox.await_bell()
    assert not inbox.take_ring_request()
    inbox.ring(asks=True)
    inbox.ring(asks=False)
    assert not inbox.await_bell()
    assert [inbox.take_ring_request(), inbox.take_ring_request()] == [True, False]
    message = Message(Op.STEP, 0, 0, 1, None)
    assert inbox.is_empty
    inbox.send(message)
    assert not inbox.await_bell()
    assert not inbox.is_empty
    assert list(inbox.messages()) == [message]
    assert inbox.is_empty


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="there is no bell to ring")
def test_a_bell_that_asks_for_a_ring_is_remembered_until_it_is_answered(world: World) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        inbox = ConnectionInbox(world.channel, bell)
        inbox.read()
        assert not inbox.is_empty
        list(inbox.messages())
        os.eventfd_write(bell, BELL_VALUE)
        assert inbox.await_bell()
        os.eventfd_write(bell, BELL_VALUE_ASKED)
        assert not inbox.await_bell()
        os.eventfd_write(bell, BELL_VALUE)
        assert not inbox.await_bell(), "a ring is due still"
        assert [inbox.take_ring_request(), inbox.take_ring_request()] == [True, False]
        world.step(0)
        assert not inbox.await_bell()
        assert [message.op for message in inbox.messages()] == [Op.STEP]
    finally:
        os.close(bell)


def test_bells_that_come_over_the_connection_are_told_from_messages(world: World) -> None:
    inbox = ConnectionInbox(world.channel)
    inbox.read()
    list(inbox.messages())
    world.ring(BELL)
    assert inbox.await_bell()
    world.ring(BELL_ASKED)
    assert not inbox.await_bell()
    assert inbox.take_ring_request()
    world.step(0)
    assert not inbox.await_bell()


# -- in an event loop -----------------------------------------------------------------------------


class StubHost:
    """Has one thing run after the other, each of which is known of when the one before is run."""

    def __init__(self, loop: WorkerLoop, count: int) -> None:
        self.loop, self.left = loop, count
        self.pending_resets: deque[Callable[[], None]] = deque([self._run])

    def _run(self) -> None:
        self.left -= 1
        if self.left:
            self.pending_resets.append(self._run)
        else:
            self.loop.wake()  # as a message does: CLOSE

    def run_resets(self, count: int) -> None:
        for _ in range(count):
            self.pending_resets.popleft()()

    async def close_async(self) -> None: ...


class StubInbox:
    """Has the host closed when nothing is left to be run, or after a while."""

    fds = ()

    def __init__(self, host: StubHost) -> None:
        self._host = host
        self.is_late = False

    def read(self) -> None: ...

    def messages(self) -> Iterator[Message]:
        if not self._host.left or self.is_late:
            yield Message(Op.CLOSE, 0, 0, 1, None)

    def answer(self, message: Message) -> None:
        assert message.op == Op.CLOSED

    def end(self) -> None:
        self.is_late = True
        self._host.loop.wake()


def test_what_waits_in_an_event_loop_is_run_though_no_message_comes() -> None:
    loop = WorkerLoop()
    event_loop = loop._made()
    try:
        host = StubHost(loop, 3)
        inbox = StubInbox(host)
        event_loop.call_later(30.0, inbox.end)
        serve(host, None, inbox)  # type: ignore[arg-type]
    finally:
        event_loop.close()
        asyncio.set_event_loop(None)
    assert (host.left, inbox.is_late) == (0, False)
