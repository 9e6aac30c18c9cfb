"""Data that is large, in every form, and envs that give it."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr.testing import LedgerEnv, mark_of
from envmgr.wire.large_messages import LARGE_BYTES

LARGE = LARGE_BYTES * 4


def assert_same(found: Any, given: Any) -> None:
    """Fail unless two trees are equal, in types, dtypes, order and whether arrays are writable."""
    assert type(found) is type(given)
    if isinstance(given, dict):
        assert list(found) == list(given)
        for key, value in given.items():
            assert_same(found[key], value)
    elif isinstance(given, (list, tuple)):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    elif isinstance(given, np.ndarray):
        plain = pickle.loads(pickle.dumps(given, protocol=5))
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        for name in ("c_contiguous", "f_contiguous", "writeable"):
            assert getattr(found.flags, name) == getattr(plain.flags, name)
        both = (found, given)
        one, other = (a.tolist() if a.dtype.hasobject else a.tobytes() for a in both)
        assert one == other
    else:
        assert found == given


RECORD = np.dtype([("hp", np.float32), ("at", np.int16, (2,)), ("name", "U8")])


def read_only() -> Any:
    """Return an array that cannot be written to."""
    fixed = np.arange(LARGE, dtype=np.uint8)
    fixed.flags.writeable = False
    return fixed


def of_length(nbytes: int) -> Callable[[], Any]:
    """Return what makes an array of so many bytes."""
    return lambda: np.arange(nbytes, dtype=np.uint8)


FORMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "nothing": lambda: {},
    "no bytes": lambda: np.zeros(0, np.uint8),
    "rows of none": lambda: np.zeros((5, 0), np.float32),
    "a number": lambda: np.array(3.5),
    **{
        f"{n:+d} of {name}": of_length(limit + n)
        for name, limit in (("an array aside", 1 << 12), ("a large message", LARGE_BYTES))
        for n in (-1, 0, 1)
    },
    "strided": lambda: np.arange(LARGE, dtype=np.int64)[::3],
    "backwards": lambda: np.arange(LARGE, dtype=np.int64)[::-1],
    "by columns": lambda: np.asfortranarray(np.arange(LARGE, dtype=np.float64).reshape(64, -1)),
    "records": lambda: np.zeros(LARGE, RECORD),
    "objects": lambda: np.array([{"a": 1}, None, "x" * LARGE], dtype=object),
    "big-endian": lambda: np.arange(LARGE, dtype=">i4"),
    "times": lambda: np.arange(LARGE).astype("datetime64[s]"),
    "read-only": read_only,
    "scalar": lambda: np.float32(3),
    "bytes": lambda: b"\0\xff" * LARGE,
    "bytearray": lambda: bytearray(b"\0\xff" * LARGE),
    "text": lambda: "\u00e4" * LARGE,
    "many small": lambda: [np.full(100, i) for i in range(300)],
    "more than one call reads": lambda: [np.full(600, i) for i in range(1100)],
    "nested": lambda: {
        "a": {"b": [np.ones(LARGE), (np.zeros(9), {"c": np.ones((300, 300), bool)})]}
    },
    "an array of a class": lambda: np.ma.masked_array(np.arange(LARGE), mask=False).data,
}
"""What makes each of them: together they are 11 MB, which every fork of a test would have, too."""


class LargeInfos(gymnasium.Env[Any, Any]):
    """Gives what its action says, in the info; and in the observation, if it has no space."""

    action_space = Discrete(len(FORMS))

    def __init__(self, *, has_space: bool, file_bytes: int | None = None) -> None:
        self.has_space = has_space
        if has_space:
            self.observation_space = Box(-1, 1, (3,), np.float32)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    def observe(self, value: Any) -> Any:
        """Return an observation."""
        return np.zeros(3, np.float32) if self.has_space else [value]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self.observe(FORMS["nested"]()), {"first": FORMS["by columns"]()}

    def step(self, action: Any) -> Any:
        """Give data."""
        value = [*FORMS.values()][action]()
        return self.observe(value), 1.0, False, False, {"x": value, "action": int(action)}

    def form(self, name: str) -> Any:
        """Return data."""
        return FORMS[name]()


class LargeLedger(LedgerEnv):
    """Signs its timesteps, and says in a large array and a large text, too, which they are."""

    def step(self, action: Any) -> Any:
        """Take a step."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, **self.filled(info)}

    @staticmethod
    def filled(info: Any) -> dict[str, Any]:
        """Return what belongs into an info with this mark."""
        mark = mark_of(info)
        assert mark is not None
        n = LARGE_BYTES * (mark.sequence % 9)
        return {"array": np.full(n, mark.sequence), "text": chr(48 + mark.sequence % 70) * n}
