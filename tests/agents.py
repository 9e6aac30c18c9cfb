"""A scripted multi-agent env in PettingZoo's form, without PettingZoo: agents leave and join."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

AGENTS = ("ann", "bob", "cleo")
LIVES = {"ann": (0, 4), "bob": (0, 2), "cleo": (1, 4)}
"""After which step each agent joins (0: with the reset) and ends. Bob's end is a truncation."""


class Relay:
    """Agents whose observations are (seed or -1, episode, step, what it did last).

    The reward of an agent is its index + the step / 10. `options` of a reset: `lives` as `LIVES`;
    `fail` is what goes wrong in step `at`: "raise", "exit", "hang", "shape", "silent", "abnormal",
    "reset".

    Args:
        alike: all agents have the same spaces.
        agents: that there may be.
        lives: of those that do not live from the reset to step 4.

    Attributes:
        colour: of no meaning.
    """

    metadata: Any = {"name": "relay", "render_modes": ["rgb_array"]}  # noqa: RUF012
    colour = "red"

    def __init__(
        self, alike: bool = True, agents: tuple[Any, ...] = AGENTS, lives: Any = LIVES
    ) -> None:
        self.possible_agents = list(agents)
        self.render_mode = "rgb_array"
        self._own_lives = lives
        high = 1e9
        self._obs: dict[Any, Space[Any]] = {
            a: Box(-high, high, (4 if alike else 4 + k,), np.float64) for k, a in enumerate(agents)
        }
        self._actions = {a: Discrete(5 if alike else 5 + k) for k, a in enumerate(agents)}
        self._seed, self._episode, self._t = -1, 0, 0
        self.closed = 0

    def observation_space(self, agent: Any) -> Space[Any]:
        return self._obs[agent]

    def action_space(self, agent: Any) -> Space[Any]:
        return self._actions[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        options = options or {}
        lives = options.get("lives", self._own_lives)
        self._lives = {a: lives.get(a, (0, 4)) for a in self.possible_agents}
        self._fail, self._at = options.get("fail"), options.get("at", 1)
        if self._fail == "reset":
            raise RuntimeError("no reset")
        if seed is not None:
            self._seed, self._episode = seed, 0
        self._episode, self._t = self._episode + 1, 0
        self.agents = [a for a in self.possible_agents if self._lives[a][0] == 0]
        return self._seen({}), {a: {"hello": str(a)} for a in self.agents}

    def step(self, actions: Mapping[Any, Any]) -> Any:
        assert [*actions] == self.agents, f"{[*actions]} acted, not {self.agents}"
        assert all(type(action) is int for action in actions.values())
        self._t += 1
        failing = self._fail if self._t == self._at else None
        if failing == "raise":
            raise RuntimeError("a relay fails")
        if failing == "exit":
            os._exit(3)
        if failing == "hang":
            time.sleep(1e6)
        joined = [a for a in self.possible_agents if self._lives[a][0] == self._t]
        acted, self.agents = (
            self.agents,
            [a for a in self.possible_agents if a in self.agents or a in joined],
        )
        ended = [a for a in acted if self._lives[a][1] == self._t]
        obs = self._seen(actions)
        rewards = {a: self.possible_agents.index(a) + self._t / 10 for a in acted}
        terminated = {a: a in ended and a != "bob" for a in self.agents}
        truncated = {a: a in ended and a == "bob" for a in self.agents}
        infos: dict[Any, Any] = {a: {} for a in self.agents}
        self.agents = [a for a in self.agents if a not in ended]
        if failing == "shape":
            obs[self.agents[0]] = np.zeros(9)
        if failing == "silent":
            del obs[self.agents[0]]
        if failing == "abnormal":
            infos[acted[0]]["abnormal"] = True
        return obs, rewards, terminated, truncated, infos

    def _seen(self, actions: Mapping[Any, Any]) -> dict[Any, Any]:
        seen = {}
        for agent in self.agents:
            obs = seen[agent] = np.zeros(self._obs[agent].shape)  # type: ignore[arg-type]
            obs[:4] = self._seed, self._episode, self._t, actions.get(agent, -1)
        return seen

    def render(self) -> Any:
        return np.full((2, 2, 3), self._t, np.uint8)

    def close(self) -> None:
        self.closed += 1

    def double(self, x: int) -> int:
        return 2 * x


class Layer:
    """A wrapper as PettingZoo has them."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def observation_space(self, agent: Any) -> Space[Any]:
        return self.env.observation_space(agent)

    def action_space(self, agent: Any) -> Space[Any]:
        return self.env.action_space(agent)
