"""Envs that are stepped together, and where an env may be: in its lane or out of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array

OUT, IDLE, STEPPING, RESETTING = range(4)
"""Where an env is: out of its lane, or in it and ready, taking a step, or being reset."""


class Selection:
    """Envs that are stepped together, in the order their user named them.

    Attributes:
        ids: their env_ids.
        array: the same, as a read-only array (k,) int64.
        rows: what indexes their rows: a slice if they are neighbours, else `array`.
        is_slice: whether they are.
        hosts: the indexes of their hosts.
        windows: their rows of `requests`, `replies`, `bases` and `expected`, if they are.
        arenas: their rows of the arenas, by slot, as far as they were asked for; if they are.
        is_ascending: whether the env_ids ascend.
        idle: what says of all of them that they are ready.
        stepping: likewise that they take a step.
    """

    __slots__ = (
        "arenas",
        "array",
        "count",
        "hosts",
        "idle",
        "ids",
        "is_ascending",
        "is_slice",
        "rows",
        "stepping",
        "windows",
    )

    def __init__(self, ids: list[int], host_index: Sequence[int], columns: Sequence[Array]) -> None:
        self.ids = ids
        self.count = len(ids)
        self.array: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.array.flags.writeable = False
        first = ids[0]
        self.is_slice = ids == list(range(first, first + len(ids)))
        self.rows: Any = slice(first, first + len(ids)) if self.is_slice else self.array
        self.hosts = list(dict.fromkeys(map(host_index.__getitem__, ids)))
        self.is_ascending = self.is_slice or all(a < b for a, b in itertools.pairwise(ids))
        self.idle = bytes((IDLE,)) * len(ids)
        self.stepping = bytes((STEPPING,)) * len(ids)
        self.windows = tuple(column[self.rows] for column in columns) if self.is_slice else None
        self.arenas: dict[int, list[Array]] = {}
