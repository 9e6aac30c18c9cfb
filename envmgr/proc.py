"""What Linux tells of processes; elsewhere all of this raises, or finds nothing."""

from __future__ import annotations

import os
import stat
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


def memfds_of(pid: int, name: str, flags: int) -> Iterator[int]:
    """Open the files that a process has open and that are memory of this name, one after another.

    Args:
        pid: of the process.
        name: of the memory.
        flags: how to open it, as of `os.open`.

    Returns:
        An fd of each; who takes one closes it.

    Raises:
        OSError: there is no such process, or it is not ours to look at.
    """
    folder = f"/proc/{pid}/fd"
    opened = (_opened_memfd(f"{folder}/{fd}", name, flags) for fd in os.listdir(folder))
    return (fd for fd in opened if fd is not None)


def _opened_memfd(path: str, name: str, flags: int) -> int | None:
    """Open what a process has open under a path of `/proc`; None if it is no memory of the name.

    The process can put another file there at any moment, one that the rights of its reader open and
    its own do not, or a pipe that nobody writes into. So that file is held first, which does
    nothing to it, and what is opened is what was looked at. A file in a folder is none, whatever
    its path looks like in a mount namespace of that process.
    """
    begin = f"/memfd:{name} "
    try:
        if not os.readlink(path).startswith(begin):
            return None
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # closed meanwhile
        return None
    try:
        own, about = f"/proc/self/fd/{held}", os.fstat(held)
        is_memory = stat.S_ISREG(about.st_mode) and about.st_nlink == 0
        if not is_memory or not os.readlink(own).startswith(begin):
            return None
        return os.open(own, flags | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        os.close(held)
