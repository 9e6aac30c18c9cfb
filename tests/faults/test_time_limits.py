"""Envs and workers that take too long, and clocks that lie: F13 to F16, F30 and F36."""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

import envmgr
from envmgr.errors import EnvTimeout
from tests.contract import envs
from tests.contract.envs import Do, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    THREADS,
    THREADS_MESSAGE_SHARED,
    Setup,
    World,
    over,
    process_kinds,
    ready_all,
    step_all,
)
from tests.faults.others import check_others

LIMIT_S = 1.0
SLACK_S = 2.0
"""For a busy machine. `make soak` measures what is promised: the limit + 50 ms."""

PACKED = ALL_BLOCK._replace(num_workers=2)
FORKSERVED = Setup("subprocess", "forkserver", False)
ON_THREADS = (THREADS._replace(num_workers=2), THREADS_MESSAGE_SHARED)
# A limit is kept by the trainer, whatever has started the worker: one test has other starts, too.
limited = over(ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK, PACKED)


def _frame_at(text: str) -> str:
    """Return a pattern: how stacks name the line of `_stay` that has this text."""
    lines, first = inspect.getsourcelines(envs._stay)
    (line,) = [first + k for k, line in enumerate(lines) if text in line]
    return rf'File "{re.escape(envs.__file__)}", line {line},? in _stay\n'


# -- F13, F14: hanging in a step ------------------------------------------------------------------


@over(ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE, SOME_BLOCK, PACKED, DEFAULT, FORKSERVED, *ON_THREADS)
def test_f13_a_step_that_hangs_ends_at_its_limit(tmp_path: Path, setup: Setup) -> None:
    timestep = check_others(tmp_path, setup, Do.HANG, host_lost=True, step_timeout=LIMIT_S)
    error = timestep.info["error"]
    assert (type(error), error.during, error.limit_s) == (EnvTimeout, "step", LIMIT_S)
    waits = "wait(1000)" if setup in ON_THREADS else "time.sleep(1000)"
    assert re.search(_frame_at(waits), error.stacks)
    assert "step_timeout" in str(error)


@pytest.mark.parametrize(
    "action", [Do.HANG, Do.HANG_DEAF, Do.HANG_IN_C], ids=lambda action: action.name
)
@over(ALL_BLOCK, SOME_BLOCK, SOME_MESSAGE)
def test_f13_the_outcome_comes_neither_before_the_limit_nor_long_after(
    world: World, setup: Setup, action: Do
) -> None:
    manager = world.make(setup, 2, step_timeout=LIMIT_S)
    ready_all(manager)
    began = time.monotonic()
    used_s = time.process_time()
    timestep = step_all(manager, {0: action, 1: 1})[0]
    took_s = time.monotonic() - began
    assert isinstance(timestep.info["error"], EnvTimeout)
    assert LIMIT_S <= took_s < LIMIT_S + SLACK_S
    assert time.process_time() - used_s < LIMIT_S / 2, "it has spun"
    assert seen(ready_all(manager)[0]).build == 1
    assert time.monotonic() - began < LIMIT_S + 2 * SLACK_S, "the worker was slow to die"


@limited
def test_f14_a_hang_in_c_that_holds_the_gil_and_blocks_sigterm(
    tmp_path: Path, setup: Setup
) -> None:
    timestep = check_others(tmp_path, setup, Do.HANG_IN_C, host_lost=True, step_timeout=LIMIT_S)
    error = timestep.info["error"]
    assert type(error) is EnvTimeout
    frame = _frame_at("PyDLL(None).sleep(1000)")
    assert re.search(frame, error.stacks), "what writes it needs no GIL"
    assert error.stacks in str(error)


@over(SOME_BLOCK)
def test_f13_limits_count_while_the_caller_waits_for_others(world: World, setup: Setup) -> None:
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


@over(INLINE)
def test_f13_inline_a_hung_step_reset_and_build_end_at_their_limits(
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


# -- F15: hanging in a reset ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["sleep", "hang_in_c"])
@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, ALL_BLOCK_SHARED)
def test_f15_a_reset_that_hangs_behind_the_caller_is_begun_in_a_new_process(
    world: World, setup: Setup, fault: str
) -> None:
    scripts = {0: {"reset_faults": {1: fault}}}
    manager = world.make(setup, 1, reset_timeout=LIMIT_S, scripts=scripts)
    ready_all(manager)
    last = step_all(manager, {0: Do.END})[0]
    assert "abnormal" not in last.info
    began, used_s = time.monotonic(), time.process_time()
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)
    assert time.monotonic() - began < LIMIT_S + SLACK_S + 1.0
    assert time.process_time() - used_s < LIMIT_S / 2, "ready_obs has spun"
    assert len({pid for _, pid in world.noted(0, "build")}) == 2
    stats = manager.stats()
    assert (stats["failures_by_kind"], stats["abnormal"]) == ({"EnvTimeout": 1}, 0)


class Silent(ScriptedGymEnv):
    """Has nothing in its infos, so that its steps are answered in the block."""

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {}


@over(ALL_BLOCK, SOME_MESSAGE, ALL_BLOCK_SHARED, INLINE, *ON_THREADS)
def test_f15_a_reset_that_belongs_to_a_step_is_too(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        env=Silent,
        reset_timeout=LIMIT_S,
        reset_inplace=True,
        scripts={0: {"reset_faults": {1: "sleep"}}},
    )
    last = step_all(manager, {0: int(Do.END), 1: 1})  # plain numbers travel in the block
    assert ["abnormal" in timestep.info for timestep in last.values()] == [False, False]
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert manager.stats()["failures_by_kind"] == {"EnvTimeout": 1}


@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, ALL_BLOCK_SHARED, *ON_THREADS)
def test_f15_a_reset_that_hangs_before_the_caller_is_too(world: World, setup: Setup) -> None:
    scripts = {0: {"reset_faults": {1: "sleep"}}}
    manager = world.make(setup, 2, reset_timeout=LIMIT_S, scripts=scripts)
    ready_all(manager)
    manager.reset({0: {"level": 4}})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)
    assert world.noted(0, "reset")[-1][1] == {"level": 4}, "the reset params are lost"
    assert manager.stats()["failures_by_kind"] == {"EnvTimeout": 1}


# -- F16: in the nick of time ---------------------------------------------------------------------


# In line the limit may pass just when the env has opened its journal, before it can close it.
@pytest.mark.filterwarnings("ignore:unclosed file .*journal:ResourceWarning")
@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, ALL_BLOCK_SHARED, INLINE, THREADS)
def test_f16_a_step_that_ends_at_its_limit_has_one_outcome(world: World, setup: Setup) -> None:
    limit_s = 0.05
    manager = world.make(
        setup,
        2,
        step_timeout=limit_s,
        max_failures=999,
        failure_window_s=0.01,
        script={"late_s": limit_s},
    )
    abnormal = 0
    for k in range(12):
        before = {i: seen(obs) for i, obs in ready_all(manager).items()}
        timesteps = step_all(manager, {0: Do.LATE, 1: Do.LATE})
        for i, timestep in timesteps.items():
            if "abnormal" in timestep.info:
                abnormal += 1
                assert seen(timestep.obs) == before[i]
            else:
                assert seen(timestep.obs)[:5] == (*before[i][:3], before[i].step + 1, Do.LATE)
        moved = step_all(manager, dict.fromkeys(ready_all(manager), k % 7))
        assert all(
            seen(t.obs).action == k % 7 for t in moved.values() if "abnormal" not in t.info
        ), "a late reply took the place of another"
        abnormal += sum("abnormal" in t.info for t in moved.values())
    ready_all(manager)
    stats = manager.stats()
    assert (stats["actions"], stats["timesteps"], stats["abnormal"]) == (48, 48, abnormal)


# -- F30: actions that nobody takes ---------------------------------------------------------------


class LargeActions(gymnasium.Env[Any, Any]):
    """Takes actions larger than any pipe holds, and gives back what they began with."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Box(-np.inf, np.inf, (400_000,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.array([float(os.getpid())]), {}

    def step(self, action: Any) -> Any:
        return np.array([float(action[0])]), float(action[-1]), False, False, {}


@over(ALL_BLOCK, SOME_MESSAGE)
def test_f30_the_limit_holds_for_an_action_that_nobody_takes(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=[LargeActions] * 2, step_timeout=10.0)
    pid = int(ready_all(manager)[0][0])
    large = np.full(400_000, 7.0)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    manager.send({0: large, 1: large})
    assert time.monotonic() - began < 9.0, "the send has waited for the worker"
    timesteps: dict[int, Any] = {}
    while len(timesteps) < 2:
        timesteps.update(manager.recv())
    assert time.monotonic() - began < 10.0 + SLACK_S
    assert isinstance(timesteps[0].info["error"], EnvTimeout)
    assert (timesteps[1].obs[0], timesteps[1].reward) == (7.0, 7.0)
    ready_all(manager)
    timesteps = step_all(manager, {0: large, 1: large})
    assert [t.obs[0] for t in timesteps.values()] == [7.0, 7.0]


# -- F36: the wall clock --------------------------------------------------------------------------

WALL_CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime"},
    "datetime": {"now", "today", "utcnow"},
    "date": {"today"},
}


def _reads_of_wall_clocks(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in WALL_CLOCKS.get(owner, ()):
                found.append(f"{path.name}:{node.lineno}: {owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names = {alias.name for alias in node.names} & WALL_CLOCKS["time"]
            found += [f"{path.name}:{node.lineno}: from time import {name}" for name in names]
    return found


def test_f36_nothing_that_runs_envs_reads_the_wall_clock() -> None:
    root = Path(envmgr.__file__).parent
    # What the command line writes into file names and reports is for people, and may be a date.
    # So is the one date of each line of an episode log.
    modules = [path for path in root.rglob("*.py") if "cli" not in path.parts]
    assert len(modules) > 50
    reads = [read for path in modules for read in _reads_of_wall_clocks(path)]
    assert [re.sub(r":\d+:", ":", read) for read in reads] == ["episode_log.py: time.time"]


class ClockTwister(ScriptedGymEnv):
    """Has the wall clock of its process jump by an hour, to and fro."""

    def step(self, action: Any) -> Any:
        _twist(time)
        return super().step(action)


def _twist(module: Any, jump_s: float = 3600.0) -> None:
    true = getattr(module, "_true_time", module.time)
    calls = iter(range(10**9))
    module._true_time = true
    module.time = lambda: true() + jump_s * (-1) ** next(calls)


@process_kinds
def test_f36_jumps_of_the_wall_clock_change_nothing(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: true() + 3600.0 * (-1) ** next(calls))
    env_fn = [partial(ClockTwister, i, world.folder) for i in range(2)]
    manager = world.make(setup, env_fn=env_fn, step_timeout=LIMIT_S, reset_timeout=20.0)
    for k in range(5):
        ready_all(manager)
        timesteps = step_all(manager, {0: k, 1: Do.END if k == 3 else k})
        assert all("abnormal" not in t.info for t in timesteps.values())
    ready_all(manager)
    began = time.monotonic()
    assert isinstance(step_all(manager, {0: Do.HANG})[0].info["error"], EnvTimeout)
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + SLACK_S
    assert seen(ready_all(manager)[0]).build == 1
    assert manager.stats()["failures"] == 1
