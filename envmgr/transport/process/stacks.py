"""Where a worker is that has exceeded a limit: the stacks of its threads, or what else is known."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from envmgr.proc import cpu_s_of, memfds_of, status_of
from envmgr.worker import crash_report
from envmgr.worker.crash_report import STACKS_FILE, STACKS_SIGNAL

_PATIENCE_S = 0.1
"""How long to wait for one worker's stacks: writing them takes less than a millisecond, once it
runs. Of one that has not had a core since, `_MOST_S` says how long; one that is stopped, or blocks
all signals, does not answer at all."""

_MOST_S = 0.5
_WINDOW_S = 5.0
"""If many workers hang and do not answer, all waits in a window of time last this long together."""

_OURS = f'  File "{Path(crash_report.__file__).parent}{os.sep}'
"""How lines of stacks begin that show calls of the package that runs envs in workers."""

_LOOK_EVERY_S = 0.001
_STILL_S = 0.004
"""If nothing has followed for so long, and it is not in the handler any more, all is written."""

_MOST_BYTES = 1 << 16


class Stacks:
    """Asks workers for their stacks. Any process of their user can."""

    def __init__(self) -> None:
        self._window_ends = self._left_s = 0.0

    def of(self, pid: int) -> str:
        """Return where a worker hangs.

        Args:
            pid: of the process.

        Returns:
            The stacks of its threads, the innermost calls first, without envmgr's own. If
            it does not give them: what the kernel says of the process. Empty if it is gone.
        """
        status = status_of(pid)
        if not status:
            return ""
        path = _file_of(pid) if _listens(pid, status) else None
        found = "" if path is None else self._asked(pid, path)
        return of_envs(found) or _without_stacks(pid, status)

    def _asked(self, pid: int, path: str) -> str:
        text = ""
        with contextlib.suppress(OSError):  # it has ended
            os.truncate(path, 0)
            os.kill(pid, STACKS_SIGNAL or 0)
            began = now = changed = time.monotonic()
            if now > self._window_ends:
                self._window_ends, self._left_s = now + _WINDOW_S, _MOST_S
            patience_s = min(_PATIENCE_S, max(self._left_s, _STILL_S))
            most_s = max(self._left_s, patience_s)
            while now - began < (_MOST_S if text else patience_s) or (
                now - began < most_s and not text and _is_pending(pid)
            ):
                time.sleep(_LOOK_EVERY_S)
                now = time.monotonic()
                if (latest := _read(path)) != text:
                    text, changed = latest, now
                elif now - changed < _STILL_S:
                    continue
                elif not (_is_in_handler(pid) if text else _may_answer(pid)):
                    break
            if not text:
                self._left_s -= now - began
        return text


def _file_of(pid: int) -> str | None:
    """Return the path of the file that a worker writes its stacks into; None if it has none."""
    try:
        return next(memfds_of(pid, STACKS_FILE), None)
    except OSError:
        return None


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace")


def of_envs(stacks: str) -> str:
    """Return stacks without envmgr's own calls around those of the env, and without its threads.

    Args:
        stacks: what faulthandler wrote.
    """
    threads = [thread.splitlines() for thread in stacks.strip().split("\n\n")]
    return "\n\n".join("\n".join(_of_env(lines)) for lines in threads if not _is_watch(lines))


def _is_watch(lines: list[str]) -> bool:
    return any(line.startswith(_OURS) and line.endswith(" in watch") for line in lines)


def _of_env(lines: list[str]) -> list[str]:
    inner = list(itertools.takewhile(lambda line: not line.startswith(_OURS), lines))
    return inner if len(inner) > 1 else lines  # the first says which thread it is


def _listens(pid: int, status: dict[str, str]) -> bool:
    """Return whether a process is a worker that handles the signal; others would die of it."""
    if STACKS_SIGNAL is None or status.get("State", "Z").startswith("Z"):
        return False
    try:
        return os.getsid(pid) == pid and bool(int(status["SigCgt"], 16) >> STACKS_SIGNAL - 1 & 1)
    except (OSError, KeyError, ValueError):
        return False


def _is_in_handler(pid: int) -> bool:
    """Return whether a process is writing its stacks: a thread blocks that signal meanwhile.

    Threads that block all signals, as those of many libraries do, block the next one, too.
    """
    return any(blocked & 3 == 1 for blocked in _blocked_by_threads(pid))


def _may_answer(pid: int) -> bool:
    """Return whether a process runs, and a thread of it takes the signal or is in its handler."""
    if status_of(pid).get("State", "Z")[:1] in "TtZ":  # stopped, or dead
        return False
    return any(blocked & 3 != 3 for blocked in _blocked_by_threads(pid))


def _is_pending(pid: int) -> bool:
    """Return whether a process has not taken the signal yet.

    It is pending until a thread runs: on a busy machine this can last longer than a hang.
    """
    return bool(_of_our_signal(status_of(pid).get("ShdPnd", "0")) & 1)


def _blocked_by_threads(pid: int) -> Iterator[int]:
    """Yield which signals each thread blocks: bit 0 is that for the stacks, bit 1 the next one."""
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", path.read_text(), re.MULTILINE)
        if blocked:
            yield _of_our_signal(blocked[1])


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
    return (
        f"no stacks: process {pid} blocks the signal that asks for them, is stopped, or has not "
        f"begun ({', '.join(filter(None, facts))})"
    )
