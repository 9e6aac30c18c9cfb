"""The episode log: which lines there are, that they are whole, and that none comes twice."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envmgr.core import ArrayBatch
from envmgr.core.call_journal import Fate
from envmgr.errors import ConfigError, EnvCrash, EnvRaised, EnvTimeout
from envmgr.observing import episode_log
from envmgr.observing.episode_log import EpisodeLog, plain
from envmgr.outcomes import Outcome, OutcomeStatus
from envmgr.reporting.figures import figures_of
from envmgr.reporting.folder import read_run
from envmgr.types import EnvTimestep


class Table:
    """What the log reads of the table of envs."""

    def __init__(self, env_num: int) -> None:
        self.episodes = [1] * env_num
        self.envs = [SimpleNamespace(generation=0) for _ in range(env_num)]


class Logged:
    """A log, and what is in its file."""

    def __init__(self, path: Path, env_num: int = 2) -> None:
        self.now = 0.0
        self.path = path
        self.table: Any = Table(env_num)
        self.log = EpisodeLog(str(path), env_num, lambda: self.now)
        self.log.open()

    def step(self, steps: dict[int, EnvTimestep], fate: Fate | None = None) -> None:
        """Send actions to envs, and hand out what they give."""
        self.log.sent(self.table, list(steps))
        self.now += 1.0
        self.log.timesteps(steps, fate)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def logged(tmp_path: Path) -> Any:
    found = Logged(tmp_path / "log.jsonl")
    yield found
    found.log.close()


def going(reward: Any = 1.0) -> EnvTimestep:
    return EnvTimestep(0, reward, False, {})


def ended(reward: Any = 1.0) -> EnvTimestep:
    return EnvTimestep(0, reward, True, {"terminated": True, "truncated": False})


def failed(failure: Any) -> EnvTimestep:
    return EnvTimestep(0, 0.0, True, {"abnormal": True, "truncated": True, "error": failure})


def crash(during: str = "step", generation: int = 0) -> EnvCrash:
    return EnvCrash("died of action 'secret'", env_id=0, during=during, generation=generation)


@pytest.mark.parametrize(
    ("rewards", "total"),
    [
        (({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 0.5}), {"a": 3.0, "b": 3.5}),  # b joins, a leaves
        (([1, 2.0], (3, 4.0)), [4, 6.0]),
        (({"team": {"a": 1}}, {"team": {"a": 2}}), {"team": {"a": 3}}),
        (([1.0], [1.0, 2.0]), [1.0, 2.0]),  # of different forms: the latest
    ],
)
def test_rewards_by_agent_and_in_lists_are_summed(
    logged: Logged, rewards: tuple[Any, ...], total: Any
) -> None:
    for reward in rewards[:-1]:
        logged.step({0: going(reward)})
    logged.step({0: ended(rewards[-1])})
    assert logged.lines[-1]["return"] == total


def test_each_episode_has_a_line_with_its_outcome(logged: Logged) -> None:
    logged.step({0: going(), 1: going(0.5)})
    logged.step({0: ended(), 1: going(0.5)})
    [line] = logged.lines
    assert line.pop("time") > 1e9
    assert line == {
        "envmgr_log": 1,
        "what": "episode",
        "env_id": 0,
        "generation": 0,
        "attempt": None,
        "during": None,
        "outcome": "completed",
        "cause": None,
        "raised": None,
        "exit_status": None,
        "limit_s": None,
        "return": 2.0,
        "length": 2,
        "seconds": 2.0,
    }
    logged.table.episodes[0], logged.table.envs[0].generation = 2, 3
    logged.step({0: ended(7.0), 1: failed(EnvTimeout("", env_id=1, during="step", limit_s=1.0))})
    first, second = logged.lines[1:]
    assert (first["return"], first["length"], first["generation"]) == (7.0, 1, 3)
    assert (second["outcome"], second["cause"]) == ("unresolved", "EnvTimeout")
    assert (second["return"], second["length"], second["seconds"]) == (None, 3, 3.0)


def test_a_failure_says_what_its_env_died_of_which_limit_it_passed_or_what_it_raised(
    logged: Logged,
) -> None:
    where: Any = {"env_id": 0, "during": "step"}
    died = EnvCrash("died", **where, exit_status=-9)
    hung = EnvTimeout("hung", **where, limit_s=0.5)
    raised = EnvRaised("raised", **where, type_name="builtins.ValueError")
    for failure in (died, hung, raised):
        logged.log.failed(failure)
        logged.step({0: failed(failure)})
    keys = ("what", "cause", "exit_status", "limit_s", "raised")
    assert [tuple(line[key] for key in keys) for line in logged.lines] == [
        (what, *why)
        for why in (
            ("EnvCrash", -9, None, None),
            ("EnvTimeout", None, 0.5, None),
            ("EnvRaised", None, None, "builtins.ValueError"),
        )
        for what in ("failure", "episode")
    ]


def test_an_action_that_was_not_executed_has_failed(logged: Logged) -> None:
    logged.step({0: failed(crash("idle", 4))})
    [line] = logged.lines
    assert (line["outcome"], line["cause"], line["generation"]) == ("failed", "EnvCrash", 4)


def test_neither_actions_nor_options_nor_texts_are_in_it(logged: Logged) -> None:
    raised = EnvRaised(
        "secret",
        env_id=0,
        during="step",
        type_name="k" * 900,
        remote_message="secret",
        remote_traceback="secret",
    )
    logged.log.failed(raised)
    logged.step({0: failed(raised)})
    logged.step({0: failed(crash())})
    logged.log.failed(crash("reset", 2))
    assert "secret" not in logged.path.read_text()
    lines = logged.lines
    assert [line["what"] for line in lines] == ["failure", "episode", "episode", "failure"]
    assert lines[0]["raised"] == "k" * 200
    assert (lines[3]["during"], lines[3]["generation"], lines[3]["length"]) == ("reset", 2, None)


def test_episodes_of_leases_have_their_attempt(logged: Logged) -> None:
    outcome = Outcome(OutcomeStatus.COMPLETED, "episode", 1, 2, 3, 10.0, 12.5, np.float32(4.0))
    logged.log.episode(outcome, 9)
    [line] = logged.lines
    found = [line[k] for k in ("env_id", "generation", "attempt", "return", "length", "seconds")]
    assert found == [1, 2, 3, 4.0, 9, 2.5]


def test_an_episode_that_was_left_does_not_count_for_the_next(logged: Logged) -> None:
    logged.step({0: going(100.0)})
    logged.table.episodes[0] = 2  # reset, or leased meanwhile
    logged.step({0: ended()})
    assert [(line["return"], line["length"]) for line in logged.lines] == [(1.0, 1)]


def test_returns_are_in_json_whatever_their_form(logged: Logged) -> None:
    logged.step({0: going(np.array([1.0, 2.0])), 1: going({"a": 1.0})})
    logged.step({0: ended(np.array([1.0, np.nan])), 1: ended({"a": np.float32(3.0)})})
    assert [line["return"] for line in logged.lines] == [[2.0, None], {"a": 4.0}]
    assert plain((True, 2, np.int64(3), float("inf"), "x")) == [1.0, 2.0, 3.0, None, None]


def test_batches_are_counted_as_timesteps_are(logged: Logged) -> None:
    ids, no = np.array([0, 1]), np.array([False, False])
    for k in range(3):
        logged.log.sent(logged.table, [0, 1])
        infos: list[dict[str, Any]] = [{}, {}]
        end = np.array([k == 2, False])
        if k == 1:
            infos[1] = failed(crash()).info
        batch = ArrayBatch(ids, None, np.array([1.0, 2.0]), end, no, infos)
        logged.log.batch(batch, None)
    found = [(n["env_id"], n["outcome"], n["return"], n["length"]) for n in logged.lines]
    assert found == [(1, "unresolved", None, 2), (0, "completed", 3.0, 3)]
    rewards = np.ones((2, 3))
    logged.log.batch(ArrayBatch(ids, None, rewards, ~no, no, [{}, {}]), None)
    rewards[:] = 9.0
    assert [line["return"] for line in logged.lines[2:]] == [[1.0] * 3, [3.0] * 3]


def test_what_is_handed_out_again_is_counted_once(tmp_path: Path) -> None:
    """Random steps, of which calls give some back, and envs that are reset meanwhile."""
    rng = random.Random(0)
    for trial in range(60):
        logged = Logged(tmp_path / f"{trial}.jsonl", 3)
        expected, sums = [], [(0.0, 0)] * 3
        owed: dict[int, EnvTimestep] = {}
        fate: Fate | None = None
        for _ in range(40):
            ids = [i for i in range(3) if i not in owed and rng.random() < 0.7]
            logged.log.sent(logged.table, ids)
            for env_id in ids:
                reward = float(rng.randrange(9))
                owed[env_id] = ended(reward) if rng.random() < 0.3 else going(reward)
                sums[env_id] = (sums[env_id][0] + reward, sums[env_id][1] + 1)
                if owed[env_id].done:
                    expected.append((env_id, *sums[env_id]))
                    sums[env_id] = (0.0, 0)
            given = {i: owed.pop(i) for i in sorted(owed) if rng.random() < 0.8}
            fate = Fate() if rng.random() < 0.8 else None
            logged.log.timesteps(given, fate)
            again = rng.random()
            if again < 0.3 and fate is not None:  # an interrupt
                fate.given_back = True
                owed.update(given)
            elif again < 0.5:  # `arrivals` was left
                left = {i: given[i] for i in given if rng.random() < 0.5}
                logged.log.owed(left)
                owed.update(left)
        logged.log.timesteps(owed, None)
        found = [(n["env_id"], n["return"], n["length"]) for n in logged.lines]
        assert sorted(found) == sorted(expected)
        logged.log.close()


def test_an_owed_timestep_that_a_reset_has_dropped_is_not_awaited(logged: Logged) -> None:
    fate = Fate()
    logged.step({0: going(5.0)}, fate)
    fate.given_back = True
    logged.log.timesteps({}, None)
    logged.table.episodes[0] = 2
    logged.step({0: ended(1.0)})
    assert [(line["return"], line["length"]) for line in logged.lines] == [(1.0, 1)]


def test_lines_are_written_with_one_write_each_call(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    write = os.write
    monkeypatch.setattr(
        episode_log.os, "write", lambda fd, data: (writes.append(bytes(data)), write(fd, data))[1]
    )
    logged.step({0: ended(), 1: ended()})
    assert [data.count(b"\n") for data in writes] == [2]
    logged.log.failed(crash())
    assert [data.endswith(b"}\n") for data in writes] == [True, True]


def test_a_full_disk_costs_lines_and_nothing_else(
    logged: Logged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, room = os.write, [10, 0]

    def full(fd: int, data: bytes) -> int:
        left = room.pop(0) if room else None
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data if left is None else data[:left])

    monkeypatch.setattr(episode_log.os, "write", full)
    logged.step({0: ended()})  # a part of the line
    logged.step({0: ended()})  # nothing, not even the end of that line
    monkeypatch.undo()
    logged.log.failed(crash())
    logged.step({0: ended(4.0)})
    [record] = [r for r in caplog.records if "episode log" in r.message]
    assert "lines are missing" in record.message
    run = read_run(logged.path)
    assert list(run.returns)[-1] == 4.0
    assert [note for note in run.unread if "1 of 3 lines" in note], run.unread


def test_its_report_charges_the_env_that_failed_and_says_why(logged: Logged) -> None:
    dead = EnvCrash("", env_id=0, during="step", exit_status=3)
    logged.log.failed(dead)
    logged.step({0: failed(dead), 1: failed(dead)})  # the latter has lost its worker with it
    late = EnvTimeout("", env_id=1, during="reset", limit_s=2.0)
    logged.log.failed(late)
    run = read_run(logged.path)
    assert [one.text.partition(" of ")[0] for one in run.failures] == [
        "EnvCrash (exit code 3)",
        "EnvTimeout (limit 2 s)",
    ]
    logged.log.failed(EnvCrash("", env_id=0, during="step", exit_status=-9))
    run = read_run(logged.path)
    assert run.failures[-1].text.startswith("EnvCrash (killed by SIGKILL) of env 0")
    by_env = {env["env_id"]: env["failures"] for env in figures_of(run)["envs"]}
    assert by_env == {0: 2, 1: 1}


def test_it_is_appended_to_by_each_launch_and_by_others(tmp_path: Path) -> None:
    first, second = Logged(tmp_path / "log.jsonl"), Logged(tmp_path / "log.jsonl")
    first.step({0: ended()})
    second.step({0: ended()})
    first.log.close()
    first.step({0: ended()})  # closed: nothing is written
    first.log.open()
    first.step({0: ended()})
    first.log.close()
    second.log.close()
    assert [line["length"] for line in second.lines] == [1, 1, 1]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none" / "a.jsonl", tmp_path / "pipe", "a\0b", "/dev/null"):
        with pytest.raises(ConfigError, match=r"^manager\.episode_log is "):
            EpisodeLog(str(path), 1).open()
