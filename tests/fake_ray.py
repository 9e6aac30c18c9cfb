"""A stand-in for the package ray: actors are objects of this process, their calls are threads."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import create_env_manager
from envmgr.transport.ray.protocol import ActorOp, ActorRequest

PATIENCE_S = 20.0

_RAYS = threading.local()


class ActorDiedError(Exception):
    """What a call to a dead actor comes to."""


class _Ref:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any) -> _Ref:
        return self._handle.submit(self._name, args)


class Handle:
    """An actor.

    Attributes:
        options: with which it was made.
        is_dead: it takes no calls.
        is_deaf: calls to it get no answer, and it cannot be killed.
    """

    def __init__(self, cls: Any, args: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.is_dead = self.is_deaf = False
        self.calls: list[tuple[str, Any]] = []
        self._pending: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._failure: Exception | None = None
        try:
            self.actor = cls(*_sent(args))
        except Exception as error:
            self.is_dead, self._failure = True, error

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def submit(self, name: str, args: Any) -> _Ref:
        future: Future[Any] = Future()
        self.calls.append((name, args))
        if self.is_dead:
            future.set_exception(ActorDiedError(str(self._failure or "The actor died.")))
        elif not self.is_deaf:
            self._pending.add(future)
            self._start(self._run, future, name, _sent(args))
        return _Ref(future)

    def _run(self, future: Future[Any], name: str, args: Any) -> None:
        try:
            result = _sent(getattr(self.actor, name)(*args))
        except Exception as error:
            self._settle(future, partial(future.set_exception, error))
        else:
            if not self.is_deaf:
                self._settle(future, lambda: future.set_result(result))

    def _settle(self, future: Future[Any], settle: Callable[[], None]) -> None:
        if future in self._pending:
            self._pending.discard(future)
            _RAYS.is_here = True  # as for Ray's own threads, which call what waits for a future
            settle()
            _RAYS.is_here = False

    def die(self) -> None:
        """Let nobody have an answer any more; as if its process had been killed."""
        if self.is_dead or self.is_deaf:
            return
        self.is_dead = True
        for future in list(self._pending):
            self._settle(
                future, lambda f=future: f.set_exception(ActorDiedError("The actor died."))
            )  # type: ignore[misc]

    def clean_up(self) -> None:
        """End its threads, which stand for a process that was killed."""
        hosting, handler = self.actor._hosting, self.actor._calls
        if getattr(hosting, "_inbox", None) is not None:
            hosting._inbox.end()
        elif not hasattr(hosting, "_inbox"):
            hosting.deliver([ActorRequest(ActorOp.CLOSE, 0, 0.0)])
        hosting._thread is None or hosting._thread.join(PATIENCE_S)
        while any(thread.is_alive() for thread in self._threads):
            if handler._early:  # a call before that was never made
                self._start(handler.call, handler._next, ())
            handler._awaited = {}
            handler.put(0, None)
            self._threads[-1].join(0.002)

    def _start(self, target: Callable[..., Any], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()


def _node_of(node_id: str, *, soft: bool, _spill_on_unavailable: bool) -> str:
    assert soft
    assert _spill_on_unavailable
    return node_id


def _sent(value: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(value))


class FakeRay:
    """The package, once for each test.

    Args:
        nodes: resources of each.

    Attributes:
        actors: all that were made.
        inits: how it was connected.
        shutdowns: how often it was disconnected.
    """

    def __init__(self, nodes: list[dict[str, float]]) -> None:
        self.having = nodes
        self.actors: list[Handle] = []
        self.inits: list[dict[str, Any]] = []
        self.shutdowns = 0
        self._is_initialized = False
        self.gcs_address = "10.0.0.1:6379"
        self.init_error: Exception | None = None
        self.refused: Exception | None = None
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=_node_of)
        self._made_on = "node1"
        self.on_made: Callable[[], None] = lambda: None

    def init(self, **given: Any) -> None:
        self.inits.append(given)
        if self.init_error is not None:
            raise self.init_error
        self._is_initialized = True

    def is_initialized(self) -> bool:
        return self._is_initialized

    def shutdown(self) -> None:
        self.shutdowns += 1
        self._is_initialized = False
        for handle in self.actors:
            handle.die()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": f"node{i + 1}",
                "Alive": True,
                "NodeManagerAddress": f"10.0.0.{i + 1}",
                "Resources": has,
            }
            for i, has in enumerate(self.having)
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            gcs_address=self.gcs_address,
            get_job_id=lambda: len(self.inits),
            get_node_id=lambda: self._made_on,
        )

    def remote(self, cls: Any) -> Any:
        def options(**given: Any) -> Any:
            if self.refused is not None:
                raise self.refused
            return SimpleNamespace(remote=lambda *args: self._make(cls, args, given))

        return SimpleNamespace(options=options)

    def _make(self, cls: Any, args: Any, options: dict[str, Any]) -> Handle:
        strategy = options.get("scheduling_strategy")
        self._made_on = "node1" if strategy == "DEFAULT" else str(strategy)
        self.actors.append(Handle(cls, args, options))
        self.on_made()
        return self.actors[-1]

    def kill(self, handle: Handle, no_restart: bool = True) -> None:
        """As Ray does it: with the help of another thread, which it waits for."""
        assert not getattr(_RAYS, "is_here", False), "Ray would wait for itself"
        thread = threading.Thread(target=handle.die)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "who calls this holds what the other thread needs"

    def get(self, ref: _Ref, timeout: float | None = None) -> Any:
        return ref.future().result(timeout)

    def clean_up(self) -> None:
        """End what is left of killed actors, and let go of their memory."""
        for handle in self.actors:
            with contextlib.suppress(AttributeError):  # one that could not be made
                handle.is_deaf = False
                handle.clean_up()
        self.actors.clear()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Take the package's place; what actors do to their processes is not done to this one."""
    fake = FakeRay([{"CPU": 4.0}, {"CPU": 4.0, "licence": 1.0, "node:10.0.0.2": 1.0}])
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", fake.strategies)
    monkeypatch.setattr("envmgr.transport.ray.cluster.refuse_without_ray", lambda: None)
    monkeypatch.setattr("envmgr.transport.ray.cluster.refuse_without_ray", lambda: None)
    monkeypatch.setattr("envmgr.transport.ray.actor.set_up", lambda index, settings: None)
    yield fake
    fake.clean_up()


class Counting(gymnasium.Env[Any, Any]):
    """Says how many steps it has taken; action 1 ends an episode, 2 raises, 3 waits."""

    observation_space = Box(0.0, np.inf, (2,), np.float64)
    action_space = Discrete(4)
    go = threading.Event()

    def __init__(self) -> None:
        self._n = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._n = 0
        return np.array([0.0, self.np_random.random()]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        if action == 2:
            raise ValueError("asked for")
        if action == 3:
            assert self.go.wait(PATIENCE_S)
        self._n += 1
        return np.array([self._n, 0.0]), float(self._n), action == 1, False, {}


def manager_of(n: int = 4, **cfg: Any) -> Any:
    cfg = {"type": "ray", "num_workers": 2, "retry_waiting_time": 0.0, **cfg}
    return create_env_manager(cfg, env_fn=[Counting] * n)


def zeros(n: int = 4) -> dict[int, int]:
    return dict.fromkeys(range(n), 0)
