"""Rewards in the shared block: which fit there, and how they are restored as they were.

A reward of one number, alone or in an array, is in the column `rewards`; a reward of several
numbers is in `wide_rewards`. All else about a reward, its kind, is in the flags.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TYPES: tuple[type, ...] = (float, int, np.float64, np.float32, np.int64, bool)
"""Types of single rewards, which are the first kinds; all are kept exactly as a float64."""

LENGTH, MAX_LENGTH = 8, 1024
"""The most numbers in an array: 8, or as many as the env's reward space says, up to 1024. Other
arrays go by message."""

_ALL = 0
ARRAYS: tuple[tuple[np.dtype[Any], int], ...] = tuple(
    (np.dtype(dtype), length)
    for length in (*range(1, LENGTH + 1), _ALL)
    for dtype in (np.float32, np.float64)
)
"""Dtype and length of rewards that are arrays of one dimension, which are the other kinds; length 0
stands for arrays of the greatest length that is possible."""

FIRST_ARRAY = len(TYPES)
FIRST_WIDE = FIRST_ARRAY + 2
"""From this kind on a reward has several numbers."""
KINDS = FIRST_ARRAY + len(ARRAYS)

_TYPE_KINDS = {kind: number for number, kind in enumerate(TYPES)}
_ARRAY_KINDS: dict[tuple[np.dtype[Any], tuple[int, ...]], int] = {
    (dtype, (length,)): FIRST_ARRAY + number
    for number, (dtype, length) in enumerate(ARRAYS)
    if length != _ALL
}
_WHOLE_KINDS = {
    dtype: FIRST_ARRAY + k for k, (dtype, length) in enumerate(ARRAYS) if length == _ALL
}
_MOST_EXACT = 1 << 53

FITS_ALL = frozenset(range(KINDS)) - {TYPES.index(int), TYPES.index(np.int64)}
"""Kinds that every number can be restored as; NaN and infinities cannot be integers."""


def kind_of_reward(reward: Any, length: int = LENGTH) -> int | None:
    """Return the kind of a reward; None if it does not fit, or would not be kept exactly."""
    if type(reward) is np.ndarray:
        kind = _ARRAY_KINDS.get((reward.dtype, reward.shape))
        if kind is None and reward.shape == (length,):
            kind = _WHOLE_KINDS.get(reward.dtype)
        return kind
    kind = _TYPE_KINDS.get(type(reward))
    if kind in FITS_ALL or (kind is not None and -_MOST_EXACT < reward < _MOST_EXACT):
        return kind
    return None


def restored(kind: int, numbers: npt.NDArray[np.float64]) -> list[Any]:
    """Return rewards of one kind in their original form; arrays are copies of their own.

    Args:
        kind: the kind of all of them.
        numbers: (k,), or (k, n) if each reward has several numbers.

    Raises:
        ValueError: the rewards are integers, and one of the numbers cannot be one.
        OverflowError: likewise.
    """
    with np.errstate(all="ignore"):  # what a worker wrote need not fit, and is an infinity then
        if kind < FIRST_ARRAY:
            return list(map(TYPES[kind], numbers.tolist()))
        dtype, length = ARRAYS[kind - FIRST_ARRAY]
        return list(numbers.reshape(-1, length or numbers.shape[-1]).astype(dtype))
