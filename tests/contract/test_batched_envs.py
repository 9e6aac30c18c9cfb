"""Batched envs: each row is an env of the manager, and a crash takes all rows of its batch."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest

from envmgr import create_env_manager
from envmgr.env import BatchedEnvSpec
from envmgr.errors import ConfigError, EnvAttributeError, EnvNotReadyError, ManagerClosedError
from tests.batched import Do, ScriptedBatch
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_MESSAGE_SHARED,
    DEFAULT,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    THREADS,
    THREADS_MESSAGE_SHARED,
    Setup,
    over,
    step_all,
)

SIZE, N_BATCHES = 3, 2
ENV_NUM = SIZE * N_BATCHES


def batched(setup: Setup, *, partial_steps: bool, **cfg: Any) -> Any:
    """Return a manager of two batched envs of three rows."""
    spec = BatchedEnvSpec(partial(ScriptedBatch, SIZE), SIZE, partial_steps)
    return create_env_manager({"seed": 50, **setup.cfg, **cfg}, env_fn=[spec] * ENV_NUM)


def ready(manager: Any, n: int = ENV_NUM) -> dict[int, list[float]]:
    """Return what so many envs show when they are ready."""
    obs, env_ids = manager.ready_arrays(list(range(n))), range(n)
    return {i: obs.obs[i].tolist() for i in env_ids}


def step(manager: Any, *actions: int) -> dict[int, list[float]]:
    """Step all envs; return what they observed of it."""
    timesteps = step_all(manager, dict(enumerate(map(int, actions))))  # a `Do` goes by message
    fine = [t for t in timesteps.values() if not t.info.get("abnormal")]
    assert [t.reward for t in fine] == [t.obs[3] for t in fine]
    return {i: t.obs[2:].tolist() for i, t in timesteps.items()}


@over(INLINE, THREADS, DEFAULT, ALL_MESSAGE_SHARED, SOME_BLOCK)
def test_rows_that_are_stepped_together(setup: Setup) -> None:
    with batched(setup, partial_steps=False) as manager:
        assert ready(manager) == {i: [i % SIZE, 50 + i, 1, 0, 0] for i in range(ENV_NUM)}
        assert manager.stats()["num_workers"] == (setup.num_workers or N_BATCHES)
        with pytest.raises(EnvNotReadyError, match=r"envs \[2\] were sent no action"):
            manager.step({0: 1, 1: 1, 3: 1, 4: 1, 5: 1})
        # Some rows end their episodes, in one batch all of them.
        assert step(manager, 1, Do.END, 3, *[Do.END] * 3) == {
            i: [1, 1, action] for i, action in enumerate([1, Do.END, 3, *[Do.END] * 3])
        }
        shown = {i: [i % SIZE, 50 + i, 2, 0, 0] for i in (1, 3, 4, 5)}
        unchanged = {i: [i, 50 + i, 1, 1, i + 1] for i in (0, 2)}
        assert ready(manager) == dict(sorted((shown | unchanged).items()))
        assert manager.ready_info[4] == {"first_of": 1}
        _lose_the_second_batch(setup, manager)
        _reach_rows(manager)


class Silent(ScriptedBatch):
    """Begins episodes without infos: all that it does goes in columns."""

    def reset(self, *arguments: Any) -> Any:
        return super().reset(*arguments)[0], None


@over(INLINE, THREADS_MESSAGE_SHARED, ALL_BLOCK)
def test_what_a_step_gave_is_read_before_resets_that_use_the_arrays_again(setup: Setup) -> None:
    spec = BatchedEnvSpec(partial(Silent, SIZE), SIZE)
    with create_env_manager(setup.cfg, env_fn=[spec] * SIZE) as manager:
        for actions in ([1, 1, 1], [1, Do.END, 1], [1, 1, 1], [Do.END] * 3, [1, 1, 1]):
            ready(manager, SIZE)
            step(manager, *actions)


def _lose_the_second_batch(setup: Setup, manager: Any) -> None:
    crash = Do.KILL if setup.has_processes else Do.RAISE
    timesteps = step_all(manager, dict(enumerate([1, 1, 1, 1, crash, 1])))
    abnormal = [i for i, timestep in timesteps.items() if timestep.info.get("abnormal")]
    assert abnormal == [3, 4, 5]
    shown = ready(manager)
    assert [(row[0], row[2:]) for row in shown.values()][SIZE:] == [
        (i, [1, 0, 0]) for i in range(SIZE)
    ]
    figures = manager.stats()
    n_lost = (
        ENV_NUM if setup.num_workers == 1 else SIZE
    )  # the others were lost when they were ready
    assert (figures["failures"], figures["renewals"]) == (1, n_lost)
    assert len(step(manager, *[2] * ENV_NUM)) == ENV_NUM


def _reach_rows(manager: Any) -> None:
    assert manager.call("double", 2) == [[i % SIZE, 4] for i in range(ENV_NUM)]
    manager.set_attr("colour", [*"abcdef"])
    assert manager.get_attr("colour") == [*"abcdef"]
    with pytest.raises(Exception, match="its rows share one object"):
        manager.set_attr("size", 3)
    with pytest.raises(EnvAttributeError, match="nothing"):
        manager.get_attr("nothing")
    assert manager.env_ref.observation_space == ScriptedBatch.observation_space


@over(INLINE, THREADS_MESSAGE_SHARED, ALL_BLOCK, SOME_MESSAGE)
def test_rows_that_are_stepped_each(setup: Setup) -> None:
    with batched(setup, partial_steps=True, auto_reset=False, episode_num=2) as manager:
        ready(manager)
        for env_id, action in ((4, 1), (1, Do.END), (4, 2)):
            assert [*step_all(manager, {env_id: action})] == [env_id]
        assert manager.ready_obs_id == [0, 2, 3, 4, 5]
        manager.reset({1: None})
        expected = {i: [i % SIZE, 50 + i, 1, 0, 0] for i in range(ENV_NUM)}
        expected |= {1: [1, 51, 2, 0, 0], 4: [1, 54, 1, 2, 2]}
        assert ready(manager) == expected
        timesteps = step_all(manager, {1: Do.END, 2: Do.BAD_ROW, 3: Do.ABNORMAL, 5: 1})
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [
            False,
            True,
            True,
            False,
        ]
        states = {i: manager.env_states[i].name for i in range(ENV_NUM)}
        assert [states[i] for i in (1, 2, 3)] == ["DONE", "NEED_RESET", "NEED_RESET"]
        manager.reset({1: None, 2: None, 3: None})
        assert manager.ready_obs_id == list(range(ENV_NUM))
        assert manager.stats()["renewals"] == 0


def test_ctrl_c_inline_takes_the_batch_that_it_came_into() -> None:
    with batched(INLINE, partial_steps=False) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.step(dict(enumerate([1, Do.INTERRUPT, 1, 1, 1, 1])))
        timesteps = manager.step({})
        abnormal = [i for i, timestep in timesteps.items() if timestep.info.get("abnormal")]
        assert (len(timesteps), abnormal) == (ENV_NUM, [0, 1, 2])
        ready(manager)
        assert len(step(manager, *[1] * ENV_NUM)) == ENV_NUM
        assert manager.stats()["renewals"] == SIZE


@over(INLINE, INLINE._replace(shared_memory=False))
@pytest.mark.parametrize("action", [1, Do.END])
def test_who_closes_in_a_handler_is_told_by_the_step_that_it_came_into(
    setup: Setup, action: int
) -> None:
    class Signalling(ScriptedBatch):
        def step(self, rows: Any, actions: Any) -> Any:
            if Do.END in actions or 2 in actions:
                signal.raise_signal(signal.SIGUSR1)
            return super().step(rows, actions)

    spec = BatchedEnvSpec(partial(Signalling, SIZE), SIZE, partial_steps=False)
    with create_env_manager(setup.cfg, env_fn=[spec] * ENV_NUM) as manager:
        step(manager, *[1] * ENV_NUM)
        before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())
        try:
            with pytest.raises(ManagerClosedError):
                manager.step(dict(enumerate([2, *[action] * (ENV_NUM - 1)])))
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("cfg", "n_rows", "text"),
    [
        ({"spare_env_num": 1}, ENV_NUM, "spare_env_num is 1, but env_fn has batched envs"),
        ({"num_workers": "auto"}, ENV_NUM, "num_workers is auto, .* Give a number, 1 to 2"),
        ({"num_workers": 3}, ENV_NUM, "num_workers is 3, .* Give 1 to 2"),
        ({}, ENV_NUM - 1, "a batched env of 3 rows from env 3 on, but names it for 2 envs there"),
    ],
)
def test_what_batched_envs_cannot_do_is_refused(
    cfg: dict[str, Any], n_rows: int, text: str
) -> None:
    spec = BatchedEnvSpec(partial(ScriptedBatch, SIZE), SIZE)
    with pytest.raises(ConfigError, match=text):
        create_env_manager({"type": "subprocess", **cfg}, env_fn=[spec] * n_rows)
