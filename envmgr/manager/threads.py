"""What coroutines have done by threads, so that their event loop is never blocked."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from envmgr.transport.process.threads import thread_name

T = TypeVar("T")

CLOSING = thread_name("closing")
LAUNCHING = thread_name("launching")


class _Job:
    """Something that a thread does for a coroutine.

    Args:
        function: does it.
        loop: of the coroutine.
    """

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._loop = loop
        self.undo: Callable[[], None] | None = None  # if nobody awaits it any more
        self.done: asyncio.Future[None] = loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it, and tell the coroutine."""
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        if self.undo is not None and self.error is None:
            self.undo()
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed
            return

    def _set(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    async def finished(self) -> asyncio.CancelledError | None:
        """Wait until it is done, however often that is cancelled; return the last such wish."""
        cancelled = None
        while not self.done.done():
            try:
                await asyncio.shield(self.done)
            except asyncio.CancelledError as error:
                cancelled = error
        return cancelled

    def outcome(self) -> Any:
        """Return what it gave, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.result


async def in_thread(
    function: Callable[[], T], name: str, on_cancel: Callable[[], None] | None = None
) -> T:
    """Do something in a thread of its own, and wait until it is done.

    Being cancelled does not end that wait, as what is done is bounded.

    Args:
        function: what.
        name: of the thread.
        on_cancel: called, in another thread, when the wait is cancelled: has it end sooner.
    """
    job = _Job(function, asyncio.get_running_loop())
    thread = threading.Thread(target=job.run, name=name, daemon=True)
    thread.start()
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.shield(job.done)
    except asyncio.CancelledError as error:
        cancelled = error
        if on_cancel is not None:
            hurrying = _Job(on_cancel, asyncio.get_running_loop())
            threading.Thread(target=hurrying.run, name=name, daemon=True).start()
            await hurrying.finished()
        await job.finished()
    thread.join()  # it has nothing more to do
    if cancelled is not None:
        raise cancelled
    result: T = job.outcome()
    return result


class CallThread:
    """A thread that makes the calls of coroutines for batches, one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_busy = False

    async def run(
        self,
        call: Callable[[], T],
        abandon: Callable[[], None],
        undo: Callable[[], None],
    ) -> T:
        """Make a call.

        Args:
            call: the call.
            abandon: has it end soon, with nothing done.
            undo: takes back what it has returned.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=thread_name("calls of coroutines"), daemon=True
            )
            self._thread.start()
        job = _Job(call, asyncio.get_running_loop())
        self._jobs.put(job)
        try:
            await asyncio.shield(job.done)
        except GeneratorExit:  # the loop has ended: nobody can wait
            job.undo = undo
            abandon()
            raise
        except asyncio.CancelledError:
            if not job.done.done():
                abandon()
                await job.finished()
            if job.error is None:
                undo()
            raise
        result: T = job.outcome()
        return result

    def end(self) -> None:
        """End the thread, once it has made its calls."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
