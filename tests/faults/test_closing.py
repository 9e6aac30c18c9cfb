"""F17, F28, F29: closing is bounded however many envs hang, and comes from anywhere at any time."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from envmgr import EnvState, create_env_manager
from envmgr.errors import ManagerClosedError
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    THREADS,
    Raises,
    Setup,
    World,
    every_setup,
    meanwhile,
    over,
    process_kinds,
    process_setups,
    ready_all,
    step_all,
    wait_ended,
)

GRACE_S = 0.3
BOUND_S = GRACE_S + 3.0
"""What closing may take: the grace, one second more, and what a busy machine adds."""

some_setups = over(DEFAULT, ALL_MESSAGE, SOME_BLOCK, Setup("subprocess", "spawn"))


def close_in_time(manager: Any, *args: Any, **kwargs: Any) -> None:
    began = time.monotonic()
    manager.close(*args, **kwargs)
    assert time.monotonic() - began < BOUND_S
    assert manager.closed
    assert set(manager.env_states.values()) == {EnvState.VOID}


@pytest.mark.parametrize("action", [Do.HANG, Do.HANG_DEAF], ids=lambda action: action.name)
@some_setups
def test_f17_with_envs_that_hang_in_a_step(world: World, setup: Setup, action: Do) -> None:
    manager = world.make(setup, 2, close_timeout=GRACE_S)
    gate = world.gate
    ready_all(manager)
    manager.send(dict.fromkeys(range(2), action))
    pids = [gate.await_visit(i).pid for i in range(2)]
    close_in_time(manager)
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}"), "it is not reaped"
    stats = manager.stats()
    assert (stats["cancelled"], stats["outstanding"]) == (2, 0)


@pytest.mark.parametrize("env_num", [1, 16])
@over(DEFAULT, ALL_MESSAGE, Setup("subprocess", "forkserver"))
def test_f17_within_the_grace_and_a_second_with_the_gil_held(
    world: World, setup: Setup, env_num: int
) -> None:
    manager = world.make(setup, env_num, close_timeout=GRACE_S)
    gate = world.gate
    ready_all(manager)
    manager.send(dict.fromkeys(range(env_num), Do.HANG_IN_C))
    pids = [gate.await_visit(i).pid for i in range(env_num)]
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < GRACE_S + 1.0
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], "they are not reaped"


@over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, THREADS)
def test_f17_with_envs_that_hang_in_a_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, close_timeout=GRACE_S)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_HANG, 1: Do.END_THEN_HANG})
    for i in (0, 1):
        gate.await_visit(i, "reset")
    close_in_time(manager)


@process_setups
def test_f17_with_envs_that_hang_in_their_rebuild(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, close_timeout=GRACE_S, script={"build_faults": {1: "hang"}})
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.KILL, 1: Do.KILL})
    assert manager.ready_env == []
    for i in (0, 1):
        gate.await_visit(i, "build")
    close_in_time(manager)


@every_setup
def test_f17_with_envs_that_hang_in_their_close(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, close_timeout=GRACE_S, script={"close_fault": "sleep"})
    ready_all(manager)
    close_in_time(manager)
    began = [len(world.noted(i, "close")) for i in range(3)]
    shared = setup.num_workers is not None  # there the first one keeps the others waiting
    assert began == ([1, 0, 0] if shared else [1, 1, 1]), "an env was not asked to close"
    manager.launch()
    ready_all(manager)


@over(
    DEFAULT,
    Setup("subprocess", "fork"),
    Setup("subprocess", "forkserver"),
    Setup("subprocess", "spawn"),
)
def test_f17_what_takes_longer_to_end_than_close_may_is_reaped_all_the_same(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine. The guard of leaks would find zombies."""
    folder = "envmgr.transport.process"
    manager = world.make(setup, 2)
    ready_all(manager)
    for name in ("template_servers", "server_spawner", "multiprocessing_spawner"):
        monkeypatch.setattr(f"{folder}.{name}._CLOSE_S", 0.0)
    monkeypatch.setattr(f"{folder}.server_spawner._KILLED_S", 0.0)
    late = Mock(side_effect=subprocess.TimeoutExpired("the fork server", 0.0))
    monkeypatch.setattr(f"{folder}.fork_spawner._ForkedServer.wait", late)
    manager.close()


@pytest.mark.parametrize("fault", ["raise", "strange_error", "sys_exit"])
@every_setup
def test_f17_with_envs_whose_close_fails(world: World, setup: Setup, fault: str) -> None:
    manager = world.make(setup, 2, script={"close_fault": fault})
    ready_all(manager)
    close_in_time(manager)
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


@process_setups
def test_f17_with_workers_that_are_stopped_or_dead(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, close_timeout=GRACE_S)
    ready_all(manager)
    os.kill(world.pid(0), signal.SIGSTOP)
    world.kill(1)
    close_in_time(manager)


@process_kinds
def test_f29_while_resets_go_on_in_the_background(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4)
    for _ in range(3):
        ready_all(manager)
        step_all(manager, dict.fromkeys(range(4), Do.END_LATE))
    close_in_time(manager)


@process_kinds
def test_f29_while_repairs_wait_for_their_turn(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        retry_waiting_time=50.0,
        max_failures=20,
        scripts={0: {"build_faults": {0: None, -1: "raise"}}},
    )
    ready_all(manager)
    step_all(manager, {0: Do.KILL})
    while len(world.noted(0, "build")) < 2:
        step_all(manager, {1: 1})
    close_in_time(manager)


@every_setup
def test_terminate_does_not_ask_the_envs(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    close_in_time(manager, terminate=True)
    if setup.has_processes:
        assert [world.noted(i, "close") for i in (0, 1)] == [[], []]


@process_kinds
def test_the_grace_can_be_given(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, close_timeout=50.0, script={"close_fault": "sleep"})
    ready_all(manager)
    close_in_time(manager, GRACE_S)
    manager.launch()
    close_in_time(manager, timeout_s=0)


@every_setup
def test_f29_twice_and_from_many_threads_at_once(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            manager.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    manager.close()
    assert [len(world.noted(i, "close")) for i in (0, 1)] == [1, 1]
    assert manager.closed


@pytest.mark.parametrize("moment", ["build", "reset"])
@over(ALL_BLOCK, ALL_MESSAGE, ALL_BLOCK_SHARED)
def test_f29_during_a_renewal_no_process_is_born_afterwards(
    world: World, setup: Setup, moment: str
) -> None:
    faults = {"build_faults": {1: "hang"}} if moment == "build" else {"reset_faults": {1: "hang"}}
    manager = world.make(setup, 2, close_timeout=GRACE_S, scripts={0: faults})
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.KILL})
    visit = gate.await_visit(0, moment)  # behind the caller
    close_in_time(manager)
    wait_ended(visit.pid)
    assert [len(world.noted(i, "build")) for i in (0, 1)] in ([2, 1], [2, 2])
    manager.close()


@process_kinds
def test_f29_while_the_renewal_has_not_begun(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, retry_waiting_time=0.0, max_failures=99)
    ready_all(manager)
    for i in (0, 1):
        os.kill(world.pid(i), signal.SIGKILL)
    close_in_time(manager)
    built = [len(world.noted(i, "build")) for i in (0, 1)]
    assert max(built) <= 2
    manager.launch()
    assert [len(world.noted(i, "build")) for i in (0, 1)] == [n + 1 for n in built]


# -- from another thread, while the caller waits --------------------------------------------------


@pytest.mark.parametrize("call", ["step", "recv", "reset", "ready_obs", "get_attr"])
@process_kinds
def test_f29_a_waiting_call_ends_when_another_thread_closes(
    world: World, setup: Setup, call: str
) -> None:
    manager = world.make(setup, 1, close_timeout=GRACE_S)
    gate = world.gate
    ready_all(manager)
    waits = {
        "step": lambda: manager.step({0: Do.HANG}),
        "recv": lambda: (manager.send({0: Do.HANG}), manager.recv()),
        "reset": lambda: manager.reset({0: {"fault": "hang"}}),
        "ready_obs": lambda: (step_all(manager, {0: Do.END_THEN_HANG}), manager.ready_obs),
        "get_attr": lambda: manager.gated,
    }

    def close() -> None:
        gate.await_visit(0)
        manager.close()

    began = time.monotonic()
    with meanwhile(close), Raises(ManagerClosedError, "closed"):
        waits[call]()
    assert time.monotonic() - began < BOUND_S + 2.0
    assert manager.closed


@over(DEFAULT, Setup("async_subprocess", "forkserver"))
def test_f29_a_launch_ends_when_another_thread_closes(world: World, setup: Setup) -> None:
    manager = world.make(
        setup, 2, launch=False, close_timeout=GRACE_S, scripts={1: {"build_faults": {0: "hang"}}}
    )
    gate = world.gate

    def close() -> None:
        gate.await_visit(1, "build")
        manager.close()

    with meanwhile(close), pytest.raises(ManagerClosedError):
        manager.launch()
    assert manager.closed
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


@pytest.mark.parametrize("hangs", [Do.HANG, int(Do.HANG)], ids=["by-message", "posted"])
@pytest.mark.parametrize("env_num", [1, 2])
@process_kinds
def test_f29_a_signal_handler_may_close_in_the_middle_of_a_step(
    world: World, setup: Setup, env_num: int, hangs: int
) -> None:
    manager = world.make(setup, env_num, close_timeout=GRACE_S)
    gate = world.gate
    ready_all(manager)
    step_all(manager, dict.fromkeys(range(env_num), 1))
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: manager.close())

    def interrupt() -> None:
        gate.await_visit(0)
        signal.pthread_kill(main, signal.SIGUSR1)

    try:
        with meanwhile(interrupt), pytest.raises(ManagerClosedError):
            manager.step(dict.fromkeys(range(env_num), hangs))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert manager.closed
    manager.launch()
    assert [*ready_all(manager)] == list(range(env_num))


@over(INLINE, ALL_MESSAGE, SOME_MESSAGE)
def test_stats_and_states_may_be_read_from_other_threads_while_it_works_and_closes(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, script={"episode_length": 2})
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                stats = manager.stats()
                assert stats["timesteps"] <= stats["actions"] or not stats
                assert set(manager.env_states) == {0, 1}
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(30):
            ready_all(manager)
            step_all(manager, {0: 1, 1: 1})
        manager.close()
    finally:
        stop.set()
        reader.join()
    assert errors == []


# -- without close --------------------------------------------------------------------------------


STARTS = (Setup("subprocess", context) for context in ("server", "fork", "spawn", "forkserver"))
DROPPED = (INLINE, *STARTS)


@pytest.mark.parametrize(
    ("setup", "how"),
    [*((setup, "del") for setup in DROPPED), (INLINE, "cycle"), (SOME_MESSAGE, "cycle")],
    ids=str,
)
def test_f28_a_manager_that_is_dropped_leaves_nothing(
    tmp_path: Any, setup: Setup, how: str
) -> None:
    world = World(tmp_path)
    manager: Any = create_env_manager(setup.cfg, env_fn=world.factories(2))
    manager.launch()
    step_all(manager, {0: Do.END, 1: 1})
    pids = [world.pid(i) for i in (0, 1)]
    if how == "cycle":
        vars(manager)["itself"] = manager
    del manager
    gc.collect()
    if setup.has_processes:
        for pid in pids:
            wait_ended(pid)
            assert not os.path.exists(f"/proc/{pid}"), "it is not reaped"


@over(ALL_MESSAGE, DEFAULT)
def test_observations_outlive_the_manager(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, copy_on_get=False, shared_memory=True)
    obs = dict(ready_all(manager))
    timesteps = step_all(manager, {0: 1, 1: 2})
    manager.close()
    assert [seen(o)[:2] for o in obs.values()] == [(0, 0), (1, 0)]
    assert [seen(t.obs)[3:5] for t in timesteps.values()] == [(1, 1), (1, 2)]
    del obs, timesteps
