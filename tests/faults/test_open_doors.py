"""Nobody can come in from outside: no listening sockets, no secrets that were to stay out."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from tests.contract.envs import Do
from tests.contract.harness import Setup, World, over, ready_all, step_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONTEXTS = [Setup("subprocess", context) for context in ("server", "fork", "spawn", "forkserver")]
SECRET = "do-not-tell-0c5f2a"  # noqa: S105 - a word to look for


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def listening() -> dict[str, str]:
    """Return what listens in this network namespace: inode and address."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[fields[9]] = f"{table} {fields[1]}"
    for table in ("udp", "udp6"):  # any of them takes what comes
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            found[fields[9]] = f"{table} {fields[1]}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000:
            found[fields[6]] = fields[7] if len(fields) > 7 else "unix"
    return found


def test_the_search_sees_a_listening_socket() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert sockets_of(os.getpid()) & listening().keys()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0envmgr-test-of-the-search")
        sock.listen()
        assert sockets_of(os.getpid()) & listening().keys()


@over(*CONTEXTS)
def test_nothing_listens_while_a_manager_runs(world: World, setup: Setup) -> None:
    already = {inode for pid in family(os.getpid()) for inode in sockets_of(pid)}
    manager = world.make(setup)
    ready_all(manager)
    step_all(manager, {0: 1, 1: 2, 2: 3})
    pids = family(os.getpid())
    assert {worker["pid"] for worker in manager.stats()["workers"]} <= set(pids)
    listeners = listening()
    open_now = {inode for pid in pids for inode in sockets_of(pid)} - already
    found = {listeners[inode] for inode in open_now if inode in listeners}
    if setup.context == "forkserver":  # that of multiprocessing listens in a folder of its own
        assert len(found) <= 1
        for path in found:
            mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
            assert mode == 0o700, path
        return
    assert not found


@over(*CONTEXTS)
def test_what_is_denied_does_not_reach_workers_nor_errors(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    manager = world.make(setup, env_num=2, worker_env={"deny": ["*_TOKEN"]})
    assert all("MY_TOKEN" not in environment for environment in manager.call("environment"))
    if setup.context == "server":  # others are copies of the trainer, or get its environment first
        for worker in manager.stats()["workers"]:
            assert SECRET.encode() not in Path(f"/proc/{worker['pid']}/environ").read_bytes()
    ready_all(manager)
    for action in (Do.RAISE, Do.KILL, Do.SEGV):
        error = step_all(manager, {0: action})[0].info["error"]
        ready_all(manager)
        assert SECRET not in str(error)
        assert SECRET not in repr(vars(error))
