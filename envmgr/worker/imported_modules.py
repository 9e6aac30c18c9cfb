"""Finds which modules of installed distributions a worker has imported to build its envs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import site
import sys
import sysconfig
from collections.abc import Set
from typing import Any

_MOST_BYTES = 4096
"""The number of bytes that a pipe takes in one piece."""


def is_installed(path: str) -> bool:
    """Return whether a file or folder belongs to an installed distribution, or to envmgr."""
    real = os.path.realpath(path)
    return any(real.startswith(folder + os.sep) for folder in _folders())


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = [*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    with contextlib.suppress(Exception):  # a user without a home
        paths.append(site.getusersitepackages())
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return tuple(dict.fromkeys(os.path.realpath(path) for path in (*paths, own)))


def report_imports(fd: int, known: Set[str]) -> None:
    """Write the names of the installed modules that are newly imported, and close `fd`.

    Of a new package, only the package itself is named. If modules are so odd that this cannot be
    told, nothing is written: the report saves time, and nothing depends on it.

    Args:
        fd: file descriptor of a pipe.
        known: names of the modules that were imported before.
    """
    try:
        with contextlib.suppress(Exception):  # or nobody reads it any more
            os.write(fd, _named(known))
    finally:
        os.close(fd)


def _named(known: Set[str]) -> bytes:
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        if name in known or name == "__main__" or _has_new_parent(name, known):
            continue
        origin = getattr(spec_of(module), "origin", None)
        if isinstance(origin, str) and is_installed(origin):
            found.append(name)
    while len(data := json.dumps(found).encode()) > _MOST_BYTES:
        found.pop()
    return data


def spec_of(module: Any) -> Any:
    """Return the spec of a module; None if it has none.

    An ordinary attribute access would load a module that is loaded lazily.
    """
    try:
        return object.__getattribute__(module, "__spec__")
    except Exception:  # of what is no module, and may raise anything
        return None


def _has_new_parent(name: str, known: Set[str]) -> bool:
    parent = name.rpartition(".")[0]
    return parent in sys.modules and parent not in known
