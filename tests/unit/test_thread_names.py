"""Which threads of the trainer make a fork unsafe, told by their names."""

from __future__ import annotations

import threading

import pytest

from envmgr.errors import LaunchError
from envmgr.transport.process.threads import (
    refuse_unsafe_fork,
    thread_name,
    waits_for_main_thread,
)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that there are taken to be besides the current one."""
    found: list[threading.Thread] = []
    here = threading.current_thread()
    monkeypatch.setattr(threading, "enumerate", lambda: [here, *found])
    return found


def runs(name: str) -> threading.Thread:
    """Return a thread that seems to run."""
    thread = threading.Thread(name=name)
    thread._ident = 1  # type: ignore[attr-defined]
    return thread


def test_a_thread_that_never_ran_does_not(threads: list[threading.Thread]) -> None:
    threads.append(threading.Thread(name="interrupted in its start"))
    refuse_unsafe_fork()


def test_threads_of_envmgr_do_not_make_a_fork_unsafe(threads: list[threading.Thread]) -> None:
    refuse_unsafe_fork()
    names = (thread_name("resets and repairs"), thread_name("x"))
    threads += [runs(name) for name in names]
    assert threads[0].name == "envmgr: resets and repairs"
    refuse_unsafe_fork()


@pytest.mark.parametrize("name", ["loader", "envmgr-envs-0,1", "my envmgr: resets"])
def test_other_threads_do_and_are_named(threads: list[threading.Thread], name: str) -> None:
    threads += [runs(thread_name("x")), runs(name)]
    with pytest.raises(LaunchError, match=rf"other threads running \({name}\).*context: server"):
        refuse_unsafe_fork()


def test_a_thread_that_waits_for_this_one_does_not(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.append(runs("waits"))
    monkeypatch.setattr(threading.current_thread(), "waiting", threads[0], raising=False)
    refuse_unsafe_fork()


@pytest.mark.parametrize(
    ("name", "others", "waits"),
    [
        (thread_name("resets and repairs"), 0, True),
        (thread_name("resets and repairs"), 1, False),
        ("collects", 0, False),
    ],
    ids=["of envmgr", "beside another one", "of the user"],
)
def test_a_thread_of_envmgr_leaves_a_fork_to_calls_of_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, name: str, others: int, waits: bool
) -> None:
    """Where one is refused for good, nothing is waited for."""
    found = [threading.main_thread(), *(runs("loader") for _ in range(others))]
    monkeypatch.setattr(threading, "enumerate", lambda: found)
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(waits_for_main_thread()), name=name)
    thread.start()
    thread.join()
    assert told == [waits]


def test_in_a_call_of_the_main_thread_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not waits_for_main_thread()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    told: list[bool] = []
    thread = threading.Thread(
        target=lambda: told.append(waits_for_main_thread()), name=thread_name("uninterrupted work")
    )
    thread.waiting = threading.main_thread()  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert told == [False]
