"""What the contract and fault suites are made of: setups, a world of scripted envs, gates."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest

from envmgr import create_env_manager
from envmgr.proc import stat_of
from tests.contract.envs import ScriptedEnv, end_of, gate_path, read_journal

PATIENCE_S = 40.0
"""How long a test waits for what has to happen. Nothing depends on it unless the test fails."""


class Setup(NamedTuple):
    """A kind of manager, how its workers start, whether it has shared memory, its packing.

    What matters is named by four axes: the place (inline, threads, or processes), the gather
    (`step` waits for all that it sent, or for some), the route of steps (the block, or messages),
    and the packing (a host for each env, or shared ones). With `num_workers` envs share hosts.
    """

    kind: str
    context: str | None = None
    shared_memory: bool = True
    num_workers: int | None = None

    def __str__(self) -> str:
        if self.context is None and self.kind != "thread":
            return "inline" if self.kind == "base" else self.kind
        gather = "all" if self.gathers_all else "some"
        route = "block" if self.shared_memory else "message"
        hosts = "" if self.num_workers is None else f"-{self.num_workers}_hosts"
        start = "" if self.context in ("fork", None) else f"-{self.context}"
        kind = "" if self.kind in _KINDS else f"{self.kind}-"
        return f"{kind}{gather}-{route}{hosts}{start}"

    @property
    def cfg(self) -> dict[str, Any]:
        cfg: dict[str, Any] = {"type": self.kind, "shared_memory": self.shared_memory}
        if self.num_workers is not None:
            cfg["num_workers"] = self.num_workers
        return cfg if self.context is None else {**cfg, "context": self.context}

    @property
    def gathers_all(self) -> bool:
        return not self.kind.startswith("async")

    @property
    def has_processes(self) -> bool:
        return not self.kind.startswith(("base", "thread"))


_KINDS = ("subprocess", "async_subprocess")

INLINE = Setup("base")
THREADS = Setup("thread")
THREADS_MESSAGE_SHARED = Setup("thread", None, False, 1)
DEFAULT = Setup("subprocess", "server")
"""What users get who choose nothing but processes: all, by the block, a host each.

All others here are started by fork, which takes a tenth of the time; where a start method matters
there are tests over start methods, and `test_start_methods.py` has what holds for all of them.
"""
ALL_BLOCK = Setup("subprocess", "fork")
ALL_MESSAGE = Setup("subprocess", "fork", False)
SOME_BLOCK = Setup("async_subprocess", "fork")
SOME_MESSAGE = Setup("async_subprocess", "fork", False)
ALL_BLOCK_SHARED, ALL_MESSAGE_SHARED, SOME_BLOCK_SHARED, SOME_MESSAGE_SHARED = (
    setup._replace(num_workers=1) for setup in (ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, SOME_MESSAGE)
)

AXES = (
    *(INLINE, ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK, SOME_MESSAGE),
    *(ALL_BLOCK_SHARED, ALL_MESSAGE_SHARED, SOME_BLOCK_SHARED, SOME_MESSAGE_SHARED),
)
"""Each with each."""
SETUPS = (INLINE, THREADS, ALL_BLOCK, SOME_MESSAGE, ALL_MESSAGE_SHARED, SOME_BLOCK_SHARED)
"""Each pair of route, packing and gather once: for tests where all of them may matter."""


def over(*setups: Setup) -> pytest.MarkDecorator:
    """Run a test once for each of `setups`."""
    return pytest.mark.parametrize("setup", setups, ids=str)


every_setup = over(*SETUPS)
every_kind = over(INLINE, THREADS, ALL_BLOCK, SOME_MESSAGE)
"""Where the packing cannot matter: one that has none of the axes in common with the default."""
sync_kinds = over(INLINE, ALL_BLOCK, ALL_MESSAGE)
async_kinds = over(SOME_BLOCK, SOME_MESSAGE)
process_kinds = over(ALL_BLOCK, SOME_MESSAGE)
packed_setups = over(ALL_BLOCK_SHARED, SOME_MESSAGE_SHARED)
process_setups = over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK)


class Visit:
    """An env that has come to the gate and waits there."""

    def __init__(self, sock: socket.socket, said: Mapping[str, Any]) -> None:
        self._sock = sock
        self.said = said
        self.env_id: int = said["env_id"]
        self.where: str = said["where"]
        self.build: int = said["build"]
        self.pid: int = said["pid"]

    def release(self) -> None:
        """Let the env go on."""
        self._sock.sendall(b"g")
        self._sock.close()

    def kill(self) -> None:
        """Kill the env's process with SIGKILL and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Wait until the env's process is gone."""
        self._sock.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert self._sock.recv(1) == b""
        self._sock.close()


class Gate:
    """Where scripted envs report that they are in the middle of something, and wait."""

    def __init__(self, folder: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(gate_path(folder))
        self._listener.listen(256)
        self._socks: list[socket.socket] = []
        self._waiting: list[Visit] = []

    def await_visit(self, env_id: int | None = None, where: str | None = None) -> Visit:
        """Return the visit of an env (of this env_id, from this place), once it is there."""
        while True:
            for i, visit in enumerate(self._waiting):
                if env_id in (None, visit.env_id) and where in (None, visit.where):
                    return self._waiting.pop(i)
            self._listener.settimeout(PATIENCE_S)
            sock, _ = self._listener.accept()
            self._socks.append(sock)
            sock.settimeout(PATIENCE_S)
            line = b""
            while not line.endswith(b"\n"):
                line += sock.recv(1)
            self._waiting.append(Visit(sock, json.loads(line)))

    def nobody_came(self) -> bool:
        """Whether no env is waiting here that no test has looked at."""
        self._listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._socks.append(self._listener.accept()[0])
            return False
        return not self._waiting

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            sock.close()


class World:
    """A folder with journals and a gate, and the managers whose envs use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self._gate: Gate | None = None
        self._managers: list[Any] = []

    @property
    def gate(self) -> Gate:
        """Made when first used; envs that come to a place without gate stay there."""
        if self._gate is None:
            self._gate = Gate(self.folder)
        return self._gate

    def factories(
        self,
        env_num: int,
        env: Callable[..., Any] = ScriptedEnv,
        scripts: Mapping[int, Mapping[str, Any]] | None = None,
        **script: Any,
    ) -> list[Callable[[], Any]]:
        """Return factories of scripted envs: `script` is for all, `scripts` by env_id."""
        by_id = scripts or {}
        return [
            partial(env, i, self.folder, **{**script, **by_id.get(i, {})}) for i in range(env_num)
        ]

    def make(
        self,
        setup: Setup,
        env_num: int = 3,
        *,
        launch: bool = True,
        env: Callable[..., Any] = ScriptedEnv,
        scripts: Mapping[int, Mapping[str, Any]] | None = None,
        env_fn: Sequence[Callable[[], Any]] | None = None,
        reset_param: Any = None,
        observation_space: Any = None,
        action_space: Any = None,
        script: Mapping[str, Any] | None = None,
        **cfg: Any,
    ) -> Any:
        """Return a manager; it is closed at the test's end."""
        if env_fn is None:
            env_fn = self.factories(env_num, env, scripts, **(script or {}))
        given = {"observation_space": observation_space, "action_space": action_space}
        manager = create_env_manager(
            {**setup.cfg, **cfg},
            env_fn=env_fn,
            **{name: space for name, space in given.items() if space is not None},
        )
        self._managers.append(manager)
        if launch:
            manager.launch(reset_param)
        return manager

    def journal(self, env_id: int) -> list[list[Any]]:
        """Return what an env has written down."""
        return read_journal(self.folder, env_id)

    def noted(self, env_id: int, kind: str) -> list[list[Any]]:
        """Return the entries of one kind: "build", "reset", "step", "seed", "close", "call"."""
        return [entry[1:] for entry in self.journal(env_id) if entry[0] == kind]

    def actions(self, env_id: int) -> list[int]:
        """Return the actions that an env has begun to execute."""
        return [action for _, _, action in self.noted(env_id, "step")]

    def pid(self, env_id: int) -> int:
        """Return the process of an env's latest build."""
        return int(self.noted(env_id, "build")[-1][1])

    def kill(self, env_id: int) -> None:
        """Kill an env's process with SIGKILL and wait until it is gone (perhaps not reaped)."""
        pid = self.pid(env_id)
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)

    def kill_and_await_report(self, env_id: int) -> None:
        """As `kill`, and wait until a manager has noticed it, behind its caller."""
        with reported("SIGKILL"):
            self.kill(env_id)

    def close(self) -> None:
        for manager in self._managers:
            manager.close(terminate=True)
        end_of(self.folder).set()  # threads that hang come back, long given up
        if self._gate is not None:
            self._gate.close()


@contextlib.contextmanager
def reported(text: str) -> Iterator[None]:
    """Wait, at the end, until a manager has told of a failure with these words in the log."""
    told = threading.Event()
    handler = logging.Handler(logging.WARNING)

    def note(record: logging.LogRecord) -> None:
        if text in record.getMessage():
            told.set()

    handler.emit = note  # type: ignore[method-assign]
    logger = logging.getLogger("envmgr")
    logger.addHandler(handler)
    try:
        yield
        assert told.wait(PATIENCE_S), "it was not noticed"
    finally:
        logger.removeHandler(handler)


def is_running(pid: int) -> bool:
    """Return whether a process is there that has not ended."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0] != "Z"
    return False


def wait_ended(pid: int) -> None:
    """Wait until a process has ended; it may still be a zombie then."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), f"process {pid} does not end"
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Have another thread act while this one goes on; at the end, wait until that is done."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world of its own for each test."""
    world = World(tmp_path)
    try:
        yield world
    finally:
        world.close()


def step_all(manager: Any, actions: Mapping[int, Any]) -> dict[int, Any]:
    """Step, and gather until every action has given its timestep; each exactly once."""
    timesteps: dict[int, Any] = dict(manager.step(actions))
    while len(timesteps) < len(actions):
        more = manager.recv()
        assert not more.keys() & timesteps.keys(), "an env has given two timesteps for one action"
        timesteps.update(more)
    assert timesteps.keys() == actions.keys()
    return {env_id: timesteps[env_id] for env_id in actions}


def ready_all(manager: Any, env_ids: Sequence[int] | None = None) -> dict[int, Any]:
    """Read `ready_obs` when all envs (or these) are in it; they must be on their way there."""
    wanted = sorted(range(manager.env_num) if env_ids is None else env_ids)
    manager.get_attr("action_space", env_ids=wanted)  # waits for resets and repairs
    ready: dict[int, Any] = manager.ready_obs
    assert set(wanted) <= ready.keys(), f"{manager.env_states}"
    return ready


class Raises:
    """As `pytest.raises`, for errors that have to say certain things, in one paragraph."""

    def __init__(self, kind: type[BaseException], *parts: str) -> None:
        self._kind = kind
        self._parts = parts
        self.value: Any = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            pytest.fail(f"{self._kind.__name__} was not raised")
        if not isinstance(error, self._kind):
            return False
        self.value = error
        text = str(error)
        for part in self._parts:
            assert part in text, f"{part!r} is missing in: {text}"
        return True
