"""Ctrl-C in the middle of a call (F25): nothing is lost or repeated, and the manager works on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from envmgr.errors import StateError
from envmgr.interruptible import Task
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    SOME_BLOCK,
    Setup,
    Visit,
    World,
    meanwhile,
    over,
    process_kinds,
    ready_all,
    step_all,
    wait_ended,
)

some_setups = over(DEFAULT, ALL_MESSAGE, SOME_BLOCK)


@contextmanager
def interrupted(world: World, env_id: int = 0) -> Iterator[list[Visit]]:
    """Expect KeyboardInterrupt in the body: Ctrl-C, when the env is at the gate, the call waits."""
    gate = world.gate
    main = threading.get_ident()
    visits: list[Visit] = []

    def interrupt() -> None:
        visits.append(gate.await_visit(env_id))
        while not _waits(main):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    with meanwhile(interrupt), suppress(KeyboardInterrupt):
        yield visits
        pytest.fail("it was not interrupted")


def _waits(thread: int) -> bool:
    """Whether a thread is inside of one of the manager's waits."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in ("wait_until", "see_to"):
            return True
        if frame.f_code is Task.wait.__code__:
            return True  # for what is done where no signal handler comes
        frame = frame.f_back
    return False


@some_setups
def test_f25_an_interrupted_step_is_delivered_later(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=float("inf"))
    ready_all(manager)
    with interrupted(world) as visits:
        manager.step({0: Do.GATE, 1: 5, 2: Do.END})
    assert manager.stats()["outstanding"] == 3
    with pytest.raises(StateError):
        manager.step({1: 1})
    visits[0].release()
    timesteps: dict[int, Any] = {}
    while manager.stats()["outstanding"]:
        more = manager.recv()
        assert not more.keys() & timesteps.keys()
        timesteps.update(more)
    assert sorted(timesteps) == [0, 1, 2]
    assert [seen(timesteps[i].obs)[3] for i in range(3)] == [1, 1, 1]
    assert [world.actions(i) for i in range(3)] == [[Do.GATE], [5], [Do.END]]
    ready_all(manager)
    assert sorted(step_all(manager, {0: 1, 1: 1, 2: 1})) == [0, 1, 2]


@process_kinds
def test_f25_an_interrupted_recv_loses_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=float("inf"))
    ready_all(manager)
    manager.send({1: 3})
    with interrupted(world) as visits:
        manager.send({0: Do.GATE})
        manager.recv()
    visits[0].release()
    assert sorted(manager.recv()) == [0, 1]


@process_kinds
def test_f25_an_interrupted_reset_goes_on(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, scripts={0: {"reset_faults": {1: "gate"}}})
    ready_all(manager)
    with interrupted(world) as visits:
        manager.reset()
    visits[0].release()
    assert [seen(obs)[2:4] for obs in ready_all(manager).values()] == [(1, 0), (1, 0)]
    assert len(step_all(manager, {0: 1, 1: 1})) == 2


@process_kinds
def test_f25_an_interrupted_ready_obs_can_be_read_again(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    _ = world.gate  # before the env comes there
    step_all(manager, {0: Do.END_THEN_GATE})
    with interrupted(world) as visits:
        _ = manager.ready_obs
    visits[0].release()
    assert seen(manager.ready_obs[0])[2:4] == (1, 0)


@pytest.mark.parametrize("then", ["get_attr", "reset"])
@process_kinds
def test_f25_an_interrupted_call_does_not_stand_in_the_way(
    world: World, setup: Setup, then: str
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    with interrupted(world) as visits:
        manager.get_attr("gated", env_ids=0)
    visits[0].release()
    following: dict[str, Callable[[], Any]] = {
        "get_attr": lambda: manager.get_attr("label"),
        "reset": lambda: manager.reset(),
    }
    following[then]()
    assert sorted(ready_all(manager)) == [0, 1]
    assert manager.get_attr("label") == ["env-0", "env-1"]
    assert len(step_all(manager, {0: 1, 1: 1})) == 2


@process_kinds
def test_f25_an_interrupted_call_wait_can_be_repeated(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    _ = world.gate  # before the env comes there
    manager.call_async("fail", "gate", env_ids=0)
    with interrupted(world) as visits:
        manager.call_wait()
    visits[0].release()
    assert manager.call_wait() == [None]
    assert len(step_all(manager, {0: 1, 1: 1})) == 2


@over(DEFAULT, Setup("async_subprocess", "spawn"))
def test_f25_an_interrupted_launch_leaves_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False, scripts={0: {"build_faults": {0: "hang"}}})
    with interrupted(world) as visits:
        manager.launch()
    assert manager.closed
    for pid in (visits[0].pid, *(pid for _, pid in world.noted(1, "build"))):
        wait_ended(pid)
        assert not os.path.exists(f"/proc/{pid}"), "it is not reaped"
    manager.launch()
    assert len(step_all(manager, {0: 1, 1: 1})) == 2


@some_setups
def test_f25_an_interrupted_close_can_be_repeated(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, close_timeout=50.0, scripts={0: {"close_fault": "hang"}})
    ready_all(manager)
    pids = [world.pid(i) for i in (0, 1)]
    with interrupted(world):
        manager.close()
    began = time.monotonic()
    manager.close(timeout_s=0.1)
    assert time.monotonic() - began < 3.0
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}"), "it is still there, or not reaped"
    assert manager.closed
    manager.launch()
    manager.close(terminate=True)


@over(INLINE)
def test_f25_inline_an_interrupted_step_costs_the_env_that_was_in_it(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    with pytest.raises(KeyboardInterrupt):
        manager.step({0: 1, 1: Do.KEYBOARD_INTERRUPT, 2: 3})
    timesteps: dict[int, Any] = {}
    while manager.stats()["outstanding"]:
        timesteps.update(manager.recv())
    assert [bool(timesteps[i].info.get("abnormal")) for i in range(3)] == [False, True, False]
    assert [world.actions(i) for i in range(3)] == [[1], [Do.KEYBOARD_INTERRUPT], [3]]
    assert [seen(obs)[:2] for obs in ready_all(manager).values()] == [(0, 0), (1, 1), (2, 0)]
