"""Actions drawn before the clock runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

_BATCHES = 512
_SEED = 7


def _batches(env_num: int) -> Any:
    return np.random.default_rng(_SEED).integers(0, 2, (_BATCHES, env_num), np.int64)


def array_batches(env_num: int) -> Iterator[Any]:
    """Return endless batches of actions as arrays (env_num,) of int64."""
    return itertools.cycle(list(_batches(env_num)))


def list_batches(env_num: int) -> Iterator[list[int]]:
    """Return endless batches of actions as lists of env_num ints."""
    return itertools.cycle(_batches(env_num).tolist())
