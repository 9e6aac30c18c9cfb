"""Workers that die, are killed or are stopped, in every moment of their lives: F1 to F4, F44."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from envmgr.errors import EnvCrash, EnvTimeout, LaunchError
from envmgr.transport.process.fork_spawner import ForkSpawner
from tests.contract.envs import Do, ScriptedEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    PATIENCE_S,
    SOME_BLOCK,
    SOME_MESSAGE,
    Gate,
    Setup,
    World,
    is_running,
    meanwhile,
    over,
    process_kinds,
    process_setups,
    ready_all,
    reported,
    step_all,
    wait_ended,
)
from tests.faults.others import FAULTY, check_each, check_others, run, untroubled

some_setups = over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK)

PACKED = Setup("subprocess", "fork", num_workers=2)
"""The faulty env and two others in one host, two in another."""

SPAWNED = Setup("async_subprocess", "spawn", False)
FORKSERVED = Setup("subprocess", "forkserver", False)
# A start method matters to a death only by how it is seen: all of them run a death from outside.
deaths = over(ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK, PACKED)
all_starts = over(DEFAULT, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK, PACKED, SPAWNED, FORKSERVED)


@deaths
def test_f01_a_worker_that_kills_itself_costs_one_timestep(tmp_path: Path, setup: Setup) -> None:
    error = check_others(tmp_path, setup, Do.KILL, host_lost=True).info["error"]
    assert type(error) is EnvCrash
    assert (error.exit_status, error.during) == (-signal.SIGKILL, "step")
    assert "killed by SIGKILL" in str(error)


@all_starts
def test_f01_a_worker_killed_from_outside_costs_one_timestep(tmp_path: Path, setup: Setup) -> None:
    gates: list[Gate] = []

    def kill(world: World) -> None:
        gates[0].await_visit(FAULTY, "step").kill()

    gates.append(Gate(str(tmp_path)))
    try:
        timestep = check_others(tmp_path, setup, Do.GATE, host_lost=True, meanwhile=kill)
    finally:
        gates[0].close()
    assert timestep.info["error"].exit_status == -signal.SIGKILL


FATAL = {Do.SEGV: signal.SIGSEGV, Do.ABORT: signal.SIGABRT, Do.BUS: signal.SIGBUS}


@deaths
def test_f02_a_fatal_signal_is_named_and_its_place_reported(tmp_path: Path, setup: Setup) -> None:
    for action, timestep in check_each(tmp_path, setup, [*FATAL], host_lost=True).items():
        error, number = timestep.info["error"], FATAL[action]
        assert (type(error), error.exit_status, error.during) == (EnvCrash, -number, "step")
        assert f"killed by {number.name}" in str(error)
        assert error.stderr_tail.count("Fatal Python error") == 1, error.stderr_tail
        assert "in suffer" in error.stderr_tail, "it does not say where"
        assert error.stderr_tail in str(error)


@over(FORKSERVED)
def test_f02_under_another_start_method(tmp_path: Path, setup: Setup) -> None:
    error = check_others(tmp_path, setup, Do.SEGV, host_lost=True).info["error"]
    assert error.exit_status == -signal.SIGSEGV
    assert "in suffer" in error.stderr_tail


class Talker(ScriptedEnv):
    """Says what it is about to do, on stderr."""

    def step(self, action: Any) -> Any:
        sys.stderr.write(f"env {self.script.env_id} takes {int(action)}\n")  # in one go
        return super().step(action)


@pytest.mark.parametrize("action", [Do.KILL, Do.SEGV, Do.OS_EXIT], ids=lambda action: action.name)
@over(DEFAULT, ALL_MESSAGE, SOME_MESSAGE)
def test_f02_a_crash_comes_with_the_end_of_stderr_which_goes_where_it_went(
    world: World, setup: Setup, action: Do, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = world.make(setup, 2, env=Talker)
    for _ in range(2):
        ready_all(manager)
        step_all(manager, {0: 3, 1: 4})
        error = step_all(manager, {0: action})[0].info["error"]
        lines = error.stderr_tail.splitlines()
        assert lines[:2] == ["env 0 takes 3", f"env 0 takes {int(action)}"]
        assert (len(lines) > 2) == (action is Do.SEGV)
    manager.close()
    printed = capfd.readouterr().err.splitlines()
    assert [line for line in printed if "takes" in line].count("env 0 takes 3") == 2
    assert printed.count("env 1 takes 4") == 2


@over(ALL_BLOCK, SOME_BLOCK)
def test_f02_children_of_the_env_report_to_stderr_and_not_for_it(
    world: World, setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    manager.call("fork_a_child_that_aborts")
    error = step_all(manager, {0: Do.KILL})[0].info["error"]
    assert error.stderr_tail == ""
    manager.close()
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


@over(ALL_BLOCK, SOME_MESSAGE)
def test_f02_a_fault_of_a_worker_that_is_closed_is_logged(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    manager = world.make(setup, 2, scripts={0: {"close_fault": "SIGSEGV"}})
    ready_all(manager)
    manager.close()
    [record] = [r for r in caplog.records if "SIGSEGV" in r.getMessage()]
    assert "in suffer" in record.getMessage()


@deaths
def test_f03_an_exit_is_a_crash_whatever_its_code(tmp_path: Path, setup: Setup) -> None:
    codes = {Do.OS_EXIT: 7, Do.OS_EXIT_0: 0}
    for action, timestep in check_each(tmp_path, setup, [*codes], host_lost=True).items():
        error, code = timestep.info["error"], codes[action]
        assert (type(error), error.exit_status, error.during) == (EnvCrash, code, "step")
        assert f"exit code {code}" in str(error)


@over(SPAWNED)
def test_f03_under_another_start_method(tmp_path: Path, setup: Setup) -> None:
    assert (
        check_others(tmp_path, setup, Do.OS_EXIT_0, host_lost=True).info["error"].exit_status == 0
    )


EXITS = {Do.SYS_EXIT: "called sys.exit(3)", Do.KEYBOARD_INTERRUPT: "raised KeyboardInterrupt"}


@over(ALL_BLOCK, SOME_MESSAGE)
def test_f04_what_ends_a_script_ends_no_trainer(tmp_path: Path, setup: Setup) -> None:
    for action, timestep in check_each(tmp_path, setup, [*EXITS], host_lost=True).items():
        error = timestep.info["error"]
        assert (type(error), error.during) == (EnvCrash, "step")
        assert EXITS[action] in str(error)
        assert "in suffer" in str(error), "the traceback is missing"


@pytest.mark.parametrize("action", EXITS, ids=lambda action: action.name)
@over(PACKED)
def test_f04_neighbours_keep_their_host(tmp_path: Path, setup: Setup, action: Do) -> None:
    troubled = run(tmp_path, setup, action)
    assert troubled.builds == [1, 2, 1, 1, 1]
    assert type(troubled.timestep.info["error"]) is EnvCrash
    expected = untroubled(5)
    assert all(troubled.given[i] == expected[i] for i in (0, 2, 3, 4))


@over(INLINE)
def test_f04_inline_sys_exit_is_the_envs_and_ctrl_c_the_users(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    assert type(step_all(manager, {0: Do.SYS_EXIT})[0].info["error"]) is EnvCrash
    ready_all(manager)
    with pytest.raises(KeyboardInterrupt):  # nobody can tell it from Ctrl-C here
        manager.step({0: Do.KEYBOARD_INTERRUPT, 1: 1})


@some_setups
def test_f01_killed_in_the_middle_of_a_step(world: World, setup: Setup) -> None:
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
def test_f01_killed_in_the_middle_of_a_step_while_the_caller_waits_for_it(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1)
    gate = world.gate
    ready_all(manager)
    with meanwhile(lambda: gate.await_visit(0, "step").kill()):
        timestep = manager.step({0: Do.GATE})[0]
    assert isinstance(timestep.info["error"], EnvCrash)


@process_setups
def test_f01_killed_in_the_middle_of_a_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    last = step_all(manager, {0: Do.END_THEN_GATE})[0]
    gate.await_visit(0, "reset").kill()
    assert "abnormal" not in last.info
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert manager.stats()["abnormal"] == 0


@process_kinds
def test_f01_killed_in_the_middle_of_a_reset_in_place(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, reset_inplace=True)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.END_THEN_GATE})
    with meanwhile(lambda: gate.await_visit(0, "reset").kill()):
        last = manager.recv(min_ready=1)[0]
    assert (last.done, seen(last.obs)[2:4]) == (True, (0, 1))
    assert "abnormal" not in last.info, "the step itself was in order"
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


@process_kinds
def test_f01_killed_in_the_middle_of_its_construction(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.KILL})
    with meanwhile(lambda: gate.await_visit(0, "build").kill()):
        assert seen(ready_all(manager)[0])[:4] == (0, 2, 0, 0)


@over(DEFAULT, Setup("async_subprocess", "forkserver"))
def test_f01_killed_during_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, launch=False, scripts={1: {"build_faults": {0: "gate"}}})
    gate = world.gate
    with (
        meanwhile(lambda: gate.await_visit(1, "build").kill()),
        pytest.raises(LaunchError) as raised,
    ):
        manager.launch()
    assert {i: type(f) for i, f in raised.value.failures.items()} == {1: EnvCrash}
    manager.launch()
    assert [*ready_all(manager)] == [0, 1, 2]


@process_setups
def test_f01_all_killed_at_once_while_idle(world: World, setup: Setup) -> None:
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
def test_f01_killed_with_its_answer_already_sent(world: World, setup: Setup) -> None:
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
def test_f01_killed_again_and_again(world: World, setup: Setup) -> None:
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


@over(DEFAULT, ALL_MESSAGE)
def test_f01_a_killed_worker_server_costs_its_workers_only(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    _kill_server(world, 2)
    assert manager.ready_env == [0, 1]
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert all(isinstance(t.info["error"], EnvCrash) for t in timesteps.values())
    how = ": killed by SIGKILL" if setup.context == "fork" else ""
    for timestep in timesteps.values():
        assert f"the worker server ended{how}" in str(timestep.info["error"])
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 1]
    assert [seen(t.obs).step for t in step_all(manager, {0: 1, 1: 1}).values()] == [1, 1]


@pytest.mark.parametrize("limits", [{}, {"limits": {"starting": 1}}], ids=["all", "in turn"])
@over(ALL_BLOCK, ALL_MESSAGE)
def test_f01_a_fork_server_that_ends_behind_the_caller_is_replaced_in_the_next_call(
    world: World, setup: Setup, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may fork a trainer that does anything meanwhile; that is no failure of the envs."""
    manager = world.make(setup, 3, retry_waiting_time=0.0, **limits)
    ready_all(manager)
    looks = threading.Semaphore(0)
    must_wait = ForkSpawner.must_wait_for_call.fget

    def counted(spawner: ForkSpawner) -> bool:
        waits: bool = must_wait(spawner)
        if waits:
            looks.release()
        return waits

    monkeypatch.setattr(ForkSpawner, "must_wait_for_call", property(counted))
    with reported("the worker server ended"):
        _kill_server(world, 3)
    for _ in range(20):
        assert looks.acquire(timeout=PATIENCE_S), "nobody looks whether it can be replaced"
    assert manager.stats()["failures"] == 3
    assert manager.ready_env == [0, 1, 2]
    for timestep in step_all(manager, {0: 1, 1: 1, 2: 1}).values():
        assert "the worker server ended: killed by SIGKILL" in str(timestep.info["error"])
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 1, 1]
    assert manager.stats()["failures"] == 3


def _kill_server(world: World, env_num: int) -> None:
    """Kill the server that has forked all workers, and wait for their ends."""
    pids = [world.pid(i) for i in range(env_num)]  # now: others may take their places soon
    os.kill(int(_status_of(pids[0])["PPid"]), signal.SIGKILL)
    for pid in pids:
        wait_ended(pid)


def _status_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


@over(ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK)
def test_f44_a_stopped_worker_ends_at_the_limit(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, step_timeout=1.0)
    ready_all(manager)
    os.kill(world.pid(0), signal.SIGSTOP)
    timesteps = step_all(manager, {0: 1, 1: 2})
    assert isinstance(timesteps[0].info["error"], EnvTimeout)
    assert seen(timesteps[1].obs)[3:5] == (1, 2)
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    timesteps = step_all(manager, {0: 3, 1: 4})
    assert [seen(t.obs)[3:5] for t in timesteps.values()] == [(1, 3), (2, 4)]
    assert manager.stats()["failures"] == 1


@over(ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK)
def test_f44_a_worker_that_goes_on_at_its_limit_gives_one_outcome(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, step_timeout=0.1, max_failures=99, failure_window_s=0.01)
    expected = {"timesteps": 0, "abnormal": 0}
    for k in range(8):
        before = seen(ready_all(manager)[0])
        pid = world.pid(0)
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.095 + 0.0015 * k, lambda pid=pid: _continue(pid))
        timer.start()
        timestep = step_all(manager, {0: k})[0]
        timer.join()
        expected["timesteps"] += 1
        if "abnormal" in timestep.info:
            assert isinstance(timestep.info["error"], EnvTimeout)
            assert seen(timestep.obs) == before
            expected["abnormal"] += 1
        else:
            assert seen(timestep.obs)[:5] == (*before[:3], before.step + 1, k)
    ready_all(manager)
    stats = manager.stats()
    assert {name: stats[name] for name in expected} == expected


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@over(ALL_BLOCK, SOME_BLOCK)
def test_f44_a_worker_that_goes_on_in_time_is_as_before(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, step_timeout=20.0)
    ready_all(manager)
    os.kill(world.pid(0), signal.SIGSTOP)
    manager.send({0: 1, 1: 2})
    assert [*manager.recv(min_ready=1)] == [1]
    os.kill(world.pid(0), signal.SIGCONT)
    assert seen(manager.recv(min_ready=1)[0].obs)[:5] == (0, 0, 0, 1, 1)
    assert manager.stats()["failures"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@over(
    DEFAULT,
    Setup("async_subprocess", "server", num_workers=2),
    Setup("subprocess", "fork"),
)
def test_f23_what_left_the_group_of_its_worker_ends_with_it_and_not_before(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, step_timeout=2.0, max_failures=20)
    ready_all(manager)
    daemons = manager.call("start_daemon")
    assert manager.call("await_a_child") == [5] * 3, "somebody else has reaped it"
    assert all(is_running(pid) for pids in daemons for pid in pids)
    for env_id, action in ((0, None), (1, Do.HANG)):
        before = {i: world.pid(i) for i in range(3)}
        if action is None:
            world.kill(env_id)
        timesteps = step_all(manager, {env_id: action or 1})
        assert timesteps[env_id].info["abnormal"]
        ready_all(manager)
        for i, pids in enumerate(daemons):
            if world.pid(i) != before[i]:
                for pid in pids:
                    wait_ended(pid)
            elif i > env_id:
                assert all(map(is_running, pids)), "those of another worker"
    daemons = manager.call("start_daemon")
    manager.close()
    for pids in daemons:
        for pid in pids:
            wait_ended(pid)


@process_setups
def test_f23_children_of_a_dead_worker_die_with_it(world: World, setup: Setup) -> None:
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
