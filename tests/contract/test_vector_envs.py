"""Vector envs of gymnasium's kind as batched envs: each row an env of the manager."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from envmgr import GymVectorEnvManager, as_gymnasium, create_env_manager, make
from envmgr.env import BatchedEnvSpec, VectorBatch
from envmgr.errors import (
    ConfigError,
    EnvNotReadyError,
    LaunchError,
    NothingReadyError,
    SnapshotError,
)
from envmgr.wire.info_columns import columns_of
from envmgr.wire.info_forms import RecordBatch
from tests.contract.harness import ALL_BLOCK, INLINE, SOME_MESSAGE, Setup, over, ready_all
from tests.values import same_values
from tests.walkers import MODES, OneGenerator, Walker, episodes_of, vector_of

SIZE, ENV_NUM = 3, 6


def policy(obs: Any) -> int:
    numbers = obs["all"] if isinstance(obs, dict) else obs
    return int(sum(numbers)) % 4


def singles(**cfg: Any) -> dict[int, Any]:
    """Return the episodes of as many envs, each one of its own."""
    with create_env_manager({"type": "base", "seed": 9, **cfg}, env_fn=[Walker] * ENV_NUM) as m:
        return episodes_of(m, 4, policy)


@over(INLINE, ALL_BLOCK, SOME_MESSAGE)
def test_rows_have_the_episodes_that_single_envs_have(setup: Setup) -> None:
    expected = singles()
    for mode in MODES:
        spec = BatchedEnvSpec(partial(vector_of, SIZE, mode), SIZE)
        with create_env_manager({**setup.cfg, "seed": 9}, env_fn=[spec] * ENV_NUM) as manager:
            assert episodes_of(manager, 4, policy) == expected
            assert manager.stats()["failures"] == 0


def test_views_and_trees_and_limits_make_no_difference() -> None:
    expected = singles()
    cases: list[dict[str, Any]] = [
        {"copy_on_get": False},
        {"step_timeout": 60, "reset_timeout": 60},
    ]
    for cfg in cases:
        spec = BatchedEnvSpec(partial(vector_of, ENV_NUM, "NextStep"), ENV_NUM)
        cfg = {"type": "base", "seed": 9, **cfg}
        with create_env_manager(cfg, env_fn=[spec] * ENV_NUM) as manager:
            assert episodes_of(manager, 4, policy) == expected
    for mode in MODES:
        spec = BatchedEnvSpec(partial(vector_of, ENV_NUM, mode, nested=True), ENV_NUM)
        with create_env_manager({"type": "base", "seed": 9}, env_fn=[spec] * ENV_NUM) as manager:
            found = episodes_of(manager, 4, policy)
        as_single = {
            i: [[(step[0]["all"], *step[1:]) for step in episode] for episode in episodes]
            for i, episodes in found.items()
        }
        assert as_single == expected


def test_a_view_of_a_row_that_misses_a_step_stays_through_its_next_two() -> None:
    spec = BatchedEnvSpec(partial(OneGenerator, SIZE), SIZE)
    cfg = {"type": "base", "seed": 9, "copy_on_get": False}
    with create_env_manager(cfg, env_fn=[spec] * SIZE) as manager:
        view = manager.step({0: 3, 1: 0, 2: 0})[0].obs
        terminal = view.copy()
        n_steps = 0
        while n_steps < 2:
            timesteps = manager.step(dict.fromkeys(manager.ready_obs, 0))
            n_steps += 0 in timesteps
            assert np.array_equal(view, terminal)


def test_what_resets_all_rows_together() -> None:
    spec = BatchedEnvSpec(partial(OneGenerator, SIZE), SIZE)
    with create_env_manager({"type": "base", "seed": 9}, env_fn=[spec] * SIZE) as manager:
        assert manager.get_attr("calls")[0] == [("reset", 9)]
        manager.step({0: 3, 1: 0, 2: 3})
        assert manager.ready_obs_id == [1]
        with pytest.raises(NothingReadyError, match=r"envs \[0, 2\] begin with the next step"):
            manager.ready_arrays([0, 1, 2])
        with pytest.raises(EnvNotReadyError, match=r"while envs \[1\] are in an episode"):
            manager.reset({0: None})
        assert manager.step({1: 0})[1].obs[2] == 2
        assert {i: obs[2] for i, obs in manager.ready_obs.items()} == {0: 0, 1: 2, 2: 0}
        # All of them at once: there is no next step.
        manager.step(dict.fromkeys(range(SIZE), 3))
        assert [obs[2] for obs in manager.ready_obs.values()] == [0, 0, 0]
        with pytest.raises(ConfigError, match="the same params"):
            manager.reset({0: {"a": 1}, 1: None, 2: None})
        # Those that are reset by hand take the one with them that waits for their step.
        manager.step({0: 3, 1: 0, 2: 0})
        manager.reset({1: None, 2: None})
        assert [obs[2] for obs in manager.ready_arrays([0, 1, 2]).obs] == [0, 0, 0]
        manager.seed([5, 7, 1])
        manager.reset()
        assert manager.get_attr("calls")[0][-1] == ("reset", 5)
        with pytest.raises(EnvNotReadyError, match="sent no action"):
            manager.step({0: 1})


def test_a_row_waits_for_the_next_step_whatever_is_reset_by_hand() -> None:
    spec = BatchedEnvSpec(partial(vector_of, SIZE, "NextStep"), SIZE)
    with create_env_manager({"type": "base", "seed": 9}, env_fn=[spec] * SIZE) as manager:
        while len(manager.ready_obs) == SIZE:
            manager.step(dict.fromkeys(manager.ready_obs, 0))
        left = manager.ready_obs_id
        for env_id in left:
            manager.reset({env_id: None})
            assert manager.ready_obs_id == left
        manager.step(dict.fromkeys(left, 0))
        assert manager.ready_obs_id == [0, 1, 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("all_rows", [True, False])
@over(INLINE, ALL_BLOCK)
def test_a_row_that_waits_for_the_next_step_can_be_reset_by_hand_and_asked_nothing(
    setup: Setup, all_rows: bool
) -> None:
    spec = BatchedEnvSpec(partial(vector_of, SIZE, "NextStep"), SIZE)
    with create_env_manager({**setup.cfg, "seed": 9}, env_fn=[spec] * SIZE) as manager:
        while len(manager.ready_obs) == SIZE:
            manager.step(dict.fromkeys(manager.ready_obs, 0))
        waiting = [i for i in range(SIZE) if i not in manager.ready_obs_id]
        with pytest.raises(EnvNotReadyError, match="next step of the other rows"):
            manager.get_attr("options")
        with pytest.raises(SnapshotError, match="rows of batched envs"):
            manager.snapshot()
        manager.reset(None if all_rows else dict.fromkeys(waiting))
        assert manager.ready_obs_id == [0, 1, 2]
        assert len(manager.get_attr("options")) == SIZE
        timesteps = manager.step(dict.fromkeys(range(SIZE), 0))
        assert not any(t.info.get("abnormal") for t in timesteps.values())


@over(INLINE, ALL_BLOCK)
def test_resets_by_hand_of_rows_that_can_be_reset_alone(setup: Setup) -> None:
    spec = BatchedEnvSpec(partial(vector_of, SIZE, "NextStep"), SIZE)
    cfg = {**setup.cfg, "seed": 9, "auto_reset": False}
    with create_env_manager(cfg, env_fn=[spec] * ENV_NUM) as manager:
        while manager.env_states[0].name == "RUN":
            manager.step(dict.fromkeys(manager.ready_obs, 0))
        before = manager.ready_obs
        manager.reset({0: {"longer": 100}})
        assert manager.ready_obs[0][0] > 100
        assert all(np.array_equal(manager.ready_obs[i], obs) for i, obs in before.items())
        assert manager.get_attr("options")[0] == {"longer": 100}
        manager.set_attr("colour", [*"abcdef"])
        assert manager.get_attr("colour") == [*"abcdef"]
        if setup.has_processes:
            os.kill(manager.stats()["workers"][0]["pid"], signal.SIGKILL)
        timesteps = manager.step(dict.fromkeys(manager.ready_obs, 0))
        lost = [i for i, t in timesteps.items() if t.info.get("abnormal")]
        assert all(i < SIZE for i in lost)


# -- the kind that runs one inline ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "env_fn"),
    [
        ({}, [Walker] * ENV_NUM),
        ({"gym_vector": {"autoreset_mode": "SameStep"}}, [Walker] * ENV_NUM),
        ({"gym_vector": {"autoreset_mode": "NextStep"}}, [Walker] * ENV_NUM),
        ({"gym_vector": {"autoreset_mode": "NextStep"}, "reset_inplace": True}, [Walker] * ENV_NUM),
        ({"env_num": ENV_NUM}, [partial(vector_of, ENV_NUM, "NextStep")]),
        ({}, [BatchedEnvSpec(partial(vector_of, ENV_NUM, "SameStep"), ENV_NUM)] * ENV_NUM),
    ],
)
def test_gym_vector(cfg: dict[str, Any], env_fn: list[Any]) -> None:
    manager = create_env_manager({"type": "gym_vector", "seed": 9, **cfg}, env_fn=env_fn)
    assert isinstance(manager, GymVectorEnvManager)
    with manager:
        assert episodes_of(manager, 4, policy) == singles()
        assert isinstance(manager.env_ref.batched, VectorBatch)


def test_gym_vector_takes_the_registered_form() -> None:
    with make("CartPole-v1", 4, type="gym_vector", seed=3) as manager:
        assert type(manager.env_ref.batched.env).__name__ == "CartPoleVectorEnv"
        batch = manager.ready_arrays()
        reference = gymnasium.make_vec("CartPole-v1", 4)
        assert np.array_equal(batch.obs, reference.reset(seed=3)[0])
        for actions in np.random.default_rng(0).integers(0, 2, (8, 4)):  # no episode is so short
            manager.send_arrays(batch.env_ids, actions)
            found, expected = manager.recv_arrays(), reference.step(actions)
            assert np.array_equal(found.obs, expected[0])
            assert found.reward.tolist() == expected[1].tolist()


class ClosedAtLast(Walker):
    """Cannot be used any more when it was closed."""

    is_closed = False

    def step(self, action: Any) -> Any:
        assert not self.is_closed
        return super().step(action)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class LooksFirst(gymnasium.vector.SyncVectorEnv):
    """Builds an env of its own for a look, and closes it, as gymnasium's `AsyncVectorEnv` does."""

    def __init__(self, env_fns: Any, **kwargs: Any) -> None:
        env_fns[0]().close()
        super().__init__(env_fns, **kwargs)


@pytest.mark.parametrize("env_num", [1, 2])
def test_gym_vector_of_any_number_of_envs_runs_them_as_it_is_told(
    env_num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", LooksFirst)
    mode = {"vectorization_mode": "async"}
    with make(ClosedAtLast, env_num, type="gym_vector", gym_vector=mode) as manager:
        assert type(manager.env_ref.batched.env) is LooksFirst
        for _ in range(3):
            timesteps = manager.step(dict.fromkeys(manager.ready_obs, 0))
            assert not any(t.info.get("abnormal") for t in timesteps.values())
    for told, name in (
        ({}, "CartPoleVectorEnv"),
        ({"vectorization_mode": "vector_entry_point"}, "CartPoleVectorEnv"),
        ({"vectorization_mode": "sync"}, "SyncVectorEnv"),
    ):
        with make("CartPole-v1", env_num, type="gym_vector", gym_vector=told) as manager:
            assert type(manager.env_ref.batched.env).__name__ == name


@pytest.mark.parametrize(
    ("mode", "inside"), [("NextStep", "NextStep"), ("SameStep", None), ("SameStep", "SameStep")]
)
def test_gymnasiums_adapter_goes_with_the_mode(mode: str, inside: str | None) -> None:
    """What goes round through envmgr is as it was: the env ends and begins as it did alone."""
    cfg = {"type": "gym_vector", "gym_vector": {"autoreset_mode": inside}}
    manager = create_env_manager(cfg, env_fn=[Walker] * SIZE)
    alone = vector_of(SIZE, mode)
    envs = as_gymnasium(manager, autoreset_mode=mode)
    assert np.array_equal(envs.reset(seed=4)[0], alone.reset(seed=4)[0])
    for actions in np.random.default_rng(1).integers(0, 4, (40, SIZE)):
        found, expected = envs.step(actions), alone.step(actions)
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert np.array_equal(one, other)
    envs.close()


def test_what_takes_one_seed_goes_round_through_envmgr_as_it_was() -> None:
    cfg = {"type": "gym_vector", "env_num": SIZE}
    envs = as_gymnasium(create_env_manager(cfg, env_fn=[partial(OneGenerator, SIZE)]))
    alone = OneGenerator(SIZE)
    assert np.array_equal(envs.reset(seed=4)[0], alone.reset(seed=4)[0])
    n_cut_short = 0
    for actions in np.random.default_rng(1).integers(0, 4, (60, SIZE)):
        found, expected = envs.step(actions), alone.step(actions)
        n_cut_short += int(expected[3].sum())
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert np.array_equal(one, other)
    assert n_cut_short
    envs.close()


def not_an_env() -> Any:
    return {}


@pytest.mark.parametrize(
    ("cfg", "env_fn", "error", "text"),
    [
        ({"env_num": 4}, [partial(vector_of, 3, "SameStep")], LaunchError, "3 rows, but its size"),
        ({"env_num": 4}, [partial(OneGenerator, 4, "Now")], LaunchError, "says 'Now'"),
        ({}, [partial(vector_of, 2, "SameStep")] * 2, LaunchError, "has one for each row"),
        ({}, [not_an_env] * 2, LaunchError, "drives gymnasium envs"),
        ({"env_num": 2, "reset_inplace": True}, [partial(OneGenerator, 2)], LaunchError, "at once"),
        ({"env_num": 2, "seed": 1}, [partial(OneGenerator, 2)], LaunchError, "dynamic_seed"),
        (
            {"gym_vector": {"vectorization_mode": "vector_entry_point"}},
            [Walker] * 2,
            ConfigError,
            "has a vector form",
        ),
        (
            {"gym_vector": {"vectorization_mode": "sync", "vector_kwargs": {"shared": 1}}},
            [Walker] * 2,
            ConfigError,
            "'shared', which SyncVectorEnv does not take",
        ),
        ({"gym_vector": {"mode": 1}}, [Walker] * 2, ConfigError, "unknown key"),
        ({"num_workers": 2}, [Walker] * 2, ConfigError, "Give 1 to 1"),
    ],
)
def test_gym_vector_refuses(
    cfg: dict[str, Any], env_fn: list[Any], error: type[Exception], text: str
) -> None:
    def run() -> None:
        manager = create_env_manager({"type": "gym_vector", **cfg}, env_fn=env_fn)
        if "dynamic" in text:
            manager.seed(1, dynamic_seed=True)
        with manager:
            pass

    with pytest.raises(error, match=text):
        run()


WIDE = 30
"""So many rows that their infos go as columns."""


class TellingVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Its infos say how many steps it has taken; every second row has one key more."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self) -> None:
        self.num_envs, self.n = WIDE, 0
        self.single_observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, WIDE)
        self.action_space = batch_space(self.single_action_space, WIDE)
        # The arrays of all infos: each step writes them anew.
        self.told: dict[str, Any] = {
            "n": np.zeros(WIDE, np.int32),
            "x": np.zeros(WIDE, np.float32),
            "_x": np.ones(WIDE, bool),
            "odd": np.zeros((WIDE, 2), np.int16),
            "_odd": np.arange(WIDE) % 2 == 1,
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin."""
        return np.zeros((WIDE, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        """Count."""
        self.n += 1
        self.told["n"][:] = self.n
        self.told["x"][:] = self.n / 3 + np.arange(WIDE)
        self.told["odd"][:] = self.n
        no = np.zeros(WIDE, bool)
        return np.zeros((WIDE, 2), np.float32), np.zeros(WIDE), no, no, self.told


def told_to(row: int, n: int) -> dict[str, Any]:
    info: dict[str, Any] = {"n": n, "x": float(np.float32(n / 3 + row))}
    if row % 2:
        info["odd"] = np.full(2, n, np.int16)
    return {**info, "terminated": False, "truncated": False}


@over(INLINE, ALL_BLOCK, SOME_MESSAGE)
def test_infos_go_as_columns_and_are_those_of_the_rows(setup: Setup) -> None:
    factory = partial(vector_batch, TellingVector)
    spec = BatchedEnvSpec(factory, WIDE, partial_steps=True)
    n_records, every = 0, list(range(WIDE))
    with create_env_manager(dict(setup.cfg), env_fn=[spec] * WIDE) as manager:
        for n in range(1, 30):
            ready_all(manager)
            manager.send_arrays(every, np.zeros(WIDE, np.int64))
            batch = manager.recv_arrays(min_ready=WIDE)
            read = getattr(getattr(batch.infos, "_remarks", None), "infos", None)
            n_records += type(read) is RecordBatch
            infos = [told_to(i, n) for i in batch.env_ids.tolist()]
            assert same_values(batch.info_columns, columns_of(infos))
            assert same_values(list(batch.infos), infos)
        goes_as_columns = setup.kind == "base" or setup.shared_memory
        assert (n_records > 10) is goes_as_columns
        # What nobody has asked for yet stays as it is while others are stepped.
        first, others = every[::3], sorted({*every} - {*every[::3]})
        manager.send(dict.fromkeys(first, 0))
        manager.get_attr("observation_space", env_ids=others[:1])  # that step comes first, mostly
        manager.send(dict.fromkeys(others, 0))
        timesteps: dict[int, Any] = {}
        while len(timesteps) < WIDE:
            timesteps.update(manager.recv())
        # A worker steps partly when it has seen to all that has come: it may find both together,
        # with the call between them, and then it is one step.
        later = timesteps[others[0]].info["n"]
        assert later == 31 or (setup.kind != "base" and later == 30)
        expected = {i: told_to(i, 30 if i in first else later) for i in every}
        assert all(same_values(timesteps[i].info, expected[i]) for i in every)


def vector_batch(make_env: Any) -> VectorBatch:
    return VectorBatch(make_env())
