"""What stands for the package envpool: the parts of its interface that are used, in Python.

As the package: seeds are given when a pool is made, `step` and `reset` take some of the envs and
name in `infos["env_id"]` whose results they return, in an order of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

MADE: list[dict[str, Any]] = []
"""What pools were made with."""


class Pool:
    """A pool; the observations of an env are (its seed, episodes, steps); with action 3 it ends."""

    observation_space = Box(-1e6, 1e6, (3,), np.float32)
    action_space = Discrete(4)
    metadata = {"autoreset_mode": "NextStep"}  # noqa: RUF012 - as the package has it

    def __init__(self, num_envs: int, seed: Any, batch_size: int | None = None) -> None:
        seeds = [seed + i for i in range(num_envs)] if isinstance(seed, int) else seed
        self._state = np.zeros((num_envs, 3), np.float32)
        self._state[:, 0] = seeds
        self.closed = False
        self._batch_size = num_envs if batch_size is None else batch_size
        self._under_way: list[tuple[int, int | None]] = []
        self._ended = np.zeros(num_envs, bool)
        self._order = np.random.default_rng(num_envs)

    def __len__(self) -> int:
        return len(self._state)

    def _infos(self, env_id: Any) -> dict[str, Any]:
        players = {"env_id": env_id}
        steps = self._state[env_id, 2].astype(np.int32)
        return {"env_id": env_id, "players": players, "elapsed_step": steps, "lives": steps + 1}

    def reset(self, env_id: Any = None) -> Any:
        env_id = np.arange(len(self), dtype=np.int32) if env_id is None else env_id
        assert env_id.dtype == np.int32
        self._state[env_id, 1] += 1
        self._state[env_id, 2] = 0
        env_id = env_id[::-1]
        return self._state[env_id].copy(), self._infos(env_id)

    def step(self, action: Any, env_id: Any) -> Any:
        assert (action.dtype, env_id.dtype) == (np.int64, np.int32)
        self._state[env_id, 2] += 1
        order = np.arange(len(env_id))
        if len(env_id) < len(self):
            order = order[::-1]
        obs, ends = self._state[env_id][order], (action == 3)[order]
        rewards = action[order].astype(np.float32)
        return obs, rewards, ends, ends & False, self._infos(env_id[order])

    # -- asynchronous mode: what is under way ends in any order ----------------------------------

    def _reset(self, env_id: Any) -> None:
        self._begin([(int(i), None) for i in env_id])

    def send(self, action: Any, env_id: Any) -> None:
        assert (action.dtype, env_id.dtype) == (np.int64, np.int32)
        self._begin(list(zip(env_id.tolist(), action.tolist(), strict=True)))

    def _begin(self, asked: list[tuple[int, int | None]]) -> None:
        assert not {i for i, _ in asked} & {i for i, _ in self._under_way}, "asked twice"
        self._under_way += asked

    def recv(self) -> Any:
        assert len(self._under_way) >= self._batch_size, "it would wait for ever"
        chosen = self._order.permutation(len(self._under_way))[: self._batch_size]
        done = [self._under_way[k] for k in chosen]
        self._under_way = [one for one in self._under_way if one not in done]
        rewards = np.zeros(len(done), np.float32)
        for k, (row, action) in enumerate(done):
            if action is None or self._ended[row]:  # what an ended env is told begins an episode
                self._state[row, 1:] = self._state[row, 1] + 1, 0
                self._ended[row] = False
            else:
                self._state[row, 2] += 1
                self._ended[row], rewards[k] = action == 3, action
        env_id = np.array([row for row, _ in done], np.int32)
        ends = self._ended[env_id]
        return self._state[env_id], rewards, ends, ends & False, self._infos(env_id)

    def close(self) -> None:
        self.closed = True


def make(
    task_id: str,
    *,
    env_type: str,
    num_envs: int,
    seed: Any,
    batch_size: int | None = None,
    **options: Any,
) -> Pool:
    MADE.append({"task_id": task_id, "env_type": env_type, "seed": seed, **options})
    return Pool(num_envs, seed, batch_size)


def list_all_envs() -> list[str]:
    return ["Pong-v5", "CartPole-v1"]
