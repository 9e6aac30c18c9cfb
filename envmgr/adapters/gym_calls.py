"""What is under way in a Gymnasium vector env between the two halves of a call."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError


class CallTimeoutError(multiprocessing.TimeoutError, TimeoutError):
    """The second half of a call has not ended in time; it can be called again."""


class PendingCall:
    """Knows which call is under way: "reset", "step", "call", or None.

    Args:
        owner: the name of the vector env's class, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.closed = False
        self.name: str | None = None

    def refuse(self, function: str) -> None:
        """Raise unless another call may begin.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            AlreadyPendingCallError: a call is under way.
        """
        if self.name is None and not self.closed:
            return
        self._refuse_closed()
        raise AlreadyPendingCallError(
            f"Calling `{function}` while waiting for a pending call to `{self.name}` to complete.",
            str(self.name),
        )

    def require(self, name: str) -> None:
        """Raise unless this call is under way.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            NoAsyncCallError: it is not.
        """
        if self.name == name and not self.closed:
            return
        self._refuse_closed()
        raise NoAsyncCallError(
            f"Calling `{name}_wait` without any prior call to `{name}_async`.", name
        )

    def late(self, timeout_s: float | None) -> CallTimeoutError:
        """Return the error for a call that takes too long."""
        return CallTimeoutError(
            f"The call to `{self.name}_wait` has timed out after {timeout_s} second(s). What it "
            f"waits for goes on: call `{self.name}_wait` again, or close()."
        )

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{self._owner}`, after a call to `close()`."
            )


class InThread:
    """Runs something in a thread, and has what came of it.

    Args:
        run: what.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="envmgr-reset", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            self._result = self._run()
        except BaseException as error:  # raised in the thread that asks for the result
            self._error = error

    def has_ended(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended, after waiting for that as long as told."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Return what it returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result
