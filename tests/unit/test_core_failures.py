"""What follows failures: abnormal timesteps, retries, renewals, neighbours, budgets."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.core import Next, Phase
from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvNotReadyError,
    EnvProtocolError,
    EnvRaised,
    EnvReportedAbnormal,
    EnvTimeout,
    FailuresExhaustedError,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.texts import counted
from envmgr.transport.base import HostDied
from envmgr.wire.messages import UNANSWERED, AfterStep, FailureKind, Op, RemoteFailure
from tests.fake_hosts import FakeEnvs, description
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import (
    FAILURES,
    FLOATS,
    PARTIAL,
    STEP_LIMIT,
    WHOLE,
    generations,
    recover,
    recover_all,
    rows_of_batches,
    rows_reset_in_next_step,
    shared,
)

pytestmark = over_routes


# -- the abnormal timestep ------------------------------------------------------------------------


def test_an_action_whose_env_fails_gets_one_abnormal_timestep() -> None:
    rig = Rig(2).launch()
    rig.send(0)
    rig.stepped(0, "good")
    rig.deliver(0)
    rig.send(0)
    rig.fail()
    assert rig.ready() == [1]
    timestep = rig.deliver(0)[0]
    assert timestep.obs == "good"
    assert timestep.reward == 0.0
    assert type(timestep.reward) is float
    assert timestep.done is True
    info = timestep.info
    assert {key: info[key] for key in ("abnormal", "terminated", "truncated")} == {
        "abnormal": True,
        "terminated": False,
        "truncated": True,
    }
    assert isinstance(info["error"], EnvRaised)
    assert rig.deliver(0) == {}
    assert rig.identity_holds()
    assert rig.supervisor.statistics.abnormal == 1
    assert rig.supervisor.statistics.episodes == 0


def test_the_abnormal_observation_is_a_copy_of_the_last_good_one() -> None:
    rig = Rig(has_block=False).launch()
    rig.send(0)
    rig.stepped(0, {"a": np.array([1.0, 2.0])})
    seen = rig.deliver(0)[0].obs
    rig.send(0)
    rig.fail()
    obs = rig.deliver(0)[0].obs
    assert obs["a"].tolist() == [1, 2]
    obs["a"][:] = 7
    assert seen["a"].tolist() == [1, 2]


how_it_fails = pytest.mark.parametrize(
    ("happens", "error", "host_lost"), list(FAILURES.values()), ids=list(FAILURES)
)


@how_it_fails
def test_whatever_happens_in_a_step_is_one_typed_failure(
    happens: Any, error: type[EnvFailure], host_lost: bool
) -> None:
    rig = Rig(2, deadlines=STEP_LIMIT).launch()
    obs = rig.obs()
    host = rig.transport.host_of(0)
    rig.send(0)
    happens(rig)
    failure = rig.error()
    assert type(failure) is error
    assert (failure.env_id, failure.during, failure.generation) == (0, "step", 0)
    assert "env 0" in str(failure)
    assert rig.deliver(0)[0].obs == obs
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert rig.supervisor.statistics.failures_by_kind == {error.__name__: 1}
    assert [str(kept) for kept in rig.supervisor.statistics.latest_failures] == [str(failure)]
    if host_lost:
        assert host.ended
        assert rig.transport.host_of(0).generation_of(0) == 1
        recover(rig)
    else:
        assert not host.killed
        rig.reset_done()
    assert rig.ready() == [0, 1]
    assert rig.transport.killed.count(host.host_id) == (host_lost and host.killed)


@how_it_fails
def test_a_failure_of_one_env_does_not_touch_the_others(
    happens: Any, error: type[EnvFailure], host_lost: bool
) -> None:
    rig = Rig(3, deadlines=STEP_LIMIT).launch()
    rig.send({0: 1, 1: 1})
    rig.stepped(1, "next of 1")
    happens(rig)
    assert [op for op, _ in rig.transport.host_of(2).told] == [Op.RESET]
    assert rig.deliver(1)[1].obs == "next of 1"
    assert rig.ready() == [1, 2]
    assert rig.slot(2).generation == rig.slot(1).generation == 0


def test_a_failure_says_all_that_the_host_said() -> None:
    rig = Rig().launch()
    rig.send(0)

    remote = RemoteFailure(
        FailureKind.RAISED, "step", "pkg.OddError", "boom", "Traceback\n  line\n"
    )
    rig.transport.reply(0, Op.FAILED, remote)
    rig.pump()
    failure = rig.error()
    assert isinstance(failure, EnvRaised)
    assert failure.type_name == "pkg.OddError"
    assert failure.remote_message == "boom"
    assert failure.remote_traceback == "Traceback\n  line\n"
    assert str(failure) == (
        "env 0 (generation 0) raised pkg.OddError in its step: boom\n\n"
        "Traceback in its worker:\nTraceback\n  line"
    )


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, "exit code 3"),
        (0, "exit code 0"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (-11, "killed by SIGSEGV"),
        (-200, "killed by signal 200"),
        (None, "it cannot be told how"),
    ],
)
def test_a_crash_says_how_the_host_ended(status: int | None, text: str) -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.die(0, status)
    failure = rig.error()
    assert isinstance(failure, EnvCrash)
    assert failure.exit_status == status
    assert str(failure) == f"the worker of env 0 (generation 0) died during step: {text}"


def test_a_crash_that_nobody_can_explain_has_the_transports_words() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.transport.arrive(rig.transport.host_of(0).host_id, HostDied(None, "not started: EAGAIN"))
    rig.pump()
    assert "not started: EAGAIN" in str(rig.error())


@pytest.mark.parametrize(
    ("info", "kept"),
    [
        ({"why": "lost"}, {"why": "lost"}),
        (OrderedDict(why="lost"), {"why": "lost"}),
        (MappingProxyType({"why": "lost"}), {"why": "lost"}),
        (None, {}),
        ([], {}),
        ("text", {}),
    ],
)
def test_what_the_env_itself_said_is_kept(info: Any, kept: dict[str, Any]) -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.fail(kind=FailureKind.ABNORMAL, info=info)
    found = rig.deliver(0)[0].info
    marks = {"abnormal", "terminated", "truncated", "error"}
    assert {key: value for key, value in found.items() if key not in marks} == kept
    assert found["abnormal"] is True


@pytest.mark.parametrize("form", [list, tuple])
def test_infos_that_are_lists_keep_their_form(form: Any) -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.fail(kind=FailureKind.ABNORMAL, info=form([{"agent": 0, "terminated": True}, {}]))
    found = rig.deliver(0)[0].info
    assert type(found) is form
    assert [part["abnormal"] for part in found] == [True, True]
    assert found[0]["agent"] == 0
    assert found[0]["terminated"] is False


# -- after a step that failed ---------------------------------------------------------------------


def test_a_healthy_host_is_asked_to_reset() -> None:
    rig = Rig().launch(params={0: {"level": 3}})
    rig.send(0)
    rig.fail()
    assert rig.state() is EnvState.RESET
    assert rig.reset_requests()[-1].params == {"level": 3}
    rig.reset_done(0, "first")
    assert rig.ready() == []  # the abnormal timestep comes first
    rig.deliver(0)
    assert rig.ready() == [0]
    assert rig.obs() == "first"
    assert len(rig.transport.hosts) == 1


def test_with_retry_type_renew_the_host_builds_a_new_env() -> None:
    rig = Rig(policy=FailurePolicy(renew_between_attempts=True)).launch()
    rig.send(0)
    rig.fail()
    assert len(rig.requests(Op.RENEW)) == 1
    assert rig.state() is EnvState.INIT
    assert rig.slot().generation == 1
    rig.hello()
    rig.reset_done()
    rig.deliver(0)
    assert rig.ready() == [0]
    assert len(rig.transport.hosts) == 1


def test_without_auto_reset_a_failed_env_waits_for_its_user() -> None:
    rig = Rig(auto_reset=False).launch()
    rig.send(0)
    rig.fail()
    assert rig.state() is EnvState.NEED_RESET
    assert rig.deliver(0)[0].info["abnormal"]
    assert len(rig.reset_requests()) == 1
    rig.reset()
    rig.reset_done()
    assert rig.ready() == [0]


def test_without_auto_reset_a_renewed_env_waits_for_its_user() -> None:
    rig = Rig(auto_reset=False).launch()
    rig.send(0)
    rig.die()
    assert rig.state() is EnvState.INIT
    rig.deliver(0)
    rig.hello()
    assert rig.state() is EnvState.NEED_RESET
    assert rig.slot().phase is Phase.IDLE
    rig.reset()
    rig.reset_done()
    assert rig.ready() == [0]


def test_in_place_an_abnormal_timestep_does_not_wait_for_the_repair() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.die()
    assert rig.deliver(0)[0].info["abnormal"]


def test_a_failed_step_at_the_end_of_the_budget_spends_no_episode() -> None:
    rig = Rig(episode_num=1).launch()
    rig.send(0)
    rig.fail()
    assert rig.state() is EnvState.RESET
    assert rig.reset_requests()[-1].plan.episodes_left == 0
    assert rig.slot().episodes_done == 0


# -- hosts that are not used again ----------------------------------------------------------------


def test_a_host_that_exceeds_a_limit_is_asked_where_it_is_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(deadlines=Deadlines(step_s=1.0)).launch()
    rig.send(0)
    host_id = rig.transport.host_of(0).host_id
    seen = []

    def whereabouts(asked: int) -> str:
        seen.append((asked, host_id in rig.transport.killed))
        return "in a.py, line 3"

    monkeypatch.setattr(rig.transport, "whereabouts", whereabouts)
    rig.advance(2.0)
    failure = rig.error()
    assert isinstance(failure, EnvTimeout)
    assert failure.stacks == "in a.py, line 3"
    assert str(failure).endswith("\n\nWhere it was:\nin a.py, line 3")
    assert seen == [(host_id, False)]
    assert host_id in rig.transport.killed


# -- resets that fail -----------------------------------------------------------------------------


def test_a_reset_is_tried_as_often_as_allowed_with_pauses() -> None:
    policy = FailurePolicy(max_retry=3, retry_waiting_s=0.5)
    rig = Rig(policy=policy).launch(seeds={0: 7})
    rig.slot().new_seed = 99
    rig.reset(0, {"level": 3})
    for attempt in (1, 2):
        rig.fail(0, "reset")
        assert rig.state() is EnvState.RESET
        assert rig.slot().phase is Phase.PAUSING
        rig.advance(0.25)
        assert len(rig.reset_requests()) == 1 + attempt
        rig.advance(0.25)
        assert len(rig.reset_requests()) == 2 + attempt
    rig.reset_done()
    assert rig.ready() == [0]
    assert [request.seed for request in rig.reset_requests()] == [7, 99, 99, 99]
    assert all(order.params == {"level": 3} for order in rig.reset_requests()[1:])
    statistics = rig.supervisor.statistics
    assert statistics.reset_retries == 2
    assert statistics.failures_by_env == {0: 2}
    assert statistics.renewals == 0


def test_attempts_begin_anew_with_each_reset() -> None:
    rig = Rig(policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5)).launch()
    for _ in range(5):
        rig.reset()
        rig.fail(0, "reset")
        rig.advance(0.5)
        rig.reset_done()
    assert rig.ready() == [0]
    assert len(rig.transport.hosts) == 1


def test_when_the_attempts_are_used_up_the_host_is_asked_to_end_and_replaced() -> None:
    rig = Rig(policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5)).launch()
    rig.reset()
    old = rig.transport.host_of(0)
    rig.fail(0, "reset")
    rig.advance(0.5)
    rig.fail(0, "reset")
    assert rig.state() is EnvState.ERROR
    assert old.requests(Op.CLOSE)
    assert not old.killed
    rig.die(0, exit_status=0)
    assert rig.state() is EnvState.INIT
    assert rig.transport.host_of(0).generation_of(0) == 1
    recover(rig)
    assert rig.ready() == [0]


def test_with_retry_type_renew_each_attempt_has_a_new_env_and_their_number_is_bounded() -> None:
    policy = FailurePolicy(max_retry=3, renew_between_attempts=True, retry_waiting_s=0.5)
    rig = Rig(policy=policy).launch()
    rig.reset()
    for generation in (1, 2):
        rig.fail(0, "reset")
        assert rig.slot().follow_up is Next.RENEW_ENV
        assert rig.state() is EnvState.RESET
        rig.advance(0.5)
        assert rig.slot().generation == generation
        rig.hello()
    rig.fail(0, "reset")
    assert rig.state() is EnvState.ERROR  # the third and last attempt
    assert rig.slot().phase is Phase.ENDING
    assert len(rig.requests(Op.RENEW)) == 2


def test_a_host_lost_in_a_reset_is_replaced_whatever_retry_type_says() -> None:
    for renew in (False, True):
        policy = FailurePolicy(max_retry=5, renew_between_attempts=renew)
        rig = Rig(policy=policy).launch()
        rig.reset()
        rig.die()
        assert rig.state() is EnvState.INIT
        assert rig.transport.host_of(0).generation_of(0) == 1
        assert rig.supervisor.statistics.reset_retries == 0


def test_a_reset_that_the_host_began_by_itself_is_retried_too() -> None:
    rig = Rig(policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5)).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.fail(0, "reset")
    assert rig.deliver(0)[0].obs == "terminal"
    rig.advance(0.5)
    rig.reset_done()
    assert rig.ready() == [0]


def test_the_timestep_before_a_reset_that_fails_is_delivered_as_it_was() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.die()
    timestep = rig.deliver(0)[0]
    assert timestep.obs == "terminal"
    assert "abnormal" not in timestep.info
    recover(rig)
    assert rig.ready() == [0]


def test_in_place_a_terminal_timestep_waits_through_the_repair() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.die()
    assert rig.deliver(0) == {}
    recover(rig)
    assert rig.deliver(0)[0].obs == "terminal"


def test_in_place_a_terminal_timestep_is_let_go_when_the_budget_is_spent() -> None:
    rig = Rig(reset_inplace=True, policy=FailurePolicy(max_failures=0)).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.die()
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.state() is EnvState.ERROR


def test_a_host_that_dies_in_the_pause_before_a_retry_is_replaced() -> None:
    rig = Rig(policy=FailurePolicy(max_retry=3, retry_waiting_s=0.5)).launch()
    rig.reset()
    rig.fail(0, "reset")
    rig.die()
    assert rig.transport.host_of(0).generation_of(0) == 1
    assert rig.state() is EnvState.INIT


# -- renewals in a row ----------------------------------------------------------------------------


def test_renewals_in_a_row_wait_twice_as_long_each_time() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = Rig(policy=policy).launch()
    rig.die()
    for pause_s in (0.5, 1.0, 2.0, 4.0):
        generation = rig.slot().generation
        rig.die()  # in its construction
        assert rig.slot().phase is Phase.PAUSING
        rig.advance(pause_s - 0.25)
        assert rig.slot().generation == generation
        rig.advance(0.25)
        assert rig.slot().generation == generation + 1


def test_a_long_pause_says_for_whom_and_how_long_and_what_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = Rig(2, num_workers=1, policy=policy).launch()
    rig.die()
    for pause_s in (0.5, 1.0):
        caplog.clear()
        rig.die()
        rig.advance(pause_s)
        told = [r.message for r in caplog.records if "follows" in r.message]
        wanted = [f"envs 0, 1: a new worker follows in {pause_s:g} s"]
        assert told == (wanted if pause_s >= 1.0 else [])


def test_no_pause_between_renewals_is_longer_than_a_minute() -> None:
    policy = FailurePolicy(max_failures=100, max_failures_total=100)
    rig = Rig(policy=policy).launch()
    rig.die()
    for _ in range(30):
        generation = rig.slot().generation
        rig.die()
        rig.run(60.0)
        assert rig.slot().generation == generation + 1


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_hosts_that_can_be_started_in_calls_only_wait_for_the_next_one(pause_s: float) -> None:
    """It counts as no attempt: the renewal has not begun."""
    policy = FailurePolicy(retry_waiting_s=pause_s, max_failures=2)
    rig = Rig(2, policy=policy).launch()
    rig.transport.must_wait_for_call = True
    rig.die()
    rig.run(60.0)
    assert rig.slot().phase is Phase.PAUSING
    assert (rig.slot().generation, len(rig.supervisor.statistics.latest_failures)) == (0, 1)
    rig.transport.must_wait_for_call = False
    rig.run(0.1)
    assert (rig.slot().phase, rig.slot().generation) == (Phase.STARTING, 1)
    recover(rig)
    assert rig.ready() == [0, 1]


def test_a_reset_that_succeeds_ends_the_row() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = Rig(policy=policy).launch()
    for _ in range(4):
        rig.die()
        assert rig.slot().phase is Phase.STARTING  # at once
        recover(rig)
        rig.send(0)
        rig.deliver(0)


def test_a_construction_that_raises_is_tried_again_in_a_new_host() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_failures=100)
    rig = Rig(policy=policy).launch()
    rig.send(0)
    rig.die()
    rig.deliver(0)
    rig.fail(0, "construction")
    assert rig.state() is EnvState.ERROR
    assert rig.slot().phase is Phase.ENDING
    rig.die(0, exit_status=0)
    assert rig.slot().phase is Phase.PAUSING
    rig.advance(0.5)
    assert rig.state() is EnvState.INIT
    recover(rig)
    assert rig.ready() == [0]


def test_an_env_that_comes_back_with_other_spaces_is_renewed_again() -> None:
    rig = Rig(policy=FailurePolicy(retry_waiting_s=0.5), has_memory=True).launch(space=FLOATS)
    rig.send(0)
    rig.die()
    rig.deliver(0)
    rig.hello(0, Box(-1, 1, (3,), np.float32))
    assert rig.transport.host_of(0).killed
    assert rig.reset_requests() == rig.reset_requests()[:1]  # it was never reset
    (_, failure) = rig.supervisor.statistics.latest_failures
    assert isinstance(failure, EnvProtocolError)
    assert failure.during == "construction"
    assert "a renewed env has other spaces" in str(failure)
    rig.advance(0.5)
    rig.hello(0, FLOATS)
    rig.reset_done(0, 0)
    assert rig.ready() == [0]


def test_a_reset_of_its_user_outlives_an_env_with_other_spaces() -> None:
    rig = Rig(auto_reset=False, policy=FailurePolicy(retry_waiting_s=0.5)).launch()
    rig.die()
    rig.reset()
    rig.hello(0, Discrete(3))
    rig.advance(0.5)
    recover(rig)
    assert rig.ready() == [0]


# -- envs that die while nothing is asked of them -------------------------------------------------


def test_an_env_that_dies_idle_stays_ready_until_its_next_action() -> None:
    rig = Rig(2).launch()
    obs = rig.obs()
    rig.die()
    assert rig.ready() == [0, 1]
    assert rig.obs() is obs
    assert rig.slot().phase is Phase.STARTING  # the repair goes on behind it
    sent = len(rig.requests(Op.STEP))
    rig.send(0)
    assert len(rig.requests(Op.STEP)) == sent  # the action is not executed
    assert rig.state() is EnvState.INIT
    timestep = rig.deliver(0)[0]
    assert timestep.info["abnormal"]
    assert timestep.obs == obs
    failure = timestep.info["error"]
    assert (failure.during, failure.generation) == ("idle", 0)
    assert rig.ready() == [1]
    rig.hello()
    rig.reset_done(0, "new first")
    assert rig.ready() == [0, 1]
    assert rig.obs() == "new first"
    assert rig.identity_holds()


def test_a_repair_that_ends_before_the_next_action_shows_its_observation_after_it() -> None:
    rig = Rig().launch()
    obs = rig.obs()
    rig.die()
    rig.hello()
    rig.reset_done(0, "new first", level=2)
    assert rig.ready() == [0]
    assert rig.obs() is obs  # the user may hold it already
    assert rig.slot().reset_info != {"level": 2}
    rig.send(0)
    assert rig.state() is EnvState.RUN
    assert rig.deliver(0)[0].obs == obs
    assert rig.ready() == [0]
    assert rig.obs() == "new first"
    assert rig.slot().reset_info == {"level": 2}
    rig.send(0)
    assert len(rig.requests(Op.STEP)) == 1  # this one is executed
    rig.stepped(0, "next")
    assert rig.deliver(0)[0].obs == "next"


@pytest.mark.parametrize("progress", ["dying", "pausing", "starting", "resetting", "retrying"])
def test_whatever_the_repair_is_at_the_next_action_gets_its_timestep_at_once(
    progress: str,
) -> None:
    policy = FailurePolicy(retry_waiting_s=0.5, max_retry=2, max_failures=10)
    rig = Rig(policy=policy, kill_takes_s=None).launch()
    if progress == "dying":
        rig.transport.garbage(0)
        rig.pump()
    else:
        rig.die()
    if progress == "pausing":
        rig.die()
    if progress in ("resetting", "retrying"):
        rig.hello()
    if progress == "retrying":
        rig.fail(0, "reset")
    expected = {
        "dying": (Phase.ENDING, EnvState.ERROR),
        "pausing": (Phase.PAUSING, EnvState.ERROR),
        "starting": (Phase.STARTING, EnvState.INIT),
        "resetting": (Phase.RESETTING, EnvState.RESET),
        "retrying": (Phase.PAUSING, EnvState.ERROR),
    }[progress]
    assert rig.ready() == [0]
    rig.send(0)
    assert (rig.slot().phase, rig.state()) == expected
    assert rig.deliver(0)[0].info["abnormal"]
    if progress == "dying":
        rig.die()
    elif progress in ("pausing", "retrying"):
        rig.advance(0.5)
    if rig.slot().phase is Phase.STARTING:
        rig.hello()
    rig.reset_done(0, "new first")
    assert rig.ready() == [0]
    assert rig.obs() == "new first"


def test_a_doomed_env_whose_new_host_dies_too_does_not_show_a_dead_envs_observation() -> None:
    rig = Rig(policy=FailurePolicy(retry_waiting_s=0.5)).launch()
    obs = rig.obs()
    rig.die()
    recover(rig, obs="of generation 1")
    rig.die()
    assert rig.ready() == [0]
    rig.send(0)
    assert rig.deliver(0)[0].obs == obs
    assert rig.ready() == []
    recover(rig, obs="of generation 2")
    assert rig.ready() == [0]
    assert rig.obs() == "of generation 2"


def test_the_first_failure_is_the_one_that_a_doomed_env_reports() -> None:
    rig = Rig(policy=FailurePolicy(retry_waiting_s=0.5)).launch()
    rig.die(0, 3)
    rig.die(0, 4)
    rig.send(0)
    failure = rig.error()
    assert isinstance(failure, EnvCrash)
    assert failure.exit_status == 3


def test_without_auto_reset_a_doomed_env_waits_for_its_user_after_its_timestep() -> None:
    for repaired_first in (True, False):
        rig = Rig(auto_reset=False).launch()
        rig.die()
        if repaired_first:
            rig.hello()
        assert rig.ready() == [0]
        rig.send(0)
        assert rig.deliver(0)[0].info["abnormal"]
        if not repaired_first:
            rig.hello()
        assert rig.state() is EnvState.NEED_RESET
        assert rig.slot().phase is Phase.IDLE
        rig.reset()
        rig.reset_done(0, "new first")
        assert rig.obs() == "new first"


def test_a_timestep_that_waits_is_delivered_before_an_idle_death_shows() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "next")
    rig.die()
    timestep = rig.deliver(0)[0]
    assert timestep.obs == "next"
    assert "abnormal" not in timestep.info
    assert rig.ready() == [0]
    rig.send(0)
    assert rig.deliver(0)[0].info["abnormal"]


def test_idle_deaths_in_other_states_are_repaired_in_silence() -> None:
    rig = Rig(auto_reset=False).launch()
    rig.send(0)
    rig.stepped(0, done=True)
    rig.deliver(0)
    rig.die()
    assert rig.state() is EnvState.NEED_RESET
    rig.hello()
    assert rig.state() is EnvState.NEED_RESET
    assert rig.slot().phase is Phase.IDLE
    rig.reset()
    rig.reset_done()
    assert rig.ready() == [0]


def test_a_done_env_whose_host_dies_is_renewed_only_when_its_user_resets_it() -> None:
    rig = Rig(episode_num=1).launch()
    rig.send(0)
    rig.stepped(done=True)
    rig.deliver(0)
    rig.die()
    assert rig.state() is EnvState.DONE
    assert len(rig.transport.hosts) == 1
    rig.run(100.0)
    assert len(rig.transport.hosts) == 1
    rig.reset()
    assert rig.state() is EnvState.RESET
    recover(rig)
    assert rig.ready() == [0]


def test_a_done_env_whose_host_sends_garbage_is_left_without_host() -> None:
    rig = Rig(episode_num=1).launch()
    rig.send(0)
    rig.stepped(done=True)
    rig.deliver(0)
    rig.transport.garbage(0)
    rig.pump()
    assert rig.state() is EnvState.DONE
    rig.pump()
    assert rig.slot().host_id is None
    assert rig.slot().phase is Phase.IDLE


# -- calls that fail ------------------------------------------------------------------------------


def test_a_host_that_dies_in_a_call_fails_the_call_and_dooms_the_env() -> None:
    rig = Rig().launch()
    rig.call()
    rig.die()
    assert isinstance(rig.slot().result, EnvCrash)
    assert rig.slot().result.during == "call"
    assert "the worker of env 0 (generation 0) died during method" in str(rig.slot().result)
    assert rig.ready() == [0]
    rig.send(0)
    assert rig.deliver(0)[0].info["abnormal"]
    recover(rig)
    assert rig.ready() == [0]


def test_a_call_that_exits_costs_the_host() -> None:
    rig = Rig().launch()
    host = rig.transport.host_of(0)
    rig.call()
    rig.fail(0, "call", kind=FailureKind.EXITED)
    assert isinstance(rig.slot().result, EnvCrash)
    assert host.killed


def test_a_call_that_hangs_is_stopped_at_the_limit_of_resets() -> None:
    rig = Rig(deadlines=Deadlines(reset_s=2.0)).launch()
    rig.call()
    rig.advance(2.0)
    failure = rig.slot().result
    assert isinstance(failure, EnvTimeout)
    assert "exceeded the 2 s of reset_timeout in its call" in str(failure)
    assert rig.slot().failed_while_ready is failure


@how_it_fails
def test_a_failure_may_be_sent_elsewhere(
    happens: Any, error: type[EnvFailure], host_lost: bool
) -> None:
    rig = Rig(2, deadlines=STEP_LIMIT).launch()
    rig.send(0)
    happens(rig)
    failure = rig.error()
    again = pickle.loads(pickle.dumps(failure))
    assert (type(again), str(again), again.__dict__) == (error, str(failure), failure.__dict__)


@how_it_fails
def test_who_raises_a_failure_does_not_have_it_keep_his_frames(
    happens: Any, error: type[EnvFailure], host_lost: bool
) -> None:
    class Large:
        pass

    def train(failure: EnvFailure) -> weakref.ref[Large]:
        large = Large()
        with pytest.raises(error):
            raise failure
        return weakref.ref(large)

    rig = Rig(2, deadlines=STEP_LIMIT, policy=FailurePolicy(max_failures=9)).launch()
    rig.send(0)
    happens(rig)
    large = train(rig.deliver(0)[0].info["error"])
    gc.collect()
    assert large() is None
    kept = rig.supervisor.statistics.latest_failures[-1]
    assert (type(kept), kept.env_id) == (error, 0)


# -- the budget -----------------------------------------------------------------------------------


def test_an_env_that_fails_too_often_ends_in_error_and_the_next_call_raises() -> None:
    rig = Rig(2, policy=FailurePolicy(max_failures=1)).launch()
    errors = []
    for _ in range(2):
        rig.send(0)
        rig.fail()
        errors.append(rig.error())
        rig.deliver(0)
        if rig.slot().phase is Phase.RESETTING:
            rig.reset_done()
    assert rig.state() is EnvState.ERROR
    fatal = rig.supervisor.repair.take_fatal()
    assert isinstance(fatal, FailuresExhaustedError)
    assert fatal.failure is fatal.__cause__
    assert (type(fatal.failure), str(fatal.failure)) == (type(errors[0]), str(errors[0]))
    assert "env 0 failed 2 times within 60 s (max_failures is 1)" in str(fatal)
    assert "reset({0: None})" in str(fatal)
    assert rig.supervisor.repair.take_fatal() is None
    assert rig.transport.host_of(0).requests(Op.CLOSE)  # it is healthy: asked, not killed
    rig.die(0, exit_status=0)
    assert rig.slot().phase is Phase.IDLE
    rig.run(100.0)
    assert len(rig.transport.hosts) == 2
    assert rig.ready() == [1]


@pytest.mark.parametrize("share", [0.05, 0.0])
def test_an_envs_own_steps_make_up_for_its_failures(share: float) -> None:
    """In whatever company they were made: alone, with one neighbour, and with others."""
    policy = FailurePolicy(max_failures=3, max_failures_total=1000, max_failure_share=share)
    envs = FakeEnvs()
    rig = Rig(3, policy=policy, num_workers=1, answer=envs).launch(envs=envs)
    companies = ([0, 1, 2], [1, 0], [0], [0, 2])
    for _ in range(20):
        for k in range(28):
            rig.send(dict.fromkeys(companies[k % 4], 1))
            rig.exactly(*companies[k % 4])
        fail_once(rig, 0)
        if rig.supervisor.repair.fatal is not None:
            break
    assert (rig.supervisor.repair.fatal is None) is (share > 0.0)


def test_the_steps_of_others_make_up_for_no_failures_of_an_env() -> None:
    policy = FailurePolicy(max_failures=3, max_failures_total=1000)
    envs = FakeEnvs()
    rig = Rig(3, policy=policy, num_workers=1, answer=envs).launch(envs=envs)
    for _ in range(4):
        for _ in range(100):
            rig.send({1: 1, 2: 1})
            rig.exactly(1, 2)
        assert rig.supervisor.repair.fatal is None
        fail_once(rig, 0)
    assert isinstance(rig.supervisor.repair.fatal, FailuresExhaustedError)


def fail_once(rig: Rig, env_id: int) -> None:
    """Have an env, which answers by itself otherwise, fail in a step."""
    answer, rig.transport.answer = rig.transport.answer, None
    rig.send(env_id)
    rig.transport.answer = answer
    rig.fail(env_id)
    rig.deliver(env_id)


def test_a_spent_budget_says_whose_failure_it_names_where_another_env_failed_before() -> None:
    policy = FailurePolicy(max_failures=9, max_failures_total=1)
    rig = Rig(2, policy=policy).launch()
    for env_id in (1, 0):
        rig.send(env_id)
        rig.fail(env_id)
    fatal = rig.supervisor.repair.take_fatal()
    assert isinstance(fatal, FailuresExhaustedError)
    assert fatal.failure.env_id == 0
    assert "all envs together failed 2 times" in str(fatal)
    assert "Env 0 is not repaired any more" in str(fatal)
    assert f"The first failure of env 0 that counted: {fatal.failure}" in str(fatal)


def test_each_of_several_fatal_errors_is_raised_by_a_call_of_its_own() -> None:
    rig = Rig(3, policy=FailurePolicy(max_failures=0)).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    for env_id in (1, 0):
        rig.transport.die(env_id)
    rig.pump()
    repair = rig.supervisor.repair
    for env_id in (1, 0):
        expected = repair.fatal
        fatal = repair.take_fatal()
        assert fatal is expected
        assert isinstance(fatal, FailuresExhaustedError)
        assert fatal.failure.env_id == env_id
    assert repair.fatal is None
    assert repair.take_fatal() is None


def test_the_abnormal_timestep_comes_even_when_the_budget_is_spent() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0)).launch()
    rig.send(0)
    rig.die()
    assert rig.deliver(0)[0].info["abnormal"]
    assert rig.identity_holds()


def test_a_user_may_repair_an_exhausted_env_and_its_budget_begins_anew() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=1, max_retry=2)).launch()
    for _ in range(2):
        rig.send(0)
        rig.die()
        rig.deliver(0)
        if rig.slot().phase is Phase.STARTING:
            recover(rig)
    assert rig.state() is EnvState.ERROR
    rig.reset(0, {"level": 3})
    assert rig.state() is EnvState.RESET
    assert rig.slot().phase is Phase.STARTING
    recover(rig)
    assert rig.reset_requests()[-1].params == {"level": 3}
    assert rig.ready() == [0]
    rig.send(0)
    rig.die()
    assert rig.state() is EnvState.INIT  # one is allowed again


def test_a_user_may_reset_an_exhausted_env_while_its_host_still_ends() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0)).launch()
    rig.send(0)
    rig.fail()
    rig.deliver(0)
    assert rig.slot().phase is Phase.ENDING
    rig.reset()
    assert rig.state() is EnvState.RESET
    rig.die(0, exit_status=0)
    recover(rig)
    assert rig.ready() == [0]


@pytest.mark.parametrize(("given", "limit"), [(None, 10), (0, 0), (3, 3), (15, 15)])
def test_failures_of_all_envs_together_are_limited_too(given: int | None, limit: int) -> None:
    rig = Rig(4, policy=FailurePolicy(max_failures=100, max_failures_total=given)).launch()
    for number in range(limit + 1):
        env_id = number % 4
        assert rig.supervisor.repair.fatal is None
        rig.send(env_id)
        rig.die(env_id)
        rig.deliver(env_id)
        if number < limit:
            recover(rig, env_id)
    fatal = rig.supervisor.repair.take_fatal()
    assert f"all envs together failed {counted(limit + 1, 'time')} within" in str(fatal)
    assert f"max_failures_total is {limit}" in str(fatal)


def test_a_step_that_the_env_calls_abnormal_is_counted_and_not_charged() -> None:
    rig = Rig(2, policy=FailurePolicy(max_failures=0, max_failures_total=0)).launch()
    for _ in range(3):
        rig.send(0)
        rig.fail(kind=FailureKind.ABNORMAL)
        timestep = rig.deliver(0)[0]
        assert isinstance(timestep.info["error"], EnvReportedAbnormal)
        assert rig.slot().phase is Phase.RESETTING
        rig.reset_done()
    assert rig.supervisor.repair.fatal is None
    assert rig.ready() == [0, 1]
    statistics = rig.supervisor.statistics
    assert statistics.failures_by_kind == {"EnvReportedAbnormal": 3}
    assert (statistics.abnormal, statistics.renewals) == (3, 0)
    rig.send(0)
    rig.fail()
    assert rig.state() is EnvState.ERROR  # what did fail is charged


def test_a_step_that_the_env_calls_abnormal_ends_what_is_not_to_go_on_after_failures() -> None:
    rig = Rig(policy=FailurePolicy(recover=False)).launch()
    rig.send(0)
    rig.fail(kind=FailureKind.ABNORMAL)
    assert isinstance(rig.supervisor.repair.take_fatal(), EnvReportedAbnormal)


def test_a_host_s_death_is_one_failure() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=1)).launch()
    rig.send(0)
    rig.transport.garbage(0)
    rig.pump()
    rig.pump()
    assert rig.supervisor.repair.fatal is None
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_failures_outside_of_the_window_are_forgotten() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=1, window_s=60.0)).launch()
    for _ in range(4):
        rig.send(0)
        rig.die()
        rig.deliver(0)
        recover(rig)
        rig.advance(61.0)
    assert rig.supervisor.repair.fatal is None


def test_retries_of_one_reset_are_not_charged() -> None:
    policy = FailurePolicy(max_failures=0, max_retry=5, retry_waiting_s=0.5)
    rig = Rig(policy=policy).launch()
    rig.reset()
    for _ in range(4):
        rig.fail(0, "reset")
        rig.advance(0.5)
    rig.reset_done()
    assert rig.ready() == [0]
    assert rig.supervisor.repair.fatal is None


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_dropped_env_is_done_and_the_others_go_on(auto_reset: bool) -> None:
    policy = FailurePolicy(max_failures=0, drop_exhausted=True)
    rig = Rig(2, policy=policy, auto_reset=auto_reset).launch()
    rig.send(0)
    rig.die()
    assert rig.state() is EnvState.DONE
    assert rig.slot().dropped
    assert rig.deliver(0)[0].info["abnormal"]
    assert rig.supervisor.repair.fatal is None
    rig.run(100.0)
    assert len(rig.transport.hosts) == 2
    assert rig.ready() == [1]


def test_a_dropped_env_that_was_ready_is_done_after_its_next_timestep() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0, drop_exhausted=True)).launch()
    rig.die()
    assert rig.ready() == [0]
    rig.send(0)
    assert rig.state() is EnvState.DONE
    assert rig.deliver(0)[0].info["abnormal"]


def test_an_env_that_waits_for_its_user_is_dropped_as_well() -> None:
    policy = FailurePolicy(max_failures=0, drop_exhausted=True)
    rig = Rig(policy=policy, auto_reset=False).launch()
    rig.send(0)
    rig.stepped(done=True)
    rig.deliver(0)
    rig.die()
    assert rig.state() is EnvState.DONE


def test_an_env_that_waits_for_its_user_and_is_exhausted_is_in_error() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0), auto_reset=False).launch()
    rig.send(0)
    rig.stepped(done=True)
    rig.deliver(0)
    rig.die()
    assert rig.state() is EnvState.ERROR
    assert rig.supervisor.repair.fatal is not None


@pytest.mark.parametrize("drop", [True, False])
def test_a_cancelled_step_that_exhausts_the_budget_leaves_no_reset_that_never_ends(
    drop: bool,
) -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0, drop_exhausted=drop)).launch()
    rig.send(0)
    rig.reset()
    rig.die()
    assert rig.state() is (EnvState.DONE if drop else EnvState.ERROR)
    assert rig.identity_holds()


def test_a_doomed_env_that_is_exhausted_ends_in_error_after_its_timestep() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=0)).launch()
    rig.die()
    assert rig.supervisor.repair.take_fatal() is not None
    assert rig.ready() == [0]
    rig.send(0)
    assert rig.deliver(0)[0].info["abnormal"]
    assert rig.state() is EnvState.ERROR
    rig.reset()
    recover(rig)
    assert rig.ready() == [0]


def test_a_user_may_reset_a_dropped_env() -> None:
    rig = Rig(episode_num=2, policy=FailurePolicy(max_failures=0, drop_exhausted=True)).launch()
    rig.send(0)
    rig.die()
    rig.deliver(0)
    rig.reset()
    assert not rig.slot().dropped
    recover(rig)
    assert rig.ready() == [0]
    assert rig.reset_requests()[-1].plan.episodes_left == 1


# -- on_failure: raise, nan_policy: raise ---------------------------------------------------------


@how_it_fails
def test_without_recovery_the_first_failure_is_raised_at_once_and_nothing_is_repaired(
    happens: Any, error: type[EnvFailure], host_lost: bool
) -> None:
    rig = Rig(2, policy=FailurePolicy(recover=False), deadlines=STEP_LIMIT).launch()
    rig.send(0)
    happens(rig)
    assert rig.supervisor.repair.urgent
    failure = rig.supervisor.repair.take_fatal()
    assert type(failure) is error
    assert not rig.supervisor.repair.urgent
    rig.run(100.0)
    assert len(rig.transport.hosts) == 2
    assert rig.state() is EnvState.ERROR
    assert len(rig.reset_requests()) == 1


def test_without_recovery_a_reset_still_has_its_attempts() -> None:
    policy = FailurePolicy(recover=False, max_retry=2, retry_waiting_s=0.5)
    rig = Rig(policy=policy).launch()
    rig.reset()
    rig.fail(0, "reset")
    assert rig.supervisor.repair.fatal is None
    rig.advance(0.5)
    rig.fail(0, "reset")
    assert isinstance(rig.supervisor.repair.take_fatal(), EnvRaised)


def test_non_finite_values_may_end_the_manager_rather_than_the_episode() -> None:
    rig = Rig(raise_non_finite=True).launch()
    rig.send(0)
    rig.fail(kind=FailureKind.NON_FINITE, message="the reward is nan")
    fatal = rig.supervisor.repair.take_fatal()
    assert isinstance(fatal, EnvProtocolError)
    assert "the reward is nan" in str(fatal)
    rig = Rig(raise_non_finite=False).launch()
    rig.send(0)
    rig.fail(kind=FailureKind.NON_FINITE)
    assert rig.supervisor.repair.fatal is None


def test_numbers_that_are_raised_give_no_neighbour_of_others_up() -> None:
    rig = shared(4, num_workers=2, raise_non_finite=True)
    rig.send(0)
    rig.fail(0, kind=FailureKind.NON_FINITE)  # and nobody has made a call since
    rig.die(2)  # the worker of 2 and 3
    assert rig.supervisor.repair.take_fatal()
    recover_all(rig, 2, 3)
    assert rig.slot(3).host_id is not None


def test_an_abnormal_timestep_that_is_cancelled_is_none() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.fail()
    assert rig.supervisor.statistics.abnormal == 1
    rig.reset()
    assert rig.supervisor.statistics.abnormal == 0
    assert rig.identity_holds()


# -- rows of batched envs -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailureKind.RAISED, FailureKind.PROTOCOL, FailureKind.EXITED])
def test_what_the_whole_env_does_takes_all_rows_and_is_charged_once(kind: FailureKind) -> None:
    rig = rows_of_batches(PARTIAL, policy=FailurePolicy(max_failures=1))
    rig.send({0: 1, 2: 2})
    rig.fail(0, kind=kind, of_batch=True)
    delivered = rig.deliver()
    assert [timestep.info["abnormal"] for timestep in delivered.values()] == [True, True]
    assert "shared with env 0" in str(delivered[2].info["error"])
    assert rig.slot(1).failed_while_ready is not None
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert len(rig.transport.hosts) == 2
    recover_all(rig, 0, 1, 2)
    assert rig.ready() == [0, 1, 2]
    assert [slot.generation for slot in rig.supervisor.envs] == [1, 1, 1]
    assert rig.identity_holds()


def test_a_failure_of_one_row_is_repaired_in_its_env() -> None:
    rig = rows_of_batches(PARTIAL)
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
        rig = rows_of_batches(PARTIAL, policy=policy)
        rig.send(0)
        rig.fail(0, **how)
        assert len(rig.transport.hosts) == 2
        assert rig.requests(Op.RENEW, 0) == []


def test_attempts_at_the_reset_of_a_row_used_up_take_all_rows() -> None:
    rig = rows_of_batches(PARTIAL, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.0))
    rig.reset(0)
    rig.fail(0, "reset")
    rig.pump()
    assert (len(rig.reset_requests(0)), len(rig.transport.hosts)) == (3, 1)
    rig.fail(0, "reset")
    assert len(rig.transport.hosts) == 2
    assert rig.slot(1).failed_while_ready is not None


def test_a_row_that_comes_back_with_other_spaces_takes_all_rows() -> None:
    rig = rows_of_batches(PARTIAL)
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
    rig = rows_of_batches(PARTIAL, policy=FailurePolicy(renew_between_attempts=True))
    rig.call(1)
    rig.fail(1, "call")
    assert rig.ready() == [0, 1, 2]
    assert rig.transport.killed == []


def test_rows_whose_host_died_while_they_were_ready_are_lost_together() -> None:
    rig = rows_of_batches()
    rig.reset(2)
    rig.die(0)
    assert rig.ready() == []  # env 2 is being repaired
    recover_all(rig, 0, 1, 2)
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
    rig = rows_of_batches()
    rig.die(0)
    recover_all(rig, 0, 1, 2)
    rig.reset(2)
    rig.reset_done(2, "again")
    assert (rig.ready(), rig.obs(2)) == ([0, 1, 2], "again")
    rig.send({i: i for i in range(3)})
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True] * 3
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [0, 0, 0]
    assert rig.obs(2) == "again"
    rig.send({i: i for i in range(3)})
    assert [len(rig.requests(Op.STEP, i)) for i in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("has_replied", [False, True])
def test_a_row_is_owed_its_timestep_when_the_reset_of_another_takes_their_host(
    has_replied: bool,
) -> None:
    rig = rows_of_batches(PARTIAL)
    rig.send(1)
    if has_replied:
        rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.reset(0)
    rig.transport.fail(0, "reset")
    rig.pump()
    (timestep,) = rig.deliver(1).values()
    assert ("abnormal" in timestep.info) is not has_replied
    assert rig.identity_holds()


def test_it_is_lost_with_the_others() -> None:
    rig = rows_reset_in_next_step()
    rig.send({1: 1, 2: 2})
    rig.die(1)
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True, True]
    for env_id in range(3):
        rig.hello(env_id)
    for env_id in range(3):
        rig.reset_done(env_id)
    assert (rig.ready(), 1 in rig.supervisor.table.resets_in_next_step) == ([0, 1, 2], False)


def test_what_waits_for_a_step_of_others_and_is_lost_with_them_is_waited_for() -> None:
    rig = rows_reset_in_next_step()
    rig.die(1)
    assert rig.ready() == []  # 1 and 2 are shown when 0 is there, too
    for env_id in range(3):
        rig.hello(env_id)
    assert rig.ready() == []
    for env_id in range(3):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1, 2]


DROP = FailurePolicy(max_failures=0, drop_exhausted=True)


# -- hosts of several envs: a failure of one env --------------------------------------------------


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
    recover_all(rig, 0)
    assert rig.ready() == [0, 1, 2]
    assert generations(rig) == [2, 0, 0]
    assert len(rig.transport.hosts) == 1


def test_a_construction_that_fails_is_tried_again_in_the_same_host() -> None:
    rig = shared()
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.fail(0, "construction")
    rig.advance(1.0)
    recover_all(rig, 0)
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
    recover_all(rig, 0)
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
    recover_all(rig, 1)
    assert rig.ready() == [1]
    rig.reset(0)
    recover_all(rig, 0)
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
    recover_all(rig, 0)
    assert rig.ready() == [0]
    assert rig.state(1) is EnvState.DONE


# -- hosts of several envs: the loss of the host --------------------------------------------------


def test_the_loss_of_a_host_touches_all_of_its_envs_and_nobody_else() -> None:
    rig = shared(5, 1 + 1)  # 0, 1, 2 | 3, 4
    rig.send({0: "a", 1: "b", 3: "c"})
    rig.die(0, exit_status=3)
    first = rig.error(0)
    assert isinstance(first, EnvCrash)
    died = "env 0 (generation 0) died during step: exit code 3"
    assert f"{died}; envs 1, 2 shared its worker, and lose it too" in str(first)
    second = rig.error(1)
    assert isinstance(second, EnvCrash)
    assert (second.env_id, second.during, second.exit_status) == (1, "step", 3)
    assert "because it is shared with env 0: the worker of env 0" in str(second)
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
    recover_all(rig, 0, 1, 2)
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
        recover_all(rig, 0, 1)
        rig.deliver()
    assert rig.supervisor.statistics.failures_by_env == {1: 2}
    assert rig.supervisor.repair.fatal is None
    rig.send({1: "x"})
    rig.send({0: "y"})
    rig.die(0)
    assert isinstance(rig.supervisor.repair.take_fatal(), FailuresExhaustedError)
    assert rig.state(1) is EnvState.ERROR
    recover_all(rig, 0)  # without the one that is given up
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
    recover_all(rig, 0, 1, 2)
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
    recover_all(rig, 0, 1)
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
    recover_all(rig, 0, 1)
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
    recover_all(rig, 0)
    assert rig.ready() == [0]


def test_an_explicit_reset_while_the_host_is_being_replaced_is_done_in_the_new_one() -> None:
    rig = shared(2, kill_takes_s=1.0)
    rig.send({0: 1})
    rig.transport.garbage(0)
    rig.pump()
    rig.reset(1, {"level": 3})
    rig.advance(1.0)
    recover_all(rig, 0, 1)
    assert rig.reset_requests(1)[-1].params == {"level": 3}
    assert rig.slot(1).failed_while_ready is None
    assert rig.ready() == [1]
