"""What a worker leaves behind when it dies: the end of its stderr, and faulthandler's report.

All reports are written into one anonymous, sparse file of the manager, in which each host has a
section. So a worker never waits for a reader, the trainer needs one fd for all of them, and the
file is read only after a death. docs/decisions/0014 says why not pipes, or a file each.

A living worker can tell where it is: when it is sent `STACKS_SIGNAL`, it writes the stacks of all
its threads into a file of its own. The process that asks empties that file first, through `/proc`;
a worker may be asked any number of times, by the trainer and by other processes of the same user.

What is written to `sys.stderr` goes to the trainer's stderr as usual, and a copy of its end is
kept. Fatal signals are reported by faulthandler from inside a signal handler, into one fd: the
report is kept here, and the trainer's log has it with the failure. What C libraries write to fd 2
goes to the trainer's stderr and is not kept.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

ARE_KEPT = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether there are reports; a constant of the platform, so trainer and workers agree on it."""

SECTION_BYTES = 1 << 20

STDERR_AT = 1 << 19
"""Offset of a host's stderr in its section; faulthandler's report is in front of it."""

STACKS_FILE = "envmgr-stacks"
"""Name of the anonymous file that a worker writes its stacks into."""

STACKS_SIGNAL: int | None = None if sys.platform != "linux" else signal.SIGRTMIN + 11
"""Makes a worker write down its stacks: a real-time signal that nobody else is likely to use."""

STDERR_BYTES = 2048

RUNNING_AT = STDERR_AT + STDERR_BYTES
"""Where a worker of async envs says which of them it is running: the env_id + 1, or 0 for none."""

RUNNING = struct.Struct("<q")

REPORT_BYTES = 16384


class CrashRecorder:
    """A recorder of the end of a worker's stderr and of reports of fatal signals.

    Args:
        fd: file descriptor of the file for reports; closed here.
        index: index of the worker among the manager's hosts.
    """

    def __init__(self, fd: int, index: int) -> None:
        section = index * SECTION_BYTES
        self._kept = bytearray()
        self._area = mmap.mmap(fd, mmap.PAGESIZE, offset=section + STDERR_AT)
        self._report = _opened_anew(fd, section)
        os.close(fd)
        faulthandler.enable(self._report)
        if STACKS_SIGNAL is not None:  # written by the handler itself, which needs no GIL
            faulthandler.register(STACKS_SIGNAL, _file_of_stacks())
        self._writes = True
        os.register_at_fork(after_in_child=self._stop_in_fork)
        if sys.stderr is not None:
            self._keep_copy_of(sys.stderr)

    def note_running(self, number: int) -> None:
        """Record which env is running from now on: its env_id + 1, or 0 for none."""
        RUNNING.pack_into(self._area, RUNNING_AT - STDERR_AT, number)

    def _keep_copy_of(self, stream: Any) -> None:
        """Keep a copy of what is written to a stream, without replacing the stream object.

        Logging handlers and others hold on to that object.
        """
        write: Callable[[str], int] = stream.write

        def write_and_keep(text: str, /) -> int:
            if self._writes and isinstance(text, str):
                self._keep(text)
            return write(text)

        with contextlib.suppress(AttributeError):  # a stream that does not let itself be changed
            stream.write = write_and_keep

    def _keep(self, text: str) -> None:
        # Without a lock, which a signal handler or a fork could find taken: at worst two threads
        # that write at once lose some of what is kept.
        kept = self._kept + text[-STDERR_BYTES:].encode(errors="backslashreplace")
        self._kept = kept = kept[-STDERR_BYTES:]
        self._area[: len(kept)] = bytes(kept)

    def _stop_in_fork(self) -> None:
        """Have processes that the env forks write to stderr only."""
        self._writes = False
        with contextlib.suppress(Exception):  # a stderr without an fd
            faulthandler.enable()


def _opened_anew(fd: int, offset: int) -> int:
    """Return another fd of a file, which all workers write into, with a position of its own."""
    opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    os.lseek(opened, offset, os.SEEK_SET)
    return opened


def _file_of_stacks() -> int:
    """Return the fd of a file in append mode: writes go to its end, wherever that is by then."""
    fd = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    finally:
        os.close(fd)


def record_crashes(fd: int, index: int) -> CrashRecorder | None:
    """Record what this worker leaves behind when it dies, as far as that can be done."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or no memory: stderr is as it was
        return CrashRecorder(fd, index)
    return None
