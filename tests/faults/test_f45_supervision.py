"""F45, F47 and what goes with them: foreign reapers, workers that do not die, nothing shared."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from signal import SIGKILL
from typing import Any

import pytest

from envmgr.errors import EnvCrash
from envmgr.transport.process import multiprocessing_spawner
from envmgr.transport.process.server_spawner import ServerSpawner
from tests.contract.envs import Do, seen
from tests.contract.harness import (
    ALL_MESSAGE,
    DEFAULT,
    PATIENCE_S,
    SOME_BLOCK,
    SOME_MESSAGE,
    Setup,
    World,
    over,
    ready_all,
    step_all,
    wait_ended,
)

SPAWN = Setup("subprocess", "spawn")
FORKSERVER = Setup("subprocess", "forkserver")
contexts = over(DEFAULT, ALL_MESSAGE, SPAWN, FORKSERVER)


# -- F45 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["handler", "ignored"])
@contexts
def test_f45_children_that_somebody_else_reaps(world: World, setup: Setup, how: str) -> None:
    def reap_all(*_: Any) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    before = signal.signal(signal.SIGCHLD, reap_all if how == "handler" else signal.SIG_IGN)
    try:
        manager = world.make(setup, 2)
        ready_all(manager)
        timestep = step_all(manager, {0: Do.KILL, 1: 1})[0]
        error = timestep.info["error"]
        assert isinstance(error, EnvCrash)
        # With `spawn` the worker is a child of the trainer itself: who asks first gets its status.
        known = setup.context != "spawn" or (how == "handler" and error.exit_status is not None)
        assert error.exit_status == (-signal.SIGKILL if known else None)
        assert known or "cannot be told" in str(error)
        assert seen(ready_all(manager)[0]).build == 1
        world.kill(1)
        step_all(manager, {1: 1})
        ready_all(manager)
        manager.close()
        manager.launch()
        assert [*ready_all(manager)] == [0, 1]
        manager.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


@contexts
def test_f45_envs_wait_for_their_own_children_whatever_the_trainer_does(
    world: World, setup: Setup
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        manager = world.make(setup, 1, daemon=False)
        ready_all(manager)
        [child] = manager.call("start_child")
        world_of_child = f"/proc/{child}/stat"
        os.kill(child, signal.SIGKILL)
        wait_ended(child)
        with open(world_of_child) as file:
            assert file.read().rpartition(")")[2].split()[0] == "Z", "nobody but the env reaps it"
        manager.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


# -- F47 ------------------------------------------------------------------------------------------


@over(SOME_MESSAGE, SOME_BLOCK, FORKSERVER._replace(kind="async_subprocess"))
def test_f47_workers_that_stop_hold_nothing_that_others_need(world: World, setup: Setup) -> None:
    """There are no permits, locks or semaphores between workers: one of four goes on alone."""
    manager = world.make(setup, 4, wait_num=1, step_timeout=None)
    ready_all(manager)
    manager.send(dict.fromkeys(range(3), Do.JITTER))
    for i in range(3):
        os.kill(world.pid(i), signal.SIGSTOP)
    for k in range(20):
        action = Do.END if k % 5 == 4 else k % 5
        manager.send({3: action})
        while 3 not in (timesteps := manager.recv(min_ready=1)):
            assert timesteps.keys() <= {0, 1, 2}  # those that were ready before they stopped
        assert "abnormal" not in timesteps[3].info
        while 3 not in manager.ready_obs:
            pass
    for i in range(3):
        world.kill(i)
    assert len(world.noted(3, "build")) == 1
    ready_all(manager, [3])


@contexts
def test_f47_workers_have_no_semaphores(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    for i in (0, 1):
        with open(f"/proc/{world.pid(i)}/maps") as file:
            assert "/dev/shm" not in file.read()


# -- workers that the kernel does not let go of ---------------------------------------------------


@over(DEFAULT, ALL_MESSAGE, SPAWN)
def test_a_worker_that_does_not_die_is_left_and_its_siblings_go_on(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in an uninterruptible sleep: SIGKILL has no effect yet."""
    monkeypatch.setattr("envmgr.transport.base.Transport.kill_patience_s", 0.2)
    manager = world.make(setup, 3, step_timeout=1.0)
    gate = world.gate
    ready_all(manager)
    stuck = world.pid(0)
    _make_immortal(monkeypatch, stuck)
    visit = None
    manager.send({0: Do.HANG, 1: 1, 2: 1})
    visit = gate.await_visit(0)
    timesteps = {}
    while len(timesteps) < 3:
        timesteps.update(manager.recv())
    assert "abnormal" in timesteps[0].info
    assert seen(ready_all(manager)[0]).build == 1
    assert [seen(t.obs).step for t in step_all(manager, {0: 1, 1: 1, 2: 1}).values()] == [1, 2, 2]
    assert [len(world.noted(i, "build")) for i in (1, 2)] == [1, 1], "siblings were given up, too"
    assert os.path.exists(f"/proc/{stuck}")
    monkeypatch.undo()
    os.kill(stuck, SIGKILL)  # the kernel lets go of it
    visit.wait_gone()
    step_all(manager, {0: 2, 1: 2, 2: 2})
    assert manager.stats()["failures"] == 1
    manager.close()


@over(SPAWN)
def test_a_worker_that_does_not_die_within_close_is_reaped_when_it_does(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envmgr.transport.base.Transport.kill_patience_s", 0.2)
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    stuck = world.pid(0)
    _make_immortal(monkeypatch, stuck)
    manager.send({0: Do.HANG})
    visit = gate.await_visit(0)
    manager.close(0.1)
    monkeypatch.undo()
    with contextlib.suppress(ProcessLookupError):  # its lifeline may have ended it
        os.kill(stuck, SIGKILL)  # the kernel lets go of it
    visit.wait_gone()
    end = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{stuck}"):
        assert time.monotonic() < end, "nobody has reaped it"


def _make_immortal(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    tell, kill_group = ServerSpawner.signal, multiprocessing_spawner.signal_group

    def signal_others(self: Any, host_id: int, number: int) -> None:
        if self.pids.get(host_id) != pid:
            tell(self, host_id, number)

    def kill_other_groups(group: int | None, number: int) -> None:
        if group != pid:
            kill_group(group, number)

    monkeypatch.setattr(ServerSpawner, "signal", signal_others)
    monkeypatch.setattr(multiprocessing_spawner, "signal_group", kill_other_groups)


# -- fds ------------------------------------------------------------------------------------------


@contexts
def test_workers_have_no_end_of_their_siblings_nor_of_the_trainers(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    other = world.make(ALL_MESSAGE, 1)
    ready_all(other)
    world.kill(1)  # and a renewed one has none, either
    step_all(manager, {1: 1})
    ready_all(manager)
    pid_of = {w["env_ids"][0]: w["pid"] for w in manager.stats()["workers"]}
    pipes = {i: _pipes(manager, host_id) for i, host_id in enumerate(_hosts_of(manager))}
    others = {pipe for host_id in _hosts_of(other) for pipe in _pipes(other, host_id)}
    for i in range(3):
        held = _links(pid_of[i])
        for j, of_sibling in pipes.items():
            assert bool(held & of_sibling) == (i == j)
        assert not held & others, "of another manager"
        assert not [link for link in held if "eventpoll" in link or link.startswith("socket:")]
        for number in _pidfd_targets(pid_of[i]):
            assert number == os.getpid(), "only the trainer is watched"


def _hosts_of(manager: Any) -> list[int]:
    return [slot.host_id for slot in manager._running.engine.supervisor.envs]


def _pipes(manager: Any, host_id: int) -> set[str]:
    fds = manager._running.engine.transport._connections.by_host[host_id].fds
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in fds}


def _links(pid: int) -> set[str]:
    links = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return links


def _pidfd_targets(pid: int) -> list[int]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/fdinfo/{name}") as file:
            found += [int(n) for n in re.findall(r"^Pid:\s+(\d+)$", file.read(), re.MULTILINE)]
    return found
