"""The shared block where hosts are on other machines: the trainer and each actor have a copy of it.

All sides lay out their memory alike. What the trainer posts travels with the next call to an actor,
and what hosts reply travels with the return of a call: the columns of the rows that are new, in the
order in which they were written, tokens last. So the copies behave as a block in shared memory
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.spaces import Array, merged_axes
from envmgr.wire.arenas import Placement, arena_arrays
from envmgr.wire.block import (
    BUFFER_BITS,
    HAS_INFO,
    MAX_REQUEST_ID,
    REWARD_SHIFT,
    Block,
    fence,
)
from envmgr.wire.frames import Frame
from envmgr.wire.messages import Op
from envmgr.wire.rewards import FIRST_WIDE

PLACING = (Op.ATTACH, Op.ADOPT)
"""Messages that say where the data of an env is."""

_WIDE = FIRST_WIDE << REWARD_SHIFT

Rows = npt.NDArray[np.int64]
Part = tuple[str, bytes, list[bytes]]
"""The name of some columns, the rows that are new in them, and the values in these rows."""
Hosts = tuple[bytes, bytes, bytes, bytes]
"""Indexes of hosts, and their columns `since` (as an age: the clocks of machines differ), `running`
and `finished`."""


class News(NamedTuple):
    """What is new in the block of an actor.

    Attributes:
        parts: rows of envs, in the order in which they have to be written.
        hosts: what hosts are running, if that is new.
    """

    parts: list[Part]
    hosts: Hosts | None


class Mirror:
    """One side's copy of the block, and of the arenas behind it.

    Args:
        memory: allocates the given number of bytes, all zero.

    Attributes:
        block: the columns; None until an env is placed there.
    """

    def __init__(self, memory: Callable[[int], Any]) -> None:
        self.block: Block | None = None
        self._allocate = memory
        self._memory: Any = None
        self._columns: dict[str, list[Array]] = {}
        # Of each env: the arena of its observations, its row there, and how many rows there are.
        self._arena_of: list[str] = []
        self._arena_row: Rows = np.empty(0, np.int64)
        self._n_rows: Rows = np.empty(0, np.int64)
        self._n_buffers: dict[str, int] = {}

    def note_placement(self, frame: Frame) -> bool:
        """Take note of a message that says where the data of an env is.

        Returns:
            Whether steps are posted for that env here.

        Raises:
            OSError: there is not enough memory.
        """
        placement: Placement | None = frame.message().payload
        if placement is None:
            return False
        if self._memory is None:
            self._memory = self._allocate(placement.nbytes)
        if placement.block is None:
            return False
        block = self.block or self._lay_out(Block(self._memory, placement.block))
        arena = f"arena {placement.offset}"
        if arena not in self._columns:
            arrays = arena_arrays(self._memory, placement)
            self._columns[arena] = [merged_axes(array) for array in arrays]
            self._n_buffers[arena] = placement.buffers.count
        self._arena_of[frame.env_id] = arena
        self._arena_row[frame.env_id] = placement.row
        self._n_rows[frame.env_id] = placement.rows
        self.block = block
        return True

    def _lay_out(self, block: Block) -> Block:
        n = block.plan.env_num
        self._arena_of = [""] * n
        self._arena_row, self._n_rows = np.zeros(n, np.int64), np.zeros(n, np.int64)
        actions = [leaf for leaves in block.actions_of for leaf in leaves]
        self._columns = {
            "posts": [*actions, block.kinds, block.reset_requests, block.requests],
            "posted": [block.posted],
            "wide rewards": [block.wide_rewards],
            "infos": [block.infos, block.info_forms],
            "steps": [block.rewards, block.flags, block.replies],
            "reset infos": [block.reset_infos, block.reset_info_forms],
            "resets": [block.reset_flags, block.resets],
        }
        return block

    def write(self, parts: Iterable[Part]) -> None:
        """Write what the other side has sent."""
        for name, of_rows, values in parts:
            rows = np.frombuffer(of_rows, np.int64)
            for column, value in zip(self._columns[name], values, strict=True):
                shape = (len(rows), *column.shape[1:])
                column[rows] = np.ndarray(shape, column.dtype, value)

    def _read(self, parts: list[Part], name: str, rows: Rows) -> None:
        """Add the values of some rows to `parts`, if there are any rows."""
        if len(rows):
            values = [column[rows].tobytes() for column in self._columns[name]]
            parts.append((name, rows.tobytes(), values))


class TrainerMirror(Mirror):
    """The trainer's copy, in which the core posts steps and reads replies.

    Only the thread that makes calls, and Ray's threads on which calls return, use this object.
    """

    def _lay_out(self, block: Block) -> Block:
        plan = block.plan
        self._requests, self._resets = block.requests.copy(), block.reset_requests.copy()
        self._posted = np.zeros(plan.n_hosts, np.uint64)
        block.sleeping[:-1] = 1  # so that hosts are always rung for
        return super()._lay_out(block)

    def posts(self, rows: Rows, indexes: Rows) -> list[Part]:
        """Return what is new for an actor.

        Args:
            rows: the rows of its envs.
            indexes: the indexes of its hosts.
        """
        block, parts = self.block, list[Part]()
        if block is None:
            return parts
        # Read first, since the core writes this column after the tokens of the steps.
        posted = block.posted[indexes]
        is_new = posted != self._posted[indexes]
        requests, resets = block.requests[rows], block.reset_requests[rows]
        new = (requests != self._requests[rows]) | (resets != self._resets[rows])
        self._requests[rows], self._resets[rows] = requests, resets
        self._posted[indexes] = posted
        self._read(parts, "posts", rows[new])
        if is_new.any():
            values = [posted[is_new].tobytes()]
            parts.append(("posted", indexes[is_new].tobytes(), values))
        return parts

    def apply(self, news: News) -> None:
        """Write what an actor has sent."""
        block = self.block
        if block is None:
            return
        self.write(news.parts)
        if news.hosts is not None:
            indexes = np.frombuffer(news.hosts[0], np.int64)
            block.since[indexes] = time.monotonic() - np.frombuffer(news.hosts[1], np.float64)
            block.running[indexes] = np.frombuffer(news.hosts[2], np.int64)
            block.finished[indexes] = np.frombuffer(news.hosts[3], np.uint64)


class NodeMirror(Mirror):
    """An actor's copy, in which its hosts work. `CallHandler` takes one call at a time.

    Args:
        memory: see `Mirror`.
    """

    def __init__(self, memory: Callable[[int], Any]) -> None:
        super().__init__(memory)
        self._hosts: dict[int, int] = {}
        self._host_of: dict[int, int] = {}
        self._rows: Rows = np.empty(0, np.int64)
        self._indexes: Rows = np.empty(0, np.int64)

    def host(self, host_id: int, index: int) -> None:
        """Note that a host is started here, and has this index from now on."""
        self._hosts[index] = host_id
        self._indexes = np.array(sorted(self._hosts), np.int64)
        if self.block is not None:
            # The trainer may already know what the previous host at this index was running.
            self.block.running[index], self._of_host[1][index] = 0, -1

    def note_placement_for(self, host_id: int, frame: Frame) -> None:
        """Take note of a message to a host, as `note_placement` does."""
        if self.note_placement(frame):
            self._host_of[frame.env_id] = host_id
            self._rows = np.array(sorted(self._host_of), np.int64)

    def _lay_out(self, block: Block) -> Block:
        # The tokens that the trainer was told last, and those that it awaits: of steps, and of
        # posted resets.
        self._told = [block.replies.copy(), block.resets.copy()]
        self._awaited = [block.replies.copy(), block.resets.copy()]
        self._of_host = [column.copy() for column in (block.since, block.running, block.finished)]
        block.sleeping[-1] = 1  # so that the trainer is always rung for
        return super()._lay_out(block)

    # -- what is posted -----------------------------------------------------------------------

    def post(self, parts: Iterable[Part]) -> list[int]:
        """Post steps here; return the hosts that have to be rung for."""
        block = self.block
        if block is None:
            return []
        requests, resets = block.requests[self._rows], block.reset_requests[self._rows]
        self.write(parts)
        for at, column, before in (
            (0, block.requests, requests),
            (1, block.reset_requests, resets),
        ):
            now = column[self._rows]
            self._awaited[at][self._rows[now != before]] = now[now != before]
        fence()
        return [
            self._hosts[index]
            for name, of_hosts, _ in parts
            if name == "posted"
            for index in np.frombuffer(of_hosts, np.int64).tolist()
            if index in self._hosts and block.sleeping[index]
        ]

    def answered(self, frame: Frame) -> None:
        """Note that what was posted for an env was answered by message."""
        for awaited in self._awaited if self.block is not None else ():
            if frame.env_id < len(awaited) and self._is_request(awaited, frame):
                awaited[frame.env_id] = 0

    def _is_request(self, awaited: Any, frame: Frame) -> bool:
        return int(awaited[frame.env_id]) & MAX_REQUEST_ID == frame.request_id

    def ended(self, host_id: int) -> None:
        """Note that a host has ended: nothing is awaited of its envs any more."""
        for awaited in self._awaited if self.block is not None else ():
            awaited[[env_id for env_id, host in self._host_of.items() if host == host_id]] = 0

    @property
    def is_open(self) -> bool:
        """Whether something was posted whose answer the trainer has not been told."""
        return self.block is not None and any(a[self._rows].any() for a in self._awaited)

    @property
    def is_awaited(self) -> bool:
        """Whether something was posted that has not been answered."""
        block, rows = self.block, self._rows
        if block is None:
            return False
        pairs = zip(self._awaited, (block.replies, block.resets), strict=True)
        return any(((a[rows] != 0) & (a[rows] != column[rows])).any() for a, column in pairs)

    # -- what is replied ----------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `news` returns something."""
        block = self.block
        if block is None:
            return False
        columns = zip((block.replies, block.resets), self._told, strict=True)
        is_new = any((column[self._rows] != told[self._rows]).any() for column, told in columns)
        return is_new or bool(self._new_hosts(block).size)

    def news(self) -> News | None:
        """Return what is new since the last call of this method; None if nothing is."""
        block, parts = self.block, list[Part]()
        if block is None:
            return None
        hosts = self._of_hosts(block)
        # Resets first: a step that includes its reset is answered after that reset.
        steps, resets = self._new_rows(0, block.replies), self._new_rows(1, block.resets)
        if len(resets):
            flags = block.reset_flags[resets]
            self._read_observations(parts, resets, flags)
            self._read(parts, "reset infos", resets[flags & HAS_INFO != 0])
            self._read(parts, "resets", resets)
        if len(steps):
            flags = block.flags[steps]
            self._read_observations(parts, steps, flags)
            self._read(parts, "wide rewards", steps[flags >= _WIDE])
            self._read(parts, "infos", steps[flags & HAS_INFO != 0])
            self._read(parts, "steps", steps)
        return News(parts, hosts) if parts or hosts is not None else None

    def _new_rows(self, kind: int, tokens: Array) -> Rows:
        rows, told = self._rows, self._told[kind]
        now = tokens[rows]
        new: Rows = rows[now != told[rows]]
        told[rows] = now
        awaited = self._awaited[kind]
        awaited[rows[awaited[rows] == now]] = 0
        return new

    def _read_observations(self, parts: list[Part], rows: Rows, flags: Array) -> None:
        buffers = (flags & BUFFER_BITS).astype(np.int64)
        arenas = list(map(self._arena_of.__getitem__, rows.tolist()))
        at = buffers * self._n_rows[rows] + self._arena_row[rows]
        for arena in dict.fromkeys(arenas):
            some = buffers < self._n_buffers[arena]  # the trainer finds a wrong buffer by itself
            if len(self._n_buffers) > 1:
                some &= np.array([other == arena for other in arenas])
            self._read(parts, arena, at[some])

    def _new_hosts(self, block: Block) -> Rows:
        at = self._indexes
        columns = zip((block.since, block.running, block.finished), self._of_host, strict=True)
        found: Rows = at[np.any([column[at] != told[at] for column, told in columns], axis=0)]
        return found

    def _of_hosts(self, block: Block) -> Hosts | None:
        new = self._new_hosts(block)
        if not len(new):
            return None
        values: list[Array] = [c[new] for c in (block.since, block.running, block.finished)]
        for told, value in zip(self._of_host, values, strict=True):
            told[new] = value
        values[0] = time.monotonic() - values[0]
        ages, running, finished = (value.tobytes() for value in values)
        return new.tobytes(), ages, running, finished
