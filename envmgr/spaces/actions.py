"""Checks of actions: kind, shape and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces.values import (
    Array,
    structure_text,
)
from envmgr.types import short_text

ActionCheck = Callable[[Any], str | None]
"""Returns why an action is refused, or None."""


def action_check(space: spaces.Space[Any] | None, *, strict: bool) -> ActionCheck:
    """Return a function that checks actions of a space for kind, shape and (discrete) bounds.

    Args:
        space: the action space; None accepts everything.
        strict: check the bounds of Box spaces and NaN too.
    """
    if space is None:
        return _accept
    return _action_check(space, strict)


def _accept(action: Any) -> str | None:
    return None


@singledispatch
def _action_check(space: Any, strict: bool) -> ActionCheck:
    if not strict and not isinstance(space, (spaces.Text, spaces.OneOf)):
        return _accept

    def check(action: Any) -> str | None:
        try:
            contained = space.contains(action)
        except Exception as error:  # a custom space's own code
            reason = f"{type(error).__name__}: {error}"
            return f"{short_text(action)} cannot be checked by {space}: {reason}"
        return None if contained else f"{short_text(action)} is not in {space}"

    return check


def _action_array(action: Any) -> Array | None:
    try:
        return np.asarray(action)
    except Exception:  # ragged lists, odd objects, tensors that are elsewhere
        return None


@_action_check.register(spaces.Discrete)
def _discrete_check(space: Any, strict: bool) -> ActionCheck:
    low, high = int(space.start), int(space.start) + int(space.n)

    def check(action: Any) -> str | None:
        if type(action) is not int:
            array = _action_array(action)
            if array is None or array.size != 1 or array.dtype.kind not in "iu":
                return f"{short_text(action)} is not one integer, which {space} needs"
            action = array.item()
        return None if low <= action < high else f"{action} is outside {space}: {low}..{high - 1}"

    return check


@_action_check.register(spaces.Box)
def _box_check(space: Any, strict: bool) -> ActionCheck:
    shape = tuple(space.shape)
    kinds = "biuf" if np.dtype(space.dtype).kind == "f" else "biu"

    def check(action: Any) -> str | None:
        array = _action_array(action)
        if array is None:
            return f"{short_text(action)} is not an array, which {space} needs"
        if array.shape != shape:
            return f"shape {array.shape} is not the {shape} of {space}"
        if array.dtype.kind not in kinds:
            return f"dtype {array.dtype} does not fit {space}"
        if strict and not (np.all(array >= space.low) and np.all(array <= space.high)):
            return f"{short_text(action)} is outside the bounds of {space}"
        return None

    return check


@_action_check.register(spaces.MultiDiscrete)
@_action_check.register(spaces.MultiBinary)
def _multi_check(space: Any, strict: bool) -> ActionCheck:
    shape = tuple(space.shape)
    discrete = isinstance(space, spaces.MultiDiscrete)
    low: Any = space.start if discrete else 0
    high: Any = space.start + (space.nvec - 1) if discrete else 1  # what fits the space's dtype

    def check(action: Any) -> str | None:
        array = _action_array(action)
        if array is None:
            return f"{short_text(action)} is not an array, which {space} needs"
        if array.shape != shape:
            return f"shape {array.shape} is not the {shape} of {space}"
        if array.dtype.kind not in "biu":
            return f"dtype {array.dtype} does not fit {space}"
        if not (np.all(array >= low) and np.all(array <= high)):
            return f"{short_text(action)} is outside the bounds of {space}"
        return None

    return check


@_action_check.register(spaces.Dict)
def _dict_check(space: Any, strict: bool) -> ActionCheck:
    parts = {key: _action_check(sub, strict) for key, sub in space.spaces.items()}

    def check(action: Any) -> str | None:
        if not isinstance(action, Mapping) or action.keys() != parts.keys():
            return structure_text((), action, f"a dict of {[*parts]}")
        for key, part in parts.items():
            reason = part(action[key])
            if reason is not None:
                return f"at [{key!r}]: {reason}"
        return None

    return check


@_action_check.register(spaces.Tuple)
def _tuple_check(space: Any, strict: bool) -> ActionCheck:
    parts = [_action_check(sub, strict) for sub in space.spaces]

    def check(action: Any) -> str | None:
        if not isinstance(action, (tuple, list)) or len(action) != len(parts):
            return structure_text((), action, f"{len(parts)} items")
        for index, part in enumerate(parts):
            reason = part(action[index])
            if reason is not None:
                return f"at [{index}]: {reason}"
        return None

    return check
