"""Checksums of observations, actions and rewards that are the same on both sides of a manager.

A manager casts values to the dtypes of their spaces on the way; so do these functions before they
compute a checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envmgr.spaces import codec_of

UNKNOWN = 0
"""Stands for no checksum: for a value of a space without fixed layout, or of no space at all."""

Checksum = Callable[[Any], int]


def checksum_of(space: Any) -> Checksum:
    """Return a function from values of a space to checksums of 32 bits, never `UNKNOWN`.

    For spaces that are not made of Box, Discrete, MultiBinary, MultiDiscrete, Text, Dict and Tuple,
    and for values that do not fit their space, it returns `UNKNOWN`.
    """
    as_bytes = codec_of(space).as_bytes

    def of_value(value: Any) -> int:
        try:
            return zlib.crc32(as_bytes(value)) or 1
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            return UNKNOWN

    return of_value


def reward_checksum(reward: Any) -> int:
    """Return the checksum of a reward: of its value as float64, whatever its type.

    Rewards by agent have one checksum of all of them, in the order of the agents' names.
    """
    try:
        if isinstance(reward, Mapping):
            in_order = sorted((str(agent), value) for agent, value in reward.items())
            return zlib.crc32(repr([(a, reward_checksum(r)) for a, r in in_order]).encode()) or 1
        return zlib.crc32(np.asarray(reward, np.float64).tobytes()) or 1
    except (TypeError, ValueError):
        return UNKNOWN
