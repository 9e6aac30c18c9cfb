"""A dump when a signal comes, and stacks when a fatal signal comes."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from envmgr.core.validate import checked_folder
from envmgr.errors import ConfigError, StateError
from envmgr.observing.dump import dump_of
from envmgr.spaces.reading import error_text, short_text
from envmgr.wire.board import own_boards


class _Dumper:
    """A signal handler that has a dump written, and then calls the previous handler."""

    def __init__(self, path: str | None, before: Callable[..., Any] | None) -> None:
        self._path = path
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # In a thread of its own, and with one system call: the code that the signal has interrupted
        # may hold any lock, that of stderr first of all.
        _thread.start_new_thread(self._write, ())
        if self._before is not None:
            self._before(number, frame)

    def _write(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to catch it
            boards = own_boards()
            text = dump_of(boards) if boards else "envmgr: no manager is launched\n"
            write_text(self._path, text)


def write_text(path: str | None, text: str) -> None:
    """Append a text to a file; to stderr if there is no path."""
    if path is None:
        os.write(2, text.encode(errors="replace"))
        return
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def dump_on_signal(signal_number: int | None = None, file: str | None = None) -> None:
    """Have a signal write a dump of all managers of this process from now on.

    The dump is what `envmgr dump` prints: the state of every env, and where its workers are. The
    run goes on meanwhile. A handler that was set before is called afterwards. Python runs handlers
    between two bytecodes of the main thread: for a trainer that hangs in C code, use `envmgr dump`
    instead.

    Args:
        signal_number: the signal; None means SIGUSR1.
        file: path of a file that dumps are appended to; None means stderr.

    Raises:
        ConfigError: there is no such signal here, it has a handler that cannot be kept, or `file`
            is not a path.
        StateError: this is not the main thread, the only one in which Python lets handlers be set.
    """
    _install(signal_number, None if file is None else checked_folder(file, "file"))


@contextmanager
def dumping_on_signal() -> Iterator[None]:
    """Do as `dump_on_signal` as long as this context is open, and where that is possible."""
    before: tuple[int, Any] | None = None
    with contextlib.suppress(ConfigError, StateError):
        before = _install(None, None)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(*before)


@contextmanager
def showing_crashes() -> Iterator[None]:
    """Have a fatal signal write this process's stacks to stderr while this context is open.

    The stacks include those of envs that run in this process. If `faulthandler` is enabled already,
    nothing changes.
    """
    is_ours = False
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a stderr without an fd
            faulthandler.enable()
            is_ours = True
    try:
        yield
    finally:
        if is_ours:
            faulthandler.disable()


def _install(signal_number: int | None, file: str | None) -> tuple[int, Any]:
    """Set the handler; return the signal, and the previous handler."""
    number: int = signal.SIGUSR1 if signal_number is None else signal_number
    try:
        before = signal.getsignal(number)
    except Exception as error:  # also what odd numbers raise
        raise ConfigError(f"{short_text(number)} is no signal: {error_text(error)}") from error
    if before is None:
        raise ConfigError(
            f"{signal.Signals(number).name} has a handler that is not Python's, such as one of "
            "faulthandler, and cannot be kept. Choose another signal."
        )
    kept = before._before if isinstance(before, _Dumper) else before
    try:
        signal.signal(number, _Dumper(file, kept if callable(kept) else None))
    except ValueError as error:
        raise StateError("handlers of signals are set in the main thread: call it there") from error
    except OSError as error:
        raise ConfigError(f"signal {number} can have no handler: {error}") from error
    return number, before
