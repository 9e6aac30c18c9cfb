"""A thread for what must not be half done: no signal handler runs there.

Python runs signal handlers in the main thread only, between any two of its bytecodes, and what they
raise (KeyboardInterrupt first of all) goes through whatever runs there. So what changes many things
at once (a failure, a renewal, a launch, a close) is done here, while its caller waits; the caller
can be interrupted in its waiting, and what was begun comes to its end all the same.

It costs two changes of threads. What happens in each step is written so that an interrupt at any
point of it can be made up for, and stays in the caller's thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from envmgr.transport.process.threads import BACKGROUND_THREAD

T = TypeVar("T")

_LOOK_EVERY_S = 0.05
"""So long a signal handler may have to wait."""


class _Task(Generic[T]):
    """Something to be done once, and what came of it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._ended = threading.Lock()
        self._ended.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            self._result = self._job()
        except BaseException as error:
            self._error = error
        self._ended.release()

    def wait(self) -> None:
        """Wait until it is done; signal handlers run meanwhile.

        Not in one go: a signal that comes just before the thread falls asleep does not wake it.
        """
        while not self._ended.acquire(timeout=_LOOK_EVERY_S):
            pass

    def outcome(self) -> T:
        """Return what the job returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]


class _Thread(threading.Thread):
    """The thread of a shelter.

    Attributes:
        waiting: the thread that waits while it works.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        super().__init__(target=serve, name=BACKGROUND_THREAD, daemon=True)
        self.waiting = threading.main_thread()


class Shelter:
    """Runs jobs one after another on a thread of its own, which is started by the first of them."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def run(self, job: Callable[[], T]) -> T:
        """Run a job to its end, and return or raise what comes of it.

        Where no handler can interrupt, which is in every thread but the main one, it runs at once.
        So it does when this has ended.
        """
        if self._has_ended or threading.current_thread() is not threading.main_thread():
            return job()
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = thread = _Thread(self._serve)
            thread.start()
        task = _Task(job)
        self._tasks.put(task)
        task.wait()
        return task.outcome()

    def settle(self) -> None:
        """Wait for what was begun before an interrupt."""
        if self._thread is not None and not self._has_ended:
            self.run(_nothing)  # after all that was given before it

    def end(self) -> None:
        """End the thread, when it has done all that it was given, and wait for that.

        What it is given later runs in the caller's thread.
        """
        self._has_ended = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put(None)
            with contextlib.suppress(RuntimeError):  # an interrupt has kept it from being started
                thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._running:  # also where an interrupted start has left two of these threads
                task.run()
            del task
        self._tasks.put(None)  # for the other of these two


def _nothing() -> None:
    """Be done."""
