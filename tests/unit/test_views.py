"""Batches as arrays and as treetensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from envmgr.adapters.rows import PlainInfos
from envmgr.errors import (
    ActionError,
    MissingDependencyError,
    NothingReadyError,
    SpaceMismatchError,
)
from envmgr.spaces import codec_of
from envmgr.types import EnvTimestep
from envmgr.views import DictView, TreeView, array_batch, import_treetensor
from tests import di_engine_v2

FLOATS = Box(-1, 1, (2,), np.float32)


def step(obs: Any = None, reward: Any = 1.0, done: bool = False, info: Any = None) -> EnvTimestep:
    obs = np.zeros(2, np.float32) if obs is None else obs
    return EnvTimestep(obs, reward, done, {} if info is None else info)


# -- arrays ---------------------------------------------------------------------------------------


def test_timesteps_as_arrays() -> None:
    timesteps = {
        3: step(np.array([1, 2], np.float32), 0.5, False, {"terminated": False, "k": 1}),
        1: step(np.array([3, 4], np.float32), 2, True, {"terminated": True, "truncated": False}),
        2: step(
            np.array([5, 6], np.float32),
            np.float32(1),
            True,
            {"truncated": True, "terminated": False},
        ),
    }
    batch = array_batch(timesteps, codec_of(FLOATS))
    assert batch.env_ids.tolist() == [3, 1, 2]
    assert batch.env_ids.dtype == np.int64
    assert batch.obs.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch.obs.dtype == np.float32
    assert batch.reward.tolist() == [0.5, 2.0, 1.0]
    assert batch.reward.dtype == np.float64
    assert batch.terminated.tolist() == [False, True, False]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.terminated.dtype == batch.truncated.dtype == np.bool_
    assert batch.infos[0]["k"] == 1
    assert len(batch.infos) == 3


def test_observations_of_dicts_become_a_dict_of_arrays() -> None:
    space = Dict({"a": FLOATS, "n": Discrete(3)})
    obs = {"a": np.ones(2, np.float32), "n": np.int64(2)}
    batch = array_batch({0: step(obs), 1: step(obs)}, codec_of(space))
    assert batch.obs["a"].shape == (2, 2)
    assert batch.obs["n"].tolist() == [2, 2]


def test_observations_without_layout_become_objects() -> None:
    batch = array_batch({0: step("abc"), 1: step("d")}, codec_of(Text(5)))
    assert batch.obs.dtype == object
    assert list(batch.obs) == ["abc", "d"]


def test_infos_that_are_no_dicts_are_no_columns_of_a_trainer() -> None:
    def columns(*infos: Any) -> Any:
        steps = [EnvTimestep(np.zeros(2, np.float32), 1.0, False, info) for info in infos]
        return PlainInfos(array_batch(dict(enumerate(steps)), codec_of(FLOATS))).columns

    assert list(columns({"a": 1}, {"a": 2})["a"].values) == [1, 2]
    assert columns({"a": 1}, [{"a": 2}]) is None


def test_an_empty_batch() -> None:
    batch = array_batch({}, codec_of(FLOATS))
    assert batch.env_ids.shape == (0,)
    assert batch.obs.shape == (0, 2)
    assert batch.reward.shape == batch.terminated.shape == batch.truncated.shape == (0,)
    assert batch.infos == ()


@pytest.mark.parametrize(
    ("done", "info", "terminated", "truncated"),
    [
        (False, {}, False, False),
        (True, {}, True, False),  # it does not say why: nothing followed that could be valued
        (True, {"truncated": True}, False, True),
        (True, {"truncated": False}, True, False),
        (True, {"terminated": True, "truncated": True}, True, True),
        (True, {"terminated": False, "truncated": True, "abnormal": True}, False, True),
        (True, {"terminated": False}, False, True),
        (True, {"terminated": False, "truncated": False}, True, False),
        (True, {"terminated": {"a": False}, "truncated": {"a": False}}, True, False),
        (False, {"truncated": True}, False, False),
        (False, {"terminated": True}, False, False),
        (False, ({"truncated": True}, {"x": 1}), False, False),
        (True, ({"terminated": False, "truncated": True}, {"x": 1}), False, True),
        (True, [{"x": 1}], True, False),
        (False, [{"x": 1}], False, False),
        (True, [], True, False),
    ],
)
def test_why_an_episode_ended(done: bool, info: Any, terminated: bool, truncated: bool) -> None:
    batch = array_batch({0: step(done=done, info=info)}, codec_of(FLOATS))
    assert batch.terminated.tolist() == [terminated]
    assert batch.truncated.tolist() == [truncated]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 2.5], [1, 2.5]),
        ([np.array([1.0]), np.array([2.0])], [1, 2]),
        ([np.array([1.0]), 0.0], [1, 0]),
        ([np.array([[1.0]]), 0.0], [1, 0]),
        ([np.array([1.0, 2.0]), np.array([3.0, 4.0])], [[1, 2], [3, 4]]),
        ([np.array([1.0, 2.0]), 0.0], [[1, 2], [0, 0]]),
        ([0.0, np.array([1.0, 2.0])], [[0, 0], [1, 2]]),
        ([True, 2], [1, 2]),
        ([np.array([1.0]), np.array([2.0, 3.0])], [[1, 1], [2, 3]]),
    ],
    ids=str,
)
def test_rewards_are_numbers_or_arrays_of_one_shape(rewards: Any, expected: Any) -> None:
    timesteps = {i: step(reward=reward) for i, reward in enumerate(rewards)}
    found = array_batch(timesteps, codec_of(FLOATS)).reward
    assert found.tolist() == expected
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    "rewards",
    [
        [{"a": 1.0}, 0.0],
        [np.zeros(2), np.zeros(3)],
        [[1.0], [1.0, [2.0]]],
        ["much", 1.0],
    ],
    ids=str,
)
def test_rewards_of_other_kinds_become_objects(rewards: Any) -> None:
    timesteps = {i: step(reward=reward) for i, reward in enumerate(rewards)}
    found = array_batch(timesteps, codec_of(FLOATS)).reward
    assert found.shape == (2,)
    assert all(one is other for one, other in zip(found, rewards, strict=True))


# -- dicts ----------------------------------------------------------------------------------------


def test_the_dict_view_changes_nothing() -> None:
    view = DictView()
    observations, timesteps, actions = {1: "obs"}, {1: step()}, {1: 0}
    assert view.ready(observations) is observations
    assert view.timesteps(timesteps) is timesteps
    assert view.actions(actions, lambda: [1]) is actions
    assert view.rows([2, 3]) == [2, 3]
    view.forget()


# -- treetensors ----------------------------------------------------------------------------------


def test_without_treetensor_the_error_names_the_extra_and_the_right_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "treetensor", None)
    monkeypatch.setitem(sys.modules, "treetensor.numpy", None)
    with pytest.raises(MissingDependencyError) as caught:
        TreeView()
    text = str(caught.value)
    assert "pip install 'rl-env-manager[treetensor]'" in text
    assert "DI-treetensor" in text


@pytest.mark.v2
class TestTreeView:
    def test_ready_observations_are_one_stacked_array(self) -> None:
        view = TreeView()
        ready = view.ready({0: np.ones(2, np.float32), 2: np.zeros(2, np.float32)})
        assert np.asarray(ready).tolist() == [[1, 1], [0, 0]]
        assert view.rows([7]) == [0, 2]

    def test_dicts_become_trees(self) -> None:
        view = TreeView()
        obs = {"a": np.ones(2, np.float32), "deep": {"n": np.int64(3)}, 5: np.float32(1)}
        ready = view.ready({0: obs, 1: obs})
        assert np.asarray(ready.a).shape == (2, 2)
        assert np.asarray(ready.deep.n).tolist() == [3, 3]

    def test_nothing_ready_is_an_error_that_names_done(self) -> None:
        with pytest.raises(NothingReadyError, match=r"manager\.done"):
            TreeView().ready({})

    def test_rows_belong_to_what_was_read_whatever_became_ready_since(self) -> None:
        view = TreeView()
        view.ready({1: np.zeros(2), 3: np.zeros(2)})
        assert view.actions([10, 30], lambda: [0, 1, 3]) == {1: 10, 3: 30}
        assert view.actions(np.array([10, 30]), lambda: [0, 1, 3]) == {1: 10, 3: 30}

    def test_without_a_read_the_rows_are_those_that_are_ready(self) -> None:
        view = TreeView()
        assert view.rows([4, 5]) == [4, 5]
        assert view.actions([1, 2], lambda: [4, 5]) == {4: 1, 5: 2}
        view.ready({0: np.zeros(2)})
        view.forget()
        assert view.actions([1, 2], lambda: [4, 5]) == {4: 1, 5: 2}

    @pytest.mark.parametrize("actions", [[1], [1, 2, 3], np.zeros(3), [], 7, None])
    def test_a_wrong_number_of_actions_is_refused(self, actions: Any) -> None:
        view = TreeView()
        view.ready({1: np.zeros(2), 3: np.zeros(2)})
        with pytest.raises(ActionError, match=r"of envs \[1, 3\].*Nothing was sent"):
            view.actions(actions, lambda: [1, 3])

    def test_actions_by_env_id_are_taken_as_they_are(self) -> None:
        view = TreeView()
        view.ready({1: np.zeros(2), 3: np.zeros(2)})
        assert view.actions({3: 9}, lambda: [1, 3]) == {3: 9}
        assert view.actions({np.int64(3): 9}, lambda: [1, 3]) == {3: 9}
        assert view.actions({}, lambda: [1, 3]) == {}

    def test_trees_of_actions_are_split_into_rows(self) -> None:
        view = TreeView()
        view.ready({1: np.zeros(2), 3: np.zeros(2)})
        batch = {"move": np.array([1, 2]), "aim": np.zeros((2, 3))}
        expected = view.actions(batch, lambda: [])
        assert expected[3]["move"] == 2
        assert expected[3]["aim"].shape == (3,)
        tree = import_treetensor().array(batch)
        found = view.actions(tree, lambda: [])
        assert int(found[1]["move"]) == 1
        assert np.asarray(found[1]["aim"]).shape == (3,)
        with pytest.raises(ActionError):
            view.actions({"move": np.array([1, 2]), "aim": np.zeros((3, 3))}, lambda: [])

    def test_timesteps_are_trees_with_five_fields(self) -> None:
        view = TreeView()
        (found,) = view.timesteps({4: step(np.ones(2, np.float32), 0.5, True, {"x": 1})})
        assert sorted(found.keys()) == ["done", "env_id", "info", "obs", "reward"]
        assert int(found.env_id) == 4
        assert float(found.reward) == 0.5
        assert bool(found.done) is True
        assert int(found.info.x) == 1
        assert np.asarray(found.obs).tolist() == [1, 1]

    def test_keys_of_infos_become_identifiers(self) -> None:
        info = {"TimeLimit.truncated": True, "7th": 1, "class": 2, "a b": {"c-d": 3}, 5: 4, "": 6}
        (found,) = TreeView().timesteps({0: step(info=info)})
        assert bool(found.info.TimeLimit_truncated) is True
        assert int(found.info._7th) == 1
        assert int(found.info._class) == 2
        assert int(found.info.a_b.c_d) == 3
        assert int(found.info._5) == 4
        assert int(found.info._) == 6

    def test_what_cannot_become_an_array_is_left_out_of_the_info(self) -> None:
        info = {
            "text": "abc",
            "none": None,
            "error": ValueError("x"),
            "ragged": [[1], [1, 2]],
            "words": ["a", "b"],
            "object": np.array([None]),
            "number": 1,
            "flag": True,
            "scalar": np.float32(2),
            "list": [1, 2],
            "array": np.zeros(3),
            "deep": {"text": "abc", "number": 5},
        }
        (found,) = TreeView().timesteps({0: step(info=info)})
        kept = ["array", "deep", "flag", "list", "number", "scalar"]
        assert sorted(found.info.keys()) == kept
        assert list(found.info.deep.keys()) == ["number"]

    @pytest.mark.parametrize("info", [[{"x": 1}], ({"x": 1},)])
    def test_infos_that_are_lists_leave_an_empty_tree(self, info: Any) -> None:
        (found,) = TreeView().timesteps({0: step(info=info)})
        assert list(found.info.keys()) == []

    def test_trees_in_infos_stay_trees(self) -> None:
        tree = import_treetensor().array({"a.b": [1, 2], "text": "abc"})
        (found,) = TreeView().timesteps({0: step(info={"deep": tree})})
        assert list(found.info.deep.keys()) == ["a_b"]
        assert found.info.deep.a_b.tolist() == [1, 2]

    @pytest.mark.parametrize("number", [2, 1.5, np.float32(2), np.int64(3), True], ids=repr)
    def test_arrays_of_timesteps_are_nobody_else_s(self, number: Any) -> None:
        obs, reward = np.zeros(2, np.float32), np.ones(1, np.float32)
        view, timesteps = TreeView(), {0: step(obs, reward, info={"n": number, "a": obs})}
        first, second = view.timesteps(timesteps)[0], view.timesteps(timesteps)[0]
        for array in (first.obs, first.reward, first.done, first.info.n, first.info.a):
            array[...] = 7
        first.info.more = np.array(1)
        assert obs.tolist() == [0, 0]
        assert reward.tolist() == [1]
        di_engine_v2.assert_same(second, di_engine_v2.timestep_of(0, timesteps[0]))
        assert "more" not in view.timesteps(timesteps)[0].info

    def test_rows_of_ready_observations_are_nobody_else_s(self) -> None:
        obs = np.zeros(2, np.float32)
        TreeView().ready({0: obs})[:] = 7
        TreeView().ready({0: {"a": obs}}).a[:] = 7
        assert obs.tolist() == [0, 0]

    def test_no_array_is_formatted_as_text(self) -> None:
        def formats(value: Any) -> str:
            raise AssertionError("which takes longer than all the rest")

        obs = {"a": np.zeros(3), "deep": {"n": np.int64(3)}}
        view, info = TreeView(), {"x": 1.0, "a": np.zeros(3)}
        with np.printoptions(formatter={"all": formats}):
            with pytest.raises(AssertionError):
                str(np.zeros(3))
            view.ready({0: obs, 1: obs})
            view.timesteps({0: step(obs, np.zeros(1), info=info), 1: step(info=info)})


OBSERVATIONS: dict[str, Any] = {
    "vector": np.array([1, -2], np.float32),
    "image": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "point": np.array(2.5),
    "number": np.int64(3),
    "float": 0.25,
    "list": [1.0, 2.0],
    "dict": {"x": np.ones((2, 2)), "n": np.int64(3), "deep": {"b": np.array([True, False])}},
    "dict of nothing": {"x": np.zeros(2), "none": {}},
    "empty": np.zeros((0, 2)),
}
REWARDS: dict[str, Any] = {
    "float": 1.5,
    "int": -2,
    "bool": True,
    "float32": np.float32(0.1),
    "float64": np.float64(0.1),
    "int64": np.int64(3),
    "float16": np.float16(1.5),
    "(1,)": np.array([0.1], np.float32),
    "(1,) float64": np.array([0.1]),
    "()": np.array(0.1, np.float32),
    "(3,)": np.array([1, 2, 3], np.float32),
    "(2, 2) of int": np.ones((2, 2), np.int32),
    "by agent": {"a": 1.0, "b": np.array([2.0])},
}
INFOS: dict[str, Any] = {
    "nothing": {},
    "told": {"terminated": False, "truncated": True},
    "dots and digits": {"TimeLimit.truncated": True, "0th": 1, "12.5": 2.0, "a.b.c": 3},
    "numbers": {"n": 1, "x": 1.5, "c": 1 + 2j, "f": np.float32(0.1), "i": np.int16(3)},
    "arrays": {"a": np.zeros((2, 3), np.float32), "p": np.array(1), "i1": np.ones(3, np.int8)},
    "sequences": {"list": [1, 2], "tuple": (1.0, 2.0), "rows": [[1, 2], [3, 4]], "none": []},
    "nested": {"deep": {"x": 1.0, "deeper": {"a": np.zeros(2)}}, "empty": {}},
    "text": {"text": "left out", "n": 1},
}


@pytest.mark.v2
class TestAsInDIEngine:
    """Key by key what DI-engine's own V2 managers make of the same."""

    @pytest.mark.parametrize("done", [False, True, np.bool_(True)], ids=repr)
    @pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
    def test_rewards(self, reward: Any, done: Any) -> None:
        self.check(step(reward=reward, done=done))

    @pytest.mark.parametrize("obs", OBSERVATIONS.values(), ids=OBSERVATIONS)
    def test_observations(self, obs: Any) -> None:
        self.check(step(obs))

    @pytest.mark.parametrize("info", INFOS.values(), ids=INFOS)
    def test_infos(self, info: Any) -> None:
        self.check(step(info=info))

    def check(self, timestep: EnvTimestep) -> None:
        timesteps = {3: timestep, 1: step(reward=-1.0), 8: timestep}
        found = TreeView().timesteps(timesteps)
        assert type(found) is list
        for tree, (env_id, one) in zip(found, timesteps.items(), strict=True):
            expected = di_engine_v2.timestep_of(env_id, one)
            di_engine_v2.assert_same(tree, expected)
            di_engine_v2.assert_same_tensors(tree.tensor(), expected.tensor())

    @pytest.mark.parametrize("k", [1, 3])
    @pytest.mark.parametrize("obs", OBSERVATIONS.values(), ids=OBSERVATIONS)
    def test_ready_observations(self, obs: Any, k: int) -> None:
        found = TreeView().ready(dict.fromkeys(range(k), obs))
        di_engine_v2.assert_same(found, di_engine_v2.ready_obs_of(dict.fromkeys(range(k), obs)))

    def test_trees_as_observations(self) -> None:
        obs = import_treetensor().array({"a": [1.0, 2.0], "b": {"c": 3}})
        self.check(step(obs))
        expected = di_engine_v2.ready_obs_of({0: obs, 1: obs})
        di_engine_v2.assert_same(TreeView().ready({0: obs, 1: obs}), expected)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (np.zeros(2), np.zeros(3)),
            ({"a": np.zeros(2)}, {"a": np.zeros(3)}),
            ({"a": 1.0}, {"b": 1.0}),
            ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
            ({"a": 1.0}, 1.0),
            (1.0, {"a": 1.0}),
            ([1.0], [1.0, 2.0]),
        ],
        ids=str,
    )
    def test_what_is_no_batch_is_refused(self, one: Any, other: Any) -> None:
        with pytest.raises(SpaceMismatchError, match=r"envs \[2, 5\] are no batch"):
            TreeView().ready({2: one, 5: other})

    def test_timesteps_that_are_no_arrays_are_refused_likewise(self) -> None:
        timesteps = {2: step(np.zeros(2)), 5: step((np.zeros(2), np.zeros(3)))}
        with pytest.raises(SpaceMismatchError, match=r"timesteps of envs \[2, 5\] are no batch"):
            TreeView().timesteps(timesteps)
