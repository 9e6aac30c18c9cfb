"""The guard that every test runs under finds what is left, and only that."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from tests.leak_guard import LeakGuard, _descendants_by_ps

REPOSITORY = Path(__file__).parents[2]
WAIT_FOR_STDIN = [sys.executable, "-S", "-c", "input()"]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def guard() -> LeakGuard:
    return LeakGuard()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        WAIT_FOR_STDIN, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        yield child
        child.kill()


def only(leaks: list[str]) -> str:
    (leak,) = leaks
    return leak


def test_nothing_is_found_where_nothing_is_left(guard: LeakGuard) -> None:
    before = guard.snapshot()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert guard.wait_until_clean(before, settle_s=0) == []


def test_a_thread_is_found_until_it_ends(guard: LeakGuard) -> None:
    before = guard.snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left alone")
    thread.start()
    assert only(guard.wait_until_clean(before, settle_s=0)) == "thread 'left alone'"
    end.set()
    thread.join()
    assert guard.wait_until_clean(before, settle_s=0) == []


def test_what_ends_by_itself_in_time_is_no_leak(guard: LeakGuard) -> None:
    before = guard.snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    timer = threading.Timer(0.05, end.set)
    timer.start()
    assert guard.wait_until_clean(before) == []
    thread.join()
    timer.join()


@linux_only
def test_an_fd_is_found_with_its_target(guard: LeakGuard, tmp_path: Path) -> None:
    before = guard.snapshot()
    with open(tmp_path / "forgotten", "w") as file:
        expected = f"fd {file.fileno()} -> {tmp_path / 'forgotten'}"
        assert only(guard.wait_until_clean(before, settle_s=0)) == expected
    assert guard.wait_until_clean(before, settle_s=0) == []


@linux_only
def test_a_living_child_is_found_with_its_command_and_killed(guard: LeakGuard) -> None:
    before = guard.snapshot()
    read_end, write_end = os.pipe()
    hears_end, says_end = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-c", "input(1)"],
        {},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, read_end, 0),
            (os.POSIX_SPAWN_DUP2, says_end, 1),
            (os.POSIX_SPAWN_DUP2, says_end, 2),
        ],
    )
    os.close(read_end)
    os.close(says_end)
    assert os.read(hears_end, 1) == b"1", "it runs: before that it may have no command yet"
    os.close(hears_end)
    leak = only([line for line in guard.wait_until_clean(before, settle_s=0) if "fd" not in line])
    os.close(write_end)
    assert leak.startswith(f"process {child}, child of {os.getpid()}: ")
    assert leak.endswith("-S -c input(1)")
    with pytest.raises(ChildProcessError):  # it was killed and reaped
        os.waitpid(child, 0)


@linux_only
def test_a_zombie_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    leak = only(guard.wait_until_clean(before, settle_s=0))
    assert leak == f"zombie process {child} (true), not reaped by {os.getpid()}"


@linux_only
def test_an_orphan_in_a_session_of_its_own_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    script = (
        "import subprocess as s, sys;"
        "child = s.Popen(sys.argv[1:], stdin=0, stdout=s.DEVNULL, stderr=s.DEVNULL,"
        " start_new_session=True, env={}); print(child.pid); child.returncode = 0"
    )
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as stdin, os.fdopen(write_end, "w"):
        parent = subprocess.run(
            [sys.executable, "-c", script, *WAIT_FOR_STDIN],
            stdin=stdin,
            capture_output=True,
            check=True,
        )
        leaks = guard.wait_until_clean(before, settle_s=0)
    (leak,) = (line for line in leaks if line.startswith("process"))
    assert leak.startswith(f"process {int(parent.stdout)}, child of ")


@linux_only
def test_named_shared_memory_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    memory = shared_memory.SharedMemory(create=True, size=16)
    leaks = guard.wait_until_clean(before, settle_s=0)
    assert f"shared memory /dev/shm/{memory.name}" in leaks
    assert f"mapping of /dev/shm/{memory.name}" in leaks
    memory.close()
    memory.unlink()
    assert guard.wait_until_clean(before, settle_s=0) == []


@linux_only
def test_memory_that_stays_mapped_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    fd = os.memfd_create("forgotten")
    os.ftruncate(fd, mmap.PAGESIZE)
    memory = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    assert "mapping of /memfd:forgotten" in guard.wait_until_clean(before, settle_s=0)
    memory.close()
    assert guard.wait_until_clean(before, settle_s=0) == []


@linux_only
def test_a_semaphore_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    semaphore = multiprocessing.get_context("fork").Semaphore()
    assert only(guard.wait_until_clean(before, settle_s=0)).startswith("mapping of /dev/shm/sem.")
    del semaphore
    assert guard.wait_until_clean(before, settle_s=0) == []


def test_what_was_there_before_is_no_leak(
    guard: LeakGuard, sleeper: subprocess.Popen[bytes]
) -> None:
    before = guard.snapshot()
    assert guard.wait_until_clean(before, settle_s=0) == []
    assert sleeper.poll() is None


def test_without_proc_children_come_from_ps(sleeper: subprocess.Popen[bytes]) -> None:
    found: dict[int, Any] = {}
    while not found or found[sleeper.pid].command.startswith("["):  # it has just been started
        found = {process.pid: process for process in _descendants_by_ps()}
    assert found[sleeper.pid].parent_pid == os.getpid()
    assert not found[sleeper.pid].zombie
    assert found[sleeper.pid].command.endswith("-S -c input()")


def test_multiprocessings_own_helpers_are_no_leak(guard: LeakGuard) -> None:
    before = guard.snapshot()
    process = multiprocessing.get_context("forkserver").Process(target=abs, args=(-1,))
    process.start()
    process.join()
    process.close()
    assert guard.wait_until_clean(before) == []


def test_what_the_fork_server_forks_is_a_leak(guard: LeakGuard) -> None:
    before = guard.snapshot()
    process = multiprocessing.get_context("forkserver").Process(target=signal.pause)
    process.start()
    leaks = guard.wait_until_clean(before, settle_s=0)
    process.join()
    assert any(leak.startswith(f"process {process.pid}, child of ") for leak in leaks)
    process.close()


@linux_only
def test_a_test_that_leaks_fails(tmp_path: Path) -> None:
    (tmp_path / "test_leaking.py").write_text(
        "import subprocess\n"
        "from tests import leak_guard\n"
        "leak_guard.SETTLE_S = 0.1\n"
        "def test_leaking():\n"
        "    subprocess.Popen(['sleep', '600']).returncode = 0\n"
        "def test_clean():\n"
        "    pass\n"
    )
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout
    assert "2 passed, 1 error" in result.stdout
    assert "left behind:\n  process " in result.stdout
    assert ": sleep 600" in result.stdout
