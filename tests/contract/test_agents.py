"""Multi-agent envs under managers: dicts by living agent, and agents as rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr import as_gymnasium, create_env_manager, make
from envmgr.collect import Collector, RolloutCollector
from envmgr.env import AgentRows
from envmgr.errors import ActionError, ConfigError, EnvCrash, EnvRaised, EnvTimeout
from envmgr.types import Once
from tests.agents import AGENTS, LIVES, Relay
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE_SHARED,
    INLINE,
    SOME_BLOCK_SHARED,
    SOME_MESSAGE,
    THREADS,
    Setup,
    over,
    ready_all,
    step_all,
)

N = 3


def relays(setup: Setup, **cfg: Any) -> Any:
    cfg = {"seed": 50, "retry_waiting_time": 0.0, **setup.cfg, **cfg}
    return create_env_manager(cfg, env_fn=[Relay] * N)


def seen(by_agent: Any) -> dict[str, list[float]]:
    return {agent: obs[1:].tolist() for agent, obs in by_agent.items()}


@over(INLINE, THREADS, ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK_SHARED)
def test_dicts_by_living_agent(setup: Setup) -> None:
    with relays(setup) as manager:
        shown = ready_all(manager)
        assert {i: int(obs["ann"][0]) for i, obs in shown.items()} == {0: 50, 1: 51, 2: 52}
        assert manager.ready_info[1]["infos"]["bob"] == {"hello": "bob"}
        assert manager.reward_space["ann"].shape == ()
        _refuse_what_agents_cannot_do(manager)
        ends = []
        for _ in range(5):
            obs = ready_all(manager)
            actions = manager.random_action()
            assert [[*of_one] for of_one in actions.values()] == [
                [*of_one] for of_one in obs.values()
            ]
            timesteps = step_all(manager, actions)
            ends.append([timestep.done for timestep in timesteps.values()])
            timestep = timesteps[2]
            if not timestep.done:
                assert manager.ready_obs[2].keys() == timestep.obs.keys()
                assert all(timestep.obs[a] is manager.ready_obs[2][a] for a in timestep.obs)
        assert ends == [[False] * N] * 3 + [[True] * N, [False] * N]
        assert timestep.reward == {"ann": 0.1, "bob": 1.1, "cleo": 0.0}
        assert [*timestep.obs["bob"][1:3]] == [2, 1]
        _take_arrays(manager)


def _refuse_what_agents_cannot_do(manager: Any) -> None:
    before = manager.stats()["actions"]
    for action, said in [
        ({"ann": 0, "bob": 0, "cleo": 1}, r"for agents \['cleo'\], which have ended, or have not"),
        ({"ann": 0}, r"none for agents \['bob'\], which live"),
        ({"ann": 0, "dora": 0}, "'dora' is none of the possible agents"),
        ({"ann": 0, "bob": 5}, r"of agent 'bob': 5 is outside Discrete\(5\)"),
        (3, "should be a dict by agent, found int"),
    ]:
        with pytest.raises(ActionError, match=said):
            manager.step({0: {"ann": 0, "bob": 0}, 1: action})
    assert manager.stats()["actions"] == before


def _take_arrays(manager: Any) -> None:
    ids = [*range(N)]
    ended = []
    for _ in range(3):
        manager.send_arrays(ids, [*manager.random_action().values()])
        batch = manager.recv_arrays(min_ready=N)
        assert batch.reward.dtype == object
        ended.append([*batch.terminated, *batch.truncated])
    assert ended == [[False] * 2 * N] * 2 + [[True] * N + [False] * N]


@over(INLINE, THREADS, ALL_BLOCK, SOME_MESSAGE)
def test_steps_that_fail_give_nothing_to_each_living_agent(setup: Setup) -> None:
    fails = {"raise": EnvRaised, "abnormal": None}
    if setup.has_processes:
        fails["exit"] = EnvCrash
    with relays(setup, reset_inplace=setup.kind == "base", max_failures=9) as manager:
        for fail, kind in fails.items():
            manager.reset({1: Once(fail=fail, at=2), 0: None, 2: None})
            step_all(manager, manager.random_action())
            last = ready_all(manager)[1]
            timesteps = step_all(manager, manager.random_action())
            failed = timesteps[1]
            assert failed.done
            assert seen(failed.obs) == seen(last)
            assert failed.reward == dict.fromkeys(AGENTS, 0.0)
            assert failed.info["abnormal"] is True
            assert failed.info["terminated"] == dict.fromkeys(AGENTS, False)
            assert failed.info["truncated"] == dict.fromkeys(AGENTS, True)
            assert kind is None or isinstance(failed.info["error"], kind)
            assert [*timesteps[0].obs] == ["ann", "cleo"]
            assert [*ready_all(manager)[1]] == ["ann", "bob"]
        assert manager.stats()["abnormal"] == len(fails)


def test_agents_that_hang_are_given_up_and_a_spare_comes_in() -> None:
    cfg = {"step_timeout": 0.3, "spare_env_num": 1, "max_failures": 9}
    with relays(ALL_BLOCK, **cfg) as manager:
        manager.reset({0: Once(fail="hang", at=1)})
        timesteps = step_all(manager, manager.random_action())
        assert isinstance(timesteps[0].info["error"], EnvTimeout)
        assert timesteps[0].reward == {"ann": 0.0, "bob": 0.0}
        assert [*ready_all(manager)[0]] == ["ann", "bob"]


@over(INLINE, ALL_BLOCK, ALL_MESSAGE_SHARED, SOME_BLOCK_SHARED)
def test_agents_as_rows_go_through_the_block(setup: Setup) -> None:
    wrappers = ["envmgr.env.AgentRows"]
    cfg = {"seed": 50, **setup.cfg, "num_workers": setup.num_workers}
    rows, dicts = make("tests.agents:Relay", N, wrappers=wrappers, **cfg), relays(setup)
    with rows, dicts:
        ids = [*range(N)]
        actions = np.array([[k, 4 - k, 1] for k in ids])
        for t in range(1, 6):
            shown, by_agent = rows.ready_arrays(ids).obs, ready_all(dicts)
            assert shown["mask"].shape == (N, len(AGENTS))
            for i, obs in by_agent.items():
                assert [a for a, m in zip(AGENTS, shown["mask"][i], strict=True) if m] == [*obs]
                for agent, one in obs.items():
                    assert shown["obs"][i, AGENTS.index(agent)].tolist() == one.tolist()
            rows.send_arrays(ids, actions)
            batch = rows.recv_arrays(min_ready=N)
            given = {
                i: {a: int(actions[i, AGENTS.index(a)]) for a in o} for i, o in by_agent.items()
            }
            timesteps = step_all(dicts, given)
            for i, timestep in timesteps.items():
                rewards = [timestep.reward.get(agent, 0.0) for agent in AGENTS]
                assert batch.reward[i].tolist() == rewards
            assert batch.terminated.tolist() == [t == 4] * N
        assert [*batch.infos[0]] == ["terminated", "truncated"]


def many() -> AgentRows:
    return AgentRows(Relay(agents=tuple(range(20)), lives={}))


def test_rewards_of_many_agents_have_room_in_the_block() -> None:
    with create_env_manager({"seed": 1, **ALL_BLOCK.cfg}, env_fn=[many] * 2) as manager:
        manager.send_arrays([0, 1], np.zeros((2, 20), np.int64))
        batch = manager.recv_arrays(min_ready=2)
        assert batch.reward.tolist() == [[k + 0.1 for k in range(20)]] * 2
        assert batch.infos.told == []  # type: ignore[attr-defined]


def test_rows_are_what_trainers_take() -> None:
    cfg = {"type": "base", "seed": 3, "reset_inplace": True}
    fn = [lambda: AgentRows(Relay(), reward="sum")] * 2
    vec = as_gymnasium(create_env_manager(cfg, env_fn=fn), autoreset_mode="SameStep")
    obs, _ = vec.reset()
    assert obs["obs"].shape == (2, len(AGENTS), 4)
    for _ in range(4):
        obs, reward, terminated, truncated, infos = vec.step(vec.action_space.sample())
    assert reward.tolist() == pytest.approx([2.8, 2.8])
    assert terminated.all()
    assert not truncated.any()
    assert infos["final_obs"][0]["mask"].tolist() == [0, 0, 0]
    vec.close()
    with pytest.raises(ConfigError, match="as_gymnasium takes observations of fixed"):
        as_gymnasium(create_env_manager(cfg, env_fn=[Relay]))


def test_collectors_take_agents() -> None:
    with relays(INLINE) as manager:
        records = Collector(manager).collect(episodes=2)
        assert [record.episode_return for record in records] == pytest.approx([10.2] * 2)
        assert all(record.terminated and not record.truncated for record in records)
        with pytest.raises(ConfigError, match="RolloutCollector takes observations of fixed"):
            RolloutCollector(manager, n_steps=2)
    with create_env_manager({"type": "base"}, env_fn=[lambda: AgentRows(Relay())]) as manager:
        rollout = RolloutCollector(manager, n_steps=5).collect()
        assert rollout.rewards.shape == (5, 1, len(AGENTS))


def test_random_steps_at_the_start_are_of_the_living() -> None:
    with relays(INLINE, start_steps=6) as manager:
        begun = {
            i: [int(x) for x in next(iter(o.values()))[1:3]] for i, o in manager.ready_obs.items()
        }
        assert len({*map(tuple, begun.values())}) > 1


def test_lives_may_be_params_of_resets() -> None:
    with relays(INLINE, auto_reset=False) as manager:
        manager.reset({0: {"lives": {**LIVES, "bob": (0, 1), "ann": (0, 1), "cleo": (2, 3)}}})
        timestep = manager.step({0: {"ann": 0, "bob": 0}})[0]
        assert timestep.done
        assert timestep.info["terminated"] == {"ann": True, "bob": False}
        assert timestep.info["truncated"] == {"ann": False, "bob": True}
