"""F48: envs of a shared host whose neighbours are stepped without a pause do not starve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envmgr.errors import EnvCrash
from envmgr.transport.process import shared_files
from envmgr.worker.block_steps import BlockStepper
from tests.contract.envs import Do, ScriptedGymEnv, seen
from tests.contract.harness import PATIENCE_S, Setup, World, over, ready_all, step_all

SYNC_ONE = Setup("subprocess", "server", True, num_workers=1)
SYNC_TWO = Setup("subprocess", "fork", True, num_workers=2)
ASYNC_ONE = Setup("async_subprocess", "fork", True, num_workers=1)
ASYNC_TWO = Setup("async_subprocess", "server", True, num_workers=2)
RAISE, SYS_EXIT, GATE = int(Do.RAISE), int(Do.SYS_EXIT), int(Do.GATE)
"""Plain ints, which can be posted in the block."""

LARGE = 1 << 18
FAILURES = 20
AT_MOST = 8
"""Steps of one neighbour between a failure and the next episode's beginning: one in the batch in
which the env failed, one beside each of the few messages that it takes, and slack for the parent,
which does not look at messages while what it waits for is there already."""


@pytest.mark.parametrize("bells", [128, 0], ids=["bells", "bells in the pipe"])
@over(SYNC_ONE, SYNC_TWO, ASYNC_ONE, ASYNC_TWO)
def test_f48_a_reset_begins_although_there_is_always_another_step_to_take(
    world: World, setup: Setup, bells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_MOST_HOST_BELLS", bells)
    scripts = {0: {"reset_faults": {1: "gate"}}}
    manager = world.make(setup, 5, scripts=scripts, env=ScriptedGymEnv)  # 0, 1, 2 | 3, 4 on two
    gate = world.gate
    ready_all(manager)
    manager.send({0: RAISE, 1: GATE})
    visit = gate.await_visit(1, "step")
    assert manager.recv(min_ready=1)[0].info["abnormal"]  # from now on its reset is in the pipe
    manager.send({2: GATE})
    visit.release()
    reset = gate.await_visit(0, "reset")  # else the next one here is env 2
    reset.release()
    gate.await_visit(2, "step").release()
    assert set(manager.recv(min_ready=2)) == {1, 2}
    assert seen(ready_all(manager)[0])[2:4] == (1, 0)


def test_f48_a_message_that_no_pipe_holds_arrives_although_there_is_always_another_step(
    world: World,
) -> None:
    scripts = {0: {"reset_faults": {1: "gate"}}}
    params = {0: {"blob": bytes(LARGE)}}
    manager = world.make(ASYNC_ONE, 3, scripts=scripts, env=ScriptedGymEnv, reset_param=params)
    gate = world.gate
    ready_all(manager)
    manager.send({0: RAISE, 1: GATE})
    visit = gate.await_visit(1, "step")
    assert manager.recv(min_ready=1)[0].info["abnormal"]  # from now on parts of it are in the pipe
    rounds = 0
    while visit.env_id != 0:
        manager.send({3 - visit.env_id: GATE})
        visit.release()
        assert set(manager.recv(min_ready=1)) == {visit.env_id}
        visit, rounds = gate.await_visit(), rounds + 1
        assert rounds <= LARGE >> 10, "the rest of it is never sent"
    visit.release()
    gate.await_visit(where="step").release()
    manager.recv(min_ready=1)
    assert seen(ready_all(manager)[0])[2:4] == (1, 0)


@over(SYNC_ONE, ASYNC_ONE)
def test_f48_the_last_env_of_a_shared_host_does_not_keep_the_others_waiting(
    world: World, setup: Setup
) -> None:
    """One env that is left alone is stepped in a loop of its own."""
    scripts = {0: {"build_faults": {1: "gate"}}}
    manager = world.make(setup, 2, scripts=scripts, env=ScriptedGymEnv)
    gate = world.gate
    ready_all(manager)
    manager.send({0: SYS_EXIT})
    assert manager.recv(min_ready=1)[0].info["abnormal"]
    gate.await_visit(0, "build").release()
    count = 0
    while 0 not in manager.ready_env:
        step_all(manager, {1: 1})
        count += 1
    assert count <= AT_MOST
    assert "abnormal" not in step_all(manager, {0: 1, 1: 1})[0].info


def by_step(manager: Any, env_ids: list[int]) -> Any:
    return manager.step(dict.fromkeys(env_ids, 1))


def by_recv(manager: Any, env_ids: list[int]) -> Any:
    manager.send(dict.fromkeys(env_ids, 1))
    return manager.recv(min_ready=1)


def by_arrays(manager: Any, env_ids: list[int]) -> Any:
    manager.send_arrays(np.array(env_ids), np.ones(len(env_ids), np.int64))
    return manager.recv_arrays(min_ready=1).env_ids.tolist()


@pytest.mark.parametrize("gather", [by_step, by_recv, by_arrays])
@over(SYNC_ONE, SYNC_TWO, ASYNC_ONE, ASYNC_TWO)
def test_f48_an_env_that_failed_is_ready_within_a_few_batches_of_its_neighbours(
    world: World, setup: Setup, gather: Callable[[Any, list[int]], Any]
) -> None:
    manager = world.make(setup, 6, env=ScriptedGymEnv, max_failures=10**6, failure_window_s=1e-3)
    ready_all(manager)
    outstanding: set[int] = set()
    for _ in range(FAILURES):
        outstanding |= {0, 1, 2}
        manager.send({0: RAISE, 1: 1, 2: 1})
        counts = dict.fromkeys((1, 2), 0)
        while 0 in outstanding or 0 not in manager.ready_env:
            # A sync step gives the envs that it names, and no other: first all of this one.
            idle = [i for i in (1, 2) if i not in outstanding] if 0 not in outstanding else []
            outstanding.update(idle)
            came = gather(manager, idle) if idle else manager.recv(min_ready=1)
            outstanding.difference_update(came)
            if 0 not in outstanding:
                for env_id in idle:
                    counts[env_id] += 1
        assert max(counts.values()) <= AT_MOST
        while outstanding:
            outstanding.difference_update(manager.recv())


def test_f48_a_host_that_never_looks_at_its_messages_exceeds_the_limit_of_a_reset(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is charged to the env whose reset it was, and not to the one that takes a step then."""
    monkeypatch.setattr(BlockStepper, "has_new_messages", lambda posted: False)
    manager = world.make(ASYNC_ONE, 3, env=ScriptedGymEnv, reset_timeout=1.0)
    gate = world.gate
    ready_all(manager)
    manager.send({0: RAISE, 1: GATE})
    visit = gate.await_visit(1, "step")
    assert manager.recv(min_ready=1)[0].info["abnormal"]  # from now on its reset is in the pipe
    env_id, other, error = 1, 2, None
    end = time.monotonic() + PATIENCE_S
    while error is None:
        assert time.monotonic() < end, "the reset has not timed out"
        manager.send({other: GATE})  # so there is always a step to take
        with contextlib.suppress(BrokenPipeError):  # if its host is gone
            visit.release()
        timesteps = manager.recv(min_ready=1)  # both, if the limit was exceeded before a visit
        error = next((e for t in timesteps.values() if (e := t.info.get("error"))), None)
        env_id, other = other, env_id
        if error is None:
            visit = gate.await_visit(env_id, "step")
    assert isinstance(error, EnvCrash)
    assert "because it is shared with env 0" in str(error)
    stats = manager.stats()
    assert stats["failures_by_env"] == {0: 2}
    assert stats["failures_by_kind"] == {"EnvRaised": 1, "EnvTimeout": 1}
