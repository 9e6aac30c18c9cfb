"""What a worker process does: sets itself up, reads its orders, runs requests until told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import fnmatch
import mmap
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from envmgr.host import Host, HostSettings
from envmgr.protocol import FailureKind, FrameError, Message, Op, RemoteFailure, encode
from envmgr.transport.base import WorkerSettings
from envmgr.transport.channel import Channel, ChannelClosedError
from envmgr.types import EnvFactory

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_MPI_PATTERNS = (
    "OMPI_*",
    "PMI_*",
    "PMIX_*",
    "MPI_*",
    "I_MPI_*",
    "MPICH_*",
    "HYDRA_*",
    "SLURM_MPI*",
)
_ALWAYS_ALLOWED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_*",
    "PYTHON*",
    "VIRTUAL_ENV",
    "TMP*",
    "TEMP",
    "SYSTEMROOT",
)


class Orders(NamedTuple):
    """The first message to a worker.

    Attributes:
        factory: the env's factory, pickled; None if the process was given it otherwise.
        settings: for the host.
        worker: for the process.
    """

    factory: bytes | None
    settings: HostSettings
    worker: WorkerSettings


def worker_environment(environment: Mapping[str, str], settings: WorkerSettings) -> dict[str, str]:
    """Return the environment variables of a worker.

    MPI's are left out (an env that initialises MPI would join the trainer's job); math threads are
    capped; then `allow`, `deny` and `set` of the settings apply. What Python itself needs stays.
    """
    allowed = (*_ALWAYS_ALLOWED, *settings.allow)
    denied = (*_MPI_PATTERNS, *settings.deny)
    result = {
        name: value
        for name, value in environment.items()
        if _matches(name, allowed) and not _matches(name, denied)
    }
    if settings.threads is not None:
        result.update(dict.fromkeys(_THREAD_VARIABLES, str(settings.threads)))
    return {**result, **settings.set}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def replace_environment(target: MutableMapping[str, str], source: Mapping[str, str]) -> None:
    """Make `target` equal to `source`, touching only what differs."""
    for name in [name for name in target if name not in source]:
        del target[name]
    for name, value in source.items():
        if target.get(name) != value:
            target[name] = value


def isolate_process() -> None:
    """Leave the reach of the trainer's terminal, and get randomness of one's own."""
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):  # already the leader of its session
            os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    random.seed()
    np.random.seed()
    with contextlib.suppress(Exception):  # a stderr without an fd
        faulthandler.enable()


def end_with_parent(parent_waitable: Any) -> None:
    """End this process and its children when the parent is gone, also while env code hangs.

    Args:
        parent_waitable: becomes readable when the parent has exited.
    """

    def watch() -> None:
        wait([parent_waitable])
        kill_own_group()

    threading.Thread(target=watch, name="envmgr-parent-watch", daemon=True).start()


def kill_own_group() -> None:
    """Kill this process and those of its session; never returns."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def run_worker(channel: Channel, memory_fd: int | None, factory: EnvFactory | None = None) -> int:
    """Read the orders, then run requests until CLOSE or the end of the connection.

    Args:
        channel: the blocking end of the connection to the parent.
        memory_fd: the shared memory, if there is one.
        factory: the env's factory, where the process inherited it.

    Returns:
        The exit code.
    """
    messages = _messages(channel)
    try:
        first = next(messages)
        if first.op != Op.HELLO:
            return 0  # the launch has failed before it began
        orders: Orders = first.payload
        _set_up(first.env_id, orders.worker)
        host = Host(
            first.env_id,
            factory if factory is not None else _Factory(orders.factory or b""),
            orders.settings,
            encode=encode,
            memory=lambda nbytes: _open_memory(memory_fd, nbytes),
            rss_bytes=resident_bytes,
        )
        for reply in host.build(first):
            channel.send(reply)
        for message in messages:
            if message.op == Op.CLOSE:
                host.close()
                channel.send(encode(message._replace(op=Op.CLOSED, payload=None)))
                return 0
            for reply in host.handle(message):
                channel.send(reply)
    except (ChannelClosedError, StopIteration):
        return 0  # the parent has let go of this worker
    return 0


def _messages(channel: Channel) -> Any:
    while True:
        for frame in channel.receive():
            try:
                yield frame.message()
            except FrameError as error:
                failure = RemoteFailure(FailureKind.PROTOCOL, _during(frame.op), message=str(error))
                channel.send(encode(Message(Op.FAILED, *frame[1:4], failure)))


def _during(op: int) -> str:
    return {Op.STEP: "step", Op.RESET: "reset", Op.HELLO: "construction"}.get(Op(op), "call")


class _Factory:
    """Unpickles the env's factory when it is called, so that failures count as construction."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self) -> Any:
        return pickle.loads(self._pickled)()  # noqa: S301 - from the parent, over its own socket


def _set_up(env_id: int, settings: WorkerSettings) -> None:
    replace_environment(os.environ, worker_environment(os.environ, settings))
    current_process()._config["daemon"] = settings.daemon  # type: ignore[attr-defined]
    if settings.affinity is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.affinity[env_id % len(settings.affinity)])
    torch = sys.modules.get("torch")
    if torch is not None and settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _open_memory(memory_fd: int | None, nbytes: int) -> mmap.mmap:
    if memory_fd is None:
        raise FrameError("observations are placed in shared memory, but there is none")
    return mmap.mmap(memory_fd, nbytes)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where that cannot be read."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0
