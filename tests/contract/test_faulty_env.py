"""Faulty envs do what their plan says, and managers make of it what they promise."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envmgr import create_env_manager
from envmgr.errors import EnvCrash, EnvFailure, EnvProtocolError, EnvRaised, EnvTimeout
from envmgr.testing import AuditedLoop, Fault, FaultError, FaultyEnv
from envmgr.testing.faulty import KINDS, worker_channel, write_garbage

EXPECTED: dict[str, type[EnvFailure] | None] = {
    **dict.fromkeys(["raise", "raise_two_arguments", "raise_local_class"], EnvRaised),
    **dict.fromkeys(["raise_strange", "text_reward", "array_reward", "no_info"], None),
    **dict.fromkeys(["keyboard_interrupt", "sys_exit", "os_exit", "kill"], EnvCrash),
    **dict.fromkeys(["segfault", "abort", "bus_error"], EnvCrash),
    **dict.fromkeys(["stop", "hang", "hang_holding_gil"], EnvTimeout),
    **dict.fromkeys(["wrong_shape", "wrong_dtype", "wrong_structure"], EnvProtocolError),
    **dict.fromkeys(["no_observation", "unpicklable_info"], EnvProtocolError),
    **dict.fromkeys(["nan_observation", "infinite_observation"], EnvProtocolError),
    **dict.fromkeys(["nan_reward", "infinite_reward", "not_a_timestep"], EnvProtocolError),
}
FAULTY = (*sorted(kind for kind, failure in EXPECTED.items() if failure is not None),)
HARMLESS = ("close_streams", "fork_child", "huge_info", "leak", "print_after_close", "slow")


def run(kinds: list[str], folder: Path) -> tuple[list[Any], Any]:
    """Have env i suffer from the ith kind in its second step; return errors and the report."""
    plan = [
        Fault(kind, env_id=i, step=2, build=0, argument=1000 if kind == "leak" else None)
        for i, kind in enumerate(kinds)
    ]
    env_fn = [partial(FaultyEnv, i, plan, folder=str(folder)) for i in range(len(kinds))]
    cfg = {"type": "subprocess", "step_timeout": 5.0, "nan_policy": "abnormal"}
    budget = {"max_failures": 100, "failure_window_s": 0.001}
    errors: list[Any] = [None] * len(kinds)
    with create_env_manager({**cfg, **budget}, env_fn=env_fn) as manager:
        loop = AuditedLoop(manager)
        for _ in range(2):
            manager.get_attr("action_space")
            for i, step in loop.step(loop.ledger.fresh_actions(loop.ready())).items():
                errors[i] = step.info.get("error")
    loop.ledger.end()
    return errors, loop.ledger.check()


def test_every_fault_of_a_step_is_the_failure_that_it_should_be(tmp_path: Path) -> None:
    errors, report = run([*FAULTY], tmp_path)
    found = {kind: type(error) for kind, error in zip(FAULTY, errors, strict=True)}
    assert found == {kind: EXPECTED[kind] for kind in FAULTY}
    assert (report.normal, report.abnormal) == (len(FAULTY), len(FAULTY))


def test_garbage_is_noticed_with_the_step_or_after_it() -> None:
    env_fn = [partial(FaultyEnv, 0, [Fault("garbage", step=2, episode=0)])]
    with create_env_manager({"type": "subprocess"}, env_fn=env_fn) as manager:
        while not manager.stats()["failures"]:  # ended by the limit of time for tests
            manager.step(dict.fromkeys(manager.ready_obs, 1))
            manager.ready_obs  # noqa: B018 - looks for what has come
        assert manager.stats()["failures_by_kind"] == {"EnvProtocolError": 1}


def test_what_is_no_fault_of_a_step_is_none(tmp_path: Path) -> None:
    errors, report = run([*HARMLESS], tmp_path)
    assert errors == [None] * len(HARMLESS)
    assert report.abnormal == 0


def test_all_kinds_are_known_and_tried() -> None:
    assert set(KINDS) - set(EXPECTED) - set(HARMLESS) <= {
        *("abnormal", "garbage", "list_info", "no_reward")
    }
    with pytest.raises(ValueError, match="there is no fault 'tickle'"):
        Fault("tickle")
    with pytest.raises(ValueError, match="in 'dream'"):
        Fault("raise", where="dream")
    plan = (Fault("kill", env_id=1, step=2),)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_faults_happen_where_the_plan_says(tmp_path: Path) -> None:
    with pytest.raises(FaultError):
        FaultyEnv(0, [Fault("raise", where="construction")])
    again = partial(
        FaultyEnv, 0, [Fault("raise", where="construction", build=1)], folder=str(tmp_path)
    )
    again()
    with pytest.raises(FaultError):
        again()
    assert again().build == 2
    env = FaultyEnv(
        3, [Fault("raise", where="reset", env_id=3, episode=1), Fault("raise", "close")]
    )
    env.reset()
    with pytest.raises(FaultError):
        env.reset()
    with pytest.raises(FaultError):
        env.close()
    env = FaultyEnv(3, [Fault("wrong_shape", where="reset"), Fault("no_reward", step=1, env_id=3)])
    assert env.reset()[0].shape == (8,)
    assert env.step(1)[1] is None
    assert isinstance(env.step(1)[1], float)


def test_outside_of_workers_there_is_no_connection_to_spoil() -> None:
    assert worker_channel() is None
    with pytest.raises(FaultError, match="not a worker process"):
        write_garbage()
