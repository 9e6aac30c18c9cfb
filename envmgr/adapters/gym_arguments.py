"""Checks of the arguments that users pass to a Gymnasium vector env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envmgr.config.checks import check_value, choice
from envmgr.errors import ConfigError
from envmgr.spaces import same_space
from envmgr.spaces.reading import short_text

__all__ = [
    "AutoresetMode",
    "batched_action_space",
    "batched_spaces",
    "check_mask",
    "checked_mode",
    "is_029",
]

_MODE = choice(*(mode.value for mode in AutoresetMode))
_INFO_FORMAT = choice("gymnasium", "gym029")


def checked_mode(mode: Any) -> AutoresetMode:
    """Return the autoreset mode: how envs are reset when their episodes end.

    Raises:
        ConfigError: there is no such mode.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    return AutoresetMode(check_value(_MODE, mode, "autoreset_mode"))


def is_029(info_format: str, autoreset_mode: str) -> bool:
    """Return whether infos are to have the form that Gymnasium 0.29 gave them.

    Raises:
        ConfigError: there is no such form, or it does not go with the mode.
    """
    check_value(_INFO_FORMAT, info_format, "info_format")
    if info_format == "gym029" and autoreset_mode != "SameStep":
        raise ConfigError(
            'info_format="gym029" goes with autoreset_mode="SameStep": Gymnasium 0.29 reset '
            f"envs in the step that ended their episodes; found {autoreset_mode!r}"
        )
    return info_format == "gym029"


def check_mask(mask: Any, n: int) -> None:
    """Raise unless a mask says which of n envs are to be reset.

    Raises:
        TypeError, ValueError: as in Gymnasium's own vector envs.
    """
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (n,):
        raise ValueError(f"{name} must have shape `({n},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{name} must contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )


def batched_spaces(mode: Any, spaces: Sequence[Space[Any]]) -> tuple[Space[Any], Space[Any]]:
    """Return the observation space of one env, and that of a batch.

    Args:
        mode: "same", "different", or a pair of the batched and the single space.
        spaces: the observation spaces of all envs.

    Raises:
        TypeError, ValueError: the mode is none of these.
        RuntimeError: the spaces do not fit the mode.
    """
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, got "
                f"{type(mode[0])} and {type(mode[1])}"
            )
        batched, single = mode
        _check_alike(single, spaces)
        return single, batched
    word = mode if isinstance(mode, str) else ""
    if word == "same":
        _check_same(spaces)
        return spaces[0], batch_space(spaces[0], len(spaces))
    if word == "different":
        _check_alike(spaces[0], spaces)
        return spaces[0], batch_differing_spaces(list(spaces))
    raise ValueError(
        "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and "
        f"batch observation space, actual got {word or short_text(mode)}"
    )


def batched_action_space(spaces: Sequence[Space[Any]]) -> Space[Any]:
    """Return the action space of a batch.

    Raises:
        RuntimeError: the spaces differ.
    """
    for i, space in enumerate(spaces):
        if not same_space(space, spaces[0]):
            raise RuntimeError(
                f"env {i} has the action space {space}, env 0 has {spaces[0]}: to batch actions, "
                "the action spaces of all envs must be equal"
            )
    return batch_space(spaces[0], len(spaces))


def _check_same(spaces: Sequence[Space[Any]]) -> None:
    for i, space in enumerate(spaces):
        if not same_space(space, spaces[0]):
            raise RuntimeError(
                "the sub-environments observation spaces are not equivalent. "
                f"env {i} has {space}, env 0 has {spaces[0]}. If this is intentional, use "
                "`observation_mode='different'` instead."
            )


def _check_alike(single: Space[Any], spaces: Sequence[Space[Any]]) -> None:
    for i, space in enumerate(spaces):
        if not is_space_dtype_shape_equiv(space, single):
            raise RuntimeError(
                f"the observation space of env {i}, {space}, has not the class, shape and dtype of "
                f"{single}: such observations are no batch"
            )
