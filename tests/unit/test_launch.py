"""From a config to the parts of a manager."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from gymnasium.spaces import Discrete

from envmgr import make
from envmgr.config import ManagerConfig
from envmgr.errors import ConfigError
from envmgr.launch import (
    build_engine,
    checked_factories,
    deadlines_of,
    spin_s_of,
    worker_settings_of,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from tests.fakes import FakeClock, FakeTransport
from tests.rig import over_routes
from tests.unit.core_rigs import make_one

pytestmark = over_routes


def numbered(i: int, *, size: int = 3) -> Any:
    return make_one()


def decorated(build: Callable[..., Any]) -> Callable[[], Any]:
    @functools.wraps(build)
    def first() -> Any:
        return build(0)

    return first


def test_functions_that_need_arguments_are_refused() -> None:
    says = r"<function numbered .*'i', .*\[functools\.partial\(make_env, i\)"
    with pytest.raises(ConfigError, match=says):
        checked_factories([make_one, numbered, numbered])
    with pytest.raises(ConfigError, match="the arguments 'a', 'b'"):
        make(lambda a, *more, b, **others: make_one(), 4)


def test_functions_that_need_none_are_taken() -> None:
    fits: list[Any] = [
        functools.partial(numbered, 2),
        functools.partial(numbered, i=2),
        lambda i=0, *more, **others: make_one(),
        decorated(numbered),
        Mock(),
        dict,  # whose signature nobody knows
    ]
    assert checked_factories(fits) == fits


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


@pytest.mark.parametrize(
    ("kind", "env_num", "given", "warns"),
    [
        ("async_subprocess", 4, {"wait_num": 9}, True),
        ("subprocess", 1, {"wait_num": 3}, True),
        ("async_subprocess", 4, {"wait_num": 4}, False),
        ("async_subprocess", 4, {"wait_num": math.inf}, False),
        ("async_subprocess", 1, {}, False),  # its default is 2
        ("subprocess", 1, {}, False),
    ],
)
def test_a_wait_num_above_the_number_of_envs_is_remarked_on_if_somebody_chose_it(
    kind: str,
    env_num: int,
    given: dict[str, Any],
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make("CartPole-v1", env_num, type=kind, **given)
    assert ["every step waits for all" in r.message for r in caplog.records] == [True] * warns
