"""Actions of many envs as columns: one array for each leaf of the action space.

Actions that fit the space exactly (types, shapes and bounds) are checked as a batch, at the cost of
a few numpy calls. Others are looked at one by one: they are converted here as the env would convert
them, and numbers are noted with the form that they are in, so that the env is given what it would
get by message. A result of `None` means that `checked_actions` in `envmgr.core.validate` has to
find out what is wrong with which action, if anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.spaces.layouts import Layout, has_buffer
from envmgr.spaces.reading import Unreadable, read_list
from envmgr.spaces.values import Array, ValueMismatchError, rebuilt

Bounds = tuple[Any, Any] | None
"""Smallest and largest value that a leaf may have (numbers or arrays); None: no bounds."""

PYTHON_NUMBERS, NUMPY_VALUES, NUMBERS_IN_ARRAYS, NUMBERS_IN_POINTS = range(4)
"""The *form* in which the env gets what is in the column. The last two are for a number in an array
of shape (1,), or (). Larger values stand for numbers of other types, see `in_form`."""

_INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
_SHAPES: list[tuple[int, ...] | None] = [None, (1,), ()]
_OTHER_FORMS = [(dtype, shape) for dtype in _INTEGERS for shape in _SHAPES]
_FORMS = {form: number for number, form in enumerate(_OTHER_FORMS, NUMBERS_IN_POINTS + 1)}

PLAIN = frozenset((int, float, str, np.ndarray, np.int64, np.float32, np.float64))
"""Types of actions that are no tensors, and have none in them."""

_OWN_FORMS = dict(zip(_SHAPES, (NUMPY_VALUES, NUMBERS_IN_ARRAYS, NUMBERS_IN_POINTS), strict=True))
_NO_FORM = 255
_TOLIST_ROWS = 256
_MOST_LISTED = 4096
"""Choices up to this many are looked up in a set, which is cheaper than comparing."""


class ActionColumns:
    """A packer of actions of one space into one array `(k, *shape)` per leaf.

    Args:
        bounds: the bounds of each leaf; None if actions are not checked.
        converted: a function that converts an action as the envs do, and returns None if it is
            refused; None if the envs take actions as they come.
    """

    def __init__(
        self,
        layout: Layout,
        bounds: list[Bounds] | None,
        converted: Callable[[Any], Any] | None = None,
    ) -> None:
        self._converted = converted
        self._layout = layout
        self._bounds = bounds or [None] * len(layout.leaves)
        numbers = [(j, leaf) for j, leaf in enumerate(layout.leaves) if leaf.is_number]
        self._ranges = {j: _range_of(leaf.dtype) for j, leaf in numbers}
        lone = layout.leaves[0] if not layout.leaves[0].path and len(layout.leaves) == 1 else None
        self._lone = lone
        self._is_number = lone is not None and lone.is_number
        self._choices = _choices(self._bounds[0]) if self._is_number else None
        self._dtype = layout.leaves[0].dtype
        self._number_type = self._dtype.type

    @property
    def in_c(self) -> tuple[bool, int, int] | None:
        """Whether actions are numbers, and the least and largest; None if C cannot take them."""
        if self._lone is None:
            return None
        bounds = self._bounds[0]
        if not self._is_number:
            return (False, 0, 0) if bounds is None and has_buffer(self._dtype) else None
        if self._dtype != np.int64:
            return None
        least, most = self._ranges[0]
        if bounds is None:
            return True, least, most
        low, high = bounds
        # A Discrete may claim to have numbers that do not fit its dtype.
        return (True, low, high) if type(low) is int and least <= low and high <= most else None

    def of_values(self, values: Sequence[Any]) -> tuple[list[Array], Any] | None:
        """Pack one action for each env.

        Args:
            values: k actions.

        Returns:
            Per leaf (k, *shape), and the form in which the envs get them (`PYTHON_NUMBERS` ...), or
            the form of each (k,); None if an action is out of bounds, or in a form that the env
            would get to see and that has no number here.
        """
        packed = self._exactly(values)
        return self._one_by_one(values) if packed is None else packed

    def _exactly(self, values: Sequence[Any]) -> tuple[list[Array], int] | None:
        """Pack actions that are all of one type, which is the space's own."""
        if self._lone is None:
            return self._of_trees(values)
        types = set(map(type, values))
        if len(types) != 1:
            return None
        (kind,) = types
        if self._is_number and kind is not np.ndarray:
            if kind is not int and kind is not self._number_type:
                return None
            choices = self._choices
            if not (choices.issuperset(values) if choices else self._numbers_fit(values)):
                return None
            form = PYTHON_NUMBERS if kind is int else NUMPY_VALUES
            return [np.fromiter(values, self._dtype, len(values))], form
        if kind is not np.ndarray:
            return None
        dtype, shape = self._dtype, self._lone.shape
        if self._is_number and values[0].shape == (1,):
            shape = (1,)  # as the policies of DI-engine give it
        if not all(value.dtype == dtype and value.shape == shape for value in values):
            return None
        if self._is_number:
            numbers = np.array(values).reshape(len(values))
            form = NUMBERS_IN_ARRAYS if shape else NUMBERS_IN_POINTS
            return ([numbers], form) if self._numbers_fit(numbers.tolist()) else None
        column = np.array(values)
        return None if not _inside(column, self._bounds[0]) else ([column], NUMPY_VALUES)

    def _one_by_one(self, values: Sequence[Any]) -> tuple[list[Array], Any] | None:
        """Pack actions whose forms are converted to the exact ones, or noted beside them.

        The check of single actions also refuses whatever is refused here, and the env gets what it
        would get otherwise.
        """
        if self._converted is None:
            plain = [without_tensors(value) for value in values]
            return self._with_forms(plain) if self._is_number else self._exactly(plain)
        if self._lone is not None and not self._is_number and _are_alike(values):
            columns = self.of_batch(np.array(values), len(values))  # the same, all at once
            if columns is not None:
                return columns, NUMPY_VALUES
        converted = list(map(self._converted, values))
        return None if any(value is None for value in converted) else self._exactly(converted)

    def _with_forms(self, values: Sequence[Any]) -> tuple[list[Array], Any] | None:
        """Pack numbers of several types; return them with the form of each."""
        forms = bytes(map(self._form_of, values))
        if _NO_FORM in forms:
            return None
        numbers = [
            int(value.item()) if form else value for form, value in zip(forms, values, strict=True)
        ]
        if not self._numbers_fit(numbers):
            return None
        alike = forms.count(forms[0]) == len(forms)
        form = forms[0] if alike else np.frombuffer(forms, np.uint8)
        return [np.fromiter(numbers, self._dtype, len(numbers))], form

    def _form_of(self, value: Any) -> int:
        """Return the form that a number is in; `_NO_FORM` for all else."""
        if type(value) is int:
            return PYTHON_NUMBERS
        if type(value) is not np.ndarray and not isinstance(value, np.integer):
            return _NO_FORM
        shape = value.shape if type(value) is np.ndarray else None
        if value.dtype == self._dtype and shape in _SHAPES:
            return _OWN_FORMS[shape]
        return _FORMS.get((value.dtype, shape), _NO_FORM)

    def _numbers_fit(self, values: Sequence[Any]) -> bool:
        if self._choices is not None:
            return self._choices.issuperset(values)
        least, most = self._bounds[0] or self._ranges[0]
        return bool(least <= min(values) and max(values) <= most)

    def _of_trees(self, values: Sequence[Any]) -> tuple[list[Array], int] | None:
        rows = []
        for value in values:
            leaves = self._exact_leaves(self._layout.skeleton, value)
            if leaves is None:
                return None
            rows.append(leaves)
        columns = [np.array([row[j] for row in rows]) for j in range(len(self._layout.leaves))]
        inside = all(map(_inside, columns, self._bounds))
        return (columns, NUMPY_VALUES) if inside else None

    def _exact_leaves(self, skeleton: Any, value: Any) -> list[Any] | None:
        if type(skeleton) is int:
            leaf = self._layout.leaves[skeleton]
            exact = leaf.dtype.type if leaf.is_number else np.ndarray
            if leaf.is_number and type(value) is int and self._converted is not None:
                least, most = self._ranges[skeleton]
                if not least <= value <= most:
                    return None
                value = exact(value)  # of which such an env makes an int again
            fits = type(value) is exact and value.dtype == leaf.dtype and value.shape == leaf.shape
            return [value] if fits else None
        if isinstance(skeleton, dict):
            if type(value) is not dict or value.keys() != skeleton.keys():
                return None
            parts = [self._exact_leaves(part, value[key]) for key, part in skeleton.items()]
        else:
            if type(value) is not tuple or len(value) != len(skeleton):
                return None
            parts = [self._exact_leaves(p, v) for p, v in zip(skeleton, value, strict=True)]
        if any(part is None for part in parts):
            return None
        return [leaf for part in parts if part is not None for leaf in part]

    def of_batch(self, batch: Any, count: int) -> list[Array] | None:
        """Pack a batch: per leaf (k, *shape), nested as the space.

        Dtypes of the same kind are cast to those of the space, and integers to floats.

        Args:
            batch: an array, or a dict or tuple of such.
            count: k.

        Returns:
            Per leaf (k, *shape) of the space's dtype; None if the batch does not fit.
        """
        exact = type(batch) is np.ndarray and batch.dtype == self._dtype
        if exact and self._is_number and batch.shape == (count,):
            if self._choices is not None and count <= _TOLIST_ROWS:
                fits = self._choices.issuperset(batch.tolist())
            else:
                fits = _inside(batch, self._bounds[0])
            return [batch] if fits else None
        found: list[Any] = []
        if not _collect(self._layout.skeleton, batch, found):
            return None
        columns: list[Array] = []
        for leaf, array, bounds in zip(self._layout.leaves, found, self._bounds, strict=True):
            if type(array) is not np.ndarray or array.shape != (count, *leaf.shape):
                return None
            if array.dtype != leaf.dtype and not _casts(array.dtype, leaf.dtype):
                return None
            if not _inside(array, bounds):  # before it is cast: a cast may round
                return None
            if array.dtype != leaf.dtype:
                cast = array.astype(leaf.dtype)
                if leaf.dtype.kind in "iu" and not np.array_equal(cast, array):
                    return None
                array = cast
            columns.append(array)
        return columns


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether values are arrays of one dtype and shape."""
    if not all(type(value) is np.ndarray for value in values):
        return False
    return len({(value.dtype, value.shape) for value in values}) == 1


def _range_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the largest integer of a dtype."""
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _choices(bounds: Bounds) -> frozenset[int] | None:
    if bounds is None or type(bounds[0]) is not int or bounds[1] - bounds[0] >= _MOST_LISTED:
        return None
    return frozenset(range(bounds[0], bounds[1] + 1))


def _casts(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    if target.kind == "f":
        return source.kind in "iuf"
    return target.kind in "iu" and source.kind in "iu"


def _collect(skeleton: Any, batch: Any, found: list[Any]) -> bool:
    if type(skeleton) is int:
        found.append(batch if isinstance(batch, (np.ndarray, list)) else without_tensors(batch))
        return True
    if isinstance(skeleton, dict):
        if not isinstance(batch, Mapping) or batch.keys() != skeleton.keys():
            return False
        return all(_collect(part, batch[key], found) for key, part in skeleton.items())
    if type(batch) is not tuple or len(batch) != len(skeleton):
        return False
    return all(_collect(p, b, found) for p, b in zip(skeleton, batch, strict=True))


def _inside(column: Array, bounds: Bounds) -> bool:
    if bounds is None or column.size == 0:
        return True
    low, high = bounds
    if type(low) is int and len(column) <= _TOLIST_ROWS:  # cheaper than two reductions
        numbers = column.tolist()
        return bool(low <= min(numbers) and max(numbers) <= high)
    return bool((column >= low).all() and (column <= high).all())


def without_tensors(action: Any) -> Any:
    """Return tensors of other libraries as arrays: workers need not have those libraries."""
    if type(action) in PLAIN:
        return action
    if isinstance(action, Mapping):
        return {key: without_tensors(part) for key, part in action.items()}
    if type(action) in (tuple, list) or (isinstance(action, tuple) and hasattr(action, "_fields")):
        return rebuilt(action, map(without_tensors, action))
    if isinstance(action, np.generic) or not hasattr(action, "__array__"):
        return action
    return np.asarray(action)


def in_form(number: int, form: int, dtype: np.dtype[Any]) -> Any:
    """Return a number as it was given.

    Args:
        number: what is in the column.
        form: the form noted beside it.
        dtype: the dtype of the column.
    """
    if form == PYTHON_NUMBERS:
        return number
    shape = _SHAPES[form - NUMPY_VALUES] if form <= NUMBERS_IN_POINTS else None
    if form > NUMBERS_IN_POINTS:
        dtype, shape = _OTHER_FORMS[form - NUMBERS_IN_POINTS - 1]
    return dtype.type(number) if shape is None else np.full(shape, number, dtype)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return the rows of a batch: of an array, of a dict or tuple of arrays, or of a list.

    Raises:
        ValueMismatchError: the batch does not have exactly `count` rows.
    """
    if isinstance(batch, Mapping):
        columns = {key: split_batch(part, count) for key, part in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if isinstance(batch, tuple):
        parts = [split_batch(part, count) for part in batch]
        return [tuple(part[i] for part in parts) for i in range(count)]
    if hasattr(batch, "__array__"):
        batch = without_tensors(batch)
    if isinstance(batch, (set, frozenset)):
        raise ValueMismatchError("a set has no order; give a list")
    try:
        rows = read_list(batch)
    except Unreadable as error:
        raise ValueMismatchError(str(error)) from error
    if len(rows) != count:
        raise ValueMismatchError(f"{len(rows)} rows for {count} envs")
    return rows
