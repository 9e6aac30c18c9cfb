"""A live table of the envs of a trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from shutil import get_terminal_size

import numpy as np

from envmgr.errors import UnreadableRunError
from envmgr.lifecycle import EnvState
from envmgr.observing.boards import boards_of
from envmgr.observing.dump import seconds_text
from envmgr.proc import resident_bytes
from envmgr.wire.board import COUNTERS, Activity, Board
from envmgr.wire.latencies import counts_of, quantiles

_HEADER = (
    f"{'env':>5} {'state':<10} {'at':<20} {'for':>9} {'steps/s':>8} "
    f"{'p50':>8} {'p99':>8} {'fail':>5} {'MB':>6}"
)
SORTS = ("env", "slowest", "longest", "failures")
_CLEAR = "\x1b[H\x1b[J"


class Top:
    """Makes tables of what has changed from one look to the next.

    Args:
        sort: one of `SORTS`.
    """

    def __init__(self, sort: str = "env") -> None:
        self._sort = sort
        self._before: dict[int, tuple[float, Board]] = {}

    def text(self, boards: Sequence[Board], now: float) -> str:
        """Return the tables of all managers of a trainer, as far as they fit on the screen."""
        most = 1 << 20
        if sys.stdout.isatty():
            most = max(get_terminal_size().lines // len(boards) - 6, 3)
        tables = (self.lines(k, board.read(), now, most) for k, board in enumerate(boards))
        return "\n\n".join("\n".join(table) for table in tables)

    def lines(self, key: int, board: Board, now: float, most: int) -> list[str]:
        """Return the table of one manager.

        Args:
            key: which of the trainer's managers it is.
            board: a copy.
            now: on the monotonic clock.
            most: so many envs at most.
        """
        before_s, before = self._before.get(key, (now, board))
        looked_s = float(board.looked_at[0])
        passed_s = looked_s - before_s
        if passed_s > 0.0 or key not in self._before:
            self._before[key] = (looked_s, board)
        n, plan = board.plan.env_num, board.plan
        counted = dict(zip(COUNTERS, board.counters.tolist(), strict=True))
        done = counted["timesteps"] - int(before.counters[COUNTERS.index("timesteps")])
        rate = f"{done / passed_s:,.0f}" if passed_s > 0.0 else "-"
        states = [
            f"{count} {state.name}"
            for state in EnvState
            if (count := int((board.states[:n] == state).sum()))
        ]
        head = (
            f"{plan.kind}, {n} envs ({', '.join(states)}), {rate} steps/s, "
            f"{counted['timesteps']:,} steps, {counted['episodes']:,} episodes, "
            f"{counted['failures']:,} failures; {seconds_text(now - looked_s)} ago"
        )
        if not plan.latencies:
            head += "\nset manager.metrics: {} in the config to see times and rates of each env"
        rows = self._rows(board, before, passed_s, now)
        shown = self._order(board, rows)[:most]
        more = [f"... and {n - most} more"] if n > most else []
        return [head, _HEADER, *(rows[i][0] for i in shown), *more]

    def _rows(
        self, board: Board, before: Board, passed_s: float, now: float
    ) -> list[tuple[str, float]]:
        """Return a line for each env, and its p99."""
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
                f"{i:>5} {names.get(state, '?'):<10} {labels.get(activity, '?'):<20} "
                f"{seconds_text(now - since):>9} {_number(rate):>8} {_time(p50):>8} "
                f"{_time(p99):>8} {failed:>5} "
                f"{memory[host] if 0 <= host < len(memory) else 0:>6.0f}",
                p99,
            )
            for i, (state, activity, since, failed, host, rate, p50, p99) in enumerate(columns)
        ]

    def _order(self, board: Board, rows: Sequence[tuple[str, float]]) -> list[int]:
        n = board.plan.env_num
        keys: dict[str, Callable[[int], float]] = {
            "env": float,
            "slowest": lambda i: -(rows[i][1] if rows[i][1] == rows[i][1] else 0.0),
            "longest": lambda i: float(board.since[i]),
            "failures": lambda i: -float(board.failed[i]),
        }
        return sorted(range(n), key=keys[self._sort])


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:,.0f}"


def _time(seconds: float) -> str:
    if np.isnan(seconds):
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def watch(pid: int, *, interval_s: float, once: bool, sort: str) -> None:
    """Print tables of the envs of a trainer until it has no manager any more, or Ctrl-C.

    Args:
        pid: of the trainer.
        interval_s: between two.
        once: print one, of an interval.
        sort: one of `SORTS`.

    Raises:
        UnreadableRunError: there is no such trainer.
    """
    top, boards = Top(sort), boards_of(pid)
    while True:
        text = top.text(boards, time.monotonic())
        if not once:
            start = _CLEAR if sys.stdout.isatty() else ""
            print(f"{start}process {pid}\n{text}", flush=True)
        time.sleep(interval_s)
        if once:
            print(top.text(boards, time.monotonic()))
            return
        try:
            boards = boards_of(pid)
        except UnreadableRunError:
            print(f"process {pid} has no manager any more")
            return
