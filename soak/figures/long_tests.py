"""The long forms of tests that search: the state machine, fuzzers, and torn reads."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from figures import Figure
from figures.commands import run, run_tests

MACHINE = "tests/property/test_supervisor_machine.py"
LIMIT_S = 7200.0
_MOVES = re.compile(r"(\d+) moves: ")
_EDGE = re.compile(r"^ *(\d+)  [A-Z_]+ --", re.MULTILINE)


class Fuzzer(NamedTuple):
    """A module of tests/fuzz.

    Attributes:
        module: its name.
        counts: its arguments.
        quick_counts: its arguments in the quick form.
        target: what should come out.
    """

    module: str
    counts: tuple[int, ...]
    quick_counts: tuple[int, ...]
    target: str


FUZZERS = {
    "frames of workers, mutated": Fuzzer(
        "frames", (100_000,), (2_000,), "no hang, no exception outside of envmgr's, no import"
    ),
    "words in the shared block, mutated": Fuzzer(
        "blocks", (100_000,), (2_000,), "no hang, no exception outside of envmgr's"
    ),
    "ordinary steps, in C and in Python": Fuzzer(
        "hot", (1_000_000,), (2_000,), "equal bytes, tokens, phases, buffers, figures and results"
    ),
    "configs, mutated": Fuzzer(
        "configs",
        (10_000,),
        (300,),
        "no hang, no exception outside of envmgr's, no import outside of the allow-list",
    ),
    "reads while somebody writes, and writers killed": Fuzzer(
        "torn", (10_000_000, 500), (20_000, 5), "none torn is accepted"
    ),
}


def measure(quick: bool) -> Sequence[Figure]:
    """Run the state machine and the fuzzers; each fails by itself when something is wrong.

    They run as many at a time as there are cores: each is one process most of the time. The quick
    form leaves out the state machine: even its short form takes minutes on a busy machine, and is
    in the suite anyway.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [] if quick else [pool.submit(_machine)]
        running += [pool.submit(_fuzz, *one, quick) for one in FUZZERS.items()]
        return [one.result() for one in running]


def _machine() -> Figure:
    """Run the state machine; it prints how often each edge was taken, the rarest first."""
    ran = run_tests("-s", MACHINE, limit_s=LIMIT_S, HYPOTHESIS_PROFILE="long")
    moves, taken = _MOVES.search(ran.output), _EDGE.findall(ran.output)
    measured = ran.summary
    if moves and taken:
        measured = (
            f"{int(moves[1]):,} moves, the rarest of {len(taken)} edges taken {taken[0]} times; "
            f"{ran.summary}"
        )
    return Figure(
        "state machine of the core: random moves, all invariants after each",
        measured,
        "100,000 moves, each edge 50 times, no invariant broken",
        ran.passed,
    )


def _fuzz(title: str, fuzzer: Fuzzer, quick: bool) -> Figure:
    counts = fuzzer.quick_counts if quick else fuzzer.counts
    ran = run(["-m", f"tests.fuzz.{fuzzer.module}", *map(str, counts)], LIMIT_S)
    return Figure(title, ran.summary, fuzzer.target, ran.passed)
