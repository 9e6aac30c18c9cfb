"""Objects that are driven by calls of their methods, and have neither spaces nor timesteps.

OpenEnv's and TRL's environments are such objects. `CalledEnv` runs one in a worker: each call of a
method is a step there, so that it has a step's time limit, and what the method returns or raises
comes back as an observation. Workers import this module, and nothing of a trainer.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envmgr import pickles
from envmgr.env.base import BaseEnv
from envmgr.env.contract import awaited
from envmgr.types import EnvTimestep


@dataclass(frozen=True)
class MethodCall:
    """A call of a method, on its way to a worker.

    Attributes:
        method: the name of the method; None: nothing is called, and the answer is None.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        on_new: in a reset: whether an object that was used before is closed and another one built.
        ends: in a step: whether the episode ends with it; then its answer is the reward, if it is a
            number.
    """

    method: str | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_new: bool = False
    ends: bool = False


class TracebackInWorker(Exception):
    """The traceback of an exception in a worker: the cause of what is raised in the trainer."""


@dataclass(frozen=True)
class Answer:
    """The result of a `MethodCall`.

    Attributes:
        value: what the method returned.
        error: what it raised; None if it returned.
        trace: the traceback of `error`, as text.
        state: the pickled state that `CalledEnv.state` returned then; None if there is none.
    """

    value: Any = None
    error: Exception | None = None
    trace: str = ""
    state: bytes | None = None

    def result(self) -> Any:
        """Return what the method returned, or raise what it raised."""
        if self.error is not None:
            raise self.error from TracebackInWorker("\n" + self.trace)
        return self.value


class CalledEnv(BaseEnv):
    """An env that runs an object in a worker; `reset(call=...)` and `step` take a `MethodCall`.

    A reset without a call is one that the manager has requested by itself.

    Args:
        build: returns the object.
    """

    observation_space = action_space = None

    renews = False
    """Whether a reset without a call closes an object that was used, and builds another one."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._loop: asyncio.AbstractEventLoop | None = None
        self._called = build()
        self._is_used = False

    def reset(self, call: MethodCall | None = None) -> Answer:
        """Begin an episode with a call; without one, prepare the object for its next user."""
        if self._is_used and (self.renews if call is None else call.on_new):
            self._is_used = False
            called, self._called = self._called, None
            self._close(called)
            self._called = self._build()
        return Answer() if call is None else self.answer(call)

    def step(self, action: MethodCall) -> EnvTimestep:
        """Make a call."""
        answer = self.answer(action)
        reward, done = self.reward_of(answer.value)
        if action.ends:
            reward, done = number_of(answer.value), True
        return EnvTimestep(answer, reward, done, {})

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Do nothing: seeds are arguments of resets here."""

    def close(self) -> None:
        """Close the object, if it can be closed."""
        called, self._called = self._called, None
        self._close(called)
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def answer(self, call: MethodCall) -> Answer:
        """Make a call and return its answer; what the method raises is an answer, too."""
        self._is_used = True
        try:
            value = self.made(call)
        except Exception as error:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            return Answer(error=_sendable(error), trace=trace, state=self.state())
        return Answer(value, state=self.state())

    def made(self, call: MethodCall) -> Any:
        """Make a call and return its result, which is awaited if it is awaitable."""
        if call.method is None:
            return None
        return self._awaited(getattr(self._called, call.method)(*call.args, **call.kwargs))

    def reward_of(self, value: Any) -> tuple[float, bool]:
        """Return the reward in what a method returned, and whether the episode ends with it."""
        return 0.0, False

    def state(self) -> bytes | None:
        """Return the pickled state that goes along with each answer; None if there is none."""
        return None

    def _close(self, called: Any) -> None:
        close = getattr(called, "close", None)
        if callable(close):
            self._awaited(close())

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(awaited(value))


class SessionEnv(CalledEnv):
    """An env for one session after another, whose observations have `reward` and `done`.

    The `state` of its object goes along with each answer, so that reading it needs no call.
    """

    renews = True

    def reward_of(self, value: Any) -> tuple[float, bool]:
        """Return the reward of an observation, and whether it ends the episode."""
        return number_of(getattr(value, "reward", None)), bool(getattr(value, "done", False))

    def state(self) -> bytes | None:
        """Return the pickled state; if that raises, the exception is raised where it is read."""
        try:
            answer = Answer(self._called.state)
        except Exception as error:
            answer = Answer(error=error)
        try:
            return pickled(answer)
        except Exception as error:
            return pickled(Answer(error=TypeError(f"the state cannot be pickled: {error}")))


class ToolEnv(CalledEnv):
    """An env with tools, for one rollout after another.

    What a tool raises is for the model. What the reset or the reward raises is a failure of the
    env.
    """

    def reset(self, call: MethodCall | None = None) -> Answer:
        """Begin an episode."""
        answer = super().reset(call)
        answer.result()
        return answer

    def step(self, action: MethodCall) -> EnvTimestep:
        """Make a call."""
        timestep = super().step(action)
        if action.ends:
            timestep.obs.result()
        return timestep

    def made(self, call: MethodCall) -> Any:
        """Make a call; an env without `get_reward` has no reward."""
        if call.method == "get_reward" and not hasattr(self._called, "get_reward"):
            return None
        return super().made(call)


def signature_with_self(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method that takes the place of a static one."""
    signature = inspect.signature(function)
    # The signature of a bound method is the function's without the first parameter.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[own, *signature.parameters.values()])


def pickled(value: Any) -> bytes:
    """Return the pickle of a value, with its class if a script defines that."""
    plain = pickle.dumps(value, protocol=5)
    return pickles.dumps(value) if pickles.names_script(plain) else plain


def _sendable(error: Exception) -> Exception:
    """Return an exception that another process can unpickle: mostly `error` itself."""
    try:
        # The worker has pickled this itself. Some exceptions can be pickled but not unpickled.
        copy = pickle.loads(pickled(error))  # noqa: S301
    except Exception:
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def number_of(value: Any) -> float:
    """Return a value as the reward of a timestep; 0.0 if it is None or not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0
