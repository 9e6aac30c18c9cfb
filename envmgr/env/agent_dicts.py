"""Multi-agent envs as managers run them: observations, actions and rewards are dicts by agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from envmgr.env.agents import AgentsEnv, infos_of
from envmgr.env.contract import StepResult
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.spaces.agents import AgentSpace, caster_of


class AgentDicts(AgentsEnv):
    """A parallel env whose observations, actions and rewards are dicts by living agent.

    Args:
        env: the env, with its wrappers.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space: AgentSpace = AgentSpace(self.of_observations)
        self.action_space = self._actions = AgentSpace(self.of_actions)
        reward = Box(-np.inf, np.inf, (), np.float64)
        self.reward_space = AgentSpace(dict.fromkeys(self.possible_agents, reward))
        self._cast = caster_of(self.observation_space)
        self._shown: dict[Any, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; return the observations of the agents that live, and an info."""
        obs, infos = self.begin(seed, options)
        self._shown = self._cast(obs)
        return self._shown, infos_of(infos)

    def step(self, actions: Any) -> Any:
        """Take an action of each living agent.

        Returns:
            gymnasium's five values: the observations of the agents that live on or, if there are
            none, of those that ended; the rewards of all these agents, 0.0 for one that the env
            gave no reward because it joined in this step; whether any of the last agents was
            terminated, and whether any was truncated; and an info with the reports by agent.
        """
        if isinstance(actions, Mapping):  # in the order of the agents, whatever the caller's was
            actions = {a: actions[a] for a in self.living if a in actions} | dict(actions)
        step = self.act(actions)
        rewards = dict.fromkeys(step.terminated, 0.0) | step.rewards
        flags = {"terminated": step.terminated, "truncated": step.truncated}
        info = {**flags, **infos_of(step.infos)}
        if not self.living:
            ends = (any(by_agent.values()) for by_agent in flags.values())
            return self._cast(step.last), rewards, *ends, info
        self._shown = self._cast(step.obs)
        if step.last:
            info["final_obs"] = self._cast(step.last)
        return self._shown, rewards, False, False, info

    def random_action(self) -> dict[Any, Any]:
        """Return a random action of each living agent; a legal one, if it sees `action_mask`."""
        return self._actions.sample_for(self._shown)


class MultiAgentEnv(GymnasiumEnv):
    """A wrapper of a parallel env; see `AgentDicts` for what its timesteps hold.

    Args:
        env: the env, with its wrappers.
        env_id: as for `GymnasiumEnv`.
    """

    def __init__(self, env: Any, env_id: int = 0) -> None:
        super().__init__(AgentDicts(env), env_id)

    def step_result_of(self, result: Any) -> StepResult:
        """Return what `step` returned as a `StepResult`; only its info says how episodes end."""
        obs, rewards, terminated, truncated, info = result
        return obs, rewards, terminated or truncated, 0, info
