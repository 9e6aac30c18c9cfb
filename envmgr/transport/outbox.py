"""What hosts have sent that other threads of this process speak for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from envmgr.transport.base import Arrival, HostDied, Transport
from envmgr.transport.ready import Waker


class _Bell(Waker):
    """Stays open as long as anybody may ring it: a thread that was given up may, at any time."""

    def __del__(self) -> None:
        self.close()


class Outbox:
    """What hosts have sent, in the order in which it came; rings for the trainer.

    Threads that were given up keep it, not the transport.
    """

    def __init__(self) -> None:
        self.sent: deque[tuple[int, Arrival]] = deque()
        self.bell = _Bell()

    def put(self, host_id: int, arrival: Arrival) -> None:
        """Send something."""
        self.sent.append((host_id, arrival))
        self.bell.wake()

    def move_to(
        self, arrivals: deque[tuple[int, Arrival]], hosts: dict[int, Any], killed: set[int]
    ) -> None:
        """Have what has come arrive, but for what hosts say that were killed or are not known.

        An interrupt may come anywhere: then it is called again.

        Args:
            arrivals: where it goes.
            hosts: by host_id; those that have died are taken out.
            killed: likewise: all that still arrives from these is their deaths.
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
                # In one go: who is interrupted finds it in one of the two, and it is applied once.
                arrivals.extend(map(deque.popleft, (sent,)))
                continue
            sent.popleft()


def await_ends(transport: Transport, are_over: Callable[[], bool], limit_s: float) -> None:
    """Wait until all hosts have reported their ends, or nobody waits for that any more.

    Args:
        transport: that of the hosts. What arrives besides is dropped.
        are_over: whether there is nothing to wait for.
        limit_s: how long to wait at most.
    """
    end = time.monotonic() + limit_s
    while not are_over():
        remaining_s = end - time.monotonic()
        if remaining_s <= 0.0:
            return
        transport.poll(remaining_s)
        transport.arrivals.clear()
