"""The actor's side of the calls: each call brings requests, and returns when there are replies.

One call always waits in the actor. So the trainer need not make a call to learn of what happens
after the answer to a request, such as a reset that the host begins by itself, or a death. A call
that brings steps returns with the replies to them: a batch takes one call.

Ray runs calls on threads of its own in any order, so requests and replies are numbered. One lock
guards all that calls change, the actor's copy of the block included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.errors import EnvManagerError
from envmgr.transport.base import HostDied
from envmgr.transport.ray.mirror import NodeMirror
from envmgr.transport.ray.protocol import ActorOp, ActorRequest
from envmgr.wire.frames import Frame
from envmgr.wire.messages import UNANSWERED, Op

MOST_CALLS = 2
"""How many calls wait at most: when one more comes, the oldest returns, with whatever there is."""

THREADS = MOST_CALLS + 3
"""Threads that calls need: one for questions such as `whereabouts`, one for a call that hangs."""

_GOES_ON = (Op.BEGAN, Op.NOTICE)
_LEAST_LINGER_S = 0.001
_MOST_LINGER_S = 0.05
_LINGER_SHARE = 0.25

Reply = tuple[int, Any]
"""A host_id, and a frame from that host or its death; host 0 stands for the actor itself."""


class ActorFailedError(EnvManagerError, RuntimeError):
    """The actor is of no use any more; the message says why. The trainer gives it up."""


class CallHandler:
    """Passes on what calls bring, in order, and decides when a call returns, and with what.

    The replies to a batch travel together. Until all of them are there, a call returns only now and
    then, after a quarter of the time that the batch has taken so far. Posted steps have nothing to
    return before a host rings, except for what the trainer's time limits need.

    Args:
        deliver: takes what a call has brought; two threads never call it at once.
        mirror: the block in which steps are posted; every return carries what is new there.
    """

    def __init__(
        self, deliver: Callable[[Sequence[ActorRequest]], None], mirror: NodeMirror
    ) -> None:
        self._deliver = deliver
        self._mirror = mirror
        self._is_rung = False
        self._lock = threading.RLock()  # what is delivered may be answered at once
        self._early: dict[int, tuple[Sequence[ActorRequest], threading.Condition]] = {}
        self._next = 0
        # The calls that wait, the oldest first. Each has a condition of its own, since a thread
        # that wakes up for nothing takes the interpreter from the envs. The latest call watches
        # the time, and returns.
        self._waiting: list[threading.Condition] = []
        self._replies: list[Reply] = []
        self._returned = 0
        self._failure: str | None = None
        self._awaited: dict[int, int] = {}  # by request id, the host that is to answer
        self._began = self._look_at = time.monotonic()

    def call(self, number: int, requests: Sequence[ActorRequest]) -> tuple[int, list[Reply]]:
        """Take requests, then wait until there is something to return.

        Args:
            number: the number of the call, from 0 on.
            requests: what the call brings.

        Returns:
            The number of this return, from 0 on, and what hosts have said.

        Raises:
            ActorFailedError: see `fail`.
        """
        with self._lock:
            self._refuse_after_failure()
            turn = threading.Condition(self._lock)
            self._early[number] = (requests, turn)
            while (brought := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._take(brought[0])  # if this raises, the call does not wait
                self._waiting.append(brought[1])
            if len(self._waiting) > MOST_CALLS:
                self._waiting[0].notify()
            if self._waiting and self._waiting[-1] is not turn:
                self._waiting[-1].notify()  # it came before its turn, and watches the time now
            while not self._may_return(turn):
                is_latest = bool(self._waiting) and self._waiting[-1] is turn
                turn.wait(self._pause_s() if is_latest else None)
                self._refuse_after_failure()
            self._waiting.remove(turn)
            replies, self._replies, self._is_rung = self._replies, [], False
            # The block first: hosts write there before they send what follows.
            if (news := self._mirror.news()) is not None:
                replies.insert(0, (0, news))
            returned, self._returned = self._returned, self._returned + 1
            if self._waiting and (self._awaited or self._mirror.is_open):
                self._waiting[-1].notify()  # it watches the time now
            return returned, replies

    def fail(self, why: str) -> None:
        """Have all calls raise from now on, those that wait included."""
        with self._lock:
            self._failure = why
            for turn in (*self._waiting, *(turn for _, turn in self._early.values())):
                turn.notify()

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise ActorFailedError(self._failure)

    def _take(self, requests: Sequence[ActorRequest]) -> None:
        if not requests:
            return
        self._began = time.monotonic()
        for op, host_id, data in requests:
            if op == ActorOp.SEND and data.request_id != UNANSWERED and data.op != Op.CLOSE:
                self._awaited[data.request_id] = host_id
            elif op == ActorOp.START:
                self._awaited.update((env[2], host_id) for env in data.envs if env[2])
        self._deliver(requests)

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
        """Return how long to wait; the last awaited reply ends the wait earlier."""
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
        """Note that there is something to return: at once if nothing else is awaited, else soon."""
        if not self._waiting:
            return
        now = time.monotonic()
        due = now + self._linger_s(now) if is_first else self._look_at
        if not now < self._look_at <= due or not self._are_awaited:
            self._look_at = min(due, self._look_at)
            self._waiting[-1].notify()

    def ring(self) -> None:
        """Let a call return what is new in the block, if anything is."""
        with self._lock:
            if self._mirror.has_news:
                is_first, self._is_rung = not self._is_rung, True
                self._tell(is_first=is_first)

    def put(self, host_id: int, reply: Any) -> None:
        """Let a call return a frame of a host, or its death."""
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
