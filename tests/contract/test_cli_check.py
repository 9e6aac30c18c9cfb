"""`envmgr check` in this process, on envs in workers: what it finds, prints and returns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envmgr import load_config
from envmgr.cli import init, main
from envmgr.manager import tally

ENVS = '''
import ctypes
import os
import random
import time

import gymnasium
import numpy as np


class Sound(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n += 1
        return self.np_random.random(2).astype(np.float32), 1.0, self.n == 5, False, {}

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)


class Dies(Sound):
    """Ends its process in its second episode; and has a file of each."""

    files = []

    def reset(self, **params):
        self.files.append(open(os.devnull))
        if len(self.files) == 3:
            os._exit(7)
        return super().reset(**params)


class Flaky(Sound):
    """Raises in one of 500 steps, and dies in its first reset ever."""

    mark = "died.mark"

    def reset(self, **params):
        if not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(7)
        return super().reset(**params)

    def step(self, action):
        if self.np_random.random() < 0.002:
            raise OSError("socket closed")
        print("a line of the env's")
        return super().step(action)


class Mortal(Sound):
    """Dies in one of 100 steps, at random."""

    def step(self, action):
        if random.random() < 0.01:
            os._exit(7)
        return super().step(action)


class MortalTwice(Sound):
    """Dies in a step: once in the trial at launch, and once more."""

    def step(self, action):
        for mark in ("died.1", "died.2"):
            if not os.path.exists(mark):
                open(mark, "w").close()
                os._exit(7)
        return super().step(action)


class Hanging(Sound):
    """Hangs in its second reset, always."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.n_resets = 0

    def reset(self, **params):
        self.n_resets += 1
        if self.n_resets == 2:
            time.sleep(1000.0)
        return super().reset(**params)


class Masked(Sound):
    """Refuses illegal actions, also in the very first step."""

    observation_space = gymnasium.spaces.Dict(
        obs=Sound.observation_space, action_mask=gymnasium.spaces.MultiBinary(2)
    )

    def reset(self, **params):
        obs, info = super().reset(**params)
        return {"obs": obs, "action_mask": np.array([0, 1], np.int8)}, info

    def step(self, action):
        assert action == 1, "illegal"
        obs, *others = super().step(action)
        return {"obs": obs, "action_mask": np.array([0, 1], np.int8)}, *others


class MaskedInfos(Masked):
    """Has the masks in its infos, each of them another one, and other observations."""

    observation_space = Sound.observation_space

    def mask(self):
        self.legal = self.np_random.integers(2)
        return {"action_mask": np.eye(2, dtype=np.int8)[self.legal]}

    def reset(self, **params):
        return Sound.reset(self, **params)[0], self.mask()

    def step(self, action):
        assert action == self.legal, "illegal"
        return *Sound.step(self, action)[:4], self.mask()


class Rare(Sound):
    """Fails in the 150th step of its process: dies, or hangs."""

    n_steps = 0

    def step(self, action):
        Rare.n_steps += 1
        if Rare.n_steps == 150:
            self.fail()
        return super().step(action)


class RarelyExits(Rare):
    def fail(self):
        os._exit(7)


class RarelySegfaults(Rare):
    def fail(self):
        ctypes.string_at(0)


class RarelyHangs(Rare):
    def fail(self):
        time.sleep(1000.0)


class Chat:
    """Has neither spaces nor `close`, and takes no actions but its own."""

    def reset(self, seed=None):
        self.n = 0
        return "hello", {}

    def step(self, action):
        assert action == f"line {self.n}", "not mine"
        self.n += 1
        return action, 1.0, self.n == 5, False, {}

    def random_action(self):
        return f"line {self.n}"


class AsyncChat(Chat):
    async def reset(self, seed=None):
        return super().reset()

    async def step(self, action):
        return super().step(action)


class Errors(Sound):
    """Tells errors of its own in infos, as tools and browsers do."""

    def step(self, action):
        obs, *others, _ = super().step(action)
        return obs, *others, {"error": self.np_random.choice([None, "", "no such page"])}


class Wrong(Sound):
    """Has another shape in every step than its space says."""

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "check_users_envs.py").write_text(ENVS)
    config = "env: {entry: check_users_envs:Sound}\nmanager: {type: subprocess, env_num: 2}\n"
    (tmp_path / "c.yaml").write_text(config)
    yield tmp_path
    sys.modules.pop("check_users_envs", None)


def test_a_sound_env_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["check", "c.yaml", "--episodes", "40", "--methods", "fork", "--json", "found.json"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "verdict: " in out
    found = json.loads((folder / "found.json").read_text())
    assert found["passes"]
    levels = {one["part"]: one["level"] for one in found["findings"]}
    parts = ["construction", "contract", "determinism", "start methods", "reset options", "times"]
    assert set(levels) == {*parts, "dtypes", "leaks", "closing", "render", "Ctrl-C"}
    assert levels.pop("Ctrl-C") in ("ok", "warning")  # the latter where it is slow to end
    assert set(levels.values()) == {"ok"}


def test_a_crash_is_a_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dies = ["--set", "env.entry=check_users_envs:Dies", "--methods", "", "--json", "-"]
    assert main(["check", "c.yaml", *dies]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passes"]
    assert "its process died: exit code 7" in json.dumps(found["findings"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "does not exist"),
        (["c.yaml", "--set", "env.entry=check_users_envs:Other"], "Other"),
        (["c.yaml", "--set", "env.entry=null"], "does not say which env"),
        (["c.yaml", "--methods", "vfork"], "'vfork'"),
        (["c.yaml", "--json", "no/such/folder"], "cannot be written"),
        (["c.yaml", "--set", "manager.type=env_pool"], "makes its envs itself"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_an_env_that_fails_now_and_then_is_looked_at_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flaky = ["--set", "env.entry=check_users_envs:Flaky", "--methods", "", "--json", "-"]
    assert main(["check", "c.yaml", *flaky, "--episodes", "400"]) == 0
    out, err = capfd.readouterr()
    assert "a line of the env's" not in out
    assert "lines that envs printed" in err
    findings = json.loads(out)["findings"]
    levels = {one["part"]: one["level"] for one in findings if one["part"] != "failures"}
    assert set(levels.values()) <= {"ok", "warning"}
    assert {"times", "leaks", "closing", "render", "Ctrl-C"} <= set(levels)
    steps, deaths = (one for one in findings if one["part"] == "failures")
    assert steps["level"] == deaths["level"] == "warning"
    assert "random steps raised: OSError: socket closed" in steps["text"]
    assert 0 < steps["figures"]["n_failed"] < 0.01 * steps["figures"]["n_steps"]
    assert deaths["text"].startswith("in 1 of ")
    assert "its process died: exit code 7" in deaths["text"]
    assert main(["check", "c.yaml", *flaky, "--episodes", "400", "--strict"]) == 1


@pytest.mark.timeout(180)
def test_an_env_that_dies_at_random_is_looked_at_in_all_parts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    mortal = ["--set", "env.entry=check_users_envs:Mortal", "--methods", "", "--json", "-"]
    assert main(["check", "c.yaml", *mortal, "--episodes", "400"]) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    levels = {one["part"]: one["level"] for one in findings}
    assert {"determinism", "times", "leaks", "closing", "render", "Ctrl-C"} <= set(levels)
    assert levels.pop("leaks") in ("ok", "note")
    assert levels.pop("Ctrl-C") in ("ok", "warning")
    (deaths,) = (one for one in findings if one["part"] == "failures")
    assert levels.pop("failures") == "warning"
    assert set(levels.values()) == {"ok"}
    figures = deaths["figures"]
    assert 3 < figures["n_died"] < figures["n_tries"]
    assert 0.003 < figures["share_of_steps"] < 0.03
    assert deaths["text"].startswith(f"in {figures['n_died']} of {figures['n_tries']} trials")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("env", ["Masked", "MaskedInfos"])
def test_legal_actions_are_taken(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    masked = ["--set", f"env.entry=check_users_envs:{env}"]
    assert main(["check", "c.yaml", *masked, "--methods", "", "--episodes", "20"]) == 0
    assert "illegal" not in capsys.readouterr().out
    assert main(["init", f"check_users_envs:{env}", "--out", "masked.yaml"]) == 0
    assert "failed" not in capsys.readouterr().err
    kind = ["--kinds", "subprocess"]
    assert main(["tune", "c.yaml", *masked, "--seconds", "1", *kind, "--json", "tuned.json"]) == 0
    assert not any(row["error"] for row in json.loads(Path("tuned.json").read_text())["rows"])


def test_random_policies_take_legal_actions() -> None:
    masked = ["--set", "env.entry=check_users_envs:Masked", "--steps", "50", "--no-output"]
    assert main(["run", "c.yaml", *masked]) == 0


@pytest.mark.parametrize("env", ["Chat", "AsyncChat"])
def test_envs_that_choose_their_actions_are_asked(
    env: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = ["--set", f"env.entry=check_users_envs:{env}"]
    assert main(["check", "c.yaml", *chat, "--methods", "", "--episodes", "20"]) == 0
    assert "Ctrl-C" in capsys.readouterr().out
    assert main(["init", f"check_users_envs:{env}", "--out", "chat.yaml"]) == 0
    assert main(["tune", "c.yaml", *chat, "--seconds", "2", "--json", "tuned.json"]) == 0


def test_init_says_where_a_config_can_be_run_if_the_module_is_not_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    for out, elsewhere in (("here.yaml", False), ("sub/there.yaml", True)):
        assert main(["init", "check_users_envs:Masked", "--env-num", "1", "--out", out]) == 0
        says = f"'check_users_envs' lies in {folder}, not beside {out}"
        assert (says in capsys.readouterr().err) == elsewhere
        comments = " ".join(Path(out).read_text().replace("#", " ").split())
        assert (says in comments) == elsewhere
    monkeypatch.chdir(folder / "sub")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    sys.modules.pop("check_users_envs", None)
    assert main(["show", "there.yaml"]) == 2
    assert f"Looked in {folder / 'sub'} and where Python looks" in capsys.readouterr().err


@pytest.mark.parametrize("env_num", [1, 8])
def test_no_config_is_written_for_an_env_every_step_of_which_fails(
    folder: Path, env_num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["init", "check_users_envs:Wrong", "--env-num", str(env_num), "--out", "wrong.yaml"]
    assert main(args) == 1
    assert "shape (3,)" in capsys.readouterr().err
    assert not (folder / "wrong.yaml").exists()


def test_errors_that_infos_tell_are_no_failures_of_the_env(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "check_users_envs:Errors", "--env-num", "2", "--out", "errors.yaml"]) == 0
    assert "failed" not in capsys.readouterr().err


def test_a_config_is_written_for_an_env_that_fails_now_and_then(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "died.mark").touch()
    assert main(["init", "check_users_envs:Flaky", "--env-num", "2", "--out", "flaky.yaml"]) == 0
    out, err = capfd.readouterr()
    assert "a line of the env's" not in out + err
    assert "steps that were tried failed" in err
    assert "OSError: socket closed" in err
    assert load_config("flaky.yaml").manager.num_workers == "auto"


def test_an_env_that_hangs_does_not_keep_init(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "LIMIT_S", 2.0)
    monkeypatch.setattr(tally, "LEAST_LIMIT_S", 0.2)
    assert main(["init", "check_users_envs:Hanging", "--env-num", "1", "--out", "h.yaml"]) == 1
    err = capsys.readouterr().err
    assert "none of 8 attempts to measure an env" in err
    assert "a reset of it was not over within 1 s" in err
    assert re.search(r", at check_users_envs\.py:\d+ in reset", err)
    assert not (folder / "h.yaml").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("env", "how"),
    [
        ("RarelyExits", "died during random steps: exit code 7"),
        ("RarelySegfaults", "died during random steps: killed by SIGSEGV"),
        ("RarelyHangs", "hung: a step of it was not over within 1 s"),
    ],
)
def test_a_config_is_written_for_an_env_that_loses_its_process_now_and_then(
    env: str,
    how: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(init, "LIMIT_S", 2.0)
    assert main(["init", f"check_users_envs:{env}", "--env-num", "2", "--out", "rare.yaml"]) == 0
    err = capsys.readouterr().err
    assert how in err
    assert "apply(" not in err
    (found,) = re.findall(r"(\d+) of ([\d,]+) steps that were tried failed", err)
    n_failed, n_steps = (int(one.replace(",", "")) for one in found)
    assert n_steps >= 150 * n_failed  # those before a death count
    assert load_config("rare.yaml").manager.num_workers is None


@pytest.mark.timeout(180)
def test_a_rare_hang_is_a_warning_and_all_parts_are_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hangs = ["--set", "env.entry=check_users_envs:RarelyHangs", "--set", "manager.step_timeout=1"]
    args = [*hangs, "--methods", "", "--json", "-", "--episodes", "100"]
    assert main(["check", "c.yaml", *args]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    levels = {one["part"]: one["level"] for one in findings}
    assert {"determinism", "times", "leaks", "closing", "render", "Ctrl-C"} <= set(levels)
    assert "check" not in levels
    (hung,) = (one for one in findings if one["part"] == "failures")
    assert hung["level"] == "warning"
    assert "it hung: nothing came within 1 s" in hung["text"]
    assert "in fail" in hung["text"]
    assert 0 < hung["figures"]["share_of_steps"] <= 1 / 150


def test_an_env_that_ends_its_process_gets_one_of_its_own(folder: Path) -> None:
    assert main(["init", "check_users_envs:MortalTwice", "--out", "mortal.yaml"]) == 0
    assert (folder / "died.2").exists()
    assert load_config("mortal.yaml").manager.num_workers is None
