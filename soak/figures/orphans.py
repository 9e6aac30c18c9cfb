"""Orphans: what is left of a trainer that is killed, at random points of its life; and daemons."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import Figure, in_ms, quantile
from tests.leak_guard import LeakGuard, Snapshot

TRAINER = Path(__file__).resolve().parent.parent / "trainer.py"
DAEMONS = TRAINER.with_name("daemons.py")
ENDS = {
    "kill": "each worker killed with -9",
    "limit": "each env beyond its `step_timeout`",
    "close": "manager closed",
    "trainer": "trainer killed with -9",
}
DAEMON_ENVS = 200
QUICK_DAEMON_ENVS = 8
POINTS = {"server": 100, "fork": 60, "forkserver": 20, "spawn": 20}
QUICK_POINTS = 2
SPAN_S = 1.0
"""Every other trainer is killed within this time of its start, while it imports or launches; the
rest within this time of their first steps."""
ENV_NUM = 6  # of the trainer
LIMIT_S = 1.0
PATIENCE_S = 20.0
DAEMON_PATIENCE_S = 120.0

_POLL_S = 0.005
_SEED = 11


def measure(quick: bool) -> Sequence[Figure]:
    """Kill trainers at random points, by each start method."""
    guard, draw = LeakGuard(), random.Random(_SEED)
    n_envs = QUICK_DAEMON_ENVS if quick else DAEMON_ENVS
    return [
        *(
            _figure(guard, draw, context, QUICK_POINTS if quick else n)
            for context, n in POINTS.items()
        ),
        *(daemons(context, n_envs, end) for context in ("server", "fork") for end in ENDS),
    ]


def _figure(guard: LeakGuard, draw: random.Random, context: str, n: int) -> Figure:
    runs = [
        kill_one(guard, context, draw.uniform(0.0, SPAN_S), launched=number % 2 == 1)
        for number in range(n)
    ]
    times = [gone_s for _, gone_s in runs]
    late = sum(gone_s > LIMIT_S for gone_s in times)
    with_workers = [found for found, _ in runs if found]
    return Figure(
        f"trainer killed with -9 at {n} random points, `context: {context}`",
        f"{late} times processes left after {LIMIT_S:g} s; all gone after "
        f"{in_ms(max(times))} at most, median {in_ms(quantile(times, 0.5))}; "
        f"{len(with_workers)} trainers had up to {max(with_workers, default=0)} processes",
        f"none left after {LIMIT_S:g} s",
        late == 0,
    )


def kill_one(
    guard: LeakGuard, context: str, after_s: float, *, launched: bool
) -> tuple[int, float]:
    """Return how many processes a trainer had when it was killed, and when they were gone.

    Args:
        guard: finds the processes.
        context: how the trainer starts its workers.
        after_s: seconds after which the trainer is killed.
        launched: whether these count from the launch, and not from the trainer's start.
    """
    before = guard.snapshot()
    with subprocess.Popen(
        [sys.executable, str(TRAINER), context],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as trainer:
        if launched and trainer.stdout is not None:
            trainer.stdout.readline()  # also when it ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = trainer.wait(after_s)
            raise RuntimeError(f"the trainer has ended by itself, with exit status {status}")
        found = len(_new(guard, before)) - 1
        trainer.kill()
        killed_s = time.monotonic()
        trainer.wait()
    while _new(guard, before) and time.monotonic() - killed_s < PATIENCE_S:
        time.sleep(_POLL_S)
    gone_s = time.monotonic() - killed_s
    guard.wait_until_clean(before, 0.0)
    return found, gone_s


def daemons(context: str, env_num: int, end: str) -> Figure:
    """Return a figure of daemons that outlive the workers of their envs: see `end_daemons`."""
    found, took_s = end_daemons(context, env_num, end)
    late = sum(gone_s > LIMIT_S for gone_s in took_s)
    return Figure(
        f"daemons of {env_num} envs, `context: {context}`, {ENDS[end]}",
        f"{late} of {found} left after {LIMIT_S:g} s; all gone after {in_ms(max(took_s))}",
        f"none left after {LIMIT_S:g} s",
        found == 2 * env_num and late == 0,
    )


def end_daemons(context: str, env_num: int, end: str) -> tuple[int, list[float]]:
    """End all workers, whose envs have started processes that left the worker's session.

    Args:
        context: how the trainer starts its workers.
        env_num: how many envs there are, in a worker each.
        end: how the workers end, see `daemons.py`; or "trainer": the trainer is killed.

    Returns:
        How many of these processes there were, two for each env, and the seconds after which each
        had ended; infinite if it had not.
    """
    with subprocess.Popen(
        [sys.executable, str(DAEMONS), context, str(env_num), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        if trainer.stdin is None or trainer.stdout is None:
            raise RuntimeError("no pipe")
        workers, daemons_of = json.loads(trainer.stdout.readline())
        left = {worker: set(pids) for worker, pids in zip(workers, daemons_of, strict=True)}
        found = sum(map(_is_there, itertools.chain(*daemons_of)))
        if end == "trainer":
            trainer.kill()
            begun_s = time.monotonic()
        else:
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            begun_s = float(trainer.stdout.readline())
        # Hung envs are given up one after the other, so time counts from the end of each worker.
        ended_s = {} if end == "limit" else dict.fromkeys(workers, begun_s)
        took_s = dict.fromkeys(itertools.chain(*daemons_of), math.inf)
        while any(left.values()) and time.monotonic() - begun_s < DAEMON_PATIENCE_S:
            for worker, pids in left.items():
                if pids and worker not in ended_s and not _is_there(worker):
                    ended_s[worker] = time.monotonic()
                for pid in [pid for pid in pids if not _is_there(pid)]:
                    pids.discard(pid)
                    took_s[pid] = time.monotonic() - ended_s.get(worker, math.inf)
            time.sleep(_POLL_S)
        trainer.kill()
    return found, list(took_s.values())


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _new(guard: LeakGuard, before: Snapshot) -> set[Any]:
    return guard.snapshot().processes.keys() - before.processes.keys()
