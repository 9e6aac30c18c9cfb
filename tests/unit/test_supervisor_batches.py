"""The supervisor with batched envs: what is lost with them, and rows that are stepped together."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from gymnasium.spaces import Discrete

from envmgr.core import Phase
from envmgr.core.table import EnvTable, host_groups
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvCrash, EnvNotReadyError, EnvProtocolError, EnvRaised
from envmgr.lifecycle import EnvState
from envmgr.policy import FailurePolicy, GatherPolicy
from envmgr.transport.base import Arrival
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op, RemoteFailure
from tests.fake_hosts import FakeEnvs, FakeHost, description
from tests.rig import Rig, over_routes

pytestmark = over_routes

PARTIAL, WHOLE = (Batch(0, 3, True),), (Batch(0, 3, False),)


def rows(batches: tuple[Batch, ...] = WHOLE, env_num: int = 3, **options: Any) -> Rig:
    """Return launched rows of batched envs, the first of which has three."""
    return Rig(env_num, batches=batches, **options).launch()


def recover(rig: Rig, *env_ids: int) -> None:
    """Have rows be built, and then reset."""
    for env_id in env_ids:
        rig.hello(env_id)
    for env_id in env_ids:
        rig.reset_done(env_id)


@pytest.mark.parametrize(
    ("n_hosts", "sizes"), [(None, [2, 1, 3, 1, 2]), (1, [9]), (2, [6, 3]), (3, [3, 4, 2])]
)
def test_the_rows_of_a_batch_share_a_host(n_hosts: int | None, sizes: list[int]) -> None:
    slots = EnvTable(9).envs
    for batch in (Batch(0, 2, True), Batch(3, 3, True), Batch(7, 2, True)):
        for env_id in batch.env_ids:
            slots[env_id].batch = batch
    groups = host_groups(slots, n_hosts)
    assert [len(group.envs) for group in groups] == sizes
    assert [slot for group in groups for slot in group.envs] == slots


def test_hosts_are_told_who_is_a_row() -> None:
    rig = rows(env_num=4)
    hosts = rig.transport.hosts.values()
    assert [host.env_ids for host in hosts] == [[0, 1, 2], [3]]
    assert {host.spec.settings.batches for host in hosts} == {WHOLE}


# -- what is lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailureKind.RAISED, FailureKind.PROTOCOL, FailureKind.EXITED])
def test_what_the_whole_env_does_takes_all_rows_and_is_charged_once(kind: FailureKind) -> None:
    rig = rows(PARTIAL, policy=FailurePolicy(max_failures=1))
    rig.send({0: 1, 2: 2})
    rig.fail(0, kind=kind, of_batch=True)
    delivered = rig.deliver()
    assert [timestep.info["abnormal"] for timestep in delivered.values()] == [True, True]
    assert "shared with env 0" in str(delivered[2].info["error"])
    assert rig.slot(1).failed_while_ready is not None
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert len(rig.transport.hosts) == 2
    recover(rig, 0, 1, 2)
    assert rig.ready() == [0, 1, 2]
    assert [slot.generation for slot in rig.supervisor.envs] == [1, 1, 1]
    assert rig.identity_holds()


def test_a_failure_of_one_row_is_repaired_in_its_env() -> None:
    rig = rows(PARTIAL)
    rig.send({0: 1, 1: 2})
    rig.fail(0, kind=FailureKind.PROTOCOL)
    assert isinstance(rig.deliver(0)[0].info["error"], EnvProtocolError)
    assert rig.slot(1).phase is Phase.STEPPING
    rig.reset_done(0)
    rig.stepped(1)
    assert (rig.ready(), rig.transport.killed) == ([0, 2], [])


def test_a_row_has_no_new_env_but_in_a_new_host() -> None:
    for policy, how in (
        (FailurePolicy(), {"kind": FailureKind.EXITED}),
        (FailurePolicy(renew_between_attempts=True), {"kind": FailureKind.PROTOCOL}),
    ):
        rig = rows(PARTIAL, policy=policy)
        rig.send(0)
        rig.fail(0, **how)
        assert len(rig.transport.hosts) == 2
        assert rig.requests(Op.RENEW, 0) == []


def test_attempts_at_the_reset_of_a_row_used_up_take_all_rows() -> None:
    rig = rows(PARTIAL, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.0))
    rig.reset(0)
    rig.fail(0, "reset")
    rig.pump()
    assert (len(rig.reset_requests(0)), len(rig.transport.hosts)) == (3, 1)
    rig.fail(0, "reset")
    assert len(rig.transport.hosts) == 2
    assert rig.slot(1).failed_while_ready is not None


def test_a_row_that_comes_back_with_other_spaces_takes_all_rows() -> None:
    rig = rows(PARTIAL)
    rig.die(0)
    for env_id in range(3):
        rig.transport.reply(env_id, Op.HELLO, description(Discrete(7)))
    rig.pump()
    assert len(rig.transport.killed) == 1


def test_an_env_that_cannot_be_built_fails_the_launch_once() -> None:
    rig = Rig(3, batches=WHOLE)
    rig.supervisor.start_hosts(range(3))
    for env_id in range(3):
        rig.transport.fail(env_id, "construction")
    rig.pump()
    found = rig.supervisor.repair.launch_failures
    assert sorted(found) == [0, 1, 2]
    assert [type(found[i]) for i in range(3)] == [EnvRaised, EnvCrash, EnvCrash]


def test_a_call_of_a_row_that_raises_leaves_its_env_alone() -> None:
    rig = rows(PARTIAL, policy=FailurePolicy(renew_between_attempts=True))
    rig.call(1)
    rig.fail(1, "call")
    assert rig.ready() == [0, 1, 2]
    assert rig.transport.killed == []


# -- rows that are stepped together ---------------------------------------------------------------


def test_actions_that_lack_a_row_are_refused_whole() -> None:
    rig = rows(env_num=4)
    with pytest.raises(EnvNotReadyError, match=r"envs \[1, 2\] were sent no action"):
        rig.send({3: 1, 0: 2})
    assert rig.ready() == [0, 1, 2, 3]
    rig.send({3: 1})
    rig.send({2: 3, 0: 1, 1: 2})
    assert len(rig.requests(Op.STEP, 1)) == 1


def test_rows_are_handed_out_and_ready_together() -> None:
    rig = rows(env_num=4)
    rig.send({i: i for i in range(4)})
    rig.stepped(0)
    rig.stepped(3)
    assert [*rig.deliver()] == [3]
    assert rig.ready() == [3]
    rig.stepped(2)
    rig.stepped(1)
    assert [*rig.deliver()] == [0, 1, 2]
    assert rig.ready() == [0, 1, 2, 3]


def test_a_row_that_is_reset_keeps_the_others_from_being_ready() -> None:
    rig = rows()
    rig.reset(1)
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError, match="env 0 cannot take an action"):
        rig.send({0: 1, 2: 2})
    rig.reset_done(1)
    assert rig.ready() == [0, 1, 2]


def test_rows_in_no_episode_are_not_waited_for() -> None:
    rig = rows(auto_reset=False)
    rig.send({i: i for i in range(3)})
    rig.stepped(0, done=True)
    rig.stepped(1)
    rig.stepped(2)
    assert len(rig.deliver()) == 3
    assert rig.state(0) is EnvState.NEED_RESET
    assert rig.ready() == [1, 2]
    rig.send({1: 1, 2: 2})
    rig.stepped(1, done=True)
    rig.stepped(2)
    assert [*rig.deliver()] == [1, 2]
    assert rig.ready() == [2]


def test_in_place_rows_wait_for_the_reset_of_one_of_them() -> None:
    rig = rows(reset_inplace=True)
    rig.send({i: i for i in range(3)})
    rig.stepped(1, done=True, after=AfterStep.RESETS)
    rig.stepped(0)
    rig.stepped(2)
    assert rig.deliver() == {}
    rig.reset_done(1, "new")
    assert [*rig.deliver()] == [0, 1, 2]
    assert rig.ready() == [0, 1, 2]
    assert rig.obs(1) == "new"


def test_a_gather_of_some_goes_on_until_one_can_be_stepped() -> None:
    rig = rows((Batch(0, 2, False), Batch(2, 2, False)), 4)
    rig.send({i: i for i in range(4)})
    rig.stepped(0)
    rig.fail(1, kind=FailureKind.PROTOCOL)  # its reset keeps env 0 from being ready
    rig.transport.reply(2, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING), after_s=1.0)
    rig.transport.reply(3, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING), after_s=2.0)
    found = rig.hand_out(rig.gather.some(GatherPolicy(1, 0.0), deadline=float("inf")))
    assert [*found] == [0, 1, 2, 3]
    assert rig.ready() == [2, 3]


def test_rows_whose_host_died_while_they_were_ready_are_lost_together() -> None:
    rig = rows()
    rig.reset(2)
    rig.die(0)
    assert rig.ready() == []  # env 2 is being repaired
    recover(rig, 0, 1, 2)
    assert rig.ready() == [0, 1, 2]
    with pytest.raises(EnvNotReadyError, match=r"envs \[2\]"):
        rig.send({0: 1, 1: 2})
    rig.send(dict.fromkeys(range(3), 4))
    delivered = rig.deliver()
    assert [timestep.info["abnormal"] for timestep in delivered.values()] == [True] * 3
    assert all("died" in str(timestep.info["error"]) for timestep in delivered.values())
    assert rig.ready() == [0, 1, 2]
    assert [rig.obs(i) for i in range(3)] == ["first"] * 3
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [0, 0, 0]
    rig.send(dict.fromkeys(range(3), 5))
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [1, 1, 1]
    assert rig.identity_holds()


def test_a_row_that_is_reset_while_others_are_lost_stays_with_them() -> None:
    rig = rows()
    rig.die(0)
    recover(rig, 0, 1, 2)
    rig.reset(2)
    rig.reset_done(2, "again")
    assert (rig.ready(), rig.obs(2)) == ([0, 1, 2], "again")
    rig.send({i: i for i in range(3)})
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True] * 3
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [0, 0, 0]
    assert rig.obs(2) == "again"
    rig.send({i: i for i in range(3)})
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [1, 1, 1]


def test_a_row_that_had_replied_before_its_host_died_waits_with_the_others() -> None:
    rig = rows()
    rig.send({i: i for i in range(3)})
    rig.stepped(0)
    rig.die(1)
    delivered = rig.deliver()
    assert ["abnormal" in delivered[i].info for i in range(3)] == [False, True, True]
    assert rig.ready() == []
    recover(rig, 0, 1, 2)
    assert rig.ready() == [0, 1, 2]
    rig.send(dict.fromkeys(range(3), 4))
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True] * 3
    assert rig.identity_holds()


def test_a_row_that_is_given_up_is_not_waited_for() -> None:
    rig = rows(policy=FailurePolicy(max_failures=0, drop_exhausted=True))
    rig.send({i: i for i in range(3)})
    rig.fail(0, of_batch=True)
    assert len(rig.deliver()) == 3
    recover(rig, 1, 2)
    assert rig.state(0) is EnvState.DONE
    assert rig.ready() == [1, 2]
    rig.send({1: 1, 2: 2})
    assert len(rig.requests(Op.STEP, 2)) == 2


def test_waiting_for_rows_ends_when_all_are_ready() -> None:
    rig = rows(answer=FakeEnvs(seconds={Op.RESET: 1.0}))
    rig.reset(1)
    record = rig.supervisor.table
    assert [record.is_coming(i) for i in range(3)] == [True, True, True]
    rig.run(2.0)
    assert record.is_ready(0)
    rig.transport.answer = None
    rig.send({i: i for i in range(3)})
    rig.fail(0, kind=FailureKind.PROTOCOL)
    assert [record.is_coming(i) for i in range(3)] == [True, False, False]


def test_a_row_that_is_reset_while_others_take_a_step_waits_for_them() -> None:
    rig = rows(auto_reset=False)
    rig.send({i: i for i in range(3)})
    for env_id in range(3):
        rig.stepped(env_id, done=env_id == 0)
    rig.deliver()
    rig.send({1: 1, 2: 2})
    rig.reset(0)
    rig.reset_done(0)
    assert rig.state(0) is EnvState.RUN
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError, match="it is in RUN"):
        rig.send(0)
    rig.stepped(1)
    rig.stepped(2)
    assert [*rig.deliver()] == [1, 2]
    assert rig.ready() == [0, 1, 2]


# -- what hosts are sent, whatever happens --------------------------------------------------------


class Rows(FakeEnvs):
    """Envs that know which of them are in an episode, and that fail or die now and then.

    Attributes:
        in_episode: (host_id, env_id) of rows that would be waited for.
        stepped: of rows that were sent an action, since this was last emptied.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(episode_length=4, seconds={Op.STEP: 0.125, Op.RESET: 0.25})
        self.in_episode: set[tuple[int, int]] = set()
        self.stepped: set[tuple[int, int]] = set()
        self._rng = rng

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        row, replies = (host.host_id, message.env_id), list(super().__call__(host, message))
        chance = self._rng.random()
        if message.op == Op.RESET:
            self.in_episode.add(row)
        elif message.op == Op.STEP:
            self.stepped.add(row)
            if chance < 0.04:
                self.in_episode.discard(row)
                failure = RemoteFailure(FailureKind.PROTOCOL, "step", of_batch=chance < 0.02)
                return [(0.125, message._replace(op=Op.FAILED, payload=failure))]
            if host.envs[message.env_id].step < 0:
                self.in_episode.discard(row)
        return replies


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_all_rows_in_an_episode_are_always_stepped_together(seed: int, auto_reset: bool) -> None:
    rng = random.Random(seed)
    envs = Rows(rng)
    rig = Rig(
        5,
        batches=(Batch(0, 3, False), Batch(3, 2, False)),
        policy=FailurePolicy(max_failures=10**6, max_failures_total=10**6),
        answer=envs,
        auto_reset=auto_reset,
        reset_inplace=auto_reset,
    )
    rig.start()
    rig.supervisor.begin_episodes()
    rig.run(1.0)
    rig.supervisor.table.launching = False
    n_calls = 0
    for _ in range(200):
        ready = rig.ready()
        chosen = [i for batch in (range(3), range(3, 5)) if rng.random() < 0.7 for i in batch]
        envs.stepped.clear()
        before = set(envs.in_episode)
        if actions := {i: 1 for i in ready if i in chosen}:
            rig.send(actions)
            n_calls += 1
        serving = {host_id for host_id, _ in envs.stepped}
        assert envs.stepped == {row for row in before if row[0] in serving}
        if rng.random() < 0.1:
            idle = [i for i in range(5) if not rig.supervisor.table.owes(i)]
            rig.supervisor.resets.begin(dict.fromkeys(rng.sample(idle, len(idle) // 2)))
        host = rig.transport.host_of(rng.randrange(5))
        if rng.random() < 0.05 and not host.ended and not host.killed:
            rig.transport.die(host.env_id)
        if not auto_reset:
            ended = rig.supervisor.states.ids_in(EnvState.NEED_RESET)
            rig.supervisor.resets.begin(dict.fromkeys(i for i in ended if rng.random() < 0.5))
        rig.run(rng.choice((0.125, 0.25, 1.0)))
        rig.deliver()
    assert n_calls > 50
    assert rig.identity_holds()


@pytest.mark.parametrize("has_replied", [False, True])
def test_a_row_is_owed_its_timestep_when_the_reset_of_another_takes_their_host(
    has_replied: bool,
) -> None:
    rig = rows(PARTIAL)
    rig.send(1)
    if has_replied:
        rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.reset(0)
    rig.transport.fail(0, "reset")
    rig.pump()
    (timestep,) = rig.deliver(1).values()
    assert ("abnormal" in timestep.info) is not has_replied
    assert rig.identity_holds()
