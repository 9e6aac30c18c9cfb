from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from envmgr.collect import Collector, EpisodeCollector, RolloutCollector
from envmgr.errors import ActionError, ConfigError, NothingReadyError, StateError
from tests.unit.collect_fakes import FakeManager, answer_zero, everything


def collector_of(manager: FakeManager, policy: Any = answer_zero, **kwargs: Any) -> Collector:
    return Collector(manager, policy, **kwargs)  # type: ignore[arg-type]


def all_steps(collector: Collector) -> int:
    return sum(r.length for r in collector.episodes) + sum(collector.unfinished.values())


def one_at_a_time(pending: list[int]) -> list[int]:
    return pending[:1]


def last_one(pending: list[int]) -> list[int]:
    return pending[-1:]


class TestSteps:
    @pytest.mark.parametrize("take", [everything, one_at_a_time, last_one])
    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 100, 101, 102])
    def test_exactly_so_many(self, take: Any, steps: int) -> None:
        manager = FakeManager([[3], [5], [7]], take=take)
        collector = collector_of(manager)
        collector.collect(steps=steps)
        assert collector.statistics.steps == len(manager.executed) == steps
        assert all_steps(collector) == steps
        assert len(manager.ready_env) == 3  # nothing is left under way

    def test_none_are_sent_if_more_are_under_way(self) -> None:
        manager = FakeManager([[9]] * 6, take=lambda pending: pending[-3:])
        collector = collector_of(manager)
        next(iter(collector.iterate()))
        assert len(manager._pending) == 3
        collector.collect(steps=1)
        assert not manager._pending

    def test_go_on_from_where_it_ended(self) -> None:
        manager = FakeManager([[10], [10]])
        collector = collector_of(manager)
        collector.collect(steps=8)
        assert collector.unfinished == {0: 4, 1: 4}
        ended = collector.collect(steps=12)
        assert [(r.env_id, r.length, r.episode_return) for r in ended] == [
            (0, 10, 55.0),
            (1, 10, 55.0),
        ]
        assert collector.unfinished == {}

    def test_observations_reach_the_policy_by_env(self) -> None:
        seen: list[dict[int, Any]] = []

        def policy(obs: dict[int, Any]) -> dict[int, int]:
            seen.append(obs)
            return {i: 10 * i + step for i, (_, step) in obs.items()}

        manager = FakeManager([[5], [5]], take=last_one)
        collector_of(manager, policy).collect(steps=6)
        assert all(env_id == i for obs in seen for i, (env_id, _) in obs.items())
        assert [action for i, action in manager.executed if i == 1] == [10, 11, 12, 13, 14]


class TestEpisodes:
    @pytest.mark.parametrize("take", [everything, one_at_a_time, last_one])
    def test_are_the_first_to_begin_not_the_first_to_end(self, take: Any) -> None:
        manager = FakeManager([[50], [2], [2]], take=take)
        collector = collector_of(manager)
        ended = collector.collect(episodes=3)
        assert sorted(r.length for r in ended) == [2, 2, 50]
        assert collector.unfinished == {}

    @pytest.mark.parametrize("take", [everything, one_at_a_time])
    @pytest.mark.parametrize("episodes", [1, 2, 3, 4, 20])
    def test_exactly_so_many(self, take: Any, episodes: int) -> None:
        collector = collector_of(FakeManager([[3, 1], [4, 1, 5], [9, 2]], take=take))
        assert len(collector.collect(episodes=episodes)) == episodes
        assert collector.unfinished == {}
        assert len(collector.collect(episodes=episodes)) == episodes

    def test_those_under_way_count_as_the_first_to_begin(self) -> None:
        collector = collector_of(FakeManager([[30], [4], [4]]))
        collector.collect(steps=3)
        assert sorted(r.length for r in collector.collect(episodes=3)) == [4, 4, 30]

    def test_an_abnormal_one_is_recorded_and_replaced(self) -> None:
        collector = collector_of(FakeManager([[-3, 4], [5]]))
        ended = collector.collect(episodes=2)
        assert [(r.env_id, r.length, r.abnormal) for r in ended] == [
            (0, 3, True),
            (1, 5, False),
            (0, 4, False),
        ]
        assert ended[0].failure == "env 0 (generation 0) died"
        assert (ended[0].episode_return, ended[0].truncated) == (3.0, True)
        statistics = collector.statistics
        assert (statistics.episodes, statistics.abnormal_episodes, statistics.steps) == (2, 1, 12)
        assert statistics.returns.n == 2

    def test_records_say_which_env_ran_what(self) -> None:
        collector = collector_of(FakeManager([[2], [3]], seed=[7, None]))
        collector.collect(steps=10)
        assert [(r.number, r.env_id, r.nth, r.seed, r.generation) for r in collector.episodes] == [
            (0, 0, 0, 7, 0),
            (1, 1, 0, None, 0),
            (2, 0, 1, 7, 0),
        ]

    def test_times_are_those_of_the_clock(self) -> None:
        now = iter(range(0, 10_000, 10))
        collector = collector_of(FakeManager([[2]]), clock=lambda: float(next(now)))
        (record,) = collector.collect(episodes=1)
        # began 0; first action 10; timesteps at 20 and 30
        assert (record.duration_s, record.ended_s) == (20.0, 30.0)
        assert collector.statistics.elapsed_s == 40.0


class TestTheEnd:
    @pytest.mark.parametrize("take", [everything, one_at_a_time])
    def test_all_budgets_spent(self, take: Any) -> None:
        collector = collector_of(FakeManager([[3], [5]], take=take, episode_num=2))
        assert len(collector.collect()) == 4
        assert len(collector.collect(steps=100)) == 0
        assert all_steps(collector) == collector.statistics.steps == 16

    def test_budgets_end_it_before_the_goal(self) -> None:
        collector = collector_of(FakeManager([[3], [5]], episode_num=2))
        assert len(collector.collect(episodes=100)) == 4

    def test_a_view_that_cannot_stack_nothing(self) -> None:
        class Stacking(FakeManager):
            @property
            def ready_obs(self) -> Any:
                if self.done:
                    raise NothingReadyError("an empty treetensor cannot be stacked")
                return super().ready_obs

        assert len(collector_of(Stacking([[3]], episode_num=2)).collect()) == 2

    def test_auto_reset_off(self) -> None:
        manager = FakeManager([[2], [3]], auto_reset=False)
        collector = collector_of(manager)
        collector.collect(episodes=5)
        assert manager.resets == [[0, 1], [0]]
        assert [r.env_id for r in collector.episodes] == [0, 1, 0, 1, 0]

    def test_episodes_under_way_are_not_more_than_were_asked_for(self) -> None:
        collector = collector_of(FakeManager([[3], [2], [2]]))
        collector.collect(steps=3)
        assert [r.env_id for r in collector.collect(episodes=1)] == [0]  # the first that began
        assert collector.unfinished == {1: 1, 2: 1}
        assert [r.env_id for r in collector.collect(episodes=3)] == [1, 2, 0]

    def test_an_abnormal_episode_is_replaced_by_one_under_way(self) -> None:
        collector = collector_of(FakeManager([[-2, 9], [3]]))
        collector.collect(steps=2)
        records = collector.collect(episodes=1)
        assert [(r.env_id, r.abnormal) for r in records] == [(0, True), (1, False)]

    def test_auto_reset_off_goes_on_with_those_that_can(self) -> None:
        manager = FakeManager([[2], [6]], auto_reset=False, take=last_one)
        collector_of(manager).collect(steps=8)
        assert manager.resets == []
        assert len(manager.executed) == 8

    def test_what_cannot_become_ready_is_not_waited_for(self) -> None:
        class Broken(FakeManager):
            @property
            def ready_obs(self) -> Any:
                raise NothingReadyError("all envs have failed for good")

        with pytest.raises(NothingReadyError, match="failed for good"):
            collector_of(Broken([[2]])).collect(steps=1)

    @pytest.mark.parametrize(
        ("goal", "message"),
        [
            ({"steps": 0}, "steps is 0"),
            ({"episodes": -1}, "episodes is -1"),
            ({"steps": 1.5}, "steps is 1.5"),
            ({"steps": 1, "episodes": 1}, "ends with one of the two"),
        ],
    )
    def test_goals_that_make_no_sense(self, goal: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            collector_of(FakeManager([[2]])).collect(**goal)

    def test_one_iteration_at_a_time(self) -> None:
        collector = collector_of(FakeManager([[2]]))
        first = collector.iterate(steps=4)
        next(first)
        with pytest.raises(StateError, match="iterating already"):
            collector.collect(steps=1)
        first.close()  # type: ignore[attr-defined]
        collector.collect(steps=1)
        assert collector.statistics.steps == 2


class TestExceptions:
    def test_of_the_policy_leave_what_was_collected(self) -> None:
        calls = iter([0, 0, 0, 1])

        def policy(obs: dict[int, Any]) -> dict[int, int]:
            if next(calls, 0):
                raise KeyboardInterrupt
            return dict.fromkeys(obs, 0)

        collector = collector_of(FakeManager([[2], [9]]), policy)
        with pytest.raises(KeyboardInterrupt):
            collector.collect(steps=100)
        assert collector.statistics.steps == all_steps(collector) == 6
        assert [r.length for r in collector.episodes] == [2]
        collector.collect(steps=4)
        assert collector.statistics.steps == all_steps(collector) == 10

    @pytest.mark.parametrize(
        ("actions", "message"),
        [
            ([0, 0], "a value of type list"),
            (None, "NoneType"),
            ({0: 0}, r"no action for envs \[1\]"),
            ({0: 0, 1: 0, 2: 0}, r"actions for \[2\]"),
            ({0: 0, "1": 0}, r"no action for envs \[1\]"),
        ],
    )
    def test_bad_actions_are_refused_before_anything_is_sent(
        self, actions: Any, message: str
    ) -> None:
        manager = FakeManager([[2], [2]])
        with pytest.raises(ActionError, match=message):
            collector_of(manager, lambda obs: actions).collect(steps=10)
        assert manager.executed == []

    def test_a_refused_step_can_be_repeated(self) -> None:
        class Refusing(FakeManager):
            refuse = True

            def step(self, actions: Any) -> Any:
                if self.refuse:
                    raise ActionError("refused")
                return super().step(actions)

        manager = Refusing([[2], [2]])
        collector = collector_of(manager)
        with pytest.raises(ActionError):
            collector.collect(steps=2)
        manager.refuse = False
        collector.collect(steps=2)
        assert collector.statistics.steps == 2

    def test_an_interrupted_step_was_perhaps_not_sent(self) -> None:
        class Interrupted(FakeManager):
            interrupt = True

            def step(self, actions: Any) -> Any:
                if self.interrupt:
                    raise KeyboardInterrupt
                return super().step(actions)

        manager = Interrupted([[2], [2]])
        collector = collector_of(manager)
        with pytest.raises(KeyboardInterrupt):
            collector.collect(steps=2)
        manager.interrupt = False
        collector.collect(steps=2)
        assert collector.statistics.steps == 2

    def test_all_of_a_batch_is_counted_before_anybody_is_told(self) -> None:
        told: list[int] = []

        def tell(record: Any) -> None:
            told.append(record.env_id)
            raise OSError("no space left")

        collector = collector_of(FakeManager([[2], [2], [9]]), on_episode=tell)
        with pytest.raises(OSError, match="no space"):
            collector.collect(steps=100)
        assert told == [0]
        assert collector.statistics.steps == all_steps(collector) == 6
        assert len(collector.episodes) == 2
        with pytest.raises(OSError, match="no space"):
            collector.collect(steps=1)
        assert told == [0, 0]

    def test_who_was_interrupted_is_told_of_the_others_later(self) -> None:
        told: list[int] = []

        def tell(record: Any) -> None:
            if record.number == 1 and not interrupts:
                interrupts.append(1)
                raise KeyboardInterrupt
            told.append(record.number)

        interrupts: list[int] = []
        collector = collector_of(FakeManager([[2], [2], [2]]), on_episode=tell)
        with pytest.raises(KeyboardInterrupt):
            collector.collect(steps=6)
        collector.collect(steps=6)
        assert told == [episode.number for episode in collector.episodes] == [0, 1, 2, 3, 4, 5]

    def test_records_need_not_be_kept(self) -> None:
        told: list[int] = []
        collector = collector_of(
            FakeManager([[1]]), on_episode=lambda r: told.append(r.number), keep_episodes=False
        )
        collector.collect(episodes=3)
        assert told == [0, 1, 2]
        assert collector.episodes == []
        assert collector.statistics.episodes == 3


class TestAnyTiming:
    @given(
        st.lists(
            st.lists(st.integers(1, 6) | st.integers(-6, -1), min_size=1, max_size=4).filter(
                lambda lengths: max(lengths) > 0
            ),
            min_size=1,
            max_size=4,
        ),
        st.data(),
    )
    def test_every_timestep_is_in_one_episode(self, lengths: Any, data: Any) -> None:
        def some(pending: list[int]) -> list[int]:
            taken = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
            return sorted(taken)

        manager = FakeManager(lengths, take=some)
        collector = collector_of(manager)
        for goal in data.draw(st.lists(st.sampled_from(["steps", "episodes"]), max_size=4)):
            before = getattr(collector.statistics, goal)
            wanted = data.draw(st.integers(1, 12))
            collector.collect(**{goal: wanted})
            assert getattr(collector.statistics, goal) == before + wanted
        assert collector.statistics.steps == len(manager.executed) == all_steps(collector)
        assert sorted(collector.episodes, key=lambda r: r.number) == collector.episodes
        for env_id, expected in enumerate(lengths):
            mine = [r for r in collector.episodes if r.env_id == env_id]
            for nth, record in enumerate(mine):
                length = expected[nth % len(expected)]
                assert (record.nth, record.length) == (nth, abs(length))
                assert record.abnormal == (length < 0)


@pytest.mark.parametrize(
    "collector", [Collector, EpisodeCollector, partial(RolloutCollector, n_steps=1)]
)
def test_the_manager_comes_first(collector: Any) -> None:
    for wrong in (answer_zero, None):
        with pytest.raises(ConfigError, match=r"the second the policy.*Collector\(manager, pol"):
            collector(wrong, FakeManager([[1]]))


def test_without_a_policy_actions_are_random() -> None:
    def actions(seed: int | None) -> list[tuple[int, Any]]:
        manager = FakeManager([[5], [5]], seed=seed)
        collector_of(manager, None).collect(steps=20)
        return manager.executed

    assert actions(3) == actions(3)
    assert actions(3) != actions(4)
    assert actions(None) != actions(None)


def test_timesteps_are_yielded_as_they_came() -> None:
    collector = collector_of(FakeManager([[2], [3]]))
    batches: Iterator[Any] = collector.iterate(steps=5)
    assert [{i: t.obs for i, t in batch.items()} for batch in batches] == [
        {0: (0, 1), 1: (1, 1)},
        {0: (0, 2), 1: (1, 2)},
        {0: (0, 1)},
    ]
