"""Deadlines: exactly at the limit, whose limit it is, and what has arrived by then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.core.table import NEVER
from envmgr.errors import EnvTimeout
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Transport
from envmgr.wire.messages import AfterStep, Op
from tests.rig import Rig, over_routes

pytestmark = over_routes

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
