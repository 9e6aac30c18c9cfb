"""Envs that are stepped together, and where an env may be: in its lane or out of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array
from envmgr.wire.block import NO_TOKEN, TOKEN_BYTES, Block, items

OUT, IDLE, STEPPING, RESETTING = range(4)
"""Where an env is: out of its lane, or in it and ready, taking a step, or being reset."""


class Window:
    """The rows of neighbours, cut out of the columns once: cheaper than an index each time.

    Args:
        block: the columns.
        rows: which.
        bases: tokens of request 0 of each env.
        expected: tokens of the replies that are awaited.

    Attributes:
        bases: their rows of `bases`.
        actions: their rows of the actions, per leaf.
        rewards: their rows of the rewards.
        replies: tokens that were replied, for comparing with `expected`.
        expected: tokens that are awaited.
        flags: of the replies.
        expected_bytes: the bytes of `expected`, for writing them as a whole.
        request_bytes: the bytes of the tokens that are requested, likewise.
        nothing: the bytes of `expected` while nothing is awaited.
    """

    __slots__ = (
        "actions",
        "bases",
        "expected",
        "expected_bytes",
        "flags",
        "nothing",
        "replies",
        "request_bytes",
        "rewards",
    )

    def __init__(self, block: Block, rows: slice, bases: Array, expected: Array) -> None:
        self.bases = bases[rows]
        self.actions = [column[rows] for column in block.actions]
        self.rewards = block.rewards[rows]
        self.replies = items(block.replies[rows])
        self.expected = items(expected[rows])
        self.flags = items(block.flags[rows])
        self.expected_bytes = self.expected.cast("B")
        self.request_bytes = items(block.requests[rows]).cast("B")
        self.nothing = NO_TOKEN.to_bytes(TOKEN_BYTES, sys.byteorder) * len(self.bases)


class Selection:
    """Envs that are stepped together, in the order their user named them.

    Attributes:
        ids: their env_ids.
        array: the same, as a read-only array (k,) int64.
        rows: what indexes their rows: a slice if they are neighbours, else `array`.
        is_slice: whether they are.
        hosts: the indexes of their hosts.
        window: their rows of the columns, if they are and as soon as they were asked for.
        arenas: their rows of the arenas, by slot, as far as they were asked for; if they are.
        is_ascending: whether the env_ids ascend.
        fresh: of neighbours: what says of all that the newest observation is in the arena.
        idle: likewise that they are ready.
        stepping: likewise that they take a step.
    """

    __slots__ = (
        "arenas",
        "array",
        "count",
        "fresh",
        "hosts",
        "idle",
        "ids",
        "is_ascending",
        "is_slice",
        "rows",
        "stepping",
        "window",
    )

    def __init__(self, ids: list[int], host_index: Sequence[int]) -> None:
        self.ids = ids
        self.count = len(ids)
        self.array: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.array.flags.writeable = False
        first, count = ids[0], len(ids)
        self.hosts = list(dict.fromkeys(map(host_index.__getitem__, ids)))
        self.is_slice = ids[-1] - first == count - 1 and ids == list(range(first, first + count))
        self.is_ascending = self.is_slice or ids == sorted(ids)
        self.rows: Any = self.array
        if self.is_slice:
            self.rows = slice(first, first + count)
            self.fresh = bytes((1,)) * count
            self.idle = bytes((IDLE,)) * count
            self.stepping = bytes((STEPPING,)) * count
        self.window: Window | None = None
        self.arenas: dict[int, list[Array]] = {}
