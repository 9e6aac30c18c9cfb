"""Which actions are legal, as an env says, and random ones among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

MASK = "action_mask"
"""By the convention of gymnasium and PettingZoo: an entry of observations, or of infos."""


def mask_in(obs: Any, info: Any = None) -> Any:
    """Return the mask of legal actions that an observation or its info has; None if neither does.

    Args:
        obs: an observation.
        info: the info that came with it.
    """
    for found in (obs, info):
        if isinstance(found, Mapping) and found.get(MASK) is not None:
            return found[MASK]
    return None


def has_mask(space: Any) -> bool:
    """Whether observations of a space have a mask of legal actions."""
    return isinstance(space, spaces.Dict) and MASK in space.spaces


def legal_sample(space: spaces.Space[Any], mask: Any) -> Any:
    """Return a random action, a legal one if the mask fits this space.

    Args:
        space: the action space; legal actions are drawn from Discrete and MultiDiscrete.
        mask: an array with a flag for each action; for MultiDiscrete, the flags of its parts, one
            after the other or as a tuple. None: all actions are legal.
    """
    if mask is None:
        return space.sample()
    if isinstance(space, spaces.Discrete):
        legal = np.asarray(mask).astype(np.int8).ravel()
        return space.sample(legal) if legal.size == space.n else space.sample()
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        if not isinstance(mask, tuple):
            mask = np.split(np.asarray(mask).ravel(), np.cumsum(space.nvec)[:-1])
        legal_parts = tuple(np.asarray(part).astype(np.int8) for part in mask)
        if [part.size for part in legal_parts] == space.nvec.tolist():
            return space.sample(legal_parts)
    return space.sample()
