"""What Linux tells about processes; on other systems these functions raise, or find nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_PF_EXITING = 0x4


def stat_of(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` after the process's name; its state comes first.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def is_exiting(pid: int) -> bool:
    """Return whether a process is about to end, or is gone: by then it has closed its files."""
    try:
        return bool(int(stat_of(pid)[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True


def status_of(pid: int | str) -> dict[str, str]:
    """Return what the kernel says about a process, by field name; nothing if it is gone."""
    return fields_of(f"/proc/{pid}/status")


def fields_of(path: str | Path) -> dict[str, str]:
    """Return the values of the lines `name: value` of a file; none if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_s_of(pid: int) -> float:
    """Return the seconds of CPU time that a process has used.

    Raises:
        OSError, ValueError, IndexError: the time cannot be read.
    """
    return sum(map(int, stat_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def queued_s_of(task: int | str) -> float:
    """Return how many seconds a process, or `thread-self`, has waited for a core.

    Raises:
        OSError, ValueError, IndexError: the time cannot be read.
    """
    with open(f"/proc/{task}/schedstat") as file:
        return int(file.read().split()[1]) * 1e-9


def resident_bytes(pid: int | str = "self", *, shared: bool = True) -> int:
    """Return the resident memory of a process in bytes; 0 where it cannot be read.

    Args:
        pid: the process; by default this one.
        shared: whether to include memory that it shares with other processes.
    """
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_others = map(int, file.read().split()[:3])
        return (resident if shared else resident - of_others) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def memfds_of(pid: int, name: str, flags: int) -> Iterator[int]:
    """Open those open files of a process that are memory of this name, one after another.

    Args:
        pid: the process.
        name: the name of the memory.
        flags: how to open it, as in `os.open`.

    Returns:
        An fd for each file; the caller closes each one that it takes.

    Raises:
        OSError: there is no such process, or this one may not look at it.
    """
    folder = f"/proc/{pid}/fd"
    opened = (_opened_memfd(f"{folder}/{fd}", name, flags) for fd in os.listdir(folder))
    return (fd for fd in opened if fd is not None)


def _opened_memfd(path: str, name: str, flags: int) -> int | None:
    """Open the file that a path of `/proc` leads to; None if it is not memory of this name.

    The process can put another file there at any moment: one that this process has the right to
    open and the other does not, or a pipe that nobody writes into. So the file is held first, which
    does nothing to it, and the file that is opened is the one that was looked at. A file in a
    folder is not such memory, whatever its path looks like in a mount namespace of that process.
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
