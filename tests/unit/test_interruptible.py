"""Waits for threads in the main thread, which signal handlers interrupt."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import envmgr
from envmgr import interruptible
from envmgr.interruptible import (
    InterruptibleEvent,
    SoleThread,
    frames_of_threads,
    join_thread,
    start_thread,
)
from tests.faults.interrupting import Interrupted, Point, act_at, handlers

PACKAGE = Path(envmgr.__file__).parent

# Their threads are waited for where no signal handler raises: in workers and actors, in the
# threads of such, and in the handler of the command line itself.
ELSEWHERE = {
    "cli/interrupt.py",
    "testing/faulty.py",
    "transport/ray/actor.py",
    "transport/ray/actor_calls.py",
    "worker/event_loop.py",
    "worker/process.py",
}

# Who starts threads without a SoleThread, and why it harms nothing there if an interrupt comes
# between the start and the next line.
STARTED_OTHERWISE = {
    "adapters/openenv.py": "nobody waits for it",
    "core/call_journal.py": "where there are two, they take turns, and each has the other one end",
    "manager/threads.py": "it runs one function, and nobody else starts it",
    "manager/tally.py": "it is told to end then",
    "testing/chaos.py": "it is told to end then",
    "transport/process/threads.py": "nobody waits for it",
    "transport/ray/cluster.py": "the connection counts as one that somebody else has made",
    "transport/ray/trainer_calls.py": "launches are not interrupted there",
    "transport/thread.py": "launches and renewals are not interrupted there",
}


@pytest.fixture
def interrupts() -> Iterator[None]:
    """A signal handler that raises."""
    with handlers(lambda: None):
        yield


def lines_of(function: Callable[..., Any]) -> list[int]:
    """Return the lines of a function."""
    return sorted({line for *_, line in function.__code__.co_lines() if line is not None})


def by_signal() -> None:
    signal.raise_signal(signal.SIGALRM)


def interrupted_at(
    function: Any, line: int, call: Callable[[], Any], act: Callable[[], None] = by_signal
) -> bool:
    """Make a call that is interrupted the first time that it comes to a line of a function.

    Returns:
        Whether it has come there; what comes through then is what the handler has raised.
    """
    struck: list[None] = []

    def strike() -> None:
        struck.append(None)
        act()

    try:
        act_at(Point(function.__code__, line, is_opcode=False, hit=1), call, strike)
    except Interrupted:
        assert struck
    return bool(struck)


@pytest.mark.parametrize("function", [start_thread, InterruptibleEvent.wait])
def test_a_thread_is_started_or_the_interrupt_comes_through(
    interrupts: None, function: Any
) -> None:
    n_struck = n_started = 0
    for line in lines_of(function) * 5:  # a thread that runs at once is not waited for
        thread = threading.Thread(target=list)
        n_struck += interrupted_at(function, line, lambda thread=thread: start_thread(thread))
        if thread.ident is not None:
            n_started += 1
            thread.join()
    assert n_struck
    assert n_started


def test_a_thread_that_the_system_has_runs_whatever_a_handler_raises_then(
    interrupts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`threading.Thread.start` would forget it, and it would end before it has run anything."""
    name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    started = getattr(threading, name)

    def start_and_strike(*args: Any, **kwargs: Any) -> Any:
        ident = started(*args, **kwargs)
        signal.raise_signal(signal.SIGALRM)
        return ident

    monkeypatch.setattr(threading, name, start_and_strike)
    has_run = threading.Event()
    thread = threading.Thread(target=has_run.set)
    with pytest.raises(Interrupted):
        start_thread(thread)
    thread.join()
    assert has_run.is_set()


class Counted(SoleThread):
    """A thread that notes itself as late as can be, and runs until it is told to end."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.ran: list[threading.Thread] = []
        self.may_begin, self.ending = InterruptibleEvent(), InterruptibleEvent()

    def _run_once(self) -> None:
        self.may_begin.wait()
        super()._run_once()

    def _run(self) -> None:
        self.ran.append(threading.current_thread())
        self.ending.wait()


@pytest.mark.parametrize("function", [SoleThread.start, start_thread, InterruptibleEvent.wait])
def test_there_is_one_thread_whatever_has_interrupted_its_start(
    interrupts: None, function: Any
) -> None:
    """Two would share what wakes one of them: a Background's doorbell, for example."""
    n_struck, most = 0, 0
    for line in lines_of(function) * 5:
        counted = Counted()
        n_struck += interrupted_at(function, line, counted.start)
        counted.start()
        started = {thread for thread in threading.enumerate() if thread.name == "counted"}
        counted.may_begin.set()
        while not counted.ran:
            time.sleep(0.001)
        for thread in started - {counted.ran[0]}:
            thread.join()
        counted.start()
        assert counted.ran == [counted.thread]
        counted.ending.set()
        join_thread(counted.ran[0])
        most = max(most, len(started))
    assert n_struck
    assert most == 2 or function is InterruptibleEvent.wait  # which is not always waited in


def test_where_no_thread_can_be_had_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = threading.Thread(target=print)
    monkeypatch.setattr(thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        start_thread(thread)
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(RuntimeError, match="can't start"):
            start_thread(thread)


def test_a_handler_waits_for_a_thread_where_the_same_wait_is_interrupted() -> None:
    """As one that closes a manager, which may come into the same manager's end."""
    wait = getattr(threading.Thread, "_wait_for_tstate_lock", None)
    if wait is None:
        pytest.skip("this Python waits for threads in C")
    n_struck = 0
    for line in lines_of(wait):
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        again = partial(join_thread, thread)
        n_struck += interrupted_at(wait, line, again, act=again)
        assert not thread.is_alive()
    assert n_struck > 3


def test_a_thread_is_waited_for_as_long_as_told() -> None:
    go_on = InterruptibleEvent()
    thread = threading.Thread(target=go_on.wait)
    join_thread(thread)  # which was not started
    thread.start()
    join_thread(thread, 0.0)
    join_thread(thread, 0.06)
    assert thread.is_alive()
    go_on.set()
    join_thread(thread)
    assert not thread.is_alive()
    join_thread(thread)


def test_nothing_is_collected_while_the_frames_of_threads_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collects: list[bool] = []

    def listed() -> dict[int, Any]:
        collects.append(gc.isenabled())
        if len(collects) == 3:
            raise MemoryError
        return {}

    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setattr(interruptible, "_WITHOUT_COLLECTION", (gc.disable, listed, gc.enable))
    monkeypatch.setattr(sys, "_current_frames", listed)
    was_enabled = gc.isenabled()
    try:
        gc.enable()
        assert frames_of_threads() == {}
        assert gc.isenabled()
        gc.disable()
        assert frames_of_threads() == {}
        assert not gc.isenabled(), "as whoever has disabled it wants it"
        gc.enable()
        with pytest.raises(MemoryError):
            frames_of_threads()
        assert gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert collects == [False] * 3


def test_who_lists_the_frames_of_threads_keeps_nothing_of_their_callers_alive() -> None:
    class Held:
        pass

    def lists() -> Any:
        held = Held()
        found = frames_of_threads().get(threading.get_ident())
        assert found is not None
        names = []
        while found is not None:
            names.append(found.f_code.co_name)
            found = found.f_back
        assert "lists" in names, "its callers are seen"
        return weakref.ref(held)

    assert lists()() is None, "not by a cycle, until it is collected"


def test_the_frames_of_threads_can_be_listed_while_threads_end() -> None:
    """With Python 3.11 `sys._current_frames` stands still here within a second."""
    code = """
        import gc, os, sys, threading, weakref
        from envmgr.interruptible import frames_of_threads

        class Cycle:
            pass

        def lets_others_run(reference):
            for _ in range(200):
                pass

        def start_threads():
            while True:
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()

        for _ in range(4):
            threading.Thread(target=start_threads, daemon=True).start()
        sys.setswitchinterval(1e-5)
        gc.set_threshold(5)
        for _ in range(50):
            references = []
            for _ in range(1000):
                cycle = Cycle()
                cycle.itself = cycle
                references.append(weakref.ref(cycle, lets_others_run))
                frames_of_threads()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=50, check=True)


def test_an_event_that_is_set_is_set_for_all_and_for_good() -> None:
    event, ended = InterruptibleEvent(), list[bool]()
    threads = [threading.Thread(target=lambda: ended.append(event.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not event.wait(0.0)
    assert not event.wait(0.01)
    assert not event.is_set
    event.set()
    event.set()
    for thread in threads:
        thread.join()
    assert ended == [True] * 4
    assert event.wait()
    assert event.wait(0.0)


@pytest.mark.parametrize("function", [InterruptibleEvent.wait, InterruptibleEvent._let_go])
def test_an_interrupt_of_a_wait_comes_through_and_the_wait_can_be_repeated(
    interrupts: None, function: Any
) -> None:
    n_struck = 0
    for line in lines_of(function):
        event = InterruptibleEvent()
        event._let_go()  # as another one who waits: the wait finds it so, and does likewise
        setting = threading.Thread(target=event.set)

        def wait(event: InterruptibleEvent = event, setting: threading.Thread = setting) -> None:
            event.wait(0.001)
            setting.start()
            event.wait()

        n_struck += interrupted_at(function, line, wait)
        if setting.ident is None:
            setting.start()
        assert event.wait(60.0)
        setting.join()
    assert n_struck > 1


def test_nothing_of_envmgr_waits_otherwise() -> None:
    """An interrupt would come out as `RuntimeError: release unlocked lock`, or not at all.

    And a handler that waits for a thread which a wait that it has interrupted knows to have ended
    would find it alive for ever.
    """
    found = re.compile(
        r"threading\.(Event|Condition|Semaphore|BoundedSemaphore|Barrier|Timer)\("
        r"|\bqueue\.(Queue|LifoQueue|PriorityQueue)\("
        r"|Thread\(.*\)\.start\(\)|\b_?thread\.(start|join)\(|\bself\.join\("
        r"|while .*\.is_alive\(\)|_current_frames"
    )
    waiting = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if found.search(path.read_text())
    }
    assert waiting == ELSEWHERE | {"interruptible.py"}


def test_who_starts_a_thread_can_be_interrupted_then() -> None:
    """A `SoleThread`, or harmless: see `STARTED_OTHERWISE`."""
    starting = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "start_thread(" in path.read_text()
    }
    assert starting == STARTED_OTHERWISE.keys() | {"interruptible.py"}
