"""No wait of a manager is one long system call, which a signal just before it would not end."""

from __future__ import annotations

from typing import Any

import pytest

from envmgr.transport.base import NOTICE_S
from tests.contract.harness import ALL_BLOCK, ALL_MESSAGE, Setup, World, over


@over(ALL_BLOCK, ALL_MESSAGE)
def test_no_wait_overlooks_a_signal_for_long(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport: Any = world.make(setup, 2)._running.engine.transport  # type: ignore[union-attr]
    waits: list[float] = []

    def note(*args: Any) -> list[Any]:
        waits.extend(args[-1:])
        return []

    with monkeypatch.context() as patch:
        patch.setattr(transport._connections, "wait", note)
        patch.setattr(transport._ready, "ready", note)
        for pivot in (None, 1):
            for timeout_s in (None, 30.0):
                transport.poll(timeout_s, pivot=pivot)
    assert waits == [NOTICE_S] * 4
