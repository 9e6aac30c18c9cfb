"""Envs that show what managers are for: uneven ones, ones that fail, and one with several agents.

The configs beside this file name them in `env.entry`. A config may name any module that lies beside
it, or in the working directory; other modules need --allow-import.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import gymnasium
import numpy as np


class UnevenEnv(gymnasium.Env[Any, Any]):
    """Steps that take log-normal time, slow resets, episodes of uneven length.

    Args:
        step_ms: the median of a step's time, in milliseconds.
        sigma: the spread of the logarithm of that time; 0 makes all steps take equally long.
        reset_ms: how long a reset takes, in milliseconds.
        shortest: least steps of an episode.
        longest: most steps of an episode.
    """

    def __init__(
        self,
        step_ms: float = 2.0,
        sigma: float = 1.0,
        reset_ms: float = 100.0,
        shortest: int = 20,
        longest: int = 60,
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (8,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._step_s, self._reset_s = step_ms / 1000.0, reset_ms / 1000.0
        self._sigma = sigma
        self._lengths = (shortest, longest)
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, slowly."""
        super().reset(seed=seed)
        time.sleep(self._reset_s)
        self._left = int(self.np_random.integers(*self._lengths, endpoint=True))
        return self._observe(), {"length": self._left}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action, in uneven time."""
        time.sleep(self._step_s * math.exp(self._sigma * self.np_random.standard_normal()))
        self._left -= 1
        return self._observe(), 1.0, self._left == 0, False, {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 8).astype(np.float32)


class FragileEnv(UnevenEnv):
    """Fails now and then: raises, ends its process, or hangs in a step.

    Args:
        p_raise: probability that a step raises.
        p_exit: probability that a step ends the process, as a crash in C code would.
        p_hang: probability that a step never returns.
    """

    def __init__(
        self, p_raise: float = 0.0005, p_exit: float = 0.0003, p_hang: float = 0.0002
    ) -> None:
        super().__init__(step_ms=1.0, sigma=0.5, reset_ms=5.0)
        self._p_raise, self._p_exit, self._p_hang = p_raise, p_exit, p_hang

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action, or fail."""
        fate = self.np_random.random()
        if fate < self._p_raise:
            raise RuntimeError("the simulator lost its connection")
        if fate < self._p_raise + self._p_exit:
            os._exit(11)
        if fate < self._p_raise + self._p_exit + self._p_hang:
            time.sleep(1e6)
        return super().step(action)


class ForagersEnv:
    """Agents that look for food on a ring: a multi-agent env as PettingZoo's parallel ones are.

    An agent that finds food gets 1, and sometimes another one joins; one that finds none for
    `patience` steps starves.

    Args:
        places: of agents; half of them are taken at first.
        patience: steps that an agent lives without food.
        time_limit: steps after which the rest are truncated.
    """

    metadata: Any = {"name": "foragers_v0", "render_modes": []}  # noqa: RUF012

    def __init__(self, places: int = 6, patience: int = 15, time_limit: int = 100) -> None:
        self.possible_agents = [f"forager_{k}" for k in range(places)]
        self.agents: list[str] = []
        self._seen = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._moves = gymnasium.spaces.Discrete(3)
        self._patience, self._time_limit = patience, time_limit
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        """Return the space of (how far the food is, on which side; what is left of patience)."""
        return self._seen

    def action_space(self, agent: str) -> Any:
        """Return the space of moves: left, none, right."""
        return self._moves

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin with half of the agents."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[: (len(self.possible_agents) + 1) // 2]
        self._at = {agent: int(self._rng.integers(20)) for agent in self.agents}
        self._hungry = dict.fromkeys(self.agents, 0)
        self._food, self._t = int(self._rng.integers(20)), 0
        return self._observed(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        """Move every agent."""
        self._t += 1
        rewards = dict.fromkeys(self.agents, 0.0)
        for agent in list(self.agents):
            self._at[agent] = (self._at[agent] + actions[agent] - 1) % 20
            self._hungry[agent] += 1
            if self._at[agent] == self._food:
                rewards[agent], self._hungry[agent] = 1.0, 0
                self._food = int(self._rng.integers(20))
                self._join()
        starved = {a: self._hungry[a] >= self._patience for a in self.agents}
        late = dict.fromkeys(self.agents, self._t >= self._time_limit)
        obs, infos = self._observed(), {agent: {} for agent in self.agents}
        self.agents = [a for a in self.agents if not (starved[a] or late[a])]
        return obs, rewards, starved, late, infos

    def _join(self) -> None:
        free = [agent for agent in self.possible_agents if agent not in self._at]
        if free and self._rng.random() < 0.5:
            self.agents.append(free[0])
            self._at[free[0]], self._hungry[free[0]] = int(self._rng.integers(20)), 0

    def _observed(self) -> dict[str, Any]:
        seen = {}
        for agent in self.agents:
            distance = (self._food - self._at[agent] + 10) % 20 - 10
            left = 1.0 - self._hungry[agent] / self._patience
            seen[agent] = np.array([distance / 10.0, left], np.float32)
        return seen

    def close(self) -> None:
        """Close nothing."""


def make_pendulum(gravity: float = 9.8, time_limit: int = 100) -> gymnasium.Env[Any, Any]:
    """Return Pendulum-v1 with episodes of `time_limit` steps: any function can build an env."""
    return gymnasium.make("Pendulum-v1", g=gravity, max_episode_steps=time_limit)
