"""What signal handlers raise while something is done, by the journal or on a thread of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.core.call_journal import SignalFreeThread
from envmgr.journal import Journal
from envmgr.spaces import codec_of
from envmgr.spaces.interrupts import came_through_a_handler
from envmgr.spaces.reading import short_text


class Alarm(Exception):
    """What a handler raises."""


def raise_alarm(number: int, frame: object) -> None:
    raise Alarm


@pytest.fixture
def quiet() -> Iterator[SignalFreeThread]:
    quiet = SignalFreeThread()
    yield quiet
    quiet.end()


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, raise_alarm)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_jobs_run_on_another_thread_and_give_what_they_return(quiet: SignalFreeThread) -> None:
    assert quiet.run(threading.current_thread) is not threading.current_thread()
    assert quiet.run(lambda: 5) == 5


def test_what_a_job_raises_is_raised_where_it_was_asked_for(quiet: SignalFreeThread) -> None:
    with pytest.raises(KeyError, match="here"):
        quiet.run(lambda: {}["here"])
    assert quiet.run(lambda: 5) == 5


def test_one_thread_does_all_jobs_until_it_is_gone(quiet: SignalFreeThread) -> None:
    first = quiet.run(threading.current_thread)
    assert quiet.run(threading.current_thread) is first
    quiet._tasks.put(None)  # as where a fork has left it behind
    first.join()
    quiet._tasks.get()
    assert quiet.run(threading.current_thread) is not first


def test_a_job_within_a_job_runs_at_once(quiet: SignalFreeThread) -> None:
    assert quiet.run(lambda: quiet.run(lambda: 5)) == 5


def test_in_other_threads_jobs_run_where_they_are(quiet: SignalFreeThread) -> None:
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.append(quiet.run(threading.current_thread)))
    thread.start()
    thread.join()
    assert found == [thread]


@pytest.mark.usefixtures("_handled")
def test_an_interrupt_ends_the_waiting_and_not_the_job(quiet: SignalFreeThread) -> None:
    done: list[int] = []
    goes_on = threading.Event()

    def job() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        goes_on.wait(10.0)
        done.append(1)

    with pytest.raises(Alarm):
        quiet.run(job)
    assert done == []
    goes_on.set()
    quiet.settle()
    assert done == [1]


def test_after_its_end_jobs_run_in_the_callers_thread() -> None:
    quiet = SignalFreeThread()
    quiet.run(lambda: None)
    quiet.end()
    quiet.end()
    assert quiet.run(threading.current_thread) is threading.current_thread()
    quiet.settle()


def test_nothing_to_do_takes_no_thread() -> None:
    before = threading.active_count()
    quiet = SignalFreeThread()
    quiet.settle()
    assert threading.active_count() == before
    quiet.end()


@pytest.mark.usefixtures("_handled")
def test_what_a_handler_raises_is_told_from_the_same_raised_by_others() -> None:
    with pytest.raises(Alarm) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert came_through_a_handler(caught.value)
    with pytest.raises(Alarm) as caught:
        raise Alarm
    assert not came_through_a_handler(caught.value)


def test_methods_and_objects_are_handlers_too() -> None:
    class Handlers:
        def method(self, number: int, frame: object) -> None:
            raise Alarm

        def __call__(self, number: int, frame: object) -> None:
            raise Alarm

    for handler in (Handlers().method, Handlers()):
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(Alarm) as caught:
                signal.raise_signal(signal.SIGUSR1)
            assert came_through_a_handler(caught.value)
        finally:
            signal.signal(signal.SIGUSR1, before)


class Struck:
    """A signal comes while this is looked at."""

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        signal.raise_signal(signal.SIGUSR1)
        return np.zeros(())

    def __repr__(self) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "struck"


@pytest.mark.usefixtures("_handled")
@pytest.mark.parametrize(
    "look", [codec_of(Discrete(4)).refusal, codec_of(Box(0, 1, (2,))).refusal, short_text]
)
def test_an_interrupt_is_no_fault_of_what_is_looked_at(look: Callable[[Any], Any]) -> None:
    with pytest.raises(Alarm):
        look(Struck())


def test_a_thread_that_an_interrupt_kept_from_being_started_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise Alarm

    quiet = SignalFreeThread()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Alarm):
            quiet.run(lambda: 5)
    quiet.end()
    assert quiet.run(lambda: 5) == 5


# -- the journal ----------------------------------------------------------------------------------


def test_where_no_thread_can_be_had_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")

    def start(thread: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", start)
    quiet = SignalFreeThread()
    with pytest.raises(RuntimeError) as caught:
        quiet.run(lambda: None)
    assert caught.value is error
    try:
        raise Alarm
    except Alarm:
        with pytest.raises(RuntimeError):
            quiet.run(lambda: None)
    quiet.end()


def test_in_an_exit_handler_that_starts_no_threads_the_caller_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    quiet = SignalFreeThread()
    with pytest.raises(RuntimeError):
        quiet.run(lambda: 5)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    assert quiet.run(lambda: 5) == 5
    quiet.end()


class Writes:
    """Something that is done in three stores, one of which an interrupt may come before."""

    def __init__(self, interrupted_before: int | None) -> None:
        self.stores: list[int] = [0] * 3
        self.calls: list[bool] = []
        self._before = interrupted_before

    def redo(self, note: list[int], again: bool) -> None:
        self.calls.append(again)
        for at, number in enumerate(note):
            if at == self._before and len(self.calls) < 3:
                raise KeyboardInterrupt
            self.stores[at] = number


@pytest.mark.parametrize("at", range(3))
def test_what_an_interrupt_has_left_is_done_again_until_it_is_done(at: int) -> None:
    journal, writes = Journal(), Writes(at)
    with pytest.raises(KeyboardInterrupt):
        journal.do(writes.redo, [1, 2, 3])
    with pytest.raises(KeyboardInterrupt):  # once more, while it is made up for
        journal.finish()
    journal.finish()
    assert (writes.stores, writes.calls) == ([1, 2, 3], [False, True, True])
    journal.finish()
    assert len(writes.calls) == 3, "it was done"


def test_what_was_done_is_not_done_again() -> None:
    journal, writes = Journal(), Writes(None)
    journal.do(writes.redo, [1, 2, 3])
    journal.finish()
    assert writes.calls == [False]


def test_what_is_forgotten_is_not_done() -> None:
    journal, writes = Journal(), Writes(1)
    with pytest.raises(KeyboardInterrupt):
        journal.do(writes.redo, [1, 2, 3])
    journal.forget()
    journal.finish()
    assert (writes.stores, writes.calls) == ([1, 0, 0], [False])
