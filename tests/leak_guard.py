"""Finds what a test leaves behind: processes, zombies, threads, fds, shared memory, semaphores.

Every process that a test session starts inherits one odd resource limit from it, the soft
RLIMIT_MSGQUEUE, whatever happens to its parents, session or environment variables. So /proc shows
which processes are ours, orphans included, without making the session adopt them: what they see of
their parent's death stays as it is for users.

Where there is no /proc (macOS), children come from `ps` and only processes and threads are checked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

SETTLE_S = 5.0
"""How long what ends by itself may take: processes just killed, threads just told to stop."""

_POLL_S = 0.01
_POLLS_PER_COLLECTION = 10
_SHARED_MEMORY = "/dev/shm"  # where POSIX shared memory and semaphores live
_ON_LINUX = sys.platform == "linux"


class Process(NamedTuple):
    """A process that this one started, or that one of its processes started."""

    pid: int
    start_time: str
    parent_pid: int
    zombie: bool
    command: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from another process that got the same pid later."""
        return self.pid, self.start_time

    def __str__(self) -> str:
        if self.zombie:
            return f"zombie process {self.pid} ({self.command}), not reaped by {self.parent_pid}"
        return f"process {self.pid}, child of {self.parent_pid}: {self.command}"


class Snapshot(NamedTuple):
    """What exists at one moment.

    Attributes:
        processes: by `Process.key`.
        threads: those alive.
        fds: pairs of number and target.
        shared_memory: names in /dev/shm, semaphores included.
        mappings: targets of shared memory and semaphores mapped by this process.
    """

    processes: dict[tuple[int, str], Process]
    threads: frozenset[threading.Thread]
    fds: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    mappings: frozenset[str]


class LeakGuard:
    """Takes snapshots and compares them. One for a test session, made before the first test."""

    def __init__(self) -> None:
        self._marker = _mark_this_process() if _ON_LINUX else None
        self._foreign_pids: set[str] = set()
        self.latest: Snapshot | None = None
        """What `wait_until_clean` saw last."""

    def snapshot(self) -> Snapshot:
        """Return what exists now."""
        return Snapshot(
            {process.key: process for process in self._processes()},
            # An interrupt in `Thread.start` may leave what was never started among them, for good.
            frozenset(thread for thread in threading.enumerate() if thread.ident is not None),
            frozenset(_fds()),
            frozenset(os.listdir(_SHARED_MEMORY)) if os.path.isdir(_SHARED_MEMORY) else frozenset(),
            frozenset(_mappings()),
        )

    def wait_until_clean(self, before: Snapshot, settle_s: float | None = None) -> list[str]:
        """Return what is there and was not before, one line each; empty if nothing is.

        What goes away within `settle_s` seconds (SETTLE_S unless given) is no leak. Processes that
        are leaks are killed.
        """
        deadline = time.monotonic() + (SETTLE_S if settle_s is None else settle_s)
        polls = 0
        while (leaks := self._leaks(before)) and time.monotonic() < deadline:
            # Memory that nobody can reach any more is Python's to unmap; mostly it is young.
            if polls % _POLLS_PER_COLLECTION == 0:
                gc.collect(2 if polls else 1)
            else:
                time.sleep(_POLL_S)
            polls += 1
        if leaks:
            self._kill(before)
        return leaks

    def _leaks(self, before: Snapshot) -> list[str]:
        self.latest = now = self.snapshot()
        helper_pids, helper_fds = _multiprocessing_helpers()
        new_processes = (now.processes[key] for key in now.processes.keys() - before.processes)
        new_names = now.shared_memory - before.shared_memory
        return [
            *(str(process) for process in new_processes if process.pid not in helper_pids),
            *(f"thread {thread.name!r}" for thread in now.threads - before.threads),
            *(
                f"fd {fd} -> {target}"
                for fd, target in sorted(now.fds - before.fds)
                if fd not in helper_fds
            ),
            *(
                f"shared memory {_SHARED_MEMORY}/{name}"
                for name in sorted(new_names)
                if not self._belongs_to_others(f"{_SHARED_MEMORY}/{name}")
                and os.path.exists(f"{_SHARED_MEMORY}/{name}")  # others may just have ended with it
            ),
            *(f"mapping of {target}" for target in sorted(now.mappings - before.mappings)),
        ]

    def _processes(self) -> list[Process]:
        if self._marker is None:
            return _descendants_by_ps()
        pids = {name for name in os.listdir("/proc") if name[0].isdecimal()}
        self._foreign_pids &= pids
        processes = []
        for pid in pids - self._foreign_pids - {str(os.getpid())}:
            limits = _read(f"/proc/{pid}/limits")
            if not self._marker.search(limits):
                self._foreign_pids.add(pid)
            elif (process := _read_process(pid)) is not None:
                processes.append(process)
        # A zombie of a parent that is not ours waits for the system's init, which may be slow.
        ours = {process.pid for process in processes} | {os.getpid()}
        return [
            process for process in processes if not process.zombie or process.parent_pid in ours
        ]

    def _belongs_to_others(self, path: str) -> bool:
        """Whether a process of somebody else on this machine has `path` open or mapped."""
        with contextlib.suppress(OSError):
            if os.stat(path).st_uid != os.getuid():
                return True
        return any(
            path.encode() in _read(f"/proc/{pid}/maps")
            or any(target == path for _, target in _fds(pid))
            for pid in self._foreign_pids
        )

    def _kill(self, before: Snapshot) -> None:
        helper_pids, _ = _multiprocessing_helpers()
        for process in self._processes():
            if process.key not in before.processes and process.pid not in helper_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)


def _mark_this_process() -> re.Pattern[bytes] | None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    marker = 500_000 + os.getpid() % 300_000
    try:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (marker, hard))
    except (ValueError, OSError):  # the hard limit is lower
        return None
    return re.compile(rb"Max msgqueue size +%d " % marker)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the process has ended, or is not ours to look into
        return b""


def _read_process(pid: str) -> Process | None:
    name, _, rest = _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")
    fields = rest.split()
    if not fields:
        return None
    command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(
        int(pid), fields[19], int(fields[1]), fields[0] in "ZX", command or name.partition("(")[2]
    )


def _descendants_by_ps() -> list[Process]:
    if os.name != "posix":
        return []
    with subprocess.Popen(
        ["ps", "-axwwo", "pid=,ppid=,lstart=,stat=,command="], stdout=subprocess.PIPE, text=True
    ) as ps:
        lines = ps.communicate()[0].splitlines()
    processes = [_parse_ps(line) for line in lines]
    ours = {os.getpid()}
    found: list[Process] = []
    while new := [p for p in processes if p.parent_pid in ours and p.pid not in ours]:
        found += new
        ours |= {process.pid for process in new}
    return [process for process in found if process.pid != ps.pid]


def _parse_ps(line: str) -> Process:
    # lstart takes five words, such as "Sat Nov 21 06:34:02 2026"
    pid, parent_pid, *rest = line.split(None, 8)
    command = rest[6] if len(rest) > 6 else "?"
    return Process(int(pid), " ".join(rest[:5]), int(parent_pid), rest[5].startswith("Z"), command)


def _fds(pid: str = "self") -> list[tuple[int, str]]:
    folder = f"/proc/{pid}/fd"
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # the fd of this very listing
                found.append(
                    (int(name), os.readlink(f"{folder}/{name}").removesuffix(" (deleted)"))
                )
    return found


def _mappings() -> list[str]:
    mapped = _read("/proc/self/maps")
    lines = mapped.split(b"\n") if b" /dev/shm/" in mapped or b" /memfd:" in mapped else []
    paths = (
        line.split(None, 5)[5] for line in lines if b" /dev/shm/" in line or b" /memfd:" in line
    )
    return [path.decode().removesuffix(" (deleted)") for path in paths]


def _multiprocessing_helpers() -> tuple[set[int], set[int]]:
    """Return pids and fds of multiprocessing's own helpers, which live as long as this process.

    They start with the first shared memory, `spawn` or `forkserver`: the resource tracker and the
    fork server itself (not what it forks).
    """
    tracker: Any = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    server: Any = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None))
    fds = (getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None))
    return {pid for pid in pids if pid is not None}, {fd for fd in fds if fd is not None}
