"""The command line in this process: what it prints, writes and returns."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from envmgr.cli import main
from envmgr.config_file import load_config

CONFIG = """
env: {id: CartPole-v1}
manager: {type: base, env_num: 3, seed: 0}
collect: {steps: 200}
"""
USERS_MODULE = '''
import gymnasium


class FaultyEnv(gymnasium.Env):
    """Gives 1 for each of 5 steps; raises in the 3rd step of every `every`th episode."""

    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, every=2, fault=None):
        if fault == "build":
            raise ValueError("no licence\\nfor this simulator")
        if fault == "exit":
            raise SystemExit("no licence")
        self.every, self.episode = every, 0

    def reset(self, *, seed=None, options=None):
        self.episode, self.n = self.episode + 1, 0
        return 0, {}

    def step(self, action):
        self.n += 1
        if self.n == 3 and self.episode % self.every == 0:
            raise RuntimeError("lost the\\nconnection")
        return self.n, 1.0, self.n == 5, False, {}


def always_one(observation_space, action_space, seed):
    return lambda obs: dict.fromkeys(obs, 1)


def only_the_first(observation_space, action_space, seed):
    return lambda obs: {0: 1}


def broken(observation_space, action_space, seed):
    return lambda obs: 1 / 0


class TellsItsServer:
    """Its server goes away before the third step."""

    def __init__(self, observation_space, action_space, seed):
        self.n = 0

    def __call__(self, obs):
        self.n += 1
        if self.n == 3:
            raise BrokenPipeError(32, "the server has gone")
        return dict.fromkeys(obs, 0)


def opens_its_weights(observation_space, action_space, seed):
    return lambda obs: open("weights.bin")


def loads(observation_space, action_space, seed):
    raise RuntimeError("no weights")


def takes_one(obs):
    return obs
'''


REWARDED = """
import gymnasium
import numpy as np


class Rewarded(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(99)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return 0, {}

    def step(self, action):
        self.n, self.steps = self.n + 1, self.steps + 1
        reward = np.ones(2) if self.steps == 50 else 1.0
        return self.n, reward, self.n == 5, False, {}
"""
SHOWN = """
import gymnasium
import numpy as np


class ShownEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return 0, {}

    def step(self, action):
        self.n += 1
        return self.n, 1.0, self.n == 2, False, {}

    def render(self):
        return np.full((16, 16, 3), 100 * self.n, np.uint8)
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def envmgr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs the command line in a folder with `c.yaml` and a module of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "cli_users_module.py").write_text(USERS_MODULE)
    monkeypatch.setattr("sys.path", [*sys.path])

    def run(*args: Any) -> Result:
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield run
    for name in ("cli_users_module", "cli_allowed_module"):
        sys.modules.pop(name, None)


def episodes_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def summary_in(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@contextlib.contextmanager
def locked_elsewhere(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a run in another process does."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        yield
        other.communicate()


FAULTY = ("--set", "env.id=null", "--set", "env.entry=cli_users_module:FaultyEnv")


class TestRun:
    def test_writes_what_it_collected(self, envmgr: Run, tmp_path: Path) -> None:
        result = envmgr("run", "c.yaml", "--output", "out")
        assert (result.code, result.err) == (0, "")
        assert "3 envs of CartPole-v1 on base: done" in result.out
        episodes, summary = episodes_in(tmp_path / "out"), summary_in(tmp_path / "out")
        assert summary["ending"] == "done"
        assert summary["steps"] == 200
        assert summary["episodes"] == len(episodes) > 0
        assert sum(e["length"] for e in episodes) + summary["unfinished_steps"] == 200
        assert summary["return"]["mean"] == pytest.approx(
            sum(e["return"] for e in episodes) / len(episodes)
        )
        assert {e["seed"] == e["env_id"] for e in episodes} == {True}
        assert summary["stats"]["states"] == {"RUN": 3}
        told = {"envmgr", "python", "numpy", "gymnasium", "platform", "hot"}
        assert set(summary["versions"]) == told

    def test_says_how_many_workers_auto_has_become(self, envmgr: Run) -> None:
        auto = ("--set", "manager.type=subprocess", "--set", "manager.num_workers=auto")
        result = envmgr("run", "c.yaml", "--no-output", *auto)
        assert result.code == 0
        assert re.search(r"workers +\d \(auto: ", result.out)
        assert "workers" not in envmgr("run", "c.yaml", "--no-output").out

    def test_says_what_it_means_that_no_kind_was_given(self, envmgr: Run, tmp_path: Path) -> None:
        assert "no manager.type" not in envmgr("run", "c.yaml", "--no-output").out
        (tmp_path / "c.yaml").write_text(CONFIG.replace("type: base, ", ""))
        assert "no manager.type in the config, so base" in envmgr("run", "c.yaml").out

    def test_its_config_runs_the_same_again(self, envmgr: Run, tmp_path: Path) -> None:
        envmgr("run", "c.yaml", "--seed", 5, "--episodes", 4, "--output", "one")
        text = (tmp_path / "one/config.yaml").read_text()
        assert "numpy" in text.splitlines()[1]
        written = load_config(tmp_path / "one/config.yaml")
        assert (written.manager.seed, written.collect.steps, written.collect.episodes) == (
            5,
            None,
            4,
        )
        envmgr("run", "one/config.yaml", "--output", "two")

        def without_times(folder: str) -> list[dict[str, Any]]:
            timed = ("duration_s", "ended_s")
            return [
                {key: value for key, value in e.items() if key not in timed}
                for e in episodes_in(tmp_path / folder)
            ]

        assert without_times("one") == without_times("two")
        envmgr("run", "one/config.yaml", "--seed", 6, "--output", "three")
        assert without_times("one") != without_times("three")

    def test_overrides_come_in_order(self, envmgr: Run, tmp_path: Path) -> None:
        sets = [f"--set=manager.env_num={n}" for n in (5, 2)]
        assert envmgr("run", "c.yaml", *sets, "--steps", "3.3e1", "--output", "out").code == 0
        summary = summary_in(tmp_path / "out")
        assert (summary["env_num"], summary["steps"]) == (2, 33)

    def test_without_a_folder_results_go_to_a_new_one(self, envmgr: Run, tmp_path: Path) -> None:
        for _ in range(2):
            assert envmgr("run", "c.yaml").code == 0
        folders = list((tmp_path / "runs").iterdir())
        assert len(folders) == 2
        assert all(folder.name.startswith("c-") for folder in folders)

    def test_the_config_may_name_the_folder(self, envmgr: Run, tmp_path: Path) -> None:
        assert envmgr("run", "c.yaml", "--set", "collect.output=a/b").code == 0
        assert envmgr("run", "c.yaml", "--set", "collect.output=a/b", "--output", "c").code == 0
        assert summary_in(tmp_path / "a/b")["steps"] == summary_in(tmp_path / "c")["steps"] == 200

    def test_results_are_not_overwritten_unawares(self, envmgr: Run, tmp_path: Path) -> None:
        envmgr("run", "c.yaml", "--output", "out")
        refused = envmgr("run", "c.yaml", "--output", "out", "--steps", 10)
        assert refused.code == 2
        assert "holds the results of another run" in refused.err
        assert summary_in(tmp_path / "out")["steps"] == 200
        assert envmgr("run", "c.yaml", "--output", "out", "--steps", 10, "--force").code == 0
        assert summary_in(tmp_path / "out")["steps"] == 10

    def test_force_replaces_figures_and_videos_of_another_run(
        self, envmgr: Run, tmp_path: Path
    ) -> None:
        assert envmgr("run", "c.yaml", "--set=collect.loggers=[csv]", "--output", "out").code == 0
        assert (tmp_path / "out/metrics.csv").exists()
        picture = tmp_path / "out/old.png"
        picture.write_bytes(b"\x89PNG\r\n\x1a\n")
        assert envmgr("report", "out").code == 0
        assert "old.png" in (tmp_path / "out/report.html").read_text()
        os.utime(picture, (1e9, 1e9))
        assert envmgr("run", "c.yaml", "--output", "out", "--force").code == 0
        assert not (tmp_path / "out/metrics.csv").exists()
        assert "old.png" not in (tmp_path / "out/report.html").read_text()
        (tmp_path / "other").mkdir()
        (tmp_path / "other/metrics.csv").touch()
        assert "(metrics.csv)" in envmgr("run", "c.yaml", "--output", "other").err

    @pytest.mark.parametrize("force", [(), ("--force",)])
    def test_leaves_a_run_alone_that_goes_on(
        self, envmgr: Run, tmp_path: Path, force: tuple[str, ...]
    ) -> None:
        out = tmp_path / "out"
        assert envmgr("run", "c.yaml", "--output", "out").code == 0
        (out / "process.json").write_text('{"pid": 4711, "started": "", "host": ""}')
        with locked_elsewhere(out):
            before = {path.name: path.read_bytes() for path in out.iterdir()}
            refused = envmgr("run", "c.yaml", "--output", "out", *force)
            assert refused.code == 2
            assert "the run in 'out' is still going on, as process 4711" in refused.err
            assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert envmgr("run", "c.yaml", "--output", "out", "--force").code == 0
        assert not (out / "run.lock").exists()

    def test_may_write_nothing(self, envmgr: Run, tmp_path: Path) -> None:
        before = set(tmp_path.iterdir())
        result = envmgr("run", "c.yaml", "--no-output")
        assert result.code == 0
        assert "not written" in result.out
        assert set(tmp_path.iterdir()) - before <= {tmp_path / "__pycache__"}

    def test_ends_with_the_budgets(self, envmgr: Run, tmp_path: Path) -> None:
        for extra in ([], ["--set", "manager.auto_reset=false"]):
            result = envmgr(
                *("run", "c.yaml", "--set", "collect.steps=null", "--output", "out", "--force"),
                *("--set", "manager.episode_num=2", *extra),
            )
            assert result.code == 0
            episodes = episodes_in(tmp_path / "out")
            assert sorted((e["env_id"], e["nth"]) for e in episodes) == [
                (i, n) for i in range(3) for n in range(2)
            ]

    def test_a_policy_of_ones_own(self, envmgr: Run, tmp_path: Path) -> None:
        name = "collect.policy=cli_users_module:always_one"
        envmgr("run", "c.yaml", "--episodes", 6, "--set", name, "--output", "out")
        assert all(e["length"] <= 12 for e in episodes_in(tmp_path / "out"))  # it falls at once


class TestFailures:
    def test_are_lived_with(self, envmgr: Run, tmp_path: Path) -> None:
        result = envmgr("run", "c.yaml", *FAULTY, "--episodes", 9, "--output", "out")
        assert result.code == 0
        episodes = episodes_in(tmp_path / "out")
        abnormal = [e for e in episodes if e["abnormal"]]
        assert len(episodes) - len(abnormal) == 9
        assert {(e["return"], e["length"]) for e in abnormal} == {(2.0, 3)}
        assert "Traceback" in abnormal[0]["failure"]
        lines = [line for line in result.err.splitlines() if line.startswith("warning: ")]
        assert len(lines) == len(abnormal) == summary_in(tmp_path / "out")["abnormal_episodes"]
        assert "raised RuntimeError in its step: lost the connection" in lines[0]
        assert f"{len(abnormal)} failures: EnvRaised x{len(abnormal)} (envs 0, 1, 2" in result.out

    def test_that_are_too_many_end_it(self, envmgr: Run, tmp_path: Path) -> None:
        every = ("--set", "env.kwargs.every=1", "--set", "manager.max_failures=2")
        result = envmgr("run", "c.yaml", *FAULTY, *every, "--output", "out")
        assert result.code == 1
        summary = summary_in(tmp_path / "out")
        assert summary["ending"] == "failed"
        assert summary["steps"] == sum(e["length"] for e in episodes_in(tmp_path / "out")) > 0
        limit, first, hint, kept = result.err.strip().splitlines()[-4:]
        assert limit.startswith("envmgr: error: env 0 failed 3 times within 60 s")
        assert "--set manager.on_exhausted=drop" in limit
        assert "reset(" not in limit  # nobody can call that here
        assert first.startswith("  env 0 (generation 0) raised RuntimeError in its step: lost")
        assert hint == "(--traceback shows where in the env's code.)"
        kinds = f"{summary['episodes']} episodes, {summary['abnormal_episodes']} abnormal ones"
        assert f"{kinds} and " in kept
        assert kept.endswith("timesteps had been collected and are kept in out")

    def test_that_leave_no_env_end_it(self, envmgr: Run, tmp_path: Path) -> None:
        every = ("--set", "env.kwargs.every=1", "--set", "manager.on_exhausted=drop")
        result = envmgr("run", "c.yaml", *FAULTY, *every, "--output", "out")
        assert result.code == 1
        assert "no env is left after" in result.err
        assert summary_in(tmp_path / "out")["stats"]["states"] == {"DONE": 3}

    def test_of_the_launch(self, envmgr: Run, tmp_path: Path) -> None:
        fault = ("--set", "env.kwargs.fault=build")
        result = envmgr("run", "c.yaml", *FAULTY, *fault, "--output", "out")
        assert result.code == 1
        error, cause, hint, kept = result.err.strip().splitlines()
        assert error.startswith("envmgr: error: 3 of 3 envs could not be launched")
        assert hint == "(--traceback shows where in the env's code.)"
        assert cause.startswith("  - envs 0, 1, 2 (generation 0) raised ValueError in their con")
        assert ": no licence for this simulator" in cause
        assert kept == "envmgr: the run failed; nothing had been collected; see out"
        assert "Traceback" in summary_in(tmp_path / "out")["stats"]["latest_failures"][0]

    def test_of_a_config_that_is_the_name_of_an_env(self, envmgr: Run) -> None:
        result = envmgr("run", "CartPole-v1")
        assert result.code == 2
        assert "`envmgr init CartPole-v1` writes a config" in result.err
        assert "init" not in envmgr("run", "absent.yaml").err

    def test_of_a_section_that_is_switched_on(self, envmgr: Run) -> None:
        result = envmgr("run", "c.yaml", "--set", "manager.metrics=true")
        assert result.code == 2
        assert "({} for their defaults)" in result.err

    def test_with_tracebacks(self, envmgr: Run) -> None:
        fault = ("--set", "env.kwargs.fault=build", "--no-output", "--traceback")
        result = envmgr("run", "c.yaml", *FAULTY, *fault)
        assert "raise ValueError" in result.err

    def test_of_a_launch_that_an_env_ends_say_where(self, envmgr: Run) -> None:
        fault = ("--set", "env.kwargs.fault=exit", "--no-output")
        _, cause, _ = envmgr("run", "c.yaml", *FAULTY, *fault).err.splitlines()
        assert "called sys.exit('no licence') in their construction, at cli_users_module.p" in cause
        assert cause.endswith(" in __init__")
        whole = envmgr("run", "c.yaml", *FAULTY, *fault, "--traceback").err
        assert whole.count('raise SystemExit("no licence")') == 1
        assert cause in whole.splitlines()

    @pytest.mark.parametrize(
        ("policy", "part"),
        [
            ("only_the_first", "no action for envs [1, 2]"),
            ("broken", "ZeroDivisionError: division by zero"),
            ("loads", "RuntimeError: no weights"),
            ("TellsItsServer", "BrokenPipeError: [Errno 32] the server has gone"),
            ("opens_its_weights", "FileNotFoundError: [Errno 2] No such file or directory: 'wei"),
        ],
    )
    def test_of_the_policy(self, envmgr: Run, policy: str, part: str, tmp_path: Path) -> None:
        name = f"collect.policy=cli_users_module:{policy}"
        result = envmgr("run", "c.yaml", "--set", name, "--output", "out")
        assert result.code == 1
        assert part in result.err
        assert part in summary_in(tmp_path / "out")["error"]
        # where in the user's own code, unless envmgr itself has refused something
        assert ("Traceback" in result.err) == (policy != "only_the_first")
        if policy == "TellsItsServer":
            kept = "no episode had ended, so 6 timesteps of unfinished ones are not kept; see out"
            assert kept in result.err

    def test_of_the_config_that_come_late_keep_what_there_is(
        self, envmgr: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "cli_users_module.py").write_text(REWARDED)
        entry = ("--set", "env.id=null", "--set", "env.entry=cli_users_module:Rewarded")
        counts = ("--set", "manager.episode_statistics=true")
        result = envmgr("run", "c.yaml", *entry, *counts, "--output", "out")
        assert result.code == 1
        assert "take rewards that are one number" in result.err
        assert "timesteps had been collected and are kept in out" in result.err
        assert len(episodes_in(tmp_path / "out")) == 27
        summary = summary_in(tmp_path / "out")
        assert (summary["ending"], summary["episodes"]) == ("failed", 27)

    def test_of_the_disk(
        self, envmgr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def add(*args: Any) -> None:
            raise OSError(28, "No space left on device", "out/episodes.jsonl")

        monkeypatch.setattr("envmgr.cli.output.RunFolder.add", add)
        result = envmgr("run", "c.yaml", "--output", "out")
        assert result.code == 1
        assert "the results cannot be written: [Errno 28] No space left" in result.err
        assert "Traceback" not in result.err
        assert summary_in(tmp_path / "out")["ending"] == "failed"


def cut_off(folder: Path, n_episodes: int) -> None:
    """Make the folder of a run look as if it had been killed after so many episodes."""
    lines = (folder / "episodes.jsonl").read_text().splitlines(keepends=True)
    (folder / "episodes.jsonl").write_text("".join(lines[:n_episodes]))
    for name in ("summary.json", "report.html", "report.json"):
        (folder / name).unlink()


class TestResume:
    def test_collects_the_rest(self, envmgr: Run, tmp_path: Path) -> None:
        loggers = ("--set", "collect.loggers=[csv]")
        assert envmgr("run", "c.yaml", *loggers, "--episodes", 9, "--output", "o").code == 0
        before = episodes_in(tmp_path / "o")[:4]
        cut_off(tmp_path / "o", 4)
        result = envmgr("run", "--resume", "o")
        assert (result.code, result.err) == (0, "")
        assert "  resumed       once, the last time at " in result.out
        episodes, summary = episodes_in(tmp_path / "o"), summary_in(tmp_path / "o")
        assert episodes[:4] == before
        assert summary["episodes"] == len(episodes) == 9
        assert summary["seed"] == 0
        assert summary["stats"]["episodes"] == 9
        assert {e["seed"] for e in before} <= {0, 1, 2}
        assert not {e["seed"] for e in episodes[4:]} & {0, 1, 2}
        rows = (tmp_path / "o/metrics.csv").read_text().splitlines()
        assert sum(row.startswith("steps,") for row in rows) == 1
        assert len(rows) == 3

    def test_counts_failures_on(self, envmgr: Run, tmp_path: Path) -> None:
        loggers = ("--set", "collect.loggers=[csv]")
        envmgr("run", "c.yaml", *FAULTY, *loggers, "--episodes", 20, "--output", "o")
        cut_off(tmp_path / "o", 10)
        result = envmgr("run", "--resume", "o")
        n_abnormal = sum(e["abnormal"] for e in episodes_in(tmp_path / "o")[:10])
        said = f"{10 - n_abnormal} episodes, {n_abnormal} abnormal ones and "
        assert f"envmgr run: resuming o: {said}" in result.out
        names, *_, row = csv.reader((tmp_path / "o/metrics.csv").read_text().splitlines())
        n_failures = int(dict(zip(names, row, strict=True))["failures"])
        assert n_failures == summary_in(tmp_path / "o")["stats"]["failures"] > n_abnormal

    def test_of_what_only_lacks_its_summary_writes_that(self, envmgr: Run, tmp_path: Path) -> None:
        assert envmgr("run", "c.yaml", "--episodes", 5, "--output", "o").code == 0
        before = episodes_in(tmp_path / "o")
        cut_off(tmp_path / "o", 5)
        assert envmgr("run", "--resume", "o").code == 0
        assert episodes_in(tmp_path / "o") == before
        assert summary_in(tmp_path / "o")["episodes"] == 5

    def test_keeps_what_there_is_if_the_launch_fails(
        self, envmgr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert envmgr("run", "c.yaml", *FAULTY, "--episodes", 5, "--output", "o").code == 0
        cut_off(tmp_path / "o", 3)
        n = 3
        steps = sum(e["length"] for e in episodes_in(tmp_path / "o"))
        module = sys.modules["cli_users_module"].__dict__
        monkeypatch.setattr(module["FaultyEnv"], "__init__", lambda self: 1 / 0)
        result = envmgr("run", "--resume", "o")
        assert result.code == 1
        assert len(episodes_in(tmp_path / "o")) == n
        summary = summary_in(tmp_path / "o")
        assert (summary["ending"], summary["steps"]) == ("failed", steps)
        monkeypatch.undo()

    def test_asks_for_the_same_permissions_again(
        self, envmgr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variable = "manager.worker_env.set={LD_X: a}"
        assert envmgr("run", "c.yaml", "--set", variable, "--output", "o").code == 0
        cut_off(tmp_path / "o", 3)
        result = envmgr("run", "--resume", "o")
        assert (result.code, "--allow-env LD_X" in result.err) == (2, True)
        assert len(episodes_in(tmp_path / "o")) == 3
        assert envmgr("run", "--resume", "o", "--allow-env", "LD_X").code == 0

    def test_may_be_told_again_what_it_was_begun_with(self, envmgr: Run, tmp_path: Path) -> None:
        variable = "manager.worker_env.set={LD_X: a}"
        assert envmgr("run", "c.yaml", "--set", variable, "--output", "o").code == 0
        cut_off(tmp_path / "o", 3)
        other = envmgr("run", "--resume", "o", "--set", variable, "--set", "manager.env_num=4")
        assert other.code == 2
        assert "manager.env_num 4, but the run was begun with 3" in other.err
        assert envmgr("run", "--resume", "o", "--set", variable).code == 0
        assert summary_in(tmp_path / "o")["steps"] == 200

    def test_refuses_budgets_of_episodes(self, envmgr: Run, tmp_path: Path) -> None:
        limits = ("--set", "collect.steps=null", "--set", "manager.episode_num=2")
        assert envmgr("run", "c.yaml", *limits, "--output", "o").code == 0
        cut_off(tmp_path / "o", 3)
        result = envmgr("run", "--resume", "o")
        assert (result.code, "manager.episode_num gives each env" in result.err) == (2, True)

    @pytest.mark.parametrize(
        ("args", "part"),
        [
            (["c.yaml"], "so the config c.yaml cannot be given"),
            (["--steps", "7"], "so --steps cannot be given"),
            (["--episodes", "7"], "so --episodes cannot be given"),
            (["--seed", "7"], "so --seed cannot be given"),
            (["--output", "p"], "so --output cannot be given"),
            (["--force"], "so --force cannot be given"),
            (["--no-output"], "so --no-output cannot be given"),
            ([], "is complete"),
        ],
    )
    def test_refuses_other_settings(
        self, envmgr: Run, args: list[str], part: str, tmp_path: Path
    ) -> None:
        assert envmgr("run", "c.yaml", "--output", "o").code == 0
        before = {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir()}
        result = envmgr("run", "--resume", "o", *args)
        assert (result.code, part in result.err) == (2, True)
        assert {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir()} == before

    @pytest.mark.parametrize("text", [None, "", '{"elapsed'])
    def test_without_a_whole_sample(self, envmgr: Run, tmp_path: Path, text: str | None) -> None:
        assert envmgr("run", "c.yaml", "--episodes", 5, "--output", "o").code == 0
        cut_off(tmp_path / "o", 2)
        samples = tmp_path / "o/samples.jsonl"
        samples.unlink()
        if text is not None:
            samples.write_text(text)
        assert envmgr("run", "--resume", "o").code == 0
        assert len(episodes_in(tmp_path / "o")) == 5
        assert json.loads(samples.read_text().splitlines()[0])["steps"] > 0

    def test_of_what_failed_in_its_launch(self, envmgr: Run, tmp_path: Path) -> None:
        module = tmp_path / "cli_users_module.py"
        module.write_text(USERS_MODULE.replace("fault=None", "fault='build'"))
        assert envmgr("run", "c.yaml", *FAULTY, "--episodes", 5, "--output", "o").code == 1
        assert not (tmp_path / "o/samples.jsonl").exists()
        module.write_text(USERS_MODULE)
        sys.modules.pop("cli_users_module")
        result = envmgr("run", "--resume", "o")
        assert (result.code, "Traceback" in result.err) == (0, False)
        assert summary_in(tmp_path / "o")["episodes"] == 5


class TestReport:
    def test_is_what_a_run_ends_with(self, envmgr: Run, tmp_path: Path) -> None:
        limits = ("manager.max_failures=99", "manager.max_failures_total=99")
        allowed = [part for limit in limits for part in ("--set", limit)]
        assert envmgr("run", "c.yaml", *FAULTY, *allowed, "--output", "o").code == 0
        out, total = tmp_path / "o", summary_in(tmp_path / "o")
        figures = json.loads((out / "report.json").read_text())
        assert figures["unread"] == []
        assert figures["summary"]["steps"] == total["steps"] == 200
        assert figures["failures"]["count"] == total["stats"]["failures"] > 0
        shown = [one["text"] for one in figures["failures"]["shown"]]
        assert shown == [e["failure"] for e in episodes_in(out) if e["abnormal"]]
        assert all(env["step"]["p99"] > 0 for env in figures["envs"])
        time = figures["time"]["trainer"]
        last = json.loads((out / "samples.jsonl").read_text().splitlines()[-1])
        assert last["steps"] == 200
        assert sum(time.values()) == pytest.approx(last["elapsed_s"], rel=1e-3)
        assert time["policy"] > 0
        page = (out / "report.html").read_text()
        assert "lost the\nconnection" in page

        result = envmgr("report", "o")
        assert (result.code, result.out, result.err) == (0, "o/report.html\n", "")
        assert json.loads((out / "report.json").read_text()) == figures
        result = envmgr("report", "o", "o")
        assert result.out == "comparison.html\n"
        assert (tmp_path / "comparison.json").is_file()

    def test_measures_unless_the_config_says_otherwise(self, envmgr: Run, tmp_path: Path) -> None:
        envmgr("run", "c.yaml", "--set", "manager.metrics=null", "--output", "out")
        assert "latency" not in summary_in(tmp_path / "out")["stats"]
        figures = json.loads((tmp_path / "out/report.json").read_text())
        assert not any("step" in env for env in figures["envs"])

    def test_that_cannot_be_made_costs_a_line(
        self, envmgr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write_report(folder: Path) -> None:
            raise ValueError("odd")

        monkeypatch.setattr("envmgr.cli.run.write_report", write_report)
        result = envmgr("run", "c.yaml", "--output", "out")
        assert result.code == 0
        line = "there is no report: ValueError('odd'); `envmgr report out` makes it"
        assert result.err.splitlines() == [f"envmgr: {line}"]
        assert summary_in(tmp_path / "out")["ending"] == "done"

    def test_has_the_videos_of_the_run(self, envmgr: Run, tmp_path: Path) -> None:
        pytest.importorskip("av", reason="PyAV is not installed")
        (tmp_path / "cli_users_module.py").write_text(SHOWN)
        entry = ("--set", "env.id=null", "--set", "env.entry=cli_users_module:ShownEnv")
        videos = ("--set", "collect.videos=true", "--steps", 12)
        assert envmgr("run", "c.yaml", *entry, *videos, "--output", "out").code == 0
        saved = {path.name for path in (tmp_path / "out/videos").iterdir()}
        assert {f"env_{i}-episode_000000.mp4" for i in range(3)} <= saved
        page = (tmp_path / "out/report.html").read_text()
        assert (
            'videos/env_0-episode_000000.mp4</figcaption><video controls src="data:video/' in page
        )
        result = envmgr("run", "c.yaml", *entry, *videos, "--no-output")
        assert result.code == 2
        assert "collect.videos is true, but nothing is to be written" in result.err

    @pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
    @pytest.mark.skipif(find_spec("pygal") is None, reason="pygal is not installed")
    def test_opens_in_chromium(self, envmgr: Run, tmp_path: Path) -> None:
        envmgr("run", "c.yaml", "--output", "out")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
        page = (tmp_path / "out/report.html").as_uri()
        made = subprocess.run(
            [*command, page], capture_output=True, text=True, timeout=50, check=True
        )
        assert "CONSOLE" not in made.stderr  # where refused scripts and broken styles are named
        assert made.stdout.count("<svg") == 7
        assert "Where the time went" in made.stdout

    def test_of_no_run(self, envmgr: Run) -> None:
        result = envmgr("report", ".")
        assert result.code == 2
        assert "'.' is no folder of a run" in result.err


BAD_INPUT = {
    "no such file": (["run", "no.yaml"], "'no.yaml' does not exist"),
    "a folder": (["run", "."], "is a folder"),
    "unknown section": (["run", "typo.yaml"], "did you mean 'manager'?"),
    "broken YAML": (["run", "broken.yaml"], "broken.yaml, line 2"),
    "empty": (["run", "empty.yaml"], "is empty"),
    "unknown kind": (["run", "c.yaml", "--set", "manager.type=bse"], "did you mean 'base'?"),
    "unknown key": (
        ["run", "c.yaml", "--set", "manager.env_nm=2"],
        "did you mean 'env_num' or 'spare_env_num'?",
    ),
    "wrong type": (["run", "c.yaml", "--set", "manager.env_num=two"], "manager.env_num is 'two'"),
    "no env_num": (["run", "c.yaml", "--set", "manager.env_num=null"], "manager.env_num is null"),
    "no end": (["run", "c.yaml", "--set", "collect.steps=null"], "when the run ends"),
    "unknown env": (["run", "c.yaml", "--set", "env.id=CartPol-v1"], "CartPole-v1"),
    "foreign code": (
        ["run", "c.yaml", "--set", "env.id=null", "--set", "env.entry=os:getcwd"],
        "--allow-import os",
    ),
    "foreign policy": (["run", "c.yaml", "--set", "collect.policy=os:system"], "--allow-import os"),
    "no factory": (
        ["run", "c.yaml", "--set", "collect.policy=cli_users_module:takes_one"],
        "factory(observation_space, action_space, seed)",
    ),
    "no override": (["run", "c.yaml", "--set", "env_num"], "section.key=value"),
    "a value with a space": (["run", "--set", "manager.env_num", "8", "c.yaml"], "has no =: write"),
    "a key as an option": (["run", "c.yaml", "--env_num", "8"], "--set manager.env_num=...?"),
    "a key of others": (["check", "c.yaml", "--num-envs", "8"], "--set manager.env_num=...?"),
    "a key of the env": (["show", "c.yaml", "--kwargs", "3"], "--set env.kwargs=...?"),
    "no config here": (["init", "CartPole-v1", "--seed", "8"], "No such option"),
    "no command": (["c.yaml"], "envmgr run c.yaml"),
    "a script": (["run", "cli_users_module.py"], "`envmgr init cli_users_module:MyEnv`"),
    "a file for a module": (["init", "./a/b.py:Env"], "write 'a.b:Env'"),
    "a part of a step": (["run", "c.yaml", "--steps", "15e-1"], "not a valid integer"),
    "no number": (["run", "c.yaml", "--steps", "0"], "0 is not in the range"),
    "two ends": (["run", "c.yaml", "--steps", "1", "--episodes", "1"], "not both"),
    "output or not": (["run", "c.yaml", "--no-output", "--output", "x"], "--no-output goes"),
    "output is a file": (["run", "c.yaml", "--output", "c.yaml"], "Not a directory"),
    "no config": (["run"], "CONFIG"),
    "no run": (["run", "--resume", "."], "no folder of a run that can be resumed"),
    "no folder": (["run", "--resume", "nowhere"], "is no folder"),
    "no such command": (["rnu"], "rnu"),
    "no such option": (["run", "c.yaml", "--step", "3"], "--step"),
    "nothing to show": (["show", "no.yaml"], "'no.yaml' does not exist"),
}


@pytest.mark.parametrize(("args", "part"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input(envmgr: Run, args: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text("managr: {}\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "empty.yaml").touch()
    before = {path.name for path in tmp_path.iterdir()}
    result = envmgr(*args)
    assert result.code == 2
    assert part in result.err
    assert "Traceback" not in result.err
    assert result.err.count("\n\n") <= 1  # one paragraph; click's usage comes before its own
    assert {path.name for path in tmp_path.iterdir()} - before <= {"__pycache__"}


def test_a_missing_dependency_is_bad_input(envmgr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "treetensor", None)
    monkeypatch.setitem(sys.modules, "treetensor.numpy", None)
    result = envmgr("run", "c.yaml", "--set", "manager.type=base_v2")
    assert result.code == 2
    assert "pip install 'rl-env-manager[treetensor]'" in result.err


def test_imports_can_be_allowed(
    envmgr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/cli_allowed_module.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    entry = ["--set=env.id=null", "--set=env.entry=cli_allowed_module:FaultyEnv"]
    args = ["run", "c.yaml", "--no-output", "--steps", "10", *entry]
    refused = envmgr(*args)
    assert refused.code == 2
    assert "--allow-import cli_allowed_module" in refused.err
    assert envmgr(*args, "--allow-import", "cli_allowed_module").code == 0


class TestList:
    def test_names_all_kinds(self, envmgr: Run) -> None:
        result = envmgr("list")
        assert (result.code, result.err) == (0, "")
        rows = [line.split() for line in result.out.splitlines() if "EnvManager" in line]
        assert [row[:3] for row in rows] == [
            ["async_subprocess", "AsyncSubprocessEnvManager", "envmgr"],
            ["async_subprocess_v2", "AsyncSubprocessEnvManagerV2", "envmgr"],
            ["base", "BaseEnvManager", "envmgr"],
            ["base_v2", "BaseEnvManagerV2", "envmgr"],
            ["env_pool", "PoolEnvManager", "envmgr"],
            ["gym_vector", "GymVectorEnvManager", "envmgr"],
            ["ray", "RayEnvManager", "envmgr"],
            ["subprocess", "SyncSubprocessEnvManager", "envmgr"],
            ["subprocess_v2", "SubprocessEnvManagerV2", "envmgr"],
            ["thread", "ThreadEnvManager", "envmgr"],
        ]

    def test_names_what_cannot_be_had(self, envmgr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        from envmgr.registry import ENV_MANAGER_REGISTRY

        problems = {"mine": "the env manager 'mine' of entry point p cannot be used"}
        monkeypatch.setattr(ENV_MANAGER_REGISTRY, "problems", lambda: problems)
        result = envmgr("list")
        assert result.code == 0
        assert result.err == f"envmgr: warning: {problems['mine']}\n"


def test_show(envmgr: Run, tmp_path: Path) -> None:
    result = envmgr("show", "c.yaml", "--set", "manager.env_num=7")
    assert (result.code, result.err) == (0, "")
    assert "  env_num: 7                     # set" in result.out.splitlines()
    (tmp_path / "shown.yaml").write_text(result.out)
    assert load_config("shown.yaml") == load_config("c.yaml", set=["manager.env_num=7"])


def test_version_and_help(envmgr: Run) -> None:
    assert envmgr("--version").out.startswith("envmgr 0.")
    for args in (["--help"], ["-h"], ["run", "--help"], ["list", "--help"], ["show", "--help"]):
        result = envmgr(*args)
        assert (result.code, result.err) == (0, "")
        assert "Usage: envmgr" in result.out
