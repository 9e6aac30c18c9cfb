"""F21: slow resets and lost workers, hidden by spares; and what must not be seen of these."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from envmgr.errors import EnvCrash, EnvTimeout, LaunchError
from envmgr.lifecycle import EnvState
from tests.contract.envs import Do, ScriptedEnv, Seen, expected_reward, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    SOME_BLOCK,
    SOME_MESSAGE,
    THREADS,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

SYNC_SPAWN = Setup("subprocess", "forkserver", True)
ASYNC_PIPES = Setup("async_subprocess", "fork", False)

with_spares = over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, SOME_MESSAGE)
sync_only = over(ALL_BLOCK, ALL_MESSAGE)


def numbered(
    folder: str, script: Mapping[str, Any], scripts: Mapping[int, Mapping[str, Any]]
) -> ScriptedEnv:
    """Build an env that has a number of its own, in place of an env_id: how many came before it."""
    for number in itertools.count():
        try:
            os.close(os.open(os.path.join(folder, f"number-{number}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return ScriptedEnv(number, folder, **{**script, **scripts.get(number, {})})
    raise AssertionError


def factory(
    world: World, scripts: Mapping[int, Mapping[str, Any]] | None = None, **script: Any
) -> Callable[[], Any]:
    """Return the one function that builds all envs of a manager; `scripts` are by number."""
    return partial(numbered, world.folder, script, scripts or {})


def spared(
    world: World,
    setup: Setup,
    env_num: int = 2,
    spare_num: int = 1,
    *,
    scripts: Mapping[int, Mapping[str, Any]] | None = None,
    script: Mapping[str, Any] | None = None,
    **cfg: Any,
) -> Any:
    """Return a launched manager with spares."""
    env_fn = [factory(world, scripts, **(script or {}))] * env_num
    return world.make(setup, env_fn=env_fn, spare_env_num=spare_num, **cfg)


def numbers(observations: Mapping[int, Any]) -> dict[int, int]:
    return {env_id: seen(obs).env_id for env_id, obs in observations.items()}


def the_other(*known: int, of: int = 3) -> int:
    """Return the one number that is not known."""
    (number,) = set(range(of)) - set(known)
    return number


# -- slow resets ----------------------------------------------------------------------------------


@with_spares
def test_f21_a_slow_reset_is_hidden_by_a_spare(world: World, setup: Setup) -> None:
    gate = world.gate
    manager = spared(world, setup, script={"reset_faults": {1: "gate"}})
    before = numbers(ready_all(manager))
    spare = the_other(*before.values())
    timesteps = step_all(manager, {0: Do.END, 1: 1})
    assert timesteps[0].done
    assert seen(timesteps[0].obs).env_id == before[0]

    ready = ready_all(manager)  # although the reset of the env that ended waits at the gate
    assert numbers(ready) == {0: spare, 1: before[1]}
    assert seen(ready[0])[2:4] == (0, 0)
    assert manager.ready_info[0]["episode"] == 0
    visit = gate.await_visit(before[0], "reset")
    stats = manager.stats()
    assert (stats["swaps"], stats["spare_env_num"], stats["spares_ready"]) == (1, 1, 0)

    timesteps = step_all(manager, {0: 2, 1: Do.END})
    assert seen(timesteps[0].obs)[:5] == (spare, 0, 0, 1, 2)
    assert manager.ready_env == [0]  # the only spare is at the gate still
    assert manager.env_states == {0: EnvState.RUN, 1: EnvState.RESET}
    visit.release()
    ready = ready_all(manager)
    assert numbers(ready) == {0: spare, 1: before[0]}
    assert seen(ready[1])[2:4] == (1, 0)
    timesteps = step_all(manager, {0: 3, 1: 3})
    assert numbers({i: t.obs for i, t in timesteps.items()}) == {0: spare, 1: before[0]}
    stats = manager.stats()
    assert (stats["actions"], stats["timesteps"], stats["episodes"]) == (6, 6, 2)
    assert (stats["failures"], stats["renewals"], stats["dropped_replies"]) == (0, 0, 0)
    assert stats["resets"] == 4
    gate.await_visit(before[1], "reset").release()


@over(ALL_BLOCK, ALL_MESSAGE, THREADS)
@pytest.mark.parametrize("reset_inplace", [False, True])
def test_f21_nothing_is_lost_repeated_or_mixed_up(
    world: World, setup: Setup, reset_inplace: bool
) -> None:
    episodes = run_and_check(world, setup, reset_inplace=reset_inplace)
    assert episodes["swaps"] > 10


@over(SOME_BLOCK, SOME_MESSAGE, ASYNC_PIPES)
@pytest.mark.parametrize("copy_on_get", [True, False])
def test_f21_nothing_is_lost_repeated_or_mixed_up_in_async_kinds(
    world: World, setup: Setup, copy_on_get: bool
) -> None:
    stats = run_and_check(world, setup, copy_on_get=copy_on_get)
    assert stats["swaps"] > 10


@over(ALL_BLOCK)
def test_f21_views_stay_valid_over_a_change_of_place(world: World, setup: Setup) -> None:
    run_and_check(world, setup, copy_on_get=False)


def run_and_check(world: World, setup: Setup, **cfg: Any) -> dict[str, Any]:
    """Take steps whose episodes end all the time, and check each timestep and each view."""
    env_num, n_rounds = 3, 60
    manager = spared(world, setup, env_num, 2, **cfg)
    rng = np.random.default_rng(1)
    latest: dict[int, Seen] = {}
    kept: dict[int, list[tuple[Any, Any]]] = {i: [] for i in range(env_num)}
    known: set[tuple[int, int]] = set()
    n_steps: dict[int, int] = {}
    sent: dict[int, int] = {}
    for _ in range(n_rounds):
        ready = manager.ready_obs
        for env_id, obs in ready.items():
            it = seen(obs)
            if env_id not in latest:
                assert it.step == 0
                assert (it.env_id, it.episode) not in known, "an episode has begun twice"
                known.add((it.env_id, it.episode))
                latest[env_id] = it
            assert it == latest[env_id]
            sent[env_id] = int(rng.choice([1, 2, Do.END, Do.END_LATE]))
        owners = [it.env_id for it in latest.values()]
        assert len(set(owners)) == len(owners), "two env_ids have the same env"
        timesteps = manager.step({i: sent[i] for i in ready})
        for env_id, (obs, reward, done, _) in timesteps.items():
            it, before = seen(obs), latest[env_id]
            n_steps[it.env_id] = n_steps.get(it.env_id, 0) + 1
            assert it[:5] == (*before[:3], before.step + 1, sent[env_id])
            assert reward == expected_reward(obs)
            for view, copied in kept[env_id]:
                assert np.array_equal(view, copied), "a view has changed too soon"
            kept[env_id] = [*kept[env_id], (obs, obs.copy())][-2:]
            if done:
                del latest[env_id]
            else:
                latest[env_id] = it
    while manager.stats()["outstanding"]:
        for timestep in manager.recv().values():
            number = seen(timestep.obs).env_id
            n_steps[number] = n_steps.get(number, 0) + 1
    stats: dict[str, Any] = manager.stats()
    assert (stats["failures"], stats["spare_failures"], stats["dropped_replies"]) == (0, 0, 0)
    assert stats["actions"] == stats["timesteps"] == sum(n_steps.values())
    assert n_steps == {i: n for i in range(env_num + 2) if (n := len(world.actions(i)))}
    return stats


def test_f21_accounts_are_those_of_a_run_without_spares(world: World) -> None:
    keys = ("actions", "timesteps", "episodes", "abnormal", "cancelled", "states", "num_workers")
    found = []
    for spare_num in (0, 2):
        manager = spared(world, ALL_BLOCK, 2, spare_num, episode_num=4)
        for action in (1, Do.END, 2, Do.RAISE, Do.END, 3, Do.END):
            step_all(manager, {0: action, 1: 1})
            ready_all(manager)
        stats = manager.stats()
        found.append({key: stats[key] for key in keys})
        assert sorted(i for worker in stats["workers"] for i in worker["env_ids"]) == [0, 1]
        assert len(stats["workers"]) == 2 + spare_num
        assert len(stats["generations"]) == manager.env_num == 2
        manager.close()
    assert found[0] == found[1]


# -- which spare takes the place of which env -----------------------------------------------------


def trajectory(manager: Any, actions: list[dict[int, int]]) -> list[Any]:
    """Return what a run gives; of the envs' numbers and actions nothing, as these may differ."""
    found: list[Any] = []
    for chosen in actions:
        ready = ready_all(manager)
        found.append({i: (seen(obs).step, seen(obs).draw) for i, obs in ready.items()})
        timesteps = manager.step(chosen).items()
        found.append({i: (seen(t.obs).step, seen(t.obs).draw, t.done) for i, t in timesteps})
    return found


def choices(end: int) -> list[dict[int, int]]:
    rng = np.random.default_rng(3)
    return [{i: int(rng.choice([1, end, end])) for i in range(3)} for _ in range(15)]


@sync_only
@pytest.mark.parametrize("reset_inplace", [False, True])
def test_f21_in_sync_a_seeded_run_repeats_whatever_its_timing(
    world: World, setup: Setup, reset_inplace: bool
) -> None:
    runs = []
    for end in (Do.END_LATE, Do.END_LATE, Do.END):
        manager = spared(world, setup, 3, 2, seed=11, reset_inplace=reset_inplace)
        runs.append(trajectory(manager, choices(end)))
        assert manager.stats()["swaps"] > 10
        manager.close()
    assert runs[0] == runs[1] == runs[2]
    assert len({draw for each in runs[0] for _, draw, *_ in each.values()}) > 30


@over(ALL_BLOCK)
def test_f21_seed_and_reset_repeat_a_run_as_a_launch_does(world: World, setup: Setup) -> None:
    manager = spared(world, setup, 3, 2, seed=11)
    actions = choices(Do.END_LATE)
    first = trajectory(manager, actions)
    manager.seed(11)
    manager.reset()
    second = trajectory(manager, actions)
    assert first == second


def test_f21_spares_are_seeded_behind_the_envs(world: World) -> None:
    manager = spared(world, ALL_BLOCK, 2, 2, seed=5)
    assert sorted(world.noted(i, "seed")[0][0] for i in range(4)) == [5, 6, 7, 8]
    manager.seed([1, 2])
    manager.reset()
    ready_all(manager)
    assert manager.stats()["spare_env_num"] == 2


# -- failures -------------------------------------------------------------------------------------


@with_spares
def test_f21_a_spare_takes_over_when_a_worker_is_killed(world: World, setup: Setup) -> None:
    gate = world.gate
    manager = spared(world, setup, scripts={3: {"reset_faults": {0: "gate"}}})
    before = numbers(ready_all(manager))
    spare = the_other(*before.values())
    timesteps = step_all(manager, {0: Do.KILL, 1: 1})
    assert timesteps[0].info["abnormal"]
    assert isinstance(timesteps[0].info["error"], EnvCrash)
    assert not timesteps[1].done

    ready = ready_all(manager)  # although the new env waits at the gate
    assert numbers(ready) == {0: spare, 1: before[1]}
    visit = gate.await_visit(3, "reset")
    stats = manager.stats()
    assert stats["failures_by_env"] == {0: 1}
    assert stats["generations"] == [1, 0]
    visit.release()
    step_all(manager, {0: 1, 1: Do.END})
    assert numbers(ready_all(manager)) == {0: spare, 1: 3}


@with_spares
def test_f21_a_spare_takes_over_when_an_idle_env_is_killed(world: World, setup: Setup) -> None:
    manager = spared(world, setup)
    ready = ready_all(manager)
    before = numbers(ready)
    world.kill_and_await_report(before[0])
    assert numbers(manager.ready_obs) == before
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert timesteps[0].info["abnormal"]
    assert world.actions(before[0]) == []
    assert numbers(ready_all(manager)) == {0: the_other(*before.values()), 1: before[1]}


@with_spares
def test_f21_a_spare_takes_over_from_an_env_that_hangs(world: World, setup: Setup) -> None:
    manager = spared(world, setup, step_timeout=1.0)
    before = numbers(ready_all(manager))
    timesteps = step_all(manager, {0: Do.HANG_DEAF, 1: 1})
    assert isinstance(timesteps[0].info["error"], EnvTimeout)
    assert numbers(ready_all(manager)) == {0: the_other(*before.values()), 1: before[1]}
    step_all(manager, {0: 1, 1: 1})


@with_spares
def test_f21_an_env_that_raises_is_reset_behind_its_spare(world: World, setup: Setup) -> None:
    manager = spared(world, setup)
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.RAISE, 1: 1})
    spare = the_other(*before.values())
    assert numbers(ready_all(manager)) == {0: spare, 1: before[1]}
    step_all(manager, {0: 1, 1: Do.END})
    ready = ready_all(manager)
    assert numbers(ready) == {0: spare, 1: before[0]}
    assert seen(ready[1]).episode == 1


@with_spares
def test_f21_a_spare_that_is_killed_is_renewed_and_no_failure_of_an_env(
    world: World, setup: Setup
) -> None:
    gate = world.gate
    manager = spared(world, setup, scripts={3: {"reset_faults": {0: "gate"}}})
    before = numbers(ready_all(manager))
    world.kill_and_await_report(the_other(*before.values()))
    visit = gate.await_visit(3, "reset")
    step_all(manager, {0: 1, 1: 1})
    visit.release()
    step_all(manager, {0: 1, 1: Do.END})
    assert numbers(ready_all(manager)) == {0: before[0], 1: 3}
    stats = manager.stats()
    assert (stats["failures"], stats["failures_by_env"], stats["spare_failures"]) == (0, {}, 1)
    assert stats["abnormal"] == 0


@over(ALL_BLOCK, SOME_MESSAGE)
def test_f21_a_spare_whose_reset_hangs_is_renewed(world: World, setup: Setup) -> None:
    gate = world.gate
    scripts = {3: {"reset_faults": {0: "gate"}}}
    manager = spared(world, setup, scripts=scripts, reset_timeout=1.0)
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.END_THEN_HANG, 1: 1})
    gate.await_visit(before[0], "reset")
    gate.await_visit(3, "reset").release()
    ready_all(manager)
    step_all(manager, {0: 1, 1: Do.END})
    assert numbers(ready_all(manager))[1] == 3
    stats = manager.stats()
    assert (stats["failures"], stats["spare_failures"]) == (0, 1)


@over(ALL_MESSAGE, SOME_BLOCK)
def test_f21_a_hanging_reset_that_was_taken_over_is_a_failure_of_the_env(
    world: World, setup: Setup
) -> None:
    gate = world.gate
    manager = spared(world, setup, reset_timeout=4.0)
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.END_THEN_HANG, 1: 1})
    gate.await_visit(before[0], "reset")
    ready_all(manager)
    step_all(manager, {0: 1, 1: Do.END})
    assert manager.env_states[1] is EnvState.RESET
    assert numbers(ready_all(manager)) == {0: the_other(*before.values()), 1: before[1]}
    stats = manager.stats()
    assert (stats["failures_by_env"], stats["spare_failures"]) == ({1: 1}, 0)
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert not any(timestep.done for timestep in timesteps.values())


@with_spares
def test_f21_a_spare_whose_reset_raises_is_repaired(world: World, setup: Setup) -> None:
    gate = world.gate
    scripts = {i: {"reset_faults": {2: "gate"}} for i in range(3)}
    manager = spared(world, setup, scripts=scripts, max_retry=2, retry_waiting_time=0.0)
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.END_THEN_RAISE, 1: 1})
    visit = gate.await_visit(before[0], "reset")
    stats = manager.stats()
    assert (stats["spare_failures"], stats["reset_retries"], stats["failures"]) == (1, 1, 0)
    visit.release()
    ready_all(manager)
    step_all(manager, {0: 1, 1: Do.END})
    assert numbers(ready_all(manager))[1] == before[0]


@over(ALL_BLOCK)
def test_f21_a_spare_that_cannot_be_kept_is_given_up_and_the_run_goes_on(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {i: {"reset_faults": {0: "raise"}} for i in range(3, 20)}
    manager = spared(world, setup, scripts=scripts, max_failures=1, retry_waiting_time=0.0)
    before = numbers(ready_all(manager))
    spare = the_other(*before.values())
    world.kill_and_await_report(spare)
    while "goes on without it" not in caplog.text:
        step_all(manager, {0: 1, 1: 1})
    step_all(manager, {0: Do.END, 1: 1})
    assert numbers(ready_all(manager)) == before
    stats = manager.stats()
    assert (stats["spare_env_num"], stats["failures"], stats["spare_failures"]) == (0, 0, 2)


@over(ALL_BLOCK, ALL_MESSAGE)
def test_f21_a_spare_that_cannot_be_launched_fails_the_launch(world: World, setup: Setup) -> None:
    with pytest.raises(LaunchError, match=r"1 of 3 envs could not be launched"):
        spared(world, setup, scripts={1: {"reset_faults": {0: "raise"}}})


@with_spares
def test_f21_closing_does_not_wait_for_spares(world: World, setup: Setup) -> None:
    gate = world.gate
    manager = spared(world, setup, script={"reset_faults": {1: "hang_deaf"}})
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.END, 1: 1})
    gate.await_visit(before[0], "reset")
    manager.close(timeout_s=0.1)


# -- the rest of a manager ------------------------------------------------------------------------


@with_spares
def test_f21_attributes_are_set_in_spares_too(world: World, setup: Setup) -> None:
    manager = spared(world, setup)
    before = numbers(ready_all(manager))
    manager.set_attr("knob", 5)
    step_all(manager, {0: Do.END, 1: 1})
    assert numbers(ready_all(manager))[0] == the_other(*before.values())
    assert manager.get_attr("knob") == [5, 5]
    manager.set_attr("knob", [6, 7])
    step_all(manager, {0: Do.END, 1: Do.END})
    assert manager.get_attr("knob") == [6, 7]
    assert manager.stats()["swaps"] == 1


@over(ALL_BLOCK, SOME_BLOCK)
def test_f21_workers_are_recycled_behind_their_spares(world: World, setup: Setup) -> None:
    manager = spared(world, setup, max_episodes_per_worker=1)
    for _ in range(4):
        ready_all(manager)
        timesteps = step_all(manager, {0: Do.END, 1: 1})
        assert not any(t.info.get("abnormal") for t in timesteps.values())
    ready_all(manager)
    stats = manager.stats()
    assert stats["failures"] == 0
    assert stats["swaps"] > 0
    assert stats["recycled"] >= 3


@over(ALL_BLOCK, ALL_MESSAGE)
def test_f21_envs_of_other_functions_and_with_params_take_no_spare(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    env_fn = [factory(world), factory(world), factory(world, episode_length=9.0)]
    manager = world.make(setup, env_fn=env_fn, spare_env_num=1, reset_param={0: {"level": 1}})
    assert "envs [2] take no spare" in caplog.text
    before = numbers(ready_all(manager))
    step_all(manager, {0: Do.END, 1: 1, 2: Do.END})
    assert numbers(ready_all(manager)) == before
    step_all(manager, {0: 1, 1: Do.END, 2: 1})
    assert numbers(ready_all(manager)) == {**before, 1: the_other(*before.values(), of=4)}
