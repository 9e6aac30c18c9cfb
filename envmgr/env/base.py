"""The protocol of an env, in the form that DI-engine's users know."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any

from envmgr.errors import ConfigError, EnvAttributeError
from envmgr.types import EnvTimestep


class BaseEnv(ABC):
    """One environment: `reset` returns an observation, `step` an `EnvTimestep`.

    A subclass defines `reset`, `step`, `seed` and `close`, and has the spaces as attributes or
    properties. The spaces should be there after construction; an env that knows them only after a
    reset is reset once at the start to obtain them. The other methods are optional. Plain classes
    with the same methods are accepted too; deriving from this class gives them the defaults.

    The names and meanings are those of DI-engine's `BaseEnv` (ding/envs/env/base_env.py), whose
    subclasses work unchanged.

    Attributes:
        observation_space: the space of the observations that `reset` returns and timesteps hold.
        action_space: the space of the actions that `step` takes.
        reward_space: the space of rewards; None if the env does not say.
        reset_info: a dict with what the last reset reports besides the observation. Optional: if an
            env sets it, it is in the manager's `ready_info`.
    """

    # Not `Space`: spaces of the old `gym` package are not of this type, and an env may have None.
    observation_space: Any
    action_space: Any
    reward_space: Any = None
    reset_info: dict[str, Any]

    @abstractmethod
    def reset(self, *_: Any, **params: Any) -> Any:  # so that any parameters may override these
        """Start an episode and return its first observation.

        Args:
            **params: the manager's `reset_param` for this env.
        """

    @abstractmethod
    def step(self, action: Any) -> EnvTimestep:
        """Take one action.

        Returns:
            `(obs, reward, done, info)`; at the episode's end, `obs` is the terminal observation.
            If `info["abnormal"]` is true, the step counts as a failure of the env.
        """

    @abstractmethod
    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Seed the env's random generators, with effect from the next reset.

        Args:
            seed: 0 or more.
            dynamic_seed: whether episodes after the first get seeds of their own (True) or this
                seed again (False); None lets the generators go on.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the env's resources. Called once, even if the env was never reset."""

    def random_action(self) -> Any:
        """Return a random action; by default a sample of the action space."""
        return self.action_space.sample()

    def reward_shaping(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return an episode's transitions with their rewards shaped; by default unchanged."""
        return transitions

    def render(self, mode: str | None = None) -> Any:
        """Return a picture of the current state.

        Args:
            mode: "rgb_array" for an array `(height, width, 3)` of uint8; None for the env's own
                mode.

        Raises:
            EnvAttributeError: this env does not render (the default).
        """
        raise self._lacks("render(mode)", "render")

    def enable_save_replay(self, path: str) -> None:
        """Save a replay of each episode, from the next reset on, in the folder `path`.

        Raises:
            EnvAttributeError: this env does not record (the default).
        """
        raise self._lacks("enable_save_replay(path)", "save replays")

    def enable_save_figure(self, path: str) -> None:
        """Save figures of the episodes in the folder `path`.

        Raises:
            EnvAttributeError: this env does not draw any (the default).
        """
        raise self._lacks("enable_save_figure(path)", "save figures")

    def _lacks(self, method: str, what: str) -> EnvAttributeError:
        return EnvAttributeError(
            f"{type(self).__name__} cannot {what}: its class does not define {method}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    @classmethod
    def create_collector_env_cfg(cls, cfg: MutableMapping[str, Any]) -> list[Any]:
        """Return one config per env that collects data, as DI-engine does.

        Takes `collector_env_num` out of `cfg` and returns that many independent deep copies of
        what remains. Override it where the envs' configs differ, in ports for example.

        Raises:
            ConfigError: the number is missing or is not a positive integer.
        """
        return _copies(cfg, "collector_env_num")

    @classmethod
    def create_evaluator_env_cfg(cls, cfg: MutableMapping[str, Any]) -> list[Any]:
        """Return one config per env that evaluates; as above, with `evaluator_env_num`."""
        return _copies(cfg, "evaluator_env_num")


def _copies(cfg: MutableMapping[str, Any], key: str) -> list[Any]:
    number = cfg.get(key)
    if type(number) is not int or number < 1:
        raise ConfigError(
            f"the env's config should say how many envs there are, as `{key}`: a positive integer; "
            f"it is {number!r}"
        )
    del cfg[key]
    return [copy.deepcopy(cfg) for _ in range(number)]
