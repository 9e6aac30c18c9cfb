"""Gymnasium's statistics of episodes, without those of envs that failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from envmgr.adapters.gym_arguments import AutoresetMode


class RecordEpisodeStatistics(gymnasium.wrappers.vector.RecordEpisodeStatistics):
    """A replacement for `gymnasium.wrappers.vector.RecordEpisodeStatistics`.

    The statistics leave out an episode that a failure of its env cut short: it has no `episode` in
    the infos, and it is not in the queues.

    Args:
        env: a vector env of this package, perhaps wrapped.
        buffer_length: how many episodes `return_queue`, `length_queue` and `time_queue` hold.
        stats_key: the key of the statistics in the infos.
    """

    def step(self, actions: Any) -> Any:
        """Step all envs; the infos have the statistics of the episodes that ended."""
        result = self.env.step(actions)
        rewards, infos = result[1], result[4]
        counted = np.ones(self.num_envs, np.bool_)
        if self._autoreset_mode is not AutoresetMode.SAME_STEP:
            counted = ~self.prev_dones  # the others were reset
        self.episode_returns[counted] += np.asarray(rewards)[counted]
        self.episode_lengths[counted] += 1
        self.prev_dones = ended = np.logical_or(result[2], result[3])
        if ended.any():
            self._end(ended & ~_failed(infos, self.num_envs), infos)
            self.episode_returns[ended] = 0
            self.episode_lengths[ended] = 0
            self.episode_start_times[ended] = time.perf_counter()
        return result

    def _end(self, whole: npt.NDArray[np.bool_], infos: dict[str, Any]) -> None:
        """Note the episodes of some envs."""
        if not whole.any():
            return
        key = self._stats_key
        if key in infos or f"_{key}" in infos:
            raise ValueError(
                f"the infos have {key!r} already, of the envs themselves: take this wrapper away, "
                "or give it another stats_key"
            )
        times = np.round(time.perf_counter() - self.episode_start_times, 6)
        columns = {"r": self.episode_returns, "l": self.episode_lengths, "t": times}
        infos[key] = {name: np.where(whole, of, 0) for name, of in columns.items()}
        infos[f"_{key}"] = whole
        self.episode_count += int(np.count_nonzero(whole))
        self.return_queue.extend(self.episode_returns[whole])
        self.length_queue.extend(self.episode_lengths[whole])
        self.time_queue.extend(times[whole])


def _failed(infos: Mapping[str, Any], n: int) -> npt.NDArray[np.bool_]:
    """Return which of n envs have failed, whichever autoreset mode the infos come from."""
    final = infos.get("final_info", infos)
    if isinstance(final, Mapping):
        abnormal = final.get("abnormal")
        return np.zeros(n, np.bool_) if abnormal is None else np.asarray(abnormal, np.bool_)
    return np.array([bool(info and info.get("abnormal")) for info in final])  # as Gymnasium 0.29
