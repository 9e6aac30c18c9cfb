"""Stable-Baselines3's statistics of episodes, without those of envs that failed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env.vec_monitor import VecMonitor as TheirVecMonitor


class VecMonitor(TheirVecMonitor):  # type: ignore[misc]
    """A replacement for Stable-Baselines3's `VecMonitor`.

    The statistics leave out an episode that a failure of its env cut short: it has no `episode` in
    its info, and no line in the file.

    Args:
        venv: the vec env.
        filename: the name of the log file, or None.
        info_keywords: keys of infos whose values go into the log file, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = time.monotonic()  # theirs reads the wall clock, which may jump

    def step_wait(self) -> Any:
        """Return what the vec env returns, with `episode` in the infos of episodes that ended."""
        obs, rewards, dones, infos = self.venv.step_wait()
        self.episode_returns += rewards
        self.episode_lengths += 1
        infos = list(infos)
        for i in np.flatnonzero(dones).tolist():
            if not infos[i].get("abnormal"):
                infos[i] = {**infos[i], "episode": self._noted(i, infos[i])}
            self.episode_returns[i] = self.episode_lengths[i] = 0
        return obs, rewards, dones, infos

    def _noted(self, i: int, info: dict[str, Any]) -> dict[str, Any]:
        episode = {
            "r": self.episode_returns[i],
            "l": self.episode_lengths[i],
            "t": round(time.monotonic() - self._began, 6),
            **{key: info[key] for key in self.info_keywords},
        }
        self.episode_count += 1
        if self.results_writer:
            self.results_writer.write_row(episode)
        return episode
