"""A multi-agent env as one env of fixed shapes: every agent that there may be is a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, Space
from gymnasium.vector.utils import batch_space, iterate

from envmgr.env.agents import AgentsEnv, infos_of
from envmgr.env.contract import EnvContractError, env_name
from envmgr.errors import ConfigError
from envmgr.spaces import Layout, codec_of
from envmgr.spaces.agents import AgentSpace
from envmgr.spaces.reading import short_text

_REWARDS = {"each": None, "sum": np.sum, "mean": np.mean}


class AgentRows(AgentsEnv):
    """A multi-agent env in PettingZoo's form, whose agents are alike, as one `gymnasium.Env`.

    Observations are `{"obs": (n, *shape), "mask": (n,)}` for n possible agents, in the env's order.
    `mask` is 1 for agents that take an action next. Each row is an agent's observation: its last
    one in the step in which the agent ends, and zeros while it is not living. Actions have a row
    for each agent, too; the rows of agents that are not living are ignored.

    The episode ends when no agent is left: terminated if one of the last agents was, and truncated
    likewise.
    In steps in which agents end, the info has `agents_terminated` and `agents_truncated`, bools
    (n,). If the env has infos of agents, the info has `infos`: `{agent: info}`.

    Args:
        env: the env with its wrappers: a parallel one, or one whose agents take turns.
        reward: "each": (n,) float64, 0.0 for agents that got no reward; "sum" or "mean" over the
            agents that had a reward: one number, for trainers that take one.

    Raises:
        ConfigError: there is no such `reward`.
        EnvContractError: agents have different spaces, or spaces whose values have no fixed layout.
    """

    def __init__(self, env: Any, reward: str = "each") -> None:
        if type(reward) is not str or reward not in _REWARDS:
            known = ", ".join(_REWARDS)
            raise ConfigError(f"reward is {short_text(reward)}, but must be one of {known}")
        super().__init__(env)
        self._reduce: Any = _REWARDS[reward]
        n = len(self.possible_agents)
        obs, self._layout = self._common(self.of_observations)
        action, _ = self._common(self.of_actions)
        self.observation_space = Dict({"obs": batch_space(obs, n), "mask": MultiBinary(n)})
        self.action_space: Space[Any] = batch_space(action, n)
        shape = (n,) if self._reduce is None else ()
        self.reward_space = Box(-np.inf, np.inf, shape, np.float64)
        self._for_env = codec_of(action).for_env

    def _common(self, by_agent: dict[Any, Space[Any]]) -> tuple[Space[Any], Layout]:
        """Return the one space of all agents, and the layout of its values."""
        first, *others = self.possible_agents
        space = by_agent[first]
        for agent in others:
            if by_agent[agent] != space:
                raise EnvContractError(
                    f"rows need agents that are alike, but in {env_name(self.env)} {agent!r} has "
                    f"the space {by_agent[agent]}, {first!r} has {space}. Pad them in a wrapper, "
                    "or leave AgentRows out: observations are dicts by agent then"
                )
        layout = codec_of(space).layout
        if layout is None:
            raise EnvContractError(
                f"rows need a space of a fixed layout, {env_name(self.env)} has {space}. Leave "
                "AgentRows out: observations are dicts by agent then"
            )
        return space, layout

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; return the observations of all rows, and an info."""
        obs, infos = self.begin(seed, options)
        return self._rows(obs), _told(infos)

    def step(self, action: Any) -> Any:
        """Take an action of each living agent; see the class.

        Args:
            action: a row for each possible agent.
        """
        each = dict(zip(self.possible_agents, iterate(self.action_space, action), strict=True))
        step = self.act({agent: self._for_env(each[agent]) for agent in self.living})
        reward: Any = np.array([step.rewards.get(agent, 0.0) for agent in self.possible_agents])
        if self._reduce is not None:
            reward = float(self._reduce([*step.rewards.values()]))
        info = _told(step.infos)
        if len(step.obs) < len(step.terminated):
            info["agents_terminated"] = self._flags(step.terminated)
            info["agents_truncated"] = self._flags(step.truncated)
        done = not self.living
        ends = (done and any(flags.values()) for flags in (step.terminated, step.truncated))
        return self._rows(step.obs | step.last), reward, *ends, info

    def _rows(self, by_agent: dict[Any, Any]) -> dict[str, Any]:
        n, lives = len(self.possible_agents), {*self.living}
        leaves = [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in self._layout.leaves]
        mask = np.zeros(n, np.int8)
        for row, agent in enumerate(self.possible_agents):
            if agent in by_agent:
                for leaf, value in zip(leaves, self._layout.flatten(by_agent[agent]), strict=True):
                    leaf[row] = value
            mask[row] = agent in lives
        return {"obs": self._layout.unflatten(leaves), "mask": mask}

    def _flags(self, by_agent: dict[Any, bool]) -> Any:
        return np.array([by_agent.get(agent, False) for agent in self.possible_agents])


def _told(infos: Any) -> dict[str, Any]:
    """Return the non-empty infos of agents as part of one info; `{}` if there are none."""
    told = {agent: info for agent, info in infos.items() if info}
    return infos_of(told) if told else {}


def refuse_agents(space: Any, what: str) -> None:
    """Refuse observations by agent where they have to be rows.

    Args:
        space: the observation space.
        what: the name, for the message, of what takes rows.

    Raises:
        ConfigError: the observations are by agent.
    """
    if isinstance(space, AgentSpace):
        raise ConfigError(
            f"{what} takes observations of fixed shapes, and those of these envs are dicts by "
            "agent, whose agents come and go. Wrap each env in envmgr.env.AgentRows (in a config: "
            "env.wrappers: [envmgr.env.AgentRows]): then agents are rows with a mask"
        )
