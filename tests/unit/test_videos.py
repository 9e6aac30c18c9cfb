"""Videos of episodes: whole under their names or not there, whatever happens to who writes them."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.env import EpisodePictures, GymnasiumEnv, tile_images
from envmgr.env.videos import PART, Video, next_number, sweep
from envmgr.errors import ConfigError, MissingDependencyError
from tests.videos import frames_of


def brightness(path: Path) -> list[int]:
    """Return how bright each frame of a video is."""
    return [round(float(frame.mean())) for frame in frames_of(path, "gray")]


def frame_of(level: int, height: int = 16, width: int = 16) -> Any:
    return np.full((height, width, 3), level, np.uint8)


class Dawn(gymnasium.Env[Any, Any]):
    """Each step is brighter than the one before."""

    observation_space = Box(0.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)
    metadata = {"render_modes": ["rgb_array", "rgb_array_list", "ansi"], "render_fps": 25}  # noqa: RUF012

    def __init__(self, length: int = 2, render_mode: str | None = "rgb_array") -> None:
        self.length, self.render_mode, self.steps = length, render_mode, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == self.length, False, {}

    def render(self) -> Any:
        frame = frame_of(40 + 50 * self.steps)
        return [frame_of(0), frame] if self.render_mode == "rgb_array_list" else frame


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode", ["rgb_array", "rgb_array_list"])
def test_each_episode_is_a_video_with_all_its_frames(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("av")
    inner = Dawn(render_mode=mode)
    env = GymnasiumEnv(inner, env_id=3)
    env.reset()
    env.enable_save_replay(str(tmp_path / "videos"))
    env.step(0)  # the episode that runs already is not recorded
    for _ in range(2):
        env.reset()
        env.step(0)
        env.step(0)
    env.reset()
    env.step(0)
    assert len(names(tmp_path / "videos")) == 3  # the third has no name yet
    copied = copy.deepcopy(inner)  # what a snapshot of an env may be
    copied.reset()
    assert (copied.steps, inner.steps) == (0, 1)
    env.close()
    assert names(tmp_path / "videos") == [f"env_3-episode_{n:06d}.mp4" for n in range(4)]
    first = brightness(tmp_path / "videos" / "env_3-episode_000000.mp4")
    assert first == pytest.approx([40, 90, 140], abs=4)


def test_a_renewed_env_numbers_on_and_a_spare_takes_the_id_that_it_serves(tmp_path: Path) -> None:
    pytest.importorskip("av")
    for env_id in (0, 0, 7):
        pictures = EpisodePictures(env_id)
        pictures.save_videos(str(tmp_path))
        pictures.begun(lambda: frame_of(9))
        if env_id == 7:
            pictures.serve(0)
        pictures.stepped(lambda: frame_of(9), ended=True)
    pictures.begun(lambda: frame_of(9))
    pictures.stepped(lambda: frame_of(9), ended=False)
    pictures.serve(8)  # it makes room for a spare: what it has recorded is of the env that it was
    (tmp_path / "env_01-episode_000012.mp4").touch()
    assert [next_number(str(tmp_path), f"env_{i}") for i in (0, 7, 8)] == [4, 0, 0]
    assert len(names(tmp_path)) == 5


def test_odd_and_tiny_frames_become_videos_too(tmp_path: Path) -> None:
    pytest.importorskip("av")
    for height, width in ((17, 31), (1, 1)):
        video = Video(str(tmp_path), 12.5)
        video.add(frame_of(120, height, width))
        path, _ = video.finish("env_0")
        assert brightness(Path(path)) == pytest.approx([120], abs=4)
    video = Video(str(tmp_path), 30)
    video.add(frame_of(0))
    with pytest.raises(ValueError, match=r"after frames of shape \(16, 16, 3\).*\(8, 16, 3\)"):
        video.add(frame_of(0, 8))
    video.discard()
    assert len(names(tmp_path)) == 2


def test_what_a_crash_leaves_is_swept_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    pytest.importorskip("av")
    code = (
        "import os, sys, numpy\n"
        "from envmgr.env.videos import Video\n"
        "Video(sys.argv[1], 30).add(numpy.zeros((16, 16, 3), numpy.uint8))\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    crashed = names(tmp_path)
    assert [name.endswith(PART) for name in crashed] == [True]
    alive = Video(str(tmp_path), 30)
    alive.add(frame_of(0))
    EpisodePictures(5).save_videos(str(tmp_path))
    assert len(names(tmp_path)) == 1
    assert names(tmp_path) != crashed
    sweep([str(tmp_path), str(tmp_path / "none")])
    alive.finish("env_0")
    assert names(tmp_path) == ["env_0-episode_000000.mp4"]


def test_what_is_no_video_is_neither_waited_for_nor_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe{PART}")
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / f"link{PART}").symlink_to("victim")
    before = names(tmp_path)
    sweep([str(tmp_path)])
    assert names(tmp_path) == before


def test_a_full_disk_costs_the_video_and_not_the_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("av")
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    env = GymnasiumEnv(Dawn(), env_id=1)
    env.enable_save_replay(str(tmp_path))
    env.reset()
    video = env.pictures._video
    assert video is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, video._file.fileno())
    os.close(full)
    with caplog.at_level(logging.WARNING, "envmgr"):
        env.step(0)
        assert env.step(0).done
    assert "episode of env 1" in caplog.text
    assert names(tmp_path) == []
    env.reset()
    env.close()
    assert len(names(tmp_path)) == 1


def test_without_frames_or_pyav_videos_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "videos")
    for mode in (None, "human", "ansi"):
        with pytest.raises(ConfigError, match="cannot record videos"):
            GymnasiumEnv(Dawn(render_mode=mode)).enable_save_replay(folder)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'rl-env-manager\[video\]'"):
        GymnasiumEnv(Dawn()).enable_save_replay(folder)
    assert not (tmp_path / "videos").exists()


def test_a_figure_that_cannot_be_written_is_no_failure_of_the_env(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = GymnasiumEnv(Dawn(), env_id=1)
    env.enable_save_figure(str(tmp_path / "figures"))
    (tmp_path / "figures").rmdir()
    env.reset()
    env.step(0)
    assert env.step(0).done
    assert "the figure env_1-" in caplog.text
    assert "is lost" in caplog.text
    (tmp_path / "figures").mkdir()
    env.reset()
    env.step(0)
    env.step(0)
    assert len(names(tmp_path / "figures")) == 1


# -- images as one ------------------------------------------------------------------------------


def test_images_are_tiled_in_rows() -> None:
    frames = {i: frame_of(i + 1, 2, 3) for i in range(5)}
    grid = tile_images(frames)
    assert grid.shape == (4, 9, 3)
    assert grid.dtype == np.uint8
    assert grid[::2, ::3, 0].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert grid[1::2, 2::3, 2].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert tile_images(list(frames.values()), columns=5).shape == (2, 15, 3)
    smaller = tile_images([np.ones((2, 2)), np.ones((1, 3))])
    assert smaller.tolist() == [[1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "images", [[], {}, [np.zeros(3)], [frame_of(0), np.zeros((16, 16))], ["x"], [None], 3, [[[]]]]
)
def test_what_is_no_images_is_not_tiled(images: Any) -> None:
    with pytest.raises(ConfigError, match="tile_images takes images"):
        tile_images(images)
    with pytest.raises(ConfigError, match="columns is 0"):
        tile_images([frame_of(0)], columns=0)
