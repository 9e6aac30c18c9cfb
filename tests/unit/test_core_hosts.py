"""Hosts: what they are asked, in which order, and how they end."""

from __future__ import annotations

import pytest

from envmgr.core import Phase
from envmgr.lifecycle import EnvState
from envmgr.wire.messages import UNANSWERED, AfterStep, Op
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import FAILURES, STEP_LIMIT, WHOLE, generations, rows_of_batches

pytestmark = over_routes


# -- requests -------------------------------------------------------------------------------------


def test_requests_have_rising_ids_of_their_own() -> None:
    rig = Rig(2).launch()
    for _ in range(3):
        rig.send({0: 1, 1: 1})
        rig.stepped(0)
        rig.stepped(1)
        rig.deliver()
    ids = [m.request_id for _, m in rig.transport.sent if m.request_id != UNANSWERED]
    assert ids == sorted(ids)
    named = [(m.env_id, m.request_id) for _, m in rig.transport.sent if m.op == Op.STEP]
    assert len(named) == len(set(named)) == 6


# -- how they end ---------------------------------------------------------------------------------


def test_a_worker_that_does_not_end_when_asked_is_killed_after_its_grace() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
    host = rig.transport.host_of(0)
    rig.advance(4.75)
    assert not host.killed
    rig.advance(0.25)
    assert host.killed
    rig.pump()
    assert rig.transport.host_of(0) is not host
    assert rig.supervisor.statistics.failures_by_env == {}


@pytest.mark.parametrize("happens", ["garbage", "timeout", "foreign", "malformed", "exited"])
def test_a_lost_host_is_killed_and_replaced_only_when_its_death_is_reported(happens: str) -> None:
    rig = Rig(deadlines=STEP_LIMIT, kill_takes_s=None).launch()
    old = rig.transport.host_of(0)
    rig.send(0)
    FAILURES[happens][0](rig)
    assert rig.transport.killed == [old.host_id]
    rig.advance(60.0)
    assert len(rig.transport.hosts) == 1  # its slots in the memory are not given to another one
    assert rig.slot().phase is Phase.ENDING
    assert rig.state() is EnvState.ERROR
    rig.die()
    new = rig.transport.host_of(0)
    assert new.host_id > old.host_id
    assert new.generation_of(0) == 1
    assert rig.state() is EnvState.INIT


# -- what they are started with -------------------------------------------------------------------


@pytest.mark.parametrize("lingers", [False, True])
def test_others_do_not_wait_for_what_was_posted_for_a_host_that_is_gone(lingers: bool) -> None:
    hosts = Rig(2).launch().supervisor.hosts
    block = hosts.block
    if block is None:  # steps go by message
        return
    block.posted[...], block.finished[...] = 7, 3
    hosts.ended(hosts.groups[1], lingers=lingers)
    assert [int(one) for one in block.finished] == [3, 3 if lingers else 7]


def test_hosts_are_told_who_is_a_row() -> None:
    rig = rows_of_batches(env_num=4)
    hosts = rig.transport.hosts.values()
    assert [host.env_ids for host in hosts] == [[0, 1, 2], [3]]
    assert {host.spec.settings.batches for host in hosts} == {WHOLE}


def test_one_host_is_started_for_each_group() -> None:
    rig = Rig(5, num_workers=2)
    rig.supervisor.start_hosts(range(5))
    hosts = rig.transport.hosts
    assert [hosts[i].env_ids for i in sorted(hosts)] == [[0, 1, 2], [3, 4]]
    assert [hosts[i].spec.index for i in sorted(hosts)] == [0, 1]
    assert {slot.phase for slot in rig.supervisor.envs} == {Phase.STARTING}
    for env_id in range(5):
        rig.hello(env_id)
    assert {slot.phase for slot in rig.supervisor.envs} == {Phase.IDLE}
    assert rig.supervisor.statistics.as_dict()["num_workers"] == 2


def test_a_host_that_is_started_early_builds_one_env_and_the_others_at_launch() -> None:
    rig = Rig(3, num_workers=1)
    rig.supervisor.start_hosts([0])
    (host,) = rig.transport.hosts.values()
    assert [order.request_id == UNANSWERED for order in host.spec.envs] == [False, True, True]
    rig.hello(0)
    assert rig.supervisor.table.env_states() == (EnvState.INIT, EnvState.VOID, EnvState.VOID)
    rig.supervisor.start_hosts(range(3))
    assert len(rig.transport.hosts) == 1
    assert [m.op for m in host.received[1:]] == [Op.RENEW, Op.RENEW]
    rig.hello(1)
    rig.hello(2)
    assert generations(rig) == [0, 0, 0]
    assert {slot.phase for slot in rig.supervisor.envs} == {Phase.IDLE}
