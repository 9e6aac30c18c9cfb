"""Paired rounds: runners side by side, each measured twice in a round, forwards and backwards.

What a machine does besides comes to all of them alike, and so does what grows with time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

Cost = tuple[float, float]
"""Seconds, and seconds of processors."""


class Runner(Protocol):
    """What takes batches of steps."""

    def run(self, batches: int) -> Cost:
        """Take batches; return what they cost."""
        ...


def paired_rounds(
    runners: Mapping[str, Runner], rounds: int, batches: int
) -> Iterator[dict[str, Cost]]:
    """Yield, for each round, what twice so many batches have cost each runner."""
    for lap in range(-1, rounds):  # the first one warms up
        order = list(runners) if lap % 2 else list(reversed(runners))
        sums = dict.fromkeys(runners, (0.0, 0.0))
        for name in (*order, *reversed(order)):
            wall_s, cpu_s = runners[name].run(batches)
            sums[name] = (sums[name][0] + wall_s, sums[name][1] + cpu_s)
        if lap >= 0:
            yield sums
