"""Videos, figures and images of envs, whatever kind of manager runs them."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from envmgr import create_env_manager
from envmgr.env import BatchedEnvSpec, tile_images
from envmgr.errors import ConfigError, EnvFailure, LaunchError
from tests.unit.test_videos import Dawn, brightness, names

KINDS: list[dict[str, Any]] = [
    {"type": "base"},
    {"type": "thread"},
    {"type": "subprocess", "num_workers": 1, "reset_inplace": True},  # steps through the block
    {"type": "gym_vector"},
    {"type": "gym_vector", "gym_vector": {"autoreset_mode": "NextStep"}},
    {"type": "gym_vector", "gym_vector": {"autoreset_mode": "SameStep"}},
]


@pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: "-".join(map(str, cfg.values())))
def test_every_episode_of_every_env_is_saved(tmp_path: Path, cfg: Any) -> None:
    pytest.importorskip("av")
    videos, figures = tmp_path / "videos", tmp_path / "figures"
    manager = create_env_manager({"seed": 0, **cfg}, env_fn=[Dawn] * 2)
    manager.enable_save_replay(str(videos))
    with manager:
        manager.enable_save_figure(1, str(figures))
        for _ in range(5):
            manager.ready_arrays([0, 1])  # both are ready: neither misses a step
            manager.step({0: 0, 1: 0})
        manager.ready_arrays([0, 1])
        images = manager.ready_imgs
        assert tile_images(images).shape == (16, 32, 3)
        assert manager.reward_shaping(0, [{"reward": 1.0}]) == [{"reward": 1.0}]
    found = names(videos)
    assert found == [f"env_{i}-episode_{n:06d}.mp4" for i in (0, 1) for n in range(3)]
    is_same_step = cfg.get("gym_vector") == {"autoreset_mode": "SameStep"}
    whole = [40, 90] if is_same_step else [40, 90, 140]
    for name in found:
        expected = [40, 90] if name.endswith("2.mp4") else whole
        assert brightness(videos / name) == pytest.approx(expected, abs=4)
    assert len(names(figures)) == (0 if is_same_step else 2)


def test_a_killed_worker_leaves_no_video_and_the_next_env_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("av")
    cfg = {"type": "subprocess", "max_failures": 5}
    with create_env_manager(cfg, env_fn=[partial(Dawn, 3)]) as manager:
        manager.enable_save_replay(str(tmp_path))
        manager.enable_save_figure(0, str(tmp_path / "figures"))
        manager.reset()
        manager.step({0: 0})
        (worker,) = manager.stats()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        assert manager.step({0: 0})[0].info["abnormal"]
        for _ in range(3):
            manager.step(dict.fromkeys(manager.ready_obs, 0))
        assert "env_0-episode_000000.mp4" in names(tmp_path)
        assert len(names(tmp_path / "figures")) == 1
        assert len(manager.ready_obs) == 1
        (worker,) = manager.stats()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
    assert names(tmp_path) == ["env_0-episode_000000.mp4", "figures"]


@pytest.mark.parametrize("kind", ["thread", "subprocess"])
def test_what_is_recorded_and_how_an_env_renders_is_no_part_of_a_snapshot(
    tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("av")
    first, unseen = tmp_path / "first", [partial(Dawn, 3, None)]
    cfg = {"type": kind, "snapshot_copy": True, "auto_reset": False, "episode_num": 5}
    with create_env_manager(cfg, env_fn=unseen) as manager:
        manager.step({0: 0})
        without = manager.snapshot()
    with create_env_manager(cfg, env_fn=[partial(Dawn, 3)]) as manager:
        manager.enable_save_replay(str(first))
        manager.enable_save_figure(0, str(tmp_path / "figures"))
        manager.reset()
        manager.step({0: 0})
        recorded = manager.snapshot()
        manager.step({0: 0})
        manager.restore(without)  # the video of the episode that it replaces has two steps
        assert manager.ready_imgs[0].shape == (16, 16, 3)
        for action in (0, 0):
            manager.step({0: action})
        manager.reset()  # the first that is seen whole since then
    assert [brightness(first / name) for name in names(first)] == [
        pytest.approx(expected, abs=4) for expected in ([40, 90, 140], [40])
    ]
    assert len(names(tmp_path / "figures")) == 1
    with create_env_manager(cfg, env_fn=unseen) as manager:
        manager.restore(recorded)
        manager.step({0: 0})
        assert manager.step({0: 0})[0].done
        assert manager.get_attr("render_mode") == [None]
    assert (len(names(first)), len(names(tmp_path / "figures"))) == (2, 1)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "videos")
    silent = partial(Dawn, render_mode="ansi")
    manager = create_env_manager({"type": "base"}, env_fn=[silent])
    manager.enable_save_replay(folder)
    with pytest.raises(LaunchError, match="cannot record videos"):
        manager.launch()
    spec = BatchedEnvSpec(partial(gymnasium.vector.SyncVectorEnv, [silent] * 2), 2)
    with create_env_manager({"type": "base"}, env_fn=[spec] * 2) as manager:
        for call in (
            lambda: manager.enable_save_replay(folder),
            lambda: manager.enable_save_figure(0, folder),
        ):
            with pytest.raises(EnvFailure, match=r"SyncVectorEnv cannot save.*'ansi'"):
                call()
    assert not (tmp_path / "videos").exists()


@pytest.mark.parametrize("mode", ["rgb_array_list", "ansi", "human"])
def test_ready_imgs_are_what_the_envs_render(mode: str) -> None:
    with create_env_manager({"type": "base"}, env_fn=[partial(Dawn, render_mode=mode)]) as manager:
        if mode == "human":
            with pytest.raises(ConfigError, match=r"human.*render_mode='rgb_array'"):
                _ = manager.ready_imgs
        else:
            image = manager.ready_imgs[0]
            assert isinstance(image, list) == (mode == "rgb_array_list")
