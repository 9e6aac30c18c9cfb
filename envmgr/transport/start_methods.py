"""Which spawner serves which `context` of the config."""

from __future__ import annotations

import os
import sys
import threading

from envmgr.errors import LaunchError
from envmgr.transport.base import WorkerSettings
from envmgr.transport.multiprocessing_spawner import MultiprocessingSpawner
from envmgr.transport.server_spawner import ServerSpawner
from envmgr.transport.spawner import Spawner

BACKGROUND_THREAD = "envmgr-background"
"""Name of the thread that each manager has while work goes on without its caller."""


def make_spawner(context: str, settings: WorkerSettings) -> Spawner:
    """Return the spawner for a `context` of the config.

    `server` needs Linux (pidfds, SEQPACKET sockets, parent-death signals); elsewhere `spawn` takes
    its place.
    """
    if context == "server":
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            return ServerSpawner(settings)
        context = "spawn"
    return MultiprocessingSpawner(context, settings)


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
