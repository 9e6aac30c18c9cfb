"""Spaces of the old `gym` package as gymnasium spaces, without importing gym."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.env.contract import EnvContractError, describe


def convert_space(space: Any) -> spaces.Space[Any]:
    """Return a gymnasium space as it is, and the equal of a space of the old `gym` package.

    gym's Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple, Text and classes derived from them
    are known by the names of their classes.

    Raises:
        EnvContractError: it is something else.
    """
    if isinstance(space, spaces.Space):
        return space
    for cls in type(space).__mro__:
        if cls.__module__.partition(".")[0] == "gym" and cls.__name__ in _CONVERTERS:
            return _CONVERTERS[cls.__name__](space)
    raise EnvContractError(
        f"a space should be a gymnasium space or one of gym's {', '.join(_CONVERTERS)}; "
        f"found {describe(space)} (from {type(space).__module__})"
    )


def _box(space: Any) -> spaces.Space[Any]:
    dtype = np.dtype(space.dtype)
    with np.errstate(over="ignore"):  # float64 bounds may lie beyond float32: infinite is right
        low, high = np.asarray(space.low).astype(dtype), np.asarray(space.high).astype(dtype)
    return spaces.Box(low, high, shape=tuple(space.shape), dtype=dtype.type)


def _discrete(space: Any) -> spaces.Space[Any]:
    return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))


def _multi_discrete(space: Any) -> spaces.Space[Any]:
    return spaces.MultiDiscrete(np.asarray(space.nvec), dtype=np.dtype(space.dtype).type)


def _multi_binary(space: Any) -> spaces.Space[Any]:
    n = space.n
    return spaces.MultiBinary(int(n) if np.ndim(n) == 0 else [int(part) for part in n])


def _dict(space: Any) -> spaces.Space[Any]:
    # Pairs keep gym's order; a dict would be sorted.
    return spaces.Dict([(key, convert_space(part)) for key, part in space.spaces.items()])


def _tuple(space: Any) -> spaces.Space[Any]:
    return spaces.Tuple([convert_space(part) for part in space.spaces])


def _text(space: Any) -> spaces.Space[Any]:
    return spaces.Text(
        max_length=int(space.max_length),
        min_length=int(space.min_length),
        charset=frozenset(space.character_set),
    )


_CONVERTERS: dict[str, Callable[[Any], spaces.Space[Any]]] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
    "Dict": _dict,
    "Tuple": _tuple,
    "Text": _text,
}
