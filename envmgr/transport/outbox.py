"""The outbox of hosts on whose behalf other threads of this process send."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from envmgr.transport.base import Arrival, HostDied, Transport, at_most
from envmgr.transport.ready import ReadySet, Waker


class Outbox:
    """A queue of what hosts have sent, in order of arrival; it rings for the trainer.

    Threads that were given up keep the outbox; the transport does not.
    """

    def __init__(self) -> None:
        self.sent: deque[tuple[int, Arrival]] = deque()
        self.bell = Waker()

    def put(self, host_id: int, arrival: Arrival) -> None:
        """Append what a host sends, and ring."""
        self.sent.append((host_id, arrival))
        self.bell.wake()

    def move_to(
        self, arrivals: deque[tuple[int, Arrival]], hosts: dict[int, Any], killed: set[int]
    ) -> None:
        """Move what has come to `arrivals`, except for what killed or unknown hosts have sent.

        After an interrupt, which may come anywhere, this is called again.

        Args:
            arrivals: the queue to move it to.
            hosts: the hosts by host_id; those that have died are taken out.
            killed: host_ids of killed hosts, of which only the death is still moved.
        """
        sent = self.sent
        while sent:
            item = sent[0]
            host_id, arrival = item
            has_died = type(arrival) is HostDied
            if host_id in hosts and has_died:
                if not arrivals or arrivals[-1] is not item:
                    arrivals.append(item)
                killed.discard(host_id)
                del hosts[host_id]
            elif host_id in hosts and host_id not in killed:
                # In one go: after an interrupt the item is in one of the two, and is applied once.
                arrivals.extend(map(deque.popleft, (sent,)))
                continue
            sent.popleft()


class OutboxTransport(Transport):
    """The common part of transports whose hosts send through an outbox."""

    def __init__(self) -> None:
        self.arrivals: deque[tuple[int, Arrival]] = deque()
        self._hosts: dict[int, Any] = {}
        self._killed: set[int] = set()
        self._outbox: Outbox | None = Outbox()
        self._ready = ReadySet()
        self._ready.add(self._outbox.bell)
        self._hurried = self._closed = False

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Wait for a ring, then take what has come from hosts that were not given up."""
        outbox = self._open_outbox()
        for bell in self._ready.ready(0.0 if self.arrivals or outbox.sent else at_most(timeout_s)):
            bell.silence()
        outbox.move_to(self.arrivals, self._hosts, self._killed)

    def await_ring(self, timeout_s: float) -> bool:
        """Wait for a ring, which may also be for a message."""
        outbox = self._outbox  # not by `_open_outbox`: this runs for each batch
        if outbox is None or self.arrivals or outbox.sent:
            return False
        if self._ready.ready(timeout_s) != [outbox.bell]:
            return False
        outbox.bell.silence()
        return not outbox.sent

    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return the bell, which all hosts share."""
        has_any = any(host_id in self._hosts for host_id in hosts)
        return [self._open_outbox().bell] if has_any else []

    def news(self) -> list[Any]:
        """Return all that is watched."""
        return self._ready.waitables()

    def wake(self) -> None:
        """Ring."""
        if (outbox := self._outbox) is not None:
            outbox.bell.wake()

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            raise ValueError("the transport is closed")
        return self._outbox

    def hurry(self) -> None:
        """Give hosts that were asked to end no more time."""
        self._hurried = True
        self.wake()

    def _await_ends(self, limit_s: float) -> None:
        """Wait until all hosts have reported their ends, or until `hurry` is called.

        All else that arrives is dropped.
        """
        end = time.monotonic() + limit_s
        while self._hosts and not self._hurried:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0.0:
                return
            self.poll(remaining_s)
            self.arrivals.clear()
