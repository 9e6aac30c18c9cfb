"""`envmgr init` and `envmgr bench` in this process, with tiny budgets."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from functools import partial
from pathlib import Path

import gymnasium
import pytest

from envmgr.cli import main
from envmgr.config import default_manager_config
from envmgr.config_file import load_config
from envmgr.tuning.benchmark_process import Contestant


@pytest.mark.timeout(180)  # imports of several processes; most of it is waiting for a core
def test_what_init_writes_can_be_benched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--kwargs", "sutton_barto_reward=true", "--kwargs", '{"max_episode_steps": 40}']
    assert main(["init", "CartPole-v1", "--env-num", "2", *given]) == 0
    assert "cartpole-v1.yaml: 2 envs launched" in capsys.readouterr().out
    config = load_config("cartpole-v1.yaml")
    assert (config.env.id, config.manager.env_num) == ("CartPole-v1", 2)
    assert config.env.kwargs == {"sutton_barto_reward": True, "max_episode_steps": 40}
    assert [*tmp_path.iterdir()] == [tmp_path / "cartpole-v1.yaml"]

    assert main(["init", "CartPole-v1"]) == 2
    assert "is there already" in capsys.readouterr().err

    tiny = ["--laps", "2", "--seconds", "0.02", "--peers", "gymnasium", "--json", "-"]
    plain = ["--set", "manager.num_workers=1"]
    assert main(["bench", "cartpole-v1.yaml", *tiny, *plain]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {"envmgr", "gymnasium AsyncVectorEnv", "gymnasium SyncVectorEnv"}
    assert all(row["steps_per_s"] > 0 and not row["error"] for row in rows.values())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["step", "build", "segfault"])
def test_envs_that_fail_are_told_of_as_by_run(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    lost = "the physics of this world has diverged: the velocity of body 7 is nan after 3 substeps"
    Path("bench_failing.py").write_text(
        "import faulthandler\n"
        "import gymnasium\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self, fault):\n"
        "        self.fault = fault\n"
        "        if fault == 'build':\n"
        "            self.step(0)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 0, {}\n"
        "    def step(self, action):\n"
        "        if self.fault == 'segfault':\n"
        "            faulthandler._sigsegv()\n"
        f"        raise ValueError({lost!r})\n"
    )
    Path("c.yaml").write_text(
        f"env: {{entry: 'bench_failing:Env', kwargs: {{fault: {fault}}}}}\n"
        "manager: {type: subprocess, env_num: 2, max_failures: 1, failure_window_s: 1000}\n"
    )
    args = ["bench", "c.yaml", "--laps", "1", "--seconds", "0.5", "--peers", "syncvector"]
    try:
        assert main(args) == 1
    finally:
        sys.modules.pop("bench_failing", None)
    out, err = capsys.readouterr()
    assert "gymnasium SyncVectorEnv" in out
    assert max(len(line) for line in out.splitlines() if " cannot be run " in line) < 140
    head, cause, *dump = err.splitlines()
    assert head.startswith("envmgr: error: envmgr itself cannot run them: ")
    assert "reset(" not in err
    assert "Traceback" not in err
    if fault == "segfault":
        assert "its process ended: killed by SIGSEGV" in out
        assert "died during step: killed by SIGSEGV, at bench_failing.py:13 in step" in cause
        assert dump[0] == "    Fatal Python error: Segmentation fault"
    else:
        assert f"ValueError: {lost}\n" in out
        assert cause.endswith(lost)
        assert not dump


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["init", "NoSuchEnv-v0"], 2, "does not have"),
        (["init", "no_such_module:make"], 2, "no_such_module"),
        (["init", "CartPole-v1", "--out", "no/such/folder.yaml"], 2, "nothing can be written"),
        (["init", "CartPole-v1", "--kwargs", "g"], 2, "--kwargs 'g' is not of the form KEY=VALUE"),
        (["init", "CartPole-v1", "--kwargs", "{g: 1"], 2, "--kwargs '{g: 1'"),
        (["init", "CartPole-v1", "--kwargs", "a b=1"], 2, "'a b' cannot name an argument"),
        (["bench", "nothing.yaml"], 2, "does not exist"),
        (["bench", "c.yaml", "--peers", "nobody"], 2, "names none of"),
        (["bench", "c.yaml", "--set", "manager.type=env_pool"], 2, "makes its envs itself"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("env: {id: CartPole-v1}\nmanager: {env_num: 2}\n")
    assert main(arguments) == code
    assert said in capsys.readouterr().err


def test_a_process_of_its_own_is_measured_where_many_files_are_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):  # `select` knows fds below 1024
            opened.enter_context(open(os.devnull))
        config = dict(default_manager_config({"type": "base", "env_num": 1}))
        contestant = Contestant(None, [partial(gymnasium.make, "CartPole-v1")], config, 60.0)
        opened.callback(contestant.close)
        assert contestant.run(0.05) > 0
