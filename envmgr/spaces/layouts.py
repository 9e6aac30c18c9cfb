"""Fixed layouts: taking values apart into arrays, and putting them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envmgr.spaces.values import (
    Array,
    OnCast,
    Path,
    ValueMismatchError,
    path_text,
    structure_text,
)


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
                raise ValueMismatchError(structure_text(path, value, f"a dict of {[*skeleton]}"))
            for key, part in skeleton.items():
                self._collect(part, value[key], (*path, key), found, check)
        else:
            if not isinstance(value, (tuple, list)) or len(value) != len(skeleton):
                raise ValueMismatchError(structure_text(path, value, f"{len(skeleton)} items"))
            for index, part in enumerate(skeleton):
                self._collect(part, value[index], (*path, index), found, check)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the nested value made of `leaves`, given in the layout's order."""
        return leaves[0] if type(self.skeleton) is int else _rebuild(self.skeleton, leaves)

    def stack(self, values: Sequence[Any]) -> Any:
        """Return k values as one batch: arrays `(k, *shape)` per leaf."""
        if not values:
            return self.unflatten([np.empty((0, *leaf.shape), leaf.dtype) for leaf in self.leaves])
        columns = zip(*map(self.flatten, values), strict=True)
        return self.unflatten([np.stack(column) for column in columns])


def _rebuild(skeleton: Any, leaves: Sequence[Any]) -> Any:
    if type(skeleton) is int:
        return leaves[skeleton]
    if isinstance(skeleton, dict):
        return {key: _rebuild(part, leaves) for key, part in skeleton.items()}
    return tuple(_rebuild(part, leaves) for part in skeleton)


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
