"""Puts actions into the form that gymnasium envs expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

ActionConverter = Callable[[Any], Any]


def action_converter(space: Any) -> ActionConverter:
    """Return a function that converts actions for an env with this action space.

    One integer in whatever form (int, numpy integer, array of one element) becomes an int for
    Discrete; what can become an array of Box's dtype without losing information in kind does so;
    Dict and Tuple convert their parts. Everything else is handed on unchanged: whether an action
    is legal is the caller's check, and in the end the env's.
    """
    if isinstance(space, spaces.Discrete):
        return _to_int
    if isinstance(space, spaces.Box):
        return _box_converter(np.dtype(space.dtype))
    if isinstance(space, spaces.Dict):
        return _dict_converter({key: action_converter(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return _tuple_converter([action_converter(part) for part in space.spaces])
    return _unchanged


def _unchanged(action: Any) -> Any:
    return action


def _to_int(action: Any) -> Any:
    if type(action) is int:
        return action
    if isinstance(action, np.integer):
        return int(action)
    array = np.asarray(action)
    return array.item() if array.size == 1 and array.dtype.kind in "iu" else action


def _box_converter(dtype: np.dtype[Any]) -> ActionConverter:
    def convert(action: Any) -> Any:
        if type(action) is np.ndarray and action.dtype == dtype:
            return action
        array: npt.NDArray[Any] = np.asarray(action)
        if array.dtype == dtype:
            return array
        if dtype.kind == "f" and array.dtype.kind in "biuf":
            return array.astype(dtype)
        if dtype.kind in "iu" and array.dtype.kind in "iu":
            converted = array.astype(dtype)
            return converted if np.array_equal(converted, array) else action
        return action

    return convert


def _dict_converter(parts: Mapping[Any, ActionConverter]) -> ActionConverter:
    def convert(action: Any) -> Any:
        if not isinstance(action, Mapping):
            return action
        return {key: parts.get(key, _unchanged)(value) for key, value in action.items()}

    return convert


def _tuple_converter(parts: list[ActionConverter]) -> ActionConverter:
    def convert(action: Any) -> Any:
        if not isinstance(action, (tuple, list)) or len(action) != len(parts):
            return action
        return tuple(part(value) for part, value in zip(parts, action, strict=True))

    return convert
