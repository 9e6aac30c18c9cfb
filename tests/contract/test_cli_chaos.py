"""`envmgr chaos`: workers are hurt; the accounts are printed, written and turned into a code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envmgr.cli import BAD_INPUT, DONE, FAILED, main
from envmgr.testing import Ledger

CONFIG = """
env: {id: CartPole-v1}
manager: {type: %s, env_num: 3, seed: 4, step_timeout: 0.3, reset_timeout: 1.0}
collect: {steps: 300}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "chaos.yaml"
    path.write_text(CONFIG % "subprocess")
    return path


def chaos(config: Path, *args: str) -> int:
    return main(["chaos", str(config), *args])


def test_workers_are_hurt_and_nothing_is_lost(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_file = tmp_path / "figures.json"
    kinds = "kill,exit,corrupt"
    # Long enough for an injury or two, and not more of them than a busy machine repairs meanwhile.
    how = ("--rate", "4", "--steps", "4000", "--kinds", kinds)
    assert chaos(config, *how, "--json", str(figures_file)) == DONE
    out = capsys.readouterr().out
    assert "for this run, manager has connect_timeout: 20.0, max_failures: 1000000" in out
    assert "done, nothing lost, repeated or swapped" in out
    figures: dict[str, Any] = json.loads(figures_file.read_text())
    accounts = figures["accounts"]
    assert accounts["accepted"] >= 4000
    assert accounts["accepted"] == accounts["normal"] + accounts["abnormal"]
    assert figures["is_clean"]
    assert figures["injuries"]["all"]["detected"] >= 1
    assert figures["failures"] == sum(figures["failures_by_kind"].values()) >= 1


def test_the_same_with_spares(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_file = tmp_path / "figures.json"
    how = ("--rate", "4", "--steps", "4000", "--kinds", "kill", "--json", str(figures_file))
    assert chaos(config, *how, "--set", "manager.spare_env_num=2") == DONE
    assert "nothing lost, repeated or swapped" in capsys.readouterr().out
    figures: dict[str, Any] = json.loads(figures_file.read_text())
    assert figures["is_clean"]
    assert figures["injuries"]["all"]["detected"] >= 1


@pytest.mark.v2
def test_the_same_with_trees(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = "manager.type=async_subprocess_v2"
    assert chaos(config, "--rate", "20", "--kinds", "kill,corrupt", "--set", kind) == DONE
    assert "nothing lost, repeated or swapped" in capsys.readouterr().out


def test_what_the_ledger_finds_decides_about_the_exit_code(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Ledger.delivered

    def to_the_next_env(ledger: Ledger, timesteps: dict[int, Any]) -> None:
        right(ledger, {(env_id + 1) % 3: step for env_id, step in timesteps.items()})

    monkeypatch.setattr(Ledger, "delivered", to_the_next_env)
    assert chaos(config, "--steps", "9") == FAILED
    captured = capsys.readouterr()
    assert "NOT in order" in captured.out
    assert "env 1 was given a timestep of env 0" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "manager.type=base"), "there is no worker to hurt"),
        (("--kinds", "kill,tickle"), "no injuries of kind 'tickle'"),
        (("--kinds", ""), "no injuries of kind (none given)"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--set", "collect.steps=null"), "nothing says when the run ends. Give --steps N, or set"),
    ],
)
def test_bad_input_starts_nothing(
    config: Path, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos(config, *args) == BAD_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert "launching" not in captured.out


def test_a_run_without_injuries_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos(config, "--steps", "3", "--rate", "0.001") == DONE
    assert "no worker was hurt" in capsys.readouterr().out


def test_says_at_the_start_what_a_hang_costs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, long = ("--steps", "3", "--rate", "0.001"), ("--set", "manager.step_timeout=10")
    advice = "for the 10 s of step_timeout; --set manager.step_timeout=1 is faster"
    assert chaos(config, *few, *long) == DONE
    assert advice in capsys.readouterr().out
    assert chaos(config, *few, *long, "--kinds", "kill") == DONE  # seen at once
    assert chaos(config, *few) == DONE
    assert "stands still" not in capsys.readouterr().out


def test_what_changes_what_envs_have_signed_is_off(config: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    keys = {"normalize_obs": True, "normalize_reward": True, "start_steps": 8}
    given = [part for key in keys for part in ("--set", f"manager.{key}={json.dumps(keys[key])}")]
    few = ("--steps", "60", "--rate", "0.001", "--json", str(figures_file))
    assert chaos(config, *few, *given) == DONE
    changed = json.loads(figures_file.read_text())["changed"]
    assert keys.keys() <= changed.keys()


def test_figures_on_stdout_are_all_that_is_printed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos(config, "--steps", "3", "--rate", "0.001", "--json", "-") == DONE
    assert json.loads(capsys.readouterr().out)["is_clean"]


def test_a_launch_that_fails_is_in_the_figures(config: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    fails = ("--set", "env.kwargs={no_such: 1}", "--json", str(figures_file))
    assert chaos(config, *fails) == FAILED
    assert json.loads(figures_file.read_text())["ending"] == "failed"
