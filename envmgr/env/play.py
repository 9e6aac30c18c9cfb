"""Random legal steps in an env that is tried out, even in one that fails now and then."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from envmgr.env import adapt
from envmgr.env.steps import step_env
from envmgr.spaces import is_sampled_alone
from envmgr.spaces.legal import legal_sample, mask_in
from envmgr.types import EnvTimestep

PATIENCE = 3
"""An env that fails this often in a row, without a good step in between, does not work."""


class RandomPlay:
    """A player that takes random steps in one env.

    Where observations or infos have an `action_mask`, legal actions are drawn. A step that raises
    ends the episode, as it does in a manager, and is counted; a reset that raises is tried again.

    Args:
        env: the env, as `adapt.as_base_env` returns it.
        action_space: the space that actions are drawn from; None: the env's own.
        forgives: whether to go on after a failure, unless the env does not work any more; if not,
            what the env raises is raised.

    Attributes:
        n_steps: steps that were tried.
        n_failed: steps and resets that raised.
        failure: what the first of these raised, and where, as lines; empty if none did.
    """

    def __init__(self, env: Any, action_space: Any = None, *, forgives: bool = True) -> None:
        self._env = env
        self._action_space = adapt.spaces_of(env)[1] if action_space is None else action_space
        self._is_plain = is_sampled_alone(self._action_space)
        self._sample = adapt.sampler_of(env, self._action_space)
        self._patience = PATIENCE if forgives else 1
        self._in_a_row = 0
        self._obs: Any = None
        self._mask: Any = None
        self.n_steps = self.n_failed = 0
        self.failure = ""

    @property
    def is_free(self) -> bool:
        """Whether actions may be drawn ahead, as they do not depend on where the env is."""
        return self._is_plain and self._mask is None

    def reset(self, params: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env and return the observation and the reset's info.

        Raises:
            Exception: whatever the env raises, if it fails again and again.
        """
        while True:
            try:
                self._obs, info = adapt.reset_env(self._env, params)
            except Exception as error:  # the env's own
                self._failed(error)
            else:
                self._mask = mask_in(self._obs, info)
                return self._obs, info

    def action(self) -> Any:
        """Return a random legal action."""
        return self._sample() if self.is_free else self._drawn()

    def _drawn(self) -> Any:
        return legal_sample(self._action_space, self._mask) if self._is_plain else self._sample()

    def step(self, action: Any) -> EnvTimestep:
        """Take a step; one that raises ends the episode, and gives the last observation again.

        Raises:
            Exception: whatever the env raises, if it fails again and again.
        """
        self.n_steps += 1
        try:
            timestep = step_env(self._env, action)
        except Exception as error:  # the env's own
            self._failed(error)
            return EnvTimestep(self._obs, 0.0, True, {})
        self._in_a_row = 0
        self._obs = timestep.obs
        self._mask = mask_in(timestep.obs, timestep.info)
        return timestep

    def _failed(self, error: Exception) -> None:
        self._in_a_row += 1
        if self._in_a_row >= self._patience:
            raise error
        self.n_failed += 1
        self.failure = self.failure or "".join(traceback.format_exception(error)).rstrip()
