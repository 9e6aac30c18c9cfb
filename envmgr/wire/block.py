"""The shared block: what a step needs, as columns in shared memory with one row for each env.

The parent writes an env's action and then, last, its token into `requests`: which request of which
generation of the env this is. The host writes reward and flags (the observation is in its arena by
then), and last the same token into `replies`. So a reply is valid exactly when its token is the one
that is awaited: a late one, or one of an env that has been renewed, never is. Likewise `resets` for
episodes that the host has begun.

Writing last, and reading first, keeps its order on x86-64 only: elsewhere steps go by message.
"""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array, Layout
from envmgr.wire import timeline
from envmgr.wire.latencies import KINDS, NUMBERS
from envmgr.wire.rewards import ARRAYS, FIRST_ARRAY, FIRST_WIDE, ROOM

_ALIGNMENT_BYTES = 64
_WORDS = 8
_BY_HOST = frozenset(("posted", "finished", "mail", "running", "since", "sleeping", "n_events"))
"""Columns whose items have a cache line each: who writes into one makes others wait for it."""


INFO_BYTES = 248
"""Room for one info; larger ones go by message."""

_REQUEST_BITS = 44
MAX_REQUEST_ID = (1 << _REQUEST_BITS) - 1
TOKEN_BYTES = 8

# Flags of a reply: at which place its observation is in, and what else there is to know.
PLACE_BITS = 0x000F
ENDING_SHIFT = 4
ENDING_BITS = 0x0070
DONE = 0x0080
HAS_INFO = 0x0100
AFTER_SHIFT = 9
AFTER_BITS = 0x0600
REWARD_SHIFT = 11
REWARD_BITS = 0xF800
TOLD_BIT = 0x0010
ORDINARY_BITS = PLACE_BITS | TOLD_BIT
"""A reply without other flags than these is that of a step like any other."""


def token_of(generation: int, request_id: int) -> int:
    """Return the token of a request; unique for an env, whatever becomes of it."""
    return (generation & 0xFFFF) << _REQUEST_BITS | request_id


def request_of(token: int) -> tuple[int, int]:
    """Return the generation (of 16 bits) and the request id of a token."""
    return token >> _REQUEST_BITS, token & MAX_REQUEST_ID


def generation_of(tokens: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return tokens of request 0, of the generations that these are of."""
    found: npt.NDArray[np.uint64] = tokens & _GENERATION_BITS
    return found


_GENERATION_BITS = np.uint64(0xFFFF << _REQUEST_BITS)

# Bits of what is posted: when a host rings, and whether there is more than steps.
RING_MASK = 3
RING_LAST, RING_ONCE, RING_EACH = 0, 1, 2
"""When a host rings for what was posted: at the end if it is the last of those that the same was
posted for, at the end in any case, or for each env in good time."""
ORDERS = 4
"""There are new tokens in `orders`."""
_POSTING_BITS = 3


def posting_of(request_id: int, bits: int) -> int:
    """Return what is written into `posted`: different each time, and larger.

    Args:
        request_id: of what is posted, which grows.
        bits: RING_LAST, RING_ONCE or RING_EACH, with ORDERS or without.
    """
    return request_id << _POSTING_BITS | bits


def block_is_possible() -> bool:
    """Whether this platform keeps the order of writes and has doorbells."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "eventfd")


@dataclass(frozen=True)
class BlockPlan:
    """Where the columns are.

    Attributes:
        env_num: rows.
        n_hosts: hosts that serve them.
        actions: the layout of the envs' actions, or of the first kind of them.
        reward_room: numbers that there is room for in a reward.
        measures: whether hosts write down how long steps and resets take.
        events: how much of what it does each host notes.
        more_actions: the layouts of the other kinds, where action spaces differ.
    """

    env_num: int
    n_hosts: int
    actions: Layout
    reward_room: int = ROOM
    measures: bool = False
    events: int = 0
    more_actions: tuple[Layout, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the block; it begins with the memory."""
        return sum(aligned(_nbytes(shape, dtype)) for _, shape, dtype in self._columns())

    def _columns(self) -> list[tuple[str, tuple[int, ...], Any]]:
        n = self.env_num
        columns: list[tuple[str, tuple[int, ...], Any]] = [
            ("posted", (self.n_hosts, _WORDS), np.uint64),
            ("finished", (self.n_hosts, _WORDS), np.uint64),
            ("mail", (self.n_hosts, _WORDS), np.uint64),
            ("running", (self.n_hosts, _WORDS), np.int64),
            ("since", (self.n_hosts, _WORDS), np.float64),
            ("sleeping", (self.n_hosts + 1, _WORDS), np.uint64),
            ("requests", (n,), np.uint64),
            ("orders", (n,), np.uint64),
            ("replies", (n,), np.uint64),
            ("resets", (n,), np.uint64),
            ("rewards", (n,), np.float64),
            ("wide_rewards", (n, self.reward_room), np.float64),
            ("flags", (n,), np.uint16),
            ("reset_flags", (n,), np.uint16),
            ("kinds", (n,), np.uint8),
            ("infos", (n, INFO_BYTES), np.uint8),
            ("reset_infos", (n, INFO_BYTES), np.uint8),
            ("n_events", (self.n_hosts, _WORDS), np.uint64),
            ("events", (self.n_hosts, self.events, timeline.NUMBERS), np.float64),
            ("latencies", (len(KINDS), n if self.measures else 0, NUMBERS), np.float64),
        ]
        for kind, layout in enumerate(self.layouts):
            columns += [(f"action {kind}", (n, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
        return columns

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of all kinds of actions."""
        return (self.actions, *self.more_actions)


def aligned(nbytes: int) -> int:
    """Return the next offset at which an array may begin."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(np.dtype(dtype).itemsize)


_FENCE = threading.Lock()


def fence() -> None:
    """Have what was written before be seen before anything is read after.

    Who goes to sleep says so in `sleeping`, and then looks once more whether there is something to
    do; who has something for another writes it, and then looks whether that one sleeps and has to
    be rung for. Either sees the other's word, but only if no processor lets a read overtake the
    write before it: as x86-64 does, except at a locked instruction. Taking a free lock is one, and
    so is giving one back: who is interrupted in between leaves it for the next one to do. Where
    nobody is interrupted, `with` a lock of one's own is as good, and costs no call.
    """
    is_taken = False
    while not is_taken:
        try:
            is_taken = _FENCE.acquire(False)
            _FENCE.release()
        except RuntimeError:  # another thread was here at the same time, and gave it back
            continue


def items(column: Array) -> Any:
    """Return a column of numbers for reading and writing one by one, at half of an array's cost."""
    return memoryview(column)  # type: ignore[arg-type]


class Block:
    """The columns over a memory.

    Args:
        memory: at least `plan.nbytes` bytes, zeros at first.
        plan: where they are.

    Attributes:
        posted: (n_hosts,) counts what was posted for a host, and says when it is to ring: see
            `posting_of`.
        finished: (n_hosts,) what of `posted` a host was done with last.
        mail: (n_hosts,) another number each time a message has been sent to a host: who takes steps
            all the time sees from it that there is something to read, without a system call.
        running: (n_hosts,) the env that a host runs, plus one; 0 while it runs none.
        since: (n_hosts,) when that began or ended, on the monotonic clock.
        sleeping: (n_hosts + 1,) whether a host, or the parent (the last), has to be rung for: see
            `fence`.
        requests: (env_num,) token of the step to be taken.
        orders: (env_num,) token of the reset that is asked for: without a seed, with the params of
            the env's present plan, which stays. It is run after the steps of the same batch.
        replies: (env_num,) token of the step that was taken.
        resets: (env_num,) token of the reset that was asked for and has been run, or of the step
            after which an episode was begun.
        rewards: (env_num,) float64; see the module `rewards`.
        wide_rewards: (env_num, reward_room) float64, those of several numbers.
        flags: (env_num,) of replies.
        reset_flags: (env_num,) place of the first observation, and whether there is an info.
        kinds: (env_num,) forms of actions, see `spaces.columns`.
        infos: (env_num, INFO_BYTES) what `infos.InfoEncoder` made.
        reset_infos: likewise.
        n_events: (n_hosts,) how much each host has noted, ever.
        events: (n_hosts, plan.events, NUMBERS) the newest of it; see the module `timeline`.
        latencies: (2, env_num, NUMBERS) how long steps, and resets, took; see the module
            `latencies`. Of no env, unless that is measured.
        actions_of: of each kind of actions, per leaf (env_num, *shape).
        actions: of the first kind.
    """

    posted: npt.NDArray[np.uint64]
    finished: npt.NDArray[np.uint64]
    mail: npt.NDArray[np.uint64]
    running: npt.NDArray[np.int64]
    since: npt.NDArray[np.float64]
    sleeping: npt.NDArray[np.uint64]
    requests: npt.NDArray[np.uint64]
    orders: npt.NDArray[np.uint64]
    replies: npt.NDArray[np.uint64]
    resets: npt.NDArray[np.uint64]
    rewards: npt.NDArray[np.float64]
    wide_rewards: npt.NDArray[np.float64]
    flags: npt.NDArray[np.uint16]
    reset_flags: npt.NDArray[np.uint16]
    kinds: npt.NDArray[np.uint8]
    infos: npt.NDArray[np.uint8]
    reset_infos: npt.NDArray[np.uint8]
    n_events: npt.NDArray[np.uint64]
    events: npt.NDArray[np.float64]
    latencies: npt.NDArray[np.float64]

    def __init__(self, memory: Any, plan: BlockPlan) -> None:
        self.plan = plan
        self.actions_of: list[list[Array]] = [[] for _ in plan.layouts]
        self.actions = self.actions_of[0]
        offset = 0
        for name, shape, dtype in plan._columns():
            column: Array = np.ndarray(shape, dtype=dtype, buffer=memory, offset=offset)
            offset += aligned(_nbytes(shape, dtype))
            if name in _BY_HOST:
                column = column[:, 0]
            if name.startswith("action "):
                self.actions_of[int(name.removeprefix("action "))].append(column)
            else:
                setattr(self, name, column)

    def reward_numbers(self, kind: int, rows: Any) -> npt.NDArray[np.float64]:
        """Return the numbers of rewards of one kind: (k,), or (k, n) if each is several.

        Args:
            kind: of all of them; see the module `rewards`.
            rows: a slice, or their indices.
        """
        numbers: npt.NDArray[np.float64]
        if kind < FIRST_WIDE:
            numbers = self.rewards[rows]
        else:
            numbers = self.wide_rewards[rows, : ARRAYS[kind - FIRST_ARRAY][1] or None]
        return numbers
