"""`envmgr top` on a terminal: full screen, fitted to its width, with keys.

The screen is drawn with rich, which other commands use already. A package for whole applications,
such as textual, would be a dependency that nothing else needs, just for five keys.
"""

from __future__ import annotations

import os
import re
import select
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self

from envmgr.lifecycle import EnvState
from envmgr.observing.dump import IDLE
from envmgr.observing.status_boards import NotLaunchedError, boards_of, start_of
from envmgr.observing.top_table import Top
from envmgr.transport.process.stacks import Stacks
from envmgr.untrusted import plain_line
from envmgr.wire.board import Board, BoardPlan, text_in

if TYPE_CHECKING:
    from rich.text import Text

_HELP = "q quit   s sort   up down select   enter its stacks"
_BACK = "enter back   q quit"
_NAMES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    **dict.fromkeys(("\r", "\n"), "enter"),
    "\x1b": "escape",
}


def is_possible() -> bool:
    """Return whether there is a terminal for the table and for keys."""
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb


class Keys:
    """The keys that are pressed, without an Enter after them; Ctrl-C works as usual."""

    def __enter__(self) -> Self:
        """Have the terminal give each key at once."""
        import termios
        import tty

        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the terminal."""
        import termios

        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """Return the next key; "" if none comes in this time, `q` if the terminal is gone."""
        if not select.select([self._fd], [], [], max(seconds, 0.0))[0]:
            return ""
        given = os.read(self._fd, 16).decode(errors="replace")
        return _NAMES.get(given, given[:1]) if given else "q"


class LiveTop:
    """What the screen shows, and what keys change about it.

    Args:
        pid: pid of the trainer.
        sort: one of `SORTS`.
    """

    def __init__(self, pid: int, sort: str) -> None:
        self._pid = pid
        self._top = Top(sort)
        self._chosen = 0
        self._stacks_of: tuple[BoardPlan, int] | None = None
        self._rows: list[tuple[BoardPlan, int]] = []
        """What can be chosen: which manager, and which env of it."""

    def press(self, key: str) -> bool:
        """Do what a key is for; return False if it is the key to quit."""
        if key == "q":
            return False
        if key in ("enter", "escape"):
            shows = key == "enter" and self._stacks_of is None and bool(self._rows)
            self._stacks_of = self._rows[self._chosen] if shows else None
        elif key == "s":
            self._top.sort_by_the_next()
        elif key in ("up", "down") and self._stacks_of is None:
            chosen = self._chosen + (1 if key == "down" else -1)
            self._chosen = min(max(chosen, 0), max(len(self._rows) - 1, 0))
        return True

    def screen(self, boards: Sequence[Board] | str, now: float, width: int, height: int) -> Text:
        """Return what to show.

        Args:
            boards: the boards of the trainer; or why there are none, while it launches.
            now: the time on the monotonic clock.
            width: width of the screen.
            height: height of the screen.
        """
        by_plan = {} if isinstance(boards, str) else {board.plan: board for board in boards}
        if self._stacks_of is not None and self._stacks_of[0] not in by_plan:
            self._stacks_of = None  # that manager is closed
        help_text = f"{_HELP}   ({self._top.sort})" if self._stacks_of is None else _BACK
        if isinstance(boards, str):
            self._rows = []
            lines = [(line, "yellow") for line in textwrap.wrap(f"Waiting: {boards}", width)]
        elif self._stacks_of is not None:
            plan, env_id = self._stacks_of
            lines = list(_about(by_plan[plan].read(), env_id))
        else:
            lines = list(self._tables([board.read() for board in boards], now, width, height - 2))
        lines = [(f"process {self._pid}", "bold"), *lines][: height - 1]
        return _text([*lines, (help_text, "dim")], width)

    def _tables(
        self, boards: Sequence[Board], now: float, width: int, height: int
    ) -> Iterator[tuple[str, str]]:
        rows: list[tuple[BoardPlan, int]] = []
        each = max(height // max(len(boards), 1), 1)
        self._top.forget_all_but(boards)
        for board in boards:
            plan = board.plan
            table = self._top.table(plan.number, board, now, width)
            fits = max(each - len(table.head) - 2, 1)  # but for the names, and how many more
            chosen = self._chosen - len(rows)
            first = min(max(chosen - fits + 1, 0), max(len(table.lines) - fits, 0))
            yield from ((line, "bold") for line in table.head)
            yield table.names, "dim"
            for row in range(first, min(first + fits, len(table.lines))):
                style = _style(board, table.env_ids[row])
                yield table.lines[row].ljust(width), f"{style} reverse" if row == chosen else style
            rows += [(plan, env_id) for env_id in table.env_ids]
            left = len(table.lines) - fits
            yield (f"... and {left} more", "dim") if left > 0 else ("", "")
        self._rows = rows
        self._chosen = min(self._chosen, max(len(rows) - 1, 0))


def _about(board: Board, env_id: int) -> Iterator[tuple[str, str]]:
    """Return what is known of one env, and where its worker is."""
    host = int(board.hosts[env_id])
    pid = int(board.pids[host]) if 0 <= host < len(board.pids) else 0
    yield f"env {env_id}, " + (f"worker {pid}" if pid else "which has no worker process"), "bold"
    if error := text_in(board.errors[env_id]):
        yield "its last failure:", "red"
        yield from ((line, "") for line in error.splitlines())
    if not pid:
        yield "where the trainer's main thread is:", ""
        yield from ((line, "") for line in text_in(board.where).splitlines())
        return
    stacks = Stacks().of(pid)
    if IDLE in stacks:  # between requests: nothing of that is the env's
        stacks = "it waits for what to do"
    yield from ((line, "") for line in stacks.splitlines())


def _style(board: Board, env_id: int) -> str:
    state = int(board.states[env_id])
    if state == EnvState.ERROR or int(board.failed[env_id]):
        return "red"
    return "" if state == EnvState.RUN else "yellow"


def _text(lines: Sequence[tuple[str, str]], width: int) -> Text:
    from rich.text import Text

    # What other processes say may hold escape sequences.
    shown = [(_fitted(plain_line(line), width), style) for line, style in lines]
    parts = [Text(line, style, no_wrap=True, overflow="crop") for line, style in shown]
    return Text("\n", no_wrap=True, overflow="crop").join(parts)


_CALL = re.compile(r'(?P<begin> *File ")(?P<path>.+)(?P<end>", line \d+,? in .+)')


def _fitted(line: str, width: int) -> str:
    """Return a line that is cut off at a width; of a call in a stack, its path is shortened."""
    call = _CALL.fullmatch(line) if len(line) > width else None
    if call is not None and "/" in call["path"]:
        room = width - len(f"{call['begin']}...{call['end']}")
        folders, slash, file = call["path"].rpartition("/")
        kept = folders[len(folders) - max(room - len(slash + file), 0) :].partition("/")[2]
        path = f"...{slash}{kept}{slash if kept else ''}{file}"
        line = f"{call['begin']}{path}{call['end']}"
    return line[:width]


def watch(pid: int, *, interval_s: float, sort: str) -> None:
    """Show the envs of a trainer, also while it launches, until it has ended, or `q` or Ctrl-C.

    Args:
        pid: pid of the trainer.
        interval_s: seconds between two looks.
        sort: one of `SORTS`.

    Raises:
        UnreadableRunError: there is no such process, or it may not be looked at.
    """
    from rich.console import Console
    from rich.live import Live

    started = start_of(pid)
    _look(pid)  # whatever is wrong is said before the screen is taken
    console, view = Console(), LiveTop(pid, sort)
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while start_of(pid) == started:
            boards, next_look_s = _look(pid), time.monotonic() + interval_s
            key: str | None = None
            while key != "":  # which is that the time is over
                shown = view.screen(boards, time.monotonic(), *console.size)
                live.update(shown, refresh=True)
                key = keys.wait(next_look_s - time.monotonic())
                if not view.press(key):
                    return
    print(f"process {pid} has ended")


def _look(pid: int) -> list[Board] | str:
    """Return the boards of a trainer, or why there are none as yet.

    Raises:
        UnreadableRunError: there is no such process, or it may not be looked at.
    """
    try:
        return boards_of(pid)
    except NotLaunchedError as error:
        return str(error)
