"""Explicit resets, whatever the env is doing: every state x phase that can be met.

Each row of the table brings an env into a situation. There it is reset; then everybody answers as
they should, and the env has to come to RUN by a reset with the right params and seed, with nothing
delivered of what was given up, and with nothing left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from envmgr.core import Next, Phase
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.types import Once
from envmgr.wire.messages import AfterStep, FailureKind, Op
from tests.cases import for_each
from tests.fake_hosts import FakeEnvs, ObsTag
from tests.rig import Rig, over_routes

pytestmark = over_routes

RETRIES = FailurePolicy(max_retry=2, retry_waiting_s=0.5, max_failures=10)
RENEWS = FailurePolicy(
    max_retry=2, retry_waiting_s=0.5, max_failures=10, renew_between_attempts=True
)
SPENT = FailurePolicy(max_failures=0)
DROPS = FailurePolicy(max_failures=0, drop_exhausted=True)
OLD = {"level": "old"}


class Situation(NamedTuple):
    """How to get there, and what is there then.

    Attributes:
        options: of the rig.
        begin: what happens to it.
        state: of the env.
        phase: of its host.
        owes: whether an action of it is given up by a reset.
        joins: whether a reset without news joins one that is running already.
        follow_up: what follows the phase.
    """

    options: dict[str, Any]
    begin: Callable[[Rig], object]
    state: EnvState
    phase: Phase
    owes: bool = False
    joins: bool = False
    follow_up: Next | None = None


def finish(rig: Rig, *, delivered: bool = True, **how: Any) -> None:
    """End the episode."""
    rig.send(0)
    rig.stepped(0, "terminal", done=True, **how)
    if delivered:
        rig.deliver(0)


def lose_step(rig: Rig, *, delivered: bool = True) -> None:
    """Have the host die in a step."""
    rig.send(0)
    rig.die()
    if delivered:
        rig.deliver(0)


def all_of(*steps: Callable[[Rig], object]) -> Callable[[Rig], None]:
    def run(rig: Rig) -> None:
        for step in steps:
            step(rig)

    return run


def step_replied(rig: Rig) -> None:
    rig.send(0)
    rig.stepped(0)


def step_raises(rig: Rig) -> None:
    rig.send(0)
    rig.fail()
    rig.deliver(0)


def garbage(rig: Rig) -> None:
    rig.transport.garbage(0)
    rig.pump()


def step_breaks_protocol(rig: Rig) -> None:
    rig.send(0)
    garbage(rig)
    rig.deliver(0)


def reset_fails(rig: Rig) -> None:
    rig.fail(0, "reset")


def construction_fails(rig: Rig) -> None:
    rig.fail(0, "construction")


def host_exits(rig: Rig) -> None:
    rig.die(0, 0)


def call_exits(rig: Rig) -> None:
    rig.call()
    rig.fail(0, "call", kind=FailureKind.EXITED)


I = EnvState.INIT  # noqa: E741 - the table below stays a table
R, S, N = EnvState.RUN, EnvState.RESET, EnvState.NEED_RESET
D, E = EnvState.DONE, EnvState.ERROR
recycle = AfterStep.WANTS_RECYCLING
resets = AfterStep.RESETS
slow_kill = {"kill_takes_s": None}
hello = Rig.hello
die = Rig.die

SITUATIONS: dict[str, Situation] = {
    # RUN
    "ready": Situation({}, lambda rig: None, R, Phase.IDLE),
    "stepping": Situation({}, lambda rig: rig.send(0), R, Phase.STEPPING, owes=True),
    "timestep waits": Situation({}, step_replied, R, Phase.IDLE, owes=True),
    "in a call": Situation({}, Rig.call, R, Phase.CALLING),
    "doomed, dying": Situation(slow_kill, garbage, R, Phase.ENDING, follow_up=Next.RENEW_HOST),
    "doomed, starting": Situation({}, die, R, Phase.STARTING),
    "doomed, pausing": Situation(
        {"policy": RETRIES}, all_of(die, die), R, Phase.PAUSING, follow_up=Next.RENEW_HOST
    ),
    "doomed, resetting": Situation({}, all_of(die, hello), R, Phase.RESETTING, joins=True),
    "doomed, before a retry": Situation(
        {"policy": RETRIES},
        all_of(die, hello, reset_fails),
        R,
        Phase.PAUSING,
        follow_up=Next.RESET,
    ),
    "doomed, repaired": Situation({}, all_of(die, hello, Rig.reset_done), R, Phase.IDLE),
    "doomed, repaired, in a call": Situation(
        {}, all_of(die, hello, Rig.reset_done, Rig.call), R, Phase.CALLING
    ),
    "doomed, unattended": Situation({"auto_reset": False}, all_of(die, hello), R, Phase.IDLE),
    "doomed, unattended, starting": Situation({"auto_reset": False}, die, R, Phase.STARTING),
    "doomed, exhausted": Situation({"policy": SPENT}, die, R, Phase.IDLE),
    "doomed, dropped": Situation({"policy": DROPS}, die, R, Phase.IDLE),
    "doomed, exhausted, dying": Situation(
        {"policy": SPENT, **slow_kill}, garbage, R, Phase.ENDING, follow_up=Next.NOTHING
    ),
    "doomed, timestep waits": Situation(
        {}, all_of(step_replied, die), R, Phase.STARTING, owes=True
    ),
    # RESET
    "resetting after an episode": Situation(
        {}, lambda rig: finish(rig, after=resets), S, Phase.RESETTING, joins=True
    ),
    "resetting, timestep waits": Situation(
        {},
        lambda rig: finish(rig, delivered=False, after=resets),
        S,
        Phase.RESETTING,
        owes=True,
        joins=True,
    ),
    "resetting in place": Situation(
        {"reset_inplace": True},
        lambda rig: finish(rig, delivered=False, after=resets),
        S,
        Phase.RESETTING,
        owes=True,
        joins=True,
    ),
    "resetting after an order": Situation({}, finish, S, Phase.RESETTING, joins=True),
    "resetting for its user": Situation({}, Rig.reset, S, Phase.RESETTING, joins=True),
    "resetting after a failure": Situation({}, step_raises, S, Phase.RESETTING, joins=True),
    "before a retry": Situation(
        {"policy": RETRIES},
        all_of(finish, reset_fails),
        S,
        Phase.PAUSING,
        follow_up=Next.RESET,
    ),
    "before a retry with a new env": Situation(
        {"policy": RENEWS},
        all_of(finish, reset_fails),
        S,
        Phase.PAUSING,
        follow_up=Next.RENEW_ENV,
    ),
    "building a new env for a retry": Situation(
        {"policy": RENEWS},
        all_of(finish, reset_fails, lambda rig: rig.advance(0.5)),
        S,
        Phase.STARTING,
    ),
    "recycling": Situation(
        {},
        lambda rig: finish(rig, after=recycle),
        S,
        Phase.ENDING,
        follow_up=Next.RENEW_HOST,
    ),
    "recycling in place": Situation(
        {"reset_inplace": True},
        lambda rig: finish(rig, delivered=False, after=recycle),
        S,
        Phase.ENDING,
        owes=True,
        follow_up=Next.RENEW_HOST,
    ),
    "recycled": Situation(
        {}, all_of(lambda rig: finish(rig, after=recycle), host_exits), S, Phase.STARTING
    ),
    "cancelling a step": Situation(
        {}, all_of(lambda rig: rig.send(0), Rig.reset), S, Phase.CANCELLING, joins=True
    ),
    "a call, then a reset": Situation({}, all_of(Rig.call, Rig.reset), S, Phase.CALLING),
    # NEED_RESET
    "needs a reset": Situation({"auto_reset": False}, finish, N, Phase.IDLE),
    "needs a reset, timestep waits": Situation(
        {"auto_reset": False},
        lambda rig: finish(rig, delivered=False),
        N,
        Phase.IDLE,
        owes=True,
    ),
    "needs a reset after a failure": Situation({"auto_reset": False}, step_raises, N, Phase.IDLE),
    "needs a reset, recycling": Situation(
        {"auto_reset": False},
        lambda rig: finish(rig, after=recycle),
        N,
        Phase.ENDING,
        follow_up=Next.RENEW_HOST,
    ),
    "needs a reset, starting": Situation(
        {"auto_reset": False}, all_of(finish, die), N, Phase.STARTING
    ),
    "needs a reset, dying": Situation(
        {"auto_reset": False, **slow_kill},
        all_of(finish, garbage),
        N,
        Phase.ENDING,
        follow_up=Next.RENEW_HOST,
    ),
    "needs a reset, pausing": Situation(
        {"auto_reset": False, "policy": RETRIES},
        all_of(finish, die, die),
        N,
        Phase.PAUSING,
        follow_up=Next.RENEW_HOST,
    ),
    "needs a reset, in a call": Situation(
        {"auto_reset": False}, all_of(finish, Rig.call), N, Phase.CALLING
    ),
    # DONE
    "done": Situation({"episode_num": 1}, finish, D, Phase.IDLE),
    "done, timestep waits": Situation(
        {"episode_num": 1}, lambda rig: finish(rig, delivered=False), D, Phase.IDLE, owes=True
    ),
    "done, host died": Situation({"episode_num": 1}, all_of(finish, die), D, Phase.IDLE),
    "done, host dying": Situation(
        {"episode_num": 1, **slow_kill},
        all_of(finish, garbage),
        D,
        Phase.ENDING,
        follow_up=Next.NOTHING,
    ),
    "done, in a call": Situation({"episode_num": 1}, all_of(finish, Rig.call), D, Phase.CALLING),
    "done, after a call that exited": Situation(
        {"episode_num": 1, **slow_kill},
        all_of(finish, call_exits),
        D,
        Phase.ENDING,
        follow_up=Next.NOTHING,
    ),
    "dropped": Situation({"policy": DROPS}, lose_step, D, Phase.IDLE),
    "dropped, host asked to end": Situation(
        {"policy": DROPS}, step_raises, D, Phase.ENDING, follow_up=Next.NOTHING
    ),
    "dropped, timestep waits": Situation(
        {"policy": DROPS}, lambda rig: lose_step(rig, delivered=False), D, Phase.IDLE, owes=True
    ),
    # ERROR
    "failed, dying": Situation(
        slow_kill, step_breaks_protocol, E, Phase.ENDING, follow_up=Next.RENEW_HOST
    ),
    "failed, abnormal timestep waits": Situation(
        slow_kill,
        all_of(lambda rig: rig.send(0), garbage),
        E,
        Phase.ENDING,
        owes=True,
        follow_up=Next.RENEW_HOST,
    ),
    "failed, host asked to end": Situation(
        {}, all_of(finish, reset_fails), E, Phase.ENDING, follow_up=Next.RENEW_HOST
    ),
    "failed, pausing": Situation(
        {"policy": RETRIES},
        all_of(lose_step, die),
        E,
        Phase.PAUSING,
        follow_up=Next.RENEW_HOST,
    ),
    "exhausted": Situation({"policy": SPENT}, lose_step, E, Phase.IDLE),
    "exhausted, host asked to end": Situation(
        {"policy": SPENT}, step_raises, E, Phase.ENDING, follow_up=Next.NOTHING
    ),
    "exhausted, host dying": Situation(
        {"policy": SPENT, **slow_kill},
        step_breaks_protocol,
        E,
        Phase.ENDING,
        follow_up=Next.NOTHING,
    ),
    # INIT
    "renewed, starting": Situation({}, lose_step, I, Phase.STARTING),
    "renewed, timestep waits": Situation(
        {}, lambda rig: lose_step(rig, delivered=False), I, Phase.STARTING, owes=True
    ),
    "building a new env": Situation({"policy": RENEWS}, step_raises, I, Phase.STARTING),
    "construction failed": Situation(
        {"policy": RETRIES},
        all_of(lose_step, construction_fails),
        E,
        Phase.ENDING,
        follow_up=Next.RENEW_HOST,
    ),
}
every_situation = for_each("name", SITUATIONS)


def situation(name: str) -> Rig:
    row = SITUATIONS[name]
    rig = Rig(2, deadlines=Deadlines(close_s=1.0), **row.options)
    rig.launch(seeds={0: 7}, params={0: OLD})
    row.begin(rig)
    slot = rig.slot()
    assert (rig.state(), slot.phase) == (row.state, row.phase)
    assert slot.owed is row.owes
    if row.follow_up is not None:
        assert slot.follow_up is row.follow_up
    return rig


def let_everybody_answer(rig: Rig) -> None:
    """Have all hosts answer what they were asked and will be asked, and let time pass."""
    transport = rig.transport
    transport.answer = FakeEnvs()
    for host in list(transport.hosts.values()):
        if host.reported or host.ended:
            continue
        if host.killed:
            transport.die(host.env_id)
        elif rig.supervisor.hosts.group_of_host.get(host.host_id) is not None:
            slot = rig.slot(host.env_id)
            if slot.phase not in (Phase.IDLE, Phase.PAUSING):
                for after_s, arrival in _answers(rig, host):
                    transport.arrive(host.host_id, arrival, after_s)
    rig.run(60.0)


def _answers(rig: Rig, host: Any) -> Any:
    request = host.request
    if request.op == Op.STEP and rig.slot(host.env_id).phase is Phase.RESETTING:
        tag = ObsTag(request.env_id, request.generation, request.request_id, "first")
        return [(0.0, request._replace(op=Op.RESET_DONE, payload=(tag, {})))]
    if request.op == Op.STEP:
        return [(0.0, request._replace(op=Op.STEPPED, payload=("late", 1.0, False, {}, 0)))]
    return rig.transport.answer(host, request) if rig.transport.answer else []


NEWS: dict[str, tuple[dict[str, Any] | None, int | None]] = {
    "nothing new": (None, None),
    "new params": ({"level": "new"}, None),
    "params cleared": ({}, None),
    "params for once": (Once(level="new"), None),
    "new seed": (None, 99),
    "both": ({"level": "new"}, 99),
}


def test_the_table_has_every_state_and_every_phase() -> None:
    states = {row.state for row in SITUATIONS.values()}
    phases = {row.phase for row in SITUATIONS.values()}
    followings = {row.follow_up for row in SITUATIONS.values()} - {None}
    assert states == set(EnvState) - {EnvState.VOID}
    assert phases == set(Phase) - {Phase.POSTED}
    assert followings == set(Next)


@every_situation
def test_a_reset_brings_an_env_to_run_from_wherever_it_is(name: str) -> None:
    for news in NEWS:
        _check_that_a_reset_brings_it_to_run(name, news)


def _check_that_a_reset_brings_it_to_run(name: str, news: str) -> None:
    rig = situation(name)
    params, seed = NEWS[news]
    rig.slot().new_seed = seed
    rig.reset(0, params)
    assert rig.state() is EnvState.RESET
    assert rig.ready() == [1]
    assert rig.identity_holds()
    let_everybody_answer(rig)

    assert rig.state() is EnvState.RUN
    assert rig.ready() == [0, 1]
    slot = rig.slot()
    assert slot.phase is Phase.IDLE
    assert slot.host_id is not None
    assert slot.failed_while_ready is slot.fresh is None
    assert [slot.again, slot.awaits_reset, slot.dropped, slot.owed] == [False] * 4
    assert slot.new_seed is None
    assert slot.seed is None
    assert rig.deliver() == {}
    expected = OLD if params is None else params
    kept = {} if isinstance(params, Once) else expected
    assert slot.reset_params == kept
    if params is not None or not SITUATIONS[name].joins:
        assert rig.reset_requests()[-1].params == expected
        assert rig.reset_requests()[-1].plan.params == kept
    if seed is not None:
        assert rig.reset_requests()[-1].seed == 99
        assert [request.seed for request in rig.reset_requests()].count(99) == 1  # it is used once
    assert rig.identity_holds()
    assert rig.supervisor.statistics.outstanding == 0


@every_situation
def test_an_action_that_is_given_up_is_counted_as_cancelled_at_once(name: str) -> None:
    rig = situation(name)
    before = rig.supervisor.statistics.cancelled
    rig.reset()
    assert rig.supervisor.statistics.cancelled == before + SITUATIONS[name].owes
    rig.reset()
    let_everybody_answer(rig)
    assert rig.supervisor.statistics.cancelled == before + SITUATIONS[name].owes


@every_situation
def test_a_reset_with_nothing_new_joins_one_that_runs(name: str) -> None:
    rig = situation(name)
    n_orders = len(rig.reset_requests())
    rig.reset()
    let_everybody_answer(rig)
    runs_already = SITUATIONS[name].joins and SITUATIONS[name].phase is Phase.RESETTING
    assert len(rig.reset_requests()) == n_orders + (not runs_already)


@every_situation
def test_the_env_goes_on_as_any_other_afterwards(name: str) -> None:
    rig = situation(name)
    rig.reset(0, {"level": "new"})
    let_everybody_answer(rig)
    first = rig.obs()
    assert isinstance(first, ObsTag)
    assert first.generation == rig.slot().generation
    rig.transport.answer = FakeEnvs(episode_length=2)
    env = rig.transport.host_of(0).envs[0]
    env.plan, env.step = rig.reset_requests()[-1].plan, 0  # which the test itself may have answered
    for _ in range(3):
        if rig.ready() != [0, 1]:
            break
        rig.send({0: 1})
        rig.pump()
        timestep = rig.deliver(0)[0]
        assert "abnormal" not in timestep.info
        assert timestep.info["action"] == 1
        rig.run(1.0)
    assert rig.slot(1).generation == 0  # and nobody else noticed anything
    assert len(rig.reset_requests(1)) == 1


@every_situation
def test_two_resets_in_a_row_end_as_the_second_says(name: str) -> None:
    rig = situation(name)
    rig.reset(0, {"level": "first"})
    rig.reset(0, {"level": "second"})
    let_everybody_answer(rig)
    assert rig.reset_requests()[-1].params == {"level": "second"}
    assert rig.ready() == [0, 1]


@every_situation
def test_a_host_that_dies_after_the_reset_was_called_does_not_stop_it(name: str) -> None:
    rig = situation(name)
    rig.slot().base_seed = None
    rig.reset(0, {"level": "new"})
    host_id = rig.slot().host_id
    if host_id is not None and not rig.transport.host_of(0).ended:
        rig.die()
    exhausts = rig.state() in (EnvState.ERROR, EnvState.DONE)
    if exhausts:  # where not one failure is allowed: say so, and try once more
        rig.reset(0, {"level": "new"})
    let_everybody_answer(rig)
    assert rig.ready() == [0, 1]
    assert rig.reset_requests()[-1].params == {"level": "new"}


# -- the cancelled step, in detail ----------------------------------------------------------------


def cancelled(params: dict[str, Any] | None = None, **options: Any) -> Rig:
    rig = Rig(**options).launch(params={0: OLD})
    rig.send(0)
    rig.reset(0, params)
    return rig


def test_the_reset_waits_for_the_reply_of_a_cancelled_step() -> None:
    rig = cancelled()
    assert len(rig.reset_requests()) == 1
    rig.stepped(0, "late")
    assert len(rig.reset_requests()) == 2
    assert rig.deliver(0) == {}
    rig.reset_done(0, "first")
    assert rig.obs() == "first"


@pytest.mark.parametrize("params", [None, {"level": "new"}])
def test_an_episode_that_ends_in_a_cancelled_step_counts_for_nothing(params: Any) -> None:
    rig = cancelled(params, episode_num=2)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    assert rig.slot().episodes_done == 0
    assert rig.supervisor.statistics.episodes == 0
    assert len(rig.reset_requests()) == 1  # the host has begun one by itself
    rig.reset_done(0, "its own")
    if params is None:
        assert rig.ready() == [0]
        assert rig.obs() == "its own"
    else:
        assert rig.ready() == []  # with the old params: once more
        assert rig.reset_requests()[-1].params == params
        rig.reset_done(0, "first")
        assert rig.ready() == [0]
        assert rig.obs() == "first"


def test_a_worker_may_want_to_be_replaced_after_a_cancelled_step() -> None:
    rig = cancelled({"level": "new"})
    rig.stepped(0, done=True, after=AfterStep.WANTS_RECYCLING)
    rig.die(0, 0)
    rig.hello()
    rig.reset_done()
    assert rig.ready() == [0]
    assert [request.params for request in rig.reset_requests()] == [OLD, {"level": "new"}]
    assert rig.supervisor.statistics.recycled == 1


@pytest.mark.parametrize("renew", [False, True])
def test_a_cancelled_step_that_fails_is_a_failure_and_the_reset_goes_on(renew: bool) -> None:
    rig = cancelled({"level": "new"}, policy=FailurePolicy(renew_between_attempts=renew))
    rig.fail()
    assert rig.state() is EnvState.RESET
    if renew:
        rig.hello()
    rig.reset_done()
    assert rig.ready() == [0]
    assert [request.params for request in rig.reset_requests()] == [OLD, {"level": "new"}]
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert rig.supervisor.statistics.abnormal == 0


def test_a_host_that_dies_in_a_cancelled_step_is_replaced_and_reset_once() -> None:
    rig = cancelled({"level": "new"})
    rig.die()
    assert rig.state() is EnvState.RESET
    rig.hello()
    rig.reset_done()
    assert rig.ready() == [0]
    assert [request.params for request in rig.reset_requests()] == [OLD, {"level": "new"}]


def test_a_join_becomes_another_reset_when_a_later_one_brings_news() -> None:
    rig = Rig().launch()
    rig.reset()
    rig.reset()
    rig.reset(0, {"level": "new"})
    rig.reset()
    rig.reset_done(0, "with nothing")
    assert rig.ready() == []
    rig.reset_done(0, "with news")
    assert rig.ready() == [0]
    assert [request.params for request in rig.reset_requests()] == [{}, {}, {"level": "new"}]


def test_a_failed_reset_with_news_waiting_is_retried_with_the_news_only() -> None:
    rig = Rig(policy=RETRIES).launch()
    rig.reset()
    rig.reset(0, {"level": "new"})
    rig.fail(0, "reset")
    rig.advance(0.5)
    assert rig.reset_requests()[-1].params == {"level": "new"}
    rig.reset_done()
    assert rig.ready() == [0]
