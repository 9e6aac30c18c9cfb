"""Where a worker that exceeded a limit hangs: the stacks of its threads, or what else is known."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from envmgr.proc import cpu_s_of, fields_of, memfds_of, status_of
from envmgr.worker import crash_report
from envmgr.worker.crash_report import STACKS_FILE, STACKS_SIGNAL

_MOST_S = 0.5
_WINDOW_S = 5.0
"""If many workers hang and do not answer, all waits in such a window take `_MOST_S` together."""

_UNSEEN_S = 0.1
"""From when the kernel takes up the signal until the handler begins, nothing shows that stacks will
come. A page fault can be in between."""

_DEAF_S = 0.004
"""How long to wait for a worker that is stopped, or whose threads all block the signal."""

_OURS = f'  File "{Path(crash_report.__file__).parent}{os.sep}'
"""The beginning of stack lines that show calls of the package that runs envs in workers."""

_LOOK_EVERY_S = 0.001

_MOST_BYTES = 1 << 16


class Stacks:
    """Asks workers for their stacks, as any process of the same user can.

    Processes of other users are not asked, not even by root: that they look like workers is no
    reason to send them signals, or to empty their files.
    """

    def __init__(self) -> None:
        self._window_ends = self._left_s = 0.0

    def of(self, pid: int) -> str:
        """Return where a worker hangs.

        Args:
            pid: the pid of the worker.

        Returns:
            The stacks of its threads, the innermost calls first, without envmgr's own. If it does
            not give them: what the kernel says about the process. Empty if it is gone.
        """
        status = status_of(pid)
        if not status:
            return ""
        found = self._asked(pid) if _listens(pid, status) else ""
        return of_envs(found) or _without_stacks(pid, status)

    def _asked(self, pid: int) -> str:
        file = _file_of(pid)
        if file is None:
            return ""
        try:
            return self._answer(pid, file)
        finally:
            os.close(file)

    def _answer(self, pid: int, file: int) -> str:
        text = ""
        with contextlib.suppress(OSError):  # it has ended
            os.ftruncate(file, 0)
            os.kill(pid, STACKS_SIGNAL or 0)
            began = time.monotonic()
            if began > self._window_ends:
                self._window_ends, self._left_s = began + _WINDOW_S, _MOST_S
            most_s = max(self._left_s, _DEAF_S)
            waited_s = 0.0
            while waited_s < (_MOST_S if text else most_s):
                time.sleep(_LOOK_EVERY_S)
                # Before the file is read, so that `text` has what is written in between.
                patience_s = _patience_s(pid)
                text = _read(file)
                waited_s = time.monotonic() - began
                if waited_s >= patience_s or (text and patience_s != inf):
                    break
            if not text:
                self._left_s -= waited_s
        return text


def _file_of(pid: int) -> int | None:
    """Open the file that a worker writes its stacks into; None if it has none."""
    try:
        return next(memfds_of(pid, STACKS_FILE, os.O_RDWR), None)
    except OSError:
        return None


def _read(file: int) -> str:
    return os.pread(file, _MOST_BYTES, 0).decode(errors="replace")


def of_envs(stacks: str) -> str:
    """Return stacks without envmgr's calls around those of the env, and without its own threads."""
    threads = [thread.splitlines() for thread in stacks.strip().split("\n\n")]
    return "\n\n".join("\n".join(_of_env(lines)) for lines in threads if not _is_watch(lines))


def _is_watch(lines: list[str]) -> bool:
    return any(line.startswith(_OURS) and line.endswith(" in watch") for line in lines)


def _of_env(lines: list[str]) -> list[str]:
    thread, calls = lines[:1], lines[1:]
    # What the env has called of ours, as where its stderr is kept; or all of it, between two calls.
    called = list(itertools.takewhile(lambda line: line.startswith(_OURS), calls))
    rest = calls[len(called) :]
    of_env = list(itertools.takewhile(lambda line: not line.startswith(_OURS), rest))
    if called and len(of_env) == len(rest):  # how the process came to serve envs tells nothing
        of_env = []
    return [*thread, *called, *of_env]


def _listens(pid: int, status: dict[str, str]) -> bool:
    """Return whether a process is a worker that handles the signal; others would die of it."""
    if STACKS_SIGNAL is None or status.get("State", "Z").startswith("Z") or not _is_ours(status):
        return False
    try:
        return os.getsid(pid) == pid and bool(int(status["SigCgt"], 16) >> STACKS_SIGNAL - 1 & 1)
    except (OSError, KeyError, ValueError):
        return False


def _is_ours(status: dict[str, str]) -> bool:
    """Return whether a process is this user's: all of its user ids are."""
    return set(status.get("Uid", "").split()) == {str(os.geteuid())}


def _patience_s(pid: int) -> float:
    """Return how long to wait for a process that was sent the signal: `inf` if it will answer.

    The signal is pending until a thread of the process runs: on a busy machine this can last longer
    than a hang. While the handler runs, the signal is blocked. Threads that block all signals, as
    those of many libraries do, also block the signal with the next number.
    """
    status = status_of(pid)
    blocked = [_of_our_signal(mask) & 3 for mask in _blocked_by_threads(pid)]
    if status.get("State", "Z")[:1] in "TtZ":  # stopped, or dead
        return _DEAF_S
    if 1 in blocked:
        return inf
    if _of_our_signal(status.get("ShdPnd", "0")) & 1:
        return inf if any(mask != 3 for mask in blocked) else _DEAF_S
    return _UNSEEN_S


def _blocked_by_threads(pid: int) -> Iterator[str]:
    """Yield which signals each thread of a process blocks."""
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        if blocked := fields_of(path).get("SigBlk"):  # else it has ended
            yield blocked


def _of_our_signal(mask: str) -> int:
    return 0 if STACKS_SIGNAL is None else int(mask, 16) >> STACKS_SIGNAL - 1


def _without_stacks(pid: int, status: dict[str, str]) -> str:
    """Return what is known of a process that does not give its stacks."""
    place = ""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0 \n")
    cpu_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        cpu_s = cpu_s_of(pid)
    facts = [
        f"state {status.get('State', '?')}",
        f"waiting in {place}" if place else "",
        f"{cpu_s:.1f} s of CPU used",
        f"memory {status.get('VmRSS', '?')}",
    ]
    why = "blocks the signal that asks for them, is stopped, or has not begun"
    if not _is_ours(status):
        why = "is another user's, who alone can ask for them"
    return f"no stacks: process {pid} {why} ({', '.join(filter(None, facts))})"
