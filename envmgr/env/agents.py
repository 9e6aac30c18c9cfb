"""Multi-agent envs in PettingZoo's form, recognised by their methods, without importing PettingZoo.

A *parallel* env takes an action of every living agent at once. An env whose agents take turns (AEC)
is made a parallel one by PettingZoo's own converters.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import gymnasium
from gymnasium.spaces import Space

from envmgr.env.contract import (
    EnvContractError,
    as_flag,
    attribute,
    describe,
    env_name,
    scalar_reward,
)
from envmgr.env.gym_spaces import convert_space
from envmgr.env.old_gym import defines
from envmgr.env.reset_arguments import ResetArguments
from envmgr.optional_packages import imported
from envmgr.types import is_abnormal


def is_multi_agent(obj: Any) -> bool:
    """Return whether an object has its spaces by agent, as PettingZoo's envs do."""
    return not isinstance(obj, gymnasium.Env) and all(
        callable(attribute(obj, name)) for name in ("observation_space", "action_space")
    )


def as_parallel(env: Any) -> Any:
    """Return a multi-agent env as a parallel one: itself, or converted if its agents take turns.

    Raises:
        MissingDependencyError: PettingZoo, whose converters are needed, is not installed.
        EnvContractError: the env does not say which agents there may be.
    """
    if all(callable(attribute(env, name)) for name in ("last", "agent_iter")):
        env = _converted(env)
    possible = attribute(env, "possible_agents")
    if not isinstance(possible, (list, tuple)) or not possible:
        raise EnvContractError(
            f"{env_name(env)} should list in `possible_agents` all agents that may ever live, "
            f"found {describe(possible)}: their spaces are known from the start, agents leave and "
            "join"
        )
    return env


def _converted(env: Any) -> Any:
    conversions = imported(
        "pettingzoo.utils.conversions",
        f"{env_name(env)} takes turns (AEC), and is made a parallel env by PettingZoo",
    )
    if (attribute(env, "metadata") or {}).get("is_parallelizable", False):
        return conversions.aec_to_parallel(env)
    return conversions.turn_based_aec_to_parallel(env)


class AgentStep(NamedTuple):
    """The result of a step, by agent.

    Attributes:
        obs: the observations of the agents that live on.
        last: the observations of the agents that ended in this step.
        rewards: floats, for all of these agents to which the env gave a reward; agents that joined
            in this step may have none.
        terminated: bools, for all of these agents.
        truncated: likewise.
        infos: as the env gave them.
    """

    obs: dict[Any, Any]
    last: dict[Any, Any]
    rewards: dict[Any, Any]
    terminated: dict[Any, bool]
    truncated: dict[Any, bool]
    infos: Mapping[Any, Any]


class AgentsEnv(gymnasium.Env[Any, Any]):
    """A parallel env inside a `gymnasium.Env`: what both views of agents have in common.

    Args:
        env: the env, with its wrappers.

    Attributes:
        env: the same, as a parallel env.
        possible_agents: all agents that may ever live, in the env's order.
        living: the agents that take an action now, in the same order.
        of_observations: the space of each agent's observations.
        of_actions: the space of each agent's actions.

    Raises:
        EnvContractError: the env does not say which agents there may be, or lacks a space of one.
        MissingDependencyError: its agents take turns, and PettingZoo is not installed.
    """

    def __init__(self, env: Any) -> None:
        self.env = as_parallel(env)
        self.metadata = attribute(self.env, "metadata") or {}
        self.render_mode = attribute(self.env, "render_mode")
        self._reset_arguments = ResetArguments(self.env)
        self.possible_agents = list(self.env.possible_agents)
        self.living: list[Any] = []
        self.of_observations = self._spaces("observation_space")
        self.of_actions = self._spaces("action_space")

    def _spaces(self, name: str) -> dict[Any, Space[Any]]:
        space_of = getattr(self.env, name)
        return {agent: convert_space(space_of(agent)) for agent in self.possible_agents}

    # -- episodes ---------------------------------------------------------------------------

    def begin(self, seed: int | None, options: Any) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
        """Reset the env; return observations of the living agents, and the env's infos.

        Raises:
            EnvContractError: the env returned something else.
        """
        super().reset(seed=seed)
        result = self.env.reset(**self._reset_arguments.of(seed, options))
        if not (isinstance(result, (tuple, list)) and len(result) == 2 and _are_dicts(result)):
            raise EnvContractError(
                f"reset of {env_name(self.env)} should return (observations, infos), dicts by "
                f"agent, as PettingZoo's parallel envs do; it returned {describe(result)}"
            )
        obs, infos = result
        self.living = self._listed(frozenset())
        if not self.living:
            raise EnvContractError(f"no agent of {env_name(self.env)} lives after its reset")
        return self._of(obs, self.living, "an observation"), infos

    def act(self, actions: Any) -> AgentStep:
        """Take an action of each living agent.

        Raises:
            EnvContractError: the env did not return what PettingZoo's parallel envs return.
        """
        result = self.env.step(actions)
        if not (isinstance(result, (tuple, list)) and len(result) == 5 and _are_dicts(result)):
            raise EnvContractError(
                f"step of {env_name(self.env)} should return (observations, rewards, terminations, "
                "truncations, infos), dicts by agent, as PettingZoo's parallel envs do; it "
                f"returned {describe(result)}"
            )
        obs, rewards, terminations, truncations, infos = result
        acted = self.living
        self._of(rewards, acted, "a reward")
        truncated = {a for a in self.possible_agents if _flag(truncations, a)}
        terminated = {a for a in self.possible_agents if _flag(terminations, a)}
        self.living = self._listed(truncated | terminated)
        lives, known = {*self.living}, {*acted, *self.living}
        told = [agent for agent in self.possible_agents if agent in known]
        # An agent that left without being reported as ended counts as terminated.
        terminated |= known - lives - truncated
        return AgentStep(
            self._of(obs, self.living, "an observation"),
            {agent: obs[agent] for agent in acted if agent not in lives and agent in obs},
            {agent: scalar_reward(rewards[agent]) for agent in told if agent in rewards},
            {agent: agent in terminated for agent in told},
            {agent: agent in truncated for agent in told},
            infos,
        )

    def _listed(self, ended: Set[Any]) -> list[Any]:
        """Return the agents that the env lists as living, in the order of `possible_agents`."""
        listed = {*self.env.agents}
        unknown = [agent for agent in listed if agent not in self.of_actions]
        if unknown:
            raise EnvContractError(
                f"{env_name(self.env)} has agents {unknown}, which its possible_agents lack"
            )
        return [a for a in self.possible_agents if a in listed and a not in ended]

    def _of(self, by_agent: Mapping[Any, Any], agents: list[Any], what: str) -> dict[Any, Any]:
        missing = [agent for agent in agents if agent not in by_agent]
        if missing:
            raise EnvContractError(
                f"{env_name(self.env)} gave {what} to agents {[*by_agent]}, but none to {missing}, "
                "which live (`agents`)"
            )
        return {agent: by_agent[agent] for agent in agents}

    # -- the env inside ---------------------------------------------------------------------

    def render(self) -> Any:
        """Return what the env renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the env, else of this view; the spaces are always the view's."""
        if name in ("observation_space", "action_space") or not hasattr(self.env, name):
            return getattr(self, name)
        return getattr(self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute where it is defined, else on the env inside of all wrappers."""
        layer, inside = self.env, self.env
        while inside is not None and not defines(layer := inside, name):
            attributes = getattr(layer, "__dict__", {})
            inside = attributes.get("env", attributes.get("aec_env"))
        setattr(layer, name, value)
        return True


def _are_dicts(parts: Any) -> bool:
    return all(isinstance(part, Mapping) for part in parts)


def _flag(flags: Mapping[Any, Any], agent: Any) -> bool:
    flag = flags.get(agent, False)
    return flag if type(flag) is bool else as_flag(flag, f"terminations or truncations[{agent!r}]")


def infos_of(infos: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the infos of agents as part of one info; any of them may mark the step as abnormal."""
    info: dict[str, Any] = {"infos": dict(infos)}
    if is_abnormal(infos) or is_abnormal([*infos.values()]):
        info["abnormal"] = True
    return info
