"""Steps and episodes as trajectories: each step once, whatever the timing and the interrupts."""

from __future__ import annotations

import signal
from collections import defaultdict
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from envmgr.collect import EpisodeCollector, PolicyStep, StepCollector, Trajectory, by_env
from envmgr.errors import ActionError, ConfigError, StateError
from tests.faults.interrupting import interrupt_at, points_of
from tests.unit.collect_fakes import FakeManager, answer_zero

LENGTHS = st.lists(
    st.lists(st.integers(1, 5) | st.integers(-5, -1), min_size=1, max_size=3).filter(
        lambda lengths: max(lengths) > 0
    ),
    min_size=1,
    max_size=3,
)


class Summing:
    """Recurrent: its state is the sum of the observations of an episode, its action that, too."""

    def initial_state(self, n: int) -> Any:
        return np.zeros(n)

    def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
        sums = {i: state[i] + step for i, (_, step) in obs.items()}
        for i, (_, step) in obs.items():
            assert episode_starts[i] == (step == 0)
            assert state[i] == sum(range(step))
        return PolicyStep({i: int(sums[i]) for i in obs}, {"logprob": sums}, sums)


def made(cls: Any, manager: FakeManager, policy: Any = None) -> Any:
    return cls(manager, policy or Summing())


def assert_is_piece(one: Trajectory) -> None:
    """Check a trajectory against what the fake's envs and the policy do."""
    env_ids, steps = one.obs
    first = int(steps[0])
    assert one.is_start == (first == 0)
    assert set(env_ids.tolist()) == {one.env_id}
    assert steps.tolist() == list(range(first, first + len(one)))
    assert one.next_obs[1].tolist() == [step + 1 for step in steps.tolist()]
    assert one.rewards.tolist() == [float(step + 1) for step in steps.tolist()]
    assert one.actions.tolist() == [sum(range(step + 1)) for step in steps.tolist()]
    assert one.extras["logprob"].tolist() == one.actions.tolist()
    assert one.states.tolist() == [sum(range(step)) for step in steps.tolist()]
    assert len(one.infos) == len(one.actions)
    assert (one.record is not None) == (one.terminated or one.truncated)


def joined(pieces: list[Trajectory]) -> dict[int, list[tuple[int, bool]]]:
    """Return each env's steps, and with which of them episodes terminated, in order."""
    found: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for one in pieces:
        assert_is_piece(one)
        found[one.env_id] += [(step, False) for step in one.obs[1].tolist()]
        if one.terminated:
            found[one.env_id][-1] = (found[one.env_id][-1][0], True)
    return found


def expected(lengths: list[int], n: int) -> list[tuple[int, bool]]:
    """Return what `joined` gives of n steps of an env, those that failed left out."""
    found: list[tuple[int, bool]] = []
    while True:
        for length in lengths:
            steps = [(step, False) for step in range(abs(length))]
            steps = steps[:n]
            n -= len(steps)
            if len(steps) == abs(length):
                steps = steps[:-1] if length < 0 else [*steps[:-1], (steps[-1][0], True)]
            found += steps
            if not n:
                return found


class TestAnyTiming:
    @settings(max_examples=60)
    @given(LENGTHS, st.data())
    def test_every_step_is_in_one_piece(self, lengths: Any, data: Any) -> None:
        def some(pending: list[int]) -> list[int]:
            return sorted(data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True)))

        manager = FakeManager(lengths, take=some)
        collector = made(StepCollector, manager)
        pieces: list[Trajectory] = []
        total = 0
        for n_steps in data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)):
            pieces += collector.collect(n_steps)
            total += n_steps
            assert collector.statistics.steps == total == len(manager.executed)
        found = joined(pieces)
        for env_id, of_env in enumerate(lengths):
            n = sum(i == env_id for i, _ in manager.executed)
            assert found[env_id] == (expected(of_env, n) if n else [])

    @settings(max_examples=40)
    @given(LENGTHS, st.data())
    def test_episodes_are_whole(self, lengths: Any, data: Any) -> None:
        def some(pending: list[int]) -> list[int]:
            return sorted(data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True)))

        collector = made(EpisodeCollector, FakeManager(lengths, take=some))
        for n_episodes in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
            found = collector.collect(n_episodes)
            assert sum(not one.abnormal for one in found) == n_episodes
            for one in found:
                assert_is_piece(one)
                assert one.is_start
                assert one.record is not None
                assert len(one) == one.record.length - one.abnormal
                assert (one.terminated, one.truncated) == (not one.abnormal, one.abnormal)


class TestInterrupts:
    @pytest.mark.parametrize("collect", ["steps", "episodes"])
    def test_anywhere_lose_and_repeat_nothing(self, collect: str) -> None:
        cls, n = (StepCollector, 4) if collect == "steps" else (EpisodeCollector, 2)
        lengths = [[2, 1], [-2, 3]]

        def prepared() -> tuple[FakeManager, Any, list[Trajectory]]:
            manager = FakeManager(lengths, take=lambda pending: pending[-1:])
            collector = made(cls, manager)
            return manager, collector, collector.collect(1)

        collector = prepared()[1]
        points = points_of(lambda: collector.collect(n))
        n_struck = 0
        for point in points[collect == "steps" :: 3]:
            last = max(line for _, _, line in point.code.co_lines() if line is not None)
            if point.code.co_name == "collect" and point.at == last:
                continue  # it has returned them, all but for the tracer
            manager, collector, pieces = prepared()
            try:  # not all that was passed once is passed again, with later Pythons
                pieces += interrupt_at(point, partial(collector.collect, n), signal.SIGINT)
            except KeyboardInterrupt:
                n_struck += 1
            pieces += collector.collect(n)
            assert collector.statistics.steps == len(manager.executed), point
            assert len(collector.episodes) == collector.statistics.n_ended
            if collect == "steps":
                found = joined(pieces)
                for env_id, of_env in enumerate(lengths):
                    count = sum(i == env_id for i, _ in manager.executed)
                    assert found[env_id] == expected(of_env, count), point
            else:
                kept = [one.record for one in pieces]
                joined(pieces)
                assert kept == [r for r in collector.episodes if r.length > r.abnormal], point
        assert n_struck > 50

    def test_do_not_have_it_wait_for_what_is_counted_already(self) -> None:
        def prepared() -> tuple[FakeManager, Any]:
            manager = FakeManager(
                [[3], [1], [1]], take=lambda pending: pending[-1:], gathers_per_reset=3
            )
            collector = made(StepCollector, manager)
            collector.collect(1)
            return manager, collector

        collector = prepared()[1]
        points = [
            point
            for point in points_of(lambda: collector.collect(4))
            if point.code is StepCollector._account.__code__
        ]
        for point in points:
            manager, collector = prepared()
            with pytest.raises(KeyboardInterrupt):
                interrupt_at(point, partial(collector.collect, 4), signal.SIGINT)
            collector.collect(4)  # while an env is still being reset
            assert collector.statistics.steps == len(manager.executed), point
        assert len(points) > 20


class TestPolicies:
    def test_of_batches_act_by_env(self) -> None:
        class Critic:
            def initial_state(self, n: int) -> Any:
                return np.zeros((n, 1))

            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
                assert (episode_starts == (obs[1] == 0)).all()
                assert (state[:, 0] == obs[1]).all()
                return PolicyStep(obs[0] + 1, {"value": obs[1] * 2.0}, state + 1)

        manager = FakeManager([[3], [2]])
        policy = by_env(Critic(), manager.observation_space)
        first, second = made(EpisodeCollector, manager, policy).collect(2)
        assert (first.env_id, second.env_id) == (1, 0)
        assert first.actions.tolist() == [2, 2]
        assert second.extras["value"].tolist() == [0.0, 2.0, 4.0]
        plain = by_env(lambda obs: list(obs[0]), manager.observation_space)
        assert made(StepCollector, manager, plain).collect(2)[0].states is None

    @pytest.mark.parametrize(
        ("steps", "says"),
        [
            ([PolicyStep({0: 0}, {"value": {}})], r"no value for envs \[0\]"),
            ([PolicyStep({0: 0}, {"value": 3.0})], r"no value for envs \[0\]"),
            ([PolicyStep({0: 0}, {"value": {0: 1.0}}), {0: 0}], r"extras \[\], and \['value'\]"),
        ],
    )
    def test_extras_that_do_not_fit_are_refused(self, steps: Any, says: str) -> None:
        manager, answers = FakeManager([[9]]), iter(steps)
        with pytest.raises(ActionError, match=says):
            made(StepCollector, manager, lambda obs: next(answers)).collect(2)
        assert len(manager.executed) == len(steps) - 1

    def test_a_recurrent_policy_without_a_state(self) -> None:
        class Forgetful(Summing):
            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> Any:
                return answer_zero(obs)

        with pytest.raises(ActionError, match=r"no state for envs \[0\]"):
            made(StepCollector, FakeManager([[9]]), Forgetful()).collect(1)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="n_steps is 0"):
        made(StepCollector, FakeManager([[2]])).collect(0)
    with pytest.raises(ConfigError, match="n_episodes is None"):
        made(EpisodeCollector, FakeManager([[2]])).collect(None)


def test_steps_that_somebody_else_has_sent() -> None:
    late = iter([1])
    manager = FakeManager([[3], [3]], take=lambda pending: pending[next(late, 0) :])
    manager.step({0: 0, 1: 0})
    with pytest.raises(StateError, match="env 0 had a step under way"):
        made(StepCollector, manager, answer_zero).collect(9)


class Reusing:
    """Recurrent; works in the arrays that it is given, and hands out rows of its own."""

    def __init__(self) -> None:
        self._rows = np.zeros((2, 1), np.int64)

    def initial_state(self, n: int) -> Any:
        return np.zeros((n, 1), np.int64)

    def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
        for i in obs:
            state[i] += 1
            self._rows[i] = state[i]
        rows = {i: self._rows[i] for i in obs}
        return PolicyStep(rows, {"nth": rows}, rows)


@pytest.mark.parametrize("collector", [StepCollector, EpisodeCollector])
def test_a_policy_may_use_its_arrays_again(collector: Any) -> None:
    found = made(collector, FakeManager([[4], [4]]), Reusing()).collect(
        8 if collector is StepCollector else 2
    )
    for one in found:
        assert one.states[:, 0].tolist() == [0, 1, 2, 3]
        assert one.actions[:, 0].tolist() == one.extras["nth"][:, 0].tolist() == [1, 2, 3, 4]


class Graded:
    """As a tensor with a gradient."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


def test_extras_that_are_no_arrays_are_refused_before_anything_is_sent() -> None:
    manager = FakeManager([[3]])
    for extras, says in (({"v": {0: Graded()}}, "v for env 0 cannot become"), (None, "a mapping")):
        step: Any = PolicyStep({0: 0}, extras)  # type: ignore[arg-type]
        with pytest.raises(ActionError, match=says):
            StepCollector(manager, lambda obs, step=step: step).collect(2)  # type: ignore[arg-type,misc]
    assert manager.executed == []


def test_policies_of_batches_have_to_give_a_row_for_each_env() -> None:
    manager = FakeManager([[3], [3]])
    for step, says in (
        (PolicyStep(np.zeros(1, np.int64)), "as actions does not fit: 1 rows"),
        (PolicyStep(np.zeros(2, np.int64), {"v": np.zeros(1)}), "as v does not fit: 1 rows"),
        (PolicyStep(np.zeros(2, np.int64), {"v": np.zeros(3)}), "as v does not fit: 3 rows"),
    ):
        policy = by_env(lambda obs, step=step: step, manager.observation_space)
        with pytest.raises(ActionError, match=says):
            made(StepCollector, manager, policy).collect(2)
    assert manager.executed == []
