"""What a manager sends to its hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from envmgr.wire.messages import Op


@contextmanager
def sent_by(manager: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Note every frame that a manager sends in the body, and every ring of a bell.

    Without those that tell a host a form of infos: they come once, when that was agreed on.
    """
    transport = manager._running.engine.transport
    sent: list[tuple[Any, ...]] = []
    send, send_each, ring = transport.send, transport.send_each, transport.ring

    def noted_send(host_id: int, prepared: Any) -> None:
        if not _tells_a_form(prepared):
            sent.append(("frame", host_id, prepared))
        send(host_id, prepared)

    def noted_send_each(requests: deque[tuple[int, Any]], **how: Any) -> None:
        sent.extend(("frame", host_id, prepared) for host_id, prepared in requests)
        transport.send = send  # which some transports do it with
        try:
            send_each(requests, **how)
        finally:
            transport.send = noted_send

    def noted_ring(host_ids: Iterable[int], **how: Any) -> None:
        sent.extend(("ring", host_id) for host_id in host_ids)
        ring(host_ids, **how)

    transport.send, transport.send_each = noted_send, noted_send_each
    transport.ring = noted_ring
    try:
        yield sent
    finally:
        transport.send, transport.send_each, transport.ring = send, send_each, ring


_AT_OP = 3  # in the head of a frame: behind what all frames begin with


def _tells_a_form(prepared: Any) -> bool:
    op = prepared[_AT_OP] if isinstance(prepared, bytes) else getattr(prepared, "op", None)
    return bool(op == Op.INFO_FORMS)
