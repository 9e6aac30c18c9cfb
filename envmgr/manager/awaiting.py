"""What a coroutine awaits and a thread notifies it of: on asyncio, and on trio where that runs it.

Nothing else of managers and leases knows which of the two it is. A `Signal` is made where the
coroutine runs (`signal_here`), notified from any thread, and awaited by that coroutine alone.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any, Protocol


class Signal(Protocol):
    """Tells one coroutine of something, once.

    Attributes:
        loop: what runs the coroutine: equal for two signals if one loop runs both.
    """

    loop: Any

    def notify(self) -> bool:
        """Wake the coroutine; from any thread. Returns False if its loop has ended."""

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is notified, for so long at most; return whether it was.

        Who is cancelled in this does not wait for it again.
        """

    async def until_cancelled(self) -> BaseException | None:
        """Wait until it is notified; return what it was cancelled with, if it was before that."""

    async def wait_through(self) -> BaseException | None:
        """Wait until it is notified, however often that is cancelled; return the latest, if known.

        Who has been given one has to raise it.
        """

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine knows."""


class AsyncioSignal:
    """A signal for a coroutine that asyncio runs."""

    __slots__ = ("_future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self.loop.create_future()

    def notify(self) -> bool:
        """Wake the coroutine; return whether its loop is there."""
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed: nobody waits any more
            return False
        return True

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is notified, for so long at most; return whether it was."""
        if math.isinf(seconds):
            await self._future
        else:
            await asyncio.wait((self._future,), timeout=seconds)
        return self._future.done()

    async def until_cancelled(self) -> BaseException | None:
        """Wait until it is notified; return what it was cancelled with, if it was before that."""
        try:
            await asyncio.shield(self._future)
        except asyncio.CancelledError as error:
            return error
        return None

    async def wait_through(self) -> BaseException | None:
        """Wait until it is notified, however often that is cancelled; return the latest wish."""
        cancelled = None
        while not self._future.done():
            cancelled = await self.until_cancelled() or cancelled
        return cancelled

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine knows."""
        return self._future.done()


class TrioSignal:
    """A signal for a coroutine that trio runs."""

    __slots__ = ("_event", "_trio", "loop")

    def __init__(self) -> None:
        self._trio: Any = sys.modules["trio"]
        self.loop: Any = self._trio.lowlevel.current_trio_token()
        self._event: Any = self._trio.Event()

    def notify(self) -> bool:
        """Wake the coroutine; return whether its loop is there."""
        try:
            self.loop.run_sync_soon(self._event.set)
        except self._trio.RunFinishedError:  # nobody waits any more
            return False
        return True

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is notified, for so long at most; return whether it was."""
        with self._trio.move_on_after(seconds):
            await self._event.wait()
        return self.is_notified

    async def until_cancelled(self) -> BaseException | None:
        """Wait until it is notified; return what it was cancelled with, if it was before that."""
        try:
            await self._event.wait()
        except self._trio.Cancelled as error:
            return error  # type: ignore[no-any-return]
        return None

    async def wait_through(self) -> BaseException | None:
        """Wait until it is notified; trio cancels what comes after, if it is to be cancelled."""
        with self._trio.CancelScope(shield=True):
            await self._event.wait()
        return None

    @property
    def is_notified(self) -> bool:
        """Whether the coroutine knows."""
        return bool(self._event.is_set())


def signal_here() -> Signal:
    """Return a signal for the coroutine that calls this.

    Raises:
        RuntimeError: no coroutine does.
    """
    trio, sniffio = sys.modules.get("trio"), sys.modules.get("sniffio")
    if trio is None:
        return AsyncioSignal()
    if sniffio is not None:  # trio has brought it; either may run as a guest of the other
        is_trio = sniffio.current_async_library() == "trio"
    else:
        is_trio = trio.lowlevel.in_trio_run()
    return TrioSignal() if is_trio else AsyncioSignal()
