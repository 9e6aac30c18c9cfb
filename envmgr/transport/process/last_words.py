"""The parent's side of workers' crash reports, which `envmgr.worker.crash_report` writes."""

from __future__ import annotations

import logging
import mmap
import os
import signal

from envmgr.texts import logged
from envmgr.transport.base import HostDied
from envmgr.transport.process.stacks import of_envs
from envmgr.worker.crash_report import (
    REPORT_BYTES,
    RUNNING,
    RUNNING_AT,
    SECTION_BYTES,
    STDERR_AT,
    STDERR_BYTES,
)

_MOST_LINES = 40

_FAULTS = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
)


class LastWords:
    """The file of last words, as the parent reads it.

    Attributes:
        fd: the fd of the file, which workers get.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("envmgr-last-words", os.MFD_CLOEXEC)

    def prepare(self, index: int) -> None:
        """Make room for what the host at `index` writes.

        Raises:
            OSError: there is not enough memory.
        """
        os.posix_fallocate(self.fd, index * SECTION_BYTES + STDERR_AT, mmap.PAGESIZE)

    def take(self, index: int) -> str:
        """Return what the dead host at `index` has left, and make room for the next one."""
        section = index * SECTION_BYTES
        stderr = self._take(section + STDERR_AT, STDERR_BYTES)
        lines = stderr.splitlines()
        if len(lines) > 1 and len(stderr.encode()) >= STDERR_BYTES:
            del lines[0]  # its beginning is lost
        report = of_envs(self._take(section, REPORT_BYTES)).splitlines()
        os.pwrite(self.fd, bytes(RUNNING.size), section + RUNNING_AT)
        return "\n".join([*lines[-_MOST_LINES:], *report[:_MOST_LINES]]).rstrip()

    def running(self, index: int) -> int:
        """Return the async env that the host at `index` says it is running, or was; -1 for none."""
        data = os.pread(self.fd, RUNNING.size, index * SECTION_BYTES + RUNNING_AT)
        return int(RUNNING.unpack(data)[0]) - 1 if len(data) == RUNNING.size else -1

    def _take(self, offset: int, most_bytes: int) -> str:
        data = os.pread(self.fd, most_bytes, offset)
        if data.strip(b"\0"):
            os.pwrite(self.fd, bytes(len(data)), offset)
        return data.rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.fd)


def warn_of_fault(died: HostDied) -> None:
    """Log a fatal fault of a worker that was asked to end, since no failure reports it."""
    if died.exit_status in _FAULTS and died.last_words:
        logged(
            logging.WARNING,
            "a worker that was to end was killed by %s\n\nThe end of its stderr:\n%s",
            signal.Signals(-died.exit_status).name,
            died.last_words,
        )
