"""Layouts: taking values apart into arrays and objects, and putting them together."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
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

MOST_TEXT_BYTES = 1020
"""Bytes that a text may have in shared memory, unless its space says that fewer will do. Together
with the length of the text, that is 1 KiB."""

_TEXT_LENGTH = struct.Struct("<I")
_MOST_KNOWN_TEXTS = 1024


@cache
def has_buffer(dtype: np.dtype[Any]) -> bool:
    """Return whether C code can read arrays of a dtype, which it knows only by their buffers.

    Arrays of times have no buffer, nor have arrays of records with a time in them, or with fields
    that overlap.
    """
    array: Any = np.empty(0, dtype)
    try:
        memoryview(array)
    except (ValueError, TypeError, BufferError):
        return False
    return True


@dataclass(frozen=True)
class Leaf:
    """One array of a structured value, or an object of any form.

    Attributes:
        path: where it sits in the value; empty if the value is this array.
        shape: its shape; `()` for Discrete.
        is_number: whether its value is a numpy number, like Discrete's, and not an array of shape
            `()`.
        check: takes an object and its path, and raises ValueMismatchError unless the object is as
            it should be; None for arrays.
        text_bytes: how many bytes of shared memory a text has room for; None if it is no text.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_number: bool = field(default=False, compare=False)
    check: Callable[[Any, Path], None] | None = field(default=None, compare=False, repr=False)
    text_bytes: int | None = field(default=None, compare=False, repr=False)

    @property
    def is_free(self) -> bool:
        """Whether its values are not arrays of this shape and dtype, but objects of any form."""
        return self.check is not None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def to_bytes(self, value: Any) -> bytearray:
        """Return a copy of a checked array: only its numbers, the form that pickles best."""
        data = bytearray(self.nbytes)
        np.ndarray(self.shape, self.dtype, data)[...] = value
        return data

    def from_bytes(self, data: Any) -> Any:
        """Return what `to_bytes` was given, in the memory of `data`.

        Raises:
            ValueMismatchError: `data` is nothing that `to_bytes` can have returned.
        """
        if type(data) is not bytearray or len(data) != self.nbytes:
            found = f"{len(data)} bytes" if type(data) is bytearray else type(data).__name__
            raise ValueMismatchError(
                f"value{path_text(self.path)} of the reply is {found}, which is no array of shape "
                f"{self.shape} and dtype {self.dtype}, as the space says"
            )
        array: Array = np.ndarray(self.shape, self.dtype, data)
        return array[()] if self.is_number else array


@dataclass(frozen=True)
class TextLeaf(Leaf):
    """A text in shared memory: an array of bytes, with the length and then the text in UTF-8."""

    @classmethod
    def of(cls, leaf: Leaf, n_bytes: int) -> TextLeaf:
        """Return the leaf that a text of at most `n_bytes` bytes has in shared memory."""
        return cls(leaf.path, (_TEXT_LENGTH.size + n_bytes,), np.dtype(np.uint8))

    def packed(self, text: Any) -> bytes | None:
        """Return the bytes to write; None if `text` is not a `str`, or is too long."""
        if type(text) is not str:
            return None
        data = text.encode("utf-8", "surrogatepass")
        return _TEXT_LENGTH.pack(len(data)) + data if len(data) <= self.max_bytes else None

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes that a text may have."""
        return self.nbytes - _TEXT_LENGTH.size


class TextReader:
    """A reader of texts in shared memory, which makes one object of those that are equal."""

    def __init__(self, leaf: TextLeaf) -> None:
        self._max_bytes = leaf.max_bytes
        self._where = path_text(leaf.path)
        self._known: dict[bytes, str] = {}

    def read(self, memory: memoryview) -> str:
        """Return a text, given its bytes.

        Raises:
            ValueMismatchError: the bytes are not those of a text.
        """
        return self.read_each(memory, (0,))[0]

    def read_each(self, memory: memoryview, at: Iterable[int]) -> list[str]:
        """Return the texts at some places in memory.

        Args:
            memory: the bytes of the texts.
            at: where the bytes of each text begin.

        Raises:
            ValueMismatchError: the bytes at one of these places are not those of a text.
        """
        max_bytes, header, length_at = self._max_bytes, _TEXT_LENGTH.size, _TEXT_LENGTH.unpack_from
        known, texts = self._known, list[str]()
        for start in at:
            (length,) = length_at(memory, start)
            if length > max_bytes:
                raise ValueMismatchError(
                    f"value{self._where} is a text of {length} bytes, there is room for {max_bytes}"
                )
            first = start + header
            data = bytes(memory[first : first + length])  # once: it may change while it is read
            text = known.get(data)
            texts.append(self._decoded(data) if text is None else text)
        return texts

    def _decoded(self, data: bytes) -> str:
        try:
            text = data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ValueMismatchError(
                f"value{self._where} is no text in UTF-8: {error.reason} at byte {error.start}"
            ) from error
        if len(self._known) >= _MOST_KNOWN_TEXTS:
            self._known.clear()
        self._known[data] = text
        return text


@dataclass(frozen=True)
class Layout:
    """The leaves of a space, and how to take values apart and put them together.

    Attributes:
        leaves: in the order of the space (dict keys as the space orders them).
        skeleton: the nesting: a leaf's index, or a dict or tuple of skeletons.
    """

    leaves: tuple[Leaf, ...]
    skeleton: Any = field(repr=False, hash=False)

    @cached_property
    def arrays(self) -> tuple[Leaf, ...]:
        """The leaves that are arrays."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_free)

    @cached_property
    def fixed(self) -> Layout | None:
        """The leaves that are arrays, as a layout of a tuple of them; None if there are none."""
        return Layout(self.arrays, tuple(range(len(self.arrays)))) if self.arrays else None

    @cached_property
    def is_fixed(self) -> bool:
        """Whether all leaves are arrays."""
        return len(self.arrays) == len(self.leaves)

    @cached_property
    def is_placed(self) -> bool:
        """Whether all leaves have room in shared memory: arrays, and texts."""
        return all(leaf.text_bytes is not None for leaf in self.leaves if leaf.is_free)

    @cached_property
    def placed(self) -> Layout | None:
        """The layout of what is in shared memory; None if nothing is.

        That is the whole value, or, if there is no room for some of it, its arrays as a tuple.
        """
        if self.is_fixed or not self.is_placed:
            return self if self.is_fixed else self.fixed
        leaves = [
            leaf if leaf.text_bytes is None else TextLeaf.of(leaf, leaf.text_bytes)
            for leaf in self.leaves
        ]
        return Layout(tuple(leaves), self.skeleton)

    @cached_property
    def lone(self) -> Leaf | None:
        """The only leaf, if each value is one array; else None."""
        is_lone = type(self.skeleton) is int and not self.leaves[0].is_free
        return self.leaves[0] if is_lone else None

    def split(self, leaves: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        """Return the values of leaves that are arrays, and the values of those that are not."""
        pairs = list(zip(self.leaves, leaves, strict=True))
        fixed = [value for leaf, value in pairs if not leaf.is_free]
        return fixed, [value for leaf, value in pairs if leaf.is_free]

    def join(self, fixed: Sequence[Any], free: Sequence[Any]) -> Any:
        """Return the nested value whose leaves `split` has separated."""
        parts = {False: iter(fixed), True: iter(free)}
        return self.unflatten([next(parts[leaf.is_free]) for leaf in self.leaves])

    def flatten(
        self, value: Any, *, strict_dtype: bool = False, on_cast: OnCast | None = None
    ) -> list[Array]:
        """Check a value and return its leaves, as arrays unless they are free; may alias the value.

        Args:
            value: what the env returned.
            strict_dtype: refuse any dtype but the leaf's own; else same-kind casts are allowed.
            on_cast: called with a text about each leaf whose dtype is not the space's.

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
            leaf = self.leaves[skeleton]
            found.append(check.of_object(leaf, value) if leaf.is_free else check(leaf, value))
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
        """Return k values as one batch: arrays `(k, *shape)` per leaf, of objects where it is free.

        Objects are not checked.
        """
        if not values:
            return self.unflatten([np.empty((0, *leaf.shape), leaf.dtype) for leaf in self.leaves])
        rows: list[list[Any]] = []
        for value in values:
            rows.append([])
            self._collect(self.skeleton, value, (), rows[-1], _UNCHECKED)
        columns = zip(self.leaves, zip(*rows, strict=True), strict=True)
        return self.unflatten(
            [objects(column) if leaf.is_free else np.stack(column) for leaf, column in columns]
        )

    def zeros(self, *lengths: int) -> Any:
        """Return room for values: arrays `(*lengths, *shape)` per leaf, None where it is free."""
        return self.unflatten(
            [
                np.empty(lengths, object)
                if leaf.is_free
                else np.zeros((*lengths, *leaf.shape), leaf.dtype)
                for leaf in self.leaves
            ]
        )


def objects(values: Sequence[Any]) -> Array:
    """Return k values as an array of objects (k,), whatever they are."""
    batch = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        batch[i] = value
    return batch


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
    checks_objects: bool = True

    def of_object(self, leaf: Leaf, value: Any) -> Any:
        if self.checks_objects and leaf.check is not None:
            leaf.check(value, leaf.path)
        return value

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
        elif not np.can_cast(array.dtype, leaf.dtype, _CASTS.get(leaf.dtype.kind, "same_kind")):
            raise ValueMismatchError(_dtype_text(leaf, array, "the cast would lose information"))
        if self.on_cast is not None and not python_number:
            self.on_cast(_dtype_text(leaf, array, "it is cast"))


_UNCHECKED = _LeafCheck(False, None, checks_objects=False)
_CASTS: dict[str, Any] = {"U": "safe", "S": "safe", "V": "no"}
"""For these kinds, a cast "of the same kind" cuts texts off, or takes a record's fields apart."""


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
