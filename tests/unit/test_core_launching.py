"""Launching: all envs or none, with all failures in one error."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from gymnasium.spaces import Discrete

from envmgr.config import ManagerConfig
from envmgr.core import Phase
from envmgr.core.launching import begin_envs, build_envs
from envmgr.errors import EnvCrash, EnvRaised, EnvTimeout, LaunchError, SpaceMismatchError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import HostDied
from envmgr.wire.messages import (
    EnvDescription,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)
from tests.fake_hosts import FakeEnvs, FakeHost, HostedEnv, description
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import generations, recover, recover_all

pytestmark = over_routes


# -- launch ---------------------------------------------------------------------------------------


def test_launching_starts_a_host_for_each_env_and_resets_all() -> None:
    rig = Rig(3)
    rig.supervisor.start_hosts(range(3))
    assert rig.supervisor.table.env_states() == (EnvState.INIT,) * 3
    hosts = rig.transport.hosts
    assert [hosts[i].env_id for i in sorted(hosts)] == [0, 1, 2]
    assert [slot.phase for slot in rig.supervisor.envs] == [Phase.STARTING] * 3
    for env_id in (2, 0, 1):
        rig.hello(env_id)
    assert [slot.phase for slot in rig.supervisor.envs] == [Phase.IDLE] * 3
    assert rig.supervisor.table.env_states() == (EnvState.INIT,) * 3
    rig.supervisor.place_observations(same_spaces=True)
    rig.supervisor.begin_episodes()
    assert rig.supervisor.table.env_states() == (EnvState.RESET,) * 3
    rig.reset_done(1, "first of 1", level=3)
    assert rig.ready() == [1]
    assert rig.obs(1) == "first of 1"
    assert rig.slot(1).reset_info == {"level": 3}
    rig.reset_done(0)
    rig.reset_done(2)
    assert rig.ready() == [0, 1, 2]


def test_a_host_that_was_started_early_is_not_started_again() -> None:
    rig = Rig(2, answer=FakeEnvs())
    rig.supervisor.start_hosts([0])
    rig.pump()
    assert rig.supervisor.table.env_states() == (EnvState.INIT, EnvState.VOID)
    rig.supervisor.start_hosts(range(2))
    rig.pump()
    assert len(rig.transport.hosts) == 2
    assert rig.supervisor.table.env_states() == (EnvState.INIT, EnvState.INIT)


def test_the_first_reset_carries_params_seed_and_plan() -> None:
    rig = Rig(2, episode_num=3).launch(seeds={0: 7}, params={1: {"level": 3}})
    assert rig.reset_requests(0) == [ResetRequest({}, 7, None, EpisodePlan(True, 2, {}), episode=1)]
    assert rig.reset_requests(1) == [
        ResetRequest({"level": 3}, None, None, EpisodePlan(True, 2, {"level": 3}), episode=1)
    ]


class Faulty(FakeEnvs):
    """Fake envs of which some fail.

    Args:
        faults: by env_id: what comes instead of the good reply to an operation, and how often.
        **options: of `FakeEnvs`.
    """

    def __init__(self, faults: dict[tuple[int, Op], tuple[Any, int]], **options: Any) -> None:
        super().__init__(**options)
        self.faults = dict(faults)

    def __call__(self, host: FakeHost, message: Message) -> Any:
        key = (host.env_id, Op(message.op))
        fault, times = self.faults.get(key, (None, 0))
        if fault is None or times == 0:
            return super().__call__(host, message)
        self.faults[key] = (fault, times - 1)
        if fault == "nothing":
            return []
        if isinstance(fault, HostDied):
            return [(self.seconds.get(Op(message.op), 0.0), fault)]
        during = {Op.HELLO: "construction", Op.RESET: "reset"}.get(Op(message.op), "call")
        failure = RemoteFailure(FailureKind.RAISED, during, "RuntimeError", fault)
        seconds = self.seconds.get(Op(message.op), 0.0)
        return [(seconds, message._replace(op=Op.FAILED, payload=failure))]


ALWAYS = 10**6


def launch(rig: Rig, replay_paths: Any = None, **config: Any) -> None:
    with rig.engine.calling:
        build_envs(rig.engine, same_spaces=ManagerConfig(**config).same_spaces)
        begin_envs(rig.engine, replay_paths)


def launch_error(rig: Rig, replay_paths: Any = None, **config: Any) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        launch(rig, replay_paths, **config)
    return caught.value


def test_a_launch_ends_when_all_envs_are_ready() -> None:
    rig = Rig(3, answer=FakeEnvs(seconds={Op.HELLO: 2.0, Op.RESET: 1.0}))
    began = rig.clock()
    launch(rig)
    assert rig.clock() == began + 3.0
    assert rig.ready() == [0, 1, 2]
    assert not rig.supervisor.table.launching


def test_all_failures_are_in_one_error() -> None:
    rig = Rig(
        5,
        answer=Faulty(
            {(1, Op.HELLO): ("no licence", ALWAYS), (3, Op.HELLO): (HostDied(-11), ALWAYS)}
        ),
    )
    error = launch_error(rig)
    assert list(error.failures) == [1, 3]
    assert isinstance(error.failures[1], EnvRaised)
    assert isinstance(error.failures[3], EnvCrash)
    assert error.__cause__ is error.failures[1]
    text = str(error)
    assert text.startswith("2 of 5 envs could not be launched; everything is closed again:")
    assert "no licence" in text
    assert "SIGSEGV" in text


def test_a_long_list_of_failures_is_shown_in_part() -> None:
    faults = {(i, Op.HELLO): (f"port 500{i} is taken", ALWAYS) for i in range(64)}
    faults[62, Op.HELLO] = faults[0, Op.HELLO]
    error = launch_error(Rig(64, answer=Faulty(faults)))
    assert len(error.failures) == 64
    assert "- envs 0, 62 (generation 0) raised" in str(error)
    assert "port 5002 is taken" in str(error)
    assert "port 5003 is taken" not in str(error)
    assert "- and 60 more (envs 3 to 61, 63), in the `failures` of this error" in str(error)


def test_what_all_envs_fail_with_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = {(i, Op.HELLO): ("no licence", ALWAYS) for i in range(64)}
    faults[7, Op.HELLO] = ("another reason", ALWAYS)
    error = launch_error(Rig(64, answer=Faulty(faults)))
    assert list(error.failures) == list(range(64))
    failure_text = str(error.failures[0])
    assert str(error).count("no licence") == failure_text.count("no licence")
    assert "- envs 0 to 6, 8 to 63 (generation 0) raised" in str(error)
    assert f"- {error.failures[7]}" in str(error)
    assert len(str(error)) < len(failure_text) + 400
    assert not [record for record in caplog.records if "no licence" in record.getMessage()]


def test_several_envs_are_spoken_of_in_the_plural() -> None:
    faults: dict[Any, Any] = {(i, Op.HELLO): ("lost in its maze", ALWAYS) for i in (0, 1)}
    faults |= {(i, Op.HELLO): (HostDied(-11), ALWAYS) for i in (2, 3)}
    faults[4, Op.HELLO] = ("boom", ALWAYS)
    text = str(launch_error(Rig(5, answer=Faulty(faults))))
    assert (
        "- envs 0, 1 (generation 0) raised RuntimeError in their construction: lost in its" in text
    )
    assert "- the workers of envs 2, 3 (generation 0) died during construction" in text
    assert "- env 4 (generation 0) raised RuntimeError in its construction" in text


def test_a_failure_waits_a_little_for_the_others() -> None:
    faults = {(0, Op.HELLO): ("at once", ALWAYS), (1, Op.RESET): ("later", ALWAYS)}
    rig = Rig(3, answer=Faulty(faults))
    rig.transport.answer.seconds = {}  # type: ignore[union-attr]
    began = rig.clock()
    assert list(launch_error(rig).failures) == [0]  # nobody is reset when one is not built
    assert rig.clock() == began
    rig = Rig(3, answer=Faulty({(0, Op.HELLO): ("at once", ALWAYS), (1, Op.HELLO): ("nothing", 1)}))
    began = rig.clock()
    assert list(launch_error(rig).failures) == [0]
    assert rig.clock() == began + 5.0


def test_failures_of_the_first_reset_are_collected() -> None:
    faults = {(0, Op.RESET): ("no level", ALWAYS), (2, Op.RESET): (HostDied(3), ALWAYS)}
    rig = Rig(3, answer=Faulty(faults))
    error = launch_error(rig)
    assert list(error.failures) == [0, 2]
    assert {failure.during for failure in error.failures.values()} == {"reset"}


@pytest.mark.parametrize("fault", ["no level", HostDied(3)])
@pytest.mark.parametrize("renew", [False, True])
def test_the_first_reset_has_its_attempts_and_no_more(fault: Any, renew: bool) -> None:
    policy = FailurePolicy(max_retry=3, retry_waiting_s=0.5, renew_between_attempts=renew)
    rig = Rig(2, answer=Faulty({(0, Op.RESET): (fault, 2)}), policy=policy)
    launch(rig)
    assert rig.ready() == [0, 1]
    rig = Rig(2, answer=Faulty({(0, Op.RESET): (fault, ALWAYS)}), policy=policy)
    error = launch_error(rig)
    assert list(error.failures) == [0]
    assert len(rig.reset_requests()) == 3


def test_a_host_with_many_fragile_envs_has_as_many_attempts_as_they_have_alone() -> None:
    class Fragile(FakeEnvs):
        """Each env takes its host along twice before it is reset once: never three times."""

        def __init__(self) -> None:
            super().__init__()
            self.deaths = [0] * 4

        def __call__(self, host: FakeHost, message: Message) -> Any:
            if message.op != Op.RESET or host.ended:
                return () if host.ended else super().__call__(host, message)
            deaths, env_id = self.deaths, message.env_id
            deaths[env_id] = (deaths[env_id] + 1) % 3
            if deaths[env_id]:
                return [(1.0, HostDied(3))]
            return super().__call__(host, message)

    policy = FailurePolicy(max_retry=3, retry_waiting_s=0.0)
    rig = Rig(4, answer=Fragile(), num_workers=1, policy=policy)
    error = launch_error(rig)
    assert isinstance(error.__cause__, EnvCrash)
    assert len(rig.transport.hosts) == 4 * 3  # without a bound for all of them it would be 3**4


def test_an_env_that_hangs_in_its_construction_is_a_timeout() -> None:
    rig = Rig(2, answer=Faulty({(1, Op.HELLO): ("nothing", 1)}), deadlines=Deadlines(connect_s=7.0))
    began = rig.clock()
    error = launch_error(rig)
    assert rig.clock() == began + 7.0
    assert isinstance(error.failures[1], EnvTimeout)


def test_an_env_that_hangs_in_its_first_reset_is_a_timeout() -> None:
    rig = Rig(2, answer=Faulty({(1, Op.RESET): ("nothing", 1)}), deadlines=Deadlines(reset_s=7.0))
    error = launch_error(rig)
    assert isinstance(error.failures[1], EnvTimeout)
    assert "7 s of reset_timeout" in str(error)


@pytest.mark.parametrize("is_seen_before", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_host_that_dies_before_the_others_are_built_fails_the_launch(
    num_workers: int, is_seen_before: bool
) -> None:
    rig = Rig(2, answer=FakeEnvs(), num_workers=num_workers)
    rig.supervisor.start_hosts([0])
    rig.pump()
    rig.transport.die(0)  # its spaces had been read before the launch
    if is_seen_before:  # by the background
        rig.pump()
    error = launch_error(rig)
    assert error.failures[0].during == "idle"
    assert isinstance(error.__cause__, EnvCrash)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_host_that_is_known_to_have_died_before_the_first_reset_fails_the_launch(
    num_workers: int,
) -> None:
    rig = Rig(2, answer=FakeEnvs(), num_workers=num_workers)
    with rig.engine.calling:
        build_envs(rig.engine, same_spaces=True)
        rig.transport.die(1)
        rig.engine.collect()
        with pytest.raises(LaunchError) as caught:
            begin_envs(rig.engine, None)
    assert caught.value.failures[1].during == "idle"
    assert all(op is not Op.RESET for host in rig.transport.hosts.values() for op, _ in host.told)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_numbers_that_are_to_raise_fail_a_launch_at_once(num_workers: int) -> None:
    policy = FailurePolicy(max_retry=3)
    rig = Rig(2, policy=policy, num_workers=num_workers, raise_non_finite=True)
    rig.transport.answer = FakeEnvs()
    rig.start()
    rig.transport.answer = None
    rig.supervisor.begin_episodes()
    rig.fail(0, "reset", kind=FailureKind.NON_FINITE)
    repair = rig.supervisor.repair
    assert list(repair.launch_failures) == [0]
    assert (repair.fatal, repair.urgent) == (None, False)
    rig.die(1)  # who shares its host, and is to be tried again, is not forgotten
    rig.run(1.0)
    assert rig.phase(1) is Phase.STARTING


def test_without_recovery_a_launch_fails_in_the_same_way() -> None:
    rig = Rig(
        2, answer=Faulty({(1, Op.RESET): ("no", ALWAYS)}), policy=FailurePolicy(recover=False)
    )
    assert list(launch_error(rig, on_failure="raise").failures) == [1]
    assert rig.supervisor.repair.fatal is None


class TwoSpaces(FakeEnvs):
    """Env 1 has another action space."""

    def description_of(self, env: HostedEnv) -> EnvDescription:
        return description(None, Discrete(2 + env.env_id))


def test_envs_with_different_spaces_are_refused_unless_that_is_wanted() -> None:
    with pytest.raises(SpaceMismatchError):
        launch(Rig(2, answer=TwoSpaces()))
    rig = Rig(2, answer=TwoSpaces())
    launch(rig, same_spaces=False)
    assert rig.ready() == [0, 1]


# -- replays --------------------------------------------------------------------------------------


def test_replays_are_enabled_before_the_first_reset_and_on_later_generations() -> None:
    rig = Rig(2, answer=FakeEnvs())
    launch(rig, ["a", "b"])
    for env_id, path in ((0, "a"), (1, "b")):
        received = rig.transport.host_of(env_id).told
        assert [op for op, _ in received] == [Op.CALL, Op.RESET]
        assert received[0][1] == ("enable_save_replay", (path,))
        assert rig.slot(env_id).result is None
    rig.transport.die(1)
    rig.run(1.0)
    received = rig.transport.host_of(1).told
    assert [op for op, _ in received] == [Op.CALL, Op.RESET]
    assert received[0][1] == ("enable_save_replay", ("b",))


@pytest.mark.parametrize("fault", ["no moviepy", HostDied(3)])
def test_replays_that_cannot_be_enabled_fail_the_launch(fault: Any) -> None:
    rig = Rig(2, answer=Faulty({(1, Op.CALL): (fault, ALWAYS)}))
    error = launch_error(rig, ["a", "b"])
    assert list(error.failures) == [1]
    assert error.failures[1].during == "call"


# -- failures in launch ---------------------------------------------------------------------------


def launching(env_num: int = 2, **options: Any) -> Rig:
    rig = Rig(env_num, **options)
    rig.supervisor.start_hosts(range(env_num))
    return rig


def test_a_construction_that_fails_in_launch_is_collected_and_not_renewed() -> None:
    rig = launching()
    rig.fail(1, "construction")
    rig.hello(0)
    failures = rig.supervisor.repair.launch_failures
    assert list(failures) == [1]
    assert isinstance(failures[1], EnvRaised)
    assert failures[1].during == "construction"
    assert rig.slot(1).phase is Phase.IDLE
    rig.run(100.0)
    assert len(rig.transport.hosts) == 2
    assert rig.supervisor.repair.fatal is None


def test_a_host_that_dies_in_launch_is_collected() -> None:
    rig = launching()
    rig.die(0, 3)
    rig.die(1, 4)
    failures = rig.supervisor.repair.launch_failures
    assert [type(failures[i]) for i in (0, 1)] == [EnvCrash, EnvCrash]
    assert rig.slot(0).phase is Phase.IDLE


def test_the_first_reset_is_tried_as_often_as_allowed() -> None:
    rig = launching(1, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5))
    rig.hello()
    rig.supervisor.place_observations(same_spaces=True)
    rig.supervisor.begin_episodes()
    rig.fail(0, "reset")
    assert rig.supervisor.repair.launch_failures == {}
    rig.advance(0.5)
    rig.fail(0, "reset")
    assert list(rig.supervisor.repair.launch_failures) == [0]
    assert rig.state() is EnvState.ERROR


def test_hosts_lost_in_their_first_reset_are_replaced_as_often_as_attempts_are_allowed() -> None:
    rig = launching(1, policy=FailurePolicy(max_retry=3, retry_waiting_s=0.5))
    rig.hello()
    rig.supervisor.place_observations(same_spaces=True)
    rig.slot().new_seed = 7
    rig.supervisor.begin_episodes()
    for generation in (1, 2):
        rig.die()
        rig.advance(0.5)
        assert rig.slot().generation == generation
        assert rig.supervisor.repair.launch_failures == {}
        rig.hello()
    assert [request.seed for request in rig.reset_requests()] == [7, 7, 7]
    rig.die()
    assert list(rig.supervisor.repair.launch_failures) == [0]


def test_a_later_attempt_in_launch_that_succeeds_is_a_success() -> None:
    rig = launching(1, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5))
    rig.hello()
    rig.supervisor.place_observations(same_spaces=True)
    rig.supervisor.begin_episodes()
    rig.die()
    rig.advance(0.5)
    recover(rig)
    assert rig.ready() == [0]
    assert rig.supervisor.repair.launch_failures == {}


def test_an_env_that_hangs_in_its_construction_is_given_up() -> None:
    rig = launching(1, deadlines=Deadlines(connect_s=2.0))
    rig.advance(2.0)
    (failure,) = rig.supervisor.repair.launch_failures.values()
    assert isinstance(failure, EnvTimeout)
    assert "exceeded the 2 s of connect_timeout in its construction" in str(failure)
    assert rig.transport.host_of(0).killed


# -- hosts of several envs ------------------------------------------------------------------------


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
    recover_all(rig, 0, 1)
    assert rig.ready() == [0, 1]
    assert rig.slot(0).failed_while_ready is None
    assert generations(rig) == [1, 1]


# -- what a launch warns of -----------------------------------------------------------------------


@pytest.mark.parametrize(("limit_mb", "warns"), [(1, True), (1_000_000, False), (None, False)])
def test_a_limit_that_new_workers_exceed_is_warned_of(
    limit_mb: int | None,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(2, answer=FakeEnvs())
    monkeypatch.setattr(type(rig.transport), "pids", {0: os.getpid()})
    limit = None if limit_mb is None else limit_mb * 1_000_000
    rig.supervisor.hosts.settings = replace(rig.supervisor.hosts.settings, max_rss_bytes=limit)
    launch(rig)
    assert [("max_worker_rss_mb is 1, but" in r.message) for r in caplog.records] == [True] * warns
