"""Leases: one env to one thread (`with`) or to one coroutine (`async with`).

What users hold. Their calls, with their time limits, are carried out by `envmgr.core.slots`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from envmgr.core import validate
from envmgr.core.owner import Owner
from envmgr.core.slots import SlotCall, Tenancy
from envmgr.errors import (
    ConfigError,
    LeaseEndedError,
    LeaseError,
    LeaseTimeoutError,
    ManagerClosedError,
    SlotBusyError,
    WrongLoopError,
)
from envmgr.interruptible import Lock, let_go, take
from envmgr.manager.awaiting import Signal, signal_here
from envmgr.manager.threads import CLOSING, in_thread
from envmgr.outcomes import Outcome
from envmgr.transport.base import NOTICE_S
from envmgr.types import EnvTimestep

_AT_LEAST_S = 0.05
"""How long the owner may take, in any case, to look whether an env is free."""


class Lessor(NamedTuple):
    """What leases need of their manager.

    Attributes:
        owner: returns the thread that owns the engine; raises ManagerClosedError if the manager is
            closed, and ConcurrentCallError in a signal handler that has interrupted a call.
        close: closes the manager, because an env has failed and `on_failure` is `raise`.
    """

    owner: Callable[[], Owner]
    close: Callable[[], None]


class _ThreadSignal:
    """A notification of one thread, given once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> bool:
        """Wake the thread, from any other thread."""
        self._lock.release()
        return True

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the notification, for `seconds` at most; return whether it has come."""
        if threading.current_thread() is not threading.main_thread():
            return self._lock.acquire(timeout=-1 if math.isinf(seconds) else seconds)
        while not self._lock.acquire(timeout=min(seconds, NOTICE_S)):  # a signal may come before it
            seconds -= NOTICE_S
            if seconds <= 0.0:
                return False
        return True


class _Slot:
    """What slots of threads and of coroutines have in common.

    Args:
        lease: the lease that gave the slot; the env is given back when nothing refers to either any
            more.
        owner: the thread that owns its engine.
        tenancy: what is known of the lease.
        busy: the lock that is held during a call: that of another slot of this lease, if there is
            one.
    """

    def __init__(
        self, lease: Lease, owner: Owner, tenancy: Tenancy, busy: threading.Lock | None = None
    ) -> None:
        self._lease = lease
        self._owner = owner
        self._tenancy = tenancy
        self._busy = busy or threading.Lock()

    @property
    def env_id(self) -> int:
        """Which env this is."""
        env_id = self._tenancy.env_id
        return -1 if env_id is None else env_id

    @property
    def outcome(self) -> Outcome | Any:
        """What has become of the latest call; None before the first."""
        return self._tenancy.outcome

    @property
    def episode_outcome(self) -> Outcome | Any:
        """What has become of the episode: None while it runs, or if it was left for another."""
        return self._tenancy.episode_outcome

    def for_thread(self) -> Slot:
        """Return the same env for threads, as `with` gives it; still for one call at a time."""
        return Slot(self._lease, self._owner, self._tenancy, self._busy)

    def for_loop(self) -> AsyncSlot:
        """Return the same env for coroutines of the running loop, as `async with` gives it."""
        loop = signal_here().loop
        return AsyncSlot(self._lease, self._owner, self._tenancy, loop, self._busy)

    def _begin(self, held: list[Lock]) -> None:
        """Let one call in.

        Args:
            held: gets the lock that keeps other calls out, as `take` gives it.

        Raises:
            LeaseEndedError: the lease has ended.
            SlotBusyError: another call is under way.
            ManagerClosedError: this process is a fork of the one that has the lease.
            ConcurrentCallError: a signal handler, or the code of an env, calls from inside a call.
        """
        if self._tenancy.is_over:
            raise LeaseEndedError(
                f"the lease of env {self.env_id} has ended: it may be somebody else's by now. Take "
                "a new one with manager.lease(). Nothing was sent to it."
            )
        self._owner.refuse_within_a_call()
        take(self._busy, held, at_once=True)
        if not held:
            raise SlotBusyError(
                f"env {self.env_id} is in a call of another coroutine or thread: a lease is for "
                "one at a time. Take a lease for each. Nothing was sent to it."
            )

    def _send(self, call: SlotCall) -> None:
        self._owner.slots.call(self._tenancy, call)
        self._owner.wake()

    def _abandon(self, call: SlotCall) -> None:
        if not call.is_over:
            self._tenancy.left_in(call)
        self._owner.slots.abandon(self._tenancy, call)
        self._owner.wake()


def _step(signal: Any, action: Any, timeout_s: float | None) -> SlotCall:
    limit_s = None if timeout_s is None else _limit(timeout_s, "timeout_s")
    return SlotCall(signal.notify, "step", limit_s, action=action)


def _reset(
    signal: Any,
    seed: int | None,
    options: Mapping[str, Any] | None,
    timeout_s: float | None,
    params: dict[str, Any],
) -> SlotCall:
    is_integer = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if seed is not None and not (is_integer and int(seed) >= 0):
        raise ConfigError(
            f"seed should be an integer of 0 or more, or None, found {seed!r}. Nothing was reset."
        )
    return SlotCall(
        signal.notify,
        "reset",
        _limit(timeout_s, "timeout_s"),
        seed=None if seed is None else int(seed),
        params={**(options or {}), **params},
    )


def _limit(seconds: float | None, name: str) -> float | None:
    """Return a limit that was given for one call; None for none.

    Raises:
        ConfigError: the limit is not a number of seconds above 0.
    """
    if seconds is None:
        return None
    limit_s = validate.checked_seconds(seconds)
    if limit_s <= 0.0:
        raise ConfigError(f"{name} should be seconds above 0 or None, found {seconds!r}")
    return None if math.isinf(limit_s) else limit_s


def _answer(call: SlotCall) -> Any:
    """Return the result of a call, or raise its error."""
    error = call.error
    if error is None:
        return call.result
    if isinstance(error, ManagerClosedError):  # one for all: each raises its own
        raise ManagerClosedError(str(error)) from None
    raise error


class Slot(_Slot):
    """An env that is leased to one thread.

    Attributes:
        env_id: which env this is.
        outcome: the `Outcome` of the latest call; None before the first.
        episode_outcome: the `Outcome` of the episode; None while it runs, or if it was left for
            another.
    """

    def reset(
        self,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; every episode begins with this, the first one of the lease included.

        Without a seed or params it costs nothing if the env has been reset since its last use.

        Args:
            seed: the exact seed of this reset.
            options: for this reset, as in gymnasium; a `BaseEnv` gets them as keyword arguments.
            timeout_s: time limit in seconds for this reset; the shorter of this and
                `reset_timeout` applies.
            **params: the same as `options`, in another form.

        Returns:
            The first observation and the info.

        Raises:
            EnvFailure: the reset failed. The env is repaired meanwhile; another reset may be tried.
            FailuresExhaustedError: the env has failed more often than allowed.
            LeaseEndedError, SlotBusyError: the slot was used wrongly; nothing was sent.
            ManagerClosedError: the manager was closed.
        """
        signal = _ThreadSignal()
        result: tuple[Any, dict[str, Any]] = self._call(
            signal, _reset(signal, seed, options, timeout_s, params)
        )
        return result

    def step(self, action: Any, timeout_s: float | None = None) -> EnvTimestep:
        """Take a step.

        Args:
            action: the action for the env.
            timeout_s: time limit in seconds for this step; the shortest of this, `step_timeout` and
                the time left for the episode applies.

        Returns:
            The timestep. If the step failed, its reward is None, its info has `abnormal` and
            `error`, and the episode is over.

        Raises:
            ActionError: the action is refused; nothing was sent.
            EnvNotReadyError: the env is not in an episode: call `reset` first.
            EnvFailure: the step failed and `on_failure` is `raise`; the manager is closed.
            LeaseEndedError, SlotBusyError: the slot was used wrongly; nothing was sent.
            ManagerClosedError: the manager was closed; it is not known whether the step was taken.
        """
        signal = _ThreadSignal()
        timestep: EnvTimestep = self._call(signal, _step(signal, action, timeout_s))
        return timestep

    def _call(self, signal: _ThreadSignal, call: SlotCall) -> Any:
        held, is_in = list[Lock](), False
        try:
            try:
                self._begin(held)
                is_in = True
                self._send(call)
                signal.wait()
            finally:
                let_go(held)
            if call.closes:
                self._lease.lessor.close()
            return _answer(call)
        except BaseException as error:
            let_go(held)  # if an interrupt has kept that from being done
            if is_in and error is not call.error:  # Ctrl-C
                self._abandon(call)
            raise


class AsyncSlot(_Slot):
    """An env that is leased to one coroutine; its attributes are those of a `Slot`."""

    def __init__(
        self,
        lease: Lease,
        owner: Owner,
        tenancy: Tenancy,
        loop: Any,
        busy: threading.Lock | None = None,
    ) -> None:
        super().__init__(lease, owner, tenancy, busy)
        self._loop = loop

    async def reset(
        self,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, as `Slot.reset` does.

        If this is cancelled, reset again before the next step.

        Raises:
            WrongLoopError: this is not the event loop of the lease.
        """
        signal = self._signal()
        result: tuple[Any, dict[str, Any]] = await self._call(
            signal, _reset(signal, seed, options, timeout_s, params)
        )
        return result

    async def step(self, action: Any, timeout_s: float | None = None) -> EnvTimestep:
        """Take a step, as `Slot.step` does.

        If this is cancelled, reset before the next step. What was sent then goes on, and its answer
        is dropped; nothing is sent twice.

        Raises:
            WrongLoopError: this is not the event loop of the lease.
        """
        signal = self._signal()
        timestep: EnvTimestep = await self._call(signal, _step(signal, action, timeout_s))
        return timestep

    def _signal(self) -> Signal:
        signal = signal_here()
        if signal.loop is not self._loop:
            raise WrongLoopError(
                f"env {self.env_id} is leased to a coroutine of another event loop. Take a lease "
                "in this one. Nothing was sent to it."
            )
        return signal

    async def _call(self, signal: Signal, call: SlotCall) -> Any:
        held, is_in = list[Lock](), False
        try:
            try:
                self._begin(held)
                is_in = True
                self._send(call)
                await signal.wait()
            finally:
                let_go(held)
            if call.closes:
                await in_thread(self._lease.lessor.close, CLOSING)
            return _answer(call)
        except BaseException as error:
            let_go(held)  # likewise
            if is_in and error is not call.error:  # also when a loop that has ended lets go of it
                self._abandon(call)
            raise


class Lease:
    """A context that leases an env: `with` gives a `Slot`, `async with` an `AsyncSlot`.

    It can be used once. The env is given back at the end of the lease in any case, even if the
    lease is just dropped.

    Args:
        lessor: the manager.
        episode_s: time limit in seconds for each of its episodes; None: the limit of the config.
        acquire_s: seconds to wait for a free env; None waits for ever.
    """

    def __init__(self, lessor: Lessor, episode_s: float | None, acquire_s: float | None) -> None:
        self.lessor = lessor
        self._episode_s = _limit(episode_s, "episode_timeout_s")
        self._acquire_s = None if acquire_s is None else validate.checked_seconds(acquire_s)
        self._tenancy: Tenancy | None = None
        self._owner: Owner | None = None

    if not TYPE_CHECKING:  # checkers know that it has none of these

        def __getattr__(self, name: str) -> Any:
            says = f"a Lease has no attribute {name!r}"
            if name in ("reset", "step"):
                says += ": it waits for an env first. Use `with manager.lease() as env:` (in "
                says += f"coroutines `async with`), then env.{name}(...)"
            raise AttributeError(says)

    def __enter__(self) -> Slot:
        """Wait for a free env, in order of asking.

        Raises:
            LeaseTimeoutError: none was free within `acquire_timeout_s`.
            ManagerClosedError: the manager is closed.
            NothingReadyError, AllEnvsFailedError: none will be free.
            LeaseError: this lease was used before.
        """
        self._refuse_twice()
        signal = _ThreadSignal()
        try:
            owner, tenancy = self._ask(signal)
            if not signal.wait(self._patience_s):
                self._refuse_late()
            _refuse_without(tenancy)
            return Slot(self, owner, tenancy)
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *exc_info: object) -> None:
        """Give the env back, without waiting: the owner ends whatever is under way in it."""
        self._give_back()

    async def __aenter__(self) -> AsyncSlot:
        """Do as `__enter__` does, without blocking the event loop; if cancelled, take no env."""
        self._refuse_twice()
        signal = signal_here()
        try:
            owner, tenancy = self._ask(signal)
            if not await signal.wait(self._patience_s):
                self._refuse_late()
            _refuse_without(tenancy)
            return AsyncSlot(self, owner, tenancy, signal.loop)
        except BaseException:
            self._give_back()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do as `__exit__` does; there is nothing in it that could be cancelled."""
        self._give_back()

    def __del__(self) -> None:
        """Give the env back, if an interrupt or the end of a loop has kept that from being done."""
        self._give_back()

    def _refuse_twice(self) -> None:
        if self._tenancy is not None:
            raise LeaseError("this lease was used before: call manager.lease() for each")

    def _ask(self, signal: Any) -> tuple[Owner, Tenancy]:
        owner = self.lessor.owner()
        tenancy = Tenancy(signal.notify, self._episode_s)
        self._owner, self._tenancy = owner, tenancy
        owner.slots.ask(tenancy)
        owner.wake()
        return owner, tenancy

    @property
    def _patience_s(self) -> float:
        return math.inf if self._acquire_s is None else max(self._acquire_s, _AT_LEAST_S)

    @property
    def _of_cap(self) -> str:
        most = None if self._owner is None else self._owner.slots.most
        return (
            "" if most is None else f", or as many are leased as may be (limits.running is {most})"
        )

    def _refuse_late(self) -> None:
        raise LeaseTimeoutError(
            f"no env was free within the {self._acquire_s:g} s of acquire_timeout_s: all are "
            f"leased, stepped, reset or repaired{self._of_cap}. Wait longer, end leases sooner, or "
            "use more envs."
        )

    def _give_back(self) -> None:
        owner, tenancy = getattr(self, "_owner", None), getattr(self, "_tenancy", None)
        if owner is not None and tenancy is not None and not tenancy.is_over:
            owner.slots.give_back(tenancy)
            owner.wake()


def _refuse_without(tenancy: Tenancy) -> None:
    """Raise the error that says why a lease has got no env, if there is one."""
    error = tenancy.error
    if isinstance(error, ManagerClosedError):
        raise ManagerClosedError(str(error)) from None
    if error is not None:
        raise error
