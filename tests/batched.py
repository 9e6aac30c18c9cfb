"""A scripted batched env: actions say what a row does, and what it returns says who it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr.env.batched import BatchedEnv

N_MOVES = 10
"""Actions below this one do nothing but show up in the observation."""


class Do(IntEnum):
    """Actions that make a row, or the whole env, do something else than move."""

    END = 10
    RAISE = 11
    SYS_EXIT = 12
    KILL = 13
    ABNORMAL = 14
    BAD_ROW = 15
    """The observation of this row is no number."""
    FEW_ROWS = 16
    """The whole env returns one observation too few."""
    INTERRUPT = 17
    """As Ctrl-C in the midst of the step."""
    END_THEN_RAISE = 18
    """END; the next reset of this row raises, and all that are run with it."""


class ScriptedBatch(BatchedEnv):
    """Rows whose observations are (row, seed, episode, step, action).

    The seed is that of the latest reset with one. The env writes down what it was asked for.

    Args:
        size: how many rows.

    Attributes:
        log: (method, rows, seeds or actions) of each call.
        closed: how often it was closed.
        colours: of rows, as far as set.
    """

    observation_space = Box(-1e6, 1e6, (5,), np.float64)
    action_space = Discrete(32)
    metadata: Any = {"name": "scripted batch"}  # noqa: RUF012 - as gymnasium's envs have it

    def __init__(self, size: int) -> None:
        self.log: list[tuple[str, list[int], list[Any]]] = []
        self.params: list[Mapping[str, Any]] = []
        self.closed = 0
        self.colours: dict[int, Any] = {}
        self._breaks: set[int] = set()
        self._state = np.zeros((size, 5))
        self._state[:, 0] = range(size)
        self._state[:, 1] = -1
        self._shown = self._state.copy()
        self._rewards, self._ends = np.zeros(size), np.zeros(size, bool)

    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> tuple[Any, Any]:
        self.log.append(("reset", list(rows), list(seeds)))
        self.params = list(params)
        broken = self._breaks.intersection(rows)
        if broken:
            self._breaks -= broken
            raise RuntimeError(f"rows {sorted(broken)} cannot be reset")
        for row, seed in zip(rows, seeds, strict=True):
            if seed is not None:
                self._state[row, 1] = seed
            self._state[row, 2] += 1
            self._state[row, 3:] = 0
        return self._show(rows), [{"first_of": row} for row in rows]

    def _show(self, rows: Sequence[int]) -> Any:
        """Return the observations of rows in the array that each call uses again, as all."""
        self._shown[:] = self._rewards[:] = -5
        self._ends[:] = False
        self._shown[: len(rows)] = self._state[list(rows)]
        return self._shown[: len(rows)]

    def step(self, rows: Sequence[int], actions: Sequence[Any]) -> Any:
        self.log.append(("step", list(rows), [int(action) for action in actions]))
        told = dict(zip(rows, map(int, actions), strict=True))
        self._misbehave(set(told.values()))
        for row, action in told.items():
            self._state[row, 3] += 1
            self._state[row, 4] = action
        self._breaks |= {row for row, action in told.items() if action == Do.END_THEN_RAISE}
        obs = self._show(rows)
        if Do.BAD_ROW in told.values():
            obs = [
                row if told[i] != Do.BAD_ROW else "bad" for i, row in zip(rows, obs, strict=True)
            ]
        if Do.FEW_ROWS in told.values():
            obs = obs[1:]
        ends, rewards = self._ends[: len(rows)], self._rewards[: len(rows)]
        ends[:] = [told[row] in (Do.END, Do.END_THEN_RAISE) for row in rows]
        rewards[:] = self._state[list(rows), 3]
        infos = [{"abnormal": True} if told[row] == Do.ABNORMAL else {} for row in rows]
        return obs, rewards, ends, np.zeros(len(rows), bool), infos

    def _misbehave(self, actions: set[int]) -> None:
        if Do.RAISE in actions:
            raise ValueError("in the midst of the batch")
        if Do.SYS_EXIT in actions:
            raise SystemExit(3)
        if Do.KILL in actions:
            os.kill(os.getpid(), signal.SIGKILL)
        if Do.INTERRUPT in actions:
            raise KeyboardInterrupt

    def double(self, row: int, number: int) -> list[int]:
        """Return something of a row."""
        return [row, 2 * number]

    def set_attribute(self, row: int, name: str, value: Any) -> None:
        if name != "colour":
            super().set_attribute(row, name, value)
        self.colours[row] = value

    def attribute(self, row: int, name: str) -> Any:
        return self.colours[row] if name == "colour" else super().attribute(row, name)

    def close(self) -> None:
        self.closed += 1
