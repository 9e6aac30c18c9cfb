"""Which codec a space has: the only place that switches on classes of spaces."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces.codec import Codec
from envmgr.spaces.columns import Bounds
from envmgr.spaces.equality import space_text
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.layouts import MOST_TEXT_BYTES, Leaf
from envmgr.spaces.reading import short_text
from envmgr.spaces.values import Array, Path, ValueMismatchError, path_text, structure_text

_MOST_BYTES_OF_A_CHARACTER = 4
"""In UTF-8."""


class _AskedCodec(Codec):
    """The codec of gymnasium's spaces without a fixed layout, which are asked about each value."""

    def check_value(self, value: Any, path: Path = ()) -> None:
        super().check_value(value, path)
        reason = self.doubt(value)
        if reason is not None:
            raise ValueMismatchError(f"value{path_text(path)} {reason}")


class _OneOfCodec(_AskedCodec):
    def __init__(self, space: Any, strict: bool) -> None:
        super().__init__(space, strict=True)


class _TextCodec(_OneOfCodec):
    def __init__(self, space: spaces.Text, strict: bool) -> None:
        super().__init__(space, strict)
        most = max(0, int(space.max_length)) * _MOST_BYTES_OF_A_CHARACTER
        self.text_bytes = min(most, MOST_TEXT_BYTES)

    def doubt(self, value: Any) -> str | None:
        reason = super().doubt(value)
        if reason is None or not isinstance(value, str):
            return reason
        space: Any = self.space
        most = space.max_length
        if not space.min_length <= len(value) <= most:
            return f"{reason}: its length is {len(value)}"
        others = "".join(dict.fromkeys(c for c in value if c not in space.character_set))
        if not others:
            return reason
        charset = "string.printable" if set(others) <= set(string.printable) else "..."
        return (
            f"{reason}: its charset lacks {short_text(others)}. Give the space one that has it: "
            f"Text({most}, charset={charset})"
        )

    def as_bytes(self, value: Any) -> bytes:
        return str(value).encode("utf-8", "replace")


class _AnyTextCodec(Codec):
    """The codec of a space of an unknown class whose dtype says that its values are texts."""

    text_bytes = MOST_TEXT_BYTES


class _ArrayCodec(Codec):
    """The codec of values that are one array, whose numbers may have bounds."""

    kinds = "biu"
    """Kinds of dtypes that actions may have."""

    is_number = False

    def __init__(self, space: Any, strict: bool, bounds: Bounds) -> None:
        super().__init__(space, strict)
        self._shape = tuple(space.shape)
        self._dtype = np.dtype(space.dtype)
        self._bounds = bounds

    def skeleton(self, path: Path, leaves: list[Leaf]) -> Any:
        if self._dtype.hasobject:
            return super().skeleton(path, leaves)
        leaves.append(Leaf(path, self._shape, self._dtype, self.is_number))
        return len(leaves) - 1

    def bounds(self) -> list[Bounds]:
        return [self._bounds]

    def refusal(self, action: Any) -> str | None:
        array = _action_array(action)
        if array is None:
            return f"{short_text(action)} is not an array, which {space_text(self.space)} needs"
        if array.shape != self._shape:
            return f"shape {array.shape} is not the {self._shape} of {space_text(self.space)}"
        if array.dtype.kind not in self.kinds:
            return f"dtype {array.dtype} does not fit {space_text(self.space)}"
        bounds = self._bounds
        if bounds is not None and not (np.all(array >= bounds[0]) and np.all(array <= bounds[1])):
            return f"{short_text(action)} is outside the bounds of {space_text(self.space)}"
        return None

    def for_env(self, action: Any) -> Any:
        dtype = self._dtype
        if type(action) is np.ndarray and action.dtype == dtype:
            return action
        array = _action_array(action)
        if array is None or array.dtype == dtype:
            return action if array is None else array
        if dtype.kind == "f" and array.dtype.kind in "biuf":
            return array.astype(dtype)
        if dtype.kind in "iu" and array.dtype.kind in "biu":
            converted = array.astype(dtype)
            return converted if np.array_equal(converted, array) else action
        return action

    def as_bytes(self, value: Any) -> bytes:
        return np.asarray(value, self._dtype).tobytes()


class _AnyArrayCodec(_ArrayCodec):
    """The codec of a space of an unknown class whose shape and dtype say that values are arrays.

    The space may have dtypes that Box cannot have: records, and texts.
    """

    def __init__(self, space: Any, strict: bool, bounds: Bounds = None) -> None:
        super().__init__(space, strict, bounds)
        self.kinds = {"f": "biuf", "i": "biu", "u": "biu", "b": "biu"}.get(
            self._dtype.kind, self._dtype.kind
        )

    def refusal(self, action: Any) -> str | None:
        return super().refusal(action) or (self.doubt(action) if self.is_asked else None)


class _BoxCodec(_AnyArrayCodec):
    def __init__(self, space: spaces.Box, strict: bool) -> None:
        super().__init__(space, strict, (space.low, space.high) if strict else None)
        self.is_asked = False  # its bounds say it all


class _MultiDiscreteCodec(_ArrayCodec):
    def __init__(self, space: spaces.MultiDiscrete, strict: bool) -> None:
        last = space.start + (space.nvec - 1)  # in this order it fits the space's dtype
        super().__init__(space, strict, (space.start, last))


class _MultiBinaryCodec(_ArrayCodec):
    def __init__(self, space: spaces.MultiBinary, strict: bool) -> None:
        super().__init__(space, strict, (np.int8(0), np.int8(1)))


class _DiscreteCodec(_ArrayCodec):
    is_number = True

    def __init__(self, space: spaces.Discrete, strict: bool) -> None:
        self._low, self._high = int(space.start), int(space.start) + int(space.n) - 1
        super().__init__(space, strict, (self._low, self._high))

    def refusal(self, action: Any) -> str | None:
        if type(action) is not int:
            array = _action_array(action)
            if array is None or array.size != 1 or array.dtype.kind not in "iu":
                return f"{short_text(action)} is not one integer, which {self.space} needs"
            action = array.item()
        if self._low <= action <= self._high:
            return None
        return f"{action} is outside {space_text(self.space)}: {self._low}..{self._high}"

    def for_env(self, action: Any) -> Any:
        if type(action) is int:
            return action
        if isinstance(action, np.integer):
            return int(action)
        array = np.asarray(action)
        return array.item() if array.size == 1 and array.dtype.kind in "iu" else action

    def as_bytes(self, value: Any) -> bytes:
        return b"%d," % int(np.asarray(value).item())


class _NestedCodec(Codec, ABC):
    """The codec of values that have parts, by key or index."""

    def __init__(self, space: Any, strict: bool, parts: Mapping[Any, Any]) -> None:
        super().__init__(space, strict)
        self._parts = {key: codec_of(part, strict=strict) for key, part in parts.items()}

    def skeleton(self, path: Path, leaves: list[Leaf]) -> Any:
        if not self._parts:
            return super().skeleton(path, leaves)
        parts = {key: part.skeleton((*path, key), leaves) for key, part in self._parts.items()}
        return self.put_together(parts)

    def check_value(self, value: Any, path: Path = ()) -> None:
        super().check_value(value, path)
        reason = self.misfit(value)
        if reason is not None:
            raise ValueMismatchError(reason)
        for key, part in self._parts.items():
            part.check_value(value[key], (*path, key))

    def bounds(self) -> list[Bounds]:
        return [bounds for part in self._parts.values() for bounds in part.bounds()]

    @abstractmethod
    def put_together(self, parts: dict[Any, Any]) -> Any:
        """Return the value that has these parts, by key or index in their order."""

    @abstractmethod
    def misfit(self, value: Any) -> str | None:
        """Return what is wrong with the structure of a value."""

    def refusal(self, action: Any) -> str | None:
        reason = self.misfit(action)
        if reason is not None:
            return reason
        for key, part in self._parts.items():
            reason = part.refusal(action[key])
            if reason is not None:
                return f"at [{key!r}]: {reason}"
        return None

    def as_bytes(self, value: Any) -> bytes:
        in_order = sorted(self._parts.items(), key=lambda entry: str(entry[0]))
        return b"".join([part.as_bytes(value[key]) for key, part in in_order])


class _DictCodec(_NestedCodec):
    def __init__(self, space: spaces.Dict, strict: bool) -> None:
        super().__init__(space, strict, space.spaces)

    def put_together(self, parts: dict[Any, Any]) -> Any:
        return parts

    def misfit(self, value: Any) -> str | None:
        if isinstance(value, Mapping) and value.keys() == self._parts.keys():
            return None
        return structure_text((), value, f"a dict of {[*self._parts]}")

    def for_env(self, action: Any) -> Any:
        if not isinstance(action, Mapping):
            return action
        parts = self._parts
        return {k: parts[k].for_env(part) if k in parts else part for k, part in action.items()}


class _TupleCodec(_NestedCodec):
    def __init__(self, space: Any, strict: bool) -> None:
        super().__init__(space, strict, dict(enumerate(space.spaces)))

    def put_together(self, parts: dict[Any, Any]) -> Any:
        return tuple(parts.values())

    def misfit(self, value: Any) -> str | None:
        if isinstance(value, (tuple, list)) and len(value) == len(self._parts):
            return None
        return structure_text((), value, f"{len(self._parts)} items")

    def for_env(self, action: Any) -> Any:
        if self.misfit(action) is not None:
            return action
        return tuple(part.for_env(action[index]) for index, part in self._parts.items())


CODECS: dict[type[Any], Callable[[Any, bool], Codec]] = {
    spaces.Box: _BoxCodec,
    spaces.Discrete: _DiscreteCodec,
    spaces.MultiDiscrete: _MultiDiscreteCodec,
    spaces.MultiBinary: _MultiBinaryCodec,
    spaces.Dict: _DictCodec,
    spaces.Tuple: _TupleCodec,
    spaces.Text: _TextCodec,
    spaces.OneOf: _OneOfCodec,
    spaces.Sequence: _AskedCodec,
    spaces.Graph: _AskedCodec,
}


def codec_of(space: spaces.Space[Any] | None, *, strict: bool = False) -> Codec:
    """Return the codec of a space: that of its class, else of the nearest one it derives from.

    The codecs of all other spaces know only whether values are arrays or texts, which the shape and
    dtype of the space tell.

    Args:
        space: the space; None stands for a space that has any value.
        strict: see `Codec`.
    """
    found = (CODECS[cls] for cls in type(space).__mro__ if cls in CODECS)
    return next(found, _codec_by_what_it_says(space))(space, strict)


def _codec_by_what_it_says(space: Any) -> Callable[[Any, bool], Codec]:
    if _says_arrays(space):
        return _AnyArrayCodec
    return _AnyTextCodec if _says_texts(space) else Codec


def _says_arrays(space: Any) -> bool:
    """Return whether all values of a space are arrays of one shape and one dtype of fixed size."""
    dtype = getattr(space, "dtype", None)
    known = isinstance(space, spaces.Space) and space.shape is not None
    return known and isinstance(dtype, np.dtype) and dtype.itemsize > 0


def _says_texts(space: Any) -> bool:
    """Return whether all values of a space are texts, as MiniGrid's missions are."""
    dtype = getattr(space, "dtype", None)
    is_text = isinstance(dtype, np.dtype) and dtype == np.dtype(str)
    return is_text and isinstance(space, spaces.Space) and space.shape in (None, ())


def _action_array(action: Any) -> Array | None:
    try:
        return np.asarray(action)
    except Exception as error:  # ragged lists, odd objects, tensors that are elsewhere
        pass_interrupt_on(error)
        return None
