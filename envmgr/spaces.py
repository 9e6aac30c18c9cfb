"""What a space means for moving data: the only module that switches on space classes.

A space whose every value has the same arrays of the same shapes (Box, Discrete, MultiDiscrete,
MultiBinary and nested Dict/Tuple of these) has a *fixed layout*: a list of leaves. Such values are
checked against it, and can be written into preallocated memory. Other spaces (Text, Sequence,
Graph, OneOf, custom ones) have none; their values are checked by the space itself and travel as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Array = npt.NDArray[Any]
Path = tuple[str | int, ...]
OnCast = Callable[[str], None]


class ValueMismatchError(ValueError):
    """A value does not fit its space. The host turns it into a typed failure of the env."""


class NonFiniteError(ValueMismatchError):
    """A value holds NaN or infinities that are not allowed."""


def path_text(path: Path) -> str:
    """Return a leaf's place as users would index it, for messages; empty for a lone leaf."""
    return "".join(f"[{key!r}]" for key in path)


# ---------------------------------------------------------------------------------------------
# Fixed layouts
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One array of a structured value.

    Attributes:
        path: where it sits in the value; empty if the value is this array.
        shape: its shape; `()` for Discrete.
        dtype: its dtype.
        is_number: its value is a numpy number, as Discrete's, and not an array of shape `()`.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_number: bool = field(default=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The leaves of a fixed-layout space, and how to take values apart and put them together.

    Attributes:
        leaves: in the order of the space (dict keys as the space orders them).
        skeleton: the nesting: a leaf's index, or a dict or tuple of skeletons.
    """

    leaves: tuple[Leaf, ...]
    skeleton: Any = field(repr=False, hash=False)

    def flatten(
        self, value: Any, *, strict_dtype: bool = False, on_cast: OnCast | None = None
    ) -> list[Array]:
        """Check a value and return its leaves as arrays; may alias the value.

        Args:
            value: what the env returned.
            strict_dtype: refuse any dtype but the leaf's own; else same-kind casts are allowed.
            on_cast: told, in words, of each leaf whose dtype is not the space's.

        Raises:
            ValueMismatchError: structure, shape or dtype differ; the message says where and how.
        """
        found: list[Array] = []
        check = _LeafCheck(strict_dtype, on_cast)
        self._collect(self.skeleton, value, (), found, check)
        return found

    def _collect(
        self, skeleton: Any, value: Any, path: Path, found: list[Array], check: _LeafCheck
    ) -> None:
        if type(skeleton) is int:
            found.append(check(self.leaves[skeleton], value))
        elif isinstance(skeleton, dict):
            if not isinstance(value, Mapping) or value.keys() != skeleton.keys():
                raise ValueMismatchError(_structure_text(path, value, f"a dict of {[*skeleton]}"))
            for key, part in skeleton.items():
                self._collect(part, value[key], (*path, key), found, check)
        else:
            if not isinstance(value, (tuple, list)) or len(value) != len(skeleton):
                raise ValueMismatchError(_structure_text(path, value, f"{len(skeleton)} items"))
            for index, part in enumerate(skeleton):
                self._collect(part, value[index], (*path, index), found, check)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the nested value made of `leaves`, given in the layout's order."""
        return leaves[0] if type(self.skeleton) is int else _rebuild(self.skeleton, leaves)


def _rebuild(skeleton: Any, leaves: Sequence[Any]) -> Any:
    if type(skeleton) is int:
        return leaves[skeleton]
    if isinstance(skeleton, dict):
        return {key: _rebuild(part, leaves) for key, part in skeleton.items()}
    return tuple(_rebuild(part, leaves) for part in skeleton)


def _structure_text(path: Path, value: Any, expected: str) -> str:
    if isinstance(value, Mapping):
        found = f"a dict of {[*value]}"
    elif isinstance(value, (tuple, list)):
        found = f"{len(value)} items"
    else:
        found = type(value).__name__
    return f"value{path_text(path)} should be {expected}, found {found}"


@dataclass(frozen=True)
class _LeafCheck:
    strict: bool
    on_cast: OnCast | None

    def __call__(self, leaf: Leaf, value: Any) -> Array:
        if type(value) is np.ndarray and value.dtype == leaf.dtype and value.shape == leaf.shape:
            return value  # the ordinary case: nothing to do
        array = _as_array(leaf, value)
        if array.shape != leaf.shape:
            raise ValueMismatchError(
                f"value{path_text(leaf.path)} has shape {array.shape}, the space says {leaf.shape}"
            )
        if array.dtype != leaf.dtype:
            self._check_cast(leaf, array, python_number=isinstance(value, (bool, int, float)))
        return array

    def _check_cast(self, leaf: Leaf, array: Array, *, python_number: bool) -> None:
        if self.strict and not python_number:
            raise ValueMismatchError(_dtype_text(leaf, array, "strict_dtype is on"))
        if array.dtype.kind in "iu" and leaf.dtype.kind in "iu":
            info = np.iinfo(leaf.dtype)
            if array.size and (array.min() < info.min or array.max() > info.max):
                raise ValueMismatchError(_dtype_text(leaf, array, "a number does not fit"))
        elif not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
            raise ValueMismatchError(_dtype_text(leaf, array, "the cast would lose information"))
        if self.on_cast is not None and not python_number:
            self.on_cast(_dtype_text(leaf, array, "it is cast"))


def _as_array(leaf: Leaf, value: Any) -> Array:
    if value is None:
        raise ValueMismatchError(f"value{path_text(leaf.path)} is None")
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueMismatchError(
            f"value{path_text(leaf.path)} ({type(value).__name__}) is not an array: {error}"
        ) from error


def _dtype_text(leaf: Leaf, array: Array, what: str) -> str:
    return (
        f"value{path_text(leaf.path)} has dtype {array.dtype}, the space says {leaf.dtype}: {what}"
    )


def layout_of(space: spaces.Space[Any]) -> Layout | None:
    """Return the fixed layout of a space, or None if its values have no fixed layout."""
    leaves: list[Leaf] = []
    skeleton = _skeleton(space, (), leaves)
    return None if skeleton is None else Layout(tuple(leaves), skeleton)


@singledispatch
def _skeleton(space: Any, path: Path, leaves: list[Leaf]) -> Any:
    return None


@_skeleton.register(spaces.Box)
@_skeleton.register(spaces.Discrete)
@_skeleton.register(spaces.MultiDiscrete)
@_skeleton.register(spaces.MultiBinary)
def _leaf_skeleton(space: Any, path: Path, leaves: list[Leaf]) -> Any:
    dtype = np.dtype(space.dtype)
    if dtype.hasobject:
        return None
    is_number = isinstance(space, spaces.Discrete)
    leaves.append(Leaf(path, tuple(space.shape), dtype, is_number))
    return len(leaves) - 1


@_skeleton.register(spaces.Dict)
def _dict_skeleton(space: Any, path: Path, leaves: list[Leaf]) -> Any:
    parts = {key: _skeleton(sub, (*path, key), leaves) for key, sub in space.spaces.items()}
    return None if None in parts.values() or not parts else parts


@_skeleton.register(spaces.Tuple)
def _tuple_skeleton(space: Any, path: Path, leaves: list[Leaf]) -> Any:
    parts = tuple(_skeleton(sub, (*path, i), leaves) for i, sub in enumerate(space.spaces))
    return None if None in parts or not parts else parts


def check_free_form(space: spaces.Space[Any] | None, value: Any) -> None:
    """Check a value of a space without fixed layout.

    Raises:
        ValueMismatchError: the space does not contain it.
    """
    if value is None:
        raise ValueMismatchError("value is None")
    if space is None:
        return
    try:
        contained = space.contains(value)
    except Exception as error:  # a custom space's own code
        raise ValueMismatchError(
            f"value ({type(value).__name__}) cannot be checked by {space}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not contained:
        raise ValueMismatchError(f"value {_short(value)} is not in {space}")


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


# ---------------------------------------------------------------------------------------------
# Actions
# ---------------------------------------------------------------------------------------------

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
            return f"{_short(action)} cannot be checked by {space}: {type(error).__name__}: {error}"
        return None if contained else f"{_short(action)} is not in {space}"

    return check


def _action_array(action: Any) -> Array | None:
    try:
        return np.asarray(action)
    except (ValueError, TypeError):  # ragged lists, odd objects
        return None


@_action_check.register(spaces.Discrete)
def _discrete_check(space: Any, strict: bool) -> ActionCheck:
    low, high = int(space.start), int(space.start) + int(space.n)

    def check(action: Any) -> str | None:
        if type(action) is not int:
            array = _action_array(action)
            if array is None or array.size != 1 or array.dtype.kind not in "iu":
                return f"{_short(action)} is not one integer, which {space} needs"
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
            return f"{_short(action)} is not an array, which {space} needs"
        if array.shape != shape:
            return f"shape {array.shape} is not the {shape} of {space}"
        if array.dtype.kind not in kinds:
            return f"dtype {array.dtype} does not fit {space}"
        if strict and not (np.all(array >= space.low) and np.all(array <= space.high)):
            return f"{_short(action)} is outside the bounds of {space}"
        return None

    return check


@_action_check.register(spaces.MultiDiscrete)
@_action_check.register(spaces.MultiBinary)
def _multi_check(space: Any, strict: bool) -> ActionCheck:
    shape = tuple(space.shape)
    discrete = isinstance(space, spaces.MultiDiscrete)
    low: Any = space.start if discrete else 0
    high: Any = space.start + space.nvec if discrete else 2

    def check(action: Any) -> str | None:
        array = _action_array(action)
        if array is None:
            return f"{_short(action)} is not an array, which {space} needs"
        if array.shape != shape:
            return f"shape {array.shape} is not the {shape} of {space}"
        if array.dtype.kind not in "biu":
            return f"dtype {array.dtype} does not fit {space}"
        if not (np.all(array >= low) and np.all(array < high)):
            return f"{_short(action)} is outside the bounds of {space}"
        return None

    return check


@_action_check.register(spaces.Dict)
def _dict_check(space: Any, strict: bool) -> ActionCheck:
    parts = {key: _action_check(sub, strict) for key, sub in space.spaces.items()}

    def check(action: Any) -> str | None:
        if not isinstance(action, Mapping) or action.keys() != parts.keys():
            return _structure_text((), action, f"a dict of {[*parts]}")
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
            return _structure_text((), action, f"{len(parts)} items")
        for index, part in enumerate(parts):
            reason = part(action[index])
            if reason is not None:
                return f"at [{index}]: {reason}"
        return None

    return check


# ---------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------


def stack_values(layout: Layout | None, values: Sequence[Any]) -> Any:
    """Return k values as one batch: arrays `(k, *shape)` per leaf, else an object array `(k,)`."""
    if layout is None:
        batch = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            batch[i] = value
        return batch
    rows = [layout.flatten(value) for value in values]
    return layout.unflatten(
        [
            np.stack([row[j] for row in rows])
            if rows
            else np.empty((0, *leaf.shape), dtype=leaf.dtype)
            for j, leaf in enumerate(layout.leaves)
        ]
    )


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return the rows of a batch: of an array, of a dict or tuple of arrays, or of a list.

    Raises:
        ValueMismatchError: it does not have exactly `count` rows.
    """
    if isinstance(batch, Mapping):
        columns = {key: split_batch(part, count) for key, part in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if isinstance(batch, tuple):
        parts = [split_batch(part, count) for part in batch]
        return [tuple(part[i] for part in parts) for i in range(count)]
    rows = list(batch)
    if len(rows) != count:
        raise ValueMismatchError(f"{len(rows)} rows for {count} envs")
    return rows
