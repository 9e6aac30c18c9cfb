"""How episodes begin and end, and resets whatever the env is doing: every state x phase.

Each row of the table of situations brings an env into one. There it is reset; then everybody
answers as they should, and the env has to come to RUN by a reset with the right params and seed,
with nothing delivered of what was given up, and with nothing left behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from envmgr.core import Next, Phase
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvNotReadyError, EnvProtocolError, EnvRaised, IllegalTransitionError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy, StartCaps
from envmgr.seeding import derived_seed
from envmgr.transport.base import Arrival
from envmgr.types import Once
from envmgr.wire.messages import (
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)
from tests.cases import for_each
from tests.fake_hosts import FakeEnvs, FakeHost, ObsTag
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import RESETS_IN_NEXT_STEP, recover_all, rows_reset_in_next_step, shared

pytestmark = over_routes


INF = float("inf")


# -- the end of an episode ------------------------------------------------------------------------


def test_the_host_begins_the_next_episode_by_itself() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    assert rig.state() is EnvState.RESET
    assert len(rig.reset_requests()) == 1  # nobody asks it to
    assert rig.deliver(0)[0][:3] == ("terminal", 1.0, True)
    assert rig.ready() == []
    rig.reset_done(0, "first", level=2)
    assert rig.ready() == [0]
    assert rig.obs() == "first"
    assert rig.slot().reset_info == {"level": 2}
    assert rig.supervisor.statistics.episodes == 1
    assert rig.supervisor.statistics.resets == 2


def test_a_first_observation_never_replaces_a_terminal_one_that_waits() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.reset_done(0, "first")
    assert rig.ready() == []  # pending still
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == [0]
    assert rig.obs() == "first"


def test_a_host_that_does_not_reset_by_itself_is_told_to() -> None:
    rig = Rig().launch(params={0: {"level": 3}})
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.NOTHING)
    assert rig.state() is EnvState.RESET
    assert rig.reset_requests()[-1] == ResetRequest(
        {"level": 3}, None, None, EpisodePlan(True, INF, {"level": 3}), episode=2
    )


def test_in_place_the_timestep_waits_for_the_reset() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    assert rig.slot().timestep is not None
    assert not rig.has_arrived()
    assert rig.deliver(0) == {}
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == [0]
    assert rig.obs() == "first"


@pytest.mark.parametrize("deadlines", [Deadlines(), Deadlines(reset_s=9.0)], ids=["", "limited"])
@pytest.mark.parametrize("info", [{}, {"level": 3}, {"levels": [3]}], ids=["", "some", "odd"])
def test_in_place_an_env_is_ready_with_its_timestep_whatever_its_reset_says(
    info: dict[str, Any], deadlines: Deadlines
) -> None:
    rig = Rig(reset_inplace=True, deadlines=deadlines).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("terminal", 1.0, True, {"n": 1}, AfterStep.RESETS))
    rig.transport.reply(0, Op.RESET_DONE, ("first", info))
    assert rig.exactly(0)[0].obs == "terminal"
    assert (rig.ready(), rig.obs(), rig.slot().reset_info) == ([0], "first", info)


@pytest.mark.parametrize("after", [AfterStep.NOTHING, AfterStep.WANTS_RECYCLING])
def test_in_place_the_timestep_waits_for_a_reset_that_its_host_leaves_to_others(
    after: AfterStep,
) -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("terminal", 1.0, True, {}, after))
    at_once = GatherPolicy(1, 0.0)
    found = rig.gather.some(at_once, deadline=rig.clock(), exactly=True)
    assert rig.hand_out(found) == {}
    if after is AfterStep.WANTS_RECYCLING:
        rig.die(exit_status=0)
        rig.hello()
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.obs() == "first"
    assert not rig.slot().awaits_reset


def test_in_place_only_the_end_of_an_episode_waits() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped()
    assert list(rig.deliver(0)) == [0]


def test_without_auto_reset_an_ended_env_waits_for_its_user() -> None:
    rig = Rig(auto_reset=False).launch()
    assert rig.reset_requests()[-1].plan.auto_reset is False
    rig.send(0)
    rig.stepped(0, done=True)
    assert rig.state() is EnvState.NEED_RESET
    assert rig.deliver(0)[0].done
    assert rig.ready() == []
    assert rig.slot().phase is Phase.IDLE
    rig.reset(0, {"level": 3})
    assert rig.reset_requests()[-1].params == {"level": 3}
    rig.reset_done()
    assert rig.ready() == [0]


def test_an_env_is_done_when_its_episodes_are_spent() -> None:
    rig = Rig(episode_num=2).launch()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.RESETS)
    rig.reset_done()
    rig.deliver(0)
    rig.send(0)
    rig.stepped(0, "terminal", done=True)
    assert rig.state() is EnvState.DONE
    assert rig.slot().phase is Phase.IDLE
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == []


def test_a_done_env_that_is_reset_has_a_whole_new_budget() -> None:
    rig = Rig(episode_num=2).launch()
    for _ in range(2):
        rig.send(0)
        rig.stepped(done=True, after=AfterStep.RESETS if rig.slot().episodes_done == 0 else 0)
        if rig.slot().phase is Phase.RESETTING:
            rig.reset_done()
        rig.deliver(0)
    assert rig.state() is EnvState.DONE
    rig.reset()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    assert rig.slot().episodes_done == 0
    rig.reset_done()
    assert rig.ready() == [0]


def test_an_explicit_reset_in_an_episode_spends_nothing_of_the_budget() -> None:
    rig = Rig(episode_num=2).launch()
    rig.reset()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    rig.reset_done()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.RESETS)
    assert rig.state() is EnvState.RESET


def test_without_auto_reset_the_last_episode_ends_in_done() -> None:
    rig = Rig(episode_num=1, auto_reset=False).launch()
    rig.send(0)
    rig.stepped(done=True)
    assert rig.state() is EnvState.DONE


# -- recycling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_worker_that_has_reached_a_limit_is_replaced_at_the_episodes_end(
    auto_reset: bool,
) -> None:
    rig = Rig(auto_reset=auto_reset).launch(seeds={0: 7})
    old = rig.transport.host_of(0)
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.WANTS_RECYCLING)
    assert rig.state() is (EnvState.RESET if auto_reset else EnvState.NEED_RESET)
    assert rig.deliver(0)[0].obs == "terminal"
    assert old.requests(Op.CLOSE)
    assert not old.killed
    assert rig.slot().phase is Phase.ENDING
    assert len(rig.transport.hosts) == 1  # not before the old one is gone
    rig.transport.reply(0, Op.CLOSED)
    rig.pump()
    assert len(rig.transport.hosts) == 1
    rig.die(0, exit_status=0)
    new = rig.transport.host_of(0)
    assert new is not old
    assert new.generation_of(0) == 1
    rig.hello()
    if auto_reset:
        assert rig.reset_requests()[-1].seed == derived_seed(7, 0, 1, 1)
        rig.reset_done()
        assert rig.ready() == [0]
    else:
        assert rig.state() is EnvState.NEED_RESET
        assert rig.slot().phase is Phase.IDLE
    statistics = rig.supervisor.statistics
    assert (statistics.recycled, statistics.renewals) == (1, 1)
    assert statistics.latest_failures == type(statistics.latest_failures)(maxlen=100)


def test_in_place_the_terminal_timestep_waits_for_the_new_worker_too() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.WANTS_RECYCLING)
    rig.die(0, exit_status=0)
    rig.hello()
    assert rig.deliver(0) == {}
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.obs() == "first"


def test_a_done_env_is_not_recycled() -> None:
    rig = Rig(episode_num=1).launch()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
    assert rig.state() is EnvState.DONE
    assert rig.slot().phase is Phase.IDLE
    assert rig.supervisor.statistics.recycled == 0


# -- explicit resets ------------------------------------------------------------------------------


def test_params_are_kept_for_later_resets_until_they_are_cleared() -> None:
    rig = Rig().launch(params={0: {"level": 1}})
    expected = [{"level": 1}]
    given: list[Any] = [None, {"level": 2}, None, {}, None]
    for params, found in zip(
        given, [{"level": 1}, {"level": 2}, {"level": 2}, {}, {}], strict=True
    ):
        rig.reset(0, params)
        rig.reset_done()
        expected.append(found)
    assert [request.params for request in rig.reset_requests()] == expected
    assert [request.plan.params for request in rig.reset_requests()] == expected


def test_the_callers_dict_of_params_may_be_changed_afterwards() -> None:
    rig = Rig().launch()
    params = {"level": 1}
    rig.reset(0, params)
    params["level"] = 2
    rig.reset_done()
    rig.reset()
    assert rig.reset_requests()[-1].params == {"level": 1}


# -- seeds ----------------------------------------------------------------------------------------


def test_a_seed_is_used_once_by_the_next_explicit_reset() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.slot().new_seed = 99
    rig.send(0)
    rig.stepped(done=True)  # an automatic reset passes no seed
    rig.reset_done()
    rig.deliver(0)
    rig.reset()
    rig.reset_done()
    rig.reset()
    rig.reset_done()
    assert [request.seed for request in rig.reset_requests()] == [7, None, 99, None]


def test_dynamic_seed_goes_with_the_seed() -> None:
    rig = Rig(dynamic_seed=True).launch(seeds={0: 7})
    assert rig.reset_requests()[0].dynamic_seed is True


def test_later_generations_derive_seeds_from_the_one_given_last() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed == derived_seed(7, 0, 1, 1)
    rig.reset_done()
    rig.send(0)
    rig.deliver(0)
    rig.slot().new_seed = 50
    rig.reset()
    rig.reset_done()
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed == derived_seed(50, 0, 2, 3)


def test_an_unseeded_env_stays_unseeded() -> None:
    rig = Rig().launch()
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed is None


def test_only_the_first_reset_of_a_generation_is_seeded() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.die()
    rig.hello()
    rig.reset_done()
    rig.send(0)
    rig.deliver(0)
    rig.send(0)
    rig.stepped(done=True)
    assert rig.reset_requests()[-1].seed is None


def test_a_given_seed_is_used_exactly_even_by_a_new_generation() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.slot().new_seed = 99
    rig.reset()
    rig.die()  # before that reset had succeeded
    rig.hello()
    assert rig.reset_requests()[-1].seed == 99


def test_generations_of_different_envs_have_different_seeds() -> None:
    rig = Rig(2).launch(seeds={0: 7, 1: 7})
    for env_id in (0, 1):
        rig.die(env_id)
        rig.hello(env_id)
    assert rig.reset_requests(0)[-1].seed != rig.reset_requests(1)[-1].seed


# -- resets, whatever the env is doing ------------------------------------------------------------


def test_a_void_env_cannot_be_reset() -> None:
    rig = Rig()
    with pytest.raises(IllegalTransitionError):
        rig.reset()


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


NOT_YET = StartCaps(per_s=4)
"""As many as begin in the launch of two envs: whoever begins anew waits for a second."""

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
    "its turn to be built is later": Situation(
        {"caps": NOT_YET}, lose_step, I, Phase.PAUSING, follow_up=Next.BUILD
    ),
    "its turn to be reset is later": Situation(
        {"caps": NOT_YET}, step_raises, S, Phase.PAUSING, follow_up=Next.RESET
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


# -- rows whose episodes begin with the next step of others ---------------------------------------


@pytest.mark.parametrize("reset_comes_first", [True, False])
def test_others_are_ready_without_it_and_with_it_after_their_step(reset_comes_first: bool) -> None:
    rig = rows_reset_in_next_step()
    assert (rig.ready(), rig.state(0)) == ([1, 2], EnvState.RESET)
    rig.send({1: 1, 2: 2})
    replies = [lambda: rig.reset_done(0, "new"), lambda: (rig.stepped(1), rig.stepped(2))]
    for reply in replies if reset_comes_first else reversed(replies):
        assert rig.ready() == []
        reply()
    assert [*rig.deliver()] == [1, 2]
    assert (rig.ready(), rig.obs(0)) == ([0, 1, 2], "new")
    rig.send(dict.fromkeys(range(3), 1))
    assert len(rig.requests(Op.STEP, 0)) == 2
    assert rig.identity_holds()


def test_nobody_is_ready_between_the_step_of_the_others_and_its_reset() -> None:
    rig = rows_reset_in_next_step()
    rig.send({1: 1, 2: 2})
    rig.stepped(1)
    rig.stepped(2)
    rig.deliver()
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError):
        rig.send({1: 1, 2: 2})
    rig.reset_done(0)
    assert rig.ready() == [0, 1, 2]


@pytest.mark.parametrize("batches", [(), (Batch(0, 3, False),)])
def test_who_has_no_others_cannot_begin_with_their_steps(batches: tuple[Batch, ...]) -> None:
    rig = Rig(4, batches=batches).launch()
    rig.send(dict.fromkeys(range(4), 1))
    for env_id, after in enumerate([*[AfterStep.NOTHING] * 3, RESETS_IN_NEXT_STEP]):
        ends = {"terminated": env_id == 3, "truncated": False}
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, env_id == 3, ends, after))
    timesteps = rig.hand_out(rig.gather.exactly(rig.selection(range(4))))
    error = timesteps[3].info["error"]
    assert isinstance(error, EnvProtocolError)
    assert "others" in str(error)
    assert [t.info.get("error") for t in timesteps.values()] == [None, None, None, error]


def test_when_all_have_ended_they_are_waited_for() -> None:
    rig = rows_reset_in_next_step()
    rig.send({1: 1, 2: 2})
    rig.reset_done(0)
    for env_id in (1, 2):
        rig.stepped(env_id, done=True, after=RESETS_IN_NEXT_STEP)
    assert sorted(rig.deliver()) == [1, 2]
    record = rig.supervisor.table
    rig.send(0)  # the only one in an episode
    for env_id in (1, 2):
        rig.reset_done(env_id)
    rig.stepped(0)
    rig.deliver()
    rig.send(dict.fromkeys(range(3), 1))
    for env_id in range(3):
        rig.stepped(env_id, done=True, after=AfterStep.RESETS)
    rig.reset_done(1)
    assert (rig.deliver(), rig.ready()) == ({}, [])
    rig.reset_done(0)
    rig.reset_done(2)
    assert sorted(rig.deliver()) == [0, 1, 2]
    assert (rig.ready(), 1 in record.resets_in_next_step) == ([0, 1, 2], False)


class LateRows(FakeEnvs):
    """Rows of one vector env that begin episodes late, and that fail or die now and then.

    Attributes:
        in_episode: (host_id, env_id) of rows whose actions are waited for.
        asked: of those that were sent one for the present step.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.in_episode: set[tuple[int, int]] = set()
        self.asked: dict[tuple[int, int], Message] = {}
        self._waiting: dict[tuple[int, int], Message] = {}
        self._rng = rng

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        row = (host.host_id, message.env_id)
        if message.op == Op.RESET:
            self.in_episode.add(row)
        if message.op != Op.STEP:
            return super().__call__(host, message)
        assert row in self.in_episode
        self.asked[row] = message
        mine = {r for r in self.in_episode if r[0] == host.host_id}
        if not mine <= self.asked.keys():
            return []
        steps = [self.asked.pop(r) for r in sorted(mine)]
        if self._rng.random() < 0.03:
            self._forget(host.host_id)
            failure = RemoteFailure(FailureKind.RAISED, "step", of_batch=True)
            return [(0.125, steps[0]._replace(op=Op.FAILED, payload=failure))]
        begun = self._begin(host.host_id)
        ended = [m for m in steps if self._rng.random() < 0.3]
        self.in_episode -= {(host.host_id, m.env_id) for m in ended}
        late = any(r[0] == host.host_id for r in self.in_episode)
        after = RESETS_IN_NEXT_STEP if late else AfterStep.RESETS
        replies: list[tuple[float, Arrival]] = [
            (0.125, self._stepped(m, after if m in ended else None)) for m in steps
        ]
        self._waiting |= {(host.host_id, m.env_id): m for m in ended}
        seconds = self._rng.choice((0.125, 0.5))  # first or last, as it comes
        if not late:
            replies += [(0.25, self._begun(m)) for m in self._begin(host.host_id)]
        return replies + [(seconds, self._begun(m)) for m in begun]

    def _begin(self, host_id: int) -> list[Message]:
        begun = [r for r in self._waiting if r[0] == host_id]
        self.in_episode.update(begun)
        return [self._waiting.pop(r) for r in begun]

    def _stepped(self, message: Message, after: AfterStep | None) -> Message:
        obs = ObsTag(*message[1:4], "terminal" if after else "next")
        payload = (obs, 1.0, after is not None, {}, after or AfterStep.NOTHING)
        return message._replace(op=Op.STEPPED, payload=payload)

    def _begun(self, message: Message) -> Message:
        payload = (ObsTag(*message[1:4], "first"), {})
        return message._replace(op=Op.RESET_DONE, payload=payload)

    def _forget(self, host_id: int) -> None:
        self.in_episode = {r for r in self.in_episode if r[0] != host_id}
        self.asked = {r: m for r, m in self.asked.items() if r[0] != host_id}
        self._waiting = {r: m for r, m in self._waiting.items() if r[0] != host_id}


@pytest.mark.parametrize("seed", range(3))
def test_all_that_are_ready_are_those_whose_actions_are_waited_for(seed: int) -> None:
    rng = random.Random(seed)
    envs = LateRows(rng)
    rig = Rig(
        5,
        batches=(Batch(0, 3, False), Batch(3, 2, False)),
        policy=FailurePolicy(max_failures=10**6, max_failures_total=10**6),
        deadlines=Deadlines(step_s=100.0, reset_s=100.0),
        answer=envs,
        reset_inplace=True,
    )
    rig.start()
    rig.supervisor.begin_episodes()
    rig.run(1.0)
    rig.supervisor.table.launching = False
    n_late = 0
    for _ in range(200):
        ready = rig.ready()
        chosen = [i for batch in (range(3), range(3, 5)) if rng.random() < 0.7 for i in batch]
        if actions := {i: 1 for i in ready if i in chosen}:
            rig.send(actions)
            assert not envs.asked  # the env has taken them: none is waited for
        host = rig.transport.host_of(rng.randrange(5))
        if rng.random() < 0.03 and not host.ended and not host.killed:
            envs._forget(host.host_id)
            rig.transport.die(host.env_id)
        rig.run(rng.choice((0.125, 0.25, 1.0)))
        rig.deliver()
        n_late += rig.supervisor.table.resets_in_next_step.count(1)
    assert n_late > 30
    assert rig.identity_holds()


# -- hosts of several envs: recycling -------------------------------------------------------------


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
    recover_all(rig, 0, 1, 2)
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
    recover_all(rig, 0, 1)
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
    recover_all(rig, 0, 1)
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
