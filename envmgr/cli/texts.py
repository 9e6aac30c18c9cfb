"""Texts, tables and figures that commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envmgr.errors import EnvFailure, EnvRaised, FailuresExhaustedError, LaunchError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNBOUNDED = 10_000
"""Columns where nothing is a terminal: lines are as long as they need to be."""


def paragraph(error: BaseException) -> str:
    """Return what an error says as one paragraph, without the tracebacks of envs."""
    text = str(error)
    for raised in raised_by_envs(error):
        text = text.replace(raised.remote_traceback.rstrip(), "")
    text = text.replace("Traceback in its host:", "")
    return " ".join(text.split()) or type(error).__name__


def raised_by_envs(error: BaseException) -> list[EnvRaised]:
    """Return the failures in an error that have a traceback of the env's own code."""
    failures: list[EnvFailure] = []
    if isinstance(error, EnvFailure):
        failures = [error]
    elif isinstance(error, LaunchError):
        failures = list(error.failures.values())
    elif isinstance(error, FailuresExhaustedError):
        failures = [error.failure]
    return [f for f in failures if isinstance(f, EnvRaised) and f.remote_traceback]


def wide_console() -> Console:
    """Return a console for stdout: as wide as the terminal, or unbounded where it is none.

    Colours only on terminals, and not if NO_COLOR is set.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    return Console(width=_UNBOUNDED, force_terminal=False, color_system=None)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; its cells are plain text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    made = Table(box=box.SIMPLE_HEAD, show_header=bool(header), safe_box=True)
    for index, title in enumerate(header or [""] * max(map(len, rows), default=0)):
        made.add_column(title, style="" if index else "bold", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def failures_text(stats: Mapping[str, Any]) -> str:
    """Return `3 failures: EnvCrash x3 (envs 1, 4, 5)` from the stats of a manager."""
    total = stats.get("failures", 0)
    if not total:
        return "0"
    kinds = ", ".join(f"{kind} x{n}" for kind, n in sorted(stats["failures_by_kind"].items()))
    env_ids = sorted(stats["failures_by_env"])
    named = "env" if len(env_ids) == 1 else "envs"
    noun = "failure" if total == 1 else "failures"
    return f"{total} {noun}: {kinds} ({named} {', '.join(map(str, env_ids))})"


def states_text(states: Mapping[str, int]) -> str:
    """Return `RESET 1, RUN 7` from the number of envs in each state."""
    return ", ".join(f"{name} {n}" for name, n in sorted(states.items()))


def load_text() -> str:
    """Return how busy the machine was in the last minute, beside its cores."""
    try:
        busy = f"{os.getloadavg()[0]:.1f}"
    except OSError:
        busy = "unknown"
    return f"{busy} on {os.cpu_count()} cores"


def seconds(value: float | None) -> str:
    """Return a time as `3.2 ms` or `1.50 s`; `-` for None."""
    if value is None:
        return "-"
    return f"{value * 1e3:,.1f} ms" if value < 1.0 else f"{value:,.2f} s"


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a text that are separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
