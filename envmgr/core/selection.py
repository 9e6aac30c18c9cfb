"""Envs that are stepped together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.core.hosts import Hosts
from envmgr.core.phases import Phase, PhaseTable
from envmgr.core.table import Record
from envmgr.lifecycle import EnvState
from envmgr.spaces import Array
from envmgr.wire.block import Block, items

_KNOWN_SELECTIONS = 256

NOBODY = np.empty(0, dtype=np.int64)
"""The env_ids of a selection that there is none of."""

NOBODY.flags.writeable = False


class Window:
    """The rows of neighbours, cut out of the columns once: cheaper than an index each time.

    Args:
        block: the columns that are shared.
        rows: which.
        tokens: of the requests whose replies are awaited, of all envs.

    Attributes:
        actions: their rows of the actions, per leaf.
        rewards: their rows of the rewards that are one number.
        flags: of the replies.
        replies: tokens that were replied, for comparing with `tokens`.
        tokens: tokens that are awaited.
        token_bytes: the bytes of `tokens`, for writing them as a whole.
        request_bytes: the bytes of the tokens that are requested, likewise.
    """

    __slots__ = (
        "actions",
        "flags",
        "replies",
        "request_bytes",
        "rewards",
        "token_bytes",
        "tokens",
    )

    def __init__(self, block: Block, rows: slice, tokens: Array) -> None:
        self.actions = [column[rows] for column in block.actions]
        self.rewards = block.rewards[rows]
        self.replies = items(block.replies[rows])
        self.tokens = items(tokens[rows])
        self.flags = items(block.flags[rows])
        self.token_bytes = self.tokens.cast("B")
        self.request_bytes = items(block.requests[rows]).cast("B")


class Selection:
    """Envs that are stepped together, in the order their user named them.

    Attributes:
        ids: their env_ids.
        count: how many they are.
        array: the same, as a read-only array (k,) int64.
        rows: what indexes their rows: a slice if they are neighbours, else `array`.
        is_slice: whether they are.
        hosts: the indexes of their hosts.
        window: their rows of the columns, if they are neighbours and steps are posted.
        arenas: their rows of the arenas, by slot, as far as they were asked for; if they are.
        is_ascending: whether the env_ids ascend.
        ordinary: what they are said to be whose replies have nothing to them, by their flags; see
            `Handout`.
        fresh: what says of all that the newest observation is in the arena.
        stale: likewise that it is not.
        posted: what says that the steps of all are posted.
        n_posts: how often steps of all were posted since that was added to those of each.
        idle: likewise that nothing is asked of their hosts.
        run: likewise that they are in RUN.
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
        "n_posts",
        "ordinary",
        "posted",
        "rows",
        "run",
        "stale",
        "window",
    )

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.count = len(ids)
        self.array: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.array.flags.writeable = False
        first, count = ids[0], len(ids)
        self.hosts: list[int] = []
        self.is_ascending = 0 not in (self.array[1:] > self.array[:-1]).tobytes()
        self.is_slice = self.is_ascending and ids[-1] - first == count - 1
        self.rows: Any = slice(first, first + count) if self.is_slice else self.array
        self.fresh, self.stale = bytes((1,)) * count, bytes(count)
        self.posted, self.idle = bytes((Phase.POSTED,)) * count, bytes((Phase.IDLE,)) * count
        self.run = bytes((EnvState.RUN,)) * count
        self.window: Window | None = None
        self.arenas: dict[int, list[Array]] = {}
        self.ordinary: dict[bytes, Any] = {}
        self.n_posts = 0

    def may_be_posted(self, record: Record) -> bool:
        """Whether all of these envs take an action now that their hosts can execute."""
        ids, undelivered, doomed = self.ids, record.undelivered, record.doomed
        if undelivered and not undelivered.keys().isdisjoint(ids):
            return False
        if doomed and not doomed.keys().isdisjoint(ids):
            return False
        if record.unposted and not record.unposted.isdisjoint(ids):
            return False
        together = record.together
        if together is not None and not together.may_be_stepped(ids):
            return False
        rows, phases, states = self.rows, record.phases, record.states
        if self.is_slice:
            return bool(phases.column[rows] == self.idle and states.column[rows] == self.run)
        is_idle: bool = phases.view[rows].tobytes() == self.idle
        return is_idle and bool(states.view[rows].tobytes() == self.run)

    def is_posted(self, phases: PhaseTable) -> bool:
        """Whether the steps of all of these envs are posted."""
        if self.is_slice:
            return bool(phases.column[self.rows] == self.posted)
        return bool(phases.view[self.array].tobytes() == self.posted)


_PLAIN_SEQUENCES = frozenset((dict, list, tuple, type({}.keys())))
"""What can be read without running code of its own, and comes to an end."""


class Selections:
    """Mostly the same selection for the same envs.

    Args:
        hosts: which host serves which env.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._known: dict[tuple[int, ...], Selection] = {}
        self._latest: Selection | None = None
        self._latest_array: Any = None
        self._moves = 0
        self._block: Block | None = None

    def share(self, block: Block | None) -> None:
        """Steps of selections are posted in this block from now on, or not any more."""
        self._block = block
        self._forget()

    def steps_of(self, env_id: int) -> int:
        """Return how many steps an env has been asked for."""
        self._count_steps()
        return int(self._hosts.record.steps[env_id])

    def _count_steps(self) -> None:
        """Add what was posted for envs together to the steps of each."""
        steps = self._hosts.record.steps
        for selection in self._known.values():
            if selection.n_posts:
                n_posts, selection.n_posts = selection.n_posts, 0
                steps[selection.rows] += n_posts

    def _forget(self) -> None:
        self._count_steps()
        for selection in self._known.values():
            selection.window = None
            selection.arenas.clear()
            selection.ordinary.clear()
        self._known.clear()
        self._latest = self._latest_array = None

    def of(self, env_ids: Any) -> Selection | None:
        """Return envs as a selection.

        Args:
            env_ids: a sequence or an array of env_ids.

        Returns:
            None if there are none, or these are not all different env_ids.
        """
        if self._moves != self._hosts.moves:
            self._forget()
            self._moves = self._hosts.moves  # last: what an interrupt has left is forgotten anew
        if env_ids is self._latest_array:
            return self._latest
        kind = type(env_ids)
        if kind is np.ndarray and env_ids.ndim == 1 and env_ids.dtype.kind in "iu":
            key = tuple(env_ids.tolist())
        elif kind in _PLAIN_SEQUENCES or (kind is range and self._spans(env_ids)):
            key = tuple(env_ids)
        else:
            return None
        if kind is not np.ndarray and set(map(type, key)) != {int}:
            return None  # asked first: True and 1.0 are found as 1 is
        selection = self._known.get(key)
        if selection is None:
            selection = self._made(key)
        if selection is not None:
            self._latest, self._latest_array = selection, selection.array
        return selection

    def _made(self, key: tuple[int, ...]) -> Selection | None:
        try:
            selection = Selection(list(key))
        except (IndexError, OverflowError):  # there are none, or what is no number of an env
            return None
        ascends = selection.is_ascending
        least, most = (key[0], key[-1]) if ascends else (min(key), max(key))
        if least < 0 or most >= self._hosts.env_num or not (ascends or len(set(key)) == len(key)):
            return None
        selection.hosts = list(dict.fromkeys(map(self._hosts.index_of.__getitem__, key)))
        if len(self._known) >= _KNOWN_SELECTIONS:
            self._count_steps()
            self._known.clear()
        if selection.is_slice and self._block is not None:
            selection.window = Window(self._block, selection.rows, self._hosts.record.tokens)
        self._known[key] = selection
        return selection

    def _spans(self, env_ids: range) -> bool:
        """Whether a range lies within the env_ids; others may be too long to be read."""
        n = self._hosts.env_num
        return 0 <= env_ids.start <= n and -1 <= env_ids.stop <= n
