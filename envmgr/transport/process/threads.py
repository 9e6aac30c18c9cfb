"""Threads of the trainer, and what they forbid."""

from __future__ import annotations

import threading

from envmgr.errors import LaunchError

BACKGROUND_THREAD = "envmgr-background"
"""Name of the threads of managers."""


def refuse_unsafe_fork() -> None:
    """Refuse to fork a process that has threads: their locks would stay locked in the child.

    Those of other managers do not count: they hold no lock that a worker needs. Nor does one that
    waits for this one, which says so in its attribute `waiting`.

    Raises:
        LaunchError: there are other threads.
    """
    here = threading.current_thread()
    idle = (here, getattr(here, "waiting", None))
    threads = (thread for thread in threading.enumerate() if thread not in idle)
    others = [thread.name for thread in threads if thread.name != BACKGROUND_THREAD]
    if others:
        raise LaunchError(
            f"context: fork with other threads running ({', '.join(others)}) can deadlock the "
            "workers, so it is refused. Use context: server (safe with threads, and as fast), or "
            "launch before the threads are started."
        )
