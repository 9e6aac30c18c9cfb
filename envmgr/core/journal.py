"""What keeps an interrupt from doing harm.

Ctrl-C, or a signal handler that raises or closes the manager, can come between any two bytecodes of
a public call.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

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


class Ending(NamedTuple):
    """An episode that ended with a timestep that is handed out.

    Attributes:
        env_id: the env.
        flag: of the reply.
        episodes_done: how many episodes the env has ended with it.
    """

    env_id: int
    flag: int
    episodes_done: int


make_ending = partial(tuple.__new__, Ending)


class Fate:
    """What became of timesteps that were handed out; who counts them keeps this.

    Attributes:
        given_back: an interrupt has ended the call, and they are owed again.
    """

    __slots__ = ("given_back",)

    def __init__(self) -> None:
        self.given_back = False


class Hand:
    """Timesteps that were handed out.

    Nobody keeps it longer than `Delivery` does: with the frame of the caller goes all that the
    functions around it have.

    Attributes:
        result: `{env_id: EnvTimestep}`, or an `ArrayBatch`.
        selection: the envs whose replies were taken out of the block; None if there are none.
        kept: the other envs.
        count: how many timesteps there are.
        endings: of episodes.
        odd: those of them that are to be followed up, which is not to be interrupted.
        n_before: timesteps delivered since launch, before these.
        n_episodes: episodes ended since launch, these included.
        caller: the frame of the public call that is about to return them.
        is_done: the envs were moved on.
        fate: what is to become of them, if somebody wants to know.
    """

    __slots__ = (
        "caller",
        "count",
        "endings",
        "fate",
        "is_done",
        "kept",
        "n_before",
        "n_episodes",
        "odd",
        "result",
        "selection",
    )

    def __init__(
        self,
        result: Any,
        selection: Any,
        kept: Sequence[int],
        endings: Sequence[Ending],
        n_before: int,
        n_episodes: int,
        caller: FrameType | None,
    ) -> None:
        self.result = result
        self.selection = selection
        self.kept = kept
        self.count = len(kept) + (0 if selection is None else selection.count)
        self.endings = endings
        self.odd: Sequence[Ending] = ()
        self.n_before = n_before
        self.n_episodes = n_episodes
        self.caller = caller
        self.is_done = False
        self.fate: Fate | None = None


class Delivery:
    """What is in the hands of the call that is under way.

    The last thing that a public call does before it returns is to let go of it. So a call that an
    interrupt has ended has delivered nothing: what it had is found here, and given back.

    Attributes:
        caller: the frame of the public call under way; it stays after one that an interrupt has
            kept from ending as it should.
        in_hand: the timesteps; None if there are none. They stay for a moment longer than
            `caller`, until the call returns.
    """

    __slots__ = ("caller", "in_hand")

    def __init__(self) -> None:
        self.caller: FrameType | None = None
        self.in_hand: Hand | None = None

    @property
    def fate(self) -> Fate | None:
        """What is to become of the timesteps in hand."""
        hand = self.in_hand
        if hand is None:
            return None
        if hand.fate is None:
            hand.fate = Fate()
        return hand.fate

    @property
    def count(self) -> int:
        """How many timesteps that are."""
        hand = self.in_hand
        return 0 if hand is None else hand.count


def is_run(frame: FrameType | None) -> bool:
    """Whether any thread runs a function; its local variables are let go of if not.

    This is asked in one go. Who looks for the frame among those that threads run may be led astray
    by what these do meanwhile.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
