"""Spaces of the old `gym` package as gymnasium spaces, without importing gym, and back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.env.contract import EnvContractError, describe

_Convert = Callable[[Any], Any]
"""Converts a part of a space."""


_CONVERTED_FROM = "converted_from"
"""The attribute of a converted space that names the package of the env's own space."""


def convert_space(space: Any) -> spaces.Space[Any]:
    """Return a gymnasium space as it is, or the equivalent of a space of the old `gym` package.

    gym's Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple, Text and classes derived from them
    are recognised by the names of their classes.

    Raises:
        EnvContractError: `space` is something else.
    """
    if isinstance(space, spaces.Space):
        return space
    for cls in type(space).__mro__:
        if cls.__module__.partition(".")[0] == "gym" and cls.__name__ in _CONVERTERS:
            converted: spaces.Space[Any] = _CONVERTERS[cls.__name__](space, spaces, convert_space)
            setattr(converted, _CONVERTED_FROM, "gym")
            return converted
    raise EnvContractError(
        f"a space should be a gymnasium space or one of gym's {', '.join(_CONVERTERS)}; "
        f"found {describe(space)} (from {type(space).__module__})"
    )


def own_space(space: Any, gym_spaces: ModuleType) -> Any:
    """Return a space as one of the package that the env's own space comes from.

    Args:
        space: what `convert_space` returned; other spaces stay as they are.
        gym_spaces: the module `gym.spaces`.
    """

    def back(part: Any) -> Any:
        return _CONVERTERS[type(part).__name__](part, gym_spaces, back)

    return back(space) if getattr(space, _CONVERTED_FROM, None) == "gym" else space


def _box(space: Any, to: Any, part: _Convert) -> Any:
    dtype = np.dtype(space.dtype)
    with np.errstate(over="ignore"):  # float64 bounds may lie beyond float32: infinite is right
        low, high = np.asarray(space.low).astype(dtype), np.asarray(space.high).astype(dtype)
    return to.Box(low, high, shape=tuple(space.shape), dtype=dtype.type)


def _discrete(space: Any, to: Any, part: _Convert) -> Any:
    return to.Discrete(int(space.n), start=int(getattr(space, "start", 0)))


def _multi_discrete(space: Any, to: Any, part: _Convert) -> Any:
    return to.MultiDiscrete(np.asarray(space.nvec), dtype=np.dtype(space.dtype).type)


def _multi_binary(space: Any, to: Any, part: _Convert) -> Any:
    n = space.n
    return to.MultiBinary(int(n) if np.ndim(n) == 0 else [int(size) for size in n])


def _dict(space: Any, to: Any, part: _Convert) -> Any:
    # Pairs keep gym's order; a dict would be sorted.
    return to.Dict([(key, part(value)) for key, value in space.spaces.items()])


def _tuple(space: Any, to: Any, part: _Convert) -> Any:
    return to.Tuple([part(value) for value in space.spaces])


def _text(space: Any, to: Any, part: _Convert) -> Any:
    return to.Text(
        max_length=int(space.max_length),
        min_length=int(space.min_length),
        charset=frozenset(space.character_set),
    )


_CONVERTERS: dict[str, Callable[[Any, Any, _Convert], Any]] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
    "Dict": _dict,
    "Tuple": _tuple,
    "Text": _text,
}
