"""Envs that share a host: whom a failure touches, and whom it does not."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envmgr import EnvState, create_env_manager
from envmgr.errors import EnvCrash, EnvTimeout
from envmgr.testing import Fault, FaultyEnv
from tests.contract.envs import Do, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK_SHARED,
    SOME_MESSAGE_SHARED,
    Setup,
    World,
    over,
    packed_setups,
    ready_all,
    step_all,
    wait_ended,
)
from tests.faults.others import run, untroubled

TWO_HOSTS = Setup("subprocess", "fork", num_workers=2)


def gather(manager: Any, count: int) -> dict[int, Any]:
    """Return so many timesteps, of different envs."""
    timesteps: dict[int, Any] = {}
    while len(timesteps) < count:
        more = manager.recv()
        assert not more.keys() & timesteps.keys()
        timesteps.update(more)
    return timesteps


FAULTS = {
    1: Do.RAISE,
    2: Do.SYS_EXIT,
    3: Do.BAD_SHAPE,
    4: Do.END_THEN_RAISE,
    5: Do.ABNORMAL,
    6: Do.END_THEN_SYS_EXIT,
}
"""What one env does, by step; three of these cost it its object."""


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_first_reset_that_costs_a_worker_does_not_cost_the_launch(
    tmp_path: Path, fault: str
) -> None:
    """Nor does it wait for the neighbour, which nobody else resets with auto_reset off."""
    plan = [Fault(fault, "reset", env_id=1, build=0)]
    env_fn = [partial(FaultyEnv, i, plan, folder=str(tmp_path)) for i in range(2)]
    cfg = {"type": "subprocess", "context": "fork", "num_workers": 1, "auto_reset": False}
    limits = {"max_retry": 2, "retry_waiting_time": 0.0, "reset_timeout": 2.0}
    with create_env_manager({**cfg, **limits}, env_fn=env_fn) as manager:
        assert set(manager.env_states.values()) == {EnvState.RUN}
        assert manager.generations == [1, 1]


@packed_setups
def test_neighbours_of_an_env_that_fails_are_as_if_it_had_not(tmp_path: Path, setup: Setup) -> None:
    troubled = run(tmp_path, setup, faults=FAULTS, env=ScriptedGymEnv)
    expected = untroubled(3, ScriptedGymEnv)
    for i in (0, 2):
        assert troubled.given[i] == expected[i]
    assert troubled.builds == [1, 1 + 3, 1]
    assert len(set.union(*troubled.pids)) == 1, "the host was replaced"
    assert troubled.stats["failures"] == len(FAULTS)


@pytest.mark.parametrize("how", [Do.GATE, Do.OS_EXIT], ids=lambda how: how.name)
def test_the_death_of_a_host_touches_its_envs_and_nobody_else(world: World, how: Do) -> None:
    manager = world.make(TWO_HOSTS, 5)  # 0, 1, 2 | 3, 4
    gate = world.gate
    first = ready_all(manager)
    pid = world.pid(0)
    manager.send({0: how})
    if how is Do.GATE:
        visit = gate.await_visit(0, "step")
        manager.send({1: 5, 3: 6})
        visit.kill()
    else:
        wait_ended(pid)
        manager.send({1: 5, 3: 6})
    timesteps = gather(manager, 3)
    error, second = (timesteps[i].info["error"] for i in (0, 1))
    assert isinstance(error, EnvCrash)
    assert error.exit_status == (-signal.SIGKILL if how is Do.GATE else 7)
    assert isinstance(second, EnvCrash)
    assert timesteps[1].obs.tobytes() == first[1].tobytes()
    if how is Do.GATE:  # else it was idle when it happened
        assert "because it is shared with env 0" in str(second)
    assert world.actions(1) == [], "it was executed although its host was gone"
    assert seen(timesteps[3].obs)[3:5] == (1, 6)
    doomed = manager.ready_obs[2]
    assert doomed.tobytes() == first[2].tobytes()
    assert gather_one(manager, 2).info["abnormal"]
    assert world.actions(2) == []
    again = ready_all(manager)
    assert [seen(again[i])[:4] for i in range(5)] == [
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (2, 1, 0, 0),
        (3, 0, 0, 1),
        (4, 0, 0, 0),
    ]
    stats = manager.stats()
    assert (stats["failures_by_env"], stats["abnormal"]) == ({0: 1}, 3)
    assert len({world.pid(i) for i in range(3)}) == 1


def gather_one(manager: Any, env_id: int) -> Any:
    return step_all(manager, {env_id: 1})[env_id]


@packed_setups
def test_a_step_that_hangs_is_charged_to_its_env_alone(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, step_timeout=2.0)
    gate = world.gate
    ready_all(manager)
    manager.send({0: 1, 1: Do.HANG, 2: 1})
    gate.await_visit(1, "step")
    timesteps = gather(manager, 3)
    assert "abnormal" not in timesteps[0].info
    assert isinstance(timesteps[1].info["error"], EnvTimeout)
    assert isinstance(timesteps[2].info["error"], EnvCrash)
    assert manager.stats()["failures_by_env"] == {1: 1}
    assert world.actions(2) == []
    ready = ready_all(manager)
    assert [seen(ready[i])[1:4] for i in (1, 2)] == [(1, 0, 0)] * 2


@over(ALL_BLOCK_SHARED)
def test_a_host_that_is_stopped_times_out(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, step_timeout=1.0)
    ready_all(manager)
    os.kill(world.pid(0), signal.SIGSTOP)
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert [type(timesteps[i].info["error"]) for i in (0, 1)] == [EnvTimeout, EnvCrash]
    assert [*ready_all(manager)] == [0, 1]


@packed_setups
def test_queued_steps_run_before_resets(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, scripts={0: {"reset_faults": {1: "gate"}}}, wait_num=2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE_THEN_END})
    visit = gate.await_visit(0, "step")
    manager.send({1: 5})
    visit.release()
    timesteps = gather(manager, 2)  # although the reset is not over before the gate is opened
    assert timesteps[0].done
    assert seen(timesteps[1].obs)[3:5] == (1, 5)
    gate.await_visit(0, "reset").release()
    assert seen(ready_all(manager)[0])[2:4] == (1, 0)


@packed_setups
def test_what_a_host_has_said_before_it_died_counts(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    pid = world.pid(0)
    manager.send({0: Do.END_THEN_KILL})
    wait_ended(pid)
    manager.send({1: 5})  # to nobody
    timesteps = gather(manager, 2)
    assert "abnormal" not in timesteps[0].info
    assert timesteps[1].info["abnormal"]
    assert world.actions(1) == []


@packed_setups
def test_a_worker_is_replaced_when_all_of_its_episodes_have_ended(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, max_episodes_per_worker=2)
    ready_all(manager)
    before = world.pid(0)
    step_all(manager, {0: Do.END})
    ready_all(manager)
    step_all(manager, {0: Do.END})  # the second; env 1 goes on
    step_all(manager, {1: 3})
    assert world.pid(1) == before
    step_all(manager, {1: Do.END})
    assert [*ready_all(manager)] == [0, 1]
    assert world.pid(0) == world.pid(1) != before
    stats = manager.stats()
    assert (stats["recycled"], stats["abnormal"], stats["num_workers"]) == (1, 0, 1)


@over(SOME_MESSAGE_SHARED)
def test_a_dropped_env_leaves_the_others_to_their_host(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, max_failures=0, on_exhausted="drop")
    ready_all(manager)
    pid = world.pid(1)
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
    assert manager.env_state_done(0)
    assert len(world.noted(0, "close")) <= 1
    assert "abnormal" not in step_all(manager, {1: 1, 2: 1})[1].info
    manager.reset({0: None})
    assert [*ready_all(manager)] == [0, 1, 2]
    assert world.pid(0) == world.pid(1) == pid
    manager.set_attr("colour", "red", env_ids=[2])
    assert manager.get_attr("colour", env_ids=[2]) == ["red"]
