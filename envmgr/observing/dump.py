"""Dumps of a trainer: what every env is doing, and where its workers are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envmgr.lifecycle import EnvState
from envmgr.proc import resident_bytes
from envmgr.texts import counted, seconds_text
from envmgr.transport.process.stacks import Stacks
from envmgr.untrusted import plain, plain_line
from envmgr.wire.board import COUNTERS, Activity, Board, text_in

_MOST_ERROR = 160
IDLE = " in await_bell\n"
"""The end of the line of a stack in which a worker waits for requests."""

_HEADER = ("env", "state", "at", "for", "generation", "episodes", "failures")


def figures_of(board: Board, *, stacks: bool) -> dict[str, Any]:
    """Return what a board says, as JSON-compatible values.

    Args:
        board: a copy of a board, or one that still changes.
        stacks: whether to ask worker processes for their stacks.
    """
    shown, now = board.read(), time.monotonic()
    plan, ask = shown.plan, Stacks()
    of_host: dict[int, list[int]] = defaultdict(list)
    for env_id, host in enumerate(shown.hosts.tolist()):
        of_host[host].append(env_id)
    workers = [
        {
            "pid": pid,
            "env_ids": of_host[index],
            "memory_bytes": resident_bytes(pid),
            **({"stacks": ask.of(pid)} if stacks else {}),
        }
        for index, pid in enumerate(shown.pids.tolist())
        if pid
    ]
    return {
        "pid": plan.pid,
        "command": command_of(plan.pid),
        "manager": plan.kind,
        "env_num": plan.env_num,
        "age_s": max(now - float(shown.looked_at[0]), 0.0),
        "call": text_in(shown.call) or None,
        "call_s": max(now - float(shown.call_since[0]), 0.0),
        "trainer": text_in(shown.where),
        **dict(zip(COUNTERS, shown.counters.tolist(), strict=True)),
        "envs": [_env(shown, i, now) for i in range(plan.total)],
        "workers": workers,
    }


def _env(board: Board, i: int, now: float) -> dict[str, Any]:
    return {
        "env_id": i,
        "is_spare": i >= board.plan.env_num,
        "state": _name(EnvState, int(board.states[i])),
        "at": _label(int(board.activities[i])),
        "for_s": max(now - float(board.since[i]), 0.0),
        "generation": int(board.generations[i]),
        "episodes": int(board.episodes[i]),
        "failures": int(board.failed[i]),
        "last_error": text_in(board.errors[i]) or None,
    }


def _name(states: type[EnvState], number: int) -> str:
    return states(number).name if number in states._value2member_map_ else "?"


def _label(number: int) -> str:
    return Activity(number).label if number < len(Activity) else "?"


def dump_of(boards: Sequence[Board], *, stacks: bool = True) -> str:
    """Return a dump as text.

    Args:
        boards: the boards of one process.
        stacks: whether to ask worker processes for their stacks, which takes a tenth of a second
            for each that does not answer.

    Returns:
        What the boards say. It comes from other processes, so what would control a terminal is
        escaped.
    """
    parts = [_text_of(figures_of(board, stacks=stacks)) for board in boards]
    return plain("\n\n".join(parts)) + "\n"


def _text_of(figures: dict[str, Any]) -> str:
    doing = "in code of its own"
    if figures["call"]:
        doing = f"in {plain_line(figures['call'])}"
    lines = [
        f"process {figures['pid']}: {plain_line(figures['command'])}",
        f"{plain_line(figures['manager'])} manager of {counted(figures['env_num'], 'env')}, as it "
        f"was {seconds_text(figures['age_s'])} ago: {counted(figures['timesteps'], 'timestep')}, "
        f"{counted(figures['episodes'], 'episode')}, {counted(figures['failures'], 'failure')}",
        f"the trainer is {doing}, for {seconds_text(figures['call_s'])}; its main thread:",
        figures["trainer"],
        "",
        *_table(figures["envs"]),
    ]
    for worker in figures["workers"]:
        memory_mb = worker["memory_bytes"] / 1e6
        name = f"worker {worker['pid']} of {_envs_text(worker['env_ids'])}, {memory_mb:.0f} MB"
        stacks = worker.get("stacks", "")
        if IDLE in stacks:  # between requests: nothing of that is the env's
            stacks = ""
            name += ": waits for what to do"
        lines += ["", name, *([stacks] if stacks else [])]
    return "\n".join(lines)


def _table(envs: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [_HEADER, *map(_row, envs)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADER))]
    for row, env in zip(rows, [None, *envs], strict=True):
        error = "last error" if env is None else _first_line(env["last_error"])
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{cells}  {error}".rstrip()


def _row(env: dict[str, Any]) -> tuple[str, ...]:
    name = f"{env['env_id']}{' (spare)' if env['is_spare'] else ''}"
    counts = (str(env[key]) for key in ("generation", "episodes", "failures"))
    return (name, env["state"], env["at"], seconds_text(env["for_s"]), *counts)


def _envs_text(env_ids: Sequence[int]) -> str:
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    return f"envs {', '.join(map(str, env_ids))}"


def _first_line(error: str | None) -> str:
    line = (error or "").partition("\n")[0]
    return line if len(line) <= _MOST_ERROR else f"{line[:_MOST_ERROR]}..."


def command_of(pid: int) -> str:
    """Return the command line of a process, as far as it is known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()[:200] or "?"
