"""Statistics of a collection."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from envmgr.collect.records import EpisodeRecord, as_json

RECENT = 100
"""How many of the latest episodes the recent mean is taken over."""


@dataclass(repr=False)
class Spread:
    """Mean, standard deviation and range of numbers, or of arrays of one shape, seen one by one.

    Attributes:
        mean: the mean; NaN if there are no numbers.
        low: the smallest number.
        high: the largest number.
    """

    n: int = 0
    mean: Any = float("nan")
    low: Any = float("nan")
    high: Any = float("nan")
    _squares: Any = 0.0

    def add(self, value: Any) -> None:
        """Add a value (Welford's method, which does not lose small spreads about large means)."""
        number = np.asarray(value, dtype=np.float64)
        self.n += 1
        if self.n == 1:
            self.mean = self.low = self.high = number
            self._squares = number * 0.0
            return
        before = number - self.mean
        self.mean = self.mean + before / self.n
        self._squares = self._squares + before * (number - self.mean)
        self.low = np.minimum(self.low, number)
        self.high = np.maximum(self.high, number)

    def __repr__(self) -> str:
        figures = {"n": self.n, **self.as_dict()}
        return f"Spread({', '.join(f'{name}={figure}' for name, figure in figures.items())})"

    def __copy__(self) -> Spread:
        return _shallow_copy(self)

    @property
    def std(self) -> Any:
        """The standard deviation of all numbers (divided by n); NaN if there are none."""
        return np.sqrt(self._squares / self.n) if self.n else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as values that JSON can hold."""
        figures = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {name: _as_plain(figure) for name, figure in figures.items()}


@dataclass
class CollectStatistics:
    """The statistics of a collector, which count abnormal episodes separately.

    Attributes:
        steps: number of timesteps, including abnormal ones and those of unfinished episodes.
        episodes: number of episodes that ended normally.
        abnormal_episodes: number of episodes that a failure ended.
        returns: the spread of the returns of the episodes that ended normally.
        lengths: the spread of their lengths.
        elapsed_s: seconds spent collecting.
    """

    steps: int = 0
    episodes: int = 0
    abnormal_episodes: int = 0
    returns: Spread = field(default_factory=Spread)
    lengths: Spread = field(default_factory=Spread)
    elapsed_s: float = 0.0
    _recent: deque[Any] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)

    def add(self, record: EpisodeRecord) -> None:
        """Count an episode that ended."""
        if record.abnormal:
            self.abnormal_episodes += 1
            return
        self.episodes += 1
        self.returns.add(record.episode_return)
        self.lengths.add(record.length)
        self._recent.append(record.episode_return)

    def copied(self) -> CollectStatistics:
        """Return a copy that can be added to without changing the original."""
        new = copy(self)
        new.returns, new.lengths = copy(self.returns), copy(self.lengths)
        new._recent = self._recent.copy()
        return new

    def __copy__(self) -> CollectStatistics:
        return _shallow_copy(self)

    @property
    def n_ended(self) -> int:
        """The number of episodes that have ended, normally or not."""
        return self.episodes + self.abnormal_episodes

    @property
    def steps_per_s(self) -> float:
        """Timesteps per second; 0 before the first."""
        return self.steps / self.elapsed_s if self.elapsed_s > 0.0 else 0.0

    @property
    def recent_mean_return(self) -> Any:
        """Mean return of the latest 100 episodes that ended normally; None if there are none."""
        recent = tuple(self._recent)  # in one go: others may be read while this one is written
        return _as_plain(np.mean(np.asarray(recent), axis=0)) if recent else None

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as values that JSON can hold; None if missing or not finite."""
        return {
            "steps": self.steps,
            "elapsed_s": round(self.elapsed_s, 6),
            "steps_per_s": round(self.steps_per_s, 3),
            "episodes": self.episodes,
            "abnormal_episodes": self.abnormal_episodes,
            "return": {**self.returns.as_dict(), "mean_of_last_100": self.recent_mean_return},
            "length": self.lengths.as_dict(),
        }


_T = TypeVar("_T")


def _shallow_copy(of: _T) -> _T:
    """Return a copy, in a fifth of the time that the standard library takes."""
    new = object.__new__(type(of))
    new.__dict__.update(of.__dict__)
    return new


def _as_plain(figure: Any) -> Any:
    return as_json(np.asarray(figure).tolist())
