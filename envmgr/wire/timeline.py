"""What hosts note of when they did what: a ring of fixed size for each of them, in the block."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BATCH, STEP, RESET = 0, 1, 2
"""What was done: the steps that were posted for a host together, one of them, a reset."""

NUMBERS = 4
"""Of an entry: what + 8 * (row + 1), when it began and ended, and how many batches had been passed
over since steps of envs were noted last."""


_ENTRY = struct.Struct(f"{NUMBERS}d")
_write, _NBYTES = _ENTRY.pack_into, _ENTRY.size


class Done(NamedTuple):
    """An entry.

    Attributes:
        what: BATCH, STEP or RESET.
        row: of the env; -1 for a batch.
        began: on the monotonic clock.
        ended: likewise.
        passed_over: batches since the one of which steps were noted last.
    """

    what: int
    row: int
    began: float
    ended: float
    passed_over: int


class HostLog:
    """The host's side of its ring.

    Args:
        entries: (size, NUMBERS) of this host.
        count: how many it has noted, ever; an array of one.
    """

    def __init__(self, entries: npt.NDArray[np.float64], count: npt.NDArray[np.uint64]) -> None:
        self._size = len(entries)
        self._bytes = memoryview(entries.reshape(-1)).cast("B")  # type: ignore[arg-type]
        self._count: Any = memoryview(count)  # type: ignore[arg-type]
        self._n = int(count[0])

    def note(self, what: int, row: int, began: float, ended: float, passed_over: int = 0) -> None:
        """Note something that was done."""
        n = self._n
        _write(
            self._bytes, n % self._size * _NBYTES, what + 8 * (row + 1), began, ended, passed_over
        )
        self._n = self._count[0] = n + 1


def noted(entries: npt.NDArray[np.float64], count: int) -> list[Done]:
    """Return what is in a ring, the oldest first, without what no host in order writes.

    Args:
        entries: (size, NUMBERS).
        count: how many were noted, ever.
    """
    size = len(entries)
    some = entries[:count] if count <= size else np.roll(entries, -(count % size), axis=0)
    sane = np.isfinite(some).all(1) & (some >= 0.0).all(1) & (some < 1e15).all(1)
    found = []
    for code, began, ended, passed_over in some[sane].tolist():
        what, row = int(code) % 8, int(code) // 8 - 1
        if what <= RESET and began <= ended:
            found.append(Done(what, row, began, ended, int(passed_over)))
    return found
