"""F46: deaths on a Ray cluster, over a stand-in; tests/contract/test_ray.py has a cluster."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from envmgr.errors import EnvCrash, EnvTimeout
from tests.fake_ray import Counting, FakeRay, manager_of, zeros


def abnormal_in(timesteps: dict[int, Any]) -> list[int]:
    return [i for i, timestep in timesteps.items() if timestep.info.get("abnormal")]


def test_f46_an_actor_that_dies_takes_its_envs_which_come_back_in_another(ray: FakeRay) -> None:
    with manager_of() as manager:
        manager.step(zeros())
        ray.actors[0].die()
        timesteps = manager.step(zeros())
        assert abnormal_in(timesteps) == [0, 1]
        assert isinstance(timesteps[0].info["error"], EnvCrash)
        assert "The actor died." in str(timesteps[0].info["error"])
        while len(manager.ready_obs) < 4:
            pass
        assert [t.reward for t in manager.step(zeros()).values()] == [1.0, 1.0, 3.0, 3.0]
        assert [h.options["scheduling_strategy"] for h in ray.actors[2:]] == ["node2"]
        assert manager.stats()["failures"] == 1


def test_f46_a_step_that_hangs_costs_its_actor(ray: FakeRay) -> None:
    Counting.go.clear()
    with manager_of(step_timeout=1.0) as manager:
        timesteps = manager.step({**zeros(), 2: 3})
        error = timesteps[2].info["error"]
        assert isinstance(error, EnvTimeout)
        assert "self.go.wait" in error.stacks
        Counting.go.set()
        while len(manager.ready_obs) < 4:
            pass
        assert [handle.is_dead for handle in ray.actors] == [False, True, False]
        assert abnormal_in(manager.step(zeros())) == []


def test_f46_an_actor_that_says_nothing_any_more_is_given_up(ray: FakeRay) -> None:
    with manager_of(step_timeout=1.0) as manager:
        ray.actors[0].is_deaf = True  # a machine that is not to be reached
        timesteps = manager.step(zeros())
        assert abnormal_in(timesteps) == [0, 1]
        while len(manager.ready_obs) < 4:
            pass
        assert [h.options["scheduling_strategy"] for h in ray.actors[2:]] == ["node2"]


def test_f46_an_actor_that_dies_while_nobody_looks_is_replaced_behind(ray: FakeRay) -> None:
    with manager_of() as manager:
        manager.step(zeros())
        made = threading.Event()
        ray.on_made = made.set
        ray.actors[1].die()
        assert made.wait(20.0), "no call was needed for that"
        assert manager.stats()["failures"] == 1
        timesteps = manager.step(zeros())
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [
            False,
            False,
            True,
            True,
        ]


def test_f46_its_owner_lets_go_of_the_cluster(ray: FakeRay) -> None:
    with manager_of(on_failure="raise") as manager:
        ray.shutdown()
        with pytest.raises(EnvCrash):
            manager.step(zeros())
    assert ray.shutdowns == 1
