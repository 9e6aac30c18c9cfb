"""Spaces by agent: values are dicts that have a value for each agent that lives now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces.codec import ActionCheck, Codec
from envmgr.spaces.codecs import CODECS, codec_of
from envmgr.spaces.equality import has_samples, same_space
from envmgr.spaces.layouts import Leaf
from envmgr.spaces.legal import legal_sample, mask_in
from envmgr.spaces.reading import short_text
from envmgr.spaces.values import Path, ValueMismatchError, structure_text


class AgentSpace(spaces.Space[dict[Any, Any]]):
    """Dicts of values by agent, where any of the agents may be absent.

    Args:
        by_agent: the space of each possible agent.

    Attributes:
        spaces: likewise.
    """

    def __init__(self, by_agent: Mapping[Any, spaces.Space[Any]]) -> None:
        super().__init__(None, None)
        self.spaces: dict[Any, spaces.Space[Any]] = dict(by_agent)

    def contains(self, x: Any) -> bool:
        """Return whether a value has only possible agents, each with a value of its space."""
        return isinstance(x, Mapping) and all(
            agent in self.spaces and self.spaces[agent].contains(value)
            for agent, value in x.items()
        )

    def sample(self, mask: Any = None, probability: Any = None) -> dict[Any, Any]:
        """Return a random value for each possible agent.

        Args:
            mask: as for gymnasium's Dict: for some agents, the masks of their spaces.
            probability: likewise.
        """
        given = {"mask": mask or {}, "probability": probability or {}}
        return {
            agent: space.sample(**{k: of[agent] for k, of in given.items() if agent in of})
            for agent, space in self.spaces.items()
        }

    def sample_for(self, observations: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a random action for each agent that lives, where this is a space of actions.

        Args:
            observations: the observations of those agents; where one has an entry `action_mask`,
                only legal actions are drawn (see `legal_sample`).
        """
        return {
            agent: legal_sample(self.spaces[agent], mask_in(obs))
            for agent, obs in observations.items()
        }

    def seed(self, seed: Any = None) -> list[int]:
        """Seed the generator of each agent's space with a seed of its own.

        Returns:
            The seeds.
        """
        count = len(self.spaces)
        seeds = np.random.SeedSequence(seed).generate_state(count).tolist()
        for space, one in zip(self.spaces.values(), seeds, strict=True):
            space.seed(one)
        return list(seeds)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False, because agents may be absent."""
        return False

    def __getitem__(self, agent: Any) -> spaces.Space[Any]:
        return self.spaces[agent]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.spaces)

    def __len__(self) -> int:
        return len(self.spaces)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AgentSpace)
            and self.spaces.keys() == other.spaces.keys()
            and all(same_space(space, other.spaces[agent]) for agent, space in self.spaces.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        agents_of: dict[str, list[Any]] = {}  # those with the same space together
        for agent, space in self.spaces.items():
            agents_of.setdefault(str(space), []).append(agent)
        parts = [f"{', '.join(map(repr, agents))}: {space}" for space, agents in agents_of.items()]
        return f"AgentSpace({'; '.join(parts)})"


def is_sampled_alone(space: Any) -> bool:
    """Return whether values can be drawn from a space alone, whichever agents are in the env."""
    return has_samples(space) and not isinstance(space, AgentSpace)


class _AgentsCodec(Codec):
    """Each agent's value is checked against its own space; there is no fixed layout."""

    def __init__(self, space: AgentSpace, strict: bool) -> None:
        super().__init__(space, strict)
        self._parts = {agent: codec_of(part, strict=strict) for agent, part in space.spaces.items()}

    def check_value(self, value: Any, path: Path = ()) -> None:
        if not isinstance(value, Mapping):
            raise ValueMismatchError(structure_text(path, value, "a dict by agent"))
        for agent, part in value.items():
            self._leaves(agent, part)

    def cast(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a value with its arrays in the dtypes of their spaces; may alias the value.

        Raises:
            ValueMismatchError: the value does not fit; the message names the agent.
        """
        return {
            agent: self._parts[agent].structure.unflatten(self._leaves(agent, part))
            for agent, part in value.items()
        }

    def _leaves(self, agent: Any, part: Any) -> list[Any]:
        if agent not in self._parts:
            raise ValueMismatchError(f"of the value: {self._unknown(agent)}")
        structure = self._parts[agent].structure
        try:
            leaves = structure.flatten(part)
        except ValueMismatchError as error:
            raise ValueMismatchError(f"of agent {agent!r}: {error}") from error
        return list(map(_cast, structure.leaves, leaves))

    def _unknown(self, agent: Any) -> str:
        return f"{short_text(agent)} is none of the possible agents {short_text([*self._parts])}"

    def refusal(self, action: Any) -> str | None:
        if not isinstance(action, Mapping):
            return structure_text((), action, "a dict by agent")
        for agent, part in action.items():
            if agent not in self._parts:
                return self._unknown(agent)
            reason = self._parts[agent].refusal(part)
            if reason is not None:
                return f"of agent {agent!r}: {reason}"
        return None

    def for_env(self, action: Any) -> Any:
        if not isinstance(action, Mapping):
            return action
        parts = self._parts
        return {k: parts[k].for_env(part) if k in parts else part for k, part in action.items()}

    def as_bytes(self, value: Any) -> bytes:
        in_order = sorted(value.items(), key=lambda entry: str(entry[0]))
        return b"".join(
            [repr(agent).encode() + self._parts[agent].as_bytes(part) for agent, part in in_order]
        )


def _cast(leaf: Leaf, value: Any) -> Any:
    if leaf.is_free:
        return value
    array = np.asarray(value, leaf.dtype)
    return array[()] if leaf.is_number else array


CODECS[AgentSpace] = _AgentsCodec


def caster_of(space: AgentSpace) -> Callable[[Mapping[Any, Any]], dict[Any, Any]]:
    """Return a function that checks values and casts their arrays to the dtypes of their spaces."""
    return _AgentsCodec(space, strict=False).cast


# -- who lives: the agents in the newest observation of an env ------------------------------------

Newest = Callable[[], Any]
"""Returns the newest observation of an env."""


def action_check(space: Any, refusal: ActionCheck, newest: Newest) -> ActionCheck:
    """Return a check that an env's actions fit their space, and are for the agents that live.

    Args:
        space: the action space.
        refusal: the check of its codec.
        newest: see `Newest`.
    """
    if not isinstance(space, AgentSpace):
        return refusal
    return lambda action: refusal(action) or _of_others(action, newest())


def _of_others(action: Mapping[Any, Any], living: Mapping[Any, Any]) -> str | None:
    """Return what is wrong with the agents that act; None if they are those that live."""
    absent = [agent for agent in action if agent not in living]
    if absent:
        return (
            f"it is for agents {short_text(absent)}, which have ended, or have not joined; living "
            f"now are {short_text([*living])}"
        )
    missing = [agent for agent in living if agent not in action]
    return f"it has none for agents {short_text(missing)}, which live" if missing else None


def random_action(space: Any, newest: Newest) -> Any:
    """Return a random action of a space, a legal one where the observation has an `action_mask`.

    An action by agent is for the agents that live, if these are known.
    """
    if isinstance(space, AgentSpace):
        living = newest()
        return space.sample() if living is None else space.sample_for(living)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return legal_sample(space, mask_in(newest()))
    return space.sample()


def lost_step(space: Any, obs: Any) -> tuple[Any, Any, Any]:
    """Return reward, terminated and truncated of a step that was lost.

    Args:
        space: the observation space.
        obs: the observation that the env showed before.
    """
    if not isinstance(space, AgentSpace):
        return 0.0, False, True
    return dict.fromkeys(obs, 0.0), dict.fromkeys(obs, False), dict.fromkeys(obs, True)
