"""OpenEnv's environments in workers that can be killed, for OpenEnv's own server.

`isolated` makes a new class from an `Environment` class. The server holds its objects, one for each
session; their calls run in a worker that is leased to them, and they hold nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, cast

from envmgr.adapters.method_calls import Answer, MethodCall, SessionEnv, signature_with_self
from envmgr.config.env_factories import checked_env_num
from envmgr.errors import (
    ConfigError,
    EnvFailure,
    EnvManagerError,
    EnvNotReadyError,
    FailuresExhaustedError,
    LeaseEndedError,
    ManagerClosedError,
)
from envmgr.interruptible import start_thread
from envmgr.manager import EnvManager
from envmgr.manager.leases import AsyncSlot, Lease, Slot
from envmgr.manager.threads import LAUNCHING, in_thread
from envmgr.optional_packages import missing
from envmgr.outcomes import failure_in
from envmgr.shortcuts import create_env_manager
from envmgr.types import EnvTimestep

try:
    from openenv.core.env_server.interfaces import Environment
except ImportError as error:
    raise missing("envmgr.adapters.openenv needs openenv>=0.10", error, extra="openenv") from error

__all__ = ["isolated"]

_DEFAULTS = {
    "type": "subprocess",
    "step_timeout": 60.0,
    "reset_timeout": 120.0,
    # A server goes on, however often its envs fail: each caller is told when its own env fails.
    "max_failures": 1_000_000,
    "max_failures_total": 1_000_000,
}

_ON_LOOP_S = 5.0
"""Seconds that a call that is not awaited may wait for a free env in an event loop's thread."""

_OWN = frozenset({"reset", "reset_async", "step", "step_async", "state", "close", "mcp_session"})


def isolated(
    environment: Any,
    *,
    env_num: int = 8,
    acquire_timeout_s: float | None = 60.0,
    episode_timeout_s: float | None = None,
    **config: Any,
) -> type[Environment]:
    """Return an `Environment` class whose objects run their calls in workers.

    Use it in place of the class: `create_app(isolated(MyEnvironment, env_num=64), ...)`. Each
    session has an env of its own, in a process that is killed if a call exceeds its limit. All
    sessions share one manager, which is launched when it is first needed.

    Args:
        environment: a subclass of OpenEnv's `Environment`, or a `functools.partial` of one, with
            its arguments.
        env_num: how many sessions there can be at once.
        acquire_timeout_s: seconds that a session waits for a free env; None: for ever.
        episode_timeout_s: the limit of an episode in seconds, from its reset.
        **config: keys of the manager's config; `step_timeout` is 60 s and `reset_timeout` 120 s if
            not given.

    Raises:
        ConfigError: `environment` is not such a class, or the config is wrong.
    """
    inner = environment.func if isinstance(environment, functools.partial) else environment
    if not (inspect.isclass(inner) and issubclass(inner, Environment)):
        raise ConfigError(
            "isolated should be given a subclass of OpenEnv's Environment, or a functools.partial "
            f"of one, it was given {environment!r}"
        )
    make = functools.partial(
        create_env_manager,
        {**_DEFAULTS, **config, "auto_reset": False},
        env_fn=[functools.partial(SessionEnv, environment)] * checked_env_num(env_num),
    )
    make()  # refuses what is wrong now; nothing is started
    pool = _Pool(make, acquire_timeout_s, episode_timeout_s)
    members: dict[str, Any] = {
        "__doc__": inner.__doc__,
        "__module__": inner.__module__,
        "__qualname__": inner.__qualname__,
        "_pool": pool,
        "_reset_async": _method_of(inner, "reset_async", "reset"),
        "_step_async": _method_of(inner, "step_async", "step"),
    }
    for name in ("reset", "reset_async"):
        source = getattr(inner, members["_reset_async"] if name == "reset_async" else name)
        members[name] = _signed(getattr(_Isolated, name), source)
    for name in ("step", "step_async"):
        source = getattr(inner, members["_step_async"] if name == "step_async" else name)
        members[name] = _signed(getattr(_Isolated, name), source, with_timeout=True)
        members[f"_{name}_takes_timeout"] = _takes(source, "timeout_s")
    members.update(_others(inner))
    made = types.new_class(
        inner.__name__, (_Isolated,), exec_body=lambda body: body.update(members)
    )
    return cast("type[Environment]", made)


class _Pool:
    """The manager that all objects of a class share.

    Args:
        make: returns a new manager.
        acquire_s: seconds to wait for a free env; None for ever.
        episode_s: the limit of an episode in seconds; None for that of the config.
    """

    def __init__(
        self, make: Callable[[], Any], acquire_s: float | None, episode_s: float | None
    ) -> None:
        self._make = make
        self._acquire_s = acquire_s
        self._episode_s = episode_s
        self._lock = threading.Lock()
        self._manager: EnvManager | None = None

    def manager(self) -> EnvManager:
        """Return the manager, launched."""
        with self._lock:
            if self._manager is None:
                manager = self._make()
                manager.launch()
                self._manager = manager
            return self._manager

    async def amanager(self) -> EnvManager:
        """Return the manager, without blocking the event loop while it is launched."""
        if self._manager is not None:
            return self._manager
        return await in_thread(self.manager, LAUNCHING)

    def lease(self, manager: EnvManager, at_most_s: float | None = None) -> Lease:
        """Return a lease of one env."""
        acquire_s = self._acquire_s
        if at_most_s is not None:
            acquire_s = at_most_s if acquire_s is None else min(acquire_s, at_most_s)
        return manager.lease(episode_timeout_s=self._episode_s, acquire_timeout_s=acquire_s)

    def close(self) -> None:
        """Close the manager; later calls get another one."""
        with self._lock:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()


class _Isolated(Environment):  # type: ignore[misc]
    """A session, which leases an env at its first call; `isolated` returns subclasses of this."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    REQUIRES_SINGLE_THREAD_EXECUTOR = False  # each environment has the main thread of its worker

    _pool: ClassVar[_Pool]
    _reset_async: ClassVar[str]
    _step_async: ClassVar[str]
    _step_takes_timeout: ClassVar[bool]
    _step_async_takes_timeout: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self._changing = threading.Lock()
        self._lease: Lease | None = None
        self._slot: Slot | AsyncSlot | None = None
        self._is_used = False  # in this session
        self._is_over = True  # no step can be taken before a reset, which need not be the env's own
        self._failure: BaseException | None = None
        self._state: bytes | None = None
        self._n_closed = 0

    # -- OpenEnv's interface --------------------------------------------------------------------

    def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Any:
        """Begin an episode."""
        call = self._reset_call("reset", seed, episode_id, kwargs)
        return self._reset(call)

    async def reset_async(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Any:
        """Begin an episode, without blocking the event loop."""
        call = self._reset_call(self._reset_async, seed, episode_id, kwargs)
        return await self._areset(call)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Take a step; `timeout_s` is its time limit, if that is shorter than the config's."""
        if timeout_s is not None and self._step_takes_timeout:
            kwargs["timeout_s"] = timeout_s
        return self._call(MethodCall("step", (action,), kwargs), timeout_s)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Take a step, without blocking the event loop."""
        if timeout_s is not None and self._step_async_takes_timeout:
            kwargs["timeout_s"] = timeout_s
        return await self._acall(MethodCall(self._step_async, (action,), kwargs), timeout_s)

    @property
    def state(self) -> Any:
        """The state after the latest call. Reading it asks a worker only before the first call."""
        if self._state is None:
            self._call(MethodCall(None))
        state: Any = Answer() if self._state is None else pickle.loads(self._state)  # noqa: S301
        return state.result()

    def close(self) -> None:
        """End the session without waiting: its environment is closed in the background.

        A step that is under way may go on for the `release_timeout` of the config; then its worker
        is ended.
        """
        with self._changing:
            lease, slot, is_over = self._lease, self._slot, self._is_over
            self._lease = self._slot = self._state = self._failure = None
            self._is_used, self._is_over = False, True
            self._n_closed += 1
        if lease is None or slot is None:
            return
        if is_over:  # and nobody resets it
            ending = threading.Thread(target=_renew, args=(lease, slot.for_thread()), daemon=True)
            start_thread(ending)
        else:
            lease.__exit__(None, None, None)

    # -- of the class ---------------------------------------------------------------------------

    @classmethod
    def manager(cls) -> EnvManager:
        """Return the manager of all sessions, launched: for `stats()` and the like."""
        return cls._pool.manager()

    @classmethod
    def shutdown(cls) -> None:
        """End all sessions and their workers; the end of the process does so, too."""
        cls._pool.close()

    # -- calls ----------------------------------------------------------------------------------

    def _reset_call(self, method: str, seed: Any, episode_id: Any, kwargs: Any) -> MethodCall:
        given = {"seed": seed, "episode_id": episode_id}
        kwargs = {**{k: v for k, v in given.items() if v is not None}, **kwargs}
        return MethodCall(method, (), kwargs, on_new=not self._is_used)

    def _reset(self, call: MethodCall) -> Any:
        slot = self._acquired()
        with self._noticing(slot):
            answer = slot.reset(options={"call": call})[0]
        return self._begun(answer)

    async def _areset(self, call: MethodCall) -> Any:
        slot = await self._aacquired()
        with self._noticing(slot):
            answer = (await slot.reset(options={"call": call}))[0]
        return self._begun(answer)

    def _call(self, call: MethodCall, timeout_s: float | None = None) -> Any:
        self._refuse_lost()
        if self._is_over:
            self._reset(MethodCall(None, on_new=not self._is_used))
        slot = self._acquired()
        with self._noticing(slot):
            timestep = slot.step(call, timeout_s)
        return self._answered(timestep)

    async def _acall(self, call: MethodCall, timeout_s: float | None = None) -> Any:
        self._refuse_lost()
        if self._is_over:
            await self._areset(MethodCall(None, on_new=not self._is_used))
        slot = await self._aacquired()
        with self._noticing(slot):
            timestep = await slot.step(call, timeout_s)
        return self._answered(timestep)

    def _begun(self, answer: Answer) -> Any:
        self._is_used, self._is_over, self._failure = True, False, None
        self._state = answer.state
        return answer.result()

    def _answered(self, timestep: EnvTimestep) -> Any:
        failure = failure_in(timestep.info)
        if failure is not None:
            self._failure, self._is_over = failure, True
            raise failure
        answer: Answer = timestep.obs
        self._state, self._is_over = answer.state, timestep.done
        return answer.result()

    def _refuse_lost(self) -> None:
        """Refuse a step if the environment is no longer in the state that its session left it in.

        Raises:
            EnvNotReadyError: an earlier call has failed, or was cancelled.
        """
        if self._failure is not None:
            raise EnvNotReadyError(
                f"the environment of this session was lost ({_first_line(self._failure)}): call "
                "reset() first. Nothing was sent."
            )

    @contextmanager
    def _noticing(self, slot: Slot | AsyncSlot) -> Iterator[None]:
        """Note if a call has cost the environment its state."""
        try:
            yield
        except BaseException as error:
            if self._slot is not None and self._slot.env_id == slot.env_id:
                if isinstance(error, EnvFailure):
                    self._failure, self._is_over = error, True
                elif not isinstance(error, Exception):  # cancelled: the reset takes another env
                    self._is_over = False
                    self.close()
                    self._failure = error
                elif isinstance(error, (ManagerClosedError, FailuresExhaustedError)):
                    self.close()
            raise

    # -- the lease ------------------------------------------------------------------------------

    def _acquired(self) -> Slot:
        """Return the env of this session; lease one if it has none."""
        slot = self._slot
        if slot is None:
            n_closed = self._n_closed
            lease = self._pool.lease(self._pool.manager(), _ON_LOOP_S if _is_on_loop() else None)
            slot = self._kept(lease, lease.__enter__(), n_closed)
        return slot.for_thread()

    async def _aacquired(self) -> AsyncSlot:
        slot = self._slot
        if slot is None:
            n_closed = self._n_closed
            lease = self._pool.lease(await self._pool.amanager())
            slot = self._kept(lease, await lease.__aenter__(), n_closed)
        return slot.for_loop()

    def _kept(self, lease: Lease, slot: Slot | AsyncSlot, n_closed: int) -> Slot | AsyncSlot:
        with self._changing:
            if self._n_closed == n_closed and self._slot is None:
                self._lease, self._slot = lease, slot
                return slot
            other = self._slot
        lease.__exit__(None, None, None)
        if other is None:
            raise LeaseEndedError("the session was closed while it waited for an env")
        return other


def _renew(lease: Lease, slot: Slot) -> None:
    """Have the environment of a session that has ended closed, and give its env back."""
    with suppress(EnvManagerError):
        try:
            slot.reset()
        finally:
            lease.__exit__(None, None, None)


def _first_line(failure: BaseException) -> str:
    return str(failure).partition("\n")[0] or type(failure).__name__


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- what a class looks like ----------------------------------------------------------------------


def _method_of(inner: type, asynchronous: str, plain: str) -> str:
    """Return which method the server calls: the async one only if the class has one of its own."""
    own = getattr(inner, asynchronous) is not getattr(Environment, asynchronous)
    return asynchronous if own else plain


def _takes(method: Any, name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _signed(method: Any, like: Any, *, with_timeout: bool = False) -> Any:
    """Return a method with the signature of another one, which tells servers what to pass on."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await method(self, *args, **kwargs)
    else:

        @functools.wraps(method)
        def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

    signature = inspect.signature(like)
    if with_timeout and not _takes(like, "timeout_s"):
        limit = inspect.Parameter("timeout_s", inspect.Parameter.KEYWORD_ONLY, default=None)
        signature = signature.replace(parameters=[*signature.parameters.values(), limit])
    signed.__signature__ = signature  # type: ignore[attr-defined]
    return signed


def _others(inner: type) -> dict[str, Any]:
    """Return replacements for all other public methods of a class, which call them in a worker."""
    own: dict[str, Any] = {}
    for layer in reversed(inner.__mro__):
        if not layer.__module__.startswith("openenv."):
            own.update(vars(layer))
    return {
        name: _forwarded(name, member)
        for name, member in own.items()
        if inspect.isfunction(getattr(member, "__func__", member))
        and not name.startswith("_")
        and name not in _OWN
    }


def _forwarded(name: str, member: Any) -> Any:
    method = getattr(member, "__func__", member)  # of a static or a class method
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def forwarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await self._acall(MethodCall(name, args, kwargs))
    else:

        @functools.wraps(method)
        def forwarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(MethodCall(name, args, kwargs))

    if isinstance(member, staticmethod):
        forwarded.__signature__ = signature_with_self(method)  # type: ignore[attr-defined]
    return forwarded
