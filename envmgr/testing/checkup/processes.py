"""What the system says of processes: memory, open files, threads, children. Linux; else nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from typing import NamedTuple

from envmgr.proc import resident_bytes, stat_of


class Holdings(NamedTuple):
    """What a process has at one moment; None where the system does not tell.

    Attributes:
        rss_bytes: memory in use.
        fds: open files, sockets and pipes.
        threads: threads of Python.
        children: living processes that it started, and their descendants.
    """

    rss_bytes: int | None
    fds: int | None
    threads: int
    children: int | None


def holdings() -> Holdings:
    """Return what this process has."""
    fds = children = None
    with contextlib.suppress(OSError, ValueError):
        fds = len(os.listdir("/proc/self/fd")) - 1  # the listing itself
        children = len(descendants(os.getpid()))
    return Holdings(resident_bytes() or None, fds, threading.active_count(), children)


def release_free_memory() -> None:
    """Have the allocator give back memory that it keeps for later, where it can be told to (glibc).

    Otherwise a leak would fill that memory first, and nothing would grow: an env that was closed
    before in the same process may have left hundreds of MB of it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def descendants(pid: int) -> list[int]:
    """Return the processes that descend from a process, without zombies."""
    parents: dict[int, int] = {}
    for name in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat_of(int(name))[:2]
            if state not in ("Z", "X"):
                parents[int(name)] = int(parent)
    found: list[int] = []
    layer = {pid}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer}
        found += layer
    return sorted(found)


def marked(token: str) -> list[int]:
    """Return the living processes that were started with this text in their environment."""
    found = []
    for name in _pids():
        # A zombie has no environment, and those of other users' processes may not be read.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if token.encode() in file.read():
                found.append(int(name))
    return found


def kill_marked(token: str) -> None:
    """Kill the processes that `marked` finds."""
    for pid in marked(token):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    return []
