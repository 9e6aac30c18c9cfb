"""The exception tree. Every error that envmgr raises on purpose is an `EnvManagerError`.

EnvManagerError
├── ConfigError (ValueError)            a config, a spec or a registry key is wrong
│   ├── UnknownKeyError                 a key that does not exist; the nearest one is named
│   └── SharedCapError                  a cap that managers share (`limits.shared`) cannot be kept
│       └── CapMismatchError            ... because another manager has another number for it
├── MissingDependencyError (ImportError)  an optional package is needed and not installed
├── StateError (RuntimeError)           the call is not legal now; nothing was sent or changed
│   ├── ManagerClosedError              before `launch` or after `close`
│   ├── EnvNotReadyError                an env_id cannot take this call in its state
│   │   └── EnvLeasedError              ... because it is leased
│   ├── NothingReadyError               `ready_obs` cannot become non-empty
│   │   └── AllEnvsFailedError          ... ever: every env that is not done has failed for good
│   ├── StaleViewError                  a view was used after it expired (`copy_on_get: checked`)
│   ├── ConcurrentCallError             two threads called at once
│   │   └── SlotBusyError               ... or two users of one leased env
│   ├── LeaseError                      a lease was used in a way that is not allowed
│   │   ├── LeaseEndedError             ... after its end
│   │   └── WrongLoopError              ... from another event loop
│   └── IllegalTransitionError          a lifecycle event that the table does not know
├── LeaseTimeoutError (TimeoutError)    no env was free for a lease in time
├── UnknownEnvError (KeyError)          an env_id outside 0..env_num-1
├── ActionError (ValueError)            an action that the action space refuses, or a wrong count
├── SpaceMismatchError (ValueError)     the envs of one manager have different spaces
├── SnapshotError (RuntimeError)        the state of an env cannot be taken, or a file not read
│   └── SnapshotMismatchError           a snapshot of another version or of other envs
├── OutOfMemoryError (MemoryError)      the trainer gets no memory for what a call returns
├── LaunchError (RuntimeError)          `launch` failed; everything was closed again
├── FailuresExhaustedError (RuntimeError)  more failures than the budget allows
├── EnvAttributeError (AttributeError)  an env has no such attribute
├── MethodAccessError (RuntimeError)    a method was read as an attribute, or may not be called
└── EnvFailure (RuntimeError)           one env failed; also found as `info["error"]`
    ├── EnvRaised                       its code raised; carries the remote traceback as text
    ├── EnvReportedAbnormal             it said so itself (`info["abnormal"]`)
    ├── EnvProtocolError                what it returned, or what came from its worker, is malformed
    ├── EnvCallAbandoned                nobody awaited its answer
    ├── EnvTimeout (TimeoutError)       it exceeded a time limit
    └── EnvCrash                        its worker died
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EnvManagerError(Exception):
    """Base of all errors that envmgr raises on purpose."""


class ConfigError(EnvManagerError, ValueError):
    """A config, an env spec or a registry key is wrong. Nothing was built."""


class UnknownKeyError(ConfigError):
    """A config or registry key that does not exist; the message names the nearest known one."""


class SharedCapError(ConfigError):
    """A cap that managers share cannot be enforced: its folder or the system is unsuitable."""


class CapMismatchError(SharedCapError):
    """Another running manager of this user has a different number for a shared cap.

    Attributes:
        name: the name of the cap.
        asked: the number of units in this manager's config.
        found: the number of units in the other manager's config.
        pid: the process of the other manager.
    """

    def __init__(self, name: str, asked: int, found: int, pid: int) -> None:
        super().__init__(
            f"manager.limits.shared.{name} is {asked}, but {found} in the manager of process "
            f"{pid}, which is running: one number holds for all managers of a user on this "
            "machine. Give both the same, or another name."
        )
        self.name, self.asked, self.found, self.pid = name, asked, found, pid

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the error in another process."""
        return type(self), (self.name, self.asked, self.found, self.pid)


class MissingDependencyError(EnvManagerError, ImportError):
    """A required optional package is not installed; the message names the extra."""


class UnreadableRunError(EnvManagerError):
    """The target is not a trainer, run or file of envmgr's, or it is no longer complete."""


class StateError(EnvManagerError, RuntimeError):
    """The call is not legal in the present state. Nothing was sent and nothing was changed."""


class ManagerClosedError(StateError):
    """The manager is not launched: before `launch()` or after `close()`."""


class EnvNotReadyError(StateError):
    """An env cannot take this call in its present state (pending, resetting, done, failed)."""


class NothingReadyError(StateError):
    """No env can become ready without another call; the message names the call."""


class AllEnvsFailedError(NothingReadyError):
    """No env can ever become ready by itself: all that are not DONE have failed for good."""


class StaleViewError(StateError):
    """A view of an observation was used when no longer valid (`copy_on_get: checked`)."""


class ConcurrentCallError(StateError):
    """Two threads called the same manager at once."""


class LeaseError(StateError):
    """A lease, or the env that it gives, was used in a way that is not allowed."""


class LeaseEndedError(LeaseError):
    """An env was used before or after its lease; by now it may belong to somebody else."""


class WrongLoopError(LeaseError):
    """Something that belongs to one event loop was used from another one, or from none."""


class SlotBusyError(ConcurrentCallError):
    """Two coroutines or threads used one leased env at once."""


class EnvLeasedError(EnvNotReadyError):
    """A call for batches names an env that is leased."""


class LeaseTimeoutError(EnvManagerError, TimeoutError):
    """No env was free within `acquire_timeout_s`. Nothing is leased."""


class IllegalTransitionError(StateError):
    """A lifecycle event that the transition table does not allow in this state."""


class UnknownEnvError(EnvManagerError, KeyError):
    """An env_id outside 0..env_num-1."""

    def __str__(self) -> str:  # KeyError would show the repr of the text
        return str(self.args[0]) if self.args else ""


class ActionError(EnvManagerError, ValueError):
    """An action that the action space refuses, or a wrong number of actions. Nothing was sent."""


class SpaceMismatchError(EnvManagerError, ValueError):
    """The envs' spaces differ with `same_spaces` on, or observations for V2 to stack differ."""


class SnapshotError(EnvManagerError, RuntimeError):
    """A snapshot cannot be taken or read; the message says what is missing. Nothing was changed."""


class SnapshotMismatchError(SnapshotError):
    """The snapshot is of another version, or of other envs than these. Nothing was changed."""


class EnvAttributeError(EnvManagerError, AttributeError):
    """An env has no attribute of this name, or attributes cannot be read now."""


class MethodAccessError(EnvManagerError, RuntimeError):
    """A method of the envs was read as an attribute, or is one that `call` refuses."""


class EnvFailure(EnvManagerError, RuntimeError):
    """One env failed. Raised, or found in the `info["error"]` of an abnormal timestep.

    Attributes:
        env_id: the env that failed.
        during: what it was doing: "construction", "reset", "step", "call", "close" or "idle".
        generation: how often the env behind this env_id had been renewed before.
    """

    def __init__(self, message: str, *, env_id: int, during: str, generation: int = 0) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.during = during
        self.generation = generation

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_failure, (type(self), self.args, self.__dict__)


def _rebuild_failure(
    cls: type[EnvFailure], args: tuple[object, ...], state: dict[str, object]
) -> EnvFailure:
    # `cls.__new__` of an `EnvTimeout` is that of RuntimeError, which makes no TimeoutError.
    failure: EnvFailure = (OSError if issubclass(cls, OSError) else Exception).__new__(cls)
    failure.args = args
    failure.__dict__.update(state)
    return failure


class EnvRaised(EnvFailure):
    """The env's own code raised.

    Attributes:
        type_name: qualified name of the exception's class in the worker.
        remote_message: the exception's text.
        remote_traceback: the formatted traceback from the worker.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        during: str,
        generation: int = 0,
        type_name: str = "",
        remote_message: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, env_id=env_id, during=during, generation=generation)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback


class EnvReportedAbnormal(EnvFailure):
    """The env itself marked the step as abnormal with `info["abnormal"]`."""


class EnvProtocolError(EnvFailure):
    """The env's result (shape, dtype, structure, type) or its worker's message is malformed."""


class EnvTimeout(EnvFailure, TimeoutError):
    """The env exceeded a time limit; its worker was replaced.

    Attributes:
        limit_s: the limit, in seconds.
        stacks: where the env was: the stacks of all threads of its worker, as `faulthandler` writes
            them (inline: the stack of the env). If the process does not give them, what else is
            known of it; empty if nothing is known.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        during: str,
        generation: int = 0,
        limit_s: float,
        stacks: str = "",
    ) -> None:
        super().__init__(message, env_id=env_id, during=during, generation=generation)
        self.limit_s = limit_s
        self.stacks = stacks


class EnvCallAbandoned(EnvFailure):
    """The caller of an env did not await the answer: the action may or may not have run.

    This is not a failure of the env, and never charged to it. It is the cause of an outcome that is
    unresolved because its caller was cancelled or interrupted, or because the manager was closed.
    """


class EnvCrash(EnvFailure):
    """The worker of the env died.

    Attributes:
        exit_status: exit code, or minus the signal's number; None if it is not known.
        stderr_tail: the last lines that the worker wrote to `sys.stderr`, and what faulthandler
            reported of a fatal signal, without envmgr's own calls around those of the env; empty if
            there is nothing, or where it cannot be kept (on systems other than Linux).
        remote_traceback: the formatted traceback from the worker, if the env has called `sys.exit`;
            else empty.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        during: str,
        generation: int = 0,
        exit_status: int | None = None,
        stderr_tail: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, env_id=env_id, during=during, generation=generation)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail
        self.remote_traceback = remote_traceback


class OutOfMemoryError(EnvManagerError, MemoryError):
    """The trainer's process cannot get the memory for a call to a manager.

    Nothing was lost: envs in `pending_env` have their actions, and their timesteps come with
    `recv()` or `step({})`; for the others the same call can be made again. Python may raise a
    MemoryError of its own in other places, too.
    """


class LaunchError(EnvManagerError, RuntimeError):
    """`launch` failed; every worker was closed and all envs are VOID again.

    Attributes:
        failures: the failure of each env that failed, by env_id.
    """

    def __init__(self, message: str, failures: Mapping[int, EnvFailure] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class FailuresExhaustedError(EnvManagerError, RuntimeError):
    """An env, or all of them together, failed more often than the budget allows.

    Attributes:
        failure: the first failure of the env that counts in the window; also `__cause__`. Other
            envs may have failed before; and failures that steps make up for, or that are charged
            to another env, do not count.
        env_id: the env whose failure was one too many.
        exceeded: which limit was exceeded, in words.
    """

    def __init__(
        self, message: str, failure: EnvFailure, env_id: int | None = None, exceeded: str = ""
    ) -> None:
        super().__init__(message)
        self.exceeded = exceeded
        self.failure = failure
        self.env_id = failure.env_id if env_id is None else env_id
        self.__cause__ = failure
