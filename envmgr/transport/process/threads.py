"""Threads of the trainer, and what they forbid."""

from __future__ import annotations

import threading

from envmgr.errors import LaunchError

BACKGROUND_THREAD = "envmgr-background"
"""Name of the thread that each manager has while its caller is away."""


def refuse_unsafe_fork() -> None:
    """Refuse to fork a process that has threads: their locks would stay locked in the child.

    Those of other managers do not count: they hold no lock that a worker needs.

    Raises:
        LaunchError: there are other threads.
    """
    here = threading.current_thread()
    threads = (thread for thread in threading.enumerate() if thread is not here)
    others = [thread.name for thread in threads if thread.name != BACKGROUND_THREAD]
    if others:
        raise LaunchError(
            f"context: fork with other threads running ({', '.join(others)}) can deadlock the "
            "workers, so it is refused. Use context: server (safe with threads, and as fast), or "
            "launch before the threads are started."
        )
