"""The shared block: what a step needs, as columns in shared memory with one row for each env.

The parent writes an env's action, and then the token of the step into `requests`. The token says
which request this is, and for which generation of the env. The host writes the reward and the flags
(the observation is in its arena by then), and then the same token into `replies`. So a reply is
valid if and only if its token is the one that the parent awaits; a late reply, or one from an env
that has been renewed since, is never valid. The column `resets` does the same for episodes that the
host has begun.

One side writes the token last, the other reads it first. Only on x86-64 do processors keep that
order; elsewhere steps go by message.
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
from envmgr.wire.messages import AfterStep
from envmgr.wire.rewards import ARRAYS, FIRST_ARRAY, FIRST_WIDE, LENGTH

_ALIGNMENT_BYTES = 64
_WORDS = 8
_BY_HOST = frozenset(
    ("posted", "finished", "messages_sent", "running", "since", "sleeping", "n_events")
)
"""Columns with a cache line for each item, since writes to a shared line make others wait."""


INFO_BYTES = 1024
"""Room for one info; larger infos go by message. Memory that is never written to takes no room."""

_REQUEST_BITS = 44
MAX_REQUEST_ID = (1 << _REQUEST_BITS) - 1
TOKEN_BYTES = 8

# Flags of a reply: the buffer of its observation, and what else there is to know.
BUFFER_BITS = 0x000F
ENDING_SHIFT = 4
ENDING_BITS = 0x0070
DONE = 0x0080
HAS_INFO = 0x0100
AFTER_SHIFT = 9
AFTER_BITS = 0x0600
REWARD_SHIFT = 11
REWARD_BITS = 0xF800
ENDING_GIVEN_BIT = 0x0010
ORDINARY_BITS = BUFFER_BITS | ENDING_GIVEN_BIT
"""A reply that has only these flags belongs to an ordinary step."""
PLAIN_END = DONE | ENDING_GIVEN_BIT | AfterStep.RESETS << AFTER_SHIFT
RESETS = AfterStep.RESETS << AFTER_SHIFT
RESETS_IN_NEXT_STEP = AfterStep.RESETS_IN_NEXT_STEP << AFTER_SHIFT
NEXT_STEP_END = DONE | ENDING_GIVEN_BIT | RESETS_IN_NEXT_STEP
PLAIN_END_BITS = DONE | ENDING_GIVEN_BIT | AFTER_BITS | HAS_INFO | REWARD_BITS
"""The mask for plain ends: an episode has ended, and its host begins the next one, now or in the
next step. If the flags of a reply under this mask are those of PLAIN_END or NEXT_STEP_END, it says
nothing else, provided that its reward is a float, which is kind 0."""


def token_of(generation: int, request_id: int) -> int:
    """Return the token of a request, which no other request of the env has."""
    return (generation & 0xFFFF) << _REQUEST_BITS | request_id


def request_of(token: int) -> tuple[int, int]:
    """Return the generation (of 16 bits) and the request id of a token."""
    return token >> _REQUEST_BITS, token & MAX_REQUEST_ID


def generation_of(tokens: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return, for each token, the token of request 0 in the same generation."""
    found: npt.NDArray[np.uint64] = tokens & np.uint64(GENERATION_BITS)
    return found


GENERATION_BITS = 0xFFFF << _REQUEST_BITS

# Bits of a value in `posted`: when a host rings, and whether more than steps is posted.
RING_MASK = 3
RING_LAST, RING_ONCE, RING_EACH = 0, 1, 2
"""When a host rings for what was posted: at the end, if it is the last host of the batch to finish;
at the end in any case; or soon after each env."""
RESETS_ASKED = 4
"""There are new tokens in `reset_requests`."""
POSTING_BITS = 3


def posting_of(request_id: int, bits: int) -> int:
    """Return the value to write into `posted`: larger each time, and so never the same.

    Args:
        request_id: the id of the posted requests, which grows.
        bits: RING_LAST, RING_ONCE or RING_EACH, with RESETS_ASKED or without.
    """
    return request_id << POSTING_BITS | bits


def block_is_possible() -> bool:
    """Return whether this platform keeps the order of writes and has doorbells."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "eventfd")


class HandedOver:
    """Infos of envs that run in the trainer's own process, handed over as they are.

    The infos in here are not shared: the code that puts an info in copies it first, and the code
    that takes it out passes it on. Until the next info is put in, the old one can be taken out
    again, after an interrupt.

    Args:
        env_num: how many envs there are.

    Attributes:
        infos: by env_id, the info of the env's newest step, if that has one.
        reset_infos: likewise for the newest reset.
    """

    def __init__(self, env_num: int) -> None:
        self.infos: list[Any] = [None] * env_num
        self.reset_infos: list[Any] = [None] * env_num


@dataclass(frozen=True)
class BlockPlan:
    """Where the columns are.

    Attributes:
        env_num: how many rows there are.
        n_hosts: how many hosts serve them.
        actions: the layout of actions, or of the first kind of them.
        reward_length: how many numbers a reward has room for.
        measures: whether hosts record how long steps and resets take.
        events: how many of its latest actions each host records.
        more_actions: the layouts of the other kinds, where action spaces differ.
        handed_over: infos of envs in the trainer's own process; None for other hosts.
    """

    env_num: int
    n_hosts: int
    actions: Layout
    reward_length: int = LENGTH
    measures: bool = False
    events: int = 0
    more_actions: tuple[Layout, ...] = ()
    handed_over: HandedOver | None = None

    @property
    def nbytes(self) -> int:
        """The size of the block, which is at the beginning of the memory."""
        return sum(aligned(_nbytes(shape, dtype)) for _, shape, dtype in self._columns())

    def _columns(self) -> list[tuple[str, tuple[int, ...], Any]]:
        n = self.env_num
        columns: list[tuple[str, tuple[int, ...], Any]] = [
            ("posted", (self.n_hosts, _WORDS), np.uint64),
            ("finished", (self.n_hosts, _WORDS), np.uint64),
            ("messages_sent", (self.n_hosts, _WORDS), np.uint64),
            ("running", (self.n_hosts, _WORDS), np.int64),
            ("since", (self.n_hosts, _WORDS), np.float64),
            ("sleeping", (self.n_hosts + 1, _WORDS), np.uint64),
            ("requests", (n,), np.uint64),
            ("reset_requests", (n,), np.uint64),
            ("replies", (n,), np.uint64),
            ("resets", (n,), np.uint64),
            ("rewards", (n,), np.float64),
            ("wide_rewards", (n, self.reward_length), np.float64),
            ("flags", (n,), np.uint16),
            ("reset_flags", (n,), np.uint16),
            ("kinds", (n,), np.uint8),
            ("infos", (n, INFO_BYTES), np.uint8),
            ("reset_infos", (n, INFO_BYTES), np.uint8),
            ("info_forms", (n,), np.uint8),
            ("reset_info_forms", (n,), np.uint8),
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
    """Make earlier writes visible to other processes before anything is read afterwards.

    A process that goes to sleep says so in `sleeping`, and then checks once more whether there is
    something to do. A process that has work for it writes the work, and then checks whether the
    other one is asleep and has to be rung for. At least one of them sees what the other wrote, but
    only if the processor does not let the read overtake the write before it. x86-64 allows that,
    except at a locked instruction. Taking a free lock executes such an instruction, and so does
    releasing it. If this function is interrupted in between, the next call releases the lock. Code
    that cannot be interrupted may use `with` and a lock of its own, which works as well and saves
    the call.
    """
    is_taken = False
    while not is_taken:
        try:
            is_taken = _FENCE.acquire(False)
            _FENCE.release()
        except RuntimeError:  # another thread was here at the same time, and gave it back
            continue


def items(column: Array) -> Any:
    """Return a view of a column that accesses single numbers at half the cost of an array."""
    return memoryview(column)  # type: ignore[arg-type]


class Block:
    """The columns of a block, as arrays over its memory.

    Args:
        memory: at least `plan.nbytes` bytes, all zero at first.
        plan: where the columns are.

    Attributes:
        posted: (n_hosts,) changes when something is posted for a host, and says when the host is to
            ring: see `posting_of`.
        finished: (n_hosts,) the value of `posted` that a host has finished last.
        messages_sent: (n_hosts,) changes when a message is sent to a host, so that a host that
            takes steps all the time can find out without a system call.
        running: (n_hosts,) the env that a host runs, plus one; 0 while it runs none.
        since: (n_hosts,) when that began or ended, on the monotonic clock.
        sleeping: (n_hosts + 1,) whether a host, or the parent (the last), has to be rung for: see
            `fence`.
        requests: (env_num,) the token of the step to be taken.
        reset_requests: (env_num,) the token of the reset to be run. It has no seed, and the params
            of the env's present plan, which stays in force. It is run after the steps of the same
            batch.
        replies: (env_num,) the token of the step that was taken.
        resets: (env_num,) the token of the reset that was run, or of the step after which an
            episode was begun.
        rewards: (env_num,) float64; see the module `rewards`.
        wide_rewards: (env_num, reward_length) float64: rewards of several numbers.
        flags: (env_num,) the flags of replies.
        reset_flags: (env_num,) the buffer of the first observation, and whether there is an info.
        kinds: (env_num,) forms of actions, see `spaces.columns`.
        infos: (env_num, INFO_BYTES) what `infos.InfoEncoder` made, or a record of
            `info_forms.InfoForm`.
        reset_infos: likewise.
        info_forms: (env_num,) the number of that record's form; 0 for what an `InfoEncoder` made.
        reset_info_forms: likewise.
        n_events: (n_hosts,) how many events each host has recorded, ever.
        events: (n_hosts, plan.events, NUMBERS) the latest of these; see the module `timeline`.
        latencies: (2, env_num, NUMBERS) how long steps, and resets, took; see the module
            `latencies`. It has no rows if that is not measured.
        actions_of: for each kind of actions, per leaf (env_num, *shape).
        actions: those of the first kind.
    """

    posted: npt.NDArray[np.uint64]
    finished: npt.NDArray[np.uint64]
    messages_sent: npt.NDArray[np.uint64]
    running: npt.NDArray[np.int64]
    since: npt.NDArray[np.float64]
    sleeping: npt.NDArray[np.uint64]
    requests: npt.NDArray[np.uint64]
    reset_requests: npt.NDArray[np.uint64]
    replies: npt.NDArray[np.uint64]
    resets: npt.NDArray[np.uint64]
    rewards: npt.NDArray[np.float64]
    wide_rewards: npt.NDArray[np.float64]
    flags: npt.NDArray[np.uint16]
    reset_flags: npt.NDArray[np.uint16]
    kinds: npt.NDArray[np.uint8]
    infos: npt.NDArray[np.uint8]
    reset_infos: npt.NDArray[np.uint8]
    info_forms: npt.NDArray[np.uint8]
    reset_info_forms: npt.NDArray[np.uint8]
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
        """Return the numbers of rewards of one kind: (k,), or (k, n) if each reward has n.

        Args:
            kind: the kind of all of these rewards; see the module `rewards`.
            rows: a slice, or indices.
        """
        numbers: npt.NDArray[np.float64]
        if kind < FIRST_WIDE:
            numbers = self.rewards[rows]
        else:
            numbers = self.wide_rewards[rows, : ARRAYS[kind - FIRST_ARRAY][1] or None]
        return numbers
