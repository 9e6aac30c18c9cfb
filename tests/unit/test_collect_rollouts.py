"""Rollouts: every step of every env once and in its place, whatever the timing, and their GAE."""

from __future__ import annotations

import signal
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from hypothesis import given, settings

from envmgr import make
from envmgr.collect import PolicyStep, RolloutBuffer, RolloutCollector, gae
from envmgr.core import ArrayBatch
from envmgr.errors import ActionError, ConfigError, StateError
from envmgr.spaces import indexed
from tests.fakes import FakeClock
from tests.faults.interrupting import EVERYTHING_PUBLIC, interrupt_at, points_of
from tests.unit.rollout_fakes import NESTED, TEXT, FakeArrays, Taken, values_of

ENDINGS = ["terminated", "truncated", "abnormal"]
PLANS = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ENDINGS)), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


class Critic:
    """Acts on what it sees, and says what it is worth."""

    def __call__(self, obs: Any) -> PolicyStep:
        return PolicyStep(obs[:, 2].astype(np.int64) + 1, {"value": self.value(obs)})

    def value(self, obs: Any) -> Any:
        return values_of(obs)


class InPlace:
    """Recurrent; counts steps in the array that it is given, and hands out one of its own."""

    def __init__(self) -> None:
        self._zeros = np.zeros(2, np.int64)

    def initial_state(self, n: int) -> Any:
        return self._zeros

    def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
        state += 1
        self._zeros += 1
        return PolicyStep(np.zeros(len(obs), np.int64), {}, state)


def collector_of(manager: FakeArrays, policy: Any, n_steps: int, **kwargs: Any) -> RolloutCollector:
    return RolloutCollector(manager, policy, n_steps=n_steps, **kwargs)  # type: ignore[arg-type]


def steps_of(rollout: RolloutBuffer, env_id: int) -> list[Taken]:
    """Return what a rollout says of an env, in the form of the fake's own account."""
    ends = zip(rollout.terminal_steps.tolist(), rollout.terminal_env_ids.tolist(), strict=True)
    final = {t: rollout.terminal_obs[k] for k, (t, i) in enumerate(ends) if i == env_id}
    found = []
    for t in range(int(rollout.lengths[env_id])):
        last = t + 1 == rollout.lengths[env_id]
        after = rollout.last_obs[env_id] if last else rollout.obs[t + 1 if not last else t, env_id]
        if t in final:
            assert not (last and rollout.is_complete) or (after == final[t]).all()
            after = final[t]
        assert rollout.episode_starts[t, env_id] == (rollout.obs[t, env_id, 2] == 0)
        found.append(
            Taken(
                tuple(rollout.obs[t, env_id].astype(int)),
                float(rollout.actions[t, env_id]),
                float(rollout.rewards[t, env_id]),
                tuple(after.astype(int)),
                *(bool(x[t, env_id]) for x in (rollout.terminated, rollout.truncated)),
                bool(rollout.abnormal[t, env_id]),
            )
        )
    return found


def naive_gae(
    steps: list[Taken], values: Any, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of an env by their definition, step by step."""
    advantages = []
    for t, first in enumerate(steps):
        total, weight = 0.0, 1.0
        for step in steps[t:]:
            if step.abnormal:
                break
            following = 0.0 if step.terminated else values(np.array(step.next_obs, float))
            delta = step.reward + gamma * following - values(np.array(step.obs, float))
            total += weight * delta
            weight *= gamma * lam
            if step.terminated or step.truncated:
                break
        advantages.append(0.0 if first.abnormal else total)
    values_there = [values(np.array(step.obs, float)) for step in steps]
    return advantages, [a + float(v) for a, v in zip(advantages, values_there, strict=True)]


def fakes(data: Any, **kwargs: Any) -> FakeArrays:
    """Return a manager with any plans and timing."""

    def some(pending: list[int]) -> list[int]:
        return list(data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True)))

    return FakeArrays(
        data.draw(PLANS),
        take=some if data.draw(st.booleans(), "uneven") else None,
        auto_reset=data.draw(st.booleans(), "auto_reset"),
        copies=data.draw(st.booleans(), "copies"),
        resets_take=lambda: data.draw(st.booleans(), "a reset takes longer"),
        **kwargs,
    )


class TestAnyTiming:
    @settings(max_examples=60)
    @given(st.data(), st.integers(1, 7), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
    def test_every_step_is_there_once_and_gae_is_as_defined(
        self, data: Any, n_steps: int, gamma: float, lam: float
    ) -> None:
        manager = fakes(data)
        collector = collector_of(manager, Critic(), n_steps)
        episodes = []
        for count in range(1, data.draw(st.integers(1, 3)) + 1):
            rollout = collector.collect()
            assert rollout.lengths.tolist() == [n_steps] * manager.env_num
            assert collector.statistics.steps == count * n_steps * manager.env_num
            episodes += rollout.episodes
            advantages, returns = rollout.gae(gamma=gamma, lam=lam)
            for env_id, taken in enumerate(manager.taken):
                assert len(taken) == count * n_steps
                steps = taken[-n_steps:]
                assert steps_of(rollout, env_id) == steps
                expected = naive_gae(steps, values_of, gamma, lam)
                np.testing.assert_allclose(advantages[:, env_id], expected[0], atol=1e-9)
                np.testing.assert_allclose(returns[:, env_id], expected[1], atol=1e-9)
                assert rollout.mask[:, env_id].tolist() == [not step.abnormal for step in steps]
        assert sorted((e.env_id, e.nth, e.length, e.abnormal) for e in episodes) == sorted(
            (env_id, nth, len(steps), steps[-1].abnormal)
            for env_id, taken in enumerate(manager.taken)
            for nth, steps in enumerate(ended(taken))
        )
        for episode in episodes:
            steps = ended(manager.taken[episode.env_id])[episode.nth]
            assert episode.episode_return == pytest.approx(sum(step.reward for step in steps))

    @settings(max_examples=30)
    @given(st.data(), st.integers(1, 6))
    def test_states_follow_their_env_and_begin_anew_with_its_episodes(
        self, data: Any, n_steps: int
    ) -> None:
        class Counting:
            """Its state is how many steps of the episode it has seen, and whose."""

            def initial_state(self, n: int) -> Any:
                return {"seen": np.zeros(n), "of": (np.full(n, -1.0),)}

            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
                assert (state["seen"] == obs[:, 2]).all()
                assert (episode_starts == (obs[:, 2] == 0)).all()
                assert np.where(episode_starts, -1, obs[:, 0]).tolist() == state["of"][0].tolist()
                after = {"seen": state["seen"] + 1, "of": (obs[:, 0].copy(),)}
                return PolicyStep(np.ones(len(obs), np.int64), {}, after)

            def value(self, obs: Any, states: Any) -> Any:
                assert (states["seen"] == obs[:, 2]).all()
                return states["seen"]

        manager = fakes(data)
        collector = collector_of(manager, Counting(), n_steps)
        for _ in range(3):
            rollout = collector.collect()
            assert (rollout.states["seen"] == rollout.obs[:, :, 2]).all()
            rollout.gae()


def ended(taken: list[Taken]) -> list[list[Taken]]:
    """Return the episodes that ended."""
    found: list[list[Taken]] = []
    open_steps: list[Taken] = []
    for step in taken:
        open_steps.append(step)
        if step.terminated or step.truncated:
            found.append(open_steps)
            open_steps = []
    return found


class TestInterrupts:
    @pytest.mark.parametrize("uneven", [False, True])
    def test_anywhere_lose_and_repeat_nothing(self, uneven: bool) -> None:
        class Adding(Critic):
            """Its state is a sum of all it has seen in the episode."""

            def initial_state(self, n: int) -> Any:
                return np.zeros(n)

            def __call__(self, obs: Any, state: Any = None, episode_starts: Any = None) -> Any:
                actions = (obs[:, 2] + state).astype(np.int64)
                return PolicyStep(actions, {"value": self.value(obs)}, state + obs[:, 2] + 1)

            def value(self, obs: Any, states: Any = None) -> Any:
                return values_of(obs)

        def made() -> tuple[FakeArrays, RolloutCollector]:
            plans = [[(2, "terminated"), (1, "truncated")], [(4, "abnormal"), (9, "terminated")]]
            manager = FakeArrays(plans, take=(lambda p: p[:1]) if uneven else None)
            collector = collector_of(manager, Adding(), 3)
            collector.collect()
            return manager, collector

        def outcome(manager: FakeArrays, rollout: RolloutBuffer) -> Any:
            steps = [steps_of(rollout, i) for i in range(2)]
            assert steps == [taken[-3:] for taken in manager.taken]
            episodes = [(e.number, e.env_id, e.length, e.episode_return) for e in rollout.episodes]
            return steps, rollout.states.tolist(), rollout.gae().advantages.tolist(), episodes

        manager, collector = made()
        points = points_of(collector.collect)
        collector.collect()
        expected = outcome(manager, collector.rollout)
        n_struck = 0
        for point in points[uneven::2]:  # each run of this test at the other half
            manager, collector = made()
            try:  # not all that was passed once is passed again, with later Pythons
                interrupt_at(point, collector.collect, signal.SIGINT)
            except KeyboardInterrupt:
                n_struck += 1
            rollout = collector.rollout
            if not rollout.is_complete:
                for i in range(2):  # what it holds is whole
                    found = [step._replace(next_obs=()) for step in steps_of(rollout, i)]
                    taken = [step._replace(next_obs=()) for step in manager.taken[i][3:]]
                    assert found == taken[: len(found)], point
            if not rollout.is_complete or collector.statistics.steps < 12:
                assert collector.collect().is_complete
            collector.collect()
            assert outcome(manager, collector.rollout) == expected, point
            assert collector.statistics.steps == 18
            assert collector.statistics.episodes + collector.statistics.abnormal_episodes == sum(
                len(ended(taken)) for taken in manager.taken
            )
        assert n_struck > 50

    def test_each_batch_is_shown_once(self) -> None:
        def made() -> tuple[FakeArrays, RolloutCollector, list[Any]]:
            seen: list[Any] = []
            manager = FakeArrays([[(2, "terminated"), (1, "truncated")]])
            return manager, collector_of(manager, Critic(), 3, on_batch=seen.append), seen

        _, collector, _ = made()
        names = ("collect", "_resume", "_receive", "_show", "_record")
        found = points_of(collector.collect, EVERYTHING_PUBLIC)
        points = [point for point in found if point.code.co_name in names]
        n_struck = 0
        for point in points:
            manager, collector, seen = made()
            try:
                interrupt_at(point, collector.collect, signal.SIGINT)
            except KeyboardInterrupt:
                n_struck += 1
            collector.collect()
            shown = [tuple(batch.obs[0].astype(int)) for batch in seen]
            assert shown == [step.next_obs for step in manager.taken[0]], point
        assert n_struck > 50

    def test_a_batch_is_shown_again_to_who_did_not_return(self) -> None:
        seen: list[Any] = []

        def note(batch: Any) -> None:
            seen.append(batch)
            if len(seen) == 2:
                raise OSError("the disk is full")

        manager = FakeArrays([[(9, "terminated")]])
        collector = collector_of(manager, Critic(), 3, on_batch=note)
        with pytest.raises(OSError, match="disk is full"):
            collector.collect()
        collector.collect()
        assert [batch.obs[0, 2] for batch in seen] == [1, 2, 2, 3]
        assert len(manager.taken[0]) == 3


class TestBuffers:
    def test_nested_observations_stay_nested(self) -> None:
        manager = FakeArrays([[(3, "truncated")], [(2, "terminated")]], space=NESTED)
        rollout = collector_of(manager, lambda obs: obs["step"], 4).collect()
        assert rollout.obs["where"].shape == (4, 2, 2)
        assert rollout.obs["step"].tolist() == [[0, 0], [1, 1], [2, 0], [0, 1]]
        assert rollout.terminal_obs["step"].tolist() == [2, 3, 2]
        assert rollout.flatten(rollout.obs)["where"].shape == (8, 2)
        found = rollout.gae(lambda obs: obs["step"].astype(np.float32), gamma=1.0, lam=0.0)
        # Each step's reward is 10 * episode + step + action / 7, and 100 * env_id.
        np.testing.assert_allclose(found.advantages[0], [1.0, 101.0])
        np.testing.assert_allclose(found.returns[1], [1 + 1 / 7 + 2, 101 + 1 / 7])

    def test_observations_without_layout_are_objects(self) -> None:
        manager = FakeArrays([[(2, "truncated")]], space=TEXT)
        rollout = collector_of(manager, lambda obs: [7 for _ in obs], 3).collect()
        assert rollout.obs[:, 0].tolist() == ["(0, 0, 0)", "(0, 0, 1)", "(0, 1, 0)"]
        assert rollout.terminal_obs.tolist() == ["(0, 0, 2)"]
        assert rollout.actions.dtype == np.int64
        assert rollout.gae(lambda obs: list(map(len, obs))).advantages.shape == (3, 1)

    def test_an_env_that_is_dropped_leaves_the_others(self) -> None:
        manager = FakeArrays([[(2, "lost")], [(9, "truncated")]])
        collector = collector_of(manager, Critic(), 4)
        rollout = collector.collect()
        assert rollout.lengths.tolist() == [2, 4]
        assert rollout.mask.tolist() == [[True, True], [False, True], [False, True], [False, True]]
        assert steps_of(rollout, 1) == manager.taken[1]
        advantages = rollout.gae().advantages
        assert advantages[0, 0] == naive_gae(manager.taken[0], values_of, 0.99, 0.95)[0][0]
        assert collector.collect().lengths.tolist() == [0, 4]
        assert not rollout.terminal_steps.size
        manager = FakeArrays([[(1, "lost")]])
        collector = collector_of(manager, Critic(), 4)
        assert collector.collect().gae().advantages.tolist() == [[0.0]] * 4
        assert collector.collect().gae().advantages.tolist() == [[0.0]] * 4

    def test_without_a_policy_actions_are_random_and_seeded(self) -> None:
        def actions() -> Any:
            return collector_of(FakeArrays([[(3, "truncated")]] * 2), None, 6).collect().actions

        first = actions()
        assert (first == actions()).all()
        assert len(np.unique(first)) > 6

    def test_random_actions_are_of_no_recurrent_policy(self) -> None:
        rollout = collector_of(FakeArrays([[(3, "truncated")]] * 2), None, 6).collect()
        assert rollout.states is None
        assert rollout.gae(values_of).advantages.shape == (6, 2)

    def test_a_policy_may_change_its_states_in_place(self) -> None:
        rollout = collector_of(FakeArrays([[(3, "truncated")]] * 2), InPlace(), 5).collect()
        assert rollout.states[:, 1].tolist() == [0, 1, 2, 0, 1]

    def test_texts_are_not_cut_off(self) -> None:
        words = iter(["a", "bb", "cccccc"])
        policy = lambda obs: PolicyStep(obs[:, 0] * 0, {"tool": [next(words)]})  # noqa: E731
        rollout = collector_of(FakeArrays([[(5, "truncated")]]), policy, 3).collect()
        assert rollout.extras["tool"][:, 0].tolist() == ["a", "bb", "cccccc"]
        mixed = iter([["abc"], [12345]])
        policy = lambda obs: PolicyStep(obs[:, 0] * 0, {"tool": next(mixed)})  # noqa: E731
        with pytest.raises(ActionError, match="tool does not fit: the dtype is"):
            collector_of(FakeArrays([[(5, "truncated")]]), policy, 3).collect()

    def test_what_envs_without_more_episodes_came_to_is_there(self) -> None:
        manager = FakeArrays([[(3, "lost")], [(9, "truncated")]])
        rollout = collector_of(manager, Critic(), 6).collect()
        assert rollout.lengths.tolist() == [3, 6]
        assert rollout.last_obs.tolist() == [[0, 0, 2], [1, 0, 6]]

    def test_infos_that_are_dicts_are_objects(self) -> None:
        batch = ArrayBatch(
            np.arange(2),
            np.zeros(2),
            np.zeros(2),
            *np.zeros((2, 2), np.bool_),
            [{"d": {"x": 1}}, {}],
        )
        buffer = RolloutBuffer(Discrete(2), 2, 2)
        buffer.put_infos(1, batch, ["d"])
        values, present = buffer.infos["d"]
        assert values[1].tolist() == [{"x": 1}, None]
        assert present[1].tolist() == [True, False]

    def test_batches_are_shown(self) -> None:
        seen: list[Any] = []
        manager = FakeArrays([[(3, "truncated")]])
        collector_of(manager, Critic(), 4, on_batch=seen.append).collect()
        assert [bool(batch.truncated[0]) for batch in seen] == [False, False, True, False]

    def test_a_batch_that_was_shown_stays(self) -> None:
        seen: list[Any] = []
        manager = FakeArrays([[(3, "truncated")], [(9, "truncated")]])
        rollout = collector_of(manager, Critic(), 4, on_batch=seen.append).collect()
        assert seen[2].obs[:1].tolist() == rollout.terminal_obs.tolist() == [[0, 0, 3]]

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_numbers_that_begin_as_ints_are_not_cut_off(self, n_steps: int) -> None:
        class Halves:
            """Gives halves, as ints where all of them are whole; its state is one step behind."""

            def initial_state(self, n: int) -> Any:
                return {"h": np.zeros(n, np.int64)}

            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> PolicyStep:
                steps = obs[:, 2].astype(np.int64)
                assert (state["h"] == np.maximum(steps - 1, 0) / 2).all(), "what it returned"
                extras = {
                    "value": self.of(steps),
                    "many": steps * 100 if steps.any() else steps > 0,
                }
                return PolicyStep(self.of(steps), extras, {"h": self.of(steps)})

            def of(self, steps: Any) -> Any:
                return steps / 2 if (steps % 2).any() else steps // 2

        collector = collector_of(FakeArrays([[(9, "truncated")]] * 2), Halves(), n_steps)
        for first in (0, n_steps):
            rollout = collector.collect()
            halves = [t / 2 for t in range(first, first + n_steps)]
            for column in (rollout.actions, rollout.extras["value"]):
                assert column[:, 1].tolist() == halves
            assert rollout.extras["many"][:, 1].tolist() == [200 * half for half in halves]
            assert rollout.states["h"][:, 1].tolist() == [max(half - 0.5, 0.0) for half in halves]
            assert rollout.last_states["h"].tolist() == [halves[-1]] * 2

    def test_floats_keep_their_precision_and_texts_do_not_take_numbers(self) -> None:
        values = iter([np.zeros(1, np.float32), np.ones(1), np.ones(1, np.int64), np.array(["a"])])
        policy = lambda obs: PolicyStep(np.zeros(1, np.int64), {"value": next(values)})  # noqa: E731
        collector = collector_of(FakeArrays([[(9, "truncated")]]), policy, 4)
        with pytest.raises(ActionError, match="as value does not fit"):
            collector.collect()
        assert collector.rollout.extras["value"].dtype == np.float32
        assert collector.rollout.extras["value"][:3].tolist() == [[0], [1], [1]]

    def test_rewards_may_be_arrays_after_steps_that_failed(self) -> None:
        class Vectors(FakeArrays):
            """Rewards are three numbers, but of steps that failed alone."""

            def recv_arrays(self, min_ready: Any = None, timeout_s: Any = None) -> Any:
                batch = super().recv_arrays(min_ready, timeout_s)
                if len(batch.abnormal) == len(batch.env_ids):
                    return batch
                return batch._replace(reward=np.stack([batch.reward] * 3, axis=1))

        manager = Vectors([[(1, "abnormal"), (2, "terminated")]])
        collector = collector_of(manager, Critic(), 2)
        rewards = [collector.collect().rewards[:, 0].tolist() for _ in range(2)]
        given = [step.reward for step in manager.taken[0]]
        assert rewards == [[[r] * 3 for r in given[:2]], [[r] * 3 for r in given[2:]]]
        assert collector.rollout.episodes[0].episode_return == [given[1] + given[2]] * 3

    def test_an_episode_lasts_from_its_first_action(self) -> None:
        clock = FakeClock()

        class Slow(FakeArrays):
            """A step takes a second, a reset ten."""

            def recv_arrays(self, min_ready: Any = None, timeout_s: Any = None) -> Any:
                clock.advance(1.0)
                return super().recv_arrays(min_ready, timeout_s)

            def ready_arrays(self, env_ids: Any = None) -> Any:
                clock.advance(10.0)
                return super().ready_arrays(env_ids)

        for take in (None, lambda pending: pending[:1]):
            manager = Slow([[(2, "terminated")]], take=take)
            collector = collector_of(manager, Critic(), 3, clock=clock)
            durations = []
            for _ in range(2):
                clock.advance(100.0)  # the learner's
                durations += [episode.duration_s for episode in collector.collect().episodes]
            # The second one goes on in the second rollout, of which it waits for the first action.
            assert [d for d in durations if d != 2.0] == [durations[1]]
            assert 102.0 <= durations[1] <= 112.0

    def test_a_reset_begins_anew(self) -> None:
        manager = FakeArrays([[(9, "truncated")]])
        collector = collector_of(manager, lambda obs: [1, 2], 2)
        with pytest.raises(ActionError):
            collector.collect()
        collector = collector_of(manager, Critic(), 2)
        collector.collect()
        collector.reset()
        assert collector.statistics.steps == 2
        collector.collect()
        ended = collector_of(FakeArrays([[(1, "truncated")]]), Critic(), 1)
        for number in range(3):
            (episode,) = ended.collect().episodes
            assert episode.number == episode.nth == number
            ended.reset()
        collector.reset()
        assert collector.collect().episode_starts.tolist() == [[True], [False]]


class TestRefusals:
    @pytest.mark.parametrize("n_steps", [0, -1, 2.0, None])
    def test_lengths_that_make_no_sense(self, n_steps: Any) -> None:
        with pytest.raises(ConfigError, match="n_steps is"):
            collector_of(FakeArrays([[(3, "truncated")]]), Critic(), n_steps)

    @pytest.mark.parametrize(
        ("policy", "says"),
        [
            (lambda obs: np.zeros(1, np.int64), "as actions does not fit: 1 rows"),
            (
                lambda obs: PolicyStep(np.zeros(2, np.int64), {"value": np.zeros(3)}),
                "as value does not fit",
            ),
            (lambda obs: 0, "as actions does not fit: one value"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_it_is_sent(self, policy: Any, says: str) -> None:
        manager = FakeArrays([[(3, "truncated")]] * 2)
        with pytest.raises(ActionError, match=says):
            collector_of(manager, policy, 2).collect()
        assert manager.taken == [[], []]

    @pytest.mark.parametrize(
        ("policy", "says"),
        [
            (lambda obs: {0: 0, 1: 0}, "this one returned a dict by env_id"),
            (lambda obs: (np.zeros(2, np.int64), np.zeros(2)), r"a tuple; .*PolicyStep\(actions"),
            (lambda obs: (np.zeros(2, np.int64), {}), r"a tuple; .*PolicyStep\(actions"),
        ],
    )
    def test_policies_of_another_form_are_told_the_right_one(self, policy: Any, says: str) -> None:
        manager = make("CartPole-v1", env_num=2, type="base")
        with manager, pytest.raises(ActionError, match=says):
            RolloutCollector(manager, policy, n_steps=2).collect()

    def test_extras_are_the_same_each_time(self) -> None:
        names = iter(["value", "logprob"])
        policy = lambda obs: PolicyStep(np.zeros(1, np.int64), {next(names): np.zeros(1)})  # noqa: E731
        with pytest.raises(ActionError, match=r"\['logprob'\], and \['value'\] before"):
            collector_of(FakeArrays([[(3, "truncated")]]), policy, 2).collect()

    def test_a_recurrent_policy_without_a_state(self) -> None:
        class Forgetful:
            def initial_state(self, n: int) -> Any:
                return np.zeros(n)

            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> Any:
                return np.zeros(len(obs), np.int64)

        with pytest.raises(ActionError, match="the next state of each env"):
            collector_of(FakeArrays([[(3, "truncated")]]), Forgetful(), 2).collect()

    @pytest.mark.parametrize(
        "state", [np.zeros((2, 1)), np.zeros((1, 2, 3)), np.zeros((1, 3)), np.zeros(2)]
    )
    def test_a_state_of_another_shape(self, state: Any) -> None:
        class Odd:
            state = np.zeros((2, 3))

            def initial_state(self, n: int) -> Any:
                return np.zeros((n, 3))

            def __call__(self, obs: Any, state: Any, episode_starts: Any) -> Any:
                return PolicyStep(np.zeros(len(obs), np.int64), {}, self.state)

        manager, policy = FakeArrays([[(3, "truncated")]] * 2), Odd()
        collector = collector_of(manager, policy, 2)
        policy.state = state
        with pytest.raises(ActionError, match="as state does not fit"):
            collector.collect()
        assert manager.taken == [[], []]
        policy.state = Odd.state
        assert collector.collect().states.shape == (2, 2, 3)

    def test_what_was_refused_says_nothing_of_the_form_of_what_is_right(self) -> None:
        steps = iter([PolicyStep(np.full((2, 3), 1), {"logprob": np.zeros((2, 2))})])
        right = PolicyStep(np.zeros(2, np.int64), {"logprob": np.zeros(2)})

        def policy(obs: Any) -> PolicyStep:
            return next(steps, right)

        with make("CartPole-v1", env_num=2, type="base") as manager:
            collector = RolloutCollector(manager, policy, n_steps=4)
            with pytest.raises(ActionError):
                collector.collect()
            rollout = collector.collect()
        assert rollout.actions.shape == rollout.extras["logprob"].shape == (4, 2)
        odd = right._replace(extras={"logprob": np.zeros((2, 1))})
        rollout_of = FakeArrays([[(3, "truncated")]] * 2)
        steps = iter([right, odd])
        with pytest.raises(ActionError, match=r"rows of shape \(1,\), not \(\)"):
            collector_of(rollout_of, policy, 3).collect()

    def test_extras_that_are_none(self) -> None:
        none: Any = None
        policy = lambda obs: PolicyStep(np.zeros(1, np.int64), none)  # noqa: E731
        with pytest.raises(ActionError, match="should be a mapping of names"):
            collector_of(FakeArrays([[(3, "truncated")]]), policy, 2).collect()

    def test_steps_that_somebody_else_has_sent(self) -> None:
        manager = FakeArrays([[(3, "truncated")]] * 2)
        manager.send_arrays([1], [0])
        collector = collector_of(manager, Critic(), 2)
        with pytest.raises(StateError, match=r"envs \[1\] have steps under way"):
            collector.collect()
        manager.recv_arrays()
        assert collector.collect().is_complete

    def test_gae_says_what_it_lacks(self) -> None:
        collector = collector_of(FakeArrays([[(3, "truncated")]]), lambda obs: [0], 2)
        with pytest.raises(StateError, match="not complete"):
            collector.rollout.gae(values_of)
        rollout = collector.collect()
        with pytest.raises(ConfigError, match="give it a value_fn"):
            rollout.gae()
        with pytest.raises(ConfigError, match=r"shape \(1,\) for 2 observations"):
            rollout.gae(lambda obs: np.zeros(1))

    def test_values_in_another_shape(self) -> None:
        plans = [[(2, "truncated")]] * 3
        rollout = collector_of(FakeArrays(plans), lambda obs: [0] * 3, 2).collect()
        values = rollout.rewards * 1.0
        expected = rollout.gae(values_of, values=values).advantages
        assert (rollout.gae(values_of, values=values[..., None]).advantages == expected).all()
        for odd in (values.T, values.ravel(), values[:1], values[None]):
            with pytest.raises(ConfigError, match="the values have shape"):
                rollout.gae(values_of, values=odd)

    def test_the_policy_of_a_collector_stays(self) -> None:
        collector: Any = collector_of(FakeArrays([[(3, "truncated")]]), Critic(), 2)
        with pytest.raises(AttributeError):
            collector.policy = None
        assert isinstance(collector.policy, Critic)

    def test_keys_that_rollouts_have_themselves(self) -> None:
        plans = [[(3, "truncated")]]
        with pytest.raises(ConfigError, match=r"names \['terminated'\], which rollouts have"):
            collector_of(FakeArrays(plans), Critic(), 2, info_keys=["x", "terminated"])
        assert collector_of(FakeArrays(plans), Critic(), np.int64(2)).collect().is_complete


def test_gae_of_one_env_is_that_of_many() -> None:
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=(9, 2)) for _ in range(3)]
    flags = [rng.random((9, 2)) < 0.2 for _ in range(2)]
    both = gae(*columns, *flags, gamma=0.9, lam=0.8)
    for i in range(2):
        one = gae(*(c[:, i] for c in columns), *(f[:, i] for f in flags), gamma=0.9, lam=0.8)
        np.testing.assert_array_equal(one.advantages, both.advantages[:, i])
    assert indexed(both.returns, 0).shape == (2,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["terminated", "truncated", "masked", "gamma 0"])
def test_gae_carries_nothing_across_an_end(how: str, bad: float) -> None:
    is_end = np.array([[how != "gamma 0"], [False]])
    never = np.zeros((2, 1), np.bool_)
    flags = [is_end if how == name else never for name in ("terminated", "truncated")]
    with np.errstate(all="raise"):
        found = gae(
            [[1.0], [bad]],
            np.zeros((2, 1)),
            np.zeros((2, 1)),
            *flags,
            gamma=0.0 if how == "gamma 0" else 0.99,
            mask=~is_end if how == "masked" else None,
        )
    assert found.advantages[0] == found.returns[0] == (how != "masked")
    assert not np.isfinite(found.advantages[1])
