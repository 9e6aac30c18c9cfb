"""Interpreters that are started from here import nothing from the working directory by chance.

Python puts the working directory first on `sys.path` for `-c` and `-m`: a `json.py` that lies there
would run in place of Python's own. If imports from there are allowed, the directory is on the
`sys.path` of this process, and its children get that path before they import anything else.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

_NOT_FROM_HERE = "import sys; sys.path[:] = filter(None, sys.path); "

_PATH_THEN_MAIN = (
    "import json; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from importlib import import_module; import_module(sys.argv[1]).main()"
)


def command_of(program: str, *options: str) -> list[str]:
    """Return the command for a program, in an interpreter with the flags of this one.

    Args:
        program: the program's source, in which `sys` is already imported.
        options: further options of the interpreter.
    """
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return [sys.executable, *flags, *options, "-c", _NOT_FROM_HERE + program]


def command_of_main(module: str, *options: str) -> list[str]:
    """Return the command that reads `path_line` from stdin, and then runs `main` of a module.

    Args:
        module: the module's name.
        options: further options of the interpreter.
    """
    return [*command_of(_PATH_THEN_MAIN, *options), module]


def path_of_texts() -> list[str]:
    """Return `sys.path` without entries that are not strings: imports ignore those, too."""
    given: list[Any] = list(sys.path)
    return [one for one in given if isinstance(one, str)]


def path_line() -> bytes:
    """Return `sys.path` in the form in which a process that runs `command_of_main` reads it."""
    return json.dumps(path_of_texts()).encode() + b"\n"


_here = threading.local()
"""Has `is_clean` set in threads that are inside `clean_children`."""


@contextlib.contextmanager
def clean_children() -> Iterator[None]:
    """Keep this thread's `multiprocessing` processes from importing from the working directory.

    The children, the fork server and the resource tracker of `multiprocessing` are interpreters
    with `-c`, which get the `sys.path` of this process only after they have imported a good part of
    the standard library. An environment variable could tell Python the same, but not with 3.10 or
    `-E`, and the children would pass it on.
    """
    start: Any = util.spawnv_passfds
    if not isinstance(start, _CleanStart):
        util.spawnv_passfds = _CleanStart(start)  # type: ignore[assignment]
    before, _here.is_clean = getattr(_here, "is_clean", False), True
    try:
        yield
    finally:
        _here.is_clean = before


class _CleanStart:
    """A replacement for the function with which `multiprocessing` starts interpreters."""

    def __init__(self, start: Callable[..., int]) -> None:
        self._start = start

    def __call__(self, path: Any, args: list[Any], fds: Any) -> int:
        is_program = False
        if getattr(_here, "is_clean", False):
            for at, one in enumerate(args):  # some are bytes, which `-bb` lets nobody compare
                if is_program:
                    args = [*args[:at], _NOT_FROM_HERE + one, *args[at + 1 :]]
                    break
                is_program = isinstance(one, str) and one == "-c"
        return self._start(path, args, fds)
