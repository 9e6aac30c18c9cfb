"""Questions about any space, such as whether two are equal, even if their classes do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

_NOT_COMPARED = ("_np_random",)
"""Attributes of a space that say nothing about its values: its random numbers."""


def has_samples(space: Any) -> bool:
    """Return whether a space can be sampled; a bare `gymnasium.Space()` cannot."""
    return getattr(type(space), "sample", None) is not spaces.Space.sample


def space_text(space: Any) -> str:
    """Return a space as text, even if its class defines none."""
    if not isinstance(space, spaces.Space) or type(space).__repr__ is not object.__repr__:
        return str(space)
    return f"{type(space).__name__}(shape={space.shape}, dtype={space.dtype})"


def same_space(one: Any, other: Any) -> bool:
    """Return whether two spaces are equal.

    Spaces whose class does not compare them, such as a bare `gymnasium.Space()`, are equal if they
    are of one class and have equal attributes, whatever random numbers they have drawn. (Python
    calls two such spaces equal only if they are one object, which those of two workers never are.)

    Raises:
        Exception: whatever a space's own comparison raises.
    """
    if isinstance(one, (spaces.Dict, spaces.Tuple)) and type(one) is type(other):
        return _same(one.spaces, other.spaces)
    kind: Any = type(one)
    if kind.__eq__ is not object.__eq__ or not isinstance(one, spaces.Space):
        return bool(one == other)
    return kind is type(other) and _same(_values_of(one), _values_of(other))


def _values_of(space: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(space).items() if name not in _NOT_COMPARED}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, spaces.Space):
        return same_space(one, other)
    if isinstance(one, Mapping):
        same_keys = isinstance(other, Mapping) and one.keys() == other.keys()
        return same_keys and all(_same(part, other[key]) for key, part in one.items())
    if isinstance(one, (list, tuple)):
        same_length = type(one) is type(other) and len(one) == len(other)
        return same_length and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    return bool(one == other)
