"""Launching: all envs or none, with all failures in one error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gymnasium.spaces import Discrete

from envmgr.config import ManagerConfig
from envmgr.core.launching import begin_envs, build_envs
from envmgr.core.phases import Phase
from envmgr.core.spares import all_factories, spare_factory
from envmgr.errors import (
    ConfigError,
    EnvCrash,
    EnvRaised,
    EnvTimeout,
    LaunchError,
    SpaceMismatchError,
)
from envmgr.launch import (
    build_engine,
    deadlines_of,
    spin_s_of,
    worker_settings_of,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import HostDied
from envmgr.wire.messages import EnvDescription, FailureKind, Message, Op, RemoteFailure
from tests.fake_hosts import FakeEnvs, FakeHost, HostedEnv, description
from tests.fakes import FakeClock, FakeTransport
from tests.rig import Rig, over_routes

pytestmark = over_routes


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
    faults = {(i, Op.HELLO): (f"reason {i}", ALWAYS) for i in range(6)}
    error = launch_error(Rig(6, answer=Faulty(faults)))
    assert len(error.failures) == 6
    assert "reason 2" in str(error)
    assert "reason 3" not in str(error)
    assert "and 3 more, in the `failures` of this error" in str(error)


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


# -- from a config --------------------------------------------------------------------------------


def test_a_config_says_how_the_engine_is_built() -> None:
    config = ManagerConfig(
        episode_num=3,
        auto_reset=False,
        step_timeout=1.5,
        reset_timeout=2.5,
        connect_timeout=3.5,
        close_timeout=4.5,
        on_failure="raise",
        on_exhausted="drop",
        max_retry=4,
        retry_type="renew",
        retry_waiting_time=0.25,
        max_failures=7,
        failure_window_s=8.0,
        max_worker_rss_mb=100,
        max_episodes_per_worker=9,
        nan_policy="raise",
        strict_dtype=True,
        copy_on_get=False,
    )
    assert deadlines_of(config) == Deadlines(1.5, 2.5, 3.5, 4.5)
    transport = FakeTransport(FakeClock())
    clock = FakeClock()
    engine = build_engine([lambda: None] * 2, config, transport, (None, Discrete(3)), clock)
    assert engine.now() == clock()
    supervisor = engine.supervisor
    assert supervisor.table.env_states() == (EnvState.VOID,) * 2
    supervisor.start_hosts([0, 1])
    settings = transport.hosts[1].spec.settings
    assert settings.rules.strict_dtype
    assert settings.rules.refuse_non_finite
    assert settings.refuse_non_finite_rewards
    assert settings.action_space == Discrete(3)
    assert settings.observation_space is None
    assert settings.max_episodes == 9
    assert settings.max_rss_bytes == 100_000_000
    assert settings.propagate == ()
    rules = supervisor.rules
    assert (rules.episode_num, rules.auto_reset, rules.copy_on_get) == (3, False, False)
    assert rules.raise_non_finite
    policy = supervisor.repair._policy
    assert policy == FailurePolicy(
        recover=False,
        max_retry=4,
        renew_between_attempts=True,
        retry_waiting_s=0.25,
        max_failures=7,
        window_s=8.0,
        drop_exhausted=True,
    )
    engine.close(0.0)


def test_the_defaults_allow_all_numbers_and_limit_nothing() -> None:
    transport = FakeTransport(FakeClock())
    engine = build_engine([lambda: None], ManagerConfig(), transport, (None, None), FakeClock())
    engine.supervisor.start_hosts([0])
    settings = transport.hosts[1].spec.settings
    assert not settings.rules.refuse_non_finite
    assert not settings.refuse_non_finite_rewards
    assert settings.max_episodes is settings.max_rss_bytes is None
    assert engine.supervisor.rules.episode_num == float("inf")
    engine.close(0.0)


@pytest.mark.parametrize(
    ("affinity", "expected"), [(None, None), ([0, 1], ((0, 1),)), ([[0], [1, 2]], ((0,), (1, 2)))]
)
def test_workers_are_set_up_as_the_config_says(affinity: Any, expected: Any) -> None:
    config = ManagerConfig(
        worker_affinity=affinity,
        worker_threads=3,
        worker_env={"allow": ["A*"], "deny": ["AB"], "set": {"X": "1"}},  # type: ignore[arg-type]
        daemon=False,
    )
    settings = worker_settings_of(config)
    assert settings.affinity == expected
    assert settings.threads == 3
    assert (settings.allow, settings.deny, dict(settings.set)) == (("A*",), ("AB",), {"X": "1"})
    assert settings.daemon is False


def make_one() -> None: ...


def make_another() -> None: ...


def test_spares_are_built_by_the_function_that_most_envs_have() -> None:
    many = partial(make_one), make_another, partial(make_one)
    config = ManagerConfig(type="subprocess", spare_env_num=2).with_env_num(3)
    assert all_factories(many, 2)[3:] == [many[0]] * 2
    supervisor = build_engine(many, config, FakeTransport(FakeClock()), (None, None), FakeClock())
    assert supervisor.supervisor.rules.spare_takers == (True, False, True)
    supervisor.close(0.0)


def test_functions_that_cannot_be_sent_are_compared_as_objects() -> None:
    class Unsendable:
        def __call__(self) -> None: ...

        def __reduce__(self) -> Any:
            raise ValueError("not me")

    one, other = Unsendable(), Unsendable()
    assert spare_factory([one, other, other]) is other


def test_spares_are_refused_where_envs_run_in_the_caller() -> None:
    class IdleTransport(FakeTransport):
        works_alone = False

    transport = IdleTransport(FakeClock())
    config = ManagerConfig(type="of_somebody_else", spare_env_num=1).with_env_num(1)
    with pytest.raises(ConfigError, match=r"manager\.spare_env_num is 1"):
        build_engine([make_one], config, transport, (None, None), FakeClock())


def test_no_host_watches_the_block_where_spares_take_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envmgr.launch.usable_cores", lambda affinity: 4)
    config = ManagerConfig(type="subprocess").with_env_num(3)
    assert spin_s_of(config) > 0.0
    assert spin_s_of(replace(config, spare_env_num=1)) == 0.0
