"""What all modules of this package share about values: their types, errors and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.spaces.reading import short_text

Array = npt.NDArray[Any]
Path = tuple[str | int, ...]
OnCast = Callable[[str], None]

_MOST_IN_ONE_THREAD = 8192
"""The library that computes products may give longer ones to several threads."""


class ValueMismatchError(ValueError):
    """A value does not fit its space. The host turns it into a typed failure of the env."""


class NonFiniteError(ValueMismatchError):
    """A value holds NaN or infinities that are not allowed."""


def path_text(path: Path) -> str:
    """Return a leaf's place as users would index it, for messages; empty for a lone leaf."""
    return "".join(f"[{key!r}]" for key in path)


def check_finite(value: Any, path: Path = ()) -> None:
    """Look for NaN and infinities in an array or number, or in dicts, tuples and lists of such.

    Raises:
        NonFiniteError: there are some; the message says where.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_finite(part, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            check_finite(part, (*path, index))
    elif isinstance(value, (np.ndarray, np.generic, float, complex)):
        array = np.asarray(value)
        for name in array.dtype.names or ():
            check_finite(array[name], (*path, name))
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise NonFiniteError(
                f"value{path_text(path)} has NaN or infinite numbers (nan_policy is not allow)"
            )


def has_floats(dtype: np.dtype[Any]) -> bool:
    """Return whether there may be NaN and infinities in an array of a dtype, or in its fields."""
    if dtype.names is not None:
        return any(has_floats(dtype[name]) for name in dtype.names)
    return dtype.base.kind in "fc"


def finite_test(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array], Any] | None:
    """Return a function of an array of this kind that gives 0 if all its numbers are finite.

    Zero times a number is zero, except for NaN and infinities, and a product with a vector of zeros
    costs half as much as looking at each number.

    Returns:
        None if there is nothing to test, or too much for a product of one thread.
    """
    n_numbers = int(np.prod(shape, dtype=np.int64))
    if dtype.kind != "f" or n_numbers > _MOST_IN_ONE_THREAD:
        return None
    return partial(np.vdot, np.zeros(n_numbers, dtype))


def rebuilt(like: Any, parts: Iterable[Any]) -> Any:
    """Return the parts of a tuple or list as one of its class: named tuples keep their names."""
    kind = type(like)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def structure_text(path: Path, value: Any, expected: str) -> str:
    """Return what is wrong with the structure of a value."""
    if isinstance(value, Mapping):
        found = f"a dict of {short_text([*value])}"
    elif isinstance(value, (tuple, list)):
        found = f"{len(value)} items"
    else:
        found = type(value).__name__
    return f"value{path_text(path)} should be {expected}, found {found}"
