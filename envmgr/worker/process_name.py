"""Sets the names that envmgr's own processes have where the system lists its processes."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable

from envmgr.texts import env_ids_text

_TITLES = "setproctitle"
"""The package that can set a title of any length, if it is installed."""


def load_titles() -> None:
    """Import the package for titles, if installed: in a server, so that its workers have it."""
    with contextlib.suppress(Exception):  # whatever is wrong with it: a title is no reason to fail
        importlib.import_module(_TITLES)


def name_server() -> None:
    """Name this process as a worker server."""
    _set("envmgr-server", "envmgr worker server")


def name_worker(index: int, env_ids: Iterable[int]) -> None:
    """Name this process as a worker.

    Args:
        index: index of the worker among the manager's workers.
        env_ids: the env_ids of its envs.
    """
    title = ""
    if _TITLES in sys.modules:  # the text takes longer than all else
        title = f"envmgr worker {index} ({env_ids_text(env_ids)})"
    _set(f"envmgr-w{index}", title)


def _set(name: str, title: str) -> None:
    """Set the name, of which Linux takes 15 bytes, and the title, if that is possible."""
    if _TITLES in sys.modules:
        with contextlib.suppress(Exception):
            sys.modules[_TITLES].setproctitle(title)  # and the name, as the begin of the title
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name.encode()[:15])
