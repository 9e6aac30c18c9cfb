"""The actor's side of its calls: each brings requests, and takes replies back as soon as there are.

One call always waits in the actor, so that what comes later than the answer to a request (a reset
that the host begins by itself, a death) needs none that is made for it. A call that brings steps
carries the replies to them back: one call for each batch.

Calls run on threads of Ray's in any order, so both ways are numbered. Under one lock, one thread at
a time does what concerns calls and the copy of the block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.transport.base import HostDied
from envmgr.transport.ray.mirror import NodeMirror
from envmgr.transport.ray.protocol import Do, Item
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
    only, at intervals that grow with the time that the batch has taken, by a quarter of it. Of
    posted steps there is nothing to return before a host rings, but for what time limits need.

    Args:
        deliver: takes what a call has brought; not called by two threads at once.
        mirror: where steps are posted; what is new there goes with every return.
    """

    def __init__(self, deliver: Callable[[Sequence[Item]], None], mirror: NodeMirror) -> None:
        self._deliver = deliver
        self._mirror = mirror
        self._is_rung = False
        self._lock = threading.RLock()  # what is delivered may be answered at once
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
                self._take(brought[0])  # may raise: then nobody waits with that call
                self._waiting.append(brought[1])
            if len(self._waiting) > MOST_CALLS:
                self._waiting[0].notify()
            if self._waiting and self._waiting[-1] is not turn:
                self._waiting[-1].notify()  # it came before its turn, and keeps the time now
            while not self._may_return(turn):
                is_latest = bool(self._waiting) and self._waiting[-1] is turn
                turn.wait(self._pause_s() if is_latest else None)
            self._waiting.remove(turn)
            replies, self._replies, self._is_rung = self._replies, [], False
            # What is in the block was written before hosts said what comes after it, or later.
            if (news := self._mirror.news()) is not None:
                replies.insert(0, (0, news))
            returned, self._returned = self._returned, self._returned + 1
            if self._waiting and (self._awaited or self._mirror.is_open):
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

    @property
    def _are_awaited(self) -> bool:
        return bool(self._awaited) or self._mirror.is_awaited

    def _may_return(self, turn: threading.Condition) -> bool:
        if len(self._waiting) > MOST_CALLS and self._waiting[0] is turn:
            return True
        if not self._waiting or self._waiting[-1] is not turn:
            return False
        is_time = time.monotonic() >= self._look_at
        has_any = bool(self._replies) or self._is_rung or (is_time and self._mirror.has_news)
        return has_any and (is_time or not self._are_awaited)

    def _pause_s(self) -> float | None:
        """Return how long to wait; what comes last, or when nothing is awaited, ends that."""
        now = time.monotonic()
        if self._look_at <= now:
            if self._awaited or self._replies or self._is_rung:
                self._look_at = now + self._linger_s(now)
            elif self._mirror.is_open:
                self._look_at = now + _MOST_LINGER_S
            else:
                return None
        return min(self._look_at - now, _MOST_LINGER_S)

    def _linger_s(self, now: float) -> float:
        share_s = (now - self._began) * _LINGER_SHARE
        return min(max(share_s, _LEAST_LINGER_S), _MOST_LINGER_S)

    def _tell(self, *, is_first: bool) -> None:
        """There is something to return: at once if nothing else is awaited, else before long."""
        if not self._waiting:
            return
        now = time.monotonic()
        due = now + self._linger_s(now) if is_first else self._look_at
        if not now < self._look_at <= due or not self._are_awaited:
            self._look_at = min(due, self._look_at)
            self._waiting[-1].notify()

    def ring(self) -> None:
        """Have a call return what is new in the block, if there is anything."""
        with self._lock:
            if self._mirror.has_news:
                is_first, self._is_rung = not self._is_rung, True
                self._tell(is_first=is_first)

    def put(self, host_id: int, reply: Any) -> None:
        """Have a call return this: a frame, or the death of a host."""
        with self._lock:
            self._replies.append((host_id, reply))
            if type(reply) is Frame:
                if reply.op not in _GOES_ON:
                    self._awaited.pop(reply.request_id, None)
                    self._mirror.answered(reply)
            elif type(reply) is HostDied:
                self._mirror.ended(host_id)
                of_others = {i: host for i, host in self._awaited.items() if host != host_id}
                self._awaited = of_others
            self._tell(is_first=len(self._replies) == 1)
