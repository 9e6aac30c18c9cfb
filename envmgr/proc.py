"""What Linux tells of processes; elsewhere all of this raises, or finds nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PF_EXITING = 0x4


def stat_of(pid: int) -> list[str]:
    """Return what `/proc/<pid>/stat` has behind the name of the process: its state comes first.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def is_exiting(pid: int) -> bool:
    """Return whether a process is about to end, or is gone: it has closed its files by that."""
    try:
        return bool(int(stat_of(pid)[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True


def status_of(pid: int | str) -> dict[str, str]:
    """Return what the kernel says of a process, by name; nothing if it is gone."""
    return fields_of(f"/proc/{pid}/status")


def fields_of(path: str | Path) -> dict[str, str]:
    """Return what the lines `name: value` of a file say; nothing if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_s_of(pid: int) -> float:
    """Return how long a process has computed.

    Raises:
        OSError, ValueError, IndexError: that cannot be read.
    """
    return sum(map(int, stat_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def queued_s_of(task: int | str) -> float:
    """Return how long a process, or `thread-self`, has waited for a core.

    Raises:
        OSError, ValueError, IndexError: that cannot be read.
    """
    with open(f"/proc/{task}/schedstat") as file:
        return int(file.read().split()[1]) * 1e-9


def resident_bytes(pid: int | str = "self", *, shared: bool = True) -> int:
    """Return the resident memory of a process; 0 where that cannot be read.

    Args:
        pid: this one, if it is left out.
        shared: with what it shares with others.
    """
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_others = map(int, file.read().split()[:3])
        return (resident if shared else resident - of_others) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def memfds_of(pid: int, name: str) -> Iterator[str]:
    """Return the paths of the open files of a process that are memory of this name.

    Raises:
        OSError: there is no such process, or it is not ours to look at.
    """
    folder = f"/proc/{pid}/fd"
    paths = (f"{folder}/{fd}" for fd in os.listdir(folder))
    return (path for path in paths if _target_of(path).startswith(f"/memfd:{name} "))


def _target_of(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
