"""Records of what hosts did, and when: each host has a ring buffer of fixed size in the block."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BATCH, STEP, RESET = 0, 1, 2
"""What was done: all steps of a batch of a host, one step, a reset."""

NUMBERS = 4
"""How many numbers an entry has: what + 8 * (row + 1), when it began and ended, and how many
batches were passed over since steps of single envs were recorded last."""


_ENTRY = struct.Struct(f"{NUMBERS}d")
_write, _NBYTES = _ENTRY.pack_into, _ENTRY.size


class Done(NamedTuple):
    """An entry of a ring buffer.

    Attributes:
        what: BATCH, STEP or RESET.
        row: the row of the env; -1 for a batch.
        began: when it began, on the monotonic clock.
        ended: when it ended, likewise.
        passed_over: how many batches there were since the last one whose steps were noted.
    """

    what: int
    row: int
    began: float
    ended: float
    passed_over: int


class HostLog:
    """The host's side of its ring buffer.

    Args:
        entries: (size, NUMBERS) the entries of this host.
        count: how many entries the host has noted, ever; an array of one number.
    """

    def __init__(self, entries: npt.NDArray[np.float64], count: npt.NDArray[np.uint64]) -> None:
        self._size = len(entries)
        self._bytes = memoryview(entries.reshape(-1)).cast("B")  # type: ignore[arg-type]
        self._count: Any = memoryview(count)  # type: ignore[arg-type]
        self._n = int(count[0])

    def note(self, what: int, row: int, began: float, ended: float, passed_over: int = 0) -> None:
        """Record something that was done."""
        n = self._n
        _write(
            self._bytes, n % self._size * _NBYTES, what + 8 * (row + 1), began, ended, passed_over
        )
        self._n = self._count[0] = n + 1


def noted(entries: npt.NDArray[np.float64], count: int) -> list[Done]:
    """Return the entries of a ring buffer, oldest first, without what only a broken host writes.

    Args:
        entries: (size, NUMBERS).
        count: how many entries were noted, ever.
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
