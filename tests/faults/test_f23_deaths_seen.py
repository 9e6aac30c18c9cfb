"""F23: deaths are seen at once, also behind the caller's back and with children that live on."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from envmgr.core.engine import LOOK_EVERY_S
from envmgr.errors import EnvCrash
from tests.contract.envs import Do, ScriptedEnv, seen
from tests.contract.harness import (
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    PATIENCE_S,
    SOME_MESSAGE,
    Setup,
    World,
    over,
    ready_all,
    step_all,
    wait_ended,
)

# Less than any interval at which something looks around. How much less is measured by the soak test
# on a machine that does nothing else: a figure of speed is no test.
SEEN_WITHIN_S = LOOK_EVERY_S / 5
FORKSERVER = Setup("subprocess", "forkserver")
# Workers of spawn are watched as those of forkserver are, and take ten times as long to start: they
# run the tests in which it matters that the trainer itself has to reap them.
contexts = over(DEFAULT, ALL_MESSAGE, Setup("subprocess", "spawn"), FORKSERVER)


class Failures(logging.Handler):
    """The moments at which failures were reported."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._moments: queue.Queue[tuple[float, str]] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._moments.put((time.monotonic(), record.getMessage()))

    def next(self) -> tuple[float, str]:
        """Wait for the next one."""
        return self._moments.get(timeout=PATIENCE_S)


@pytest.fixture
def failures() -> Iterator[Failures]:
    handler = Failures()
    logger = logging.getLogger("envmgr")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


class Forking(ScriptedEnv):
    """Leaves children behind that have all that it has open."""

    def fork_child(self, session: bool = False) -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                if session:
                    os.setsid()
                os.write(writing, b"!")
                time.sleep(1000)
            os._exit(0)
        os.close(writing)
        assert os.read(reading, 1) == b"!"  # else it may be killed with the group it is to leave
        os.close(reading)
        return pid


@contexts
def test_f23_a_death_while_idle_is_repaired_without_the_caller(
    world: World, setup: Setup, failures: Failures
) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    last = step_all(manager, {0: 3, 1: 3})[0].obs
    os.kill(world.pid(0), signal.SIGKILL)
    assert "SIGKILL" in failures.next()[1]
    gate.await_visit(0, "build").release()  # nobody has called the manager meanwhile
    assert manager.ready_obs[0].tobytes() == last.tobytes(), "what was ready stays ready"
    timestep = step_all(manager, {0: 4, 1: 4})[0]
    assert isinstance(timestep.info["error"], EnvCrash)
    assert timestep.obs.tobytes() == last.tobytes()
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert world.actions(0) == [3], "the action was executed"
    assert world.actions(1) == [3, 4]


@over(DEFAULT, SOME_MESSAGE, ALL_MESSAGE, ALL_BLOCK_SHARED, FORKSERVER)
def test_f23_a_death_in_a_step_is_repaired_without_the_caller(
    world: World, setup: Setup, failures: Failures
) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    gate.await_visit(0, "step").kill()
    assert "SIGKILL" in failures.next()[1]
    gate.await_visit(0, "build").release()
    timesteps = manager.recv(min_ready=1)
    assert isinstance(timesteps[0].info["error"], EnvCrash)
    assert seen(ready_all(manager)[0]).build == 1


@over(DEFAULT, ALL_MESSAGE, FORKSERVER)
@pytest.mark.parametrize("when", ["idle", "stepping"])
def test_f23_deaths_are_seen_by_being_told(
    world: World, setup: Setup, failures: Failures, when: str
) -> None:
    manager = world.make(setup, 2, max_failures=99)
    gate = world.gate
    latencies_s = []
    for k in range(6):
        ready_all(manager)
        if when == "stepping":
            manager.send({0: Do.GATE})
            gate.await_visit(0, "step")
        killed_at = time.monotonic()
        os.kill(world.pid(0), signal.SIGKILL)
        latencies_s.append(failures.next()[0] - killed_at)
        timesteps = manager.recv() if when == "stepping" else manager.step({0: 1})
        assert isinstance(timesteps[0].info["error"], EnvCrash)
        assert len(world.noted(0, "build")) <= k + 2
    assert min(latencies_s) <= SEEN_WITHIN_S, latencies_s  # nobody who polls is so quick


@contexts
def test_f23_children_with_all_its_fds_do_not_hide_a_death(
    world: World, setup: Setup, failures: Failures
) -> None:
    manager = world.make(setup, 2, env=Forking, daemon=False)
    ready_all(manager)
    [child] = manager.call("fork_child", env_ids=[0])
    killed_at = time.monotonic()
    os.kill(world.pid(0), signal.SIGKILL)
    assert failures.next()[0] - killed_at < 1.0
    wait_ended(child)  # of the same process group
    assert isinstance(step_all(manager, {0: 1, 1: 1})[0].info["error"], EnvCrash)
    ready_all(manager)


@contexts
def test_f23_a_death_nobody_asked_about_costs_nothing_at_the_end(
    world: World, setup: Setup, failures: Failures
) -> None:
    """Killed while the repair of another one goes on, and closed in the midst of both."""
    manager = world.make(setup, 3, scripts={1: {"build_faults": {1: "hang"}}}, close_timeout=0.2)
    gate = world.gate
    ready_all(manager)
    os.kill(world.pid(1), signal.SIGKILL)
    failures.next()
    gate.await_visit(1, "build")
    os.kill(world.pid(0), signal.SIGKILL)
    failures.next()
    manager.close()


def test_f23_idle_managers_are_not_woken(world: World) -> None:
    """The thread that sees deaths sleeps while there are none: no look now and then."""
    manager: Any = world.make(DEFAULT, 2)
    ready_all(manager)
    step_all(manager, {0: 1, 1: 1})
    background = manager._running.engine._background
    woken = []  # how often within 200 steps; after the launch it looks around once more
    while len(woken) < 20 and (not background.dormant or not woken or woken[-1] > 2):
        before = _switches(background.thread.native_id)
        for k in range(200):
            manager.step({0: k % 10, 1: k % 10})
        woken.append(_switches(background.thread.native_id) - before)
    assert woken[-1] <= 2, woken


def _switches(thread_id: int) -> int:
    """Return how often a thread of this process has gone to sleep."""
    with open(f"/proc/self/task/{thread_id}/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return int(lines["voluntary_ctxt_switches"])
