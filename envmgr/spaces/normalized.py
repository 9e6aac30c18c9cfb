"""Which parts of a space hold numbers to normalise, and the space of the normalised values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces.values import Array, Path


def box_paths(space: Any, keys: Collection[str] | None = None) -> list[Path]:
    """Return where a space has boxes that hold numbers, also in nested Dicts and Tuples.

    Args:
        space: the space.
        keys: look only into the parts with these keys, which only a Dict has; None: into all.
    """
    if isinstance(space, spaces.Box):
        return [()] if keys is None and np.issubdtype(space.dtype, np.number) else []
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [
            (key, *path)
            for key, part in _parts(space)
            if keys is None or key in keys
            for path in box_paths(part)
        ]
    return []


def missing_keys(space: Any, keys: Collection[str] | None) -> list[str]:
    """Return those of some keys that a Dict does not have; for other spaces, return no keys."""
    if not isinstance(space, spaces.Dict):
        return []
    return [key for key in keys or () if key not in space.spaces]


def with_boxes(space: Any, paths: Collection[Path], high: float, path: Path = ()) -> Any:
    """Return a space whose boxes at `paths` hold float32 numbers from -high to high."""
    if path in paths:
        return spaces.Box(-high, high, space.shape, np.float32)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = {key: with_boxes(part, paths, high, (*path, key)) for key, part in _parts(space)}
        if isinstance(space, spaces.Dict):
            return spaces.Dict(OrderedDict(parts))  # whose order is kept; that of a dict is not
        return spaces.Tuple(list(parts.values()))
    return space


def _parts(space: Any) -> Any:
    return space.items() if isinstance(space, spaces.Dict) else enumerate(space)


def leaf_at(batch: Any, path: Path) -> Array:
    """Return the array at a place in a batch."""
    for key in path:
        batch = batch[key]
    return batch  # type: ignore[no-any-return]


def with_leaves(batch: Any, leaves: Mapping[Path, Array], path: Path = ()) -> Any:
    """Return a batch with other arrays at some places."""
    if path in leaves:
        return leaves[path]
    if isinstance(batch, Mapping):
        return {key: with_leaves(part, leaves, (*path, key)) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(with_leaves(part, leaves, (*path, i)) for i, part in enumerate(batch))
    return batch
