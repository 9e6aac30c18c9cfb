"""The board of a manager: a file where other processes (`envmgr top`) read how its envs are doing.

The board is a file without a name. Only the trainer writes it, now and then. Processes of the same
user find it among the open files of the trainer (`/proc/<pid>/fd`) and read it. So the trainer need
not do anything for them: it may be in a long wait, in code of its own, stopped, or hung with the
GIL held.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, unique
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.config import MAX_ENV_NUM
from envmgr.errors import UnreadableRunError
from envmgr.spaces import Array
from envmgr.wire.latencies import NUMBERS

FILE = "envmgr-board"
VERSION = 1
HEADER_BYTES = 4096
TEXT_BYTES = 2048
_TRIES = 50

_MOST_ENVS = 2 * MAX_ENV_NUM
"""Spares included. A reader of a board allocates, and goes through, as much as its header says."""


@unique
class Activity(IntEnum):
    """What an env is doing, as its trainer knows it."""

    NONE = 0
    READY = 1
    STARTING = 2
    RESETTING = 3
    STEPPING = 4
    QUEUED = 5
    ANSWERED = 6
    CANCELLING = 7
    CALLING = 8
    ENDING = 9
    PAUSING = 10

    @property
    def label(self) -> str:
        """The activity's name in a dump."""
        return _LABELS[self]


_LABELS = {
    Activity.NONE: "no worker",
    Activity.READY: "waits for an action",
    Activity.STARTING: "construction",
    Activity.RESETTING: "reset",
    Activity.STEPPING: "step",
    Activity.QUEUED: "waits for its worker",
    Activity.ANSWERED: "waits to be gathered",
    Activity.CANCELLING: "cancelled step",
    Activity.CALLING: "call",
    Activity.ENDING: "its worker ends",
    Activity.PAUSING: "pause before a retry, or before its turn",
}

COUNTERS = ("actions", "timesteps", "episodes", "failures", "renewals")


class BoardPlan(NamedTuple):
    """How large a board is, and whose it is.

    Attributes:
        pid: the pid of the trainer.
        kind: `manager.type`.
        total: how many envs and spares there are.
        latencies: how many numbers of `wire.latencies` there are for each env and kind; 0 if none
            are measured.
        number: grows with each launch in the trainer's process, so that managers can be told apart.
    """

    pid: int
    kind: str
    env_num: int
    total: int
    n_hosts: int
    latencies: int = 0
    number: int = 0

    def columns(self) -> list[tuple[str, tuple[int, ...], Any]]:
        """Return name, shape and dtype of each column, in their order."""
        n, hosts = self.total, self.n_hosts
        return [
            ("version", (1,), np.uint64),
            ("looked_at", (1,), np.float64),
            ("call_since", (1,), np.float64),
            ("counters", (len(COUNTERS),), np.uint64),
            ("call", (64,), np.uint8),
            ("where", (TEXT_BYTES,), np.uint8),
            ("pids", (hosts,), np.int64),
            ("states", (n,), np.uint8),
            ("activities", (n,), np.uint8),
            ("hosts", (n,), np.int64),
            ("since", (n,), np.float64),
            ("generations", (n,), np.uint64),
            ("episodes", (n,), np.uint64),
            ("failed", (n,), np.uint64),
            ("latencies", (2, n, self.latencies), np.float64),
            ("errors", (n, TEXT_BYTES), np.uint8),
        ]

    @property
    def nbytes(self) -> int:
        """Size of a board."""
        return HEADER_BYTES + sum(
            _aligned(math.prod(shape) * np.dtype(dtype).itemsize)
            for _, shape, dtype in self.columns()
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class Board:
    """The columns of a board, as arrays over its memory.

    Args:
        memory: `plan.nbytes` bytes.
        plan: how large the board is.

    Attributes:
        plan: how large the board is, and whose.
        version: (1,) odd while the board is being written.
        looked_at: (1,) when the board was written last, on the monotonic clock, which is the same
            for all processes of a machine.
        call: name of the public call that the trainer is in; empty if it is in code of its own.
        call_since: (1,) when a look first found the trainer in that call, on that clock; the call
            may have begun earlier.
        where: the innermost Python calls of the trainer's main thread.
        counters: see `COUNTERS`.
        pids: (n_hosts,) the pids of worker processes; 0 where there is none.
        states: (total,) numbers of `EnvState`.
        activities: (total,) numbers of `Activity`.
        hosts: (total,) index of each env's host.
        since: (total,) since when each env has had its present state, activity and request.
        generations, episodes, failed: (total,) how many renewals, ended episodes and failures each
            env has had.
        errors: (total, TEXT_BYTES) the last failure of each env.
        latencies: (2, total, plan.latencies) the latencies of steps, and of resets.
    """

    version: npt.NDArray[np.uint64]
    looked_at: npt.NDArray[np.float64]
    call: npt.NDArray[np.uint8]
    call_since: npt.NDArray[np.float64]
    where: npt.NDArray[np.uint8]
    counters: npt.NDArray[np.uint64]
    pids: npt.NDArray[np.int64]
    states: npt.NDArray[np.uint8]
    activities: npt.NDArray[np.uint8]
    hosts: npt.NDArray[np.int64]
    since: npt.NDArray[np.float64]
    generations: npt.NDArray[np.uint64]
    episodes: npt.NDArray[np.uint64]
    failed: npt.NDArray[np.uint64]
    errors: npt.NDArray[np.uint8]
    latencies: npt.NDArray[np.float64]

    def __init__(self, memory: Any, plan: BoardPlan) -> None:
        self.plan = plan
        offset = HEADER_BYTES
        for name, shape, dtype in plan.columns():
            column: Array = np.ndarray(shape, dtype=dtype, buffer=memory, offset=offset)
            offset += _aligned(column.nbytes)
            setattr(self, name, column)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make readers wait, or read again, while this context is open."""
        self.version += np.uint64(1)
        try:
            yield
        finally:
            self.version += np.uint64(1)

    def read(self) -> Board:
        """Return a copy of the columns as they are at one moment; the copy does not change.

        If the trainer was stopped or killed while it wrote, the copy has whatever is there.
        """
        copied = bytearray(self.plan.nbytes)
        copy = Board(copied, self.plan)
        names = [name for name, _, _ in self.plan.columns()]
        for _ in range(_TRIES):
            before = int(self.version[0])
            for name in names:
                getattr(copy, name)[...] = getattr(self, name)
            if before % 2 == 0 and before == int(self.version[0]):
                break
        return copy


def put_text(cells: npt.NDArray[np.uint8], text: str) -> None:
    """Write as much of a text as fits."""
    data = text.encode(errors="replace")[: len(cells)]
    cells[: len(data)] = memoryview(data)
    cells[len(data) :] = 0


def text_in(cells: npt.NDArray[np.uint8]) -> str:
    """Return the text in some bytes of the board."""
    return cells.tobytes().rstrip(b"\0").decode(errors="replace")


class PostedBoard:
    """A board of this process, for others to find.

    Args:
        plan: how large the board is.

    Attributes:
        board: the board to write to; None once it is closed.
        fd: the fd of the file; None on platforms without such files.

    Raises:
        OSError: there are no more fds, or no more memory.
    """

    def __init__(self, plan: BoardPlan) -> None:
        self.fd: int | None = None
        self.board: Board | None = None
        memory: Any = bytearray(plan.nbytes)
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create(FILE, os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, plan.nbytes)
                memory = mmap.mmap(self.fd, plan.nbytes)
            except BaseException:
                self.close()
                raise
        header = json.dumps({"envmgr_board": VERSION, **plan._asdict()}).encode()
        memory[: len(header)] = header
        self.board = Board(memory, plan)
        OPEN.add(self)

    def close(self) -> None:
        """Close the board, so that other processes no longer find it."""
        OPEN.discard(self)
        self.board = None  # with the memory, which has an fd of its own
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


OPEN: weakref.WeakSet[PostedBoard] = weakref.WeakSet()


def own_boards() -> list[Board]:
    """Return the boards of this process; may be called from any thread."""
    boards = [posted.board for posted in list(OPEN)]
    return [board for board in boards if board is not None and board.plan.pid == os.getpid()]


def board_in(fd: int) -> Board:
    """Return a copy of the board in a file, as it is at one moment; see `Board.read`.

    The file is read, not mapped: any process that has it open can truncate it, and then access to
    the mapped memory fails (SIGBUS).

    Args:
        fd: the fd of the file that was found.

    Raises:
        UnreadableRunError: the file is no board, or is of another version, or is not whole.
        OSError: the file cannot be read.
    """
    plan = _plan_in(os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size)
    for _ in range(_TRIES):
        before, found = _version_in(fd), os.pread(fd, plan.nbytes, 0)
        if before % 2 == 0 and before == _version_in(fd):
            break
    if len(found) != plan.nbytes:
        raise UnreadableRunError("a board is not whole: it was cut while it was read")
    return Board(found, plan)


def _version_in(fd: int) -> int:
    """Return the value of `version`, the first column, of the board in a file."""
    return int.from_bytes(os.pread(fd, 8, HEADER_BYTES), sys.byteorder)


def _plan_in(head: bytes, nbytes: int) -> BoardPlan:
    """Return the plan in the header of a board, checked against the size of its file.

    Raises:
        UnreadableRunError: the file is no board, or is of another version, or is not whole.
    """
    try:
        header: Mapping[str, Any] = json.loads(head.rstrip(b"\0"))
        version = header["envmgr_board"]
        # Boards of 0.2 have no number.
        plan = BoardPlan(**{name: header[name] for name in BoardPlan._fields if name in header})
        numbers = [value for name, value in plan._asdict().items() if name != "kind"]
        fits = all(type(number) is int and number >= 0 for number in numbers)
        fits = fits and type(plan.kind) is str and plan.env_num <= plan.total <= _MOST_ENVS
        fits = fits and plan.n_hosts <= _MOST_ENVS and plan.latencies in (0, NUMBERS)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableRunError(f"what was found is no board of a manager: {error!r}") from error
    if version != VERSION:
        raise UnreadableRunError(
            f"the trainer's envmgr keeps boards of version {version}, and this one reads those of "
            f"{VERSION}. Use the envmgr that the trainer runs."
        )
    if not fits or plan.nbytes > nbytes:
        raise UnreadableRunError(f"a board of {nbytes} bytes is not whole, or its header is wrong")
    return plan
