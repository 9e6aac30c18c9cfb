"""Every config in `configs/` runs, and shows what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envmgr.cli import main
from envmgr.config.origins import Source
from envmgr.config_file import load_config, resolve_config
from envmgr.registry import ENV_MANAGER_REGISTRY

FOLDER = Path(__file__).parents[2] / "configs"
GAMES = {"atari", "atari_vector", "minigrid", "mujoco", "procgen"}
"""Configs of envs of other packages: test_real_envs.py runs them."""
FILES = sorted(file for file in FOLDER.glob("*.yaml") if file.stem not in GAMES)
BUDGETED = {"evaluation"}
"""Those that end when the envs have run their episodes."""
NEEDS = {"env_pool": "envpool", "ray": "ray"}
"""Packages that one of them needs, and that need not be there."""
WHOLE_BATCHES = {"gym_vector"}
"""Those whose envs are stepped together: they take a batch more than was asked for."""
FEWER_STEPS = {"spawn": 20, "uneven_async": 100, "fragile": 300}


def is_v2(file: Path) -> bool:
    return file.stem.endswith("_v2")


@pytest.fixture(autouse=True)
def modules_beside_configs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what importing the configs' modules leaves behind."""
    monkeypatch.setattr("sys.path", [*sys.path])
    yield
    for name in ("example_envs", "example_policies"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=pytest.mark.v2 if is_v2(f) else (), id=f.stem) for f in FILES],
)
def test_runs(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if file.stem in NEEDS:
        pytest.importorskip(NEEDS[file.stem])
    budgeted = file.stem in BUDGETED
    steps = FEWER_STEPS.get(file.stem, 200)
    goal = [] if budgeted else ["--steps", str(steps)]
    code = main(["run", str(file), *goal, "--output", str(tmp_path / "out")])
    out, err = capfd.readouterr()
    assert code == 0, err
    summary: dict[str, Any] = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["ending"] == "done"
    more = load_config(file).manager.env_num or 0 if file.stem in WHOLE_BATCHES else 0
    if not budgeted:
        assert steps <= summary["steps"] <= steps + more
    if file.stem != "fragile":
        assert err == ""
        assert summary["stats"]["failures"] == 0
    assert ": done" in out


def test_there_is_one_for_each_kind() -> None:
    kinds = {load_config(file).manager.type for file in FILES}
    registry = ENV_MANAGER_REGISTRY  # pages have examples that register kinds of their own
    assert kinds == {key for key in registry if registry.source(key) == "envmgr"}
    for kind in kinds:
        assert load_config(FOLDER / f"{kind}.yaml").manager.type == kind


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_teaches(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert max(map(len, lines)) <= 100
    origins = resolve_config(file).origins.items()
    given = {key for key, origin in origins if origin.source is Source.FILE}
    assert given >= {"manager.type", "manager.env_num", "manager.seed"} or "evaluation" in file.stem


def test_evaluation_runs_as_many_episodes_in_every_env(tmp_path: Path) -> None:
    assert main(["run", str(FOLDER / "evaluation.yaml"), "--output", str(tmp_path)]) == 0
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert sorted((e["env_id"], e["nth"]) for e in episodes) == [
        (i, n) for i in range(4) for n in range(5)
    ]
    assert {e["return"] for e in episodes} == {500.0}  # the policy is a good one


def test_fragile_envs_fail_and_are_lived_with(tmp_path: Path) -> None:
    often = "--set=env.kwargs={p_raise: 0.02, p_exit: 0.01, p_hang: 0.0}"
    config = str(FOLDER / "fragile.yaml")
    more = "--set=manager.max_failures=1000"
    window = "--set=manager.failure_window_s=0.01"
    code = main(["run", config, often, more, window, "--steps=1000", f"--output={tmp_path}"])
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 1000
    assert set(summary["stats"]["failures_by_kind"]) == {"EnvRaised", "EnvCrash"}


def test_workers_are_recycled(tmp_path: Path) -> None:
    config = str(FOLDER / "long_runs.yaml")
    few = "--set=manager.max_episodes_per_worker=2"
    assert main(["run", config, few, "--episodes=20", f"--output={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stats"]["recycled"] > 0
    assert summary["stats"]["failures"] == 0
    assert summary["episodes"] == 20
