"""File descriptors: pairs of pipes, and those that forks of the trainer must not keep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

PARENT_FDS: set[int] = set()
"""Fds that only the parent uses, of all managers: a forked process must not keep them open."""


def fill_standard_fds() -> None:
    """Open stdin, stdout and stderr on /dev/null where they are closed.

    Else a pipe of ours would get their number, and what an env prints would go into that pipe.
    """
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)


def keep_from_children(fd: int) -> None:
    """Let processes that `context: fork` forks give `fd` up."""
    PARENT_FDS.add(fd)


def forget_fd(fd: int) -> None:
    """Take back `keep_from_children`, before closing."""
    PARENT_FDS.discard(fd)


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
