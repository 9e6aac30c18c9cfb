"""Which observation is handed out when, to whom it belongs, and how long it is valid."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr import EnvState, EnvTimestep
from envmgr.errors import NothingReadyError
from tests.contract.envs import Do, ScriptedGymEnv, expected_reward, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    AXES,
    SOME_BLOCK,
    THREADS,
    THREADS_MESSAGE_SHARED,
    Raises,
    Setup,
    World,
    every_kind,
    every_setup,
    over,
    process_kinds,
    ready_all,
    step_all,
)

every_reset_mode = pytest.mark.parametrize(
    "mode",
    [{}, {"reset_inplace": True}, {"auto_reset": False}],
    ids=["auto_reset", "reset_inplace", "auto_reset_off"],
)


def check_timestep(timestep: Any, env_id: int, episode: int, step: int, action: int) -> None:
    """Check that a timestep is whole: all of its parts are of the same step of the same env."""
    assert type(timestep) is EnvTimestep
    it = seen(timestep.obs)
    assert (it.env_id, it.episode, it.step, it.action) == (env_id, episode, step, action)
    assert timestep.reward == expected_reward(timestep.obs)
    info = timestep.info
    assert (info["env_id"], info["episode"], info["step"]) == (env_id, episode, step)
    assert info["nested"]["draws"] == [it.draw]
    assert np.array_equal(info["nested"]["array"], timestep.obs)


@every_setup
def test_every_timestep_belongs_to_its_env_its_episode_and_its_action(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, seed=3)
    first = ready_all(manager)
    assert [seen(obs)[:5] for obs in first.values()] == [(i, 0, 0, 0, -1) for i in range(4)]
    for k in range(1, 6):
        actions = {i: (k + i) % 10 for i in (2, 0, 3, 1)}
        for env_id, timestep in step_all(manager, actions).items():
            check_timestep(timestep, env_id, 0, k, actions[env_id])
            assert timestep.done is False
    assert [world.actions(i) for i in range(4)] == [
        [(k + i) % 10 for k in range(1, 6)] for i in range(4)
    ]


@every_setup
def test_gymnasium_envs_give_done_as_terminated_or_truncated_and_say_both_in_the_info(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, env=ScriptedGymEnv)
    ready_all(manager)
    steps = step_all(manager, {0: Do.END, 1: Do.TRUNCATE, 2: 5})
    said = {i: (t.done, t.info["terminated"], t.info["truncated"]) for i, t in steps.items()}
    assert said == {0: (True, True, False), 1: (True, False, True), 2: (False, False, False)}
    for i, timestep in steps.items():
        assert type(timestep) is EnvTimestep
        assert type(timestep.done) is bool
        assert timestep._fields == ("obs", "reward", "done", "info")
        assert timestep.reward == expected_reward(timestep.obs)
        assert timestep.info["env_id"] == i


@every_reset_mode
@every_setup
def test_the_last_timestep_has_the_terminal_observation_and_ready_obs_the_first_of_the_next_episode(
    world: World, setup: Setup, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, 2, env=ScriptedGymEnv, seed=1, **mode)
    ready_all(manager)
    for episode in range(3):
        assert step_all(manager, {0: 1, 1: 2})[0].done is False
        for i, timestep in step_all(manager, {0: Do.END, 1: Do.TRUNCATE}).items():
            check_timestep(timestep, i, episode, 2, (Do.END, Do.TRUNCATE)[i])
            assert timestep.done is True
            terminal = timestep.obs.copy()
            if "auto_reset" in mode:
                manager.reset({i: None})
            first = ready_all(manager, [i])[i]
            assert seen(first)[:5] == (i, 0, episode + 1, 0, -1)
            assert np.array_equal(timestep.obs, terminal), "the first observation has replaced it"
            assert first is not timestep.obs


@process_kinds
def test_with_reset_inplace_the_next_observation_is_there_when_the_timestep_is(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, reset_inplace=True)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.END_THEN_GATE})
    visit = gate.await_visit(0, "reset")
    assert manager.recv(timeout_s=0.0) == {}, "the timestep came without its reset"
    visit.release()
    assert manager.recv()[0].done
    assert manager.ready_env == [0, 1]  # without waiting for anything
    assert seen(manager.ready_obs[0]).episode == 1


@pytest.mark.parametrize("limits", [{}, {"reset_timeout": 30.0}], ids=["", "reset_timeout"])
@over(*AXES, THREADS, THREADS_MESSAGE_SHARED)
def test_with_reset_inplace_envs_go_on_from_their_timesteps_without_a_look_at_what_is_ready(
    world: World, setup: Setup, limits: dict[str, Any]
) -> None:
    manager = world.make(setup, 4, reset_inplace=True, **limits)
    episodes, n_steps = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    ready = list(ready_all(manager))
    for k in itertools.count():
        if k >= 24 and all(episodes.values()):  # a busy machine may keep a worker waiting
            break
        actions = {i: Do.END if (n_steps[i] + i) % 3 == 0 else k % 10 for i in ready}
        if k % 2:
            timesteps = manager.step(actions)
        else:
            manager.send_arrays(ready, np.array(list(actions.values())))
            batch = manager.recv_arrays()
            ended = batch.terminated | batch.truncated
            rows = zip(batch.obs, batch.reward, ended, batch.infos, strict=True)
            timesteps = dict(zip(batch.env_ids.tolist(), map(EnvTimestep._make, rows), strict=True))
        ready = list(timesteps)
        states = manager.env_states
        assert [states[i] for i in ready] == [EnvState.RUN] * len(ready)
        for env_id, timestep in timesteps.items():
            n_steps[env_id] += 1
            assert timestep.info["episode"] == episodes[env_id]
            episodes[env_id] += int(timestep.done)
            assert timestep.done == (timestep.info["action"] == Do.END)
        told = manager.reset_infos(ready)
        assert [info["episode"] for info in told] == [episodes[i] for i in ready]


@process_kinds
def test_without_reset_inplace_the_timestep_does_not_wait_for_the_reset(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.END_THEN_GATE})
    visit = gate.await_visit(0, "reset")
    assert manager.recv()[0].done
    assert manager.ready_env == [1]
    visit.release()
    assert seen(ready_all(manager)[0])[:4] == (0, 0, 1, 0)


@every_setup
def test_observations_are_private_and_writable(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    obs = ready_all(manager)[0]
    obs[:] = -7.0  # neither the env nor another observation may feel this
    timestep = step_all(manager, {0: 3})[0]
    assert np.array_equal(obs, np.full(6, -7.0)), "an observation has been overwritten"
    check_timestep(timestep, 0, 0, 1, 3)
    timestep.obs[:] = -8.0
    timestep.info["nested"]["draws"].append("mine")
    timestep.info["nested"]["array"][:] = 0.0
    following = step_all(manager, {0: 4})[0]
    check_timestep(following, 0, 0, 2, 4)
    assert np.array_equal(timestep.obs, np.full(6, -8.0))
    assert obs.flags.writeable
    assert obs.base is None or not np.shares_memory(obs, following.obs)


@every_setup
def test_the_timestep_and_ready_obs_hold_the_same_array(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    timesteps = step_all(manager, {0: 1, 1: 2})
    ready = manager.ready_obs
    assert all(ready[i] is timesteps[i].obs for i in (0, 1))
    assert manager.ready_obs[0] is ready[0]
    ready.clear()  # the dict is the caller's own
    assert [*manager.ready_obs] == [0, 1]


class NestedEnv(gymnasium.Env[Any, Any]):
    """Returns the very same dict of the very same arrays each time, changed in place."""

    observation_space = Dict({"image": Box(0, 255, (4, 4, 3), np.uint8), "n": Discrete(100)})
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.obs = {"image": np.zeros((4, 4, 3), np.uint8), "n": np.int64(0)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.obs["image"][:] = 0
        self.obs["n"] = np.int64(0)
        return self.obs, {}

    def step(self, action: Any) -> Any:
        self.obs["image"] += 1
        self.obs["n"] += 1
        return self.obs, 0.0, False, False, {}


@every_setup
def test_nested_observations_are_private_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=[NestedEnv] * 2)
    ready_all(manager)
    kept = [step_all(manager, {0: 0})[0].obs for _ in range(6)]
    assert [obs["n"] for obs in kept] == [1, 2, 3, 4, 5, 6]
    assert [int(obs["image"].max()) for obs in kept] == [1, 2, 3, 4, 5, 6]
    assert kept[0]["image"].flags.writeable


@over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, Setup("base"))
def test_views_are_valid_through_two_more_steps_of_that_env(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, copy_on_get=False)
    newest = ready_all(manager)[0]
    handed_out: list[tuple[Any, Any]] = [(newest, newest.copy())]
    for k in range(8):
        obs = step_all(manager, {0: k})[0].obs
        assert seen(obs)[:5] == (0, 0, 0, k + 1, k)
        handed_out.append((obs, obs.copy()))
        for view, contents in handed_out[-3:]:
            assert np.array_equal(view, contents), "a view has changed within two steps"


@every_reset_mode
@over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK)
def test_views_stay_valid_across_the_end_of_an_episode(
    world: World, setup: Setup, mode: dict[str, Any]
) -> None:
    # From a view on: a step, the terminal step, the first observation of the next episode.
    manager = world.make(setup, 1, copy_on_get=False, **mode)
    ready_all(manager)
    for _ in range(5):  # each time in another position of the slots
        view = step_all(manager, {0: 1})[0].obs
        contents = view.copy()
        terminal = step_all(manager, {0: Do.END})[0].obs
        terminal_contents = terminal.copy()
        if "auto_reset" in mode:
            manager.reset()
        first = ready_all(manager)[0]
        first_contents = first.copy()
        assert seen(first).step == 0
        assert np.array_equal(view, contents)
        step_all(manager, {0: 2})
        assert np.array_equal(view, contents), "two steps later it is still to be valid"
        assert np.array_equal(terminal, terminal_contents)
        step_all(manager, {0: 3})
        assert np.array_equal(terminal, terminal_contents)
        assert np.array_equal(first, first_contents)


@over(ALL_BLOCK, ALL_MESSAGE)
def test_with_copies_observations_are_valid_for_ever(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, script={"episode_length": 3})
    kept = [(ready_all(manager), "reset")]
    for _ in range(10):
        timesteps = step_all(manager, {0: 1, 1: 2})
        kept.append(({i: t.obs for i, t in timesteps.items()}, "step"))
        kept.append((ready_all(manager), "ready"))
    manager.close()
    for k, (by_id, _) in enumerate(kept):
        for i, obs in by_id.items():
            it = seen(obs)
            assert it.env_id == i
            if k and kept[k][1] == "step":
                assert it.step in (1, 2, 3)


# -- ready_obs ----------------------------------------------------------------------------------


@process_kinds
def test_ready_obs_does_not_wait_for_steps_nor_for_the_resets_of_others(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    in_step = gate.await_visit(0, "step")
    step_all_others = {1: Do.END_THEN_GATE}
    manager.send(step_all_others)
    in_reset = gate.await_visit(1, "reset")
    assert manager.recv(min_ready=1)[1].done
    assert [*manager.ready_obs] == [2]
    assert manager.ready_env == [2]
    assert manager.active_env == [0, 2]  # 0 is in its episode, though pending
    in_reset.release()
    in_step.release()


@process_kinds
def test_ready_obs_waits_for_a_reset_when_nothing_else_is_ready(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE, 1: Do.END_THEN_GATE})
    visits = [gate.await_visit(i) for i in (0, 1)]
    assert manager.ready_env == []
    # The gate opens for env 1 only; a wait for both of them would never end.
    threading.Timer(0.1, visits[1].release).start()
    assert [*manager.ready_obs] == [1]
    visits[0].release()


@process_kinds
def test_ready_obs_waits_for_a_repair_when_nothing_else_is_ready(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    assert step_all(manager, {0: Do.KILL})[0].info["abnormal"]
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


@process_kinds
def test_ready_obs_names_recv_when_nothing_is_ready_but_steps_are_under_way(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 1: Do.GATE})
    visits = [gate.await_visit(i) for i in (0, 1)]
    with Raises(NothingReadyError, "recv", "[0, 1]"):
        _ = manager.ready_obs
    for visit in visits:
        visit.release()
    while manager.stats()["outstanding"]:
        manager.recv()
    assert [*manager.ready_obs] == [0, 1]


@every_kind
def test_ready_obs_names_recv_also_when_the_timesteps_have_arrived(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    manager.send({0: 1})
    with Raises(NothingReadyError, "recv"):
        _ = manager.ready_obs
    check_timestep(manager.recv()[0], 0, 0, 1, 1)
    assert [*manager.ready_obs] == [0]


@every_kind
def test_ready_obs_names_reset_when_all_episodes_have_ended_and_auto_reset_is_off(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, auto_reset=False)
    ready_all(manager)
    step_all(manager, {0: Do.END, 1: Do.END})
    with Raises(NothingReadyError, "reset", "[0, 1]", "auto_reset"):
        _ = manager.ready_obs
    manager.reset({1: None})
    assert [*manager.ready_obs] == [1]


@every_kind
def test_ready_obs_is_empty_when_all_envs_are_done(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, episode_num=1)
    ready_all(manager)
    step_all(manager, {0: Do.END})
    assert [*manager.ready_obs] == [1]
    assert not manager.done
    step_all(manager, {1: Do.END})
    assert manager.done
    assert manager.ready_obs == {}
    assert manager.ready_env == []
    assert manager.ready_info == {}


@every_kind
def test_ready_obs_says_when_no_env_can_ever_become_ready(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, max_failures=0)
    ready_all(manager)
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
    with pytest.raises(Exception, match="failed 1 time"):
        _ = manager.ready_obs
    with Raises(NothingReadyError, "[0]", "reset", "failed"):
        _ = manager.ready_obs


@every_setup
def test_ready_info_holds_what_the_latest_reset_said(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, env=ScriptedGymEnv, reset_param={0: {"a": 1}})
    ready_all(manager)

    def told(env_id: int) -> tuple[int, Any]:
        info = manager.ready_info[env_id]
        assert info["draws"] == [seen(manager.ready_obs[env_id]).draw]
        return info["episode"], info["params"]

    assert [told(i) for i in manager.ready_info] == [(0, {"a": 1}), *[(0, {})] * 3]
    step_all(manager, dict.fromkeys(range(4), Do.END))
    ready_all(manager)
    assert [told(i) for i in manager.ready_info] == [(1, {"a": 1}), *[(1, {})] * 3]
    step_all(manager, {0: 1})
    assert manager.ready_info[0]["episode"] == 1  # still that of its reset


@every_kind
def test_ready_obs_id_and_ready_env_agree_with_ready_obs(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, auto_reset=False)
    ready_all(manager)
    step_all(manager, {1: Do.END})
    assert [*manager.ready_obs] == manager.ready_obs_id == manager.ready_env == [0, 2]
