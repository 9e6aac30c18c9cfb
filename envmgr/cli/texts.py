"""Texts, tables and figures that commands print."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LaunchError,
)
from envmgr.texts import counted, env_ids_text, how_often
from envmgr.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from envmgr.collect import CollectStatistics

_UNBOUNDED = 10_000
"""Columns where stdout is not a terminal: lines are as long as they need to be."""


def paragraph(error: BaseException) -> str:
    """Return an error's message as one paragraph; of envs' stacks, it has the innermost call."""
    return " ".join(_without_stacks(error).split()) or type(error).__name__


_STACKS = {
    "remote_traceback": "Traceback in its worker:",
    "stderr_tail": "The end of its stderr:",
    "stacks": "Where it was:",
}
"""Attributes of failures that have stacks, and the lines before these stacks in messages."""


def _without_stacks(error: BaseException, mark: str = "") -> str:
    """Return an error's message, with places as of `place_text` instead of stacks.

    Args:
        error: the error.
        mark: is put where stacks were, with the id of an env that left these in its braces.
    """
    instead: dict[str, str] = {}
    for failure in _failures_in(error):
        place = place_text(failure)
        for name, title in _STACKS.items():
            if stack := getattr(failure, name, "").rstrip():
                shown = (f", {place}" if place else "") + mark.format(failure.env_id)
                instead.setdefault(f"\n\n{title}\n{stack}", shown)
    text = str(error)
    for stack in sorted(instead, key=len, reverse=True):  # one may begin as another does
        text = text.replace(stack, instead[stack])
    return text


def error_text(error: BaseException) -> str:
    """Return an error's message for the user of a command, with a line for each of several envs.

    Advice that only code can follow is left out; of the stacks of a crash, the innermost frames are
    kept.
    """
    if isinstance(error, FailuresExhaustedError) and error.exceeded:
        return (
            f"{error.exceeded}. To go on in spite of it, raise that limit, or give "
            f"--set manager.on_exhausted=drop. The first failure of env {error.failure.env_id} "
            f"that counted:\n"
            f"  {paragraph(error.failure)}{_crash_text(error.failure)}"
        )
    if isinstance(error, LaunchError) and error.failures:
        text = _without_stacks(error, "\0{}\0").replace(", in the `failures` of this error", "")
        return "\n  - ".join(_cause_text(cause, error.failures) for cause in text.split("\n- "))
    crash = error if isinstance(error, EnvCrash) else error.__cause__
    return paragraph(error) + _crash_text(crash)


def _cause_text(cause: str, failures: Mapping[int, EnvFailure]) -> str:
    """Return one cause of a failed launch: a line, and below it what its crash has left.

    Args:
        cause: a part of the launch's message, with marks where stacks were.
        failures: the failures of the launch.
    """
    line, *marks = re.split("\0([0-9]+)\0", cause)
    ids = map(int, marks[::2])
    line = " ".join("".join([line, *marks[1::2]]).split())
    return line + next(filter(None, (_crash_text(failures.get(i)) for i in ids)), "")


def _crash_text(error: BaseException | None) -> str:
    """Return the end of what a crashed process wrote, as lines; empty if there is nothing."""
    if not isinstance(error, EnvCrash):
        return ""
    lines = [line.rstrip()[:_CRASH_LINE] for line in error.stderr_tail.splitlines()]
    # Which extension modules were loaded, as faulthandler adds, says nothing of where it crashed.
    lines = [line for line in lines if line and not line.startswith("Extension modules:")]
    left = len(lines) - _CRASH_LINES
    more = [f"... {left} more lines"] if left > 0 else []
    return "".join(f"\n    {line}" for line in [*lines[:_CRASH_LINES], *more])


_CRASH_LINES, _CRASH_LINE = 6, 120
"""How much of the stacks of a crash is shown: lines, and characters of each line."""


_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?P<comma>,?) in (?P<name>.+)')
_OF_PYTHON = sysconfig.get_path("stdlib") + os.sep


def place_text(failure: EnvFailure) -> str:
    """Return `at game.py:15 in simulate` for an env that hung, or that ended its process.

    That is the innermost call of the thread that ran the env: one outside of Python's own library,
    if there is any. The text is empty if nothing is known.
    """
    stacks = failure.stacks if isinstance(failure, EnvTimeout) else ""
    if isinstance(failure, EnvCrash):
        stacks = failure.stderr_tail
    _, _, current = stacks.partition("Current thread ")
    thread = (current or stacks).partition("\n\n")[0]
    if isinstance(failure, EnvCrash) and failure.remote_traceback:
        thread = failure.remote_traceback  # its causes first
    frames = [found for line in thread.splitlines() if (found := _FRAME.fullmatch(line))]
    if frames and frames[0]["comma"]:  # a traceback, with the innermost call last
        frames.reverse()
    own = (one for one in frames if not _is_of_python(one["path"]))
    place = next(own, frames[0] if frames else None)
    if place is None:
        return ""
    return f"at {os.path.basename(place['path'])}:{place['line']} in {place['name']}"


def _is_of_python(path: str) -> bool:
    return path.startswith(("<", _OF_PYTHON)) and "-packages" not in path


def _failures_in(error: BaseException) -> list[EnvFailure]:
    if isinstance(error, EnvFailure):
        return [error]
    if isinstance(error, LaunchError):
        return list(error.failures.values())
    return [error.failure] if isinstance(error, FailuresExhaustedError) else []


def raised_by_envs(error: BaseException) -> list[EnvRaised]:
    """Return the failures in an error that have a traceback of the env's own code."""
    return [f for f in _failures_in(error) if isinstance(f, EnvRaised) and f.remote_traceback]


def stacks_in(error: BaseException) -> list[str]:
    """Return the whole stacks and tracebacks of the failures in an error, each once."""
    found = (getattr(f, name, "").rstrip() for f in _failures_in(error) for name in _STACKS)
    return [*dict.fromkeys(filter(None, found))]


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may come from files or envs; escape what would control the terminal.

    Args:
        text: what to print; see `untrusted.plain`.
        err: whether to print to stderr.
        nl: whether to end with a newline.
    """
    import click

    click.echo(plain(text), err=err, nl=nl)


def wide_console() -> Console:
    """Return a console for stdout: as wide as the terminal, or unbounded if it is not one.

    It has colours only on terminals, and not if NO_COLOR is set.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    return Console(width=_UNBOUNDED, force_terminal=False, color_system=None)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; its cells are plain text, escaped as by `echo`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    made = Table(box=box.SIMPLE_HEAD, show_header=bool(header), safe_box=True)
    for index, title in enumerate(header or [""] * max(map(len, rows), default=0)):
        made.add_column(title, style="" if index else "bold", overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, without the blanks that pad its lines to the widest one."""
    with console.capture() as captured:
        console.print(table(header, rows))
    lines = captured.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def cell(text: str) -> str:
    """Return the beginning of a text that may be long, to be a cell of a table."""
    line = " ".join(text.split())
    if len(line) <= _CELL:
        return line
    return f"{line[:_CELL].rpartition(' ')[0] or line[:_CELL]} ..."


_CELL = 60


def cut_texts(texts: Mapping[str, str]) -> str:
    """Return the texts that cells of a table do not have whole, each once, as lines.

    Args:
        texts: texts by the name of the row, whose cells are made by `cell`.
    """
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        if cell(text) != text:
            names.setdefault(text, []).append(name)
    return "".join(f"{'; '.join(of)}: {text}\n" for text, of in names.items())


def failures_text(stats: Mapping[str, Any]) -> str:
    """Return `3 failures: EnvCrash x3 (envs 1, 4, 5)` from the stats of a manager.

    The env that failed most often is named, if others have failed less often.
    """
    total = stats.get("failures", 0)
    if not total:
        return "0"
    kinds = ", ".join(f"{kind} x{n}" for kind, n in sorted(stats["failures_by_kind"].items()))
    told, by_env = f"{counted(total, 'failure')}: {kinds}", stats["failures_by_env"]
    if not by_env:  # those of a part of a run that was killed
        return told
    where = env_ids_text(by_env)
    if len(set(by_env.values())) > 1:
        most = max(sorted(by_env), key=by_env.__getitem__)
        where += f"; most often env {most}, {how_often(by_env[most])}"
    return f"{told} ({where})"


def episodes_text(statistics: CollectStatistics) -> str:
    """Return `5 episodes` for those that count, or `5 episodes, 2 abnormal ones` if some failed."""
    text, n_abnormal = counted(statistics.episodes, "episode"), statistics.abnormal_episodes
    return f"{text}, {counted(n_abnormal, 'abnormal one')}" if n_abnormal else text


def states_text(states: Mapping[str, int]) -> str:
    """Return `RESET 1, RUN 7` from the number of envs in each state."""
    return ", ".join(f"{name} {n}" for name, n in sorted(states.items()))


def load_text() -> str:
    """Return how busy the machine was in the last minute, with its number of cores."""
    try:
        busy = f"{os.getloadavg()[0]:.1f}"
    except OSError:
        busy = "unknown"
    return f"{busy} on {os.cpu_count()} cores"


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a text that are separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
