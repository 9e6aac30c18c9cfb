"""`thread`: what is special about hosts on threads. What holds for all kinds is in their tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnvManager, ThreadEnvManager, create_env_manager
from envmgr.errors import ConfigError, EnvCrash, EnvTimeout, LaunchError
from envmgr.testing import LedgerEnv
from envmgr.testing.audited import AuditedLoop
from tests.contract.envs import Do, end_of, seen
from tests.contract.harness import (
    THREADS,
    THREADS_MESSAGE_SHARED,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

LIMIT_S = 2.0


def test_it_is_a_kind_of_manager() -> None:
    manager = create_env_manager({"type": "thread"}, env_fn=[Echo])
    assert type(manager) is ThreadEnvManager
    assert isinstance(manager, BaseEnvManager)


class Echo(gymnasium.Env[Any, Any]):
    """Everything that it returns says which action it answers."""

    observation_space = Box(-1.0, np.inf, (4,), np.float64)
    action_space = Discrete(1 << 20)

    def __init__(self) -> None:
        self._buffer = np.zeros(4)
        self._steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._steps, self._buffer[:] = 0, -1.0
        return self._buffer, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Say what was asked for."""
        self._steps += 1
        self._buffer[:] = action
        ends = action % 7 == 0
        return self._buffer, float(action), ends, False, {"action": int(action)}

    def thread(self) -> str:
        """Return where it runs."""
        return threading.current_thread().name


def env_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("envmgr-envs"))


# -- threads that hang ----------------------------------------------------------------------------


@over(THREADS, THREADS_MESSAGE_SHARED)
def test_a_thread_that_hangs_is_given_up_and_its_env_goes_on_on_another(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, step_timeout=LIMIT_S)
    gate, host = world.gate, env_threads()[0]
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.HANG, 1: 1})
    assert isinstance(timesteps[0].info["error"], EnvTimeout)
    gate.await_visit(0)
    assert [seen(ready_all(manager)[i]).build for i in range(2)] == [1, int(host[-1] == "1")]
    assert manager.stats()["threads_abandoned"] == 1
    assert env_threads().count(host) == 2
    retired = manager._running.supervisor.table.retired
    assert retired == (set(range(2)) if setup.num_workers else {0}), "its memory is left to it"
    step_all(manager, {0: 2, 1: 2})
    end_of(world.folder).set()  # it comes back, and what it has done meanwhile is nobody's
    while manager.stats()["threads_abandoned"]:
        time.sleep(0.001)
    for action in range(3, 8):
        timesteps = step_all(manager, {0: action, 1: action})
        assert [seen(t.obs).action for t in timesteps.values()] == [action] * 2
        assert seen(timesteps[0].obs).build == 1
    assert ("close", 0) in [tuple(entry[:2]) for entry in world.journal(0)], "it closes its env"
    stats = manager.stats()
    assert (stats["failures"], stats["renewals"]) == (1, len(timesteps) if setup.num_workers else 1)
    assert stats["actions"] == stats["timesteps"] + stats["cancelled"]


class Sticky(LedgerEnv):
    """Hangs in some steps until the others are let go, and then goes on as if nothing had been."""

    gate = threading.Condition()
    turn = 0

    @classmethod
    def let_go(cls) -> None:
        """Have those that hang come back."""
        with cls.gate:
            cls.turn += 1
            cls.gate.notify_all()

    def step(self, action: int) -> Any:
        """Take a step, and perhaps hang in it."""
        if action % 23 == 11:
            with self.gate:
                turn = self.turn
                self.gate.wait_for(lambda: self.turn > turn, 30.0)
        return super().step(action)


@pytest.mark.parametrize("num_workers", [None, 2])
def test_accounts_are_right_while_threads_hang_and_come_back(num_workers: int | None) -> None:
    limits = {"step_timeout": 0.1, "max_failures": 10**6, "max_failures_total": 10**6}
    cfg = {"type": "thread", "retry_waiting_time": 0.0, "num_workers": num_workers, **limits}
    env_fn = [partial(Sticky, i, episode_length=5) for i in range(4)]
    try:
        with create_env_manager(cfg, env_fn=env_fn) as manager:
            loop = AuditedLoop(manager)
            for number in range(40):
                loop.step(loop.ledger.fresh_actions(loop.ready()))
                if number % 8 == 7:
                    Sticky.let_go()  # late, and in the midst of what goes on
            assert manager.stats()["failures"] >= 3
        report = loop.settle()
        assert report.is_clean, str(report)
    finally:
        Sticky.let_go()


def test_closing_does_not_wait_for_a_thread_that_hangs(world: World) -> None:
    manager = world.make(THREADS, 3, close_timeout=0.2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.HANG, 1: 1, 2: Do.HANG})
    gate.await_visit(0)
    gate.await_visit(2)
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 0.2 + 3.0
    assert manager.stats()["threads_abandoned"] == 2
    assert env_threads() == ["envmgr-envs-0", "envmgr-envs-2"]
    manager.launch()  # while they hang
    assert sorted(ready_all(manager)) == [0, 1, 2]
    step_all(manager, {0: 1, 1: 1, 2: 1})


def test_a_spare_takes_over_from_a_thread_that_hangs(world: World) -> None:
    env_fn = world.factories(1) * 2
    manager = world.make(THREADS, env_fn=env_fn, step_timeout=LIMIT_S, spare_env_num=1)
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.HANG, 1: 1})
    assert isinstance(timesteps[0].info["error"], EnvTimeout)
    assert sorted(ready_all(manager)) == [0, 1]
    assert sorted(step_all(manager, {0: 2, 1: 2})) == [0, 1]
    stats = manager.stats()
    assert (stats["swaps"], stats["threads_abandoned"]) == (1, 1)


def test_a_thread_that_ends_when_it_is_told_to_retires_nothing(world: World) -> None:
    manager = world.make(THREADS, 2)
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.SYS_EXIT, 1: Do.KEYBOARD_INTERRUPT})
    assert all(isinstance(t.info["error"], EnvCrash) for t in timesteps.values())
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 1]
    assert manager.stats()["threads_abandoned"] == 0
    assert manager._running.supervisor.table.retired == set()
    for i in range(2):  # one after the other, as with processes
        kinds = [entry[0] for entry in world.journal(i)]
        assert kinds.index("close") < len(kinds) - 1 - kinds[::-1].index("build")


_EXIT = """
import sys, threading, time
from envmgr import create_env_manager
from tests.contract.test_threads import Echo
hangs = threading.Event()
class Hanging(Echo):
    def step(self, action):
        hangs.set()
        time.sleep(1000)
manager = create_env_manager({"type": "thread"}, env_fn=[Hanging, Echo])
manager.launch()
manager.send({0: 1, 1: 1})
hangs.wait()
print("ends")
"""


def test_the_interpreter_ends_although_a_thread_hangs_and_nobody_closes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=40, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


# -- the trainer's process ------------------------------------------------------------------------


def test_nothing_of_the_process_is_touched() -> None:
    def state() -> tuple[Any, ...]:
        numbers = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return *numbers, handlers, dict(os.environ), sys.stdout, sys.stderr, os.getpgrp()

    before = state()
    with create_env_manager({"type": "thread", "num_workers": 2}, env_fn=[Echo] * 4) as manager:
        assert manager.call("thread") == ["envmgr-envs-0,1"] * 2 + ["envmgr-envs-2,3"] * 2
        assert state() == before
        assert manager.stats()["workers"] == []
        forking = create_env_manager({"type": "subprocess", "context": "fork"}, env_fn=[Echo])
        with pytest.raises(LaunchError, match=r"other threads running .*envmgr-envs-0,1"):
            forking.launch()
    assert state() == before
    assert env_threads() == []


REFUSED = {
    "context": "fork",
    "worker_env": {"deny": ["SECRET_*"]},
    "worker_affinity": [0],
    "max_worker_rss_mb": 500,
    "worker_threads": 2,
    "worker_log": "logs",
    "preload": ["numpy"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_belongs_to_processes_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"manager.{key} is .*manager.type thread.*subprocess"):
        create_env_manager({"type": "thread", key: REFUSED[key]}, env_fn=[Echo])


def test_defaults_may_be_given() -> None:
    whole = dict(ThreadEnvManager.default_config())
    manager = create_env_manager({**whole, "preload": [], "daemon": False}, env_fn=[Echo])
    assert manager.cfg.type == "thread"


def test_the_number_of_threads_is_found_out() -> None:
    with create_env_manager({"type": "thread", "num_workers": "auto"}, env_fn=[Echo] * 6) as m:
        found = m.stats()["calibration"]["num_workers"]
        assert m.stats()["num_workers"] == found == len(env_threads())
        assert len(m.step(dict.fromkeys(range(6), 1))) == 6


# -- what travels ---------------------------------------------------------------------------------


@contextmanager
def switching_often() -> Iterator[None]:
    """Have threads take turns after nearly every bytecode, where they take turns at all."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _check_publication(n_batches: int) -> None:
    """Whatever the order in which threads run, each timestep is that of its action, and whole."""
    with create_env_manager({"type": "thread"}, env_fn=[Echo] * 3) as manager:
        for number in range(1, n_batches):
            ready = manager.ready_arrays([0, 1, 2]).env_ids.tolist()
            actions = {i: 10 * number + i for i in ready}
            for i, (obs, reward, done, info) in manager.step(actions).items():
                action = actions[i]
                assert obs.tolist() == [action] * 4
                assert (reward, done, info["action"]) == (action, action % 7 == 0, action)


def test_what_is_seen_is_whole_whatever_the_order_in_which_threads_run() -> None:
    with switching_often():
        _check_publication(150)


HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


@pytest.mark.skipif(HAS_GIL, reason="not run: this Python has a GIL")
def test_nothing_relies_on_the_gil() -> None:
    _check_publication(5000)


class Words(gymnasium.Env[Any, Any]):
    """Its observation has no fixed layout, and is changed behind the trainer's back."""

    observation_space = gymnasium.spaces.Dict({"words": gymnasium.Space(), "x": Box(0, 1e9, (2,))})
    action_space = Discrete(1 << 20)

    def __init__(self) -> None:
        self._obs: dict[str, Any] = {"words": "a", "x": np.zeros(2, np.float32)}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._obs["x"][:] = 0.0
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Change what was returned before."""
        self._obs["words"] = str(action)
        self._obs["x"][:] = action
        return self._obs, 0.0, False, False, {"x": self._obs["x"]}


def test_observations_of_any_form_are_nobody_elses() -> None:
    with create_env_manager({"type": "thread"}, env_fn=[Words] * 2) as manager:
        kept = [manager.step({0: k, 1: k}) for k in range(5)]
    for k, timesteps in enumerate(kept):
        for timestep in timesteps.values():
            assert timestep.obs["words"] == str(k)
            assert timestep.obs["x"].tolist() == timestep.info["x"].tolist() == [k, k]
