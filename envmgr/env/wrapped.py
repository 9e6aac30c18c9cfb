"""What the wrappers around gymnasium's and gym's envs have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from envmgr.env.base import BaseEnv
from envmgr.env.contract import EnvContractError, env_name
from envmgr.env.gym_spaces import convert_space
from envmgr.env.seeds import EpisodeSeeds
from envmgr.spaces import codec_of


class WrappedEnv(BaseEnv):
    """A `BaseEnv` around an env of another kind.

    Args:
        env: the env, with its own wrappers.

    Attributes:
        env: the env inside.
        reset_info: the info of the last reset; `{}` before.

    Raises:
        EnvContractError: it has no observation space or no action space.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = self._space("observation_space")
        self.action_space = self._space("action_space")
        self.reward_space = self._reward_space()
        self.reset_info = {}
        self._convert_action = codec_of(self.action_space).for_env
        self._seeds = EpisodeSeeds()

    def seed(self, seed: int | None, dynamic_seed: bool | None = None) -> None:
        """Seed the env at its next reset, and the action space (for `random_action`) now.

        Args:
            seed: used exactly by the next reset; None takes a seed back that was not used yet.
            dynamic_seed: what later resets do: None passes no seed, True one derived from
                `SeedSequence((seed, episode))`, False the same seed each time.

        Raises:
            TypeError: the seed is not an integer.
            ValueError: it is negative.
        """
        self._seeds.begin(seed, dynamic_seed)
        if seed is not None:
            self.action_space.seed(int(seed))

    def random_action(self) -> Any:
        """Return the random action of the env inside if it has such a method, else a sample."""
        own = self._optional("random_action")
        return own() if callable(own) else self.action_space.sample()

    def reward_shaping(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the transitions, shaped by the env inside if it has such a method."""
        own = self._optional("reward_shaping")
        return own(transitions) if callable(own) else transitions

    @abstractmethod
    def inner_attribute(self, name: str) -> Any:
        """Return an attribute from the outermost wrapper that has it, or from the env itself."""

    @abstractmethod
    def set_inner_attribute(self, name: str, value: Any) -> None:
        """Set an attribute where it is defined, else on the outermost wrapper of the env."""

    @property
    def spec(self) -> Any:
        """The env's registration, or None."""
        return getattr(self.env, "spec", None)

    @property
    def metadata(self) -> Any:
        """The env's metadata, a dict by convention."""
        return getattr(self.env, "metadata", {})

    @property
    def render_mode(self) -> str | None:
        """The render mode that the env was built with."""
        mode: str | None = getattr(self.env, "render_mode", None)
        return mode

    @property
    def unwrapped(self) -> Any:
        """The env without any wrapper."""
        return getattr(self.env, "unwrapped", self.env)

    def close(self) -> None:
        """Close the env inside."""
        self.env.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env})"

    def _space(self, name: str) -> Space[Any]:
        space = getattr(self.env, name, None)
        if space is None:
            raise EnvContractError(
                f"{env_name(self.env)} has no {name}; it should set one when it is constructed"
            )
        return convert_space(space)

    def _reward_space(self) -> Space[Any]:
        """The env's own reward_space; else a scalar within its reward_range, if it has one."""
        own = self._optional("reward_space")
        if own is not None:
            return convert_space(own)
        low, high = -np.inf, np.inf
        reward_range = self._optional("reward_range")
        if isinstance(reward_range, (tuple, list)) and len(reward_range) == 2:
            low, high = (float(bound) for bound in reward_range)
        return Box(low, high, shape=(), dtype=np.float64)

    def _optional(self, name: str) -> Any:
        try:
            return self.inner_attribute(name)
        except AttributeError:
            return None
