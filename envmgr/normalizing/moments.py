"""The mean and the variance of what was seen so far, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array

Floats = npt.NDArray[np.float64]


class Moments(NamedTuple):
    """What was seen of something so far, each element by itself.

    Attributes:
        n_seen: how many.
        mean: of them.
        squares: the sum of the squares of their distances from that.
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
        """Return the same with the rows of a batch (Chan, Golub and LeVeque, 1979).

        A row with a NaN or an infinite number would be all that is left of it: it is passed over.
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
    """Return the moments of nothing, which are of this shape."""
    return Moments(0, np.zeros(shape), np.zeros(shape))


def saved(moments: Moments) -> dict[str, Any]:
    """Return moments as a dict of arrays of its own."""
    return {name: np.array(value) for name, value in moments._asdict().items()}


def as_moments(saved: Mapping[str, Any]) -> Moments:
    """Return what `saved` gave, of whatever shape.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    mean, squares = (np.array(saved[name], np.float64) for name in ("mean", "squares"))
    return Moments(int(saved["n_seen"]), mean, array_like(squares, mean))


def loaded(saved: Mapping[str, Any], like: Moments) -> Moments:
    """Return what `saved` gave.

    Raises:
        KeyError, TypeError, ValueError: it is something else, or of another shape than `like`.
    """
    mean, squares = (array_like(saved[name], like.mean) for name in ("mean", "squares"))
    return Moments(int(saved["n_seen"]), mean, squares)


def array_like(value: Any, like: Any) -> Any:
    """Return an array of its own, of the dtype of another one.

    Raises:
        TypeError, ValueError: it has not the shape of that.
    """
    array = np.array(value, like.dtype)
    if array.shape != like.shape:
        raise ValueError(f"an array has the shape {array.shape}, not {like.shape}")
    return array
