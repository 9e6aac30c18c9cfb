"""The mean and the variance of what was seen so far, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array

Floats = npt.NDArray[np.float64]


class Moments(NamedTuple):
    """The moments of the values seen so far, each element by itself.

    Attributes:
        n_seen: how many values were seen.
        mean: their mean.
        squares: the sum of their squared distances from the mean.
    """

    n_seen: int
    mean: Floats
    squares: Floats

    @property
    def variance(self) -> Floats:
        """The variance; 1 while fewer than two were seen."""
        if self.n_seen < 2:
            return np.ones_like(self.mean)
        variance: Floats = self.squares / self.n_seen
        return variance

    def seen(self, batch: Array) -> Moments:
        """Return the moments with the rows of a batch added (Chan, Golub and LeVeque, 1979).

        A row with a NaN or an infinite number is skipped, as it would spoil the moments for good.
        """
        rows = batch.astype(np.float64)
        finite = np.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
        if not finite.all():
            rows = rows[finite]
        n = len(rows)
        if n == 0:
            return self
        mean = rows.mean(axis=0)
        squares = np.square(rows - mean).sum(axis=0)
        count, distance = self.n_seen + n, mean - self.mean
        return Moments(
            count,
            self.mean + distance * (n / count),
            self.squares + squares + np.square(distance) * (self.n_seen * n / count),
        )


def no_moments(shape: tuple[int, ...]) -> Moments:
    """Return moments of this shape, with no values seen."""
    return Moments(0, np.zeros(shape), np.zeros(shape))


def saved(moments: Moments) -> dict[str, Any]:
    """Return moments as a dict of arrays, which are copies."""
    return {name: np.array(value) for name, value in moments._asdict().items()}


def as_moments(saved: Mapping[str, Any]) -> Moments:
    """Return the moments that `saved` made a dict of, whatever their shape.

    Raises:
        KeyError, TypeError, ValueError: the argument is something else.
    """
    mean, squares = (np.array(saved[name], np.float64) for name in ("mean", "squares"))
    return Moments(int(saved["n_seen"]), mean, array_like(squares, mean))


def loaded(saved: Mapping[str, Any], like: Moments) -> Moments:
    """Return the moments that `saved` made a dict of, if they have the shape of `like`.

    Raises:
        KeyError, TypeError, ValueError: the argument is something else, or has another shape than
            `like`.
    """
    mean, squares = (array_like(saved[name], like.mean) for name in ("mean", "squares"))
    return Moments(int(saved["n_seen"]), mean, squares)


def array_like(value: Any, like: Any) -> Any:
    """Return a value as a new array of the dtype of `like`.

    Raises:
        TypeError, ValueError: its shape is not that of `like`.
    """
    array = np.array(value, like.dtype)
    if array.shape != like.shape:
        raise ValueError(f"an array has the shape {array.shape}, not {like.shape}")
    return array
