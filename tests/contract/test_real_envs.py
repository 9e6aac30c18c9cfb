"""Games of other packages, by the configs that name them, under every kind that fits.

`make test-envs` installs them; each test is skipped where its package is absent.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmgr import create_env_manager, make
from envmgr.cli import main
from envmgr.cli.config_envs import manager_of
from envmgr.config_file import resolve_config
from envmgr.env import BatchedEnvSpec
from envmgr.errors import LaunchError
from tests.videos import frames_of

FOLDER = Path(__file__).parents[2] / "configs"
GAMES = {"atari": "ale_py", "mujoco": "mujoco", "minigrid": "minigrid"}
KINDS = ("base", "thread", "subprocess", "async_subprocess", "gym_vector")
POOLED = {"atari": "Pong-v5", "mujoco": "HalfCheetah-v5", "minigrid": "MiniGrid-DoorKey-5x5-v0"}
STEPS, N = 60, 4


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo writes a log of its warnings into the working directory."""
    monkeypatch.chdir(tmp_path)


def test_the_configs_teach() -> None:
    for file in (*GAMES, "atari_vector", "procgen"):
        lines = (FOLDER / f"{file}.yaml").read_text().splitlines()
        assert lines[0].startswith("# ")
        assert max(map(len, lines)) <= 100


def set_kind(kind: str) -> list[str]:
    """Return what a config of workers changes to be one of another kind."""
    one_place = ["manager.num_workers=null"] if kind == "gym_vector" else []
    return [f"manager.type={kind}", *one_place]


def needs(module: str) -> None:
    """Skip the test unless a package is installed, and what it needs of the system."""
    try:
        importlib.import_module(module)
    except ImportError:
        pytest.skip(f"{module} is not installed")


def run(config: str, folder: Path, *settings: str) -> dict[str, Any]:
    """Return the summary of `envmgr run`."""
    sets = [f"--set={setting}" for setting in (f"manager.env_num={N}", *settings)]
    path = str(FOLDER / f"{config}.yaml")
    assert main(["run", path, f"--steps={STEPS}", f"--output={folder / 'out'}", *sets]) == 0
    summary: dict[str, Any] = json.loads((folder / "out/summary.json").read_text())
    assert summary["ending"] == "done"
    assert STEPS <= summary["steps"] < STEPS + N
    assert summary["stats"]["failures"] == 0
    return summary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("game", GAMES)
def test_a_game_runs_under_a_kind(game: str, kind: str, tmp_path: Path) -> None:
    needs(GAMES[game])
    run(game, tmp_path, *set_kind(kind))


@pytest.mark.parametrize("game", POOLED)
def test_a_game_of_envpool_runs(game: str, tmp_path: Path) -> None:
    needs("envpool")
    run("env_pool", tmp_path, f"manager.env_pool.env_id={POOLED[game]}")


def test_a_game_of_envpool_runs_asynchronously(tmp_path: Path) -> None:
    needs("envpool")
    settings = (f"manager.env_pool.env_id={POOLED['atari']}", "manager.env_pool.batch_size=2")
    assert run("env_pool", tmp_path, *settings)["stats"]["timesteps"] >= STEPS


def test_procgen_runs_through_envpool(tmp_path: Path) -> None:
    """In a process of its own: Qt, which EnvPool's Procgen draws with, keeps fds until its end."""
    needs("envpool")
    command = [sys.executable, "-m", "envmgr", "run", str(FOLDER / "procgen.yaml")]
    done = subprocess.run(
        [*command, f"--steps={STEPS}", "--no-output"], capture_output=True, text=True, timeout=50
    )
    if "requires the system Qt 5 runtime" in done.stderr:
        pytest.skip("there is no Qt 5, which EnvPool's Procgen needs")
    assert done.returncode == 0, done.stderr
    assert "16 envs of CoinrunEasy-v0 on env_pool: done" in done.stdout


def test_ataris_vector_env_runs(tmp_path: Path) -> None:
    needs("ale_py")
    run("atari_vector", tmp_path)


def test_ataris_vector_env_with_a_batch_size_says_what_to_do_instead() -> None:
    needs("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    cfg = {"type": "gym_vector", "env_num": 4}
    manager = create_env_manager(cfg, env_fn=[lambda: AtariVectorEnv("pong", 4, batch_size=2)])
    with pytest.raises(LaunchError, match=r"batch_size=2 for 4 rows.*type: async_subprocess"):
        manager.launch()

    def some() -> Any:
        return AtariVectorEnv("pong", 2)

    specs = [BatchedEnvSpec(some, 2) for _ in range(2)]
    env_fn = [spec for spec in specs for _ in range(2)]
    with create_env_manager({"type": "async_subprocess", "num_workers": 2}, env_fn) as manager:
        came = manager.step(dict.fromkeys(manager.ready_obs, 0))
        assert len(came) in (2, 4)


def observations(game: str, kind: str) -> list[np.ndarray]:
    """Return what the envs of a game observe under a kind, step for step, with the same actions."""
    sets = [*set_kind(kind), f"manager.env_num={N}", "manager.wait_num=.inf"]
    resolved = resolve_config(FOLDER / f"{game}.yaml", set=sets)
    rng = np.random.default_rng(0)
    seen = []
    with manager_of(resolved) as manager:
        space = manager.action_space
        discrete = hasattr(space, "n")
        for _ in range(30):
            seen.append(np.stack([*manager.ready_obs.values()]))
            actions = (
                rng.integers(space.n, size=N)
                if discrete
                else rng.uniform(-1, 1, (N, *space.shape)).astype(np.float32)
            )
            timesteps = manager.step(dict(enumerate(actions)))
            assert [*timesteps] == [*range(N)]
            seen.append(np.stack([t.obs for t in timesteps.values()]))
            seen.append(np.array([t.reward for t in timesteps.values()]))
    return seen


@pytest.mark.parametrize("game", GAMES)
def test_the_same_seeds_and_actions_give_the_same_under_every_kind(game: str) -> None:
    needs(GAMES[game])
    expected = observations(game, "base")
    assert len({obs.tobytes() for obs in expected[0]}) > 1 or game == "atari"  # seeds differ
    assert not np.array_equal(expected[0], expected[-2])
    for kind in KINDS[1:]:
        found = observations(game, kind)
        assert all(map(np.array_equal, found, expected)), kind


def test_an_atari_episode_becomes_a_video(tmp_path: Path) -> None:
    needs("ale_py")
    pytest.importorskip("av")
    kwargs = {"render_mode": "rgb_array", "max_num_frames_per_episode": 120}
    manager = make("ALE/Pong-v5", 2, num_workers=2, env_kwargs=kwargs, seed=0)
    manager.enable_save_replay(str(tmp_path))
    n_steps = {0: 0, 1: 0}
    with manager:
        running = {0, 1}
        while running:
            for env_id, timestep in manager.step(dict.fromkeys(running, 2)).items():
                n_steps[env_id] += 1
                if timestep.done:
                    running.remove(env_id)
    for env_id in (0, 1):
        frames = frames_of(tmp_path / f"env_{env_id}-episode_000000.mp4", "rgb24")
        assert len(frames) == n_steps[env_id] + 1
        assert frames[0].shape == (210, 160, 3)
        assert not np.array_equal(frames[5], frames[-1])


def test_an_atari_id_needs_nothing_else(tmp_path: Path) -> None:
    needs("ale_py")
    config = tmp_path / "pong.yaml"
    config.write_text("env: {id: ALE/Pong-v5}\nmanager: {type: base, env_num: 1, seed: 0}\n")
    assert main(["run", str(config), "--steps=5", "--no-output"]) == 0
