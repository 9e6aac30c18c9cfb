"""Workers that are killed from outside, in every moment of their lives."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest

from envmgr.errors import EnvCrash, LaunchError
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ASYNC_FORK,
    SYNC_FORK,
    SYNC_SERVER,
    Setup,
    World,
    over,
    process_kinds,
    process_setups,
    ready_all,
    step_all,
    wait_ended,
)

some_setups = over(
    SYNC_SERVER,
    SYNC_FORK,
    ASYNC_FORK,
    Setup("subprocess", "spawn"),
    Setup("subprocess", "forkserver"),
)


@some_setups
def test_killed_in_the_middle_of_a_step(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, seed=1)
    gate = world.gate
    first = ready_all(manager)
    manager.send({0: 5, 1: Do.GATE, 2: 6})
    gate.await_visit(1, "step").kill()
    timesteps: dict[int, Any] = {}
    while len(timesteps) < 3:
        more = manager.recv()
        assert not more.keys() & timesteps.keys()
        timesteps.update(more)
    error = timesteps[1].info["error"]
    assert isinstance(error, EnvCrash)
    assert (error.exit_status, error.during) == (-signal.SIGKILL, "step")
    assert timesteps[1].obs.tobytes() == first[1].tobytes()
    assert [seen(timesteps[i].obs)[3:5] for i in (0, 2)] == [(1, 5), (1, 6)]
    assert seen(ready_all(manager)[1])[:4] == (1, 1, 0, 0)
    assert [world.actions(i) for i in range(3)] == [[5], [Do.GATE], [6]]


@process_kinds
def test_killed_in_the_middle_of_a_step_while_the_caller_waits_for_it(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1)
    gate = world.gate
    ready_all(manager)
    killer = threading.Thread(target=lambda: gate.await_visit(0, "step").kill())
    killer.start()
    timestep = manager.step({0: Do.GATE})[0]
    killer.join()
    assert isinstance(timestep.info["error"], EnvCrash)


@process_setups
def test_killed_in_the_middle_of_a_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    last = step_all(manager, {0: Do.END_THEN_GATE})[0]
    gate.await_visit(0, "reset").kill()
    assert "abnormal" not in last.info
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert manager.stats()["abnormal"] == 0


@process_kinds
def test_killed_in_the_middle_of_a_reset_in_place(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, reset_inplace=True)
    gate = world.gate
    ready_all(manager)
    killer = threading.Thread(target=lambda: gate.await_visit(0, "reset").kill())
    manager.send({0: Do.END_THEN_GATE})
    killer.start()
    last = manager.recv(min_ready=1)[0]
    killer.join()
    assert (last.done, seen(last.obs)[2:4]) == (True, (0, 1))
    assert "abnormal" not in last.info, "the step itself was in order"
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


@process_kinds
def test_killed_in_the_middle_of_its_construction(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.KILL})
    killer = threading.Thread(target=lambda: gate.await_visit(0, "build").kill())
    killer.start()
    assert seen(ready_all(manager)[0])[:4] == (0, 2, 0, 0)
    killer.join()


@over(SYNC_SERVER, Setup("async_subprocess", "spawn"))
def test_killed_during_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, launch=False, scripts={1: {"build_faults": {0: "gate"}}})
    gate = world.gate
    killer = threading.Thread(target=lambda: gate.await_visit(1, "build").kill())
    killer.start()
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    killer.join()
    assert {i: type(f) for i, f in raised.value.failures.items()} == {1: EnvCrash}
    manager.launch()
    assert [*ready_all(manager)] == [0, 1, 2]


@process_setups
def test_all_killed_at_once_while_idle(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4)
    ready_all(manager)
    last = {i: t.obs for i, t in step_all(manager, dict.fromkeys(range(4), 3)).items()}
    for i in range(4):
        world.kill(i)
    assert [*manager.ready_obs] == [0, 1, 2, 3]
    timesteps = step_all(manager, dict.fromkeys(range(4), 4))
    for i, timestep in timesteps.items():
        assert timestep.info["abnormal"]
        assert timestep.obs.tobytes() == last[i].tobytes()
    assert all(seen(obs)[:4] == (i, 1, 0, 0) for i, obs in ready_all(manager).items())
    assert [world.actions(i) for i in range(4)] == [[3]] * 4


@process_setups
def test_killed_with_its_answer_already_sent(world: World, setup: Setup) -> None:
    """What a worker has said before it died counts: the timestep is an ordinary one."""
    manager = world.make(setup, 2)
    ready_all(manager)
    manager.send({0: 5})
    gated = manager.recv(min_ready=1)  # it has answered
    assert seen(gated[0].obs)[3:5] == (1, 5)
    manager.send({0: Do.HUGE_INFO})
    world_of_zero = world.noted(0, "step")
    while len(world_of_zero) < 2:
        world_of_zero = world.noted(0, "step")
    world.kill(0)
    timestep = manager.recv(min_ready=1)[0]
    # Either it was whole when the worker died, or it is an abnormal one; never a part of one.
    if "abnormal" not in timestep.info:
        assert timestep.info["thing"].shape == (6_000_000,)
        assert seen(timestep.obs).step == 2
    ready_all(manager)


@process_setups
def test_killed_again_and_again(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, max_failures=50, failure_window_s=0.01)
    delivered = dict.fromkeys(range(3), 0)
    for k in range(6):
        with contextlib.suppress(EnvCrash):  # it had answered before, and is found dead only now
            ready_all(manager)
        ready_all(manager)
        manager.send(dict.fromkeys(range(3), 1))
        world.kill(k % 3)
        got: dict[int, Any] = {}
        while len(got) < 3:
            more = manager.recv()
            assert not more.keys() & got.keys()
            got.update(more)
        for i in got:
            delivered[i] += 1
    assert delivered == {0: 6, 1: 6, 2: 6}
    with contextlib.suppress(EnvCrash):
        ready_all(manager)
    stats = manager.stats()
    assert stats["actions"] == stats["timesteps"] == 18
    assert stats["renewals"] == stats["failures"] == 6


@over(SYNC_SERVER)
def test_a_killed_worker_server_costs_its_workers_only(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    os.kill(int(_status_of(world.pid(0))["PPid"]), signal.SIGKILL)
    for i in (0, 1):
        wait_ended(world.pid(i))
    assert manager.ready_env == [0, 1]
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert all(isinstance(t.info["error"], EnvCrash) for t in timesteps.values())
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 1]
    assert [seen(t.obs).step for t in step_all(manager, {0: 1, 1: 1}).values()] == [1, 1]


def _status_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


@process_setups
def test_a_stopped_worker_ends_at_the_limit(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, step_timeout=0.3)
    ready_all(manager)
    os.kill(world.pid(0), signal.SIGSTOP)
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert isinstance(timesteps[0].info["error"], TimeoutError)
    assert seen(timesteps[1].obs).step == 1
    assert seen(ready_all(manager)[0]).build == 1


@process_setups
def test_children_of_a_dead_worker_die_with_it(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, daemon=False)
    ready_all(manager)
    [child] = manager.call("start_child")
    assert os.path.exists(f"/proc/{child}")
    world.kill(0)
    step_all(manager, {0: 1})
    ready_all(manager)
    wait_ended(child)
    [child] = manager.call("start_child")
    manager.close()
    wait_ended(child)
