"""What is under way in a Gymnasium vector env between the two halves of a call."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from envmgr.interruptible import InterruptibleEvent, SoleThread


class CallTimeoutError(multiprocessing.TimeoutError, TimeoutError):
    """The second half of a call has not ended in time; it can be called again."""


class PendingCall:
    """The call that is under way: "reset", "step", "call", or None.

    Args:
        owner: the name of the vector env's class, for messages.
        name_of: returns which call that is.
    """

    def __init__(self, owner: str, name_of: Callable[[], str | None]) -> None:
        self._owner = owner
        self._name_of = name_of
        self.closed = False

    @property
    def name(self) -> str | None:
        """The call that is under way."""
        return self._name_of()

    def refuse(self, function: str) -> None:
        """Raise unless another call may begin.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            AlreadyPendingCallError: a call is under way.
        """
        name = None if self.closed else self._name_of()
        if name is None and not self.closed:
            return
        self.refuse_closed()
        raise AlreadyPendingCallError(
            f"Calling `{function}` while waiting for a pending call to `{name}` to complete. "
            f"Take its result with `{name}_wait()`{_OR_RESET if name == 'step' else ''}.",
            str(name),
        )

    def require(self, name: str) -> None:
        """Raise unless this call is under way.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            NoAsyncCallError: this call is not under way.
        """
        if not self.closed and self._name_of() == name:
            return
        self.refuse_closed()
        raise NoAsyncCallError(
            f"Calling `{name}_wait` without any prior call to `{name}_async`.", name
        )

    def late(self, timeout_s: float | None) -> CallTimeoutError:
        """Return the error for a call that takes too long."""
        name = self._name_of()
        return CallTimeoutError(
            f"The call to `{name}_wait` has timed out after {timeout_s} second(s). What it "
            f"waits for goes on: call `{name}_wait` again, or close()."
        )

    def refuse_closed(self) -> None:
        """Raise ClosedEnvironmentError if the vector env is closed."""
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{self._owner}`, after a call to `close()`."
            )


_OR_RESET = ", or, if Ctrl-C has ended `step()`, discard it with `reset()`"


class InThread(SoleThread):
    """A function that runs in a thread, once, and whose result is kept.

    The object is stored before the function begins, so that after Ctrl-C the function can be begun,
    or waited for, again.

    Args:
        function: the function.

    Attributes:
        value: what the function returned.
        error: what it raised.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__("envmgr-reset")
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self._has_ended = InterruptibleEvent()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # raised in the thread that asks for the result
            self.error = error
        self._has_ended.set()

    def has_ended(self, timeout_s: float | None = None) -> bool:
        """Wait for the function for at most `timeout_s`, and return whether it has ended."""
        self.start()
        return self._has_ended.wait(timeout_s)
