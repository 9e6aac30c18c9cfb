"""File descriptors: pairs of pipes, and those that forks of the trainer must not keep."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterable

PARENT_FDS: dict[int, tuple[int, int]] = {}
"""Fds of all managers that only the parent uses, each with the file that it refers to."""


def fill_standard_fds() -> None:
    """Open stdin, stdout and stderr on /dev/null where they are closed.

    Otherwise a pipe of ours would get such a number, and what an env prints would go into it.
    """
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)


@functools.cache
def has_pidfds() -> bool:
    """Whether processes can be watched by pidfds: old kernels, and some sandboxes, refuse that."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


def keep_from_children(fd: int) -> None:
    """Make processes that `context: fork` forks give up `fd`."""
    PARENT_FDS[fd] = _file_of(fd)


def forget_fd(fd: int) -> None:
    """Undo `keep_from_children`; call this before the fd is closed."""
    PARENT_FDS.pop(fd, None)


def parent_fds() -> list[int]:
    """Return the fds that a process that is forked now must not keep open.

    Fds that were closed without `forget_fd`, as when an interrupt came in between, are left out:
    another file may have their number by now, and may be the one through which the fork is to get
    its orders.
    """
    return [fd for fd, file in list(PARENT_FDS.items()) if _file_of(fd) == file]


def _file_of(fd: int) -> tuple[int, int]:
    """Return which file an fd refers to; (0, 0), which is no file, if the fd is closed."""
    try:
        stat = os.fstat(fd)
    except OSError:
        return (0, 0)
    return stat.st_dev, stat.st_ino


def let_go_of(fds: Iterable[int]) -> None:
    """Make fds of the parent refer to /dev/null in a fork of it.

    They are not closed: objects that own them may be collected later, and would then close
    whatever has the same number by then.
    """
    with open(os.devnull, "rb") as nothing:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.fstat(fd)
                os.dup2(nothing.fileno(), fd, inheritable=False)


def pipe_pairs() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (read, write) fds of both ends of a new connection."""
    their_read, our_write = os.pipe()
    try:
        our_read, their_write = os.pipe()
    except OSError:
        close_all((their_read, our_write))
        raise
    return (our_read, our_write), (their_read, their_write)


def close_all(fds: Iterable[int]) -> None:
    """Close fds."""
    for fd in fds:
        os.close(fd)
