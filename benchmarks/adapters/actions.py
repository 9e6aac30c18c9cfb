"""Actions drawn before the clock runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from envs import action_batches
from spec import Spec

_BATCHES = 512


def array_batches(spec: Spec) -> Iterator[Any]:
    """Return endless batches of actions as arrays (env_num, ...) of what the env takes."""
    return itertools.cycle(list(action_batches(spec.env, spec.env_num, _BATCHES)))


def list_batches(spec: Spec) -> Iterator[list[Any]]:
    """Return endless batches of actions as lists, with an int or an array for each env."""
    batches = action_batches(spec.env, spec.env_num, _BATCHES)
    return itertools.cycle(batches.tolist() if batches.ndim == 2 else [list(b) for b in batches])
