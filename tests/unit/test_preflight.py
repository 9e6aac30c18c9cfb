"""What is counted before workers are started, with a made-up /proc and cgroups."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path

import pytest

from envmgr.errors import LaunchError
from envmgr.transport.process import preflight

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")


class System:
    """A made-up system."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    system = System(tmp_path)
    monkeypatch.setattr(preflight, "_PROC", system.proc)
    monkeypatch.setattr(preflight, "_CGROUPS", system.cgroups)
    system.write("proc/loadavg", "0.1 0.2 0.3 1/500 4711\n")
    system.write("proc/self/cgroup", "0::/a/b\n")
    system.write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\n")
    (system.proc / "self/fd").mkdir()
    return system


def test_without_any_file_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PROC", tmp_path / "none")
    monkeypatch.setattr(preflight, "_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert preflight.free_processes() == (sys.maxsize, "no limit is known")
    assert preflight.free_memory() == (sys.maxsize, "no limit is known")
    preflight.refuse_too_many_workers(10_000, "server", shared_memory=True)
    preflight.refuse_more_than_there_is(1 << 60)


def test_the_least_of_the_limits_on_processes_counts(system: System) -> None:
    system.write("proc/sys/kernel/pid_max", "32768\n")
    system.write("proc/sys/kernel/threads-max", "30000\n")
    assert preflight.free_processes() == (29_500, "kernel.threads-max is 30000")
    system.write("cgroup/a/b/pids.max", "max\n")
    system.write("cgroup/a/b/pids.current", "40\n")
    system.write("cgroup/a/pids.max", "100\n")
    system.write("cgroup/a/pids.current", "70\n")
    assert preflight.free_processes() == (30, "pids.max of the cgroup is 100")


def test_cgroups_of_version_1(system: System) -> None:
    system.write("proc/self/cgroup", "4:cpu,memory:/x\n3:pids:/x\n")
    system.write("cgroup/pids/x/pids.max", "9\n")
    system.write("cgroup/pids/x/pids.current", "10\n")
    system.write("cgroup/memory/x/memory.limit_in_bytes", "1000\n")
    system.write("cgroup/memory/x/memory.usage_in_bytes", "900\n")
    system.write("cgroup/memory/x/memory.stat", "cache 1\ntotal_inactive_file 50\n")
    assert preflight.free_processes()[0] == 0
    assert preflight.free_memory()[0] == 150


def test_the_least_share_of_the_cores_counts(system: System) -> None:
    assert preflight.cpu_quota() is None
    system.write("cgroup/a/b/cpu.max", "max 100000\n")
    assert preflight.cpu_quota() is None
    system.write("cgroup/a/b/cpu.max", "250000 100000\n")
    assert preflight.cpu_quota() == 2.5
    system.write("cgroup/a/cpu.max", "150000 100000\n")
    assert preflight.cpu_quota() == 1.5
    system.write("proc/self/cgroup", "4:cpu,cpuacct:/x\n")
    system.write("cgroup/cpu/x/cpu.cfs_quota_us", "-1\n")
    system.write("cgroup/cpu/x/cpu.cfs_period_us", "100000\n")
    assert preflight.cpu_quota() is None
    system.write("cgroup/cpu/x/cpu.cfs_quota_us", "400000\n")
    assert preflight.cpu_quota() == 4.0


@pytest.mark.parametrize(
    ("uid", "capabilities", "free"),
    [(0, "0", sys.maxsize), (7, "0", 580), (7, f"{1 << 24:x}", sys.maxsize)],
)
def test_the_limit_of_a_user_counts_threads(
    system: System, monkeypatch: pytest.MonkeyPatch, uid: int, capabilities: str, free: int
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (600, 600))
    system.write("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\n")
    for pid, (owner, n_threads) in enumerate([(7, 15), (7, 5), (8, 100)], start=10):
        status = f"Name:\tx\nUid:\t{owner}\t0\t0\t0\nThreads:\t{n_threads}\n"
        system.write(f"proc/{pid}/status", status)
    assert preflight.free_processes()[0] == free


def test_what_is_short_is_named_with_both_figures(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.write("cgroup/a/b/pids.max", "14\n")
    system.write("cgroup/a/b/pids.current", "4\n")
    preflight.refuse_too_many_workers(7, "server", shared_memory=True)
    with pytest.raises(LaunchError, match=r"11 processes.*only 10 more.*pids\.max of the cgroup"):
        preflight.refuse_too_many_workers(8, "server", shared_memory=True)
    with pytest.raises(LaunchError, match=r"17 processes"):
        preflight.refuse_too_many_workers(8, "spawn", shared_memory=True)


@pytest.mark.parametrize(("hard", "advice"), [(4096, "ulimit -n"), (50, "the hard limit, 50,")])
def test_fds_are_counted_with_those_that_are_open(
    system: System, monkeypatch: pytest.MonkeyPatch, hard: int, advice: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (50, hard))
    for fd in range(16):
        system.write(f"proc/self/fd/{fd}", "")
    preflight.refuse_too_many_workers(1, "server", shared_memory=True)
    with pytest.raises(LaunchError, match=r"56 file descriptors.*only 34 more.*16 are open") as it:
        preflight.refuse_too_many_workers(10, "fork", shared_memory=True)
    assert advice in str(it.value)


def test_memory_of_the_system_and_of_the_cgroup(system: System) -> None:
    system.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 40 kB\nSwapFree: 2 kB\n")
    preflight.refuse_more_than_there_is(42 * 1024)
    with pytest.raises(OSError, match="MemAvailable and SwapFree") as raised:
        preflight.refuse_more_than_there_is(42 * 1024 + 1)
    assert raised.value.errno == errno.ENOMEM
    system.write("cgroup/a/memory.max", "10000\n")
    system.write("cgroup/a/memory.current", "9000\n")
    system.write("cgroup/a/memory.stat", "anon 1\ninactive_file 500\n")
    assert preflight.free_memory() == (1500, "memory.max of the cgroup is 0.0 MiB")
