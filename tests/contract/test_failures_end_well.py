"""What goes wrong beside a failure of an env does not keep the env from being repaired."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr


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
