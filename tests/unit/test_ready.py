"""Waits for fds."""

from __future__ import annotations

import os

import pytest

from envmgr.transport.ready import Watch, await_any

FAR_S = 1e9
"""More than `poll` takes: it counts milliseconds in an int."""


@pytest.mark.parametrize("seconds", [0.0, 0.001, FAR_S, None])
def test_a_wait_may_be_as_long_as_one_likes(seconds: float | None) -> None:
    readable, writable = os.pipe()
    try:
        os.write(writable, b"x")
        await_any([readable], seconds)
        assert Watch([readable]).ready(seconds) == [readable]
    finally:
        os.close(readable)
        os.close(writable)
