"""The table of `envmgr top`: a trainer's envs, with rates, fitted to a width."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.errors import UnreadableRunError
from envmgr.lifecycle import EnvState
from envmgr.observing.status_boards import boards_of
from envmgr.proc import resident_bytes
from envmgr.texts import counted, seconds_text
from envmgr.untrusted import plain_line
from envmgr.wire.board import COUNTERS, Activity, Board
from envmgr.wire.latencies import counts_of, quantiles

_ALL = 1 << 20
"""More than any screen has lines, or characters in a line."""

_COLUMNS = {
    "env": 5,
    "state": 10,
    "at": 20,
    "for": 9,
    "steps/s": 8,
    "p50": 8,
    "p99": 8,
    "fail": 5,
    "MB": 6,
}
"""Names of the columns, and their widths; texts are aligned left, numbers right."""

_TEXTS = ("state", "at")
_LEFT_OUT = ("p50", "MB", "steps/s", "p99", "for")
"""The columns that are left out, in this order, where the screen is too narrow for all."""

_SHRINKS = "at"
"""The column that gets narrower when none of these is left."""

SORTS = ("env", "slowest", "longest", "failures")


class Table(NamedTuple):
    """A table of one manager.

    Attributes:
        head: what there is to say of all envs, in lines that fit.
        names: the names of the columns, as a line.
        env_ids: which envs are shown, in this order.
        lines: one for each of them.
    """

    head: list[str]
    names: str
    env_ids: list[int]
    lines: list[str]


_Look = tuple[float, Board]
"""When a trainer's board was looked at, and what it said."""


class Top:
    """The maker of the table, with rates since the previous refresh.

    Args:
        sort: one of `SORTS`.
    """

    def __init__(self, sort: str = "env") -> None:
        self._sort = sort
        self._looks: dict[int, tuple[_Look, _Look]] = {}

    @property
    def sort(self) -> str:
        """Which envs come first: one of `SORTS`."""
        return self._sort

    def sort_by_the_next(self) -> None:
        """Let the next of `SORTS` decide which envs come first."""
        self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]

    def text(self, boards: Sequence[Board], now: float) -> str:
        """Return the whole tables of all managers of a trainer."""
        self.forget_all_but(boards)
        tables = (self.lines(board.plan.number, board.read(), now) for board in boards)
        return "\n\n".join("\n".join(table) for table in tables)

    def forget_all_but(self, boards: Sequence[Board]) -> None:
        """Forget the managers that are closed: those with none of these boards."""
        numbers = {board.plan.number for board in boards}
        self._looks = {key: looks for key, looks in self._looks.items() if key in numbers}

    def lines(self, key: int, board: Board, now: float) -> list[str]:
        """Return the table of one manager as lines; see `table`."""
        table = self.table(key, board, now)
        return [*table.head, table.names, *table.lines]

    def table(self, key: int, board: Board, now: float, width: int = _ALL) -> Table:
        """Return the table of one manager.

        Args:
            key: which of the trainer's managers it is: `BoardPlan.number`.
            board: a copy of its board.
            now: the time on the monotonic clock.
            width: width of lines, in characters. What does not fit is left out, by whole columns.
        """
        n, plan = board.plan.env_num, board.plan
        looked_s = float(board.looked_at[0])
        look = (looked_s, board)
        previous, latest = self._looks.get(key, (look, look))
        if latest[1].plan != plan or (latest[1].counters > board.counters).any():
            previous = latest = look  # the process has become another trainer (exec)
        elif looked_s > latest[0]:  # else it is the same look, in another order, say
            previous, latest = latest, look
        self._looks[key] = previous, latest
        before_s, before = previous
        passed_s = looked_s - before_s
        totals = dict(zip(COUNTERS, board.counters.tolist(), strict=True))
        done = totals["timesteps"] - int(before.counters[COUNTERS.index("timesteps")])
        rate = f"{done / passed_s:,.0f}" if passed_s > 0.0 else "-"
        states = [
            f"{count} {state.name}"
            for state in EnvState
            if (count := int((board.states[:n] == state).sum()))
        ]
        head = (
            f"{plain_line(plan.kind)}, {counted(n, 'env')} ({', '.join(states)}), "
            f"{rate} steps/s, {counted(totals['timesteps'], 'step')}, "
            f"{counted(totals['episodes'], 'episode')}, "
            f"{counted(totals['failures'], 'failure')}; {seconds_text(now - looked_s)} ago"
        )
        if not plan.latencies:
            head += "\nset manager.metrics: {} in the config to see times and rates of each env"
        rows = self._rows(board, before, passed_s, now)
        shown = self._order(board, rows)
        names = _fitting(width)
        return Table(
            [part for line in head.splitlines() for part in textwrap.wrap(line, width)],
            _line({name: name for name in names}, width),
            shown,
            [_line({name: rows[i][0][name] for name in names}, width) for i in shown],
        )

    def _rows(
        self, board: Board, before: Board, passed_s: float, now: float
    ) -> list[tuple[dict[str, str], float]]:
        """Return the cells of each env, and its p99."""
        n, nothing = board.plan.env_num, [float("nan")] * board.plan.env_num
        rates, p50s, p99s = nothing, nothing, nothing
        if board.plan.latencies:
            steps = board.latencies[0, :n]
            p50s, p99s = quantiles(steps, (0.5, 0.99)).tolist()
            if passed_s > 0.0:
                grown = counts_of(steps) - counts_of(before.latencies[0, :n])
                rates = (np.maximum(grown, 0.0) / passed_s).tolist()
        memory = [resident_bytes(pid) / 1e6 if pid else 0.0 for pid in board.pids.tolist()]
        names, labels = {int(s): s.name for s in EnvState}, {int(a): a.label for a in Activity}
        columns = zip(
            board.states.tolist(),
            board.activities.tolist(),
            board.since.tolist(),
            board.failed.tolist(),
            board.hosts.tolist(),
            rates,
            p50s,
            p99s,
            strict=False,  # of spares there is no more than this
        )
        return [
            (
                {
                    "env": str(i),
                    "state": names.get(state, "?"),
                    "at": labels.get(activity, "?"),
                    "for": seconds_text(now - since),
                    "steps/s": _number(rate),
                    "p50": _time(p50),
                    "p99": _time(p99),
                    "fail": str(failed),
                    "MB": _megabytes(memory[host] if 0 <= host < len(memory) else 0.0),
                },
                p99,
            )
            for i, (state, activity, since, failed, host, rate, p50, p99) in enumerate(columns)
        ]

    def _order(self, board: Board, rows: Sequence[tuple[Any, float]]) -> list[int]:
        n = board.plan.env_num
        keys: dict[str, Callable[[int], float]] = {
            "env": float,
            "slowest": lambda i: -(rows[i][1] if rows[i][1] == rows[i][1] else 0.0),
            "longest": lambda i: float(board.since[i]),
            "failures": lambda i: -float(board.failed[i]),
        }
        return sorted(range(n), key=keys[self._sort])


def _fitting(width: int) -> list[str]:
    """Return the columns that fit into a width."""
    names, left_out = list(_COLUMNS), list(_LEFT_OUT)
    while left_out and sum(_COLUMNS[name] + 1 for name in names) > width + 1:
        names.remove(left_out.pop(0))
    return names


def _line(cells: Mapping[str, str], width: int) -> str:
    widths = {name: _COLUMNS[name] for name in cells}
    beyond = sum(widths.values()) + len(widths) - 1 - width
    if beyond > 0:  # of a text a part is of use, of a number it is wrong
        widths[_SHRINKS] = max(widths[_SHRINKS] - beyond, 1)
    aligned = (
        cell[: widths[name]].ljust(widths[name]) if name in _TEXTS else cell.rjust(widths[name])
        for name, cell in cells.items()
    )
    return " ".join(aligned)[:width]


def _megabytes(memory: float) -> str:
    """Return the memory of a worker as text; `-` if it has none, as while it is replaced."""
    return f"{memory:.0f}" if memory else "-"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:,.0f}"


def _time(seconds: float) -> str:
    if np.isnan(seconds):
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def print_tables(pid: int, *, interval_s: float, once: bool, sort: str) -> None:
    """Print tables of the envs of a trainer until it has no manager any more, or Ctrl-C.

    Args:
        pid: pid of the trainer.
        interval_s: seconds between two tables.
        once: whether to print a single table, with rates over one interval.
        sort: one of `SORTS`.

    Raises:
        UnreadableRunError: there is no such trainer.
    """
    top, boards = Top(sort), boards_of(pid)
    while True:
        text = top.text(boards, time.monotonic())
        if not once:
            print(f"process {pid}\n{text}", flush=True)
        time.sleep(interval_s)
        try:
            boards = boards_of(pid)
        except UnreadableRunError:
            print(f"process {pid} has no manager any more")
            return
        if once:
            print(top.text(boards, time.monotonic()))
            return
