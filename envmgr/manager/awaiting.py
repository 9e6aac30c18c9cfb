"""Signals that a coroutine awaits and a thread gives: on asyncio, and on trio if that runs it.

No other part of managers and leases knows which of the two it is. A `Signal` is made where the
coroutine runs (`signal_here`), notified from any thread, and awaited by that coroutine alone.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any, Protocol


class Signal(Protocol):
    """A notification of one coroutine, given once.

    Attributes:
        loop: what runs the coroutine: equal for two signals if one loop runs both.
    """

    loop: Any

    def notify(self) -> bool:
        """Wake the coroutine, from any thread; return False if its loop has ended."""

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the notification, for `seconds` at most; return whether it has come.

        A coroutine that is cancelled in this does not wait for the same signal again.
        """

    async def until_cancelled(self) -> BaseException | None:
        """Wait for the notification; return the cancellation, if one comes before it."""

    async def wait_through(self) -> BaseException | None:
        """Wait for the notification through all cancellations; return the latest, if known.

        A caller that gets a cancellation has to raise it.
        """

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine has been notified."""


class AsyncioSignal:
    """A signal for a coroutine that asyncio runs."""

    __slots__ = ("_future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self.loop.create_future()

    def notify(self) -> bool:
        """Wake the coroutine; return False if its loop has ended."""
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed: nobody waits any more
            return False
        return True

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the notification, for `seconds` at most; return whether it has come."""
        if math.isinf(seconds):
            await self._future
        else:
            await asyncio.wait((self._future,), timeout=seconds)
        return self._future.done()

    async def until_cancelled(self) -> BaseException | None:
        """Wait for the notification; return the cancellation, if one comes before it."""
        try:
            await asyncio.shield(self._future)
        except asyncio.CancelledError as error:
            return error
        return None

    async def wait_through(self) -> BaseException | None:
        """Wait for the notification through all cancellations; return the latest of them."""
        cancelled = None
        while not self._future.done():
            cancelled = await self.until_cancelled() or cancelled
        return cancelled

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine has been notified."""
        return self._future.done()


class TrioSignal:
    """A signal for a coroutine that trio runs."""

    __slots__ = ("_event", "_trio", "loop")

    def __init__(self) -> None:
        self._trio: Any = sys.modules["trio"]
        self.loop: Any = self._trio.lowlevel.current_trio_token()
        self._event: Any = self._trio.Event()

    def notify(self) -> bool:
        """Wake the coroutine; return False if its loop has ended."""
        try:
            self.loop.run_sync_soon(self._event.set)
        except self._trio.RunFinishedError:  # nobody waits any more
            return False
        return True

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the notification, for `seconds` at most; return whether it has come."""
        with self._trio.move_on_after(seconds):
            await self._event.wait()
        return self.is_notified

    async def until_cancelled(self) -> BaseException | None:
        """Wait for the notification; return the cancellation, if one comes before it."""
        try:
            await self._event.wait()
        except self._trio.Cancelled as error:
            return error  # type: ignore[no-any-return]
        return None

    async def wait_through(self) -> BaseException | None:
        """Wait for the notification; if cancelled, trio itself cancels what comes after."""
        with self._trio.CancelScope(shield=True):
            await self._event.wait()
        return None

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine has been notified."""
        return bool(self._event.is_set())


def signal_here() -> Signal:
    """Return a signal for the coroutine that calls this.

    Raises:
        RuntimeError: it is not called from a coroutine.
    """
    trio, sniffio = sys.modules.get("trio"), sys.modules.get("sniffio")
    if trio is None:
        return AsyncioSignal()
    if sniffio is not None:  # trio has brought it; either may run as a guest of the other
        is_trio = sniffio.current_async_library() == "trio"
    else:
        is_trio = trio.lowlevel.in_trio_run()
    return TrioSignal() if is_trio else AsyncioSignal()
