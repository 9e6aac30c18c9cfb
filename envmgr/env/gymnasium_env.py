"""Any `gymnasium.Env` as a `BaseEnv`; an env of the old gym is one inside of an `OldGymEnv`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space

from envmgr.env.agents import AgentsEnv
from envmgr.env.base import BaseEnv
from envmgr.env.contract import (
    EnvContractError,
    StepResult,
    describe,
    env_name,
    gymnasium_step_result,
    refuse_coroutine,
    timestep_of,
)
from envmgr.env.gym_spaces import convert_space
from envmgr.env.old_gym import OldGymEnv
from envmgr.env.pictures import FRAME_MODES, EpisodePictures, film, fps_of
from envmgr.env.reset_arguments import ResetArguments
from envmgr.env.seeds import EpisodeSeeds
from envmgr.errors import ConfigError
from envmgr.spaces import codec_of
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.types import EnvTimestep


def set_through_wrappers(env: Any, name: str, value: Any) -> None:
    """Set an attribute where it is defined, else on the env inside of all wrappers.

    Unlike gymnasium's `set_wrapper_attr`, this does not set it on the outermost wrapper, where the
    env would not see it.
    """
    while isinstance(env, gymnasium.Wrapper) and not hasattr(env, name):
        env = env.env
    if isinstance(env, (OldGymEnv, AgentsEnv)):
        env.set_wrapper_attr(name, value)
    else:
        setattr(env, name, value)


class GymnasiumEnv(BaseEnv):
    """A wrapper of a `gymnasium.Env`.

    A space that the env lacks is taken to be `gymnasium.Space()`, which contains any object.
    Timesteps have `done = terminated or truncated`, and both bools in a new info dict. Rewards that
    are one number become floats. Actions are converted to what the action space expects (one
    integer in any form to an int, arrays to Box's dtype).

    Args:
        env: the env, with its wrappers.
        env_id: the manager's id for it, used in the names of the files that it saves.

    Attributes:
        env: the env inside.
        reset_info: the info of the last reset; `{}` before the first.
        pictures: saves videos and last frames of its episodes.
        converted: returns an action in the form that the env inside expects.

    Raises:
        EnvContractError: a space is not a known kind of space.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: int = 0) -> None:
        self.env: Any = env
        self.read_spaces()
        self.reset_info = {}
        self._seeds = EpisodeSeeds()
        self._reset_arguments = ResetArguments(env)
        self.pictures = EpisodePictures(env_id, fps_of(env))

    def read_spaces(self) -> None:
        """Take over the spaces of the env inside, as it has them now.

        Raises:
            EnvContractError: as for the class.
        """
        self.observation_space = self._space("observation_space")
        self.action_space = self._space("action_space")
        self.reward_space = self._reward_space()
        self.converted = codec_of(self.action_space).for_env

    def seed(self, seed: int | None, dynamic_seed: bool | None = None) -> None:
        """Seed the env at its next reset, and the action space (for `random_action`) now.

        Args:
            seed: used as it is by the next reset; None withdraws a seed that was not used yet.
            dynamic_seed: what later resets do: None passes no seed, True one derived from
                `SeedSequence((seed, episode))`, False the same seed each time.

        Raises:
            TypeError: the seed is not an integer.
            ValueError: it is negative.
        """
        self._seeds.begin(seed, dynamic_seed)
        if seed is not None:
            self.action_space.seed(int(seed))

    @property
    def takes_seeds(self) -> bool:
        """Whether the env can be seeded; if not, its resets fail when they are given a seed."""
        return self._reset_arguments.include_seeds

    def random_action(self) -> Any:
        """Return the random action of the env inside if it has such a method, else a sample."""
        own = self._optional("random_action")
        return own() if callable(own) else self.action_space.sample()

    def reward_shaping(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the transitions, shaped by the env inside if it has such a method."""
        own = self._optional("reward_shaping")
        return own(transitions) if callable(own) else transitions

    def reset(self, **params: Any) -> Any:
        """Start an episode and return its first observation; the info is kept in `reset_info`.

        The env is given a seed and options only if there are any, and nothing else: its `reset`
        need not take them.

        Args:
            **params: become `options`.

        Raises:
            EnvContractError: the env returned something other than `(obs, info)`, or does not take
                the seed or the options.
        """
        return self.reset_with_info(params)[0]

    def reset_with_info(self, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Start an episode as `reset` does; return its first observation and a copy of the info.

        Raises:
            EnvContractError: as for `reset`.
        """
        seed, arguments = self._seeds.due(), self._reset_arguments
        is_plain = seed is None and not params
        given = arguments.least if is_plain else arguments.of(seed, params)
        return self.reset_result_of(self.env.reset(**given))

    def reset_arguments_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the next reset of the env inside is to be called with."""
        return self._reset_arguments.of(self._seeds.due(), params)

    def reset_result_of(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """Return what `reset_with_info` does, given what `reset` of the env inside returned."""
        if (
            not isinstance(result, (tuple, list))
            or len(result) != 2
            or (type(result[1]) is not dict and not isinstance(result[1], Mapping))
        ):
            refuse_coroutine(result, self.env, "reset")
            raise EnvContractError(
                f"reset of {env_name(self.env)} should return (obs, info) as "
                f"gymnasium envs do, it returned {describe(result)}"
            )
        self._seeds.reset_done()
        self.reset_info = info = dict(result[1])
        return result[0], info.copy()

    def step(self, action: Any) -> EnvTimestep:
        """Take one action; see the class for what the timestep holds.

        Raises:
            EnvContractError: the env returned something other than gymnasium's five values.
        """
        return timestep_of(self.step_result(action))

    def step_result(self, action: Any) -> StepResult:
        """Take one action as `step` does; return the result in the cheapest form.

        Raises:
            EnvContractError: the env returned something other than gymnasium's five values.
        """
        return self.step_result_of(self.env.step(self.converted(action)))

    def step_result_of(self, result: Any) -> StepResult:
        """Return what the env's own `step` returned as a `StepResult`; see `step_result`."""
        return gymnasium_step_result(result, self.env)

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
        """Close the env inside, and finish the video of an episode that is under way."""
        try:
            self.pictures.close()
        finally:
            self.env.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env})"

    def render(self, mode: str | None = None) -> Any:
        """Return what the env renders, in the render mode that it was built with.

        Args:
            mode: the mode that the caller relies on; None for whatever the env gives. Envs of the
                old gym that were built without a mode take any.

        Returns:
            For "rgb_array", an array `(height, width, 3)` of uint8.

        Raises:
            ConfigError: the env was built with another mode, or with none.
            EnvContractError: in mode "rgb_array" it returned something other than an array.
        """
        own = self.render_mode
        if isinstance(self.env, OldGymEnv):
            return self.env.render(mode)
        if mode not in (None, own):
            built = "without a render mode" if own is None else f"with render_mode={own!r}"
            raise ConfigError(
                f"{self.env} was built {built} and cannot render {mode!r}; pass "
                f"render_mode={mode!r} where it is made (YAML: env.kwargs.render_mode: {mode})"
            )
        frame = self.env.render()
        if own == "rgb_array" and not isinstance(frame, np.ndarray):
            raise EnvContractError(
                f"{self.env} should render an array in mode 'rgb_array', it gave {describe(frame)}"
            )
        return frame

    def enable_save_replay(self, path: str) -> None:
        """Save a video of every episode from the next reset on, in the folder `path`.

        Calling it again ends the recording and begins one in the new folder. An env whose mode is
        "rgb_array_list" gives each frame only once: here, to the videos.

        Raises:
            MissingDependencyError: PyAV is not installed.
            ConfigError: the env was not built with a render mode that gives frames.
        """
        self._require_frames("record videos")
        self.pictures.save_videos(path)
        film(self.env, self.pictures, self._frame)

    def enable_save_figure(self, path: str) -> None:
        """Save the last frame of every episode as `path/env_<env_id>-<unique>-<number>.png`.

        Raises:
            ConfigError: the env was not built with a render mode that gives frames.
        """
        self._require_frames("save figures")
        self.pictures.save_figures(path)
        film(self.env, self.pictures, self._frame)

    def _frame(self) -> Any:
        return self.render(self.render_mode or "rgb_array")

    def _require_frames(self, what: str) -> None:
        own = self.render_mode
        if inspect.iscoroutinefunction(self.env.step):
            raise ConfigError(
                f"{self.env} cannot {what}: its step is `async def`, and frames of async envs are "
                "not taken"
            )
        if own not in FRAME_MODES and (own is not None or not isinstance(self.env, OldGymEnv)):
            raise ConfigError(
                f"{self.env} cannot {what}: its render_mode is {own!r}; build it with "
                "render_mode='rgb_array' (in YAML: env.kwargs.render_mode: rgb_array)"
            )

    def _space(self, name: str) -> Space[Any]:
        space = getattr(self.env, name, None)
        return Space() if space is None else convert_space(space)

    def _reward_space(self) -> Space[Any]:
        """Return the env's own reward_space; else a scalar within its reward_range, if it has one.

        If it cannot be read, return any scalar: this space only informs, nothing depends on it.
        """
        try:
            own = self._optional("reward_space")
            if own is not None:
                return convert_space(own)
            reward_range = self._optional("reward_range")
            if isinstance(reward_range, (tuple, list)) and len(reward_range) == 2:
                low, high = (float(bound) for bound in reward_range)
                return Box(low, high, shape=(), dtype=np.float64)
        except Exception as error:  # a property of an env may raise anything
            pass_interrupt_on(error)
        return Box(-np.inf, np.inf, shape=(), dtype=np.float64)

    def _optional(self, name: str) -> Any:
        try:
            return self.env.get_wrapper_attr(name)
        except AttributeError:
            return None
