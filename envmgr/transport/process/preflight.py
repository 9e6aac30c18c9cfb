"""Limits of the system, checked before they are hit: fds, processes, memory.

An error names what is short, how much of it is needed, and how much there is. No limit is raised
here: programs that use `select` fail with fds above 1023, which is why the soft limit is often
1024.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from envmgr.errors import LaunchError
from envmgr.proc import fields_of

_FDS_OF_A_MANAGER = 14
"""Wake-ups, background thread, memory, bells, epolls, the server's or the workers' ends."""

_FDS_OF_BRANCHES = 5
"""Connections to branches of the server and to templates, which import what workers need."""

_FDS_WHILE_STARTING = 12
"""The other ends of a connection, and the fds that it takes for a moment to start a process."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_UNLIMITED = sys.maxsize


def refuse_too_many_workers(n_workers: int, context: str, *, shared_memory: bool) -> None:
    """Refuse to start workers for which there are not enough fds or processes.

    Args:
        n_workers: how many are to be started.
        context: how they are started.
        shared_memory: whether they get bells.

    Raises:
        LaunchError: saying how many are needed and how many there are.
    """
    by_server = context in ("server", "fork")
    fds = n_workers * (2 if by_server else 5) + _FDS_OF_A_MANAGER + _FDS_WHILE_STARTING
    fds += min(n_workers, 128) if shared_memory else 0
    fds += _FDS_OF_BRANCHES if context == "server" else 0
    _refuse_too_few_fds(n_workers, fds)
    # A worker of `spawn` and `forkserver` has a thread that watches the trainer.
    processes = n_workers * (1 if by_server else 2) + (3 if context == "server" else 1)
    free, why = free_processes()
    if processes > free:
        raise LaunchError(
            f"{n_workers} workers need {processes} processes and threads, and only {free} more may "
            f"be started ({why}). Nothing was started. Raise that limit, end other processes, or "
            "have the envs share workers (num_workers)."
        )


def _refuse_too_few_fds(n_workers: int, needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = _n_open_fds()
    if soft == resource.RLIM_INFINITY or n_open is None or n_open + needed <= soft:
        return
    wanted = n_open + needed
    allowed = hard == resource.RLIM_INFINITY or wanted <= hard
    how = f"`ulimit -n {wanted}`, or resource.setrlimit in the script"
    raise LaunchError(
        f"{n_workers} workers need {needed} file descriptors, and this process may open only "
        f"{max(soft - n_open, 0)} more (RLIMIT_NOFILE is {soft}, {n_open} are open). Nothing was "
        f"started. Raise the limit ({how if allowed else f'the hard limit, {hard}, is too low'}), "
        "or have the envs share workers (num_workers)."
    )


def _n_open_fds() -> int | None:
    try:
        return len(os.listdir(_PROC / "self/fd"))
    except OSError:
        return None


def free_processes() -> tuple[int, str]:
    """Return how many processes may still be started, at least, and what limits that."""
    total = _n_threads_of_all()
    found = [(_UNLIMITED, "no limit is known")]
    if total is not None:
        for name in ("pid_max", "threads-max"):
            limit = _number(_PROC / "sys/kernel" / name)
            if limit is not None:
                found.append((max(limit - total, 0), f"kernel.{name} is {limit}"))
    found += _free_of_user(total)
    for folder in _cgroup_folders("pids"):
        limit, current = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and current is not None:
            found.append((max(limit - current, 0), f"pids.max of the cgroup is {limit}"))
    return min(found)


def _free_of_user(total: int | None) -> Iterator[tuple[int, str]]:
    if sys.platform != "linux" or _is_exempt():
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY:
        return
    why = f"RLIMIT_NPROC is {limit}"
    if total is not None and total * 2 < limit:  # no need to count
        yield limit - total, why
    else:
        yield max(limit - _n_threads_of_user(), 0), why


def _is_exempt() -> bool:
    """Return whether RLIMIT_NPROC does not apply to this process."""
    capabilities = int(fields_of(_PROC / "self/status").get("CapEff", "0"), 16)
    return (
        os.getuid() == 0
        or bool(capabilities >> _CAP_SYS_ADMIN & 1)
        or bool(capabilities >> _CAP_SYS_RESOURCE & 1)
    )


def _n_threads_of_all() -> int | None:
    fields = _text(_PROC / "loadavg").split()
    return int(fields[3].partition("/")[2]) if len(fields) > 3 else None


def _n_threads_of_user() -> int:
    """Return how many threads all processes of this user have: RLIMIT_NPROC counts these."""
    uid, count = str(os.getuid()), 0
    for name in os.listdir(_PROC):
        if name.isdecimal():
            status = fields_of(_PROC / name / "status")
            if status.get("Uid", "").split()[:1] == [uid]:
                count += int(status.get("Threads", "1"))
    return count


def refuse_more_than_there_is(nbytes: int) -> None:
    """Refuse to allocate shared memory for which the kernel would have to kill a process.

    Raises:
        OSError: ENOMEM, saying how much there is.
    """
    free, why = free_memory()
    if nbytes > free:
        text = f"{os.strerror(errno.ENOMEM)}: {free / 2**20:.1f} MiB can be had ({why})"
        raise OSError(errno.ENOMEM, text)


def free_memory() -> tuple[int, str]:
    """Return the bytes that may still be allocated, and what limits them."""
    found = [(_UNLIMITED, "no limit is known")]
    meminfo = fields_of(_PROC / "meminfo")
    if available := meminfo.get("MemAvailable"):
        n_kib = sum(int(text.split()[0]) for text in (available, meminfo.get("SwapFree", "0 kB")))
        found.append((n_kib * 1024, "MemAvailable and SwapFree of the system"))
    for folder in _cgroup_folders("memory"):
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, current = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and current is not None:
                lines = _text(folder / "memory.stat").splitlines()
                cached = [int(x.split()[1]) for x in lines if x.split()[:1] == [names[2]]]
                free = max(limit - current + sum(cached), 0)
                found.append((free, f"{names[0]} of the cgroup is {limit / 2**20:.1f} MiB"))
    return min(found)


def cpu_quota() -> float | None:
    """Return how many cores' time the cgroup of this process may use; None without a limit."""
    found = []
    for folder in _cgroup_folders("cpu"):
        words = _text(folder / "cpu.max").split()
        words = words or [
            _text(folder / f"cpu.cfs_{one}_us").strip() for one in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, which limit it, too."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        # In a container the path may be that of the host; then the container's group is mounted.
        yield from (f for f in (folder, *folder.parents) if f == root or root in f.parents)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max", or not there


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
