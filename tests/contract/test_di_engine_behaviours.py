"""Behaviours of DI-engine's env managers that its users rely on, as its own tests show them.

Where envmgr differs on purpose the test shows envmgr's behaviour, and the table says so with "(*)".

| behaviour of DI-engine's managers                            | test here                         |
| -------------------------------------------------------------| --------------------------------- |
| built closed; all envs RUN after launch with reset params    | test_launch_with_reset_params     |
| seeds given as a list before launch, one for each env        | test_launch_with_reset_params     |
| timeouts and retries of the config are in force              | test_config_is_in_force           |
| attributes of envs by name are lists, in order of env_id     | test_attributes_are_lists         |
| (*) names with a leading underscore are not forwarded        | test_attributes_are_lists         |
| an unknown attribute is an AttributeError                    | test_unknown_names_and_methods    |
| a method of the envs called on the manager: RuntimeError     | test_unknown_names_and_methods    |
| the reference env has the methods of the envs                | test_unknown_names_and_methods    |
| step gives as many timesteps as there were actions (sync)    | test_run_until_done               |
| step gives at least one timestep (async)                     | test_run_until_done               |
| every executed step is delivered, none is made up            | test_run_until_done               |
| a policy may act on some of the ready envs only              | test_run_until_done               |
| done when each env has had episode_num episodes, all DONE    | test_run_until_done               |
| after close: closed, all VOID, the envs closed               | test_close                        |
| (*) reset and step before launch and after close: StateError,| test_close                        |
|     which is a RuntimeError (there: AssertionError)          |                                   |
| an error in the first reset: launch raises RuntimeError,     | test_launch_error_then_launch     |
|     manager closed, the next launch works                    |                                   |
| a reset that fails now and then: tried again, same object    | test_error_once_with_reset        |
| the same with retry_type renew: another object               | test_error_once_with_renew        |
| observations after a renewal are those of ready_obs          | test_error_once_with_renew        |
| info["abnormal"] marks that env's timestep alone; afterwards | test_abnormal_step                |
|     all envs run again                                       |                                   |
| (*) there, with subprocesses, the env stayed in ERROR until  | test_abnormal_step                |
|     reset; here it is repaired at once, and reset works too  |                                   |
| (*) an error in a step raised and (subprocess) closed the    | test_step_error,                  |
|     manager; here an abnormal timestep, or with on_failure:  | test_step_error_raised            |
|     raise the same as there                                  |                                   |
| the other envs stay in RUN, reset repairs the failed one     | test_step_error                   |
| a launch that blocks raises at its limit; launch works again | test_block_in_launch              |
| a slow reset within its limit is no failure                  | test_block_in_launch              |
| a reset that blocks raises RuntimeError at its limit         | test_block_in_reset               |
| (*) there the manager closed; here its other envs go on      | test_block_in_reset               |
| a step that blocks ends at its limit with a TimeoutError     | test_block_in_step,               |
| (*) in the timestep, or raised with on_failure: raise        | test_block_in_step_raised         |
| others run on, reset repairs, launch after close works       | test_block_in_step                |
| a slow step within its limit is no failure                   | test_block_in_step                |
| a step that blocks and then a reset that blocks: raises      | test_block_in_step_and_in_reset   |
| all limits hold for `base` in the main thread too            | every test_block_*                |
| auto_reset off: reset() when all wait                        | test_reset_all_when_all_wait      |
| auto_reset off: reset({id: {}}) or reset({id: None}) of one  | test_reset_one_by_one             |
|     that is not done (env_state_done)                        |                                   |
| auto_reset on: ready_obs has all envs again                  | test_auto_reset_brings_all_back   |
| spaces are spaces; metadata may be anything                  | test_spaces_and_metadata          |
| actions step by step without waiting, results by recv        | test_without_blocking             |
| close(seconds)                                               | test_close_with_a_limit           |
| buffers: a view follows the writer, a copy does not          | test_views_and_copies             |
| V2: obs by row, ids of the rows, timesteps with env_id       | test_v2_loop                      |
| V2: an abnormal step is `timestep.info.abnormal`             | test_v2_abnormal_step             |
| (*) actions are checked against the space; DI-engine's tests | test_actions_of_any_kind          |
|     sent strings and wrong shapes: check_actions: false      |                                   |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Space

from envmgr import BaseEnv, EnvState, EnvTimestep
from envmgr.errors import EnvTimeout, FailuresExhaustedError
from tests.contract.envs import Script, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE,
    INLINE,
    SOME_MESSAGE,
    Raises,
    Setup,
    World,
    over,
    process_kinds,
    ready_all,
    step_all,
)

LIMIT_S = 2.0
SLOW_S = 0.1
N_ENVS = 3
every_manager = over(INLINE, ALL_BLOCK, SOME_MESSAGE)
sync_managers = over(INLINE, ALL_BLOCK, ALL_MESSAGE)


class Machine(BaseEnv):
    """A simulated machine in the style of DI-engine's envs: told what to do by words.

    Resets take a `task`: "fail" fails, "fail every second time" does so, "slow" takes its time
    once the machine has been used, "block" never returns. Actions may be words too: "fail", "slow",
    "block" and "report" (says that the step was abnormal). Anything else is work, and a job is done
    after a number of steps.
    """

    observation_space = Box(-np.inf, np.inf, (6,), np.float64)
    action_space = Box(-2.0, 2.0, (4,), np.float32)
    reward_space = Box(-10.0, 0.0, (1,), np.float32)
    metadata = "a string, of all things"

    def __init__(self, env_id: int, folder: str, n_steps: int = 3) -> None:
        self.script = Script(env_id, folder, episode_length=n_steps)
        self.name = f"machine {env_id}"
        self.unique = self.script.unique
        self.given_seed: int | None = None
        self.task: str | None = None
        self.n_steps_done = 0
        self.n_resets_of_task = 0

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        self.given_seed = seed

    def reset(self, task: str | None = None) -> Any:
        self.n_resets_of_task = self.n_resets_of_task + 1 if task == self.task else 1
        self.task = task
        every_second = task == "fail every second time" and self.n_resets_of_task % 2 == 0
        if task == "fail" or every_second:
            raise RuntimeError("the machine does not start")
        if task == "slow" and self.n_steps_done:
            time.sleep(SLOW_S)
        if task == "block":
            time.sleep(1000)
        return self.script.begin({"task": task}, None)

    def step(self, action: Any) -> Any:
        word = action if isinstance(action, str) else None
        if word == "fail":
            raise RuntimeError("the machine broke")
        if word == "report":
            return EnvTimestep(None, None, True, {"abnormal": True})
        if word == "block":
            time.sleep(1000)
        if word == "slow":
            time.sleep(SLOW_S)
        obs, reward, done, _, info = self.script.act(0)
        self.n_steps_done += 1
        return EnvTimestep(obs, np.array([reward], np.float32), done, info)

    def close(self) -> None:
        self.script.shut()

    def user_defined(self) -> str:
        return "a method of one's own"


def tasks(task: str, **others: str) -> dict[int, dict[str, str]]:
    """Return reset params: one task for all; others by env, as `env_0="fail"`."""
    return {i: {"task": others.get(f"env_{i}", task)} for i in range(N_ENVS)}


def make(world: World, setup: Setup, **cfg: Any) -> Any:
    script = cfg.pop("script", {})
    defaults = {"check_actions": False, "retry_waiting_time": 0.01, "close_timeout": 0.2}
    return world.make(
        setup, N_ENVS, env=Machine, script=script, **{"launch": False, **defaults, **cfg}
    )


def work(env_ids: Any = range(N_ENVS)) -> dict[int, Any]:
    """Return an action of DI-engine's kind for each of some envs."""
    return {i: np.full(4, 0.1 * i, np.float32) for i in env_ids}


def some_of(ready: Any) -> Iterator[dict[int, Any]]:
    """Yield actions for some of the ready envs, more or fewer each time, but never for none."""
    rng = np.random.default_rng(5)
    while True:
        ids = [i for i in ready() if rng.random() < 0.6] or [*ready()][:1]
        yield work(ids)


# -- launching and running ------------------------------------------------------------------------


@every_manager
def test_launch_with_reset_params(world: World, setup: Setup) -> None:
    manager = make(world, setup)
    assert manager.closed
    manager.seed([314] * N_ENVS)
    manager.launch(reset_param=tasks("drill"))
    assert all(state is EnvState.RUN for state in manager.env_states.values())
    assert manager.given_seed == [314] * N_ENVS
    assert manager.task == ["drill"] * N_ENVS


@every_manager
def test_config_is_in_force(world: World, setup: Setup) -> None:
    cfg = {"max_retry": 5, "reset_timeout": 10, "step_timeout": 8, "connect_timeout": 9.5}
    manager = make(world, setup, **cfg)
    assert {key: manager.cfg[key] for key in cfg} == cfg


@every_manager
def test_attributes_are_lists(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    assert manager.name == ["machine 0", "machine 1", "machine 2"]
    assert len(set(manager.unique)) == N_ENVS
    with pytest.raises(AttributeError):
        _ = manager._name


@every_manager
def test_unknown_names_and_methods(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    with pytest.raises(AttributeError):
        _ = manager.xxx
    with pytest.raises(RuntimeError):
        manager.user_defined()
    assert manager.env_ref.user_defined() == "a method of one's own"
    assert manager.call("user_defined") == ["a method of one's own"] * N_ENVS


@every_manager
def test_run_until_done(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, episode_num=2)
    n_episodes, n_timesteps = [0] * N_ENVS, 0
    for actions in some_of(lambda: manager.ready_obs):
        timesteps = manager.step(actions)
        assert len(timesteps) >= 1
        if setup.gathers_all:
            assert timesteps.keys() == actions.keys()
        n_timesteps += len(timesteps)
        for i, timestep in timesteps.items():
            n_episodes[i] += timestep.done
        while not manager.ready_env and manager.stats()["outstanding"]:
            for i, timestep in manager.recv().items():
                n_timesteps += 1
                n_episodes[i] += timestep.done
        if manager.done:
            break
    assert n_episodes == [2] * N_ENVS
    assert manager.n_steps_done == [6] * N_ENVS
    assert n_timesteps == 6 * N_ENVS
    assert all(state is EnvState.DONE for state in manager.env_states.values())


@every_manager
def test_close(world: World, setup: Setup) -> None:
    manager = make(world, setup)
    for refused in (lambda: manager.reset(tasks("drill")), lambda: manager.step(work())):
        with pytest.raises(RuntimeError, match="launch"):
            refused()
    manager.launch()
    step_all(manager, work())
    manager.close()
    assert manager.closed
    assert all(state is EnvState.VOID for state in manager.env_states.values())
    assert [len(world.noted(i, "close")) for i in range(N_ENVS)] == [1] * N_ENVS
    for refused in (manager.reset, lambda: manager.step(work())):
        with pytest.raises(RuntimeError, match="closed"):
            refused()


@every_manager
def test_close_with_a_limit(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    manager.close(1)
    assert manager.closed
    assert [len(world.noted(i, "close")) for i in range(N_ENVS)] == [1] * N_ENVS


# -- errors ---------------------------------------------------------------------------------------


@every_manager
def test_launch_error_then_launch(world: World, setup: Setup) -> None:
    manager = make(world, setup)
    with pytest.raises(RuntimeError, match="does not start"):
        manager.launch(reset_param=tasks("fail"))
    assert manager.closed
    manager.launch(reset_param=tasks("drill"))
    assert not manager.closed
    assert len(step_all(manager, work())) == N_ENVS


@every_manager
def test_error_once_with_reset(world: World, setup: Setup) -> None:
    manager = make(world, setup, max_retry=2, retry_type="reset")
    manager.launch(reset_param=tasks("drill"))
    step_all(manager, work())
    before = manager.unique
    troubled = tasks("drill", env_0="fail every second time")
    for _ in range(3):
        manager.reset(troubled)
        assert len(manager.ready_obs) == N_ENVS
    assert not manager.closed
    assert manager.unique == before
    assert manager.stats()["reset_retries"] >= 1


@every_manager
def test_error_once_with_renew(world: World, setup: Setup) -> None:
    manager = make(world, setup, max_retry=2, retry_type="renew")
    manager.launch(reset_param=tasks("drill"))
    before = manager.unique
    troubled = tasks("drill", env_0="fail every second time")
    manager.reset(troubled)
    manager.reset(troubled)
    assert not manager.closed
    after = manager.unique
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    obs = manager.ready_obs
    assert [seen(o)[:2] for o in obs.values()] == [(0, 1), (1, 0), (2, 0)]


@every_manager
def test_abnormal_step(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    timesteps = step_all(manager, {**work(), 0: "report"})
    assert timesteps[0].info["abnormal"]
    assert timesteps[0].done
    assert all("abnormal" not in timesteps[i].info for i in (1, 2))
    assert len(ready_all(manager)) == N_ENVS
    assert all(state is EnvState.RUN for state in manager.env_states.values())
    step_all(manager, {**work(), 0: "report"})
    manager.reset({0: {"task": "drill"}})
    assert manager.env_states[0] is EnvState.RUN
    assert len(step_all(manager, work())) == N_ENVS


@every_manager
def test_step_error(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, auto_reset=False)
    timesteps = step_all(manager, {**work(), 0: "fail"})
    assert timesteps[0].info["abnormal"]
    assert isinstance(timesteps[0].info["error"], RuntimeError)
    assert "the machine broke" in str(timesteps[0].info["error"])
    assert manager.env_states[0] is not EnvState.RUN
    assert all(manager.env_states[i] is EnvState.RUN for i in (1, 2))
    manager.reset(tasks("drill"))
    assert len(manager.ready_obs) == N_ENVS
    assert len(step_all(manager, work())) == N_ENVS


@every_manager
def test_step_error_raised(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, on_failure="raise")
    step_all(manager, work())
    with pytest.raises(RuntimeError, match="the machine broke"):
        step_all(manager, {**work(), 0: "fail"})
    assert manager.closed
    for refused in (manager.reset, lambda: manager.step(work())):
        with pytest.raises(RuntimeError, match="closed"):
            refused()
    manager.launch()
    assert len(step_all(manager, work())) == N_ENVS


# -- envs that block ------------------------------------------------------------------------------


@every_manager
def test_block_in_launch(world: World, setup: Setup) -> None:
    manager = make(world, setup, max_retry=1, reset_timeout=LIMIT_S)
    began = time.monotonic()
    with Raises(RuntimeError, "reset_timeout", f"{LIMIT_S:g} s"):
        manager.launch(reset_param=tasks("block"))
    assert time.monotonic() - began < 15.0
    assert manager.closed
    manager.launch(reset_param=tasks("drill", env_0="slow"))
    assert len(step_all(manager, work())) == N_ENVS
    manager.reset()
    assert len(manager.ready_obs) == N_ENVS
    assert manager.stats()["failures"] == 0


@every_manager
def test_block_in_reset(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, reset_timeout=LIMIT_S, max_failures=1)
    with Raises(FailuresExhaustedError, "env 0", "reset_timeout") as raised:
        manager.reset(tasks("drill", env_0="block"))
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value.failure, TimeoutError)
    assert not manager.closed
    assert [*ready_all(manager, [1, 2])] == [1, 2]
    manager.reset(tasks("drill"))
    assert len(step_all(manager, work())) == N_ENVS


@every_manager
def test_block_in_step(world: World, setup: Setup) -> None:
    manager = make(world, setup, step_timeout=LIMIT_S, auto_reset=False, launch=True)
    timesteps = step_all(manager, {**work(), 0: "block"})
    error = timesteps[0].info["error"]
    assert isinstance(error, TimeoutError)
    assert isinstance(error, EnvTimeout)
    assert error.limit_s == LIMIT_S
    assert all(manager.env_states[i] is EnvState.RUN for i in (1, 2))
    manager.reset(tasks("drill"))
    timesteps = step_all(manager, {**work(), 0: "slow"})
    assert not any("abnormal" in t.info for t in timesteps.values())
    manager.close()
    manager.launch()
    assert len(step_all(manager, work())) == N_ENVS


@every_manager
def test_block_in_step_raised(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, step_timeout=LIMIT_S, on_failure="raise")
    with pytest.raises(TimeoutError):
        step_all(manager, {**work(), 0: "block"})
    assert manager.closed
    manager.launch(reset_param=tasks("drill"))
    timesteps = step_all(manager, {**work(), 0: "slow"})
    assert len(timesteps) == N_ENVS


@every_manager
def test_block_in_step_and_in_reset(world: World, setup: Setup) -> None:
    limits = {"step_timeout": LIMIT_S, "reset_timeout": LIMIT_S, "max_failures": 1}
    manager = make(world, setup, **limits)
    manager.launch(reset_param=tasks("drill"))
    manager.send({0: "block"})  # and the repair is to block as well
    manager.reset({1: {"task": "drill"}})
    assert len(manager.recv(min_ready=1)) == 1
    with pytest.raises(RuntimeError):
        manager.reset({0: {"task": "block"}})
    assert [*ready_all(manager, [1, 2])] == [1, 2]


# -- resets ---------------------------------------------------------------------------------------


@every_manager
def test_reset_all_when_all_wait(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, auto_reset=False, episode_num=2)
    n_episodes = dict.fromkeys(range(N_ENVS), 0)
    while not manager.done:
        if all(state is EnvState.NEED_RESET for state in manager.env_states.values()):
            manager.reset()
        actions = work(manager.ready_env[:2]) if manager.ready_env else {}
        for i, timestep in manager.step(actions).items():
            n_episodes[i] += timestep.done
    assert n_episodes == {0: 2, 1: 2, 2: 2}
    assert all(state is EnvState.DONE for state in manager.env_states.values())


@pytest.mark.parametrize("params", [None, {}], ids=str)
@every_manager
def test_reset_one_by_one(world: World, setup: Setup, params: Any) -> None:
    manager = make(world, setup, launch=True, auto_reset=False, episode_num=2)
    n_episodes = dict.fromkeys(range(N_ENVS), 0)
    while not manager.done:
        actions = work(manager.ready_env) if manager.ready_env else {}
        for i, timestep in manager.step(actions).items():
            n_episodes[i] += timestep.done
            if timestep.done and not manager.env_state_done(i):
                manager.reset({i: params})
    assert n_episodes == {0: 2, 1: 2, 2: 2}


@every_manager
def test_auto_reset_brings_all_back(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, episode_num=1000)
    n_done = 0
    for _ in range(10):
        timesteps = step_all(manager, work())
        n_done += sum(t.done for t in timesteps.values())
        assert len(ready_all(manager)) == N_ENVS
        assert len(manager.ready_obs_id) == N_ENVS
    assert n_done == 9  # three episodes of three steps in ten steps of each env
    assert all(state is EnvState.RUN for state in manager.env_states.values())


# -- the rest -------------------------------------------------------------------------------------


@every_manager
def test_spaces_and_metadata(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    assert isinstance(manager.observation_space, Space)
    assert isinstance(manager.action_space, Space)
    assert isinstance(manager.reward_space, Space)
    assert manager.metadata == "a string, of all things"
    actions = manager.random_action()
    assert all(manager.action_space.contains(action) for action in actions.values())


@every_manager
def test_without_blocking(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, auto_reset=False, episode_num=1)
    n_timesteps = 0
    manager.send(work())
    while not manager.done:
        for i, timestep in manager.recv(min_ready=1).items():
            n_timesteps += 1
            if not timestep.done:
                manager.send(work([i]))
    assert n_timesteps == 3 * N_ENVS
    manager.close()
    assert manager.closed


@process_kinds
def test_views_and_copies(world: World, setup: Setup) -> None:
    for copies in (True, False):
        manager = make(world, setup, launch=True, copy_on_get=copies, shared_memory=True)
        obs = manager.ready_obs[0]
        contents = obs.copy()
        for _ in range(2):
            step_all(manager, work([0]))
        assert np.array_equal(obs, contents)
        step_all(manager, work([0]))  # the end of the episode, and with it the next one's first
        ready_all(manager, [0])  # a `reset` joins one that is under way
        manager.reset()
        manager.reset()  # the slot of a reset is used again by the third one after it
        assert np.array_equal(obs, contents) is copies
        manager.close()


@every_manager
def test_actions_of_any_kind(world: World, setup: Setup) -> None:
    loose = make(world, setup, launch=True)
    for action in ("anything", np.zeros(7), {"a": 1}, None):
        assert not step_all(loose, {0: action})[0].info.get("abnormal")
        ready_all(loose)
    checked = make(world, setup, launch=True, check_actions=True)
    for action in ("anything", np.zeros(7)):
        with pytest.raises(ValueError, match="refused"):
            checked.step({0: action})


BASE_V2 = Setup("base_v2")
SYNC_V2 = Setup("subprocess_v2", "fork")


@pytest.mark.v2
@over(BASE_V2, SYNC_V2)
def test_v2_loop(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True, episode_num=2, reset_inplace=True)
    n_episodes = dict.fromkeys(range(N_ENVS), 0)
    while not manager.done:
        obs, ids = manager.ready_obs, manager.ready_obs_id
        assert [int(row[0]) for row in obs] == ids
        timesteps = manager.step([np.zeros(4, np.float32)] * len(ids))
        assert [t.env_id.item() for t in timesteps] == ids
        for timestep in timesteps:
            n_episodes[timestep.env_id.item()] += int(timestep.done)
    assert n_episodes == {0: 2, 1: 2, 2: 2}


@pytest.mark.v2
@over(BASE_V2, SYNC_V2)
def test_v2_abnormal_step(world: World, setup: Setup) -> None:
    manager = make(world, setup, launch=True)
    assert len(manager.ready_obs) == N_ENVS
    timesteps = manager.step(["report", *[np.zeros(4, np.float32)] * 2])
    assert timesteps[0].info.abnormal
    assert all("abnormal" not in t.info for t in timesteps[1:])
    manager.get_attr("name")
    assert len(manager.ready_obs) == N_ENVS
    assert all(state is EnvState.RUN for state in manager.env_states.values())
