"""Memory of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def tree_pss_bytes(root: int | None = None) -> int:
    """Return the proportional set sizes of a process and its descendants, added up.

    What several processes share counts once in total.

    Args:
        root: its pid; None: this process.
    """
    return sum(_pss_bytes(pid) for pid in _tree(os.getpid() if root is None else root))


def _tree(root: int) -> list[int]:
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
