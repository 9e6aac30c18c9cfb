"""Timesteps as DI-engine reads them; the kinds themselves are tested where DI-engine is."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from envmgr.adapters.ding_timesteps import CompletedDicts, CompletedTrees, Ends
from envmgr.errors import EnvCrash, MissingDependencyError
from envmgr.types import EnvTimestep

OBS = np.zeros(2, np.float32)
CRASH = EnvCrash("env 1: its host died", env_id=1, during="step")


def step(reward: Any, done: bool = False, info: Any = None) -> EnvTimestep:
    return EnvTimestep(OBS, reward, done, {} if info is None else info)


def failed(info: Any = None) -> EnvTimestep:
    marks = {"abnormal": True, "terminated": False, "truncated": True, "error": CRASH}
    return step(0.0, True, marks if info is None else [{**part, **marks} for part in info])


def run(ends: Ends, *steps: EnvTimestep, env_id: int = 1) -> Any:
    """Complete timesteps of one env, and return the last of them."""
    for timestep in steps:
        found = ends.complete({env_id: timestep})[env_id]
    return found


def one(value: float) -> Any:
    return np.array([value], np.float32)


def test_a_failure_ends_the_episode_with_the_return_so_far_and_text() -> None:
    ends = Ends()
    found = run(ends, step(1.0), step(0.5), failed())
    assert (found.obs is OBS, found.reward, found.done) == (True, 0.0, True)
    assert found.info == {
        "abnormal": True,
        "terminated": False,
        "truncated": True,
        "error": "EnvCrash: env 1: its host died",
        "eval_episode_return": 1.5,
    }
    assert ends.failures == {1: CRASH}
    assert run(ends, step(2.0), failed()).info["eval_episode_return"] == 2.0  # an episode later
    run(ends, step(3.0))
    ends.forget([1])
    assert run(ends, failed()).info["eval_episode_return"] == 0.0


def test_envs_are_counted_apart_and_ordinary_timesteps_stay_the_same_objects() -> None:
    ends, timesteps = Ends(), {0: step(1.0), 1: step(2.0, True, {"eval_episode_return": 7.0})}
    ordinary = timesteps[0]
    assert ends.complete(timesteps)[0] is ordinary
    assert timesteps[1].info == {"eval_episode_return": 7.0}
    found = ends.complete({0: failed(), 1: failed()})
    assert [t.info["eval_episode_return"] for t in found.values()] == [1.0, 0.0]


def test_an_end_without_a_return_gets_the_sum_with_its_last_reward() -> None:
    assert run(Ends(), step(1.0), step(0.25, True)).info["eval_episode_return"] == 1.25


def test_a_failure_before_all_rewards_has_the_form_of_the_others() -> None:
    ends = Ends()
    found = ends.complete({0: failed(), 1: step(one(1.0))})
    assert (found[0].reward.shape, found[0].reward.dtype) == ((1,), np.float32)
    assert np.shape(ends.complete({2: failed()})[2].reward) == (1,)


def test_a_return_is_not_cut_to_the_ints_of_the_envs_own() -> None:
    ends = Ends()
    run(ends, step(1.0, True, {"eval_episode_return": np.array([12])}))
    told = run(ends, step(3.7), failed()).info["eval_episode_return"]
    assert told.tolist() == [3.7]


@pytest.mark.parametrize("own", [2.5, np.float32(2.5), np.array([2.5], np.float64), None])
def test_reward_and_return_after_a_failure_have_the_form_of_the_envs_own(own: Any) -> None:
    ends = Ends()
    if own is not None:
        run(ends, step(one(3.0), True, {"eval_episode_return": own}))
    found = run(ends, step(one(1.0)), step(one(1.5)), failed())
    assert (found.reward.shape, found.reward.dtype) == ((1,), np.float32)
    told = found.info["eval_episode_return"]
    like = one(2.5) if own is None else own  # without any: that of the rewards
    assert np.shape(told) == np.shape(like)
    assert np.mean([told, like]) == 2.5  # as an evaluator averages them


def test_each_agent_of_a_battle_gets_an_info_with_its_own_return() -> None:
    ends = Ends()
    rewards = np.array([1.0, -1.0])
    run(ends, step(rewards, True, [{"eval_episode_return": 1}, {"eval_episode_return": -1}]))
    for ending in (failed(), failed([{}, {}])):
        found = run(ends, step(rewards), step(rewards), ending)
        assert [info["eval_episode_return"] for info in found.info] == [2.0, -2.0]
        assert [type(info["error"]) for info in found.info] == [str, str]
        assert found.reward.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("reward", [{"a": 1}, None, "much", np.zeros(2)])
def test_rewards_that_have_no_sum_do_no_harm(reward: Any) -> None:
    ends = Ends()
    run(ends, step(np.ones(3)))  # as far as shapes go, too
    for found in (run(ends, step(reward, True)), run(ends, step(reward), failed())):
        assert not np.any(found.info["eval_episode_return"])


def test_the_dicts_are_completed() -> None:
    assert CompletedDicts(Ends()).timesteps({1: failed()})[1].info["eval_episode_return"] == 0.0


@pytest.mark.v2
def test_the_trees_are_completed_and_become_tensors() -> None:
    view = CompletedTrees(Ends())
    view.timesteps({1: step(one(2.0))})
    (tree,) = view.timesteps({1: failed()})
    tensor = tree.tensor()
    assert tensor.reward.shape == (1,)
    assert tensor.info.eval_episode_return.item() == 2.0
    assert bool(tensor.info.abnormal)
    assert "error" not in tree.info


def test_without_di_engine_the_import_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ding", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'DI-engine>=0\.5\.3'"):
        importlib.import_module("envmgr.adapters.ding")
