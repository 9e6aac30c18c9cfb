"""Batches: arrays with a row for each env, and nested dicts and tuples of such arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def rows_of(batch: Any, positions: Any) -> Any:
    """Return some rows of a batch, as a batch that is nobody else's."""
    if type(batch) is np.ndarray:
        return batch.take(positions, axis=0)
    if isinstance(batch, Mapping):
        return {key: rows_of(part, positions) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(rows_of(part, positions) for part in batch)
    return batch[positions]


def put_rows(batch: Any, positions: Any, rows: Any) -> None:
    """Put rows into a batch, in place.

    Args:
        batch: where they go.
        positions: what indexes them in each array: a row, a list of rows, or a tuple of both.
        rows: as `batch` is nested.
    """
    if type(batch) is np.ndarray:
        batch[positions] = rows
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            put_rows(part, positions, rows[key])
    elif isinstance(batch, tuple):
        for part, of_rows in zip(batch, rows, strict=True):
            put_rows(part, positions, of_rows)
    else:
        batch[positions] = rows


def indexed(batch: Any, index: Any) -> Any:
    """Return `array[index]` of each array of a batch."""
    if isinstance(batch, Mapping):
        return {key: indexed(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(indexed(part, index) for part in batch)
    return batch[index]


def zeros_for(rows: Any, *lengths: int) -> Any:
    """Return zeros that have, in place of the rows of a batch, the axes `lengths`.

    What has no number for zero, such as objects, is None there.
    """
    if isinstance(rows, Mapping):
        return {key: zeros_for(part, *lengths) for key, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple(zeros_for(part, *lengths) for part in rows)
    shape = (*lengths, *rows.shape[1:])
    return np.empty(shape, object) if rows.dtype.hasobject else np.zeros(shape, rows.dtype)


def concatenated(batches: Sequence[Any]) -> Any:
    """Return the rows of several batches as one."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(concatenated(parts) for parts in zip(*batches, strict=True))
    return np.concatenate(batches)


def stacked(rows: Sequence[Any]) -> Any:
    """Return arrays or numbers, or dicts and tuples of such, as the rows of one batch."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: stacked([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked(parts) for parts in zip(*rows, strict=True))
    return np.stack(rows)


def as_batch(value: Any) -> Any:
    """Return what somebody gives as a batch: tensors and lists of numbers as arrays."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, Mapping):
        return {key: as_batch(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_batch, value))
    return np.asarray(value)
