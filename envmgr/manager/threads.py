"""Work that threads do for coroutines, so that their event loop is never blocked."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from envmgr.interruptible import SoleThread, join_thread, start_thread
from envmgr.manager.awaiting import signal_here
from envmgr.transport.process.threads import thread_name

T = TypeVar("T")

CLOSING = thread_name("closing")
LAUNCHING = thread_name("launching")


class _Job:
    """A function that a thread runs for the coroutine that makes this job."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._has_ended = False
        self._undo: deque[Callable[[], None]] = deque()  # once, by whoever comes last
        self.done = signal_here()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the function, and notify the coroutine."""
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self._has_ended = True
        self._undo_it()
        self.done.notify()

    def leave(self, undo: Callable[[], None]) -> None:
        """Have the job undone once it is done: nobody awaits it any more."""
        self._undo.append(undo)
        if self._has_ended:
            self._undo_it()

    def _undo_it(self) -> None:
        try:
            undo = self._undo.popleft()
        except IndexError:  # nobody has left it, or it is done
            return
        if self.error is None:
            undo()

    def outcome(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.result


async def in_thread(
    function: Callable[[], T],
    name: str,
    on_cancel: Callable[[], None] | None = None,
    *,
    at_last: Callable[[], None] | None = None,
) -> T:
    """Run a function in a thread of its own, and wait until it has ended.

    Cancellation does not end the wait, as the function takes a bounded time.

    Args:
        function: the function to run.
        name: the name of the thread.
        on_cancel: called, in another thread, when the wait is cancelled: has `function` end sooner.
        at_last: called likewise when `function` has ended, if the wait was cancelled.
    """
    job = _Job(function)
    thread = threading.Thread(target=job.run, name=name, daemon=True)
    start_thread(thread)
    try:
        cancelled = await job.done.until_cancelled()
    except BaseException:  # Ctrl-C, where it is no cancellation; or the loop has ended
        if at_last is not None:
            job.leave(at_last)
        if on_cancel is not None:
            start_thread(threading.Thread(target=on_cancel, name=name, daemon=True))
        raise
    if cancelled is not None:
        await _hurry(on_cancel, name)
        await job.done.wait_through()
        await _hurry(at_last, name)
    join_thread(thread)  # it has nothing more to do
    if cancelled is not None:
        raise cancelled
    result: T = job.outcome()
    return result


async def _hurry(function: Callable[[], None] | None, name: str) -> None:
    """Run a function in its own thread for a cancelled coroutine; wait until it has ended."""
    if function is not None:
        job = _Job(function)
        start_thread(threading.Thread(target=job.run, name=name, daemon=True))
        await job.done.wait_through()


class CallThread(SoleThread):
    """A thread that makes calls for batches on behalf of coroutines, one after another."""

    def __init__(self) -> None:
        super().__init__(thread_name("calls of coroutines"))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_busy = False
        self._has_ended = False

    async def run(
        self,
        call: Callable[[], T],
        abandon: Callable[[], None],
        undo: Callable[[], None],
        taken: Callable[[], None],
    ) -> T:
        """Make a call in the thread, and return what it returns.

        Args:
            call: the call.
            abandon: has the call end soon, with nothing done.
            undo: takes back what the call has returned.
            taken: called when the call is not to be undone any more.
        """
        self.start()
        job = _Job(call)
        self._jobs.put(job)
        if self._has_ended:  # then the thread may have gone
            self._make_late_calls()
        try:
            cancelled = await job.done.until_cancelled()
        except BaseException:  # Ctrl-C, where it is no cancellation; or the loop has ended
            job.leave(undo)
            abandon()
            raise
        if cancelled is not None:
            if not job.done.is_notified:
                abandon()
                await job.done.wait_through()
            if job.error is None:
                undo()
            raise cancelled
        result: T = job.outcome()
        taken()
        return result

    def end(self) -> None:
        """End the thread, once it has made its calls."""
        self._has_ended = True  # before the last job
        thread = self.thread
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                join_thread(thread)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
        self._make_late_calls()

    def _make_late_calls(self) -> None:
        """Make calls that came while the thread ended; they say that the manager is closed."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.run()
