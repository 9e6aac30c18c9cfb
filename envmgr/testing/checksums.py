"""Checksums of observations, actions and rewards that are the same on both sides of a manager.

A manager casts values to the dtypes of their spaces on the way; so does this, before it sums up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

UNKNOWN = 0
"""The checksum of what has none: a value of a space without fixed layout, or of no space at all."""

Checksum = Callable[[Any], int]
_Parts = list[tuple[Any, Callable[[Any, int], int]]]


def checksum_of(space: Any) -> Checksum:
    """Return a function from values of a space to checksums of 32 bits, never `UNKNOWN`.

    For spaces that are not made of Box, Discrete, MultiBinary, MultiDiscrete, Text, Dict and Tuple,
    and for values that do not fit their space, it returns `UNKNOWN`.
    """
    if isinstance(space, Box):  # what most envs have, in as few calls as can be
        dtype = np.dtype(space.dtype)

        def of_array(value: Any) -> int:
            if type(value) is not np.ndarray or value.dtype != dtype:
                try:
                    value = np.asarray(value, dtype)
                except (TypeError, ValueError):
                    return UNKNOWN
            return zlib.crc32(value.tobytes()) or 1

        return of_array
    add = _adder(space)

    def of_value(value: Any) -> int:
        try:
            return add(value, 0) or 1
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            return UNKNOWN

    return of_value


def reward_checksum(reward: Any) -> int:
    """Return the checksum of a reward: of its value as float64, whatever its type."""
    try:
        return zlib.crc32(np.asarray(reward, np.float64).tobytes()) or 1
    except (TypeError, ValueError):
        return UNKNOWN


def _adder(space: Any) -> Callable[[Any, int], int]:
    """Return what goes on with a checksum by a value of a space."""
    if isinstance(space, Dict):
        parts: _Parts = [
            (key, _adder(part)) for key, part in sorted(space.spaces.items(), key=_by_text)
        ]
        return lambda value, so_far: _add_entries(parts, value, so_far)
    if isinstance(space, Tuple):
        parts = [(place, _adder(part)) for place, part in enumerate(space.spaces)]
        return lambda value, so_far: _add_entries(parts, value, so_far)
    if isinstance(space, Discrete):
        return lambda value, so_far: zlib.crc32(b"%d," % int(np.asarray(value).item()), so_far)
    if isinstance(space, Text):
        return lambda value, so_far: zlib.crc32(str(value).encode("utf-8", "replace"), so_far)
    if isinstance(space, (Box, MultiBinary, MultiDiscrete)):
        dtype = np.dtype(space.dtype)
        return lambda value, so_far: zlib.crc32(np.asarray(value, dtype).tobytes(), so_far)
    return _refuse


def _add_entries(parts: _Parts, value: Any, so_far: int) -> int:
    for key, add in parts:
        so_far = add(value[key], so_far)
    return so_far


def _refuse(value: Any, so_far: int) -> int:
    raise TypeError("a space without fixed layout")


def _by_text(entry: tuple[Any, Any]) -> str:
    return str(entry[0])
