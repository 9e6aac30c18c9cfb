"""What an env's rewards have to be, and what its exceptions count as.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

import numpy as np

from envmgr.env.contract import EnvContractError
from envmgr.spaces import NonFiniteError, ValueMismatchError
from envmgr.spaces.reading import short_text
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import FailureKind


def check_reward(reward: Any, *, refuse_non_finite: bool) -> None:
    """Check that a reward is a number, or consists of numbers.

    Raises:
        ValueMismatchError: it does not.
        NonFiniteError: one of them is not finite, which is refused.
    """
    if type(reward) is not float and not _is_numeric(reward):
        raise ValueMismatchError(f"the reward is {short_text(reward)}, not a number")
    if refuse_non_finite and not _is_finite(reward):
        text = short_text(reward)
        raise NonFiniteError(f"the reward is {text} (nan_policy is not allow)")


def _parts(reward: Any) -> Iterable[Any] | None:
    """Return the rewards that a reward consists of; None if it is one, or an array of them."""
    if isinstance(reward, Mapping):
        return reward.values()
    return reward if isinstance(reward, (list, tuple)) else None


def _is_numeric(reward: Any) -> bool:
    if isinstance(reward, (np.ndarray, np.generic)):
        return reward.dtype.kind in "biufc"
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_numeric, parts))
    return isinstance(reward, Number) or hasattr(reward, "__array__")  # tensors, whatever device


def _is_finite(reward: Any) -> bool:
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_finite, parts))
    array = np.asarray(reward)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def kind_of(error: BaseException) -> FailureKind:
    """Return what an exception counts as that came out of an env's code, or of these checks."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return FailureKind.EXITED
    if isinstance(error, NonFiniteError):
        return FailureKind.NON_FINITE
    if isinstance(error, (ValueMismatchError, FrameError, EnvContractError)):
        return FailureKind.PROTOCOL
    return FailureKind.RAISED
