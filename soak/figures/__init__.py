"""The figures of `make soak`: one module for each entry, with a function `measure(quick)`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        what: what is measured.
        measured: what came out.
        target: what should come out.
        met: whether the target was met; None where nothing could be measured.
    """

    what: str
    measured: str
    target: str
    met: bool | None


ENTRIES = {
    "accounting": "lost, repeated and swapped timesteps while workers are hurt",
    "deaths": "how soon deaths are seen, and dead workers replaced",
    "hangs": "how soon hangs are answered",
    "close": "how long `close` takes with hung workers",
    "orphans": "what is left of a trainer that is killed",
    "leaks": "what renewals leave behind",
    "starvation": "how soon an env is ready again while its neighbours are stepped without a pause",
    "interrupts": "what signals at any point of a call leave behind",
    "trained-interrupts": "what interrupts leave behind in adapters and collectors",
    "leases": "leases while envs crash and hang, workers are killed, and users are cancelled",
    "crash-loop": "what an env costs that dies again and again",
    "launches": "launches while envs fail",
    "long-tests": "the long forms of property tests, fuzzing and torn reads",
    "modes": "the tests under other modes of the interpreter and low limits",
}
"""The entries and what each is about."""


def measure_of(entry: str) -> Callable[[bool], Sequence[Figure]]:
    """Return the function that measures an entry."""
    module = importlib.import_module(f"figures.{entry.replace('-', '_')}")
    measure: Callable[[bool], Sequence[Figure]] = module.measure
    return measure


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile by the nearest-rank method; NaN if there are no values."""
    if not values:
        return math.nan
    return sorted(values)[math.ceil(q * len(values)) - 1]


def in_ms(seconds: float) -> str:
    """Return a time in milliseconds, as text."""
    return f"{seconds * 1000:.1f} ms"
