"""Single envs, and vector envs of them in each autoreset mode, whose episodes can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

MODES = ("NextStep", "SameStep", "Disabled")


class Walker(gymnasium.Env[Any, Any]):
    """Episodes whose lengths its own generator draws; infos at their beginnings and ends.

    Observations are (drawn when the episode began, steps, the latest action).

    Args:
        nested: observations are dicts.
    """

    action_space = Discrete(4)

    def __init__(self, nested: bool = False) -> None:
        box = Box(-1e6, 1e6, (3,), np.float64)
        self.observation_space: Any = Dict({"all": box}) if nested else box
        self._nested = nested
        self.options: Any = None
        self.colour = "grey"

    def _obs(self, action: int) -> Any:
        obs = np.array([self._length, self._n, action], np.float64)
        return {"all": obs} if self._nested else obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.options = {k: v for k, v in (options or {}).items() if k != "reset_mask"}
        self._length = int(self.np_random.integers(2, 9)) + self.options.get("longer", 0)
        self._n = 0
        return self._obs(-1), {"length": self._length}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n += 1
        ends = self._n >= self._length
        info = {"half": self._n / 2} if self._n == 3 or ends else {}
        return (
            self._obs(int(action)),
            float(action),
            ends and action != 1,
            ends and action == 1,
            info,
        )


def vector_of(n: int, mode: str, nested: bool = False) -> VectorEnv[Any, Any, Any]:
    """Return a vector env of so many."""
    return SyncVectorEnv([lambda: Walker(nested)] * n, autoreset_mode=mode)


class OneGenerator(VectorEnv[Any, Any, Any]):
    """As vector envs that are written as one: they take one seed, and reset all rows or none.

    Observations are (row, drawn when the episode began, steps). Rows end after as many as were
    drawn; those with action 3 at once. Action 2 cuts an episode short that ends with it.

    Args:
        n: how many rows.
        mode: when it begins episodes.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, n: int, mode: str = "NextStep") -> None:
        self.num_envs = n
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = Box(-1e6, 1e6, (3,), np.float64)
        self.single_action_space = Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, n)
        self.action_space = batch_space(self.single_action_space, n)
        self.calls: list[tuple[str, Any]] = []
        self._state = np.zeros((n, 3))
        self._state[:, 0] = range(n)
        self._ended = np.zeros(n, bool)

    def _begin(self, rows: Any) -> None:
        n = int(np.count_nonzero(rows))
        self._state[rows, 1] = self.np_random.integers(2, 9, n)
        self._state[rows, 2] = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.calls.append(("reset", seed))
        self._begin(np.ones(self.num_envs, bool))
        self._ended[:] = False
        return self._state.copy(), {"drawn": self._state[:, 1].copy()}

    def step(self, actions: Any) -> Any:
        assert self.action_space.contains(actions)
        self.calls.append(("step", actions.tolist()))
        self._state[:, 2] += 1
        begins = self._ended
        self._begin(begins)
        self._ended = ~begins & ((self._state[:, 2] >= self._state[:, 1]) | (actions == 3))
        cut_short = self._ended & (actions == 2)
        ended = self._ended & ~cut_short
        return self._state.copy(), np.ones(self.num_envs) - begins, ended, cut_short, {}


Episode = list[Any]


def plain(value: Any) -> Any:
    """Return an observation as lists."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return value.tolist()


def episodes_of(manager: Any, n: int, policy: Callable[[Any], int]) -> dict[int, list[Episode]]:
    """Return the first n episodes of each env, from their first observations to their last ones."""
    episodes: dict[int, list[Episode]] = {i: [] for i in range(manager.env_num)}
    while min(map(len, episodes.values())) <= n:
        infos = manager.ready_info
        for env_id, obs in manager.ready_obs.items():
            if not episodes[env_id] or episodes[env_id][-1][-1][-1]:
                first = (plain(obs), infos.get(env_id) or manager.ready_info[env_id], False)
                episodes[env_id].append([first])
        sent = {env_id: policy(plain(obs)) for env_id, obs in manager.ready_obs.items()}
        timesteps = dict(manager.step(sent))
        while timesteps.keys() < sent.keys():
            timesteps |= manager.step({})
        for env_id, (obs, reward, done, info) in timesteps.items():
            episodes[env_id][-1].append((plain(obs), reward, info, done))
    return {env_id: found[:n] for env_id, found in episodes.items()}
