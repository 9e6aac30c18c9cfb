"""What a manager sends to its hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sent_by(manager: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Note every frame that a manager sends in the body, and every ring of a bell."""
    transport = manager._engine.transport
    sent: list[tuple[Any, ...]] = []
    send, ring = transport.send, transport.ring

    def noted_send(host_id: int, prepared: Any) -> None:
        sent.append(("frame", host_id, prepared))
        send(host_id, prepared)

    def noted_ring(host_ids: Iterable[int], **how: Any) -> None:
        sent.extend(("ring", host_id) for host_id in host_ids)
        ring(host_ids, **how)

    transport.send, transport.ring = noted_send, noted_ring
    try:
        yield sent
    finally:
        transport.send, transport.ring = send, ring
