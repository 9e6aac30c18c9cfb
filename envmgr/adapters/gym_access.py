"""Calls, attributes, frames and the close of a Gymnasium vector env."""

from __future__ import annotations

from typing import Any

from gymnasium.logger import warn
from gymnasium.vector import VectorEnv

from envmgr.adapters.batches import FixedBatches
from envmgr.adapters.gym_calls import InThread, PendingCall
from envmgr.errors import EnvManagerError, MethodAccessError
from envmgr.manager import EnvManager


class GymAccess(VectorEnv[Any, Any, Any]):
    """Reaches the envs themselves, past stepping and resetting; see `ManagerVectorEnv`.

    Args:
        manager: of the envs.
        batches: steps and resets them.
    """

    def __init__(self, manager: EnvManager, batches: FixedBatches) -> None:
        self.manager = manager
        self.num_envs = manager.env_num
        self._batches = batches
        self._call = PendingCall(type(self).__name__, self._pending)
        self._resetting: InThread | None = None
        self._results: list[Any] = []

    def _pending(self) -> str | None:
        """Return which call is under way: nothing is noted of that, it is looked up."""
        if self._batches.is_stepping:
            return "step"
        if self._results or self.manager.call_is_pending:
            return "call"
        return None if self._resetting is None else "reset"

    # -- calls and attributes ---------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute, and return the results by env."""
        self._call.refuse("call_async")
        self._launched()
        try:
            if args or kwargs or self._is_method(name):
                return tuple(self.manager.call(name, *args, **kwargs))
            return tuple(self.manager.get_attr(name))
        except EnvManagerError as error:
            self._batches.fail(error)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`; `call_wait` returns its results."""
        self._call.refuse("call_async")
        self._launched()
        try:
            if args or kwargs or self._is_method(name):
                self.manager.call_async(name, *args, **kwargs)
            else:
                self._results = [self.manager.get_attr(name)]
        except EnvManagerError as error:
            self._batches.fail(error)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of the last `call_async`.

        Raises:
            CallTimeoutError: the call takes more than `timeout` seconds. It goes on.
        """
        self._call.require("call")
        try:
            if not self._results:  # else Ctrl-C came when they were there
                self._results.extend(map(self.manager.call_wait, (timeout,)))
        except TimeoutError as error:
            if isinstance(error, EnvManagerError):  # of an env, not of this wait
                self._batches.fail(error)
            raise self._call.late(timeout) from None
        except EnvManagerError as error:
            self._batches.fail(error)
        results = tuple(self._results[0])
        self._results = []
        return results

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; of a method, what it returns."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the envs.

        Args:
            name: of the attribute.
            values: a list or tuple with one for each env, or one value for all.
        """
        self._call.refuse("set_attr")
        self._launched()
        if isinstance(values, (list, tuple)):
            values = list(values)
            if len(values) != self.num_envs:
                raise ValueError(
                    "Values must be a list or tuple with length equal to the number of "
                    f"environments. Got `{len(values)}` values for {self.num_envs} environments."
                )
        self.manager.set_attr(name, values)

    def _launched(self) -> None:
        if self.manager.closed:
            self._batches.reset()

    def _is_method(self, name: str) -> bool:
        try:
            self.manager.get_attr(name, env_ids=0)
        except MethodAccessError:
            return True
        return False

    def render(self) -> tuple[Any, ...] | None:
        """Return a frame of each env."""
        return self.call("render")

    @property  # type: ignore[misc]  # nobody sets those of the envs here
    def np_random(self) -> Any:
        """The random generators of the envs, as a tuple of copies."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the envs' random generators, as a tuple."""
        return self.get_attr("np_random_seed")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and the manager.

        Args:
            timeout: seconds that the envs get to close, all together; None: `close_timeout` of the
                manager. What has not closed by then is terminated.
            terminate: terminate workers at once.
        """
        pending = None if self._call.closed else self._call.name
        if pending is not None:
            warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")
        self._call.closed = True
        self._batches.close(timeout, terminate=terminate)
        if self._resetting is not None:
            self._resetting.has_ended()
