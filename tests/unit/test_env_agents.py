"""Multi-agent envs: how they are known, what their timesteps hold, agents as rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space, Text
from gymnasium.utils.env_checker import check_env as check_gymnasium_env

from envmgr.core.collect import ends_of
from envmgr.env import AgentRows, EnvContractError
from envmgr.env.adapt import (
    as_base_env,
    as_built,
    env_attribute,
    random_action_of,
    reset_env,
    seed_env,
    set_env_attribute,
)
from envmgr.env.agent_dicts import MultiAgentEnv
from envmgr.env.steps import step_env
from envmgr.errors import ConfigError, MissingDependencyError
from envmgr.spaces import AgentSpace, ValueMismatchError, codec_of
from envmgr.spaces.agents import action_check, caster_of, lost_step, random_action
from envmgr.testing import env_problems
from tests.agents import AGENTS, Layer, Relay


def ready(env: Any = None, seed: int = 7, **options: Any) -> tuple[Any, Any]:
    """A wrapped env that was reset, and what it showed."""
    wrapped = as_base_env(Relay() if env is None else env, 0)
    seed_env(wrapped, seed, None)
    return wrapped, reset_env(wrapped, options)[0]


def listed(by_agent: Any) -> dict[str, list[float]]:
    return {agent: value.tolist() for agent, value in by_agent.items()}


# -- timesteps --------------------------------------------------------------------------------


def test_agents_join_and_leave() -> None:
    env, obs = ready()
    assert type(env) is MultiAgentEnv
    assert listed(obs) == {"ann": [7, 1, 0, -1], "bob": [7, 1, 0, -1]}
    assert env.reset_info == {"infos": {"ann": {"hello": "ann"}, "bob": {"hello": "bob"}}}

    joined = step_env(env, {"bob": np.int64(2), "ann": 1})
    assert listed(joined.obs) == {
        "ann": [7, 1, 1, 1],
        "bob": [7, 1, 1, 2],
        "cleo": [7, 1, 1, -1],
    }
    assert joined.reward == {"ann": 0.1, "bob": 1.1, "cleo": 0.0}
    nobody = dict.fromkeys(AGENTS, False)
    infos = {agent: {} for agent in AGENTS}
    assert joined[2:] == (False, {"terminated": nobody, "truncated": nobody, "infos": infos})

    left = step_env(env, dict.fromkeys(AGENTS, 3))
    assert [*left.obs] == ["ann", "cleo"]
    assert left.reward == {"ann": 0.2, "bob": 1.2, "cleo": 2.2}
    assert left.info["truncated"] == {"ann": False, "bob": True, "cleo": False}
    assert listed(left.info["final_obs"]) == {"bob": [7, 1, 2, 3]}

    step_env(env, {"ann": 0, "cleo": 0})
    end = step_env(env, {"ann": 4, "cleo": 0})
    assert end.done is True
    assert listed(end.obs) == {"ann": [7, 1, 4, 4], "cleo": [7, 1, 4, 0]}
    assert end.info["terminated"] == {"ann": True, "cleo": True}
    assert "final_obs" not in end.info
    assert (ends_of(False, left.info), ends_of(True, end.info)) == ((False, False), (True, False))
    again, _ = reset_env(env, {})
    assert listed(again)["ann"] == [7, 2, 0, -1]


def test_what_is_malformed_is_said() -> None:
    for fail, said in {
        "shape": r"of agent 'ann': value has shape \(9,\)",
        "silent": r"gave an observation to agents \['bob', 'cleo'\], but none to \['ann'\]",
        "raise": "a relay fails",
    }.items():
        env, _ = ready(fail=fail)
        with pytest.raises(Exception, match=said):
            codec_of(env.observation_space).check_value(step_env(env, random_action_of(env)).obs)
    env, _ = ready(fail="abnormal")
    assert step_env(env, random_action_of(env)).info["abnormal"] is True


@pytest.mark.parametrize(
    ("method", "result", "said"),
    [
        ("reset", {}, r"reset of Relay should return \(observations, infos\), dicts by agent"),
        ("reset", ([], {}), r"it returned a tuple of 2 \(list, dict\)"),
        ("step", ({}, {}, {}, {}), "step of Relay should return"),
        ("step", ({}, {}, {}, {}, {}), r"gave a reward to agents \[\], but none to \['ann', 'bob'"),
        ("step", ({}, {"ann": 0, "bob": "1"}, {}, {}, {}), "gave an observation to agents"),
        ("step", ({}, {"ann": 0, "bob": 0}, {"ann": None}, {}, {}), "should be one bool"),
    ],
)
def test_what_is_no_result_of_a_parallel_env_is_said(method: str, result: Any, said: str) -> None:
    relay = Relay()
    env, _ = ready(relay)
    setattr(relay, method, lambda *args, **kwargs: result)
    with pytest.raises(EnvContractError, match=said):
        reset_env(env, {}) if method == "reset" else step_env(env, {"ann": 0, "bob": 0})


def test_agents_have_to_be_known_before_they_live() -> None:
    relay = Relay()
    env, _ = ready(relay)
    relay.step = lambda actions: ({}, {"ann": 0, "bob": 0}, {}, {}, {})  # type: ignore[method-assign]
    relay.agents.append("dora")
    with pytest.raises(EnvContractError, match=r"agents \['dora'\], which its possible_ag"):
        step_env(env, {"ann": 0, "bob": 0})
    nobody = dict.fromkeys(AGENTS, (1, 2))
    with pytest.raises(EnvContractError, match="no agent of Relay lives after its reset"):
        reset_env(env, {"lives": nobody})
    for possible in ([], None):
        relay.possible_agents = possible  # type: ignore[assignment]
        with pytest.raises(EnvContractError, match="should list in `possible_agents` all agents"):
            as_base_env(relay, 0)


def test_an_agent_that_just_leaves_counts_as_terminated() -> None:
    relay = Relay()
    env, _ = ready(relay)
    ordinary = relay.step

    def step(actions: Any) -> Any:
        obs, rewards, *_ = ordinary(actions)
        relay.agents = []
        return obs, rewards, {}, {}, {}

    relay.step = step  # type: ignore[method-assign]
    timestep = step_env(env, random_action_of(env))
    assert timestep.done
    assert timestep.info["terminated"] == {"ann": True, "bob": True}
    assert timestep.info["infos"] == {}


# -- what is known of them ------------------------------------------------------------------------


def test_attributes_are_those_of_the_env_through_its_wrappers() -> None:
    relay = Relay()
    env = as_base_env(Layer(relay), 0)
    assert as_built(env).env is relay
    assert env_attribute(env, "colour") == "red"
    assert env_attribute(env, "double")(4) == 8
    set_env_attribute(env, "colour", "blue")
    assert relay.colour == "blue"
    assert set_env_attribute(env, "new", 1)
    assert relay.new == 1  # type: ignore[attr-defined]
    assert env_attribute(env, "new") == 1
    assert env_attribute(env, "possible_agents") == [*AGENTS]
    assert isinstance(env_attribute(env, "observation_space"), AgentSpace)
    reset_env(env, {})
    assert env.render("rgb_array").shape == (2, 2, 3)
    assert [*env_attribute(env, "random_action")()] == ["ann", "bob"]
    with pytest.raises(AttributeError):
        env_attribute(env, "nothing")
    env.close()
    assert relay.closed == 1
    rows = as_base_env(AgentRows(relay), 0)
    set_env_attribute(rows, "colour", "green")
    assert (relay.colour, env_attribute(rows, "colour")) == ("green", "green")


def test_envs_that_take_turns_need_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turns(Relay):
        def last(self) -> None: ...

        def agent_iter(self) -> None: ...

    monkeypatch.setitem(__import__("sys").modules, "pettingzoo", None)
    for view in (AgentRows, lambda env: as_base_env(env, 0)):
        with pytest.raises(MissingDependencyError, match="pip install pettingzoo"):
            view(Turns())


def test_they_pass_our_own_checks() -> None:
    problems = [*map(str, env_problems(Relay)), *map(str, env_problems(lambda: Relay(alike=False)))]
    assert all("have no fixed layout" in problem for problem in problems)
    assert env_problems(lambda: AgentRows(Relay())) == []


# -- their spaces ---------------------------------------------------------------------------------


def space(**by_agent: Space[Any]) -> AgentSpace:
    return AgentSpace(by_agent or {"ann": Discrete(3), "bob": Box(-1, 1, (2,), np.float32)})


def test_any_agent_may_be_absent() -> None:
    both = space()
    assert both.contains({})
    assert both.contains({"ann": 2})
    assert not both.contains({"ann": 3})
    assert not both.contains({"cleo": 0})
    assert not both.contains([0])
    assert pickle.loads(pickle.dumps(both)) == both == copy.deepcopy(both)
    assert both != space(ann=Discrete(3))
    assert both != Dict(both.spaces)
    assert str(space(ann=Discrete(3), bob=Discrete(2), cleo=Discrete(3))) == (
        "AgentSpace('ann', 'cleo': Discrete(3); 'bob': Discrete(2))"
    )
    assert (len(both), [*both], both["ann"], both.is_np_flattenable) == (
        2,
        ["ann", "bob"],
        Discrete(3),
        False,
    )
    assert codec_of(both).layout is None


def test_random_values_follow_from_the_seed_and_from_who_lives() -> None:
    one, other = (
        space(ann=Discrete(1000), bob=Discrete(1000)),
        space(ann=Discrete(1000), bob=Discrete(1000)),
    )
    assert one.seed(4) == other.seed(4)
    first = one.sample()
    assert first == other.sample()
    assert first["ann"] != first["bob"]
    assert one.sample(mask={"ann": np.eye(1000, dtype=np.int8)[3]})["ann"] == 3
    seen = {"bob": {"action_mask": np.eye(1000, dtype=np.bool_)[5]}}
    assert one.sample_for(seen) == {"bob": 5}
    assert random_action(one, lambda: seen) == {"bob": 5}
    assert [*random_action(one, lambda: None)] == ["ann", "bob"]


def test_each_value_is_checked_by_the_space_of_its_agent() -> None:
    codec = codec_of(space(ann=Text(3), bob=Box(-1, 1, (2,), np.float32)))
    codec.check_value({"ann": "abc", "bob": np.zeros(2)})
    for value, said in [
        ({"ann": "abcd"}, "of agent 'ann'"),
        ({"bob": np.zeros(3)}, r"of agent 'bob': value has shape \(3,\)"),
        ({"cleo": 1}, r"'cleo' is none of the possible agents \['ann', 'bob'\]"),
        ([1], "should be a dict by agent, found 1 items"),
    ]:
        with pytest.raises(ValueMismatchError, match=said):
            codec.check_value(value)
    assert codec.as_bytes({"ann": "a"}) != codec.as_bytes({"bob": np.zeros(2)})
    cast = caster_of(space(ann=Text(3), bob=Box(-1, 1, (2,), np.float32), cleo=Discrete(3)))
    values = cast({"ann": "a", "bob": np.ones(2), "cleo": 1})
    assert values["bob"].dtype == np.float32
    assert (values["ann"], type(values["cleo"])) == ("a", np.int64)


def test_actions_are_those_of_the_agents_that_live() -> None:
    codec = codec_of(space(ann=Discrete(3), bob=Discrete(3), cleo=Discrete(3)))
    check = action_check(codec.space, codec.refusal, lambda: {"ann": None, "cleo": None})
    assert check({"cleo": np.array([1]), "ann": 2}) is None
    for action, said in [
        ({"ann": 0, "bob": 0, "cleo": 0}, "for agents ['bob'], which have ended, or have not join"),
        ({"ann": 0}, "none for agents ['cleo'], which live"),
        ({"ann": 7, "cleo": 0}, "of agent 'ann': 7 is outside Discrete(3)"),
        ({"dora": 0}, "'dora' is none of the possible agents"),
        (1, "should be a dict by agent, found int"),
    ]:
        assert said in str(check(action))
    assert codec.for_env({"ann": np.int64(1), "dora": 1}) == {"ann": 1, "dora": 1}
    assert lost_step(codec.space, {"ann": 0}) == ({"ann": 0.0}, {"ann": False}, {"ann": True})
    assert lost_step(Discrete(3), 1) == (0.0, False, True)


# -- rows -----------------------------------------------------------------------------------------


def test_agents_as_rows() -> None:
    env = AgentRows(Relay())
    obs, info = env.reset(seed=7)
    assert env.observation_space.contains(obs)
    assert obs["obs"].tolist() == [[7, 1, 0, -1], [7, 1, 0, -1], [0, 0, 0, 0]]
    assert obs["mask"].tolist() == [1, 1, 0]
    assert info == {"infos": {"ann": {"hello": "ann"}, "bob": {"hello": "bob"}}}
    env.step(np.array([1, 2, 3]))
    obs, reward, terminated, truncated, info = env.step(np.array([1, 2, 3]))
    assert obs["obs"].tolist() == [[7, 1, 2, 1], [7, 1, 2, 2], [7, 1, 2, 3]]
    assert obs["mask"].tolist() == [1, 0, 1]
    assert (reward.tolist(), terminated, truncated) == ([0.2, 1.2, 2.2], False, False)
    assert {k: v.tolist() for k, v in info.items()} == {
        "agents_terminated": [False, False, False],
        "agents_truncated": [False, True, False],
    }
    obs, reward, *_, info = env.step(np.array([1, 0, 3]))
    assert (obs["obs"][1].tolist(), reward.tolist(), info) == ([0] * 4, [0.3, 0, 2.3], {})
    obs, _, terminated, truncated, info = env.step([4, 0, 0])
    assert (terminated, truncated, obs["mask"].tolist()) == (True, False, [0, 0, 0])
    assert obs["obs"][0].tolist() == [7, 1, 4, 4]


def test_one_reward_for_all() -> None:
    for reduce, expected in {"sum": 1.2, "mean": 0.6}.items():
        env = AgentRows(Relay(), reward=reduce)
        env.reset(options={"lives": dict.fromkeys(AGENTS, (0, 9)) | {"cleo": (5, 9)}})
        assert env.step([0, 0, 0])[1] == pytest.approx(expected)
        assert type(env.step([0, 0, 0])[1]) is float
    with pytest.raises(ConfigError, match="reward is 'max', but must be one of each, sum, mean"):
        AgentRows(Relay(), reward="max")
    check_gymnasium_env(AgentRows(Relay(), reward="sum"), skip_render_check=True)


def test_agents_without_a_reward_do_not_count_in_the_mean() -> None:
    lives = dict.fromkeys(AGENTS, (0, 9)) | {"cleo": (1, 9)}
    for reduce, expected in {"sum": 1.2, "mean": 0.6}.items():
        env = AgentRows(Relay(), reward=reduce)
        env.reset(options={"lives": lives})
        assert env.step([0, 0, 0])[1] == pytest.approx(expected), "cleo joins with this step"
        assert env.step([0, 0, 0])[1] == pytest.approx({"sum": 3.6, "mean": 1.2}[reduce])


def test_rows_need_agents_that_are_alike() -> None:
    with pytest.raises(EnvContractError, match="agents that are alike, but in Relay 'bob' has"):
        AgentRows(Relay(alike=False))
    relay = Relay(agents=("ann",))
    relay._obs["ann"] = Text(4)
    with pytest.raises(EnvContractError, match="rows need a space of a fixed layout"):
        AgentRows(relay)


def test_rows_of_nested_spaces() -> None:
    relay = Relay()
    part = Dict({"seen": Box(-1e9, 1e9, (4,), np.float64), "k": Discrete(3)})
    relay._obs = dict.fromkeys(AGENTS, part)
    seen = lambda actions: {a: {"seen": np.ones(4), "k": 2} for a in relay.agents}  # noqa: E731
    relay._seen = seen  # type: ignore[method-assign]
    env = AgentRows(relay)
    obs, _ = env.reset()
    assert env.observation_space.contains(obs)
    assert obs["obs"]["k"].tolist() == [2, 2, 0]
    assert codec_of(env.observation_space).layout is not None
