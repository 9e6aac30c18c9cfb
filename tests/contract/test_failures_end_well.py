"""What goes wrong beside a failure of an env does not keep the env from being repaired."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr
from envmgr.core.engine import Engine
from envmgr.transport.process.connections import Connections
from envmgr.transport.process.shared_files import SharedFiles


class Single:
    """What refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


class Raises(gymnasium.Env[Any, Any]):
    """Its second step raises; its observations are any objects."""

    observation_space = gymnasium.Space()
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return {"goal": (options or {}).get("goal", np.zeros(1)).copy()}, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 2:
            raise ValueError("boom")
        return {"single": Single()}, 1.0, False, False, {}


class Full(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(28, "No space left on device")


def test_neither_a_log_that_raises_nor_an_observation_that_refuses_copies_loses_an_env(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("envmgr"), "handlers", [Full()])
    with envmgr.make(Raises, env_num=2, type="base") as manager:
        manager.step(dict.fromkeys(manager.ready_obs, 0))
        timesteps = manager.step(dict.fromkeys(manager.ready_obs, 0))
        assert all(timestep.info["abnormal"] for timestep in timesteps.values())
        assert sorted(manager.ready_obs) == [0, 1]


def test_params_that_change_later_do_not_reach_later_resets() -> None:
    goal = np.ones(1)
    with envmgr.make(Raises, env_num=1, type="base") as manager:
        manager.reset({0: {"goal": goal}})
        goal[:] = 7
        manager.reset({0: None})
        assert manager.ready_obs[0]["goal"].tolist() == [1.0]


# -- memory that runs out --------------------------------------------------------------------------


class Fails(gymnasium.Env[Any, Any]):
    """Raises when it is told 2, exits when it is told 3."""

    observation_space = gymnasium.spaces.Box(0, 9, (4,), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.uint8), {}

    def step(self, action: Any) -> Any:
        if action == 2:
            raise ValueError("boom")
        if action == 3:
            raise SystemExit(3)
        return np.ones(4, np.uint8), 1.0, False, False, {}


class Shortage:
    """Has no memory at the k-th line, once, of what is run of the core and the transport."""

    def __init__(self, k: int) -> None:
        self._left = k

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        is_handling = "/envmgr/core/" in file or "/envmgr/transport/" in file
        is_handling = is_handling and "journal" not in file and name != "_apply_all"
        return self._run if is_handling else None

    def _run(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._left > 0:
            self._left -= 1
            if not self._left:
                raise MemoryError
        return self._run


@contextmanager
def shortage(k: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortage]:
    """Have what has arrived be handled with too little memory."""
    found, apply_all = Shortage(k), Engine._apply_all

    def apply_with_little(engine: Engine) -> None:
        if found.has_come:
            return apply_all(engine)
        before = sys.gettrace()
        sys.settrace(found.called)
        try:
            return apply_all(engine)
        finally:
            sys.settrace(before)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_apply_all", apply_with_little)
        yield found


@pytest.mark.parametrize("action", [2, 3], ids=["raises", "exits"])
def test_a_failure_is_answered_once_wherever_memory_runs_out(
    action: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(1, 10_000, 19):
        with envmgr.make(Fails, env_num=2, type="base") as manager:
            manager.step({0: 0, 1: 0})
            timesteps: dict[int, Any] = {}
            with shortage(k, monkeypatch) as found:
                try:
                    timesteps.update(manager.step({0: action, 1: 0}))
                except envmgr.errors.OutOfMemoryError:
                    while manager.pending_env:
                        came = manager.recv(timeout_s=10.0)
                        assert came
                        assert came.keys().isdisjoint(timesteps)
                        timesteps.update(came)
            if not found.has_come:
                break
            assert sorted(timesteps) == [0, 1], k
            assert timesteps[0].info["abnormal"]
            assert timesteps[0].obs.tolist() == [1, 1, 1, 1]
            manager.ready_arrays([0, 1])  # it is repaired
            assert sorted(manager.step({0: 0, 1: 0})) == [0, 1]
            figures = manager.stats()
            assert figures["actions"] == figures["timesteps"] == 6
    assert k > 400


@pytest.mark.parametrize("part", [(Connections, "read_last"), (SharedFiles, "drop_bell")])
def test_a_dead_worker_is_replaced_though_memory_runs_out_as_its_end_is_noticed(
    part: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hosts = getattr(*part), list[int]()

    def short(owner: Any, host_id: int) -> None:
        hosts.append(host_id)
        if len(hosts) == 1:
            raise MemoryError
        real(owner, host_id)

    with envmgr.make(Fails, env_num=2, type="subprocess") as manager:
        manager.step({0: 0, 1: 0})
        timesteps: dict[int, Any] = {}
        with monkeypatch.context() as patched:
            patched.setattr(*part, short)
            os.kill(manager.stats()["workers"][0]["pid"], signal.SIGKILL)
            with contextlib.suppress(envmgr.errors.OutOfMemoryError):
                timesteps.update(manager.step({0: 0, 1: 0}))
            while manager.pending_env:
                came = manager.recv(timeout_s=10.0)
                assert came
                timesteps.update(came)
        assert len(hosts) > 1, "it was tried once more"
        assert sorted(timesteps) == [0, 1]
        assert timesteps[0].info["abnormal"]
        manager.ready_arrays([0, 1])
