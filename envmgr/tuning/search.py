"""The search for the best of some settings: measured in turns, and compared. Does no I/O.

The speed of a machine varies, so rates of different moments say little. In a lap every setting is
measured once, in alternating order from lap to lap, and what counts is how it did beside the others
of the same lap. After each round the slower half is left out.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from envmgr.tuning.settings import Setting

Measure = Callable[[Any], float]
"""A function that returns the steps per second of a setting; 0 if it cannot be run."""

CLOSE = 0.03
"""Settings that are worse than the best by no more than this share count as equally good."""


T = TypeVar("T")


@dataclass
class Measured(Generic[T]):
    """What was measured of one setting, or of whatever else is compared.

    Attributes:
        rates: steps per second, by lap.
        ratios: its speed relative to the first setting, by lap; see `compare`.
    """

    setting: T
    rates: dict[int, float] = field(default_factory=dict)
    ratios: dict[int, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Steps per second, the median; 0 if nothing was measured."""
        return statistics.median(self.rates.values()) if self.rates else 0.0

    @property
    def ratio(self) -> float:
        """The median of its speed relative to the first setting; 0 if it cannot be run."""
        if not self.ratios:
            return 0.0
        # The median of logarithms, as in `compare`: the middle of two laps is not their mean.
        return math.exp(statistics.median(map(math.log, self.ratios.values())))

    @property
    def spread(self) -> float:
        """Half of the interquartile range of the ratios, relative to their median."""
        if len(self.ratios) < 2 or not self.ratio:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios.values(), n=4, method="inclusive")
        return (high - low) / 2 / self.ratio


def compare(everyone: Sequence[Measured[Any]]) -> None:
    """Set the ratios of all settings to the first one, as if all laps had been equally fast.

    How fast a lap was follows from the settings in it, and how fast a setting is from its laps.
    Both are medians, which a single disturbed measurement does not move (Tukey's median polish).

    Args:
        everyone: what is compared; the first of them has run in every lap.
    """
    logs = {
        k: {lap: math.log(rate) for lap, rate in one.rates.items() if rate > 0}
        for k, one in enumerate(everyone)
    }
    laps = {lap for by_lap in logs.values() for lap in by_lap}
    speed, pace = dict.fromkeys(logs, 0.0), dict.fromkeys(laps, 0.0)
    for _ in range(_POLISHES):
        for k, by_lap in logs.items():
            if by_lap:
                speed[k] = statistics.median(x - pace[lap] for lap, x in by_lap.items())
        for lap in laps:
            there = [x[lap] - speed[k] for k, x in logs.items() if lap in x]
            pace[lap] = statistics.median(there)
    runs = [k for k, by_lap in logs.items() if by_lap]
    reference = speed[0] if 0 in runs else min((speed[k] for k in runs), default=0.0)
    for k, one in enumerate(everyone):
        one.ratios = {lap: math.exp(x - pace[lap] - reference) for lap, x in logs[k].items()}


_POLISHES = 10


_LEAST_ENTRANTS = 3
_MOST_LAPS = 60
_LAUNCH_SHARE = 0.4


def search(
    settings: Sequence[Setting],
    measure: Measure,
    seconds: float,
    clock: Callable[[], float],
    *,
    beside: Sequence[Any] = (),
    dropped: Callable[[Any], None] = lambda setting: None,
    cost: Callable[[Setting], tuple[int, ...]] = lambda setting: (),
) -> tuple[Measured[Setting], list[Measured[Setting]], list[Measured[Any]]]:
    """Return the best setting, and what was measured of all settings and of what was beside them.

    In the first lap the settings are launched; those that would be so late that the others could
    not be measured are left out. Rounds share the rest of the time evenly; each has at least a lap.

    Args:
        settings: at least one, the most promising first; but the first is the present one, and is
            measured to the end, so that all are compared with it.
        measure: runs a setting for a while.
        seconds: about how long the search may take.
        clock: monotonic seconds.
        beside: what else is measured in the laps of the first round, and is not to be chosen.
        dropped: called with each setting that is not measured any more.
        cost: what to keep low among settings that do equally well; the present one comes first.
    """
    everyone, aside = [Measured(one) for one in settings], [Measured(one) for one in beside]
    others, began = aside, clock()
    first, *left = _launched(everyone, measure, lambda: clock() - began > _LAUNCH_SHARE * seconds)
    for one in aside:
        one.rates[0] = measure(one.setting)
    sizes, numbers = sizes_of(1 + len(left)), itertools.count(1)
    share_s, now_s = (began + seconds - clock()) / len(sizes), clock()
    for k, size in enumerate(sizes):
        for rest in left[size - 1 :]:
            dropped(rest.setting)
        left = left[: size - 1]
        for _ in _while_time(clock, now_s + share_s * (k + 1)):
            lap = next(numbers)
            entrants = [first, *left]
            for one in (*entrants[:: -1 if lap % 2 else 1], *aside):
                one.rates[lap] = measure(one.setting)
        compare([*everyone, *others])
        left = sorted(left, key=lambda one: -one.ratio)
        for it in aside:
            dropped(it.setting)
        aside = []
    return _simplest([first, *left], cost), everyone, others


def sizes_of(n: int) -> list[int]:
    """Return how many settings are measured in each round: half of them stay, until three do."""
    sizes = [n]
    while sizes[-1] > 3:
        sizes.append(max(3, math.ceil(sizes[-1] / 2)))
    return sizes


def _launched(
    settings: Sequence[Measured[Setting]], measure: Measure, is_late: Callable[[], bool]
) -> list[Measured[Setting]]:
    """Launch settings by measuring each once, and return those for which it was not too late."""
    for n, one in enumerate(settings):
        if n >= _LEAST_ENTRANTS and is_late():
            return list(settings[:n])
        one.rates[0] = measure(one.setting)
    return list(settings)


def _simplest(
    finalists: Sequence[Measured[Setting]], cost: Callable[[Setting], tuple[int, ...]]
) -> Measured[Setting]:
    """Return the simplest of the settings that do as well as the best; the first is simplest."""
    best = max(finalists, key=lambda one: one.ratio)
    close = [one for one in finalists if _is_as_good(one, best)]
    return min(close, key=lambda one: (one is not finalists[0], cost(one.setting)))


def _while_time(clock: Callable[[], float], until: float) -> Iterator[None]:
    """Yield once for each lap: at least one, and more while there is time for half a lap."""
    took_s = 0.0
    for n in range(_MOST_LAPS):
        began = clock()
        if n and began + took_s / 2 >= until:
            return
        yield
        took_s = clock() - began


def _is_as_good(one: Measured[Setting], best: Measured[Setting]) -> bool:
    """Return whether a setting does as well as the best, as far as laps that vary can tell."""
    errors = [x.spread / math.sqrt(max(len(x.ratios), 1)) for x in (one, best)]
    return one.ratio >= best.ratio * (1.0 - max(CLOSE, sum(errors)))
