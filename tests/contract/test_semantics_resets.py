"""Resets, their parameters, episode budgets, and what becomes of steps that are under way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from envmgr import EnvState, EnvTimestep
from envmgr.errors import ConfigError, EnvNotReadyError, StateError, UnknownEnvError
from tests.contract.envs import Do, ScriptedEnv, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_MESSAGE,
    Raises,
    Setup,
    Visit,
    World,
    every_kind,
    every_setup,
    over,
    process_kinds,
    ready_all,
    step_all,
)

both_styles = pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])


def release_in_next_call(manager: Any, visit: Visit) -> None:
    """Have an env go on once the next call waits for it."""

    def release() -> None:
        while manager._running.engine.caller is None:
            time.sleep(0.001)
        time.sleep(0.1)  # it is at the beginning of the call
        visit.release()

    threading.Thread(target=release).start()


def params_of(world: World, env_id: int) -> list[dict[str, Any]]:
    """Return the parameters that each reset of an env was given."""
    return [params for _, params, _ in world.noted(env_id, "reset")]


# -- reset parameters -----------------------------------------------------------------------------


@both_styles
@every_setup
def test_reset_params_are_kept_for_automatic_resets_until_they_are_replaced_or_cleared(
    world: World, setup: Setup, env: Any
) -> None:
    manager = world.make(setup, 2, env=env, reset_param={0: {"level": 1}})
    ready_all(manager)
    step_all(manager, {0: Do.END, 1: Do.END})
    ready_all(manager)
    manager.reset({0: {"level": 2, "mode": "x"}})
    step_all(manager, {0: Do.END})
    ready_all(manager)
    manager.reset({0: None})  # keeps them
    step_all(manager, {0: Do.END})
    ready_all(manager)
    manager.reset()  # keeps all of all
    manager.reset({0: {}})  # clears them
    step_all(manager, {0: Do.END})
    ready_all(manager)
    one, two = {"level": 1}, {"level": 2, "mode": "x"}
    assert params_of(world, 0) == [one, one, two, two, two, two, two, {}, {}]
    assert params_of(world, 1) == [{}, {}, {}]
    assert step_all(manager, {0: 1})[0].info["params"] == {}


@every_kind
def test_reset_params_are_copied_when_they_are_given(world: World, setup: Setup) -> None:
    mine = {"level": 1}
    manager = world.make(setup, 1, reset_param={0: mine})
    mine["level"] = 2
    mine["more"] = 3
    ready_all(manager)
    step_all(manager, {0: Do.END})
    ready_all(manager)
    assert params_of(world, 0) == [{"level": 1}, {"level": 1}]


@every_kind
def test_reset_params_survive_renewals(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, retry_type="renew")
    ready_all(manager)
    manager.reset({0: {"level": 3}})
    step_all(manager, {0: Do.RAISE})
    assert seen(ready_all(manager)[0]).build == 1
    assert params_of(world, 0)[-1] == {"level": 3}


@every_kind
def test_launch_params_do_not_outlive_the_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, reset_param={0: {"level": 3}})
    manager.close()
    manager.launch()
    assert params_of(world, 0) == [{"level": 3}, {}]


@every_kind
def test_wrong_reset_params_are_refused_and_nothing_is_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    with Raises(UnknownEnvError, "5", "0 to 1"):
        manager.reset({0: None, 5: None})
    with Raises(ConfigError, "env 1", "dict", "found 7"):
        manager.reset({0: None, 1: 7})
    for wrong in ([0, 1], "all", 3):
        with Raises(ConfigError, "{env_id: params or None}"):
            manager.reset(wrong)
    assert [len(world.noted(i, "reset")) for i in (0, 1)] == [1, 1]
    closed = world.make(setup, 2, launch=False)
    with Raises(UnknownEnvError, "2"):
        closed.launch({2: {}})
    with pytest.raises(ConfigError):
        closed.launch([{}, {}])
    assert closed.closed
    closed.launch()


# -- explicit resets ------------------------------------------------------------------------------


@every_setup
def test_reset_blocks_until_the_envs_are_reset_and_touches_no_other(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    step_all(manager, {0: 1, 1: 1, 2: 1})
    assert manager.reset({2: None, 0: {}}) is None
    obs = manager.ready_obs
    assert [(seen(o).episode, seen(o).step) for o in obs.values()] == [(1, 0), (0, 1), (1, 0)]
    manager.reset()
    obs = manager.ready_obs
    assert [(seen(o).episode, seen(o).step) for o in obs.values()] == [(2, 0), (1, 0), (2, 0)]
    manager.reset({})
    assert [len(world.noted(i, "reset")) for i in range(3)] == [3, 2, 3]


@process_kinds
def test_a_pending_step_is_awaited_its_timestep_discarded_and_counted(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 1: 5})
    threading.Timer(0.1, gate.await_visit(0).release).start()
    manager.reset({0: None})
    assert world.journal(0)[-1][0] == "reset"
    assert world.actions(0) == [Do.GATE], "the step was not executed to its end, or twice"
    stats = manager.stats()
    assert (stats["cancelled"], stats["outstanding"]) == (1, 1)
    assert manager.ready_env == [0, 2]
    assert [*manager.recv()] == [1], "the discarded timestep was delivered"
    it = seen(step_all(manager, {0: 3})[0].obs)
    assert (it.episode, it.step, it.action) == (1, 1, 3)


@every_kind
def test_a_timestep_that_has_arrived_is_discarded_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    manager.send({0: 5, 1: 6})
    assert manager.ready_env == []
    manager.reset()
    stats = manager.stats()
    assert (stats["cancelled"], stats["outstanding"], stats["timesteps"]) == (2, 0, 0)
    assert [world.actions(i) for i in (0, 1)] == [[5], [6]]
    timesteps = step_all(manager, {0: 1, 1: 2})
    assert [seen(t.obs)[2:5] for t in timesteps.values()] == [(1, 1, 1), (1, 1, 2)]


@pytest.mark.parametrize("mode", [{}, {"reset_inplace": True}, {"auto_reset": False}], ids=str)
@process_kinds
def test_a_cancelled_step_that_ends_its_episode_gives_one_new_episode(
    world: World, setup: Setup, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, 1, **mode)
    gate = world.gate
    ready_all(manager)
    for k in (1, 2, 3):
        manager.send({0: Do.GATE_THEN_END})
        threading.Timer(0.05, gate.await_visit(0, "step").release).start()
        manager.reset({0: None})
        assert seen(manager.ready_obs[0])[2:4] == (k, 0)
        assert len(world.noted(0, "reset")) == k + 1
    assert manager.stats()["cancelled"] == 3


@process_kinds
def test_a_cancelled_step_that_ends_its_episode_is_followed_by_the_new_params(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE_THEN_END})
    threading.Timer(0.05, gate.await_visit(0, "step").release).start()
    manager.reset({0: {"level": 9}})
    assert params_of(world, 0)[-1] == {"level": 9}
    assert step_all(manager, {0: 1})[0].info["params"] == {"level": 9}


@process_kinds
def test_a_cancelled_step_that_fails_leads_to_a_reset_all_the_same(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4)
    ready_all(manager)
    manager.send({0: Do.RAISE, 1: Do.KILL, 2: Do.SYS_EXIT, 3: Do.BAD_SHAPE})
    manager.reset()
    obs = manager.ready_obs
    assert [*obs] == [0, 1, 2, 3]
    assert all(seen(o).step == 0 for o in obs.values())
    stats = manager.stats()
    assert (stats["cancelled"], stats["outstanding"], stats["timesteps"]) == (4, 0, 0)
    assert all(len(world.actions(i)) == 1 for i in range(4)), "a step was executed twice"


@process_kinds
def test_reset_without_params_joins_a_running_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE})
    visit = gate.await_visit(0, "reset")
    assert manager.env_states[0] is EnvState.RESET
    release_in_next_call(manager, visit)
    manager.reset({0: None})
    assert seen(manager.ready_obs[0]).episode == 1
    assert len(world.noted(0, "reset")) == 2


@process_kinds
def test_reset_with_params_does_not_join_but_resets_once_more(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE})
    visit = gate.await_visit(0, "reset")
    threading.Timer(0.1, visit.release).start()
    manager.reset({0: {"level": 4}})
    assert params_of(world, 0) == [{}, {}, {"level": 4}]
    assert step_all(manager, {0: 1})[0].info["params"] == {"level": 4}


@process_kinds
def test_reset_joins_a_repair(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, script={"build_faults": {1: "gate"}})
    gate = world.gate
    ready_all(manager)
    assert step_all(manager, {0: Do.KILL})[0].info["abnormal"]
    assert manager.ready_env == []
    release_in_next_call(manager, gate.await_visit(0, "build"))
    manager.reset({0: {"level": 2}})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)
    assert len(world.noted(0, "build")) == 2
    assert params_of(world, 0)[-1] == {"level": 2}


# -- budgets --------------------------------------------------------------------------------------


@every_setup
def test_episode_num_is_a_budget_of_each_env_after_which_it_is_done(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, episode_num=2)
    ready_all(manager)
    step_all(manager, {0: Do.END})
    ready_all(manager)
    assert manager.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    last = step_all(manager, {0: Do.END})[0]
    assert seen(last.obs)[2:4] == (1, 1)
    assert manager.env_state_done(0)
    assert not manager.env_state_done(1)
    assert not manager.done
    assert [*manager.ready_obs] == [1]
    for _ in range(2):
        ready_all(manager, [1])
        step_all(manager, {1: Do.TRUNCATE})
    assert manager.done
    assert manager.env_states == {0: EnvState.DONE, 1: EnvState.DONE}
    assert [len(world.noted(i, "reset")) for i in (0, 1)] == [2, 2], "a reset beyond the budget"
    assert manager.stats()["episodes"] == 4


@every_kind
def test_done_only_when_the_last_timestep_is_delivered(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, episode_num=1)
    ready_all(manager)
    manager.send({0: Do.END})
    assert manager.ready_env == []
    assert not manager.done
    assert manager.recv()[0].done
    assert manager.done


@every_kind
def test_reset_on_done_starts_a_new_budget(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, episode_num=2)
    ready_all(manager)
    for _ in range(2):
        step_all(manager, {0: Do.END, 1: Do.END})
        if not manager.done:
            ready_all(manager)
    assert manager.done
    manager.reset({1: None})
    assert not manager.done
    assert [*manager.ready_obs] == [1]
    step_all(manager, {1: Do.END})
    assert [*ready_all(manager, [1])] == [1]
    step_all(manager, {1: Do.END})
    assert manager.done
    assert manager.ready_obs == {}


@every_kind
def test_a_reset_in_the_middle_of_an_episode_does_not_use_up_budget(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, episode_num=1)
    ready_all(manager)
    for _ in range(3):
        step_all(manager, {0: 1})
        manager.reset()
    step_all(manager, {0: Do.END})
    assert manager.done


@process_kinds
def test_a_reset_in_the_background_does_not_begin_an_episode_beyond_the_budget(
    world: World, setup: Setup
) -> None:
    # The host plans its own resets; a cancelled end of an episode must not confuse its count.
    manager = world.make(setup, 1, episode_num=3)
    ready_all(manager)
    manager.send({0: Do.END})
    manager.reset({0: None})  # that episode's end was discarded
    counted = 0
    while not manager.done:
        ready_all(manager)
        counted += step_all(manager, {0: Do.END})[0].done
    assert counted == 3
    assert manager.stats()["episodes"] == 3
    n_resets = len(world.noted(0, "reset"))
    manager.reset()
    assert len(world.noted(0, "reset")) == n_resets + 1


@every_kind
def test_an_abnormal_end_is_not_an_episode_of_the_budget(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, episode_num=1)
    ready_all(manager)
    assert step_all(manager, {0: Do.RAISE})[0].done
    assert not manager.done
    ready_all(manager)
    step_all(manager, {0: Do.END})
    assert manager.done


# -- params that are written like gymnasium's arguments --------------------------------------------


@every_kind
def test_options_in_the_options_of_a_gymnasium_env_are_refused(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, env=ScriptedGymEnv)
    for wrong in ({"options": {"level": 3}}, {"options": None}):
        n_resets = len(world.noted(1, "reset"))
        with Raises(ConfigError, "env 1", "{1: ", "No env was reset"):
            manager.reset({0: {"level": 3}, 1: wrong})
        assert len(world.noted(1, "reset")) == n_resets
    assert params_of(world, 0) == [{}]
    manager.reset({0: {"options": {"level": 3}, "level": 2}})  # who names both means it
    assert params_of(world, 0)[-1] == {"options": {"level": 3}, "level": 2}
    manager.close()
    with Raises(ConfigError, "{0: {'level': 3}}"):
        manager.launch({0: {"options": {"level": 3}}})
    assert manager.closed


@every_kind
def test_a_seed_among_the_options_of_a_gymnasium_env_is_warned_of_once(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    manager = world.make(setup, 2, env=ScriptedGymEnv)
    for _ in range(2):
        manager.reset({1: {"seed": 3}})
    assert params_of(world, 1)[-1] == {"seed": 3}
    (record,) = [r for r in caplog.records if "'seed'" in r.message]
    for part in ("env 1", "as an option", "manager.seed({1: 3})", "manager.reset({1: None})"):
        assert part in record.message


@every_kind
def test_arguments_of_gymnasiums_reset_are_refused_with_what_is_to_be_called(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False)
    for name in ("launch", "reset"):
        with Raises(ConfigError, f"{name} takes", "seed=3", "manager.seed(3)", "ready_obs"):
            getattr(manager, name)(seed=3)
        with Raises(ConfigError, "options={'level': 3}", f"{name}({{env_id: {{...}}}})"):
            getattr(manager, name)(options={"level": 3})
        if manager.closed:
            manager.launch()
    assert params_of(world, 0) == [{}]


@over(ALL_MESSAGE)
def test_timesteps_say_how_an_episode_ended(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, env=ScriptedGymEnv)
    timesteps = step_all(manager, {0: Do.END, 1: 1})
    for timestep, ended in ((timesteps[0], True), (timesteps[1], False)):
        assert timestep.done is timestep.terminated is timestep.info["terminated"] is ended
        assert timestep.truncated is timestep.info["truncated"] is False
        assert len(timestep) == 4
    for info in ({"abnormal": True}, None, "no dict"):
        silent = EnvTimestep(0, 0.0, True, info)
        assert (silent.terminated, silent.truncated) == (False, False)


class NamesItsArguments(ScriptedEnv):
    """Has arguments of its own with the names of gymnasium's."""

    def reset(self, **params: Any) -> Any:
        """Begin an episode."""
        return super().reset(**params)


@over(ALL_MESSAGE)
def test_a_base_env_may_name_its_arguments_as_it_likes(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    manager = world.make(setup, 1, env=NamesItsArguments)
    for params in ({"options": {"level": 3}}, {"seed": 3}):
        manager.reset({0: params})
        assert params_of(world, 0)[-1] == params
    assert not caplog.records


# -- auto_reset off -------------------------------------------------------------------------------


@every_setup
def test_with_auto_reset_off_an_ended_env_waits_for_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, auto_reset=False, episode_num=2)
    ready_all(manager)
    step_all(manager, {0: Do.END, 1: 1, 2: Do.END})
    assert [s.name for s in manager.env_states.values()] == ["NEED_RESET", "RUN", "NEED_RESET"]
    assert [*manager.ready_obs] == [1]
    manager.reset({2: {"level": 1}})
    assert [*manager.ready_obs] == [1, 2]
    assert [len(world.noted(i, "reset")) for i in range(3)] == [1, 1, 2]
    step_all(manager, {2: Do.END})
    assert manager.env_states[2] is EnvState.DONE
    assert not manager.done
    manager.reset({0: None})
    step_all(manager, {0: Do.END, 1: Do.END})
    manager.reset({1: None})
    step_all(manager, {1: Do.END})
    assert manager.done
    assert params_of(world, 2) == [{}, {"level": 1}]


@every_kind
def test_with_auto_reset_off_a_failed_env_waits_for_reset_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, auto_reset=False)
    ready_all(manager)
    assert step_all(manager, {0: Do.RAISE, 1: 1})[0].info["abnormal"]
    manager.get_attr("label")  # waits for the repair
    assert manager.env_states == {0: EnvState.NEED_RESET, 1: EnvState.RUN}
    with pytest.raises(EnvNotReadyError):
        manager.step({0: 1})
    assert len(world.noted(0, "reset")) == 1
    manager.reset({0: None})
    assert [*manager.ready_obs] == [0, 1]


@process_kinds
def test_with_auto_reset_off_a_dead_env_is_renewed_but_not_reset(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, auto_reset=False, script={"build_faults": {1: "gate"}})
    gate = world.gate
    ready_all(manager)
    assert step_all(manager, {0: Do.KILL})[0].info["abnormal"]
    with Raises(StateError, "reset"):  # it is being renewed, and will not be ready by itself
        _ = manager.ready_obs
    assert manager.ready_env == []
    visit = gate.await_visit(0, "build")
    with Raises(StateError, "reset"):
        _ = manager.ready_obs
    visit.release()
    manager.get_attr("label")
    assert manager.env_states == {0: EnvState.NEED_RESET}
    assert len(world.noted(0, "reset")) == 1
    manager.reset({0: None})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


@over(ALL_MESSAGE)
def test_reset_inplace_needs_auto_reset(world: World, setup: Setup) -> None:
    with Raises(ConfigError, "reset_inplace", "auto_reset"):
        world.make(setup, 1, auto_reset=False, reset_inplace=True)


class TakesItsOptions(ScriptedGymEnv):
    """Takes what it needs out of its options, as some do."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin an episode."""
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "level": None if options is None else options.pop("level")}


@pytest.mark.parametrize("in_place", [False, True])
@every_kind
def test_an_env_that_changes_its_options_gets_them_again(
    world: World, setup: Setup, in_place: bool
) -> None:
    manager = world.make(
        setup, 2, env=TakesItsOptions, launch=False, reset_inplace=in_place, max_retry=1
    )
    manager.launch({i: {"level": 3} for i in range(2)})
    manager.reset({0: {"level": 4}})
    for _ in range(3):
        ready_all(manager)
        assert [info["level"] for info in manager.reset_infos([0, 1])] == [4, 3]
        step_all(manager, {0: Do.END, 1: Do.END})
