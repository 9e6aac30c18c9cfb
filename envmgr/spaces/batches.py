"""Batches: arrays with a row for each env, and nested dicts and tuples of such arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import setitem
from typing import Any

import numpy as np

from envmgr.spaces.values import Array, rebuilt


def leafwise(fn: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """Return what a function makes of each array of a batch, nested as these are.

    Named tuples, such as the graphs of a Graph space, stay what they are.

    Args:
        fn: takes an array of the batch, and the parts of the others that stand in its place.
        batch: what is nested as the result is to be.
        *others: nested likewise.

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
    """Return `array[index]` of each array of a batch: of one row, views."""
    if type(batch) is np.ndarray:  # here and below for speed: this is asked for each env
        return batch[index]
    if isinstance(batch, Mapping):
        return {key: indexed(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return rebuilt(batch, [indexed(part, index) for part in batch])
    return batch[index]


def rows_of(batch: Any, positions: Any) -> Any:
    """Return some rows of a batch, as a batch that is nobody else's."""
    return leafwise(lambda rows: rows.take(positions, axis=0), batch)


def put_rows(batch: Any, positions: Any, rows: Any) -> None:
    """Put rows into a batch, in place.

    Args:
        batch: where they go.
        positions: what indexes them in each array: a row, a list of rows, or a tuple of both.
        rows: as `batch` is nested.
    """
    leafwise(lambda part, of_rows: setitem(part, positions, of_rows), batch, rows)


def merged_axes(array: Array) -> Array:
    """Return an array with its first two axes as one; arrays without numbers, too."""
    merged: Array = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return merged


def zeros_for(rows: Any, *lengths: int) -> Any:
    """Return zeros that have, in place of the rows of a batch, the axes `lengths`.

    What has no number for zero, such as objects, is None there.
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
    """Return what somebody gives as a batch: tensors and lists of numbers as arrays."""
    return leafwise(np.asarray, value)
