"""The journal of public calls, and the thread for what must not be interrupted.

`envmgr.journal` says how the two keep interrupts from doing harm.

Timesteps are delivered when the public call has returned them. Until then they are `returning`: a
call that is ended by an interrupt has delivered nothing, and the timesteps that it had are given
back to the table.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from envmgr.interruptible import Task, join_thread, start_thread
from envmgr.journal import Journal
from envmgr.transport.process.threads import thread_name

T = TypeVar("T")


class Fate:
    """What became of timesteps that were handed out; kept by whoever counts them.

    Attributes:
        given_back: whether an interrupt has ended the call, so that they are owed again.
    """

    __slots__ = ("given_back",)

    def __init__(self) -> None:
        self.given_back = False


class Returning(NamedTuple):
    """Timesteps that a public call is about to return.

    Nobody but the journal may keep this, because the frame of the caller keeps alive everything
    that the functions around it have. This is why the frame is not part of the timesteps, which the
    caller's functions know.

    Attributes:
        timesteps: a `HandedOut`, which knows how many there are and what is to become of them.
        caller: the frame of the call.
    """

    timesteps: Any
    caller: FrameType | None


class CallJournal(Journal):
    """What is under way in the public call of one manager.

    Args:
        thread: runs the jobs that must not be interrupted; None: they run in the caller's thread.

    Attributes:
        caller: the frame of the public call under way; it stays after a call that an interrupt has
            kept from ending as it should.
        returning: the timesteps that the call is about to return; None if there are none. They stay
            a moment longer than `caller`: the last thing that a call does is to set this to None.
    """

    __slots__ = ("_thread", "caller", "returning")

    def __init__(self, thread: SignalFreeThread | None = None) -> None:
        super().__init__()
        self._thread = thread
        self.caller: FrameType | None = None
        self.returning: Returning | None = None

    def forget(self) -> None:
        """Drop what an interrupt has left, and what was to be returned: the manager is closed."""
        super().forget()
        self.returning = None

    def uninterrupted(self, job: Callable[[], T]) -> T:
        """Run a job that must not be left half done to its end, whatever signal handlers raise."""
        return job() if self._thread is None else self._thread.run(job)

    def settle(self) -> None:
        """Wait for jobs that `uninterrupted` began before an interrupt of their caller."""
        if self._thread is not None:
            self._thread.settle()

    def end(self) -> None:
        """End the thread; from now on, `uninterrupted` runs jobs in the caller's thread."""
        if self._thread is not None:
            self._thread.end()

    @property
    def fate(self) -> Fate | None:
        """What is to become of the timesteps that the call is about to return."""
        returning = self.returning
        if returning is None:
            return None
        timesteps = returning.timesteps
        if timesteps.fate is None:
            timesteps.fate = Fate()
        fate: Fate = timesteps.fate
        return fate

    @property
    def count(self) -> int:
        """How many timesteps the call is about to return."""
        returning = self.returning
        return 0 if returning is None else int(returning.timesteps.count)


def is_run(frame: FrameType | None) -> bool:
    """Return whether any thread runs this frame; if none does, its local variables are released.

    This takes a single step. A search for the frame among those that threads run could be led
    astray by what the threads do meanwhile.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


class _Thread(threading.Thread):
    """A thread in which no signal handler runs.

    Attributes:
        waiting: the thread that waits while this one works.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        super().__init__(target=serve, name=thread_name("uninterrupted work"), daemon=True)
        self.waiting = threading.main_thread()


class SignalFreeThread:
    """Runs jobs one after another on a thread of its own, which is started by the first of them.

    Python runs signal handlers in the main thread only.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def run(self, job: Callable[[], T]) -> T:
        """Run a job to its end, and return or raise what comes of it.

        In every thread but the main one no signal handler can interrupt, so the job runs there at
        once. It also does so once `end` was called.
        """
        if self._has_ended or threading.current_thread() is not threading.main_thread():
            return job()
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = thread = _Thread(self._serve)
            try:
                start_thread(thread)
            except RuntimeError:
                self._thread = None
                if threading.main_thread().is_alive():
                    raise
                return job()  # in an exit handler: Python 3.12 starts no thread there
        task = Task(job)
        self._tasks.put(task)
        task.wait()
        return task.outcome()

    def settle(self) -> None:
        """Wait for jobs that were begun before an interrupt."""
        if self._thread is not None and not self._has_ended:
            self.run(_nothing)  # after all that was given before it

    def end(self) -> None:
        """End the thread once it has run all jobs that it was given, and wait for that.

        Jobs that it is given later run in the caller's thread.
        """
        self._has_ended = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put(None)
            join_thread(thread)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._running:  # also where an interrupted start has left two of these threads
                task.run()
            del task
        self._tasks.put(None)  # for the other of these two


def _nothing() -> None:
    """Do nothing."""
