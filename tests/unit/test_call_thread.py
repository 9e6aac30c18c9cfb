"""The thread that makes calls for coroutines."""

from __future__ import annotations

import asyncio

from envmgr.manager.threads import CallThread


def nothing() -> None:
    """Do nothing."""


def test_a_call_that_comes_after_the_end_is_made_all_the_same() -> None:
    """It says that the manager is closed; nobody would answer it otherwise."""

    async def calls() -> None:
        thread = CallThread()
        assert await thread.run(lambda: 1, nothing, nothing, nothing) == 1
        thread.end()
        late = thread.run(lambda: 2, nothing, nothing, nothing)
        assert await asyncio.wait_for(late, 10.0) == 2

    asyncio.run(calls())
