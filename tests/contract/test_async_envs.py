"""Envs whose resets and steps are coroutines: many of them at one time in each worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr import create_env_manager
from envmgr.env.async_env import as_blocking
from envmgr.errors import (
    EnvCrash,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LaunchError,
)
from envmgr.outcomes import OutcomeStatus
from envmgr.testing import env_problems, vulnerable
from tests.contract.async_envs import (
    BLOCK,
    DEAF,
    DIE,
    END,
    EXIT,
    HANG,
    INTERRUPT,
    MEET,
    RAISE,
    WRONG,
    Deeds,
    Gym,
    InTasks,
    InThreads,
    NotAsync,
    Own,
    Plain,
    Seeded,
    built_later,
    meets_others,
    never_built,
)
from tests.contract.harness import Raises

PATIENCE_S = 30.0
ENDLESS = {"max_failures": 1000, "max_failures_total": 1000, "retry_waiting_time": 0.0}
INTERFACES = (Plain, Own, Gym, Seeded)
every_interface = pytest.mark.parametrize("env", INTERFACES, ids=lambda env: env.__name__)
every_start = pytest.mark.parametrize("context", ["server", "fork", "spawn", "forkserver"])


def make(env_fn: Any = Plain, env_num: int = 4, *, num_workers: int = 2, **keys: Any) -> Any:
    factories = list(env_fn) if isinstance(env_fn, Sequence) else [env_fn] * env_num
    cfg = {"type": "subprocess", "num_workers": num_workers, **ENDLESS, **keys}
    return create_env_manager(cfg, env_fn=factories)


def step_once(env: Any) -> float:
    """Take one step in its worker as an env that is not async."""
    env = as_blocking(env)
    env.reset()
    return float(env.step(1).reward)


def take_from_nothing(env: Any) -> Any:
    """Raise what a coroutine must not raise."""
    return next(iter(()))


def step_all(manager: Any, action: int = 5, **others: int) -> dict[int, Any]:
    """Step all envs when they are ready; `env_2=RAISE` is another action for env 2."""
    while len(manager.ready_obs) < manager.env_num:
        pass
    actions = {i: others.get(f"env_{i}", action) for i in range(manager.env_num)}
    timesteps: dict[int, Any] = manager.step(actions)
    return timesteps


def check_accounts(manager: Any) -> None:
    stats = manager.stats()
    assert stats["actions"] == stats["timesteps"] + stats["cancelled"] + stats["outstanding"]


# -- steps and resets ------------------------------------------------------------------------------


@every_interface
def test_steps_and_resets(env: Any) -> None:
    with make(env, seed=10) as manager:
        assert {i: o.tolist() for i, o in manager.ready_obs.items()} == {
            i: [10 + i, 0, -1] for i in range(4)
        }
        for k in (1, 2, 3):
            timesteps = step_all(manager, 100 + k)
            for i, timestep in timesteps.items():
                assert timestep.obs.tolist() == [10 + i, k, 100 + k]
                assert (timestep.reward, timestep.done) == (100.0 + k, False)
                assert timestep.info["steps"] == k
        ended = step_all(manager, 7, env_2=END)
        assert [t.done for t in ended.values()] == [False, False, True, False]
        assert ended[2].obs.tolist() == [12, 4, END]
        timesteps = step_all(manager, 8)
        assert timesteps[2].obs.tolist() == [-1, 1, 8], "another episode, without a seed"
        assert timesteps[1].obs.tolist() == [11, 5, 8]
        check_accounts(manager)


@every_interface
def test_params_of_resets(env: Any) -> None:
    with make(env, 2) as manager:
        manager.reset({0: {"x": 1}, 1: None})
        assert manager.ready_info[0]["params"] == {"x": 1}
        assert manager.ready_info[1]["params"] == {}


@every_start
def test_each_start_method(context: str) -> None:
    with make(Plain, context=context) as manager:
        assert step_all(manager, 3)[3].obs.tolist() == [-1, 1, 3]


@pytest.mark.parametrize("key", ["subprocess", "async_subprocess"])
def test_each_kind_with_worker_processes(key: str) -> None:
    with make(Plain, type=key, step_wait_timeout=0) as manager:
        manager.send(dict.fromkeys(range(4), 3))
        rewards: dict[int, float] = {}
        while len(rewards) < 4:
            rewards.update({i: t.reward for i, t in manager.recv(1).items()})
        assert rewards == dict.fromkeys(range(4), 3.0)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_batches_of_arrays(shared_memory: bool) -> None:
    with make(Gym, seed=0, shared_memory=shared_memory) as manager:
        for k in (1, 2):
            manager.send_arrays(
                np.arange(4), np.array([1, 2, 3, END]) if k == 2 else np.ones(4, int)
            )
            batch = manager.recv_arrays(4)
            assert batch.env_ids.tolist() == [0, 1, 2, 3]
            assert batch.obs[:, 1].tolist() == [k] * 4
        assert batch.terminated.tolist() == [False, False, False, True]
        values, present = batch.info_columns["steps"]
        assert values.tolist() == [2] * 4
        assert present.all()


def test_beginning_the_next_episode_within_the_step() -> None:
    with make(Plain, 2, reset_inplace=True) as manager:
        ended = step_all(manager, END)
        assert ended[0].obs.tolist() == [-1, 1, END]
        assert manager.ready_obs[0].tolist() == [-1, 0, -1]


def test_spares_take_the_place_of_async_envs() -> None:
    with make(Plain, 2, spare_env_num=1, type="async_subprocess") as manager:
        for _ in range(6):
            while len(manager.ready_obs) < 2:
                pass
            manager.send({0: END, 1: 3})
            got: dict[int, Any] = {}
            while len(got) < 2:
                got.update(manager.recv(1))
            assert (got[0].done, got[1].done) == (True, False)
        assert manager.stats()["failures"] == 0
        check_accounts(manager)


def test_calls_of_async_methods() -> None:
    with make(Plain, 2) as manager:
        assert manager.call("double", 21) == [42, 42]
        assert manager.call("steps_taken") == [0, 0]
        step_all(manager)
        assert manager.call("steps_taken") == [1, 1]
        with pytest.raises(EnvRaised, match="as it was told"):
            manager.call("double", RAISE)


def test_some_envs_of_a_manager_may_be_async_and_others_not() -> None:
    with make([Plain, NotAsync, Gym, NotAsync]) as manager:
        for k in (1, 2):
            assert {i: t.obs[1] for i, t in step_all(manager).items()} == dict.fromkeys(range(4), k)
        step_all(manager, END)
        assert {i: t.obs[1] for i, t in step_all(manager).items()} == dict.fromkeys(range(4), 1)


def test_factories_may_be_async() -> None:
    factories = [built_later, partial(built_later, Gym), Plain, partial(built_later, NotAsync)]
    with make(factories) as manager:
        assert len(step_all(manager)) == 4


def test_what_is_built_later_need_not_be_async() -> None:
    with make(partial(built_later, NotAsync), 3, step_timeout=PATIENCE_S) as manager:
        for k in (1, 2):
            assert {i: t.obs[1] for i, t in step_all(manager).items()} == dict.fromkeys(range(3), k)
        step_all(manager, END, env_1=DIE)
        assert {i: t.obs[1] for i, t in step_all(manager).items()} == dict.fromkeys(range(3), 1)


def test_async_envs_are_closed(tmp_path: Path) -> None:
    files = [str(tmp_path / str(k)) for k in range(4)]
    with make([partial(env, file) for env, file in zip(INTERFACES, files, strict=True)]):
        pass
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]


# -- at one time -----------------------------------------------------------------------------------


class Company(Plain):
    """Meets 32 others in a step."""

    def __init__(self) -> None:
        super().__init__()
        Deeds.company = 32


def test_all_envs_of_a_worker_take_their_steps_at_one_time() -> None:
    with make(Company, 64) as manager:
        assert len(step_all(manager, MEET)) == 64


def test_async_factories_of_a_worker_run_at_one_time() -> None:
    with make(meets_others, 3, num_workers=1) as manager:
        assert len(step_all(manager)) == 3


def test_a_step_is_not_held_up_by_those_that_take_longer() -> None:
    with make(Plain, 3, num_workers=1, type="async_subprocess") as manager:
        manager.send({0: HANG, 1: 4})
        assert {i: t.reward for i, t in manager.recv(1).items()} == {1: 4.0}
        for k in range(5):
            manager.send({1: k, 2: k})
            assert set(manager.recv(2)) == {1, 2}


# -- failures --------------------------------------------------------------------------------------


@every_interface
def test_an_env_that_raises(env: Any) -> None:
    with make(env) as manager:
        timesteps = step_all(manager, env_1=RAISE)
        error = timesteps[1].info["error"]
        assert isinstance(error, EnvRaised)
        assert "as it was told" in str(error)
        assert "in do" in error.remote_traceback
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [0, 1, 0, 0]
        assert len(step_all(manager)) == 4
        assert manager.generations == [0, 0, 0, 0]


@every_interface
def test_an_env_that_returns_no_timestep(env: Any) -> None:
    with make(env, 2) as manager:
        error = step_all(manager, env_1=WRONG)[1].info["error"]
        assert isinstance(error, EnvProtocolError)
        assert "no timestep" in str(error) or "value of type str" in str(error)
        assert len(step_all(manager)) == 2


@pytest.mark.parametrize("env", [Plain, InTasks])
def test_an_env_that_exits_costs_itself(env: Any) -> None:
    with make(env, num_workers=1) as manager:
        timesteps = step_all(manager, env_1=EXIT)
        assert isinstance(timesteps[1].info["error"], EnvCrash)
        assert "sys.exit(3)" in str(timesteps[1].info["error"])
        assert len(step_all(manager)) == 4
        assert manager.generations == [0, 1, 0, 0]


def test_an_interrupt_that_a_task_of_an_env_raises_costs_it_alone() -> None:
    with make(InTasks, num_workers=1) as manager:
        timesteps = step_all(manager, env_1=INTERRUPT)
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [0, 1, 0, 0]
        assert "KeyboardInterrupt" in str(timesteps[1].info["error"])
        assert len(step_all(manager)) == 4
        assert (manager.generations[0], manager.generations[2]) == (0, 0)


def test_a_step_that_exceeds_its_limit_costs_its_env_and_says_where_it_was() -> None:
    with make(Plain, num_workers=1, step_timeout=2.0) as manager:
        pids = {t.info["pid"] for t in step_all(manager).values()}
        timesteps = step_all(manager, env_1=HANG)
        error = timesteps[1].info["error"]
        assert isinstance(error, EnvTimeout)
        assert (error.during, error.limit_s, error.env_id) == ("step", 2.0, 1)
        assert "await asyncio.Event().wait()" in error.stacks
        assert "async_envs.py" in error.stacks
        assert "envmgr/worker" not in error.stacks
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [0, 1, 0, 0]
        timesteps = step_all(manager)
        assert {t.info["pid"] for t in timesteps.values()} == pids, "the worker goes on"
        assert manager.generations == [0, 1, 0, 0]
        assert [t.info["steps"] for t in timesteps.values()] == [3, 1, 3, 3]
        check_accounts(manager)


@pytest.mark.parametrize("action", [DEAF, BLOCK], ids=["deaf", "blocks the loop"])
def test_an_env_that_does_not_end_when_it_is_cancelled_ends_its_worker(action: int) -> None:
    with make(Plain, 3, num_workers=1, step_timeout=2.0, close_timeout=0.3) as manager:
        began = time.monotonic()
        timesteps = step_all(manager, env_1=action)
        assert 2.3 <= time.monotonic() - began < PATIENCE_S
        error = timesteps[1].info["error"]
        assert isinstance(error, EnvTimeout)
        assert "2 s of step_timeout" in str(error)
        assert "env 0, env 2" in str(error) or "envs 0, 2" in str(error), "they shared its worker"
        if action == BLOCK:
            assert "time.sleep(1000)" in error.stacks or "in do" in error.stacks
        assert len(step_all(manager)) == 3
        assert manager.stats()["failures"] == 1, "the others are not charged"


def test_the_death_of_a_worker_is_charged_to_the_env_that_ran() -> None:
    with make(Plain, 3, num_workers=1) as manager:
        timesteps = step_all(manager, HANG, env_1=DIE)
        errors = [t.info["error"] for t in timesteps.values()]
        assert all(isinstance(error, EnvCrash) for error in errors)
        assert "the worker of env 1 (generation 0) died during step: exit code 7" in str(errors[1])
        assert "because it is shared with env 1" in str(errors[2])
        assert len(step_all(manager)) == 3


def test_an_env_that_is_not_async_is_charged_for_the_worker_that_it_shares_with_others() -> None:
    with make([Plain, NotAsync], num_workers=1, step_timeout=2.0, close_timeout=0.3) as manager:
        timesteps = step_all(manager, env_1=BLOCK)
        assert "env 1 (generation 0) exceeded the 2 s" in str(timesteps[1].info["error"])
        assert "because it is shared with env 1" in str(timesteps[0].info["error"])
        timesteps = step_all(manager, HANG, env_1=DIE)
        assert "the worker of env 1 (generation 1) died" in str(timesteps[1].info["error"])
        step_all(manager, END)
        assert len(step_all(manager)) == 2


def test_an_env_that_is_not_async_is_charged_for_a_worker_that_dies_in_its_reset() -> None:
    with make([Plain, NotAsync], num_workers=1) as manager:
        manager.call("die_in_reset", env_ids=[1])
        timesteps = step_all(manager, HANG, env_1=END)
        assert not timesteps[1].info.get("abnormal")
        assert "the worker of env 1 (generation 0) died during reset" in str(
            timesteps[0].info["error"]
        )


def test_a_reset_that_exceeds_its_limit_costs_its_env() -> None:
    with make(Plain, 3, num_workers=1, reset_timeout=2.0, max_failures=1) as manager:
        with pytest.raises(FailuresExhaustedError) as raised:
            manager.reset({1: {"how": HANG}})
        assert isinstance(raised.value.failure, EnvTimeout)
        assert "exceeded the 2 s of reset_timeout in its reset" in str(raised.value.failure)
        manager.reset({1: {}})
        assert len(step_all(manager)) == 3
        assert manager.generations[0] == manager.generations[2] == 0


def test_a_call_that_exceeds_its_limit_costs_its_env() -> None:
    with make(Plain, 2, num_workers=1, reset_timeout=2.0) as manager:
        with pytest.raises(EnvTimeout, match="in its call"):
            manager.call("double", HANG, env_ids=[1])
        assert len(step_all(manager)) == 2
        assert manager.generations == [0, 1]


def test_a_factory_that_hangs_exceeds_the_limit_of_its_own() -> None:
    manager = make([Plain, never_built, built_later], num_workers=1, connect_timeout=3.0)
    with Raises(LaunchError, "env 1", "3 s of connect_timeout", "asyncio.Event().wait()") as raised:
        manager.launch()
    assert set(raised.value.failures) == {1}
    assert manager.closed


def test_closing_does_not_wait_for_steps_that_hang() -> None:
    manager = make(Plain, 3, num_workers=1, type="async_subprocess")
    manager.launch()
    manager.send({0: HANG, 1: HANG, 2: 4})
    manager.recv(1)
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 4.0, "close_timeout is 5 s"


# -- leases ----------------------------------------------------------------------------------------


def run(main: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_coroutine_to_each_async_env() -> None:
    async def main() -> None:
        async with make(Plain, 16) as manager:

            async def play(k: int) -> None:
                async with manager.lease() as env:
                    for turn in range(2):
                        obs, _ = await env.reset(seed=100 * k + turn)
                        assert obs.tolist() == [100 * k + turn, 0, -1]
                        for step in range(1, 4):
                            timestep = await env.step(step)
                            assert timestep.obs.tolist() == [100 * k + turn, step, step]

            await asyncio.gather(*map(play, range(48)))
            assert manager.stats()["actions"] == 48 * 6
            check_accounts(manager)

    run(main)


def test_a_step_of_a_lease_has_a_limit_of_its_own() -> None:
    async def main() -> None:
        async with make(Plain, 3, num_workers=1) as manager:

            async def hang() -> None:
                async with manager.lease() as env:
                    await env.reset()
                    timestep = await env.step(HANG, timeout_s=1.0)
                    assert timestep.reward is None
                    assert isinstance(timestep.info["error"], EnvTimeout)
                    assert "asyncio.Event().wait()" in timestep.info["error"].stacks
                    assert env.outcome.status is OutcomeStatus.UNRESOLVED
                    await env.reset()
                    assert (await env.step(3)).reward == 3.0

            async def play() -> None:
                async with manager.lease() as env:
                    await env.reset()
                    for k in range(50):
                        assert (await env.step(k)).info["steps"] == k + 1

            await asyncio.gather(hang(), play(), play())
            assert sorted(manager.generations) == [0, 0, 1]
            check_accounts(manager)

    run(main)


def test_a_step_whose_await_is_cancelled_ends_soon_and_costs_its_env_alone() -> None:
    async def main() -> None:
        async with make(Plain, 2, num_workers=1, release_timeout=0.2) as manager:
            async with manager.lease() as env:
                await env.reset()
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(env.step(HANG), 0.1)
            async with manager.lease() as one, manager.lease() as other:
                for leased in (one, other):
                    await leased.reset()
                    assert (await leased.step(4)).reward == 4.0
            assert sum(manager.generations) == 1
            assert manager.stats()["failures"] <= 1
            check_accounts(manager)

    run(main)


# -- what is refused -------------------------------------------------------------------------------


@every_interface
@pytest.mark.parametrize("key", ["base", "thread"])
def test_kinds_without_worker_processes_refuse_async_envs(key: str, env: Any) -> None:
    manager = create_env_manager({"type": key}, env_fn=[env] * 2)
    with Raises(LaunchError, "env", "event loop of a worker process", "type: subprocess"):
        manager.launch()
    manager = create_env_manager({"type": key}, env_fn=[built_later] * 2)
    with Raises(LaunchError, "async factory"):
        manager.launch()


def test_a_wrapper_that_does_not_await_is_named() -> None:
    class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            return super().step(action)

        def reset(self, **arguments: Any) -> Any:
            return super().reset(**arguments)

    manager = make(lambda: Wrapped(Gym()), 1, num_workers=1)
    with Raises(
        LaunchError, "reset of Gym is `async def`", "a wrapper around it", "gymnasium.make"
    ):
        manager.launch()


def test_what_async_envs_cannot_do() -> None:
    with Raises(LaunchError, "async envs cannot be resumed"):
        make(Plain, 1, num_workers=1, on_failure="resume", snapshot_every=3).launch()

    with (
        make(Gym, 1, num_workers=1) as manager,
        pytest.raises(EnvRaised, match="async envs are not taken"),
    ):
        manager.enable_save_replay("videos")


# -- functions, trials ----------------------------------------------------------------------------


def take_steps(env: Any) -> list[float]:
    """Step an env in its worker as one that is not async."""
    env = as_blocking(env)
    env.reset()
    return [env.step(k).reward for k in range(3)]


async def await_steps(env: Any) -> float:
    """Step an env in its worker."""
    await env.reset()
    return float((await env.step(4))[1])


@pytest.mark.parametrize("env", [Plain, Gym, Seeded])
def test_functions_that_are_run_on_async_envs(env: Any) -> None:
    with make(env, 3, num_workers=1) as manager:
        assert manager.apply(take_steps) == [[0.0, 1.0, 2.0]] * 3
        assert manager.apply(await_steps) == [4.0] * 3
        assert len(step_all(manager)) == 3


def test_functions_of_all_envs_run_at_one_time_whatever_threads_their_steps_need() -> None:
    env_num = 40  # more than threads in the pool of an event loop
    with make(InThreads, env_num, num_workers=1, reset_timeout=PATIENCE_S) as manager:
        assert manager.apply(step_once) == [1.0] * env_num


def test_a_function_may_end_an_iteration_that_has_nothing_more() -> None:
    with make(Plain, 2, reset_timeout=PATIENCE_S) as manager, pytest.raises(EnvRaised):
        manager.apply(take_from_nothing)


def test_auto_shares_the_envs_among_as_many_workers_as_there_are_cores() -> None:
    with make(Plain, 6, num_workers="auto", worker_affinity=[[0]]) as manager:
        assert manager.stats()["num_workers"] == 1
        assert "async" in manager.stats()["calibration"]["reason"]


# -- checks ----------------------------------------------------------------------------------------


@every_interface
def test_the_contract_kit_knows_async_envs(env: Any) -> None:
    assert env_problems(env, n_steps=20) == []


@pytest.mark.parametrize("env", [Plain, Gym, built_later])
def test_workers_of_async_envs_can_be_hurt_for_trials(env: Any) -> None:
    with make(vulnerable([env] * 2)) as manager:
        assert [t.obs[1] for t in step_all(manager).values()] == [1.0, 1.0]


def test_the_contract_kit_knows_async_factories() -> None:
    assert env_problems(built_later, n_steps=20) == []
