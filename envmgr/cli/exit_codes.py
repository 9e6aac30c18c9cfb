"""How a command ends: its exit code, and what becomes of output that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def discard_output() -> None:
    """Drop everything that is still written to stdout: nobody reads it any more."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
