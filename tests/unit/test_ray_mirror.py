"""The block of a manager and its copies on other machines: what travels, in which order."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr.spaces import codec_of
from envmgr.transport.base import HostDied
from envmgr.transport.outbox import Outbox
from envmgr.transport.ray import mirror as mirror_module
from envmgr.transport.ray.actor_calls import CallHandler
from envmgr.transport.ray.mirror import News, NodeMirror, TrainerMirror
from envmgr.transport.ray.protocol import ActorOp, ActorRequest
from envmgr.transport.ray.trainer_calls import ActorCaller, ActorLink
from envmgr.transport.ready import Waker
from envmgr.wire.arenas import COPIED, arena_arrays, plan_placements
from envmgr.wire.block import (
    HAS_INFO,
    REWARD_SHIFT,
    RING_LAST,
    Block,
    BlockPlan,
    posting_of,
    token_of,
)
from envmgr.wire.frames import Frame, pack
from envmgr.wire.messages import Message, Op
from envmgr.wire.rewards import FIRST_WIDE

PATIENCE_S = 20.0
FLOATS = Box(-1.0, 1.0, (2,), np.float32)
SEVERAL = Dict({"a": Box(0, 9, (), np.int64), "b": FLOATS})
ENV_NUM, N_HOSTS = 4, 3
FIRST, SECOND = 11, 12
"""The hosts of envs 1 and 2, and of env 3, with indexes 1 and 2."""


class Two:
    """The trainer's copy, that of an actor with envs 1 to 3, and the memories of both."""

    def __init__(self, spaces: Any = (FLOATS,) * ENV_NUM) -> None:
        layouts: Any = [codec_of(space).layout for space in spaces]
        actions: Any = codec_of(Discrete(5)).layout
        self.plan = plan = BlockPlan(ENV_NUM, N_HOSTS, actions)
        placements, nbytes = plan_placements(layouts, COPIED, plan.nbytes)
        here, there = bytearray(nbytes), bytearray(nbytes)
        self.mine, self.theirs = Block(here, plan), Block(there, plan)
        self.trainer, self.node = TrainerMirror(lambda n: here), NodeMirror(lambda n: there)
        self.frames: dict[int, Frame] = {}
        self.node.host(FIRST, 1)
        self.node.host(SECOND, 2)
        for env_id in (1, 2, 3):
            placement: Any = placements[env_id]
            placed = placement.__class__(**{**placement.__dict__, "block": plan})
            frame = self.frames[env_id] = pack(Message(Op.ATTACH, env_id, 0, 0, placed))
            assert self.trainer.note_placement(frame)
            self.node.note_placement_for(SECOND if env_id == 3 else FIRST, frame)
        self.arenas: Any = [
            [arena_arrays(memory, p) for p in placements if p is not None]
            for memory in (here, there)
        ]
        self.rows, self.indexes = np.array([1, 2, 3]), np.array([1, 2])

    def post(self, rows: list[int], request_id: int) -> int:
        """Post, as the core does: what is posted for hosts comes last."""
        self.mine.actions[0][rows] = request_id % 5
        self.mine.requests[rows] = token_of(0, request_id)
        posting = posting_of(request_id, RING_LAST)
        self.mine.posted[[2 if row == 3 else 1 for row in rows]] = posting
        return posting

    def carry(self) -> list[int]:
        """Have what is posted travel; return the hosts that are rung for."""
        return self.node.post(self.trainer.posts(self.rows, self.indexes))

    def reply(self, row: int, number: int, buffer: int = 0, flags: int = 0) -> None:
        """Reply, as a host does: the token comes last."""
        for leaf in self.arenas[1][row]:
            if buffer < COPIED.count:
                leaf[buffer, self.row_in(row)] = number
        self.theirs.rewards[row] = number
        self.theirs.flags[row] = buffer | flags
        self.theirs.replies[row] = self.theirs.requests[row]

    def row_in(self, env_id: int) -> int:
        return env_id

    def come(self) -> News:
        """Have what is replied travel."""
        news = self.node.news()
        assert news is not None
        self.trainer.apply(news)
        return news


def test_what_is_posted_is_there_and_only_sleepers_are_rung_for() -> None:
    two = Two()
    two.theirs.sleeping[:2] = 1
    posting = two.post([1, 3], 7)
    assert two.carry() == [FIRST]
    assert two.theirs.requests.tolist() == [0, 7, 0, 7]
    assert two.theirs.actions[0].tolist() == [0, 2, 0, 2]
    assert two.theirs.posted.tolist() == [0, posting, posting]
    assert two.trainer.posts(two.rows, two.indexes) == [], "it is sent once"
    two.post([2], 8)
    (name, rows, _), (last, _, _) = two.trainer.posts(two.rows, two.indexes)
    assert (name, np.frombuffer(rows, np.int64).tolist(), last) == ("posts", [2], "posted")
    assert two.mine.sleeping.tolist() == [1, 1, 1, 0], "hosts are always rung for"
    assert two.theirs.sleeping[-1] == 1, "and so is the actor"


def test_a_token_that_is_early_is_not_passed_over_later() -> None:
    two = Two()
    two.theirs.sleeping[:] = 1
    two.mine.requests[1] = 7  # an interrupt came before the host's word
    assert two.carry() == []
    assert two.theirs.requests[1] == 7
    two.mine.posted[1] = posting_of(7, RING_LAST)
    assert two.carry() == [FIRST]


def test_resets_that_are_asked_for_travel_as_steps_do() -> None:
    two = Two()
    two.theirs.sleeping[:] = 1
    two.mine.reset_requests[3], two.mine.posted[2] = 9, posting_of(9, RING_LAST)
    assert two.carry() == [SECOND]
    assert two.theirs.reset_requests.tolist() == [0, 0, 0, 9]
    assert two.node.is_awaited
    two.theirs.resets[3], two.theirs.reset_flags[3] = 9, COPIED.steps
    assert not two.node.is_awaited
    assert two.node.is_open, "the trainer does not know yet"
    two.come()
    assert not two.node.is_open
    assert two.mine.resets.tolist() == [0, 0, 0, 9]
    assert two.mine.reset_flags[3] == COPIED.steps


def test_what_is_replied_is_there_with_all_that_belongs_to_it() -> None:
    two = Two()
    two.post([1, 2, 3], 7)
    two.carry()
    assert two.node.news() is None
    two.theirs.wide_rewards[2], two.theirs.infos[3, :3] = 5.0, (1, 2, 3)
    two.reply(1, 6, buffer=1)
    two.reply(2, 7, flags=FIRST_WIDE << REWARD_SHIFT)
    two.reply(3, 8, flags=HAS_INFO)
    assert two.node.has_news
    two.come()
    mine, theirs = two.mine, two.theirs
    assert mine.replies.tolist() == [0, 7, 7, 7]
    assert mine.rewards.tolist() == [0.0, 6.0, 7.0, 8.0]
    assert mine.flags.tolist() == theirs.flags.tolist()
    assert mine.wide_rewards[2].tolist() == theirs.wide_rewards[2].tolist()
    assert mine.infos[3, :3].tolist() == [1, 2, 3]
    leaf = two.arenas[0][1][0]
    assert leaf[1, 1].tolist() == [6.0, 6.0]
    assert leaf[0, 2:].tolist() == [[7.0, 7.0], [8.0, 8.0]]
    assert not two.node.has_news
    assert two.node.news() is None, "it is told of once"


def test_tokens_are_the_last_to_be_written() -> None:
    two = Two()
    two.post([1], 7)
    names = [name for name, _, _ in two.trainer.posts(two.rows, two.indexes)]
    assert names == ["posts", "posted"]
    two.carry()
    two.post([1], 8)
    two.carry()
    two.reply(1, 6, flags=HAS_INFO)
    two.theirs.resets[1] = 7
    names = [name for name, _, _ in two.come().parts]
    assert names.index("resets") < names.index("infos") < names.index("steps")
    for mirror in (two.trainer, two.node):
        last = {name: columns[-1] for name, columns in mirror._columns.items()}
        block = mirror.block
        assert block is not None
        assert last["posts"] is block.requests
        assert last["steps"] is block.replies
        assert last["resets"] is block.resets


def test_a_buffer_that_there_is_not_is_for_the_trainer_to_find() -> None:
    two = Two()
    two.post([1, 2], 7)
    two.carry()
    two.reply(1, 6, buffer=15)
    two.reply(2, 6)
    two.come()
    assert two.mine.replies.tolist() == [0, 7, 7, 0]
    assert two.mine.flags[1] == 15


class Mixed(Two):
    """Envs 1 and 3 have one observation space, the others another."""

    def __init__(self) -> None:
        super().__init__((SEVERAL, FLOATS, SEVERAL, FLOATS))

    def row_in(self, env_id: int) -> int:
        return env_id // 2


def test_envs_of_several_layouts() -> None:
    two = Mixed()
    two.post([1, 2, 3], 7)
    two.carry()
    for row in (1, 2, 3):
        two.reply(row, row, buffer=1)
    two.come()
    assert two.arenas[0][1][0][1].tolist() == [[1.0, 1.0], [3.0, 3.0]]
    numbers, floats = two.arenas[0][2]
    assert numbers[1].tolist() == [0, 2]
    assert floats[1].tolist() == [[0.0, 0.0], [2.0, 2.0]]


def test_when_a_host_began_is_told_whatever_its_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, now = Two(), [1000.0]
    monkeypatch.setattr(mirror_module.time, "monotonic", lambda: now[0])
    two.theirs.since[1], two.theirs.running[1], two.theirs.finished[1] = 998.5, 2, 5
    news = two.node.news()
    assert news is not None
    now[0] = 5.0  # here
    two.trainer.apply(news)
    assert two.mine.since[1] == 3.5
    assert (two.mine.running[1], two.mine.finished[1]) == (2, 5)
    two.mine.running[1] = 0  # it has died
    two.node.host(13, 1)
    two.theirs.running[1] = 2
    two.come()
    assert two.mine.running[1] == 2, "the next one is at the same"


def test_what_is_awaited_of_it() -> None:
    two = Two()
    two.post([1, 2, 3], 7)
    two.carry()
    two.reply(1, 1)
    assert two.node.is_awaited
    two.node.answered(pack(Message(Op.FAILED, 2, 0, 6, None)))  # another request
    two.node.ended(SECOND)
    assert two.node.is_awaited
    two.node.answered(pack(Message(Op.FAILED, 2, 0, 7, None)))
    assert not two.node.is_awaited


def test_an_env_that_moves_to_another_actor_is_posted_for_there_alone() -> None:
    two, frames = Two(), [pack(Message(Op.ADOPT, 1, 0, 0, None))]
    with contextlib.closing(Waker()) as deaths:
        caller = ActorCaller(None, Outbox(), deaths, lambda node_id: None)
        caller.mirror = two.trainer
        links = [ActorLink(lambda: (None, None), serves_one=False) for _ in range(2)]
        for link, frame in ((links[0], two.frames[1]), (links[1], two.frames[1])):
            caller._note_placement(link, frame)
        assert [link.rows for link in links] == [set(), {1}]
        caller._note_placement(links[0], *frames)  # it is told of no buffer
        assert [link.rows for link in links] == [set(), {1}]
        caller.end(PATIENCE_S)


# -- calls ----------------------------------------------------------------------------------------


class Calls:
    """Calls to a handler with a block, each on a thread of its own."""

    def __init__(self) -> None:
        self.two = Two()
        self.handler = CallHandler(self._deliver, self.two.node)
        self.posted = threading.Event()
        self.returned: dict[int, Any] = {}
        self.threads: dict[int, threading.Thread] = {}

    def _deliver(self, items: Any) -> None:
        for item in items:
            self.two.node.post(item.data)
        self.posted.set()

    def call(self, number: int) -> None:
        parts = self.two.trainer.posts(self.two.rows, self.two.indexes)
        items = [ActorRequest(ActorOp.POST, 0, parts)] if parts else []

        def run() -> None:
            self.returned[number] = self.handler.call(number, items)

        self.threads[number] = thread = threading.Thread(target=run, daemon=True)
        thread.start()

    def result(self, number: int) -> list[Any]:
        self.threads[number].join(PATIENCE_S)
        replies: list[Any] = self.returned[number][1]
        return replies

    def take(self, number: int) -> list[list[int]]:
        """Return which rows came with each part of what it has returned."""
        ((_, news),) = self.result(number)
        self.two.trainer.apply(news)
        return [np.frombuffer(rows, np.int64).tolist() for name, rows, _ in news.parts]


def test_one_call_carries_the_replies_to_a_batch() -> None:
    calls = Calls()
    calls.two.post([1, 2], 7)
    calls.call(0)
    assert calls.posted.wait(PATIENCE_S)
    calls.handler.ring()
    assert not calls.handler._is_rung, "there is nothing to tell"
    handler = calls.handler
    with handler._lock:  # the next time that it looks by itself never comes
        calls.two.reply(1, 1)
        handler._look_at, handler._is_rung = float("inf"), True
        handler.ring()
        assert not handler._may_return(handler._waiting[-1]), "another one is awaited"
    calls.two.reply(2, 1)
    handler.ring()
    assert calls.take(0)[-1] == [1, 2]


def test_what_is_replied_is_told_of_while_others_take_long() -> None:
    calls = Calls()
    calls.two.post([1, 2], 7)
    calls.call(0)
    assert calls.posted.wait(PATIENCE_S)
    calls.two.reply(1, 1)  # and nobody rings
    assert calls.take(0)[-1] == [1]


def test_a_call_that_came_before_its_turn_keeps_the_time() -> None:
    calls = Calls()
    calls.two.post([1, 2], 7)
    calls.call(1)
    calls.call(0)
    assert calls.posted.wait(PATIENCE_S)
    calls.two.reply(1, 1)  # and nobody rings
    assert calls.take(1)[-1] == [1]
    calls.two.reply(2, 1)
    calls.handler.ring()
    assert calls.take(0)[-1] == [2]


def test_what_a_host_has_replied_comes_before_its_death() -> None:
    calls = Calls()
    calls.two.post([1, 2], 7)
    calls.call(0)
    assert calls.posted.wait(PATIENCE_S)
    with calls.handler._lock:
        calls.handler._look_at = float("inf")
    calls.two.reply(1, 1)
    calls.handler.put(FIRST, HostDied(-9))
    assert not calls.two.node.is_awaited
    (host_id, news), (other, died) = calls.result(0)
    assert (host_id, type(news), other, died) == (0, News, FIRST, HostDied(-9))
