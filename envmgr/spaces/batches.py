"""Batches: arrays with a row for each env, and nested dicts and tuples of such arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import setitem
from typing import Any

import numpy as np

from envmgr.spaces.values import Array, rebuilt


def leafwise(fn: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """Return the results of a function for each array of a batch, nested as the batch is.

    Named tuples, such as the graphs of a Graph space, stay what they are.

    Args:
        fn: takes an array of the batch, and the parts of the others in the same place.
        batch: the batch, which is nested as the result will be.
        *others: values that are nested likewise.

    Raises:
        KeyError: one of them has other keys.
    """
    if type(batch) is np.ndarray:  # before the slow questions
        return fn(batch, *others)
    if isinstance(batch, Mapping):
        for other in others:
            if len(other) != len(batch):  # else what the first has not would be left out
                raise KeyError(f"there are {list(other)} where others have {list(batch)}")
        return {key: leafwise(fn, part, *(o[key] for o in others)) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = zip(batch, *others, strict=True)
        return rebuilt(batch, [leafwise(fn, *of_each) for of_each in parts])
    return fn(batch, *others)


def indexed(batch: Any, index: Any) -> Any:
    """Return `array[index]` of each array of a batch; for one row, these are views."""
    if type(batch) is np.ndarray:  # here and below for speed: this is asked for each env
        return batch[index]
    if isinstance(batch, Mapping):
        return {key: indexed(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return rebuilt(batch, [indexed(part, index) for part in batch])
    return batch[index]


def rows_of(batch: Any, positions: Any) -> Any:
    """Return copies of some rows of a batch, as a batch of their own."""
    return leafwise(lambda rows: rows.take(positions, axis=0), batch)


def put_rows(batch: Any, positions: Any, rows: Any) -> None:
    """Put rows into a batch, in place.

    Args:
        batch: the batch that they go into.
        positions: the index for them in each array: a row, a list of rows, or a tuple of both.
        rows: the rows, nested as `batch` is.
    """
    leafwise(lambda part, of_rows: setitem(part, positions, of_rows), batch, rows)


def merged_axes(array: Array) -> Array:
    """Return an array with its first two axes as one; arrays without numbers, too."""
    merged: Array = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return merged


def zeros_for(rows: Any, *lengths: int) -> Any:
    """Return zeros like a batch, with the axes `lengths` in place of its rows.

    Values that have no zero, such as objects, are None there.
    """
    return leafwise(lambda part: _zeros((*lengths, *part.shape[1:]), part.dtype), rows)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.empty(shape, object) if dtype.hasobject else np.zeros(shape, dtype)


def concatenated(batches: Sequence[Any]) -> Any:
    """Return the rows of several batches as one."""
    return leafwise(lambda *parts: np.concatenate(parts), *batches)


def stacked(rows: Sequence[Any]) -> Any:
    """Return arrays or numbers, or dicts and tuples of such, as the rows of one batch."""
    return leafwise(lambda *parts: np.stack(parts), *rows)


def as_batch(value: Any) -> Any:
    """Return a value as a batch: tensors and lists of numbers become arrays."""
    return leafwise(np.asarray, value)
