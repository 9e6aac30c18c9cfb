"""Faults of envs: what they cost the env concerned, and that they cost the others nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envmgr import EnvState
from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LaunchError,
)
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ASYNC_FORK,
    BASE,
    SYNC_FORK,
    SYNC_SERVER,
    Setup,
    World,
    every_kind,
    over,
    process_kinds,
    ready_all,
    step_all,
)

LIMIT_S = 0.3
SPAWNED = Setup("subprocess", "spawn")
FORKSERVED = Setup("async_subprocess", "forkserver", False)

# What a step may do, and the failure that it is.
STEP_FAULTS: dict[Do, type[EnvFailure]] = {
    Do.RAISE: EnvRaised,
    Do.STRANGE_ERROR: EnvRaised,
    Do.SYS_EXIT: EnvCrash,
    Do.OS_EXIT: EnvCrash,
    Do.KILL: EnvCrash,
    Do.HANG: EnvTimeout,
    Do.HANG_DEAF: EnvTimeout,
    Do.BAD_SHAPE: EnvProtocolError,
    Do.UNPICKLABLE_INFO: EnvProtocolError,
    Do.NOT_A_TIMESTEP: EnvProtocolError,
    Do.GARBAGE: EnvProtocolError,
}
N_STEPS = 8
FAULTY, AT_STEP = 1, 4


def run(folder: Path, setup: Setup, action: Do | None) -> tuple[dict[int, list[Any]], Any]:
    """Run three envs for some steps; env 1 is given `action` in one of them.

    Returns:
        What each env gave, byte by byte, and the timestep of the faulty step.
    """
    folder.mkdir()
    world = World(folder)
    given: dict[int, list[Any]] = {i: [] for i in range(3)}
    faulty = None
    try:
        manager = world.make(setup, 3, seed=6, step_timeout=LIMIT_S, script={"episode_length": 3})
        for k in range(N_STEPS):
            for i, obs in ready_all(manager).items():
                given[i].append(obs.tobytes())
            actions = {i: int(Do.JITTER) for i in range(3)}
            if k == AT_STEP and action is not None:
                actions[FAULTY] = int(action)
            timesteps = step_all(manager, actions)
            if k == AT_STEP:
                faulty = timesteps[FAULTY]
            for i, (obs, reward, done, info) in timesteps.items():
                info.pop("error", None)
                given[i].append((obs.tobytes(), reward, done, repr(info)))
        assert manager.stats()["failures"] == (0 if action is None else 1)
        for i in range(3):
            executed = [k for _, k, _ in world.noted(i, "step")]
            assert len(executed) == N_STEPS, "a step was lost, or executed twice"
        if setup.has_processes and action is not None:
            builds = [len(world.noted(i, "build")) for i in range(3)]
            host_lost = not issubclass(STEP_FAULTS[action], EnvRaised)
            host_lost &= action not in (Do.BAD_SHAPE, Do.UNPICKLABLE_INFO, Do.NOT_A_TIMESTEP)
            assert builds == [1, 2 if host_lost else 1, 1]
    finally:
        world.close()
    return given, faulty


@pytest.mark.parametrize("action", STEP_FAULTS, ids=lambda action: action.name)
@process_kinds
def test_a_faulty_step_costs_one_timestep_and_siblings_feel_nothing(
    tmp_path: Path, setup: Setup, action: Do
) -> None:
    untroubled, _ = run(tmp_path / "untroubled", setup, None)
    troubled, timestep = run(tmp_path / "troubled", setup, action)
    assert timestep.info["abnormal"]
    for sibling in (0, 2):
        assert troubled[sibling] == untroubled[sibling]
    # Up to the fault the env itself is as it was, and it goes on after it.
    before = 2 * AT_STEP + 1
    assert troubled[FAULTY][:before] == untroubled[FAULTY][:before]
    assert len(troubled[FAULTY]) == len(untroubled[FAULTY])


@pytest.mark.parametrize(
    "action", [Do.RAISE, Do.KILL, Do.HANG, Do.GARBAGE], ids=lambda action: action.name
)
@over(SYNC_SERVER, SPAWNED, FORKSERVED)
def test_the_same_under_other_start_methods(tmp_path: Path, setup: Setup, action: Do) -> None:
    troubled, timestep = run(tmp_path / "troubled", setup, action)
    assert timestep.info["abnormal"]
    assert all(len(given) == 2 * N_STEPS for given in troubled.values())


@pytest.mark.parametrize("action", STEP_FAULTS, ids=lambda action: action.name)
@over(SYNC_FORK)
def test_faulty_steps_give_failures_of_their_type(world: World, setup: Setup, action: Do) -> None:
    manager = world.make(setup, 1, step_timeout=LIMIT_S)
    ready_all(manager)
    error = step_all(manager, {0: action})[0].info["error"]
    assert type(error) is STEP_FAULTS[action]
    assert error.env_id == 0
    assert error.during == "step"
    assert "env 0" in str(error)
    assert [*ready_all(manager)] == [0]


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
def test_a_faulty_automatic_reset_is_repaired(world: World, setup: Setup, fault: str) -> None:
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
@over(SYNC_FORK)
def test_a_faulty_explicit_reset_is_repaired_before_reset_returns(
    world: World, setup: Setup, fault: str
) -> None:
    manager = world.make(setup, 2, reset_timeout=LIMIT_S, scripts={0: {"reset_faults": {1: fault}}})
    ready_all(manager)
    manager.reset()
    assert [seen(obs)[:2] for obs in manager.ready_obs.values()] == [(0, 1), (1, 0)]


@every_reset_fault
@over(SYNC_FORK)
def test_a_faulty_first_reset_fails_the_launch(world: World, setup: Setup, fault: str) -> None:
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
def test_a_faulty_rebuild_is_tried_again(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(
        setup,
        2,
        connect_timeout=5.0 if fault != "sleep" else 1.0,
        retry_waiting_time=0.01,
        scripts={0: {"build_faults": {1: fault}}},
    )
    ready_all(manager)
    assert step_all(manager, {0: Do.KILL})[0].info["abnormal"]
    assert seen(ready_all(manager)[0])[:4] == (0, 2, 0, 0)
    assert manager.stats()["failures"] == 2
    assert seen(step_all(manager, {1: 1})[1].obs)[3] == 1


@process_kinds
def test_an_env_that_always_fails_ends_as_the_budget_says(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        max_failures=3,
        retry_waiting_time=0.01,
        scripts={0: {"build_faults": {0: None, -1: "os_exit"}}},
    )
    ready_all(manager)
    step_all(manager, {0: Do.KILL})
    with pytest.raises(FailuresExhaustedError):
        ready_all(manager)
    assert len(world.noted(0, "build")) == 4
    assert manager.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    assert seen(step_all(manager, {1: 1})[1].obs).step == 1
    assert len(world.noted(0, "build")) == 4, "it is still being renewed"


@every_kind
def test_faults_in_a_row_do_not_wear_the_manager_out(world: World, setup: Setup) -> None:
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


# -- base: limits in the caller's own thread ------------------------------------------------------


@over(BASE)
def test_in_line_a_hung_step_reset_and_build_end_at_their_limits(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup,
        2,
        step_timeout=LIMIT_S,
        reset_timeout=LIMIT_S,
        connect_timeout=LIMIT_S,
        retry_waiting_time=0.01,
        scripts={0: {"reset_faults": {1: "sleep"}, "build_faults": {1: "sleep"}}},
    )
    ready_all(manager)
    step_all(manager, {0: Do.END})  # the reset hangs, and so does the next construction
    assert seen(ready_all(manager)[0])[:4] == (0, 2, 0, 0)
    assert isinstance(step_all(manager, {0: Do.HANG})[0].info["error"], EnvTimeout)
    assert seen(ready_all(manager)[0])[:4] == (0, 3, 0, 0)
    assert manager.stats()["failures_by_kind"] == {"EnvTimeout": 3}
    assert seen(step_all(manager, {1: 1})[1].obs).step == 1


@over(ASYNC_FORK)
def test_limits_count_while_the_caller_waits_for_others(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=1, step_timeout=LIMIT_S)
    ready_all(manager)
    manager.send({0: Do.HANG})
    ended = []
    while not ended:
        for i, timestep in manager.step({1: Do.JITTER} if 1 in manager.ready_env else {}).items():
            if i == 0:
                ended.append(timestep)
    assert isinstance(ended[0].info["error"], EnvTimeout)
    assert ended[0].info["error"].limit_s == LIMIT_S
