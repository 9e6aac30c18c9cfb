"""What workers have in common with their manager: memory, doorbells, and a file for last words."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile

from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.process.last_words import LastWords
from envmgr.transport.process.preflight import refuse_more_than_there_is
from envmgr.transport.process.stacks import Stacks
from envmgr.wire.block import block_is_possible
from envmgr.wire.hosts import HostSpec
from envmgr.wire.large_messages import LargeMessageBuffers
from envmgr.worker.crash_report import ARE_KEPT

_MOST_HOST_BELLS = 128
"""How many hosts have a doorbell. With more, fds would get scarce; other hosts are rung through
their pipe."""


class SharedFiles:
    """The fds that every worker gets, and a doorbell for each.

    Args:
        has_memory: whether there is shared memory, and with it a doorbell of the parent.

    Attributes:
        bell: the parent's doorbell; None where steps cannot be posted.
        buffers: where workers put large messages; None where `bell` is.
        host_bells: the doorbells of workers, by host_id.

    Raises:
        OSError: there are not enough fds.
    """

    def __init__(self, *, has_memory: bool) -> None:
        self.host_bells: dict[int, int] = {}
        self._memory: mmap.mmap | None = None
        self._stacks = Stacks()
        with contextlib.ExitStack() as opened:  # closed again if there is not enough for all
            self._last_words = LastWords() if ARE_KEPT else None
            if self._last_words is not None:
                opened.callback(self._last_words.close)
            self._memory_fd = _anonymous_file() if has_memory else None
            if self._memory_fd is not None:
                opened.callback(os.close, self._memory_fd)
            self.bell: int | None = None
            self.buffers: LargeMessageBuffers | None = None
            if self._memory_fd is not None and block_is_possible():
                self.bell, self.buffers = _doorbell(), LargeMessageBuffers(self._memory_fd)
            opened.pop_all()
        for fd in self._fds:
            keep_from_children(fd)

    @property
    def _fds(self) -> tuple[int, ...]:
        words = None if self._last_words is None else self._last_words.fd
        return tuple(fd for fd in (words, self._memory_fd, self.bell) if fd is not None)

    # -- workers ----------------------------------------------------------------------------

    def prepare(self, spec: HostSpec) -> tuple[int, ...]:
        """Return the fds for a new worker; the last is its own doorbell, if it still gets one.

        Raises:
            OSError: there are no more fds, or no more memory.
        """
        if self._last_words is not None:
            self._last_words.prepare(spec.index)
        if self.bell is None or len(self.host_bells) >= _MOST_HOST_BELLS:
            return self._fds
        bell = self.host_bells[spec.host_id] = _doorbell()
        keep_from_children(bell)
        return (*self._fds, bell)

    def drop_bell(self, host_id: int) -> None:
        """Close the doorbell of a worker, if it has one."""
        bell = self.host_bells.pop(host_id, None)
        if bell is not None:
            forget_fd(bell)
            os.close(bell)

    def running_in(self, index: int) -> int:
        """Return the async env that the host at `index` says it is running; -1 for none."""
        return -1 if self._last_words is None else self._last_words.running(index)

    def last_words(self, index: int) -> str:
        """Return what the dead host at `index` has left; see `LastWords.take`."""
        return "" if self._last_words is None else self._last_words.take(index)

    def stacks(self, pid: int) -> str:
        """Return where a worker hangs; see `Stacks.of`."""
        return "" if self._last_words is None else self._stacks.of(pid)

    # -- what the parent does with it ---------------------------------------------------------

    def silence_bell(self) -> None:
        """Take note that the parent's doorbell was rung."""
        if self.bell is not None:
            try:  # not `suppress`: this runs for each batch
                os.eventfd_read(self.bell)
            except BlockingIOError:
                return

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return the shared memory with all of its pages; None if there is none, or no need.

        Raises:
            OSError: there is not enough of it.
        """
        if self._memory_fd is None or nbytes == 0:
            return None
        refuse_more_than_there_is(nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._memory_fd, 0, nbytes)
        else:
            os.ftruncate(self._memory_fd, nbytes)
        self._memory = mmap.mmap(self._memory_fd, nbytes)
        return memoryview(self._memory)

    def close(self) -> None:
        """Release everything."""
        # The mapping is not closed: arrays that were handed out keep it alive, and it is unmapped
        # with the last of them.
        nbytes, self._memory = 0 if self._memory is None else len(self._memory), None
        if self._memory_fd is not None:
            os.ftruncate(self._memory_fd, nbytes)  # so that the arrays keep no buffers alive
        for host_id in list(self.host_bells):
            self.drop_bell(host_id)
        fds = self._fds
        self._memory_fd = self.bell = self.buffers = self._last_words = None
        for fd in fds:
            forget_fd(fd)
            os.close(fd)


def _doorbell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _anonymous_file() -> int:
    """Return an fd of shared memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("envmgr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
