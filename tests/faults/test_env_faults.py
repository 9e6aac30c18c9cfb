"""What env code does wrong, in steps, resets and constructions: F5 to F8, and F18 to F20."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from envmgr import EnvState
from envmgr.errors import (
    AllEnvsFailedError,
    EnvCrash,
    EnvNotReadyError,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LaunchError,
)
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    INLINE,
    SETUPS,
    SOME_BLOCK,
    SOME_MESSAGE,
    SOME_MESSAGE_SHARED,
    Setup,
    World,
    every_kind,
    over,
    process_kinds,
    ready_all,
    step_all,
    wait_ended,
)
from tests.faults.others import check_each, check_others

LIMIT_S = 1.0
FORKSERVED = Setup("subprocess", "forkserver")
# Exceptions take the same way whatever has started the process: others than fork run few.
everywhere = over(*SETUPS)
everywhere_quick = over(INLINE, ALL_BLOCK, SOME_BLOCK, SOME_MESSAGE_SHARED)


# -- F5: in a step --------------------------------------------------------------------------------


@everywhere
def test_f05_an_exception_in_a_step_costs_one_timestep(tmp_path: Path, setup: Setup) -> None:
    error = check_others(tmp_path, setup, Do.RAISE, host_lost=False).info["error"]
    assert (type(error), error.during) == (EnvRaised, "step")
    assert error.type_name == "tests.contract.envs.ScriptedError"
    assert error.remote_message == "scripted error in step of env 1"
    assert "in suffer" in error.remote_traceback
    assert error.remote_traceback.rstrip() in str(error)


@over(ALL_BLOCK, SOME_BLOCK)
def test_f05_with_retry_type_renew_the_env_is_built_anew(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, retry_type="renew")
    ready_all(manager)
    assert isinstance(step_all(manager, {0: Do.RAISE})[0].info["error"], EnvRaised)
    assert [seen(obs)[:4] for obs in ready_all(manager).values()] == [(0, 1, 0, 0), (1, 0, 0, 0)]
    assert world.actions(0) == [Do.RAISE], "the step was run again"


@over(FORKSERVED)
def test_f05_under_another_start_method(tmp_path: Path, setup: Setup) -> None:
    assert isinstance(
        check_others(tmp_path, setup, Do.RAISE, host_lost=False).info["error"], EnvRaised
    )


# -- F6: in a reset -------------------------------------------------------------------------------


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
@everywhere_quick
def test_f06_a_reset_that_raises_is_tried_as_often_as_allowed(
    world: World, setup: Setup, retry_type: str
) -> None:
    faults = {"reset_faults": {1: "raise", 2: "raise"}}
    cfg = {"max_retry": 3, "retry_type": retry_type, "retry_waiting_time": 0.01}
    manager = world.make(setup, 2, seed=3, scripts={0: faults}, **cfg)
    ready_all(manager)
    last = step_all(manager, {0: Do.END, 1: 1})[0]
    assert last.done
    assert "abnormal" not in last.info
    ready = ready_all(manager)
    assert seen(ready[0]).build == (2 if retry_type == "renew" else 0)
    assert seen(ready[1])[1:4] == (0, 0, 1)
    stats = manager.stats()
    assert (stats["reset_retries"], stats["failures"], stats["abnormal"]) == (2, 2, 0)
    assert manager.env_states[0] is EnvState.RUN


@everywhere_quick
def test_f06_when_all_attempts_are_used_up_the_policy_decides(world: World, setup: Setup) -> None:
    faults = {"reset_faults": dict.fromkeys(range(1, 99), "raise")}
    cfg = {"max_retry": 2, "max_failures": 1, "retry_waiting_time": 0.01}
    manager = world.make(setup, 2, scripts={0: faults}, **cfg)
    ready_all(manager)
    step_all(manager, {0: Do.END, 1: 1})
    with pytest.raises(FailuresExhaustedError) as raised:
        ready_all(manager)
    assert isinstance(raised.value.failure, EnvRaised)
    assert raised.value.failure.during == "reset"
    assert manager.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    # Two failures for the budget, and two attempts for each of them.
    assert len(world.noted(0, "reset")) == 1 + 4
    assert seen(step_all(manager, {1: 1})[1].obs)[1:4] == (0, 0, 2)


RESET_FAULTS = {
    "raise": EnvRaised,
    "strange_error": EnvRaised,
    "sys_exit": EnvCrash,
    "os_exit": EnvCrash,
    "kill": EnvCrash,
    "sleep": EnvTimeout,
    "garbage": EnvProtocolError,
}
every_reset_fault = pytest.mark.parametrize("fault", RESET_FAULTS)


@every_reset_fault
@process_kinds
def test_f06_a_faulty_automatic_reset_is_repaired(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(setup, 2, reset_timeout=LIMIT_S, scripts={0: {"reset_faults": {1: fault}}})
    ready_all(manager)
    last = step_all(manager, {0: Do.END, 1: 1})[0]
    assert last.done
    assert "abnormal" not in last.info
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    stats = manager.stats()
    assert (stats["failures"], stats["abnormal"]) == (1, 0)
    assert stats["failures_by_kind"] == {RESET_FAULTS[fault].__name__: 1}
    assert seen(step_all(manager, {1: 1})[1].obs)[2:4] == (0, 2)


@every_reset_fault
@over(ALL_MESSAGE)
def test_f06_a_faulty_explicit_reset_is_repaired_before_reset_returns(
    world: World, setup: Setup, fault: str
) -> None:
    manager = world.make(setup, 2, reset_timeout=LIMIT_S, scripts={0: {"reset_faults": {1: fault}}})
    ready_all(manager)
    manager.reset()
    assert [seen(obs)[:2] for obs in manager.ready_obs.values()] == [(0, 1), (1, 0)]


# -- F7: at launch --------------------------------------------------------------------------------


@over(*SETUPS)
def test_f07_envs_that_cannot_be_built_fail_the_launch_together(world: World, setup: Setup) -> None:
    faulty = {"build_faults": {0: "raise"}}
    manager = world.make(setup, 4, launch=False, scripts={1: faulty, 3: faulty})
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    failures = raised.value.failures
    assert {i: (type(f), f.during) for i, f in failures.items()} == {
        1: (EnvRaised, "construction"),
        3: (EnvRaised, "construction"),
    }
    assert "scripted error in build of env 1" in str(raised.value)
    assert manager.closed
    assert set(manager.env_states.values()) == {EnvState.VOID}
    for i in (0, 2):
        assert len(world.noted(i, "close")) == 1, "a sibling was not closed"
        if setup.has_processes:
            wait_ended(world.pid(i))
            assert not os.path.exists(f"/proc/{world.pid(i)}")
    manager.launch()
    assert [*ready_all(manager)] == [0, 1, 2, 3]


@every_reset_fault
@over(ALL_MESSAGE)
def test_f07_a_faulty_first_reset_fails_the_launch(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(
        setup,
        2,
        launch=False,
        reset_timeout=LIMIT_S,
        close_timeout=0.2,
        scripts={1: {"reset_faults": {0: fault}}},
    )
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    assert {i: type(f) for i, f in raised.value.failures.items()} == {1: RESET_FAULTS[fault]}
    assert manager.closed
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


@pytest.mark.parametrize("fault", ["raise", "sys_exit", "os_exit", "kill", "sleep"])
@process_kinds
def test_f07_a_faulty_rebuild_is_tried_again(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(
        setup,
        2,
        connect_timeout=5.0 if fault != "sleep" else 3.0,  # which a busy machine may take, too
        retry_waiting_time=0.01,
        scripts={0: {"build_faults": {1: fault}}},
    )
    ready_all(manager)
    assert step_all(manager, {0: Do.KILL})[0].info["abnormal"]
    assert seen(ready_all(manager)[0])[:4] == (0, 2, 0, 0)
    assert manager.stats()["failures"] == 2
    assert seen(step_all(manager, {1: 1})[1].obs)[3] == 1


# -- F8: strange exceptions -----------------------------------------------------------------------

STRANGE = {
    Do.STRANGE_ERROR: ("tests.contract.envs.StrangeError", "its text cannot be shown"),
    Do.TWO_ARGUMENT_ERROR: ("tests.contract.envs.TwoArgumentError", "scripted error in step"),
    Do.LOCAL_ERROR: ("tests.contract.envs.Script.suffer.<locals>.LocalError", "scripted error in"),
}


@everywhere_quick
def test_f08_exceptions_that_cannot_be_sent_are_told_as_text(tmp_path: Path, setup: Setup) -> None:
    for action, timestep in check_each(tmp_path, setup, [*STRANGE], host_lost=False).items():
        type_name, text = STRANGE[action]
        error = timestep.info["error"]
        assert (type(error), error.type_name) == (EnvRaised, type_name)
        assert text in error.remote_message
        assert "in suffer" in error.remote_traceback


@pytest.mark.parametrize("fault", ["strange_error", "two_argument_error", "local_error"])
@over(ALL_BLOCK)
def test_f08_in_a_construction_and_in_a_call_too(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(setup, 1, launch=False, scripts={0: {"build_faults": {0: fault}}})
    with pytest.raises(LaunchError, match="env 0"):
        manager.launch()
    manager.launch()
    with pytest.raises(EnvRaised):
        manager.call("fail", fault)
    assert seen(ready_all(manager)[0]).build == 1


# -- F18: hanging at launch -----------------------------------------------------------------------


@over(ALL_BLOCK, SOME_MESSAGE)
def test_f18_a_construction_that_hangs_ends_the_launch_at_its_limit(
    world: World, setup: Setup
) -> None:
    limit_s = 3.0  # the other two are built in less, also on a machine that has much else to do
    scripts = {1: {"build_faults": {0: "sleep"}}}
    manager = world.make(setup, 3, launch=False, connect_timeout=limit_s, scripts=scripts)
    began = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    assert limit_s <= time.monotonic() - began < limit_s + 5.0
    [failure] = raised.value.failures.values()
    assert (type(failure), failure.env_id, failure.during) == (EnvTimeout, 1, "construction")
    assert "connect_timeout" in str(failure)
    assert manager.closed
    for i in range(3):
        wait_ended(world.pid(i))
        assert not os.path.exists(f"/proc/{world.pid(i)}"), "it is not reaped"


# -- F19, F20: budgets ----------------------------------------------------------------------------


@pytest.mark.parametrize("on_exhausted", ["raise", "drop"])
@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, ALL_BLOCK._replace(num_workers=2))
def test_f19_a_crash_loop_keeps_within_its_budget(
    world: World, setup: Setup, on_exhausted: str
) -> None:
    pause_s, max_failures = 0.02, 4
    manager = world.make(
        setup,
        3 if setup.num_workers is None else 5,
        max_failures=max_failures,
        retry_waiting_time=pause_s,
        on_exhausted=on_exhausted,
        scripts={0: {"build_faults": {0: None, -1: "os_exit"}}},
    )
    ready_all(manager)
    others = [1, 2] if setup.num_workers is None else [3, 4]
    used_s = time.process_time()
    step_all(manager, {0: Do.KILL})
    if on_exhausted == "raise":
        with pytest.raises(FailuresExhaustedError):
            manager.reset({0: None})
        assert manager.env_states[0] is EnvState.ERROR
    else:
        while not manager.env_state_done(0):
            step_all(manager, dict.fromkeys(ready_all(manager, others), 1))
        with pytest.raises(EnvNotReadyError):
            manager.step({0: 1})
    used_s = time.process_time() - used_s
    failed = [m.time_s for m in manager.stats()["moments"] if m[0] == 0 and m[2] == "failed"]
    assert len(failed) == max_failures + 1
    # No pause before the first renewal; then it doubles.
    pauses = [later - sooner for sooner, later in itertools.pairwise(failed)]
    assert all(pause >= pause_s * 2**k for k, pause in enumerate(pauses[1:]))
    workers = {pid for _, pid in world.noted(0, "build")}
    assert len(workers) == max_failures + 1, "renewed after the end of the budget, or too seldom"
    if on_exhausted == "raise":
        assert used_s < 1.0
    step_all(manager, dict.fromkeys(ready_all(manager, others), 1))
    assert len(world.noted(0, "build")) == max_failures + 1, "it is still being renewed"


@every_kind
def test_f19_faults_in_a_row_do_not_wear_the_manager_out(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, max_failures=100, failure_window_s=0.001)
    ready_all(manager)
    for k in range(10):
        actions = {i: (Do.RAISE if (i + k) % 3 == 0 else Do.SYS_EXIT) for i in range(3)}
        timesteps = step_all(manager, actions)
        assert all(t.info["abnormal"] for t in timesteps.values())
        ready_all(manager)
    stats = manager.stats()
    assert (stats["actions"], stats["timesteps"], stats["abnormal"]) == (30, 30, 30)
    assert stats["failures_by_kind"] == {"EnvRaised": 10, "EnvCrash": 20}
    assert [len(world.actions(i)) for i in range(3)] == [10, 10, 10]


@everywhere_quick
def test_f20_when_all_envs_have_failed_ready_obs_says_so(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=0)
    ready_all(manager)
    step_all(manager, dict.fromkeys((0, 1), Do.RAISE))
    for _ in range(2):
        with pytest.raises(FailuresExhaustedError):
            _ = manager.ready_obs
    began = time.monotonic()
    for read in (lambda: manager.ready_obs, lambda: manager.ready_arrays()):
        with pytest.raises(AllEnvsFailedError, match=r"\[0, 1\].*reset"):
            read()
    assert time.monotonic() - began < 5.0, "it has waited for nothing"
    assert set(manager.env_states.values()) == {EnvState.ERROR}
    assert not manager.done
    manager.reset({1: None})
    assert [*manager.ready_obs] == [1]
    with pytest.raises(Exception, match="envs \\[0\\] do not become ready"):
        manager.ready_arrays(env_ids=[0, 1])


@everywhere_quick
def test_f20_when_all_envs_are_dropped_the_manager_is_done(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=0, on_exhausted="drop")
    ready_all(manager)
    step_all(manager, dict.fromkeys((0, 1), Do.RAISE))
    assert manager.done
    assert manager.ready_obs == {}
