"""Ctrl-C and SIGTERM as a request to end, which loses nothing that was collected."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

PATIENCE_S = 0.5
"""How long a request may go unnoticed before an exception interrupts whatever is going on."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """A flag that signals set, with a KeyboardInterrupt only where the flag goes unnoticed.

    A signal handler's exception can be raised anywhere, also between a timestep's delivery
    and its being counted. So a signal only sets `requested`, which the loop of the run looks at. If
    the loop does not for half a second, because it waits for slow envs or a slow policy, the main
    thread gets a KeyboardInterrupt. Signals after the first, and those after `acknowledge`, do
    nothing.

    This is a context manager for the main thread. On exit it restores the previous handlers; or, if
    the process has nothing left to do but to exit, signals are ignored from there on. Signals that
    the process was told to ignore from the beginning (`nohup`) stay ignored.

    Args:
        last: whether the process exits afterwards.
    """

    def __init__(self, *, last: bool = False) -> None:
        self._last = last
        self._signal: signal.Signals | None = None
        self._acknowledged = False
        self._overdue = False
        self._lock = threading.Lock()
        self._patience: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous handlers, or ignore signals."""
        self.acknowledge()
        for number, handler in self._before.items():
            # Not a handler of ours: at exit, Python would replace that with the default again.
            signal.signal(number, signal.SIG_IGN if self._last else handler)

    @property
    def requested(self) -> bool:
        """Whether a signal asked for the end."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """What asked for the end, in words."""
        return "Ctrl-C" if self._signal in (None, signal.SIGINT) else self._signal.name

    def acknowledge(self) -> None:
        """Say that the end has begun: no exception is raised from here on."""
        with self._lock:
            self._acknowledged = True
        if self._patience is not None:
            self._patience.cancel()
            self._patience.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._acknowledged:
            return
        if self._overdue:
            raise KeyboardInterrupt
        if self._signal is None:
            self._signal = signal.Signals(number)
            self._patience = threading.Timer(PATIENCE_S, self._lose_patience)
            self._patience.daemon = True
            self._patience.start()

    def _lose_patience(self) -> None:
        """Interrupt the main thread, even in a wait in the kernel. Runs in the timer's thread."""
        with self._lock:
            if self._acknowledged or self._signal is None:
                return
            self._overdue = True
            with contextlib.suppress(OSError):
                signal.pthread_kill(threading.main_thread().ident or 0, self._signal)
