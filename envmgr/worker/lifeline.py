"""Ends workers with the trainer: the kernel kills the readers of a pipe when its owner is gone.

A thread or a signal handler cannot end a worker that hangs in C code with the GIL held, and the
signal of `PR_SET_PDEATHSIG` comes when the thread that started the worker ends, or never, if a fork
server started it. The end of a pipe has neither fault: the read end is set to send SIGKILL
(F_SETSIG) to the process group of the worker (F_SETOWN) when the last write end is closed
(O_ASYNC). So the worker and what it has started end with the owner, at the same moment and whatever
they are doing. With `context: server` that owner is the worker server, which watches the trainer
and ends with it. Only Linux has F_SETSIG: elsewhere `end_with_parent` of `envmgr.worker.process`
ends a worker once its code lets go of the GIL. docs/decisions/0014-workers-end-with-the-trainer.md
has the details.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import weakref

if sys.platform == "linux":
    import fcntl


class Lifeline:
    """A pipe that nobody writes to, in the process that others are to end with.

    Attributes:
        read_fd: the read end, which those others watch, see `die_with_owner`; -1 once closed.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def read_end(self) -> int:
        """Return a new read end, shared with nobody, for `kill_with`; the caller closes it.

        Raises:
            OSError: there is no /proc.
        """
        return _opened_anew(self.read_fd)

    def close(self) -> None:
        """End the processes that watch it; in a fork, just let go of it."""
        fds, self.read_fd, self._write_fd = (self.read_fd, self._write_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def keep_to_this_process(self) -> None:
        """Have forks of this process let go of it, since they may outlive this process."""
        _NOT_FOR_FORKS.add(self)


_NOT_FOR_FORKS: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _close_in_fork() -> None:
    for lifeline in list(_NOT_FOR_FORKS):
        lifeline.close()
    _NOT_FOR_FORKS.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def _opened_anew(read_fd: int) -> int:
    # The process to signal is a property of the open file, and others hold this one.
    return os.open(f"/proc/self/fd/{read_fd}", os.O_RDONLY | os.O_NONBLOCK)


def kill_with(read_end: int, owner: int) -> None:
    """Have the kernel kill a process when the owner of a lifeline is gone.

    Args:
        read_end: a read end that nobody else signals through; the process has to hold it, too.
        owner: the pid of the process, or minus the pid of the leader of a process group.
    """
    if sys.platform == "linux":
        fcntl.fcntl(read_end, fcntl.F_SETOWN, owner)
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_NONBLOCK | fcntl.FASYNC)


def die_with_owner(read_fd: int) -> None:
    """Have the kernel kill the group that this process leads when the owner of a lifeline is gone.

    Does nothing where the kernel cannot do that.

    Args:
        read_fd: the read end of the lifeline; may be closed afterwards.
    """
    if sys.platform != "linux" or os.getpgrp() != os.getpid():
        return
    try:
        fd = _opened_anew(read_fd)  # stays open, and nobody reads it
    except OSError:  # no /proc
        return
    kill_with(fd, -os.getpgrp())
    poll = select.poll()
    poll.register(read_fd, 0)
    if poll.poll(0):  # it had ended before the kernel knew that we care
        os.killpg(os.getpgrp(), signal.SIGKILL)
