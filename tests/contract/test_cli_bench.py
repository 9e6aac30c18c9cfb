"""`envmgr init` and `envmgr bench` in this process, with tiny budgets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envmgr.cli import main
from envmgr.config_file import load_config


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
