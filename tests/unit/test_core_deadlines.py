"""Deadlines: exactly at the limit, whose limit it is, and what has arrived by then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.core.deadlines import OwnLimit
from envmgr.core.table import NEVER
from envmgr.errors import EnvCrash, EnvTimeout
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Transport
from envmgr.wire.messages import AfterStep, FailureKind, Op
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import recover_all, rows_reset_in_next_step, shared

pytestmark = over_routes


# -- limits ---------------------------------------------------------------------------------------


def test_a_very_short_limit_of_one_call_has_nobody_look_all_the_time() -> None:
    rig = Rig(2, deadlines=Deadlines()).launch()
    limits, env = rig.hosts.limits, rig.slot()
    limits.set_own(env, OwnLimit(frozenset({Phase.STEPPING}), 1e-4, "timeout_s"))
    limits.finished(env.group)
    assert env.group.deadline >= rig.clock() + 0.05


PATIENCE_S = Transport.kill_patience_s
LIMITS = Deadlines(step_s=2.0, reset_s=4.0, connect_s=8.0, close_s=1.0)
TICK = 1 / 64


def in_work(work: Phase, deadlines: Deadlines = LIMITS) -> Rig:
    """Return a rig whose env 0 has just begun `work`."""
    rig = Rig(2, deadlines=deadlines, auto_reset=work is not Phase.CALLING).launch()
    if work is Phase.STEPPING:
        rig.send(0)
    elif work is Phase.CANCELLING:
        rig.send(0)
        rig.reset()
    elif work is Phase.RESETTING:
        rig.reset()
    elif work is Phase.CALLING:
        rig.call()
    elif work is Phase.STARTING:
        rig.send(0)
        rig.die()
        rig.deliver(0)
    elif work is Phase.ENDING:
        rig.send(0)
        rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
        rig.deliver(0)
    assert rig.slot().phase is work
    return rig


TIMED = [
    (Phase.STEPPING, 2.0, "step_timeout", "step"),
    (Phase.CANCELLING, 2.0, "step_timeout", "cancelled step"),
    (Phase.RESETTING, 4.0, "reset_timeout", "reset"),
    (Phase.CALLING, 4.0, "reset_timeout", "call"),
    (Phase.STARTING, 8.0, "connect_timeout", "construction"),
]
every_limit = pytest.mark.parametrize(
    ("work", "limit_s", "key", "during"), TIMED, ids=[work.name for work, *_ in TIMED]
)


@every_limit
def test_a_limit_passes_exactly_when_it_is_reached(
    work: Phase, limit_s: float, key: str, during: str
) -> None:
    rig = in_work(work)
    host = rig.transport.host_of(0)
    failures = rig.supervisor.statistics.latest_failures
    before = len(failures)
    assert rig.slot().deadline == rig.clock() + limit_s
    assert rig.hosts.limits.earliest <= rig.slot().deadline
    rig.advance(limit_s - TICK)
    assert len(failures) == before
    assert not host.killed
    rig.advance(TICK)
    assert host.killed
    assert len(failures) == before + 1
    failure = failures[-1]
    assert isinstance(failure, EnvTimeout)
    assert isinstance(failure, TimeoutError)
    assert failure.limit_s == limit_s
    assert failure.during == during
    assert f"exceeded the {limit_s:g} s of {key} in its {during}" in str(failure)


def test_a_step_that_exceeds_its_limit_while_there_is_no_memory_does_so_when_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(env_id: int) -> None:
        raise MemoryError

    rig = in_work(Phase.STEPPING)
    with monkeypatch.context() as patched:
        patched.setattr(rig.supervisor.table.observed, "shown_again", fail)
        with pytest.raises(MemoryError):
            rig.advance(2.0)
    assert not rig.supervisor.statistics.failures_by_env
    rig.advance(0.0)
    assert isinstance(rig.deliver(0)[0].info["error"], EnvTimeout)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


@every_limit
def test_what_arrived_by_then_counts(work: Phase, limit_s: float, key: str, during: str) -> None:
    rig = in_work(work)
    host = rig.transport.host_of(0)
    before = len(rig.supervisor.statistics.latest_failures)
    reply: dict[Phase, tuple[Op, Any]] = {
        Phase.STEPPING: (Op.STEPPED, ("next", 1.0, False, {}, 0)),
        Phase.CANCELLING: (Op.STEPPED, ("next", 1.0, False, {}, 0)),
        Phase.RESETTING: (Op.RESET_DONE, ("first", {})),
        Phase.CALLING: (Op.RESULT, 1),
        Phase.STARTING: (Op.HELLO, host.description),
    }
    rig.transport.reply(0, *reply[work], after_s=limit_s)
    rig.advance(limit_s)
    assert not host.killed
    assert len(rig.supervisor.statistics.latest_failures) == before


def test_a_grace_that_has_passed_is_no_failure() -> None:
    rig = in_work(Phase.ENDING)
    host = rig.transport.host_of(0)
    rig.advance(1.0 - TICK)
    assert not host.killed
    rig.advance(TICK)
    assert host.killed
    assert rig.slot().phase is Phase.STARTING
    assert rig.supervisor.statistics.latest_failures == type(
        rig.supervisor.statistics.latest_failures
    )(maxlen=100)


def test_without_limits_nothing_ever_passes() -> None:
    for work in (Phase.STEPPING, Phase.RESETTING, Phase.CALLING, Phase.CANCELLING):
        rig = in_work(work, Deadlines())
        assert rig.slot().deadline == NEVER
        rig.advance(1e9)
        assert rig.slot().phase is work


def test_each_request_has_a_limit_of_its_own() -> None:
    rig = Rig(deadlines=LIMITS).launch()
    for _ in range(5):
        rig.send(0)
        rig.advance(1.5)
        rig.stepped(0)
        rig.deliver(0)
        rig.advance(1.5)
    assert rig.ready() == [0]
    assert rig.supervisor.statistics.failures_by_env == {}


def test_the_reset_after_a_step_begins_its_own_limit_when_the_step_is_done() -> None:
    rig = Rig(deadlines=LIMITS).launch()
    rig.send(0)
    rig.advance(1.5)
    rig.stepped(0, done=True, after=AfterStep.RESETS)
    rig.deliver(0)
    rig.advance(4.0 - TICK)
    assert rig.state() is EnvState.RESET
    rig.advance(TICK)
    assert rig.transport.host_of(0).generation_of(0) == 1


@pytest.mark.parametrize("n_hosts", [None, 1])
def test_a_limit_that_passes_while_it_is_looked_for_is_found_at_the_next_look(
    n_hosts: int | None,
) -> None:
    for n_reads in range(8):
        rig = Rig(2, deadlines=LIMITS, num_workers=n_hosts).launch()
        rig.send({0: 1})
        deadline = rig.clock() + 2.0
        rig.clock.advance_to(deadline - TICK)
        rig.hosts.limits.earliest = rig.clock()  # it may be too early
        limits, reads = rig.hosts.limits, itertools.count()

        def clock(rig: Rig = rig, reads: Iterator[int] = reads, n_reads: int = n_reads) -> float:
            if next(reads) == n_reads:
                rig.clock.advance(TICK)
            return rig.clock()

        limits.clock = clock
        rig.supervisor.expire()
        limits.clock = rig.clock
        rig.clock.advance_to(deadline)
        rig.pump()
        assert rig.supervisor.statistics.failures_by_env == {0: 1}, n_reads


@pytest.mark.parametrize(
    ("deadlines", "within_the_step"),
    [(Deadlines(), True), (Deadlines(step_s=2.0), False), (Deadlines(reset_s=4.0), False)],
)
def test_a_reset_is_part_of_a_step_where_neither_has_a_limit(
    deadlines: Deadlines, within_the_step: bool
) -> None:
    rig = Rig(deadlines=deadlines, reset_inplace=True).launch()
    rig.reset()
    assert rig.requests(Op.RESET)[-1].payload.plan.inplace == within_the_step
    rig.reset_done()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.RESETS)
    rig.advance(2.0)  # of the step's limit nothing is left
    assert rig.deliver() == {}
    rig.reset_done()
    assert [*rig.deliver()] == [0]
    assert rig.supervisor.statistics.failures_by_env == {}


def test_only_the_env_that_is_late_is_given_up() -> None:
    rig = Rig(3, deadlines=LIMITS).launch()
    rig.send(0)
    rig.advance(1.0)
    rig.send(1)
    rig.advance(1.0)
    assert rig.slot(0).timestep is not None
    assert rig.slot(1).timestep is None
    rig.advance(1.0)
    assert rig.slot(1).timestep is not None
    assert rig.supervisor.statistics.failures_by_env == {0: 1, 1: 1}
    assert rig.ready() == [2]


def test_several_limits_at_one_moment() -> None:
    rig = Rig(3, deadlines=LIMITS).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    rig.stepped(1)
    rig.advance(2.0)
    assert rig.supervisor.statistics.failures_by_env == {0: 1, 2: 1}
    assert list(rig.deliver()) == [0, 1, 2]


def test_an_answered_request_never_times_out() -> None:
    rig = Rig(deadlines=LIMITS).launch()
    rig.send(0)
    rig.stepped()
    assert rig.slot().deadline == NEVER
    rig.advance(100.0)
    assert rig.supervisor.statistics.failures_by_env == {}


def test_the_earliest_deadline_is_never_too_late() -> None:
    rig = Rig(3, deadlines=LIMITS, has_block=False).launch()
    for env_id in (0, 1, 2):
        rig.send(env_id)
        rig.clock.advance(0.5)
    deadlines = [slot.deadline for slot in rig.supervisor.envs]
    assert rig.hosts.limits.earliest == min(deadlines)
    rig.advance(min(deadlines) - rig.clock())
    left = [slot.deadline for slot in rig.supervisor.envs]
    assert rig.hosts.limits.earliest <= min(left)


def test_a_deadline_may_be_thought_earlier_than_it_is_and_nothing_happens_then() -> None:
    rig = Rig(2, deadlines=LIMITS).launch()
    rig.send(0)
    rig.clock.advance(1.0)
    rig.send(1)
    rig.stepped(0)
    assert rig.hosts.limits.earliest < rig.slot(1).deadline
    rig.advance(1.0)
    assert rig.hosts.limits.earliest == rig.slot(1).deadline
    assert rig.slot(1).phase is Phase.STEPPING


def test_a_killed_host_that_does_not_die_is_given_up_again_and_again_and_never_replaced() -> None:
    rig = Rig(deadlines=LIMITS, kill_takes_s=None).launch()
    rig.send(0)
    rig.advance(2.0)
    host = rig.transport.host_of(0)
    assert host.killed
    rig.advance(PATIENCE_S - TICK)
    assert rig.transport.given_up == []
    rig.advance(TICK)
    assert rig.transport.given_up == [host.host_id]
    rig.run(2 * PATIENCE_S)
    assert rig.transport.given_up == [host.host_id] * 3
    assert rig.transport.killed == [host.host_id]
    assert len(rig.transport.hosts) == 1
    rig.die()
    assert rig.transport.host_of(0).generation_of(0) == 1
    rig.run(PATIENCE_S)
    assert rig.transport.given_up == [host.host_id] * 3


def test_with_no_grace_a_host_is_killed_as_soon_as_it_is_asked() -> None:
    rig = Rig(deadlines=Deadlines(close_s=0.0)).launch()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
    assert rig.transport.hosts[1].killed
    assert rig.slot().phase is Phase.STARTING


def test_a_host_that_hangs_in_a_cancelled_step_is_replaced_and_reset() -> None:
    rig = in_work(Phase.CANCELLING)
    rig.advance(2.0)
    assert rig.state() is EnvState.RESET
    rig.hello()
    rig.reset_done()
    assert 0 in rig.ready()
    assert rig.identity_holds()
    assert rig.supervisor.statistics.abnormal == 0


def test_a_renewal_that_hangs_again_and_again_waits_longer_and_longer() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = Rig(deadlines=LIMITS, policy=policy).launch()
    rig.die()
    starts = [rig.clock()]
    for _ in range(4):
        generation = rig.slot().generation
        while rig.slot().generation == generation:
            rig.advance(0.25)
        starts.append(rig.clock())
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == [8.5, 9.0, 10.0, 12.0]


# -- rows that begin with the next step of others -------------------------------------------------


def test_time_limits_begin_with_the_step_of_the_others() -> None:
    rig = rows_reset_in_next_step(deadlines=Deadlines(step_s=1.0, reset_s=1.0))
    rig.advance(50.0)
    assert rig.transport.killed == []
    rig.send({1: 1, 2: 2})
    rig.advance(0.5)
    assert rig.transport.killed == []
    rig.stepped(1)
    rig.stepped(2)
    rig.advance(5.0)
    assert len(rig.transport.killed) == 1
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


# -- hosts of several envs: limits ----------------------------------------------------------------


HOST_LIMITS = Deadlines(step_s=2.0, reset_s=4.0, connect_s=8.0)


def test_a_host_announces_its_work_only_where_there_are_limits() -> None:
    def announced(**options: Any) -> frozenset[int]:
        return shared(2, **options).transport.host_of(0).spec.settings.announced

    building = {Op.HELLO, Op.RENEW}
    assert announced() == building
    assert announced(deadlines=Deadlines(step_s=1.0)) > building | {Op.STEP, Op.RESET, Op.CALL}
    assert announced(deadlines=Deadlines(reset_s=1.0)) > building | {Op.STEP, Op.RESET, Op.CALL}
    rig = Rig(2, deadlines=HOST_LIMITS).launch()
    assert rig.transport.host_of(0).spec.settings.announced == frozenset()


def test_a_limit_counts_from_when_the_work_began() -> None:
    rig = shared(deadlines=HOST_LIMITS)
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
    rig = shared(deadlines=HOST_LIMITS)
    rig.send({0: 1})
    rig.send({1: 1})
    rig.began(1)
    rig.advance(2.0)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    assert "shared with env 1" in str(rig.error(0))


def test_a_silent_host_times_out_from_when_it_could_have_begun() -> None:
    rig = shared(deadlines=HOST_LIMITS)
    rig.send({2: 1})
    rig.advance(1.0)
    rig.send({0: 1})
    rig.advance(0.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {2: 1}


def test_silence_after_a_reply_counts_from_the_reply() -> None:
    rig = shared(deadlines=HOST_LIMITS)
    rig.send({0: 1, 1: 1})
    rig.began(0)
    rig.advance(1.5)
    rig.stepped(0)
    rig.advance(1.75)
    assert not rig.transport.killed
    rig.advance(0.25)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}


def test_silence_does_not_count_from_before_the_request() -> None:
    rig = shared(deadlines=HOST_LIMITS)
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
    rig = shared(deadlines=HOST_LIMITS)
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
    rig = Rig(3, num_workers=1, deadlines=HOST_LIMITS)
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
    rig = Rig(2, num_workers=1, deadlines=HOST_LIMITS)
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


def test_what_a_host_ran_that_exceeded_a_limit_is_not_what_the_next_one_runs() -> None:
    policy = FailurePolicy(retry_waiting_s=0.0)
    deadlines = Deadlines(step_s=2.0, connect_s=8.0)
    rig = shared(2, has_block=True, policy=policy, deadlines=deadlines)
    assert rig.transport.shared is not None
    block = rig.transport.shared.block
    assert block is not None
    rig.send({0: 1, 1: 1})
    block.running[:], block.since[:] = 1 + 1, rig.clock()
    rig.run(2.0)
    assert rig.transport.killed
    assert "env 1 " in str(rig.error(1))
    assert "step_timeout" in str(rig.error(1))
    rig.run(0.25)  # its death comes, and another one is started
    assert block.running.tolist() == [0]
    rig.began(0)
    rig.run(7.5)
    assert len(rig.supervisor.statistics.latest_failures) == 1
    rig.run(0.25)
    text = str(rig.supervisor.statistics.latest_failures[-1])
    assert "env 0 (generation 1) exceeded the 8 s of connect_timeout" in text


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
    recover_all(rig, 1, 2)
    rig.deliver()
    assert rig.ready() == [1, 2]


def test_a_repeated_request_is_limited_too() -> None:
    rig = shared(2, deadlines=HOST_LIMITS)
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
