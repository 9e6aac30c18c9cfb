"""The treetensor view: stacked observations, actions by row, timesteps as trees."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr import BaseEnv, EnvTimestep, create_env_manager
from envmgr.errors import (
    ActionError,
    EnvNotReadyError,
    ManagerClosedError,
    MissingDependencyError,
    NothingReadyError,
)
from tests import di_engine_v2
from tests.contract.envs import Do, ScriptedGymEnv, expected_reward, seen
from tests.contract.harness import Raises, Setup, World, over

INLINE_V2 = Setup("base_v2")
ALL_BLOCK_V2 = Setup("subprocess_v2", "fork", True)
ALL_MESSAGE_V2 = Setup("subprocess_v2", "fork", False)
SOME_MESSAGE_V2 = Setup("async_subprocess_v2", "fork", False)
SOME_BLOCK_V2 = Setup("async_subprocess_v2", "fork", True)
every_v2_setup = over(INLINE_V2, ALL_BLOCK_V2, ALL_MESSAGE_V2, SOME_MESSAGE_V2, SOME_BLOCK_V2)
every_v2_kind = over(INLINE_V2, ALL_BLOCK_V2, SOME_MESSAGE_V2)

needs_treetensor = pytest.mark.v2


def wait_ready(manager: Any) -> None:
    """Wait for resets and repairs of all envs."""
    manager.get_attr("action_space")


def gather(manager: Any, actions: Any, n: int) -> list[Any]:
    """Step, and gather until there are n timesteps; return them by ascending env_id."""
    timesteps = list(manager.step(actions))
    while len(timesteps) < n:
        timesteps += manager.recv()
    timesteps.sort(key=lambda t: t.env_id.item())
    return timesteps


@needs_treetensor
@every_v2_setup
def test_ready_obs_is_one_batch_with_a_row_for_each_ready_env(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    obs = manager.ready_obs
    assert isinstance(obs, np.ndarray)
    assert (obs.shape, obs.dtype) == ((3, 6), np.float64)
    assert [seen(row)[:4] for row in obs] == [(i, 0, 0, 0) for i in range(3)]
    assert manager.ready_obs_id == [0, 1, 2]
    obs[:] = -1.0
    assert seen(manager.ready_obs[1]).env_id == 1, "it is the manager's own memory"


@needs_treetensor
@every_v2_setup
def test_a_step_takes_an_action_for_each_row_and_gives_a_list_of_trees(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    for k, actions in enumerate(
        ([3, 4, 5], np.array([4, 5, 6]), np.array([[5], [6], [7]]), [np.array([6]), np.int64(7), 8])
    ):
        assert len(manager.ready_obs) == 3
        timesteps = gather(manager, actions, 3)
        for i, timestep in enumerate(timesteps):
            assert sorted(timestep.keys()) == ["done", "env_id", "info", "obs", "reward"]
            assert timestep.env_id.item() == i
            it = seen(timestep.obs)
            assert (it.env_id, it.step, it.action) == (i, k + 1, 3 + k + i)
            assert timestep.reward.item() == expected_reward(timestep.obs)
            assert timestep.done.dtype == bool
            assert not timestep.done
            assert timestep.info.action.item() == 3 + k + i
            assert np.array_equal(timestep.info.nested.array, timestep.obs)
    assert [world.actions(i) for i in range(3)] == [[3 + i + k for k in range(4)] for i in range(3)]


@needs_treetensor
@every_v2_kind
def test_a_step_takes_a_dict_by_env_id_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    timesteps = gather(manager, {2: 5, 0: 4}, 2)
    assert [t.env_id.item() for t in timesteps] == [0, 2]
    assert [world.actions(i) for i in range(3)] == [[4], [], [5]]


@needs_treetensor
@over(ALL_BLOCK_V2, ALL_MESSAGE_V2, INLINE_V2)
def test_a_sync_step_keeps_the_order_of_the_rows(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    assert len(manager.ready_obs) == 3
    assert [t.env_id.item() for t in manager.step([1, 2, 3])] == [0, 1, 2]
    assert [t.env_id.item() for t in manager.step({2: 1, 0: 1})] == [2, 0]


@needs_treetensor
@over(ALL_BLOCK_V2, SOME_MESSAGE_V2, SOME_BLOCK_V2)
def test_row_i_belongs_to_action_i_also_when_another_env_becomes_ready_meanwhile(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    gather(manager, {0: Do.END_THEN_GATE}, 1)
    visit = gate.await_visit(0, "reset")
    obs = manager.ready_obs
    assert [seen(row).env_id for row in obs] == [1, 2]
    visit.release()
    wait_ready(manager)
    assert manager.ready_env == [0, 1, 2]
    assert manager.ready_obs_id == [1, 2], "the rows of what was read"
    assert len(gather(manager, [7, 8], 2)) == 2
    assert [world.actions(i)[-1] for i in range(3)] == [Do.END_THEN_GATE, 7, 8]
    assert [seen(row).env_id for row in manager.ready_obs] == [0, 1, 2]


@needs_treetensor
@over(ALL_BLOCK_V2)
def test_row_i_belongs_to_action_i_also_when_an_env_dies_meanwhile(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    assert len(manager.ready_obs) == 3
    world.kill(0)
    timesteps = gather(manager, [1, 2, 3], 3)
    assert [bool(t.done) for t in timesteps] == [True, False, False]
    assert timesteps[0].info.abnormal
    assert [seen(t.obs).action for t in timesteps[1:]] == [2, 3]
    assert world.actions(0) == []


@needs_treetensor
@every_v2_kind
def test_a_wrong_count_is_refused_whole(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    assert len(manager.ready_obs) == 3
    for wrong in ([1, 2], [1, 2, 3, 4], np.array([1]), [], 5):
        with Raises(ActionError, "[0, 1, 2]", "Nothing was sent"):
            manager.step(wrong)
        with pytest.raises(ActionError):
            manager.send(wrong)
    with Raises(ActionError, "env 1"):
        manager.step([1, 99, 1])
    assert [world.actions(i) for i in range(3)] == [[], [], []]
    assert len(gather(manager, [1, 2, 3], 3)) == 3, "the rows that were read are still good"


@needs_treetensor
@every_v2_kind
def test_rows_that_have_been_stepped_are_used_up(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, auto_reset=False)
    assert len(manager.ready_obs) == 2
    gather(manager, [Do.END, 1], 2)
    assert manager.ready_obs_id == [1]
    [timestep] = gather(manager, [2], 1)  # without reading: the envs that are ready now
    assert timestep.env_id.item() == 1


@needs_treetensor
@every_v2_kind
def test_send_and_recv_in_two_halves(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    assert len(manager.ready_obs) == 3
    manager.send([1, 2, 3])
    with pytest.raises(EnvNotReadyError):
        manager.step({0: 1})
    with Raises(NothingReadyError, "recv"):
        _ = manager.ready_obs
    timesteps: list[Any] = []
    while len(timesteps) < 3:
        timesteps += manager.recv()
    assert sorted(t.env_id.item() for t in timesteps) == [0, 1, 2]
    with pytest.raises(NothingReadyError):
        manager.step({})


@needs_treetensor
@every_v2_kind
def test_ready_obs_raises_when_all_envs_are_done(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, episode_num=1)
    assert len(manager.ready_obs) == 2
    gather(manager, [Do.END, Do.END], 2)
    assert manager.done
    with Raises(NothingReadyError, "DONE", "episode_num"):
        _ = manager.ready_obs


@needs_treetensor
@every_v2_kind
def test_abnormal_timesteps_are_trees_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    first = manager.ready_obs
    timesteps = gather(manager, [Do.RAISE, 1], 2)
    bad = timesteps[0]
    assert np.array_equal(bad.obs, first[0])
    assert (bad.reward.item(), bad.done.item()) == (0.0, True)
    assert bad.info.abnormal.item() is True
    assert bad.info.truncated.item() is True
    assert bad.info.terminated.item() is False
    assert "error" not in bad.info  # an object cannot become an array
    assert "abnormal" not in timesteps[1].info
    wait_ready(manager)
    assert [seen(row)[2] for row in manager.ready_obs] == [1, 0]
    assert manager.stats()["failures"] == 1


class Unreadable:
    """What numpy can make no array of, as a tensor with gradients."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("call numpy() on it with its gradient detached")


class InfoEnv(gymnasium.Env[Any, Any]):
    """Has dict observations and actions, and infos of all sorts."""

    observation_space = Dict(
        {"image": Box(0, 255, (2, 2), np.uint8), "more": Dict({"n": Discrete(100)})}
    )
    action_space = Dict({"move": Discrete(9), "turn": Box(-1, 1, (2,), np.float32)})

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id

    def _obs(self, n: int) -> Any:
        return {"image": np.full((2, 2), self.env_id, np.uint8), "more": {"n": np.int64(n)}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs(0), {}

    def step(self, action: Any) -> Any:
        info = {
            "TimeLimit.truncated": True,
            "class": 1,
            "0th": 2,
            "with space": 3.5,
            "turn": action["turn"],
            "nested": {"a.b": np.float32(4), "text": "left out", "empty": {}},
            "list": [1, 2],
            "text": "left out",
            "object": object,
            "none": None,
            "ragged": [[1], [1, 2]],
            "tensor": Unreadable(),
        }
        return self._obs(int(action["move"])), 1.0, False, False, info


@needs_treetensor
@every_v2_setup
def test_dict_observations_and_actions_are_trees(world: World, setup: Setup) -> None:
    import treetensor.numpy as tnp

    manager = world.make(setup, env_fn=[partial(InfoEnv, i) for i in range(3)])
    obs = manager.ready_obs
    assert isinstance(obs, tnp.ndarray)
    assert obs.image.shape == (3, 2, 2)
    assert obs.image.dtype == np.uint8
    assert obs.image[:, 0, 0].tolist() == [0, 1, 2]
    assert obs.more.n.tolist() == [0, 0, 0]
    turns = np.array([[0.0, 0.1], [0.2, 0.3], [0.4, 0.5]], np.float32)
    batch = {"move": np.array([4, 5, 6]), "turn": turns}
    for actions in (
        tnp.array(batch),
        batch,
        [{"move": 4 + i, "turn": turns[i]} for i in range(3)],
        [tnp.array({"move": 4 + i, "turn": turns[i]}) for i in range(3)],
    ):
        assert len(manager.ready_obs.more.n) == 3
        timesteps = gather(manager, actions, 3)
        assert [t.obs.more.n.item() for t in timesteps] == [4, 5, 6]
        assert [int(t.obs.image[0, 0]) for t in timesteps] == [0, 1, 2]
        assert np.array_equal([t.info.turn for t in timesteps], turns)
    with Raises(ActionError, "rows"):
        manager.step({"move": np.array([1, 2]), "turn": turns})


class TellingEnv(BaseEnv):
    """Gives what DI-engine's envs give: arrays as rewards, numbers and arrays in infos."""

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.count = 0
        deep = Dict({"n": Discrete(100), "point": Box(-1.0, 1.0, (), np.float64)})
        self.observation_space = Dict({"image": Box(0, 255, (2, 3), np.uint8), "deep": deep})
        self.action_space = Discrete(9)
        self.reward_space = Box(-9.0, 9.0, (1,), np.float32)

    def _obs(self) -> Any:
        image = np.full((2, 3), self.env_id, np.uint8)
        return {"image": image, "deep": {"n": np.int64(self.count), "point": np.array(0.5)}}

    def reset(self) -> Any:
        self.count = 0
        return self._obs()

    def step(self, action: Any) -> EnvTimestep:
        self.count += 1
        rewards = (0.25, np.array([0.5], np.float32), np.float32(0.1), self.count, np.arange(2.0))
        infos: list[dict[str, Any]] = [
            {},
            {"TimeLimit.truncated": True, "0th": int(action), "text": "left out"},
            {"array": np.arange(3), "list": [1, 2], "deep": {"x": 1.5, "none": {}}},
        ]
        info = infos[(self.count + self.env_id) % 3]
        return EnvTimestep(self._obs(), rewards[self.env_id % 5], self.count == 4, info)

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@needs_treetensor
@over(INLINE_V2, ALL_BLOCK_V2, ALL_MESSAGE_V2, ALL_BLOCK_V2._replace(num_workers=2))
def test_everything_is_key_by_key_what_di_engine_makes_of_it(world: World, setup: Setup) -> None:
    env_fn = [partial(TellingEnv, i) for i in range(5)]
    v2 = world.make(setup, env_fn=env_fn)
    plain = world.make(setup._replace(kind=setup.kind.removesuffix("_v2")), env_fn=env_fn)
    for k in range(10):
        wait_ready(v2)
        wait_ready(plain)
        di_engine_v2.assert_same(v2.ready_obs, di_engine_v2.ready_obs_of(plain.ready_obs))
        actions = [(k + i) % 9 for i in range(5)]
        found, given = v2.step(actions), plain.step(dict(enumerate(actions)))
        for tree, (env_id, timestep) in zip(found, given.items(), strict=True):
            expected = di_engine_v2.timestep_of(env_id, timestep)
            di_engine_v2.assert_same(tree, expected)
            di_engine_v2.assert_same_tensors(tree.tensor(), expected.tensor())


@needs_treetensor
@every_v2_kind
def test_who_changes_a_timestep_changes_no_observation(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    assert len(manager.ready_obs) == 2
    for timestep in gather(manager, [1, 2], 2):
        timestep.obs[...] = -1.0
    rows = manager.ready_obs
    assert [seen(row).action for row in rows] == [1, 2]
    rows[...] = -1.0
    timesteps = gather(manager, [Do.RAISE, 3], 2)
    assert seen(timesteps[0].obs).action == 1, "the last good observation"
    assert seen(timesteps[1].obs).action == 3


@needs_treetensor
@every_v2_kind
def test_info_keys_are_identifiers_and_what_is_no_array_is_left_out(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, env_fn=[partial(InfoEnv, 0)])
    [timestep] = gather(manager, {0: {"move": 1, "turn": [0.0, 0.0]}}, 1)
    info = timestep.info
    assert info.TimeLimit_truncated.item() is True
    assert info._class.item() == 1
    assert info._0th.item() == 2
    assert info.with_space.item() == 3.5
    assert info.nested.a_b.item() == 4.0
    assert info.list.tolist() == [1, 2]
    assert (info.terminated.item(), info.truncated.item()) == (False, False)
    assert not {"text", "object", "none", "ragged"} & set(info.keys())
    assert "text" not in info.nested


@needs_treetensor
@every_v2_setup
def test_the_whole_loop_of_di_engine(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, env=ScriptedGymEnv, episode_num=2, script={"episode_length": 3})
    finished = dict.fromkeys(range(3), 0)
    newest = dict.fromkeys(range(3), (0, 0))
    while not manager.done:
        obs = manager.ready_obs if manager.ready_env else None
        if obs is None and not manager.stats()["outstanding"]:
            obs = manager.ready_obs
        timesteps = manager.step({} if obs is None else [int(row[0]) for row in obs])
        for timestep in timesteps:
            i = timestep.env_id.item()
            it = seen(timestep.obs)
            episode, step = newest[i]
            expected = (episode, step + 1) if step < 3 else (episode + 1, 1)
            assert (it.env_id, it.action, (it.episode, it.step)) == (i, i, expected)
            newest[i] = expected
            finished[i] += int(timestep.done)
    assert finished == {0: 2, 1: 2, 2: 2}
    assert [len(world.actions(i)) for i in range(3)] == [6, 6, 6]


@needs_treetensor
@every_v2_kind
def test_a_closed_v2_manager_refuses_calls(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    assert len(manager.ready_obs) == 2
    manager.close()
    for call in (lambda: manager.step([1, 2]), lambda: manager.ready_obs, manager.reset):
        with Raises(ManagerClosedError, "launch()"):
            call()
    manager.launch()
    assert len(gather(manager, [1, 2], 2)) == 2


# -- without treetensor ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["base_v2", "subprocess_v2", "async_subprocess_v2"])
def test_without_treetensor_the_error_names_the_extra_and_the_right_package(
    world: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setitem(sys.modules, "treetensor", None)
    monkeypatch.setitem(sys.modules, "treetensor.numpy", None)
    with Raises(
        MissingDependencyError, "rl-env-manager[treetensor]", "DI-treetensor", "something else"
    ):
        create_env_manager({"type": key}, env_fn=world.factories(1))
    with pytest.raises(ImportError):
        create_env_manager({"type": key}, env_fn=world.factories(1))


def test_treetensor_and_torch_are_imported_only_by_v2_kinds() -> None:
    script = """
import sys
from envmgr import ENV_MANAGER_REGISTRY, make
ENV_MANAGER_REGISTRY.get("subprocess_v2").default_config()
with make("CartPole-v1", env_num=1, type="subprocess") as manager:
    manager.step({0: 0})
assert not {"treetensor", "treevalue", "torch"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
