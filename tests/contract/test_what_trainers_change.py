"""What trainers change, after they gave it or in what they were given, changes nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

import envmgr

kinds = pytest.mark.parametrize("kind", ["base", "thread", "subprocess"])


class Told(gymnasium.Env[Any, Any]):
    """Shows its goal, its attribute and what its method was given; 1 ends an episode, 2 its env."""

    observation_space = Box(-99, 99, (3,), np.float32)
    action_space = Discrete(3)
    attribute = called = np.zeros(1)

    def keep(self, value: Any) -> None:
        self.called = value

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._goal = (options or {}).get("goal", [np.zeros(1)])
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        if action == 2:
            raise SystemExit(3)
        return self._shown(), 1.0, action == 1, False, {}

    def _shown(self) -> Any:
        return np.array([self._goal[0][0], self.attribute[0], self.called[0]], np.float32)


@kinds
def test_params_attributes_and_arguments_are_those_that_were_given(kind: str) -> None:
    goal, attribute, argument = np.ones(1), np.ones(1), np.ones(1)
    with envmgr.make(Told, env_num=2, type=kind) as manager:
        manager.set_attr("attribute", attribute)
        manager.call("keep", argument)
        manager.reset({0: {"goal": [goal]}})
        goal[:] = attribute[:] = argument[:] = 7.0
        shown = [manager.ready_arrays([0]).obs[0], manager.step({0: 0})[0].obs]
        manager.step({0: 1})
        shown.append(manager.ready_arrays([0]).obs[0])  # after an automatic reset
        manager.reset({0: None})
        shown.append(manager.ready_arrays([0]).obs[0])
        assert np.all(np.array(shown) == 1.0)
        manager.step({0: 2})
        renewed = [manager.ready_arrays([0]).obs[0]]  # that was not called
        manager.reset({0: None})
        renewed.append(manager.ready_arrays([0]).obs[0])
        assert np.all(np.array(renewed) == [1.0, 1.0, 0.0])


@kinds
def test_params_of_the_first_reset_are_those_that_were_given(kind: str) -> None:
    goal = np.ones(1)
    manager = envmgr.create_env_manager({"type": kind}, [Told])
    with contextlib.closing(manager):
        manager.launch(reset_param={0: {"goal": [goal]}})
        goal[:] = 7.0
        manager.step({0: 1})
        assert manager.ready_arrays().obs[0, 0] == 1.0
        manager.reset()
        assert manager.ready_arrays().obs[0, 0] == 1.0


class Masked(gymnasium.Env[Any, Any]):
    """Raises when it is told 2."""

    observation_space = Dict({"o": Box(-99, 99, (2,), np.float32), "mask": MultiBinary(3)})
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        if action == 2:
            raise ValueError("boom")
        return self._shown(), 1.0, False, False, {}

    def _shown(self) -> Any:
        return {"o": np.full(2, self._n, np.float32), "mask": np.ones(3, np.int8)}


def spoil(manager: Any) -> None:
    """Step all envs, and take the observations to pieces."""
    for timestep in manager.step({0: 0, 1: 0}).values():
        timestep.obs["o"] *= 100
        del timestep.obs["mask"]


@kinds
def test_an_abnormal_timestep_shows_what_the_env_gave_whatever_its_user_has_changed(
    kind: str,
) -> None:
    with envmgr.make(Masked, env_num=2, type=kind) as manager:
        spoil(manager)
        manager.send({0: 2, 1: 0})
        batch = manager.recv_arrays()
        assert batch.obs["o"][:, 0].tolist() == [1.0, 2.0]
        assert batch.obs["mask"].tolist() == [[1, 1, 1]] * 2
        assert [bool(info.get("abnormal")) for info in batch.infos] == [True, False]


@pytest.mark.parametrize("kind", ["base", "subprocess"])
def test_a_snapshot_holds_what_the_env_gave_whatever_its_user_has_changed(kind: str) -> None:
    with envmgr.make(Masked, env_num=2, type=kind, snapshot_copy=True) as manager:
        spoil(manager)
        assert manager.ready_arrays().obs["mask"].shape == (2, 3)
        snapshot = manager.snapshot()
        manager.step({0: 0, 1: 0})
        manager.restore(snapshot)
        assert manager.ready_arrays().obs["o"].tolist() == [[1.0, 1.0]] * 2


def test_arrays_are_had_of_what_came_by_message_whatever_its_user_has_changed() -> None:
    cfg = {"type": "subprocess", "shared_memory": False}
    with envmgr.make(Masked, env_num=2, **cfg) as manager:
        spoil(manager)
        manager.send({0: 2, 1: 0})
        batch = manager.recv_arrays()
        (spoilt, whole) = batch.obs  # no batch of one structure: objects
        assert sorted(spoilt) == ["o"]
        assert sorted(whole) == ["mask", "o"]
        manager.ready_arrays()
        assert not manager.pending_env
