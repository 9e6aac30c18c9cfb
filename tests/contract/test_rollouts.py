"""Rollouts from real managers: the same in every kind, whatever fails, and whatever interrupts."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr import BaseEnv, EnvTimestep, create_env_manager, make
from envmgr.collect import (
    EpisodeCollector,
    PolicyStep,
    RolloutBuffer,
    RolloutCollector,
    StepCollector,
    Trajectory,
    by_env,
)
from tests.faults.attacks import at_point
from tests.faults.interrupting import (
    Interrupted,
    lost_exceptions_are_no_errors,
    no_gc_callbacks,
    points_of,
)

N_ENVS, N_STEPS = 3, 50


class Counting(gymnasium.Env[Any, Any]):
    """Its observation is how many steps it has ever taken, and how many in this episode."""

    observation_space = Dict({"ever": Box(0, 1e9, (), np.float64), "now": Discrete(100)})
    action_space = Discrete(10**6)

    def __init__(self, fails_at: float = np.inf) -> None:
        self._ever = self._now = 0
        self._fails_at = fails_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._now = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert action == self._ever, "the action for another observation"
        self._ever += 1
        self._now += 1
        if self._ever == self._fails_at:
            raise RuntimeError("scripted")
        return self._obs(), float(self._ever), False, self._now == 7, {}

    def _obs(self) -> Any:
        return {"ever": np.array(self._ever, np.float64), "now": np.int64(self._now)}


class Agent:
    """Acts on what it sees, and counts."""

    def initial_state(self, n: int) -> Any:
        return np.zeros(n, np.int64)

    def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
        ever = obs["ever"] if isinstance(obs, dict) else obs[:, 2] > 0
        return PolicyStep(ever.astype(np.int64), {"value": self.value(obs, state)}, state + 1)

    def value(self, obs: Any, state: Any) -> Any:
        return state * 0.5


def columns_of(rollout: RolloutBuffer) -> list[Any]:
    found = [rollout.obs, rollout.actions, rollout.rewards, rollout.truncated, rollout.states]
    return [*map(np.copy, found), *rollout.gae(gamma=0.9)]


def test_every_kind_gives_the_same_rollouts() -> None:
    expected: list[Any] = []
    for kind, cfg in (
        ("base", {}),
        ("subprocess", {"num_workers": 1, "copy_on_get": "until_send"}),
        ("async_subprocess", {}),
    ):
        with make("CartPole-v1", env_num=N_ENVS, type=kind, seed=7, **cfg) as manager:
            collector = RolloutCollector(manager, Agent(), n_steps=N_STEPS)
            for k in range(2):
                columns = columns_of(collector.collect())
                expected = [*expected, columns] if kind == "base" else expected
                for column, same in zip(columns, expected[k], strict=True):
                    np.testing.assert_array_equal(column, same)
            assert manager.stats()["timesteps"] == collector.statistics.steps
            assert collector.statistics.episodes == manager.stats()["episodes"]


def test_a_failed_step_is_masked_and_the_others_are_as_ever() -> None:
    env_fn = [Counting, lambda: Counting(fails_at=20), Counting]
    with create_env_manager({"type": "subprocess", "num_workers": 1}, env_fn=env_fn) as manager:
        rollout = RolloutCollector(manager, Agent(), n_steps=N_STEPS).collect()
    ever, now = rollout.obs["ever"], rollout.obs["now"]
    assert np.argwhere(rollout.abnormal).tolist() == [[19, 1]]
    assert rollout.truncated[19, 1]
    assert not rollout.mask[19, 1]
    assert rollout.mask.sum() == rollout.mask.size - 1
    for env_id in (0, 2):
        assert ever[:, env_id].tolist() == list(range(N_STEPS))
        assert now[:, env_id].tolist() == [t % 7 for t in range(N_STEPS)]
    assert ever[:20, 1].tolist() == list(range(20))
    assert (now[20, 1], rollout.episode_starts[20, 1]) == (0, True)
    (failed,) = [episode for episode in rollout.episodes if episode.abnormal]
    assert (failed.env_id, failed.length) == (1, 20 - 2 * 7)
    assert "RuntimeError: scripted" in str(failed.failure)
    assert len(rollout.terminal_steps) == len(rollout.episodes) == rollout.truncated.sum()


TRAJECTORY_KINDS: list[dict[str, Any]] = [
    {"type": "base"},
    {"type": "subprocess", "num_workers": 1, "copy_on_get": "until_send"},
    {"type": "async_subprocess", "copy_on_get": False},
]
V2_KIND: dict[str, Any] = {"type": "base_v2"}


def steps_of(pieces: list[Trajectory], env_id: int) -> list[Any]:
    """Return what an env went through, as one array for each column."""
    mine = [one for one in pieces if one.env_id == env_id]
    columns = [(one.obs, one.next_obs, one.actions, one.rewards, one.states) for one in mine]
    return [np.concatenate(parts) for parts in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(TRAJECTORY_KINDS, id="dicts"),
        pytest.param([{"type": "base"}, V2_KIND], id="treetensors", marks=pytest.mark.v2),
    ],
)
def test_every_kind_gives_the_same_trajectories(kinds: list[dict[str, Any]]) -> None:
    expected: list[list[Any]] = []
    for cfg in kinds:
        with make("CartPole-v1", env_num=2, seed=7, **cfg) as manager:
            policy = by_env(Agent(), manager.observation_space)
            collector = StepCollector(manager, policy)
            pieces = [*collector.collect(30), *collector.collect(51)]
            assert sum(map(len, pieces)) == 81
            found = [steps_of(pieces, env_id) for env_id in range(2)]
            expected = expected or found
            for mine, same in zip(found, expected, strict=True):
                n = min(len(mine[0]), len(same[0]))  # async kinds share steps out as they like
                assert n > 20
                for column, as_ever in zip(mine, same, strict=True):
                    np.testing.assert_array_equal(column[:n], as_ever[:n])
            while manager.stats()["outstanding"]:
                manager.recv()
            manager.reset()
            one, two = EpisodeCollector(manager, policy).collect(2)
            assert [one.is_start, two.is_start, one.terminated] == [True] * 3
            assert len(one) == one.rewards.sum() == one.record.length


@pytest.mark.parametrize(
    ("kind", "style"),
    [("subprocess", "arrays"), ("async_subprocess", "arrays"), ("async_subprocess", "dicts")],
)
def test_signals_at_any_moment_lose_and_repeat_nothing(kind: str, style: str) -> None:
    rng, armed, struck = random.Random(5), [False], 0

    def strike(number: int, frame: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupted

    seen: dict[int, list[float]] = {env_id: [] for env_id in range(N_ENVS)}
    n_returned = 0
    with (
        no_gc_callbacks(),
        lost_exceptions_are_no_errors(),
        make(Counting, env_num=N_ENVS, type=kind, num_workers=1) as manager,
    ):
        collect = collect_by(manager, style)
        before = signal.signal(signal.SIGALRM, strike)
        try:
            for k in itertools.count():  # on a busy machine most calls end by a signal for long
                if k >= 300 and min(struck, n_returned) > 10:
                    break
                assert k < 3000, (struck, n_returned)
                returned: list[Any] = []
                try:
                    armed[0] = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3 * (1 + k / 50)))
                    # In one go: what is returned is in the list, wherever the signal comes.
                    returned.extend(itertools.islice(iter(collect, None), 1))
                    armed[0] = False
                except Interrupted:
                    struck += 1
                for result in returned:
                    n_returned += 1
                    note(result, seen)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    for found in seen.values():
        assert found == list(range(len(found)))


class Unending(Counting):
    """Its first episode is the only one: the reset after it does not end."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._ever:
            threading.Event().wait()
        return super().reset(seed=seed, options=options)


def test_a_signal_when_all_envs_are_being_reset() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def rollouts() -> tuple[Any, Callable[[], Any]]:
        manager = make(Unending, env_num=2, num_workers=1, context="fork", close_timeout=0.0)
        return manager, RolloutCollector(manager, Agent(), n_steps=7).collect

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        manager, collect = rollouts()
        with manager:
            points = [p for p in points_of(collect) if p.code.co_name == "recv_arrays"]
        strikes = [at_point(p, signal.SIGALRM) for p in points if p.is_opcode and p.hit > 1]
        strikes = [strike for strike in strikes if not strike.is_past(Interrupted())]
        for strike in strikes[-1::-6]:
            manager, collect = rollouts()
            seen: dict[int, list[float]] = {0: [], 1: []}
            with manager:
                with pytest.raises(Interrupted):
                    strike.run(collect)
                note(collect(), seen)
            assert [*seen.values()] == [[*range(7)]] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


def collect_by(manager: Any, style: str) -> Callable[[], Any]:
    if style == "arrays":
        return RolloutCollector(manager, Agent(), n_steps=4).collect
    policy = by_env(Agent(), manager.observation_space)
    return partial(StepCollector(manager, policy).collect, 12)


def note(result: Any, seen: dict[int, list[float]]) -> None:
    """Add what the observations of each env count."""
    if isinstance(result, RolloutBuffer):
        for env_id, found in seen.items():
            found += result.obs["ever"][:, env_id].tolist()
    else:
        for one in result:
            seen[one.env_id] += one.obs["ever"].tolist()


class Odd(BaseEnv):
    """Its episodes have four steps, and the info of one of these says something else."""

    observation_space, action_space = Box(0, 9, (1,)), Discrete(2)

    def __init__(self, at: int, info: dict[str, Any]) -> None:
        self._at, self._info, self._now = at, info, 0

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def reset(self) -> Any:
        self._now = 0
        return np.zeros(1, np.float32)

    def step(self, action: Any) -> EnvTimestep:
        self._now += 1
        info = dict(self._info) if self._now == self._at else {}
        return EnvTimestep(np.full(1, self._now, np.float32), 1.0, self._now == 4, info)


@pytest.mark.parametrize("kind", ["base", "thread", "subprocess"])
def test_whether_an_episode_ended_is_said_by_done_and_not_by_the_info(kind: str) -> None:
    for at, info, ends in (
        (4, {"terminated": False}, (False, True)),
        (4, {"terminated": False, "truncated": False}, (True, False)),
        (2, {"truncated": True}, (True, False)),
        (2, {"terminated": True}, (True, False)),
    ):
        with create_env_manager({"type": kind}, env_fn=[partial(Odd, at, info)] * 2) as manager:
            rollout = RolloutCollector(manager, n_steps=6).collect()
        assert [episode.length for episode in rollout.episodes] == [4, 4], info
        assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]
        assert (rollout.terminated[3, 0], rollout.truncated[3, 0]) == ends
