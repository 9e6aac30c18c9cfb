"""What goes wrong beside a failure of an env does not keep the env from being repaired."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr
from envmgr.core.observations import Observed
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
    """Hangs when it is told 1, raises at 2, exits at 3, dies at 4."""

    observation_space = gymnasium.spaces.Box(0, 9, (4,), np.uint8)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.uint8), {}

    def step(self, action: Any) -> Any:
        if action == 2:
            raise ValueError("boom")
        if action == 3:
            raise SystemExit(3)
        if action == 4:
            os._exit(4)
        if action == 1:
            threading.Event().wait()
        return np.ones(4, np.uint8), 1.0, False, False, {}


def no_memory_for(times: int, patched: pytest.MonkeyPatch) -> list[int]:
    """Have too little memory to read observations anew, so many times; return of which envs."""
    real, wanted = Observed.shown_again, list[int]()

    def shown_again(observed: Observed, env_id: int) -> Any:
        wanted.append(env_id)
        if len(wanted) <= times:
            raise MemoryError
        return real(observed, env_id)

    patched.setattr(Observed, "shown_again", shown_again)
    return wanted


@pytest.mark.parametrize("action", [2, 3, 4], ids=["raises", "exits", "dies"])
@pytest.mark.parametrize(
    "config",
    [
        {"type": "base"},
        {"type": "thread"},
        {"type": "subprocess"},
        {"type": "subprocess", "num_workers": 1},
        {"type": "subprocess", "shared_memory": False},
        {"type": "subprocess", "spare_env_num": 1},
    ],
    ids=str,
)
def test_a_failure_that_there_is_no_memory_for_is_answered_once_when_there_is(
    config: dict[str, Any], action: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action == 4 and config["type"] != "subprocess":
        return  # the trainer would die
    with envmgr.make(Fails, env_num=2, **config) as manager:
        manager.step({0: 0, 1: 0})
        timesteps: dict[int, Any] = {}
        with monkeypatch.context() as patched:
            wanted = no_memory_for(2, patched)
            manager.send({0: action, 1: 0})
            while manager.pending_env:
                with contextlib.suppress(envmgr.errors.OutOfMemoryError):
                    came = manager.recv(timeout_s=10.0)
                    assert came
                    assert came.keys().isdisjoint(timesteps)
                    timesteps.update(came)
        assert len(wanted) > 2
        assert sorted(timesteps) == [0, 1]
        assert timesteps[0].info["abnormal"]
        assert timesteps[0].obs.tolist() == [1, 1, 1, 1]
        manager.ready_arrays([0, 1])  # it is repaired
        assert sorted(manager.step({0: 0, 1: 0})) == [0, 1]
        figures = manager.stats()
        assert figures["actions"] == figures["timesteps"] == 6
        assert figures["failures"] == 1


def test_a_time_limit_that_passes_without_memory_ends_the_step_when_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with envmgr.make(Fails, env_num=2, type="subprocess", step_timeout=0.3) as manager:
        manager.step({0: 0, 1: 0})
        with monkeypatch.context() as patched:
            wanted = no_memory_for(1, patched)
            manager.send({0: 1, 1: 0})
            timesteps: dict[int, Any] = {}
            while manager.pending_env:
                with contextlib.suppress(envmgr.errors.OutOfMemoryError):
                    came = manager.recv(timeout_s=10.0)
                    assert came
                    timesteps.update(came)
        assert len(wanted) > 1
        assert type(timesteps[0].info["error"]) is envmgr.errors.EnvTimeout
        assert manager.stats()["failures"] == 1


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
