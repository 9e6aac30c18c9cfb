"""Threads of the trainer: how envmgr names its own, and which ones make a fork unsafe."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from envmgr.errors import LaunchError
from envmgr.interruptible import start_thread

_OURS = "envmgr: "


def thread_name(does: str) -> str:
    """Return the name of a thread that runs only envmgr's own code.

    `refuse_unsafe_fork` lets a trainer with such threads fork, so none of them may run code of envs
    or users, or hold a lock that a forked worker needs. Threads that run envs have other names.

    Args:
        does: what the thread does, in a few words, as in "resets and repairs".
    """
    return f"{_OURS}{does}"


def reap_behind(wait: Callable[[], Any]) -> None:
    """Reap, in the background and whenever it ends, a killed child that has not ended in time.

    On a busy machine its end may come later than `close` may wait. Nobody else would reap it: it
    would stay as a zombie for as long as the trainer lives.

    Args:
        wait: waits until the child has ended, and reaps it.
    """

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # somebody else has reaped it
            wait()

    with contextlib.suppress(RuntimeError):  # no thread can be had, as when the trainer ends
        start_thread(
            threading.Thread(target=run, name=thread_name("killed processes"), daemon=True)
        )


def refuse_unsafe_fork() -> None:
    """Refuse to fork a process that has threads: their locks would stay locked in the child.

    Envmgr's own threads do not count (see `thread_name`). Nor does a thread that waits for the
    calling thread; the calling thread names it in its attribute `waiting`.

    Raises:
        LaunchError: there are other threads.
    """
    others = _others()
    if others:
        names = ", ".join(thread.name for thread in others)
        raise LaunchError(
            f"context: fork with other threads running ({names}) can deadlock the "
            "workers, so it is refused. Use context: server (safe with threads, and as fast), or "
            "launch before the threads are started."
        )


def waits_for_main_thread() -> bool:
    """Return whether a fork has to wait until the main thread is in a call of a manager.

    It has to if this is one of envmgr's own threads, and the main thread is the only thread that is
    not. Nothing can be known of the locks that the main thread holds while it trains.
    """
    is_ours = threading.current_thread().name.startswith(_OURS)
    return is_ours and _others() == [threading.main_thread()]


def _others() -> list[threading.Thread]:
    """Return the threads that make a fork in this one unsafe."""
    here = threading.current_thread()
    idle = (here, getattr(here, "waiting", None))
    threads = (thread for thread in threading.enumerate() if thread not in idle)
    # Without ident: a thread that never ran. An interrupt in its `start` leaves it listed for good.
    return [t for t in threads if t.ident is not None and not t.name.startswith(_OURS)]


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Keep Python from warning about envmgr's own threads, which hold no lock."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        yield
