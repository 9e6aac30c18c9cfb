"""PufferLib's interface: blocks of envs, first come, first served."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from envmgr import as_gymnasium, make
from envmgr.adapters import puffer
from envmgr.errors import ActionError, ConfigError, EnvNotReadyError, ManagerClosedError
from tests.contract.envs import Do, SampleEnv, ScriptedGymEnv
from tests.contract.harness import ALL_BLOCK, INLINE, Raises, World
from tests.contract.trainers import rows


class Noticing(gymnasium.Wrapper[Any, Any, Any, Any]):
    notices = 0

    def notify(self) -> None:
        self.notices += 1


def noticing(folder: str, env_id: int) -> Any:
    return Noticing(ScriptedGymEnv(env_id, folder))


def factories(world: World, n: int) -> list[Any]:
    return [partial(noticing, world.folder, i) for i in range(n)]


def test_all_envs_in_one_block_do_what_they_do_in_next_step_mode() -> None:
    vecs: list[Any] = [
        puffer.as_puffer(make("CartPole-v1", 3, type="base", reset_inplace=True)),
        as_gymnasium(make("CartPole-v1", 3, type="base")),
    ]
    ours, theirs = vecs
    assert (ours.num_agents, ours.num_envs, ours.agents_per_batch) == (3, 3, 3)
    assert ours.single_observation_space == ours.driver_env.single_observation_space
    assert ours.observation_space.shape == (3, 4)
    assert ours.action_space == MultiDiscrete([2, 2, 2])
    obs, infos = ours.reset(seed=5)
    assert infos == []
    assert np.array_equal(obs, theirs.reset(seed=5)[0])
    n_ends = 0
    for action in np.random.default_rng(0).integers(0, 2, (120, 3)):
        ours.send(action)
        obs, rewards, terminals, truncations, infos, env_ids, masks = ours.recv()
        wanted = theirs.step(action)
        for found, expected in zip((obs, rewards, terminals, truncations), wanted[:4], strict=True):
            assert np.array_equal(found, expected)
        assert (obs.dtype, rewards.dtype, terminals.dtype) == (np.float32, np.float32, np.bool_)
        assert (env_ids.tolist(), masks.tolist(), infos) == ([0, 1, 2], [True] * 3, [])
        n_ends += int(terminals.sum())
    assert n_ends > 5
    for vec in vecs:
        vec.close()


def test_blocks_come_when_all_of_their_envs_have_stepped(world: World) -> None:
    manager = world.make(
        ALL_BLOCK, env_fn=factories(world, 4), launch=False, num_workers=4, reset_inplace=True
    )
    gate, vec = world.gate, puffer.as_puffer(manager, batch_size=2)
    vec.async_reset(seed=[7, 8, 9, 10])
    assert [world.noted(i, "reset")[-1][2] for i in range(4)] == [7, 8, 9, 10]
    first = vec.recv()
    assert rows(first.observations, range(2)) == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert [info["episode"] for info in first.infos] == [0, 0]
    kept = first.observations.copy()
    vec.send([int(Do.GATE), 1])
    assert vec.recv().env_ids.tolist() == [2, 3]
    vec.notify()
    vec.send([int(Do.END), int(Do.KILL)])
    ended = vec.recv()
    assert ended.env_ids.tolist() == [2, 3], "the others wait for env 0"
    assert rows(ended.observations, range(2)) == [[2, 0, 0, 1], [3, 0, 0, 0]]
    assert (ended.terminals.tolist(), ended.truncations.tolist()) == ([True, False], [False, True])
    assert ended.rewards[1] == 0.0
    assert ended.infos[1]["abnormal"]
    assert ended.infos[1]["error"].startswith("EnvCrash: ")
    assert ended.infos[1]["env_id"] == 3, "which row"
    vec.send([0, 0])  # not used: both begin their episodes
    begun = vec.recv()
    assert rows(begun.observations, range(2)) == [[2, 0, 1, 0], [3, 1, 0, 0]]
    assert not (begun.terminals | begun.truncations).any()
    assert begun.rewards.tolist() == [0, 0]
    vec.send([0, 0])
    gate.await_visit(0).release()
    order = [vec.recv().env_ids.tolist(), vec.recv().env_ids.tolist()]
    assert sorted(order) == [[0, 1], [2, 3]]
    assert manager.get_attr("notices", env_ids=[2, 3]) == [1, 0], "env 3 was renewed since"
    assert np.array_equal(first.observations, kept), "what was handed out does not change"
    vec.close()
    vec.close()


def test_misuse_is_refused(world: World) -> None:
    vec = puffer.as_puffer(world.make(INLINE, env_fn=factories(world, 4)), batch_size=2)
    with Raises(EnvNotReadyError, "async_reset()"):
        vec.recv()
    with Raises(EnvNotReadyError, "recv() before each send()"):
        vec.send([0, 0])
    vec.reset()
    for actions in ([0], [0, 0.5]):
        with pytest.raises(ActionError):
            vec.send(actions)
    assert vec.step([0, 0])[0].shape == (2, 6)
    vec.step([0, 0])
    assert vec.driver_env.render()[0, 0, 0] == 0
    vec.close()
    for call in (vec.recv, vec.reset, lambda: vec.send([0, 0])):
        with Raises(ManagerClosedError, "build a new one"):
            call()
    with Raises(ConfigError, "divisor of the 4 envs, found 3"):
        puffer.as_puffer(world.make(INLINE, 4, launch=False), batch_size=3)
    space = Dict({"x": Discrete(2)})
    with Raises(ConfigError, "observation space is a Dict", "FlattenObservation"):
        puffer.make(partial(SampleEnv, space), num_envs=2, type="base")


def several(*rewards: Any) -> Any:
    """Return what rewards with an array."""
    env = SampleEnv(Box(-1, 1, (2,), np.float32))
    return gymnasium.wrappers.TransformReward(env, lambda _: np.array(rewards))


def test_rewards_of_several_numbers_are_refused() -> None:
    for rewards, found in {
        ((1.0, 2.0),) * 2: r"the shape (2,)",
        ((1.0, 2.0), (1.0,)): r"the shape (2,)",
        ((1.0, 2.0), (1.0, 2.0, 3.0)): "several shapes",
    }.items():
        creators = [partial(several, *its) for its in rewards]
        vec = puffer.make(creators, num_envs=2, type="base")
        vec.reset()
        with Raises(ConfigError, "make takes one number as the reward", found, "AgentRows"):
            vec.step([0, 0])
        vec.close()
    vec = puffer.make(several, [3.0], num_envs=2, type="base")
    vec.reset()
    assert vec.step([0, 0])[1].tolist() == [3.0, 3.0]
    vec.close()


def test_make_takes_one_creator_or_one_for_each(world: World) -> None:
    space, folder = Box(-1, 1, (2,), np.float32), world.folder
    vec = puffer.make(SampleEnv, [space], {"episode_length": 2}, num_envs=2, type="base")
    vec.reset()
    assert not vec.step([0, 0])[2].any()
    assert vec.step([0, 0])[2].all()
    vec.close()
    vec = puffer.make([noticing] * 2, [[folder, 0], [folder, 1]], num_envs=2, type="base")
    assert rows(vec.reset()[0], range(2)) == [[0, 0, 0, 0], [1, 0, 0, 0]]
    vec.close()
    with Raises(ConfigError, "num_envs is 3, found 2 creators"):
        puffer.make([noticing] * 2, num_envs=3)
    for keys, said in [
        ({"num_envs": 2.0}, "num_envs is 2.0"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"num_envs": True}, "num_envs is true"),
        ({"env_args": 5}, "should be a list and a dict (env_args, env_kwargs), found 5"),
        ({"env_kwargs": [1]}, " and [1]"),
        ({"batch_size": 1.0}, "batch_size should be a divisor of the 2 envs, found 1.0"),
        ({"batch_size": True}, "found True"),
    ]:
        with Raises(ConfigError, said):
            puffer.make(SampleEnv, **{"env_args": [space], "num_envs": 2, "type": "base", **keys})


def test_a_recv_that_ctrl_c_ends_is_not_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    vec = puffer.as_puffer(world.make(INLINE, env_fn=factories(world, 2), launch=False))
    vec.reset()
    for name, actions in (("put", [int(Do.END), 1]), ("show", [0, 2]), ("received", [3, 4])):
        vec.send(actions)
        with monkeypatch.context() as patch:
            patch.setattr(puffer.Block, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                vec.recv()
        received = vec.recv()
        if name == "show":
            assert rows(received.observations, range(2)) == [[0, 0, 1, 0], [1, 0, 0, 2]]
    assert rows(received.observations, range(2)) == [[0, 0, 1, 1], [1, 0, 0, 3]]
    vec.close()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
