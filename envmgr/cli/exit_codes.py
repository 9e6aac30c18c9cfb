"""How a command ends: its exit code, and what becomes of output that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from envmgr.untrusted import plain

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class OutputGoneError(Exception):
    """The reader of the output has gone, as `| head` does when it has seen enough."""


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Let the body print how a run gets on; where that is impossible, the run goes on regardless.

    Raises:
        OutputGoneError: the reader of the output has gone.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise OutputGoneError from error
    except (OSError, UnicodeError):
        pass  # a full disk, a terminal that has gone, or one without such characters


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """Let the body print how a run ended; if nobody reads it, the ending stays the same."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, UnicodeError, SystemExit):  # rich exits where nobody reads any more
        discard_output()


def say(line: str, *, err: bool = False) -> None:
    """Print a line of the last words of a run.

    Args:
        line: what to print; it may come from files or envs: see `untrusted.plain`.
        err: whether to print to stderr.
    """
    line = plain(line)
    if not err:
        with last_words():
            print(line)
        return
    with contextlib.suppress(OSError, UnicodeError):  # stdout may be read all the same
        print(line, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Drop everything that is still written to stdout: nobody reads it any more."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
