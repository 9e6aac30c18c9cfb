"""Finds trainers on this machine by their status boards: the shared memory that they write."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from envmgr.errors import UnreadableRunError
from envmgr.proc import memfds_of, stat_of, status_of
from envmgr.untrusted import opened_file
from envmgr.wire.board import FILE, HEADER_BYTES, Board, board_in

PROCESS = "process.json"
"""Name of the file in a run's folder that says, while the run goes on, which process it is."""


_MOST_OF_FACTS = 4096
"""The most bytes of that file that are read."""

_MOST_OF_BOARDS = 1 << 30
"""The most bytes of a process's boards that are read: those of the largest manager have fewer."""


class NotLaunchedError(UnreadableRunError):
    """The process exists, but has no manager that is launched."""


def boards_of(pid: int) -> list[Board]:
    """Return the boards of the managers of a process, in the order of their launch.

    They are copies, each of one moment.

    Raises:
        UnreadableRunError: there is no such process, it is another user's, or it has no manager.
    """
    try:
        files = memfds_of(pid, FILE, os.O_RDONLY)
    except FileNotFoundError as error:
        raise UnreadableRunError(_no_process(pid)) from error
    except OSError as error:
        raise UnreadableRunError(
            f"process {pid} cannot be looked at: {error.strerror}. Only its own user and root may."
        ) from error
    by_file: dict[int, Board] = {}
    for fd in files:
        try:
            _look_at(fd, by_file)
        finally:
            os.close(fd)
    found = by_file.values()
    # The pid that the process has in its own container counts, too.
    pids = [pid, *map(int, status_of(pid).get("NSpid", "").split())]
    own = [board for board in found if board.plan.pid in pids]
    if not own:
        detail = " (it is a fork of the process that has one)" if found else ""
        raise NotLaunchedError(
            f"process {pid} has no manager that is launched, or one of an older envmgr{detail}. "
            "Give the pid of the trainer itself, not of a worker or of a shell around it."
        )
    return sorted(own, key=lambda board: board.plan.number)


def _no_process(pid: int) -> str:
    if not os.path.isdir("/proc/self"):
        return "trainers can be looked at from outside on Linux only: it takes /proc"
    return f"there is no process {pid}: it has ended, or is in another container"


def _look_at(fd: int, found: dict[int, Board]) -> None:
    """Add the board in a file, once: a process may have the file open several times."""
    about = os.fstat(fd)
    if about.st_ino in found or about.st_size < HEADER_BYTES:
        return  # or it is being made
    if sum(board.plan.nbytes for board in found.values()) + about.st_size > _MOST_OF_BOARDS:
        raise UnreadableRunError(
            f"what looks like boards of managers has more than {_MOST_OF_BOARDS:,} bytes, which "
            "those of a trainer never have"
        )
    found[about.st_ino] = board_in(fd)


# -- runs ---------------------------------------------------------------------------------------


def process_facts() -> dict[str, Any]:
    """Return what tells this process from all others, for the folder of a run."""
    pid = os.getpid()
    return {"pid": pid, "started": start_of(pid), "host": socket.gethostname()}


def facts_in(folder: Path) -> dict[str, Any]:
    """Return what the folder of a run says of its process: at least its `pid`, a number.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError, TypeError, KeyError, RecursionError: the file says something else.
    """
    with opened_file(folder / PROCESS) as file:
        facts: dict[str, Any] = json.loads(file.read(_MOST_OF_FACTS))
    pid = facts["pid"]
    if type(pid) is not int or pid < 1:
        raise ValueError(f"its pid is {pid!r}")
    return facts


def pid_of(target: str) -> int:
    """Return the pid of a trainer.

    Args:
        target: the pid, or the folder of an `envmgr run`.

    Raises:
        UnreadableRunError: it is neither, or the run has ended.
    """
    if target.isascii() and target.isdecimal() and not os.path.isdir(target):
        return int(target[:20])
    folder = Path(target)
    try:
        facts = facts_in(folder)
        pid: int = facts["pid"]
        started, host = facts["started"], facts["host"]
    except FileNotFoundError as error:
        raise UnreadableRunError(_no_run(folder)) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableRunError(
            f"{str(folder / PROCESS)!r} does not say which process the run is: {error!r}. "
            "Give the pid of the trainer."
        ) from error
    if host != socket.gethostname():
        raise UnreadableRunError(f"the run in {target!r} is, or was, on {host!r}: look at it there")
    if start_of(pid) != started:
        raise UnreadableRunError(f"the run in {target!r} has ended: it was process {pid}")
    return pid


def _no_run(folder: Path) -> str:
    if (folder / "summary.json").exists():
        return f"the run in {str(folder)!r} has ended: see summary.json there"
    if folder.is_dir():
        return f"{str(folder)!r} is no folder of a run that goes on: there is no {PROCESS} in it"
    return (
        f"{str(folder)!r} is neither a pid nor a folder. Give the pid of the trainer, or the "
        "folder that `envmgr run` writes its results into."
    )


def start_of(pid: int) -> str | None:
    """Return when a process was started, in a form to compare; None if it is gone."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {stat_of(pid)[19]}"
    except (OSError, IndexError):
        return None
