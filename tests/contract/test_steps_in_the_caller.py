"""Envs that run in the caller's thread take their steps together, and yet each for itself."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr.errors


class Counting(gymnasium.Env[Any, Any]):
    """Counts its steps; the `interrupted` one raises KeyboardInterrupt in its second step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *, interrupted: bool = False, in_reset: bool = False) -> None:
        self.steps_taken = self.resets_taken = 0
        self._interrupts = interrupted
        self._in_reset = in_reset

    def reset(self, **_: Any) -> Any:
        self.resets_taken += 1
        if self._interrupts and self._in_reset and self.resets_taken == 2:
            self._interrupts = False
            raise KeyboardInterrupt
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.steps_taken += 1
        if self._interrupts and not self._in_reset and self.steps_taken == 2:
            self._interrupts = False
            raise KeyboardInterrupt
        ended = self._in_reset and self.steps_taken == 2
        return np.full(1, float(self.steps_taken)), 1.0, ended, False, {}


def manager_of(**kwargs: Any) -> Any:
    factories = [Counting, lambda: Counting(interrupted=True, **kwargs), Counting]
    return envmgr.create_env_manager({"type": "base"}, env_fn=factories)


def test_steps_are_posted() -> None:
    with manager_of() as manager:
        assert manager._running.engine.supervisor.submitter.posts


@pytest.mark.parametrize("limit", ["step_timeout", "reset_timeout"])
def test_with_a_time_limit_they_go_by_message(limit: str) -> None:
    with envmgr.create_env_manager({"type": "base", limit: 5.0}, env_fn=[Counting] * 2) as manager:
        assert manager._running.engine.supervisor.submitter.posts is False
        assert sorted(manager.step({0: 0, 1: 1})) == [0, 1]


def test_ctrl_c_in_one_env_s_step_loses_and_repeats_none_of_the_others() -> None:
    with manager_of() as manager:
        manager.step(dict.fromkeys(range(3), 0))
        with pytest.raises(KeyboardInterrupt):
            manager.step(dict.fromkeys(range(3), 0))
        timesteps = manager.recv()
        assert sorted(timesteps) == [0, 1, 2]
        assert timesteps[0].obs == timesteps[2].obs == 2.0
        assert timesteps[1].info["abnormal"]
        manager.reset({1: None})
        timesteps = manager.step(dict.fromkeys(range(3), 0))
        assert [float(timesteps[i].obs[0]) for i in range(3)] == [3.0, 1.0, 3.0]
        assert manager.get_attr("steps_taken") == [3, 1, 3]


def test_ctrl_c_in_a_reset_after_an_episode_leaves_the_other_envs_alone() -> None:
    with manager_of(in_reset=True) as manager:
        manager.step(dict.fromkeys(range(3), 0))
        with pytest.raises(KeyboardInterrupt):
            manager.step({1: 0})  # its own reset follows in the same call
        while manager.stats()["outstanding"]:
            manager.recv()
        timesteps = manager.step({0: 0, 2: 0})
        assert [float(timesteps[i].obs[0]) for i in (0, 2)] == [2.0, 2.0]


def test_an_env_that_closes_the_manager_in_its_step_is_the_last_to_run() -> None:
    class Closing(Counting):
        def step(self, action: Any) -> Any:
            manager.close()
            return super().step(action)

    class Closed(Counting):
        closed = False

        def step(self, action: Any) -> Any:
            stepped_closed.append(self.closed)
            return super().step(action)

        def close(self) -> None:
            self.closed = True

    stepped_closed: list[bool] = []
    manager = envmgr.create_env_manager({"type": "base"}, env_fn=[Closed, Closing, Closed])
    manager.launch()
    with pytest.raises(envmgr.errors.ManagerClosedError):
        manager.step(dict.fromkeys(range(3), 0))
    assert stepped_closed == [False]
    assert manager.closed
