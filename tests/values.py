"""Whether values are the same, in type and in every bit; `==` says that True is 1 and 1.0."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from envmgr.wire.info_columns import InfoColumns


def same_values(one: Any, other: Any, *, ordered: bool = True) -> bool:
    """Whether two values are equal in type, order of keys, dtype, shape and every bit.

    Args:
        one: a value.
        other: another.
        ordered: whether the order of keys matters; that of columns never does.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = [*one] == [*other]
        if not ordered or isinstance(one, InfoColumns):
            keys = one.keys() == other.keys()
        return keys and all(same_values(one[key], other[key], ordered=ordered) for key in one)
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return False
        return all(same_values(a, b, ordered=ordered) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray) and one.dtype == object:
        shapes = (one.shape, one.dtype) == (other.shape, other.dtype)
        return shapes and same_values(one.ravel().tolist(), other.ravel().tolist(), ordered=ordered)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)
