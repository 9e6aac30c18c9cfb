"""The actor's side of its calls: each brings requests, and takes replies back as soon as there are.

One call always waits in the actor, so that what comes later than the answer to a request (a reset
that the host begins by itself, a death) needs none that is made for it. A call that brings steps
carries the replies to them back: one call for each batch.

Calls run on threads of Ray's in any order, so both ways are numbered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.transport.base import HostDied
from envmgr.transport.ray.items import Do, Item
from envmgr.wire.frames import Frame
from envmgr.wire.messages import UNANSWERED, Op

MOST_CALLS = 2
"""So many calls wait at most; with one more the oldest returns, whatever there is."""

THREADS = MOST_CALLS + 3
"""Threads that calls need, with one for whom asks something else and room for a late one."""

_GOES_ON = (Op.BEGAN, Op.NOTICE)
_LEAST_LINGER_S = 0.001
_MOST_LINGER_S = 0.05
_LINGER_SHARE = 0.25

Reply = tuple[int, Any]
"""A host, and a frame from it, or its death; what the actor itself says is from host 0."""


class Exchange:
    """Takes what calls bring, in order, and has them return what there is to say.

    Replies to a batch travel together: until all of them are there a call returns now and then
    only, at intervals that grow with the time that the batch has taken, by a quarter of it.

    Args:
        deliver: takes what a call has brought; not called by two threads at once.
    """

    def __init__(self, deliver: Callable[[Sequence[Item]], None]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._early: dict[int, tuple[Sequence[Item], threading.Condition]] = {}
        self._next = 0
        # Calls that wait, the oldest first: each on a condition of its own, since whoever wakes up
        # for nothing takes the interpreter from the envs. The latest keeps the time, and returns.
        self._waiting: list[threading.Condition] = []
        self._replies: list[Reply] = []
        self._returned = 0
        self._awaited: dict[int, int] = {}  # request ids, and of which host
        self._began = self._look_at = time.monotonic()

    def call(self, number: int, items: Sequence[Item]) -> tuple[int, list[Reply]]:
        """Take requests, then wait until there is something to return.

        Args:
            number: of the call, from 0 on.
            items: what it brings.

        Returns:
            Which return this is, from 0 on, and what hosts have said.
        """
        with self._lock:
            turn = threading.Condition(self._lock)
            self._early[number] = (items, turn)
            while (brought := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._waiting.append(brought[1])
                self._take(brought[0])
            if len(self._waiting) > MOST_CALLS:
                self._waiting[0].notify()
            while not self._may_return(turn):
                is_latest = bool(self._waiting) and self._waiting[-1] is turn
                turn.wait(self._pause_s() if is_latest else None)
            self._waiting.remove(turn)
            replies, self._replies = self._replies, []
            returned, self._returned = self._returned, self._returned + 1
            if self._waiting and self._awaited:
                self._waiting[-1].notify()  # it keeps the time now
            return returned, replies

    def _take(self, items: Sequence[Item]) -> None:
        if not items:
            return
        self._began = time.monotonic()
        for do, host_id, data in items:
            if do == Do.SEND and data.request_id != UNANSWERED and data.op != Op.CLOSE:
                self._awaited[data.request_id] = host_id
            elif do == Do.START:
                self._awaited.update((order[2], host_id) for order in data.envs if order[2])
        self._deliver(items)

    def _may_return(self, turn: threading.Condition) -> bool:
        if len(self._waiting) > MOST_CALLS and self._waiting[0] is turn:
            return True
        if not self._waiting or self._waiting[-1] is not turn:
            return False
        return bool(self._replies) and (not self._awaited or time.monotonic() >= self._look_at)

    def _pause_s(self) -> float | None:
        """Return how long to wait; what comes last, or when nothing is awaited, ends that."""
        if not self._awaited:
            return None
        now = time.monotonic()
        share_s = (now - self._began) * _LINGER_SHARE
        pause_s = min(max(share_s, _LEAST_LINGER_S), _MOST_LINGER_S)
        self._look_at = now + pause_s
        return pause_s

    def put(self, host_id: int, reply: Any) -> None:
        """Have a call return this: a frame, or the death of a host."""
        with self._lock:
            self._replies.append((host_id, reply))
            if type(reply) is Frame:
                if reply.op not in _GOES_ON:
                    self._awaited.pop(reply.request_id, None)
            elif type(reply) is HostDied:
                of_others = {i: host for i, host in self._awaited.items() if host != host_id}
                self._awaited = of_others
            if not self._awaited and self._waiting:
                self._waiting[-1].notify()
