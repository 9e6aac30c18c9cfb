"""Ctrl-C at each line of sending steps by message and applying what comes, without processes."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from envmgr.transport.base import HostDied
from envmgr.transport.outbox import Outbox
from envmgr.wire.messages import Message, Op
from tests.faults.interrupting import at_each_point
from tests.rig import Rig

ACTIONS = {0: 1, 1: 1, 2: 1}


@pytest.fixture
def rig() -> Rig:
    made = Rig(3).launch()
    sent = made.transport.sent
    made.transport.has_sent = lambda _, request: sent[-1][1] is request  # type: ignore[method-assign]
    return made


def replies(rig: Rig) -> None:
    for env_id in ACTIONS:
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))


def ends_well(rig: Rig, where: str) -> None:
    """Check that each action that was accepted has one timestep, and that all goes on."""
    replies(rig)
    with rig.engine.calling:
        assert list(rig.exactly(*ACTIONS)) == [*ACTIONS], where
    rig.pump()
    assert (rig.deliver(), rig.ready()) == ({}, [*ACTIONS]), where
    assert rig.supervisor.statistics.dropped_replies == 0, where
    assert rig.identity_holds(), where


def test_steps_are_all_sent_once_or_none_is(rig: Rig) -> None:
    sent, n_sent, n_accepted, n_points = rig.transport.sent, 0, 0, 0

    def prepare() -> None:
        nonlocal n_sent
        n_sent = len(sent)

    def send() -> None:
        with rig.engine.calling:
            rig.send(ACTIONS)

    for where in at_each_point(prepare, send):
        with rig.engine.calling:  # makes up for what is left
            now = [message.env_id for _, message in sent[n_sent:]]
        assert now == ([*ACTIONS] if rig.supervisor.statistics.outstanding else []), where
        if now:
            ends_well(rig, where)
        n_points, n_accepted = n_points + 1, n_accepted + bool(now)
    assert 20 < n_accepted < n_points


def test_timesteps_are_delivered_once(rig: Rig) -> None:
    n_points = 0

    def prepare() -> None:
        rig.send(ACTIONS)
        for env_id in (2, 0, 1):
            rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))

    def collect() -> None:
        with rig.engine.calling:
            rig.engine.collect()

    for where in at_each_point(prepare, collect):
        n_points += 1
        with rig.engine.calling:
            assert list(rig.exactly(*ACTIONS)) == [*ACTIONS], where
        rig.send(ACTIONS)
        ends_well(rig, where)
    assert n_points > 50


@pytest.mark.parametrize("applies", [False, True])
def test_what_threads_have_sent_arrives_once(applies: bool) -> None:
    outbox, arrived, hosts = Outbox(), list[Any](), dict[int, None]()
    arrivals: deque[tuple[int, Any]] = deque()
    expected = [(1, Message(Op.STEPPED, 1, 0, 1, 0)), (1, HostDied(None)), (3, HostDied(None))]

    def prepare() -> None:
        hosts.update(dict.fromkeys((1, 2, 3)))
        outbox.sent.extend([*expected[:2], (3, expected[0][1]), *expected[2:], (4, expected[0][1])])
        arrivals.clear()

    def move() -> None:
        outbox.move_to(arrivals, hosts, {3})

    for where in at_each_point(prepare, move):
        arrived.clear()
        while applies and arrivals and type(arrivals[0][1]) is Message:
            arrived.append(arrivals.popleft())  # as steps are, before the next poll
        move()
        assert [*arrived, *arrivals] == expected, where
        assert [*hosts] == [2], where
