"""`envmgr tune` in this process, with a small budget: what it measures, prints and writes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envmgr.cli import main
from envmgr.cli.tune import _cells, _print, _tuned_text, conclusion
from envmgr.config import to_plain
from envmgr.config.env_factories import env_factories
from envmgr.config_file import load_config
from envmgr.tuning.benchmark_process import Contestant, ContestantError
from envmgr.tuning.settings import Setting, changes_of
from envmgr.tuning.tune import Row, Tuned
from envmgr.worker.profiling import Profile, Trial

ENVS = """
import fcntl
import os
import sys

import gymnasium
import numpy as np


class Plain(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    n_steps = 0

    def __init__(
        self, fault=None, breaks=0, ends_trainers=False, hangs=False, dies=0, licence=""
    ):
        self.hangs, self.dies = hangs, dies
        if ends_trainers and sys.argv[-1].endswith("benchmark_process"):
            os._exit(3)
        self.breaks = breaks
        if fault:
            raise ValueError(fault)
        if licence:
            self.held = open(licence, "w")
            try:
                fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RuntimeError("the licence is taken") from None

    def close(self):
        if hasattr(self, "held"):
            self.held.close()

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n += 1
        Plain.n_steps += 1
        if Plain.n_steps == self.dies:
            os._exit(3)
        while self.hangs:
            pass
        if self.breaks and self.n > self.breaks:
            raise OSError("lost")
        return np.zeros(2, np.float32), 1.0, self.n == 5, False, {}
"""
CONFIG = """\
env: {entry: tune_users_envs:Plain}  # mine
manager:
  type: subprocess  # kept
  env_num: 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "tune_users_envs.py").write_text(ENVS)
    (tmp_path / "c.yaml").write_text(CONFIG)
    yield tmp_path
    sys.modules.pop("tune_users_envs", None)


@pytest.mark.timeout(180)  # seven launches; most of it is waiting for a core
def test_prints_a_table_and_writes_a_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tune", "c.yaml", "--seconds", "0.5", "--out", "t.yaml", "--json", "f.json"]
    assert main([*args, "--kinds", "subprocess", "--set", "manager.seed=3"]) == 0
    out = capsys.readouterr().out
    assert "a step takes" in out
    assert "(best" in out
    assert "in t.yaml" in out
    text = (folder / "t.yaml").read_text()
    assert "# mine" in text
    assert "# kept" in text
    found = json.loads((folder / "f.json").read_text())
    tuned = load_config(folder / "t.yaml").manager
    assert tuned.seed == 3
    assert tuned.num_workers == found["best"]["num_workers"]
    rows = [row for row in found["rows"] if row["measured"]]
    numbers = {row["setting"]["num_workers"] for row in rows if row["is_choice"]}
    assert numbers == {None, 1, "auto"}
    assert [row["setting"]["type"] for row in rows if not row["is_choice"]] == ["base"]
    assert [row["note"][:2] for row in rows if row["setting"]["num_workers"] == "auto"] == ["1:"]
    assert found["now"]["num_workers"] is None


@pytest.mark.timeout(180)
def test_an_env_that_ends_the_process_it_is_in_does_not_end_the_tuning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tune", "c.yaml", "--seconds", "0.5", "--json", "f.json", "--kinds", "subprocess"]
    assert main([*args, "--set", "env.kwargs={ends_trainers: true}"]) == 0
    assert "its process ended: exit code 3" in capsys.readouterr().out
    rows = json.loads((folder / "f.json").read_text())["rows"]
    (row,) = (row for row in rows if row["error"])
    assert row["setting"]["type"] == "base"
    assert row["measured"] is None


@pytest.mark.timeout(180)
def test_an_env_that_dies_now_and_then_is_tuned(folder: Path) -> None:
    args = ["tune", "c.yaml", "--seconds", "1", "--json", "f.json", "--kinds", "subprocess"]
    assert main([*args, "--set", "env.kwargs={dies: 500}"]) == 0
    rows = json.loads((folder / "f.json").read_text())["rows"]
    measured = [row for row in rows if row["measured"]]
    assert {row["setting"]["type"] for row in measured} >= {"subprocess"}
    assert not [row["error"] for row in rows if row["is_choice"] and row["error"]]


@pytest.mark.timeout(120)
def test_an_env_that_dies_at_once_is_not_tuned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tune", "c.yaml", "--seconds", "1", "--set", "env.kwargs={dies: 1}"]
    assert main(args) == 1
    err = capsys.readouterr().err
    assert "an env by itself could not be measured in 8 attempts" in err
    assert "died during random steps: exit code 3" in err


def test_why_no_setting_can_be_run_is_said_as_run_says_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tune", "c.yaml", "--seconds", "0.5", "--json", "f.json", "--kinds", "subprocess"]
    assert main([*args, "--set", f"env.kwargs={{licence: {folder / 'here.lock'}}}"]) == 1
    head, *causes = capsys.readouterr().err.splitlines()
    assert head.startswith("envmgr: error: no setting can be run: ")
    assert head.endswith(" could not be launched; everything is closed again:")
    assert causes
    for cause in causes:
        assert cause.startswith("  - env")
        assert cause.endswith("raised RuntimeError in its construction: the licence is taken")


def test_errors_of_settings_are_cut_in_the_table_and_whole_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = "1 of 2 envs could not be launched; everything is closed again:\n  - env 0 has "
    error += "no licence " * 40
    best, now = _row("thread", None, 1.5), Row(Setting("subprocess"), error=error)
    profile = Profile(Trial(1, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,))
    rows = (best, now, Row(Setting("subprocess", 1), error=error))
    _print(Tuned(profile, None, now.setting, best.setting, rows, {"type": "thread"}))
    printed = capsys.readouterr().out
    assert printed.count("could not be launched; everything is closed ...\n") == 2
    assert printed.count(f"{now.setting}; {rows[2].setting}: {error}\n") == 1


@pytest.mark.timeout(120)
def test_a_contestant_that_hangs_is_killed(folder: Path) -> None:
    loaded = load_config(folder / "c.yaml", set=["manager.type=base", "env.kwargs.hangs=true"])
    factories = env_factories(loaded.env, 2)
    contestant = Contestant(None, factories, to_plain(loaded.manager), limit_s=10.0)
    with pytest.raises(ContestantError, match="nothing came within 10 s"):
        contestant.run(0.1)
    assert contestant._process.returncode == -signal.SIGKILL
    contestant.close()


def _row(kind: str, num_workers: int | None, ratio: float, *, is_choice: bool = True) -> Row:
    return Row(Setting(kind, num_workers), 1e3 * ratio, ratio, 0.01, is_choice=is_choice)


def test_envs_without_workers_are_named_where_they_are_faster_and_never_chosen() -> None:
    def said(ratio: float) -> str:
        rows = (_row("base", None, ratio, is_choice=False), _row("subprocess", 2, 1.5))
        now = _row("subprocess", None, 1.0)
        profile = Profile(Trial(1, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,))
        best = Setting("subprocess", 2)
        changes = changes_of(best, now.setting)
        return conclusion(Tuned(profile, None, now.setting, best, (*rows, now), changes))

    assert said(1.6) == (
        "subprocess, 2 workers: 1.50 x as many steps as now (1,500 and 1,000 per second). It "
        "changes num_workers from null to 2."
    )
    assert "--kinds base,subprocess" in said(4.5)
    assert "4.50 x" in said(4.5)


def test_nothing_is_compared_with_a_present_setting_that_cannot_be_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = Row(Setting("subprocess"), None, None, 0.0, error="it has no display")
    best, other = _row("thread", None, 1.5), _row("base", None, 1.0)
    profile = Profile(Trial(1, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,))
    changes = changes_of(best.setting, now.setting)
    tuned = Tuned(profile, None, now.setting, best.setting, (best, other, now), changes)
    _print(tuned)
    printed = capsys.readouterr().out
    assert "beside the slowest" in printed
    assert "now" not in conclusion(tuned)
    assert conclusion(tuned).startswith(
        "thread: 1,500 steps per second; the present setting cannot be run. It changes type from"
    )
    assert "was subprocess: with which it cannot be run" in _tuned_text(CONFIG, [], tuned)


def test_a_setting_whose_steps_return_some_of_the_timesteps_says_so() -> None:
    now = _row("subprocess", None, 1.0)
    best = Row(Setting("async_subprocess", None, 4.0), 2e3, 2.0)
    profile = Profile(Trial(1, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,))
    changes = changes_of(best.setting, now.setting)
    tuned = Tuned(profile, None, now.setting, best.setting, (best, now), changes)
    said = conclusion(tuned)
    assert "changes type from subprocess to async_subprocess, wait_num from .inf to 4." in said
    assert "A step then returns 4 of the timesteps or more" in said
    assert said.endswith("give --kinds subprocess.")
    assert _cells(best, tuned)[-1] == "a step returns 4 of the timesteps, or more"
    assert _cells(now, tuned)[-1] == ""
    tuned_text = _tuned_text(CONFIG, [], tuned)
    assert "  # tuned, was subprocess: 2.00 x" in tuned_text
    assert "  type: async_subprocess  # kept\n" in tuned_text


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is measured; returns what was to be."""
    asked: list[Any] = []

    def tune(*args: Any, **options: Any) -> Tuned:
        asked.append(args)
        now, best = _row("subprocess", None, 1.0), _row("subprocess", 2, 1.5)
        profile = Profile(Trial(1, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,))
        changes = changes_of(best.setting, now.setting)
        return Tuned(profile, None, now.setting, best.setting, (best, now), changes)

    monkeypatch.setattr("envmgr.cli.tune.tune", tune)
    return asked


@pytest.mark.parametrize("out", ["nowhere/t.yaml", "c.yaml/t.yaml", "folder", "dangling.yaml"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_tuned(
    folder: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (folder / "folder").mkdir()
    (folder / "dangling.yaml").symlink_to("nowhere/t.yaml")
    assert main(["tune", "c.yaml", "--out", out, "--force"]) == 2
    assert f"cannot be written to '{out}'" in capsys.readouterr().err
    assert asked == []


def test_the_tuned_config_replaces_a_file_and_goes_where_links_lead(
    folder: Path, asked: list[Any]
) -> None:
    (folder / "below").mkdir()
    (folder / "link.yaml").symlink_to("below/t.yaml")
    for _ in range(2):
        assert main(["tune", "c.yaml", "--out", "link.yaml", "--force"]) == 0
        assert (folder / "link.yaml").is_symlink()
        assert load_config(folder / "below/t.yaml").manager.num_workers == 2
    assert [path.name for path in (folder / "below").iterdir()] == ["t.yaml"]
    reader, writer = os.pipe()
    assert main(["tune", "c.yaml", "--out", f"/dev/fd/{writer}", "--force"]) == 0
    os.close(writer)
    with open(reader) as pipe:
        assert pipe.read() == (folder / "below/t.yaml").read_text()
    assert len(asked) == 3


def test_a_tuned_config_that_cannot_be_written_after_all_is_printed(
    folder: Path,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write_text(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("envmgr.cli.tune.write_text", write_text)
    assert main(["tune", "c.yaml", "--out", "t.yaml", "--json", "f.json"]) == 1
    printed = capsys.readouterr()
    assert "num_workers: 2" in printed.out
    assert "The tuned config is in" not in printed.out
    assert "cannot be written to 't.yaml': [Errno 28] No space left" in printed.err
    assert "num_workers: 2" in json.loads((folder / "f.json").read_text())["config"]


def test_a_config_is_read_once(folder: Path, asked: list[Any]) -> None:
    reader, writer = os.pipe()
    os.write(writer, CONFIG.encode())
    os.close(writer)
    assert main(["tune", f"/dev/fd/{reader}", "--out", "t.yaml"]) == 0
    os.close(reader)
    assert "num_workers: 2" in (text := (folder / "t.yaml").read_text())
    assert "# mine" in text


def test_files_are_written_where_nothing_can_be_printed(
    folder: Path,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(tuned: Tuned) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("envmgr.cli.tune._print", full)
    monkeypatch.setattr("envmgr.cli.discard_output", lambda: None)
    assert main(["tune", "c.yaml", "--out", "t.yaml", "--json", "f.json"]) == 1
    assert "the output cannot be written: [Errno 28] No space left" in capsys.readouterr().err
    assert "num_workers: 2" in (folder / "t.yaml").read_text()
    assert "num_workers: 2" in json.loads((folder / "f.json").read_text())["config"]


def test_a_command_that_fails_leaves_no_figures(folder: Path) -> None:
    fails = ("--set", "env.kwargs={fault: no licence}", "--json", "f.json")
    assert main(["tune", "c.yaml", "--seconds", "0.5", *fails]) == 1
    assert not (folder / "f.json").exists()


@pytest.mark.parametrize("limit", ["shared: {browser: 4}", "starts_per_s: 2"])
def test_envs_whose_number_or_starts_are_limited_are_not_tuned(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--set", f"manager.limits={{{limit}}}"]
    assert main(["tune", "c.yaml", "--seconds", "2", *limits]) == 2
    assert "--set manager.limits=null" in capsys.readouterr().err
    assert main(["tune", "c.yaml", "--seconds", "2", *limits, "--set", "manager.limits=null"]) == 0


def test_threads_are_tuned_as_they_are_run(folder: Path) -> None:
    threads = ("--set", "manager.type=thread", "--set", "manager.num_workers=2")
    assert main(["tune", "c.yaml", "--seconds", "2", *threads, "--json", "f.json"]) == 0
    figures = json.loads((folder / "f.json").read_text())
    assert next(row for row in figures["rows"] if row["setting"] == figures["now"])["measured"] > 0


def test_what_a_run_tells_is_not_told_of_the_settings_that_are_tried(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # by the trainer that runs meanwhile
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = ("episode_log=log.jsonl", "trace=trace.json", f"metrics={{port: {port}}}")
        options = [part for one in told for part in ("--set", f"manager.{one}")]
        assert main(["tune", "c.yaml", "--seconds", "3", *options]) == 0
    assert "cannot be" not in capsys.readouterr().out
    assert not [name for name in ("log.jsonl", "trace.json") if (folder / name).exists()]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing.yaml"], 2, "does not exist"),
        (["c.yaml", "--set", "manager.env_num=null"], 2, "manager.env_num is null"),
        (["c.yaml", "--out", "c.yaml"], 2, "is there already"),
        (["c.yaml", "--kinds", "subproces"], 2, "subprocess"),
        (["c.yaml", "--set", "manager.type=env_pool"], 2, "makes its envs itself"),
        (["c.yaml", "--set", "env.kwargs={fault: no licence}"], 1, "no licence"),
        (["c.yaml", "--set", "env.kwargs={breaks: 2}"], 1, "lost"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == code
    assert said in capsys.readouterr().err
