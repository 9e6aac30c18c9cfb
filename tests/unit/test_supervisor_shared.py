"""The supervisor when envs share a host: whom a failure touches, and what a new host brings."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.spaces import Discrete

from envmgr.core import Phase
from envmgr.core.table import EnvTable, host_groups
from envmgr.errors import (
    EnvCrash,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.wire.messages import UNANSWERED, AfterStep, FailureKind, Message, Op
from tests.fake_hosts import FakeEnvs, description
from tests.rig import Rig, over_routes

pytestmark = over_routes

DROP = FailurePolicy(max_failures=0, drop_exhausted=True)


def shared(env_num: int = 3, num_workers: int = 1, **options: Any) -> Rig:
    """Return launched envs that share hosts."""
    return Rig(env_num, num_workers=num_workers, **options).launch()


def recover(rig: Rig, *env_ids: int) -> None:
    """Have envs be built and reset, one after another."""
    for env_id in env_ids:
        rig.hello(env_id)
    for env_id in env_ids:
        rig.reset_done(env_id)


def generations(rig: Rig) -> list[int]:
    return [slot.generation for slot in rig.supervisor.envs]


# -- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_num", "n_hosts", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (4, 1, [4])],
)
def test_groups_are_contiguous_and_as_equal_as_can_be(
    env_num: int, n_hosts: int, sizes: list[int]
) -> None:
    slots = EnvTable(env_num).envs
    groups = host_groups(slots, n_hosts)
    assert [len(group.envs) for group in groups] == sizes
    assert [group.index for group in groups] == list(range(n_hosts))
    assert [slot for group in groups for slot in group.envs] == slots
    assert all(slot.group.by_id[slot.env_id] is slot for slot in slots)


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


def test_an_env_that_cannot_be_built_fails_the_launch_and_not_its_neighbours() -> None:
    rig = Rig(3, num_workers=1)
    rig.supervisor.start_hosts(range(3))
    rig.hello(0)
    rig.fail(1, "construction")
    rig.hello(2)
    assert list(rig.supervisor.repair.launch_failures) == [1]
    assert {slot.phase for slot in rig.supervisor.envs} == {Phase.IDLE}


def test_a_host_that_dies_during_launch_fails_it_for_all_of_its_envs() -> None:
    rig = Rig(4, num_workers=2)
    rig.supervisor.start_hosts(range(4))
    rig.hello(0)
    rig.die(1)
    found = rig.supervisor.repair.launch_failures
    assert sorted(found) == [0, 1]
    assert "died during construction" in str(found[1])
    assert "shared with env 1" in str(found[0])


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("fault", ["it dies", "it hangs"])
def test_attempts_at_a_reset_in_a_launch_bring_the_neighbours_along(
    fault: str, auto_reset: bool
) -> None:
    """Who begins later episodes has no say in the first ones."""
    rig = Rig(
        2,
        num_workers=1,
        policy=FailurePolicy(max_retry=2, retry_waiting_s=0.0),
        deadlines=Deadlines(reset_s=2.0),
        auto_reset=auto_reset,
    )
    rig.transport.answer = FakeEnvs()
    rig.start()
    rig.transport.answer = None
    rig.supervisor.begin_episodes()
    rig.reset_done(0)
    rig.began(1)
    if fault == "it dies":
        rig.die(1)
    else:
        rig.run(2.5)
    assert rig.supervisor.repair.launch_failures == {}
    recover(rig, 0, 1)
    assert rig.ready() == [0, 1]
    assert rig.slot(0).failed_while_ready is None
    assert generations(rig) == [1, 1]


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


# -- a failure of one env -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "renewed"),
    [
        (FailureKind.RAISED, False),
        (FailureKind.PROTOCOL, False),
        (FailureKind.ABNORMAL, False),
        (FailureKind.NON_FINITE, False),
        (FailureKind.EXITED, True),
    ],
)
def test_a_failed_step_touches_nobody_else(kind: FailureKind, renewed: bool) -> None:
    rig = shared()
    rig.send({0: "a", 1: "b"})
    rig.fail(0, kind=kind)
    assert rig.deliver(0)[0].info["abnormal"]
    assert rig.slot(1).phase is Phase.STEPPING
    assert rig.ready() == [2]
    if renewed:  # a new env, in the same host
        assert len(rig.requests(Op.RENEW, 0)) == 1
        rig.hello(0)
    rig.reset_done(0)
    rig.stepped(1, "of 1")
    assert rig.deliver(1)[1].obs == "of 1"
    assert rig.ready() == [0, 1, 2]
    assert generations(rig) == [int(renewed), 0, 0]
    assert len(rig.transport.hosts) == 1
    assert rig.transport.killed == []
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_attempts_at_a_reset_used_up_bring_a_new_env_in_the_same_host() -> None:
    rig = shared(policy=FailurePolicy(retry_waiting_s=0.5))
    rig.reset(0)
    rig.fail(0, "reset")
    assert len(rig.requests(Op.RENEW, 0)) == 1
    rig.hello(0)
    rig.fail(0, "reset")
    assert rig.slot(0).phase is Phase.PAUSING  # longer with each renewal in a row
    rig.advance(0.5)
    assert len(rig.requests(Op.RENEW, 0)) == 2
    recover(rig, 0)
    assert rig.ready() == [0, 1, 2]
    assert generations(rig) == [2, 0, 0]
    assert len(rig.transport.hosts) == 1


def test_a_construction_that_fails_is_tried_again_in_the_same_host() -> None:
    rig = shared()
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.fail(0, "construction")
    rig.advance(1.0)
    recover(rig, 0)
    rig.deliver(0)
    assert rig.ready() == [0, 1, 2]
    assert generations(rig) == [2, 0, 0]
    assert len(rig.transport.hosts) == 1


def test_an_env_that_comes_back_with_other_spaces_is_renewed_alone() -> None:
    rig = shared()
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.transport.reply(0, Op.HELLO, description(Discrete(7)))
    rig.pump()
    assert isinstance(rig.supervisor.statistics.latest_failures[-1], EnvProtocolError)
    rig.advance(1.0)
    assert len(rig.requests(Op.RENEW, 0)) == 2
    assert rig.transport.killed == []


def test_a_call_that_exits_renews_its_env_alone() -> None:
    rig = shared()
    rig.call(1)
    rig.fail(1, "call", kind=FailureKind.EXITED)
    assert isinstance(rig.slot(1).result, EnvCrash)
    assert len(rig.requests(Op.RENEW, 1)) == 1
    assert rig.ready() == [0, 1, 2]  # what was ready stays so
    assert rig.slot(1).failed_while_ready is not None
    assert [rig.slot(i).failed_while_ready for i in (0, 2)] == [None, None]


def test_an_env_that_is_dropped_leaves_its_host() -> None:
    rig = shared(policy=DROP)
    rig.send(0)
    rig.fail(0)
    assert rig.state(0) is EnvState.DONE
    assert len(rig.requests(Op.RELEASE, 0)) == 1
    assert rig.slot(0).host_id is None
    assert rig.slot(0).is_gone
    host = rig.transport.host_of(0)
    release = rig.requests(Op.RELEASE, 0)[0]
    rig.transport.arrive(host.host_id, release._replace(op=Op.RESULT))
    rig.pump()
    rig.deliver(0)
    assert rig.ready() == [1, 2]
    assert rig.transport.killed == []


def test_a_dropped_env_that_is_reset_comes_back_into_the_host() -> None:
    rig = shared(policy=DROP)
    rig.send(0)
    rig.fail(0)
    rig.deliver(0)
    rig.reset(0)
    assert len(rig.requests(Op.RENEW, 0)) == 1
    recover(rig, 0)
    assert rig.ready() == [0, 1, 2]
    assert len(rig.transport.hosts) == 1


def test_the_last_env_that_is_dropped_takes_the_host_with_it() -> None:
    rig = shared(2, policy=DROP)
    for env_id in (0, 1):
        rig.send(env_id)
        rig.fail(env_id)
        rig.deliver(env_id)
    host = rig.transport.host_of(0)
    assert len(host.requests(Op.CLOSE)) == 1
    rig.die(0, exit_status=0)
    assert rig.supervisor.table.env_states() == (EnvState.DONE,) * 2
    rig.reset(1)
    new = rig.transport.host_of(1)
    assert new is not host
    assert [order.request_id == UNANSWERED for order in new.spec.envs] == [True, False]
    recover(rig, 1)
    assert rig.ready() == [1]
    rig.reset(0)
    recover(rig, 0)
    assert rig.ready() == [0, 1]
    assert len(rig.transport.hosts) == 2


def test_a_dropped_env_that_is_reset_while_its_host_ends_waits_for_the_next() -> None:
    rig = shared(2, policy=DROP)
    for env_id in (0, 1):
        rig.send(env_id)
        rig.fail(env_id)
        rig.deliver(env_id)
    rig.reset(0)
    assert rig.slot(0).phase is Phase.ENDING
    rig.die(0, exit_status=0)
    recover(rig, 0)
    assert rig.ready() == [0]
    assert rig.state(1) is EnvState.DONE


# -- the loss of the host -------------------------------------------------------------------------


def test_the_loss_of_a_host_touches_all_of_its_envs_and_nobody_else() -> None:
    rig = shared(5, 1 + 1)  # 0, 1, 2 | 3, 4
    rig.send({0: "a", 1: "b", 3: "c"})
    rig.die(0, exit_status=3)
    first = rig.error(0)
    assert isinstance(first, EnvCrash)
    died = "env 0 (generation 0) died during step: exit code 3"
    assert f"{died}; envs 1, 2 shared its host, and lose it too" in str(first)
    second = rig.error(1)
    assert isinstance(second, EnvCrash)
    assert (second.env_id, second.during, second.exit_status) == (1, "step", 3)
    assert "because it is shared with env 0: the host of env 0" in str(second)
    assert second.__cause__ is first
    assert rig.slot(2).failed_while_ready is not None
    assert rig.ready() == [2, 4]
    assert rig.slot(3).phase is Phase.STEPPING
    assert generations(rig) == [1, 1, 1, 0, 0]
    assert len(rig.transport.hosts) == 3  # one new one
    new = rig.transport.host_of(0)
    assert [order.generation for order in new.spec.envs] == [1, 1, 1]
    statistics = rig.supervisor.statistics
    assert statistics.failures_by_env == {0: 1}
    assert (statistics.abnormal, statistics.renewals) == (2, 3)
    recover(rig, 0, 1, 2)
    rig.stepped(3)
    assert sorted(rig.deliver()) == [0, 1, 3]
    rig.send(2)  # not executed
    assert rig.deliver(2)[2].info["abnormal"]
    assert rig.ready() == [0, 1, 2, 3, 4]
    assert rig.identity_holds()


def test_neighbours_are_not_charged() -> None:
    rig = shared(2, policy=FailurePolicy(max_failures=2, retry_waiting_s=0.0))
    for _ in range(2):
        rig.send({1: "x"})
        rig.send({0: "y"})
        rig.die(0)
        recover(rig, 0, 1)
        rig.deliver()
    assert rig.supervisor.statistics.failures_by_env == {1: 2}
    assert rig.supervisor.repair.fatal is None
    rig.send({1: "x"})
    rig.send({0: "y"})
    rig.die(0)
    assert isinstance(rig.supervisor.repair.take_fatal(), FailuresExhaustedError)
    assert rig.state(1) is EnvState.ERROR
    recover(rig, 0)  # without the one that is given up
    rig.deliver()
    assert rig.ready() == [0]


def test_without_a_word_of_the_host_the_first_that_was_sent_is_blamed() -> None:
    rig = shared()
    rig.send({2: "a"})
    rig.send({0: "b"})
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_env == {2: 1}


def test_a_reset_of_its_own_runs_after_the_steps_that_were_sent_before() -> None:
    rig = shared()
    rig.send({0: "a"})
    rig.send({1: "b"})
    rig.stepped(0, done=True, after=AfterStep.RESETS)
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    rig = shared()
    rig.send({0: "a"})
    rig.stepped(0, done=True, after=AfterStep.RESETS)
    rig.send({1: "b"})
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_an_idle_death_is_charged_to_the_first_and_dooms_all() -> None:
    rig = shared()
    rig.die(2)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert rig.ready() == [0, 1, 2]
    recover(rig, 0, 1, 2)
    rig.send(dict.fromkeys(range(3), 1))
    timesteps = rig.deliver()
    assert [t.info["abnormal"] for t in timesteps.values()] == [True] * 3
    assert rig.requests(Op.STEP) == []
    assert rig.ready() == [0, 1, 2]


@pytest.mark.parametrize("work", [phase for phase in Phase if phase is not Phase.POSTED])
def test_whatever_a_neighbour_is_doing_it_comes_back(work: Phase) -> None:
    rig = shared(2, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5))
    rig.send({0: "a"})
    if work is Phase.STEPPING:
        rig.send({1: "b"})
    elif work is Phase.CANCELLING:
        rig.send({1: "b"})
        rig.reset(1)
    elif work is Phase.RESETTING:
        rig.reset(1)
    elif work is Phase.CALLING:
        rig.call(1)
    elif work is Phase.PAUSING:
        rig.reset(1)
        rig.fail(1, "reset")
    elif work is Phase.STARTING:
        rig.call(1)
        rig.fail(1, "call", kind=FailureKind.EXITED)
    elif work is Phase.ENDING:
        rig.transport.kill_takes_s = None
        rig.transport.garbage(0)
        rig.pump()
    assert rig.slot(1).phase is work
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_kind["EnvCrash"] <= 2
    rig.advance(1.0)
    recover(rig, 0, 1)
    rig.deliver()
    if rig.slot(1).failed_while_ready is not None:
        rig.send({1: "c"})
        rig.deliver()
    assert rig.ready() == [0, 1]
    assert rig.identity_holds()


def test_the_new_host_waits_for_the_longest_back_off() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = shared(2, policy=policy)
    rig.send(1)
    rig.fail(1, kind=FailureKind.EXITED)
    rig.fail(1, "construction")
    rig.advance(0.5)
    rig.fail(1, "construction")  # the next renewal of 1 waits for 1 s, the first of 0 not at all
    assert rig.slot(1).deadline == rig.clock() + 1.0
    rig.send(0)
    rig.die(0)
    assert rig.slot(0).phase is rig.slot(1).phase is Phase.PAUSING
    assert len(rig.transport.hosts) == 1
    rig.advance(1.0)
    assert len(rig.transport.hosts) == 2
    recover(rig, 0, 1)
    rig.deliver()
    assert rig.ready() == [0, 1]


def test_a_lost_host_is_killed_once_and_replaced_when_it_is_reaped() -> None:
    rig = shared(2, kill_takes_s=None)
    rig.send({0: 1, 1: 1})
    rig.transport.garbage(0)
    rig.pump()
    assert rig.transport.killed == [1]
    assert sorted(rig.deliver()) == [0, 1]
    assert {slot.phase for slot in rig.supervisor.envs} == {Phase.ENDING}
    rig.run(12.0)
    assert rig.transport.given_up == [1, 1]
    assert len(rig.transport.hosts) == 1
    rig.die(0)
    assert len(rig.transport.hosts) == 2


def test_a_malformed_reply_is_charged_to_its_env() -> None:
    rig = shared(2)
    rig.send({0: 1, 1: 1})
    rig.transport.reply(1, Op.STEPPED, "what?")
    rig.pump()
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    assert isinstance(rig.error(0), EnvCrash)


def test_with_on_failure_raise_nobody_is_renewed() -> None:
    rig = shared(2, policy=FailurePolicy(recover=False))
    rig.send({0: 1, 1: 1})
    rig.die(0)
    assert rig.supervisor.repair.urgent
    assert len(rig.transport.hosts) == 1
    assert sorted(rig.deliver()) == [0, 1]


def test_an_env_that_is_done_does_not_come_back_before_its_user_resets_it() -> None:
    rig = shared(2, episode_num=1)
    rig.send(0)
    rig.stepped(0, done=True)
    rig.deliver(0)
    rig.send(1)
    rig.die(1)
    new = rig.transport.host_of(0)
    assert [order.request_id == UNANSWERED for order in new.spec.envs] == [True, False]
    rig.reset(0)
    assert len(rig.requests(Op.RENEW, 0)) == 1
    rig.hello(1)
    recover(rig, 0)
    assert rig.ready() == [0]


def test_an_explicit_reset_while_the_host_is_being_replaced_is_done_in_the_new_one() -> None:
    rig = shared(2, kill_takes_s=1.0)
    rig.send({0: 1})
    rig.transport.garbage(0)
    rig.pump()
    rig.reset(1, {"level": 3})
    rig.advance(1.0)
    recover(rig, 0, 1)
    assert rig.reset_requests(1)[-1].params == {"level": 3}
    assert rig.slot(1).failed_while_ready is None
    assert rig.ready() == [1]


# -- limits ---------------------------------------------------------------------------------------

LIMITS = Deadlines(step_s=2.0, reset_s=4.0, connect_s=8.0)


def test_a_host_announces_its_work_only_where_there_are_limits() -> None:
    def announced(**options: Any) -> frozenset[int]:
        return shared(2, **options).transport.host_of(0).spec.settings.announced

    building = {Op.HELLO, Op.RENEW}
    assert announced() == building
    assert announced(deadlines=Deadlines(step_s=1.0)) > building | {Op.STEP, Op.RESET, Op.CALL}
    assert announced(deadlines=Deadlines(reset_s=1.0)) > building | {Op.STEP, Op.RESET, Op.CALL}
    rig = Rig(2, deadlines=LIMITS).launch()
    assert rig.transport.host_of(0).spec.settings.announced == frozenset()


def test_a_limit_counts_from_when_the_work_began() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({0: 1, 1: 1, 2: 1})
    rig.began(0)
    rig.advance(1.5)
    rig.stepped(0)
    rig.began(1)
    rig.advance(1.5)
    rig.stepped(1)
    rig.began(2)
    rig.advance(1.75)
    assert rig.slot(2).phase is Phase.STEPPING
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {2: 1}
    assert "env 2 (generation 0) exceeded the 2 s of step_timeout in its step" in str(rig.error(2))
    assert sorted(i for i, t in rig.deliver().items() if t.info.get("abnormal")) == [2]


def test_those_in_the_queue_are_not_charged_for_the_one_that_runs() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({0: 1})
    rig.send({1: 1})
    rig.began(1)
    rig.advance(2.0)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    assert "shared with env 1" in str(rig.error(0))


def test_a_silent_host_times_out_from_when_it_could_have_begun() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({2: 1})
    rig.advance(1.0)
    rig.send({0: 1})
    rig.advance(0.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {2: 1}


def test_silence_after_a_reply_counts_from_the_reply() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({0: 1, 1: 1})
    rig.began(0)
    rig.advance(1.5)
    rig.stepped(0)
    rig.advance(1.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}


def test_silence_does_not_count_from_before_the_request() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({0: 1})
    rig.began(0)
    rig.stepped(0)
    rig.deliver()
    rig.advance(1.0)
    rig.send({0: 1})
    rig.advance(1.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.transport.killed


def test_a_host_without_requests_may_be_silent() -> None:
    rig = shared(deadlines=LIMITS)
    rig.send({0: 1})
    rig.began(0)
    rig.stepped(0)
    rig.deliver()
    rig.advance(100.0)
    rig.send({0: 1})
    rig.advance(1.75)
    assert not rig.transport.killed


def test_what_has_no_limit_runs_as_long_as_it_likes_and_so_do_those_behind_it() -> None:
    rig = shared(2, deadlines=Deadlines(step_s=2.0))
    rig.reset(0)
    rig.began(0)
    rig.send({1: 1})
    rig.advance(1000.0)
    rig.reset_done(0)
    rig.began(1)
    rig.advance(1.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}


def test_without_limits_nothing_passes_while_an_env_is_renewed() -> None:
    rig = shared(2)
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)  # renewed behind a step that has no limit
    rig.send(1)
    if rig.transport.has_block:  # where hosts always say what they run
        rig.began(1)
    rig.advance(1000.0)
    assert not rig.transport.killed
    rig.stepped(1)
    rig.began(0)
    rig.advance(60.0)
    assert rig.transport.killed


def test_a_construction_is_limited_when_what_had_no_limit_is_over() -> None:
    rig = shared(2)
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.send(1)
    if rig.transport.has_block:
        rig.began(1)
    rig.advance(1000.0)
    rig.stepped(1)  # and then the host says nothing any more
    assert not rig.transport.killed
    rig.run(59.0)
    assert not rig.transport.killed
    rig.run(61.0)
    assert rig.transport.killed


def test_each_construction_has_its_limit_and_the_first_counts_from_the_start() -> None:
    rig = Rig(3, num_workers=1, deadlines=LIMITS)
    rig.supervisor.start_hosts(range(3))
    rig.advance(4.0)
    rig.began(0)
    rig.advance(3.75)
    rig.hello(0)
    rig.began(1)
    rig.advance(7.75)
    rig.hello(1)
    rig.began(2)
    rig.advance(7.75)
    assert rig.supervisor.repair.launch_failures == {}
    rig.advance(0.25)
    found = rig.supervisor.repair.launch_failures
    assert "env 2 (generation 0) exceeded the 8 s of connect_timeout" in str(found[2])
    rig = Rig(2, num_workers=1, deadlines=LIMITS)
    rig.supervisor.start_hosts(range(2))
    rig.advance(4.0)
    rig.began(0)
    rig.advance(4.0)
    assert "env 0" in str(rig.supervisor.repair.launch_failures[0])


@pytest.mark.parametrize("shown", [0, 2, 99])
def test_a_host_that_shows_an_env_that_does_nothing_is_not_waited_for(shown: int) -> None:
    rig = shared(2, has_block=True, deadlines=Deadlines(step_s=2.0))
    assert rig.transport.shared is not None
    block = rig.transport.shared.block
    assert block is not None
    rig.send({0: 1})
    block.running[:], block.since[:] = shown, rig.clock()  # 2: the other, who has no limit then
    rig.run(1.75)
    assert not rig.transport.killed
    rig.run(2.0)
    assert isinstance(rig.error(0), EnvTimeout)


def test_what_a_dead_host_ran_is_not_held_against_the_host_that_replaces_it() -> None:
    policy = FailurePolicy(max_failures=0, drop_exhausted=True, retry_waiting_s=0.0)
    rig = shared(2, policy=policy, deadlines=Deadlines(step_s=2.0, reset_s=2.0, close_s=1.0))
    rig.send({0: 1})
    rig.began(0)
    rig.die(0)
    assert isinstance(rig.error(0), EnvCrash)
    assert rig.state(0) is EnvState.DONE
    rig.advance(4.0)
    rig.hello(1)
    assert [op for op, _ in rig.transport.host_of(1).told] == [Op.RESET]
    rig.advance(1.5)
    assert not rig.transport.killed
    rig.advance(0.5)
    assert "exceeded the 2 s of reset_timeout" in str(rig.supervisor.statistics.latest_failures[-1])
    assert "env 1" in str(rig.supervisor.statistics.latest_failures[-1])


def test_an_env_that_hangs_as_its_host_lets_go_of_it_costs_the_host() -> None:
    policy = FailurePolicy(max_failures=0, drop_exhausted=True, retry_waiting_s=0.0)
    deadlines = Deadlines(step_s=2.0, close_s=1.0)
    rig = shared(3, policy=policy, deadlines=deadlines)
    rig.send(0)
    rig.fail(0)
    rig.deliver(0)
    host = rig.transport.host_of(0)
    release = rig.requests(Op.RELEASE, 0)[0]
    rig.transport.arrive(host.host_id, release._replace(op=Op.BEGAN))
    rig.pump()
    rig.send(1)
    rig.advance(1.0)
    assert host.killed
    assert "exceeded the 1 s of close_timeout in its close" in str(rig.error(1).__cause__)
    assert rig.state(0) is EnvState.DONE
    recover(rig, 1, 2)
    rig.deliver()
    assert rig.ready() == [1, 2]


def test_a_repeated_request_is_limited_too() -> None:
    rig = shared(2, deadlines=LIMITS)
    rig.supervisor.repeat([0], Op.SET_ATTR, [("colour", "red")])
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.hello(0)
    told = rig.requests(Op.SET_ATTR, 0)[0]
    host_id = rig.slot(0).host_id or 0
    rig.transport.arrive(host_id, told._replace(op=Op.BEGAN, payload=None))
    rig.advance(3.0)
    rig.transport.arrive(host_id, told._replace(op=Op.RESULT, payload=None))
    rig.pump()
    rig.began(0)
    rig.advance(3.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.transport.killed


# -- recycling ------------------------------------------------------------------------------------


def worn(rig: Rig, env_id: int) -> None:
    """End an episode, after which the host wants to be replaced."""
    rig.send(env_id)
    rig.stepped(env_id, "terminal", done=True, after=AfterStep.WANTS_RECYCLING)


def test_a_worn_host_is_replaced_when_none_of_its_envs_is_in_an_episode() -> None:
    rig = shared(3)
    host = rig.transport.host_of(0)
    worn(rig, 0)
    assert rig.deliver(0)[0].obs == "terminal"
    assert (rig.state(0), rig.slot(0).phase) == (EnvState.RESET, Phase.IDLE)
    assert not host.requests(Op.CLOSE)
    worn(rig, 2)
    rig.deliver()
    rig.send(1)
    rig.stepped(1)
    rig.deliver()
    assert rig.ready() == [1]
    assert not host.requests(Op.CLOSE)
    worn(rig, 1)
    assert len(host.requests(Op.CLOSE)) == 1
    rig.transport.reply(0, Op.CLOSED)
    rig.die(0, exit_status=0)
    recover(rig, 0, 1, 2)
    rig.deliver()
    assert rig.ready() == [0, 1, 2]
    statistics = rig.supervisor.statistics
    assert (statistics.recycled, statistics.renewals, statistics.abnormal) == (1, 3, 0)
    assert statistics.failures_by_env == {}


def test_an_explicit_reset_does_not_wait_for_the_neighbours() -> None:
    rig = shared(2)
    worn(rig, 0)
    rig.deliver()
    rig.reset(0)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    rig.send(0)
    rig.reset(0)  # the step is over, and the host says once more that it is worn
    rig.stepped(0, done=True, after=AfterStep.WANTS_RECYCLING)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    assert len(rig.transport.hosts) == 1


def test_an_env_that_waits_for_a_new_host_can_be_called() -> None:
    rig = shared(2)
    worn(rig, 0)
    assert rig.slot(0).is_callable
    rig.call(0)
    rig.transport.reply(0, Op.RESULT, 1)
    rig.pump()
    assert rig.slot(0).phase is Phase.IDLE
    assert rig.reset_requests(0)[1:] == []  # it goes on waiting
    rig.call(0)
    worn(rig, 1)
    assert not rig.transport.host_of(0).requests(Op.CLOSE)
    rig.transport.reply(0, Op.RESULT, 1)
    rig.pump()
    assert rig.transport.host_of(0).requests(Op.CLOSE)


def test_in_place_the_timestep_does_not_wait_for_the_neighbours() -> None:
    rig = shared(2, reset_inplace=True)
    worn(rig, 0)
    assert list(rig.deliver()) == [0]
    worn(rig, 1)
    assert rig.deliver() == {}  # its own reset comes as soon as there is a host
    rig.die(0, exit_status=0)
    recover(rig, 0, 1)
    assert list(rig.deliver()) == [1]


@pytest.mark.parametrize("auto_reset", [True, False])
def test_envs_that_are_done_or_wait_for_their_user_do_not_hold_a_worn_host(
    auto_reset: bool,
) -> None:
    rig = shared(2, auto_reset=auto_reset, episode_num=2)
    if auto_reset:  # env 1 ends its second episode
        rig.send(1)
        rig.stepped(1, done=True, after=AfterStep.RESETS)
        rig.reset_done(1)
        rig.deliver()
    rig.send(1)
    rig.stepped(1, done=True)
    rig.deliver()
    resting = EnvState.DONE if auto_reset else EnvState.NEED_RESET
    assert rig.state(1) is resting
    worn(rig, 0)
    assert rig.transport.host_of(0).requests(Op.CLOSE)
    rig.die(0, exit_status=0)
    rig.hello(0)
    rig.hello(1)
    assert rig.state(1) is resting
    assert rig.slot(1).is_callable  # it has come along


def test_the_loss_of_a_worn_host_replaces_it() -> None:
    rig = shared(2)
    worn(rig, 0)
    rig.deliver()
    rig.send(1)
    rig.die(1)
    recover(rig, 0, 1)
    rig.deliver()
    assert rig.ready() == [0, 1]
    rig.send(0)
    rig.stepped(0, done=True, after=AfterStep.RESETS)
    assert rig.slot(0).phase is Phase.RESETTING
    assert rig.supervisor.statistics.recycled == 0


def test_a_neighbour_that_raises_is_repaired_before_a_worn_host_is_replaced() -> None:
    rig = shared(2, auto_reset=False)
    worn(rig, 0)
    rig.send(1)
    rig.fail(1)
    assert isinstance(rig.error(1), EnvRaised)
    assert rig.state(1) is EnvState.NEED_RESET
    assert rig.transport.host_of(0).requests(Op.CLOSE)
