from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from envmgr.collect.records import EpisodeRecord, OpenEpisode, as_return, flag_of
from envmgr.collect.statistics import RECENT, CollectStatistics, Spread
from envmgr.errors import EnvCrash, EnvProtocolError
from envmgr.manager.loop import failure_text
from tests.unit.collect_fakes import FakeManager

FLOATS = st.floats(-1e6, 1e6)


def record_of(episode_return: Any = 1.0, **changes: Any) -> EpisodeRecord:
    values: dict[str, Any] = {
        "number": 0,
        "env_id": 3,
        "nth": 1,
        "seed": 7,
        "generation": 2,
        "episode_return": episode_return,
        "length": 5,
        "terminated": True,
        "truncated": False,
        "abnormal": False,
        "failure": None,
        "duration_s": 0.5,
        "ended_s": 1.5,
    }
    return EpisodeRecord(**{**values, **changes})


class TestRewards:
    def sum_of(self, *rewards: Any) -> Any:
        episode = OpenEpisode(0, 0.0)
        for reward in rewards:
            episode = episode.after(reward, env_id=4)
        assert episode.length == len(rewards)
        return as_return(episode.rewards)

    @pytest.mark.parametrize(
        ("rewards", "expected"),
        [
            ((), 0.0),
            ((1.5, 2.0), 3.5),
            ((1, True, np.float32(0.5), np.int8(3)), 5.5),
            ((np.array(1.0), np.array([2.0])), 3.0),
            ((np.array([1.0, 2.0]), np.array([3, 4])), [4.0, 6.0]),
            ((np.array([1.0, 2.0]), 0.0), [1.0, 2.0]),  # an abnormal timestep's is 0.0
            (([1, 2], (3, 4)), [4.0, 6.0]),
        ],
    )
    def test_are_summed(self, rewards: Any, expected: Any) -> None:
        found = self.sum_of(*rewards)
        assert found == expected
        assert type(found) is type(expected)

    @pytest.mark.parametrize("reward", ["much", {"a": "much"}, object()])
    def test_that_are_no_numbers(self, reward: Any) -> None:
        with pytest.raises(EnvProtocolError, match="reward of env 4"):
            self.sum_of(reward)


class TestRecords:
    def test_are_json(self) -> None:
        line = json.dumps(record_of(2.0).as_dict(), allow_nan=False)
        assert json.loads(line) == {
            "episode": 0,
            "env_id": 3,
            "nth": 1,
            "seed": 7,
            "generation": 2,
            "return": 2.0,
            "length": 5,
            "terminated": True,
            "truncated": False,
            "abnormal": False,
            "failure": None,
            "duration_s": 0.5,
            "ended_s": 1.5,
        }

    @pytest.mark.parametrize(
        ("episode_return", "written"),
        [(math.nan, None), (math.inf, None), ([1.0, -math.inf], [1.0, None])],
    )
    def test_what_is_not_finite_is_null(self, episode_return: Any, written: Any) -> None:
        record = record_of(episode_return)
        assert json.loads(json.dumps(record.as_dict(), allow_nan=False))["return"] == written

    def test_flags(self) -> None:
        assert flag_of({"terminated": np.bool_(True)}, "terminated") is True
        assert flag_of({"truncated": np.array(False)}, "truncated") is False
        assert flag_of({}, "terminated") is None
        assert flag_of([{"terminated": True}], "terminated") is None


class TestFailureText:
    manager: Any = FakeManager([[1]] * 12)

    def test_of_the_error(self) -> None:
        error = EnvCrash("env 1 died", env_id=1, during="step")
        marks = {"abnormal": True, "error": error}
        for info in (marks, [{}, marks], ({"agent": 0}, marks)):
            assert failure_text(info, 1, self.manager) == "env 1 died"

    def test_normal_timesteps_have_none(self) -> None:
        assert failure_text({}, 1, self.manager) is None
        assert failure_text({"abnormal": False, "error": "no"}, 1, self.manager) is None

    def test_where_the_view_leaves_errors_out(self) -> None:
        self.manager.failures = [
            "env 1 (generation 0) raised A",
            "the host of env 1 (generation 1) died",
            "env 11 (generation 0) raised B",
        ]
        marks = {"abnormal": np.array(True)}
        assert failure_text(marks, 1, self.manager) == "the host of env 1 (generation 1) died"
        assert failure_text(marks, 11, self.manager) == "env 11 (generation 0) raised B"
        assert failure_text(marks, 2, self.manager) == "abnormal timestep"


class TestSpread:
    @given(st.lists(FLOATS, min_size=1))
    def test_is_what_numpy_says(self, values: list[float]) -> None:
        spread = Spread()
        for value in values:
            spread.add(value)
        found = spread.as_dict()
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
        assert found["std"] == pytest.approx(np.std(values), rel=1e-6, abs=1e-4)
        assert (found["min"], found["max"]) == (min(values), max(values))

    def test_of_arrays(self) -> None:
        spread = Spread()
        for value in ([1.0, 10.0], [3.0, 10.0]):
            spread.add(value)
        assert spread.as_dict() == {
            "mean": [2.0, 10.0],
            "std": [1.0, 0.0],
            "min": [1.0, 10.0],
            "max": [3.0, 10.0],
        }

    def test_of_nothing(self) -> None:
        assert repr(Spread()) == "Spread(n=0, mean=None, std=None, min=None, max=None)"
        assert Spread().as_dict() == {"mean": None, "std": None, "min": None, "max": None}


class TestStatistics:
    def test_abnormal_episodes_are_apart(self) -> None:
        statistics = CollectStatistics()
        statistics.add(record_of(4.0))
        statistics.add(record_of(100.0, abnormal=True, failure="it died"))
        found = statistics.as_dict()
        assert (found["episodes"], found["abnormal_episodes"]) == (1, 1)
        assert found["return"]["mean"] == found["return"]["mean_of_last_100"] == 4.0

    def test_recent_ones_only(self) -> None:
        statistics = CollectStatistics()
        for value in range(RECENT + 50):
            statistics.add(record_of(float(value)))
        assert statistics.recent_mean_return == np.mean(range(50, RECENT + 50))
        assert statistics.returns.mean == pytest.approx(np.mean(range(RECENT + 50)))

    def test_nothing_yet(self) -> None:
        found = CollectStatistics().as_dict()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert (found["steps_per_s"], found["return"]["mean_of_last_100"]) == (0.0, None)
