"""Batches: stacking values, and taking batches apart into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.spaces.layouts import Layout
from envmgr.spaces.values import (
    ValueMismatchError,
)
from envmgr.types import Unreadable, read_list


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
    if isinstance(batch, (set, frozenset)):
        raise ValueMismatchError("a set has no order; give a list")
    try:
        rows = read_list(batch)
    except Unreadable as error:
        raise ValueMismatchError(str(error)) from error
    if len(rows) != count:
        raise ValueMismatchError(f"{len(rows)} rows for {count} envs")
    return rows
