"""Memory and processor time of a process and its descendants, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")


def tree_pss_bytes(root: int | None = None) -> int:
    """Return the proportional set sizes of a process and its descendants, added up.

    What several processes share counts once in total.

    Args:
        root: its pid; None: this process.
    """
    return sum(_pss_bytes(pid) for pid in tree(os.getpid() if root is None else root))


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of processes, added up; of those that are there."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime(_cpu_clock_of(pid))
    return total


def _cpu_clock_of(pid: int) -> int:
    """Return the id of the clock of a process' processor time, as the kernel numbers them."""
    return ~pid << 3 | 2


def tree(root: int) -> list[int]:
    """Return the pids of a process and of its descendants, itself first."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(entry), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _parent(entry: Path) -> int:
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it has ended
        return -1
    return int(stat.rpartition(")")[2].split()[1])


def _pss_bytes(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
