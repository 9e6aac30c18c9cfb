"""Ray itself, which is imported when it is first needed, and the connection to a cluster.

All managers of a process share the connection. If the user has called `ray.init`, managers use that
connection. Otherwise the first manager connects, or starts a cluster on this machine, and the last
one that is closed disconnects.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from envmgr.errors import ConfigError, LaunchError
from envmgr.interruptible import join_thread, start_thread
from envmgr.optional_packages import imported, missing
from envmgr.transport.process.threads import thread_name

REACH_S = 5.0
"""How long the head node of a cluster may take to accept a connection."""

_NEEDS = "type: ray needs the package ray"
_HERE: dict[str, Any] = {
    "address": "local",
    "include_dashboard": False,
}
_OFF = {"RAY_USAGE_STATS_ENABLED": "0"}
_LOCK = threading.Lock()


def refuse_without_ray() -> None:
    """Refuse to go on where Ray is not installed; does not import it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a mere folder of that name, as Ray leaves in /tmp
        raise missing(_NEEDS, "no module named 'ray'", extra="ray")


def imported_ray() -> Any:
    """Return the package `ray`.

    Raises:
        MissingDependencyError: it is not installed, or cannot be imported.
    """
    refuse_without_ray()
    return imported("ray", _NEEDS, extra="ray")


class _Keeper(threading.Thread):
    """The thread that connects, and disconnects when it is told to.

    The kernel ends the processes of a cluster on this machine when the thread that has started them
    ends. So this is a thread of its own, which outlives managers.
    """

    def __init__(self, ray: Any, address: str | None) -> None:
        super().__init__(name=thread_name("connection to Ray"), daemon=True)
        self.address = address
        self.users = 1
        self.job: Any = None
        self._ray = ray
        self._orders: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def open(self) -> None:
        """Connect, and wait until that is done; raise the error if it fails."""
        start_thread(self)
        error = self._opened.get()
        if error is not None:
            join_thread(self)
            raise error

    def run(self) -> None:
        try:
            with _environment(), _no_word_of_sigterm():
                given = {"address": self.address} if self.address else _HERE
                self._ray.init(configure_logging=False, **given)
            self.job = _job_of(self._ray)
        except BaseException as error:
            self._opened.put(error)
            return
        self._opened.put(None)
        self._orders.get()
        if _job_of(self._ray) == self.job:  # else its user has shut it down
            self._ray.shutdown()

    def close(self) -> None:
        """Disconnect; a cluster that this thread has started ends."""
        self._orders.put(None)
        join_thread(self)


_keeper: _Keeper | None = None


class Cluster(NamedTuple):
    """Ray, connected to a cluster.

    Attributes:
        ray: the package.
        keeper: the thread that disconnects when the last manager has closed; None if the user has
            connected.
    """

    ray: Any
    keeper: _Keeper | None


def open_cluster(address: str | None) -> Cluster:
    """Return Ray, connected to a cluster; to be closed with `close_cluster`.

    Args:
        address: `host:port`, `auto`, or None: the cluster that this process is connected to, or
            else a new one on this machine.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: this process is connected to another cluster.
        LaunchError: the cluster cannot be reached, or none can be started.
    """
    global _keeper
    ray = imported_ray()
    with _LOCK:
        if ray.is_initialized():
            keeper = _keeper
            if keeper is not None and keeper.job != _job_of(ray):
                keeper = None  # somebody has shut that connection down, and made this one
            if keeper is None or keeper.address != address:
                _refuse_other(ray, address)
            if keeper is not None:
                keeper.users += 1
            return Cluster(ray, keeper)
        _refuse_unreachable(address)
        keeper = _Keeper(ray, address)
        try:
            keeper.open()
        except Exception as error:  # whatever Ray may raise
            what = "started on this machine" if address is None else f"reached at {address}"
            raise LaunchError(
                f"a Ray cluster cannot be {what}: {type(error).__name__}: {error}. See that "
                "manager.ray.address is that of its head node (host:port, 6379 unless it was "
                "started with another port), and that it has the same versions of Ray and Python"
            ) from error
        _keeper = keeper
        return Cluster(ray, keeper)


def close_cluster(cluster: Cluster) -> None:
    """Give back what `open_cluster` returned; the last manager to do so disconnects."""
    global _keeper
    with _LOCK:
        keeper = cluster.keeper
        if keeper is None:
            return
        keeper.users -= 1
        if keeper.users == 0:
            if _keeper is keeper:
                _keeper = None
            keeper.close()


def _refuse_other(ray: Any, address: str | None) -> None:
    if address in (None, "auto"):
        return
    here = ray.get_runtime_context().gcs_address
    if here != address and _resolved(here) != _resolved(address or ""):
        raise ConfigError(
            f"manager.ray.address is {address}, but this process is connected to the Ray cluster "
            f"at {here}, and one process can be connected to one only. Give that address, or null"
        )


def _resolved(address: str) -> tuple[str, str]:
    """Return host and port; all addresses of this machine, such as localhost, count as one."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
        with socket.socket() as own:
            own.bind((host, 0))  # refused, unless the address is this machine's
        host = "localhost"
    return host, port


def _refuse_unreachable(address: str | None) -> None:
    """Refuse quickly an address where nobody answers; Ray itself would try for a long time."""
    if address is None or ":" not in address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"there is no Ray cluster at manager.ray.address {address}: {error}. Give host:port of "
            "its head node (`ray start --head` prints it), or leave it null for a cluster on this "
            "machine"
        ) from error


def _job_of(ray: Any) -> Any:
    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else None


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Keep Ray's processes that are started meanwhile from sending usage reports."""
    before = {name: os.environ.get(name) for name in _OFF}
    os.environ.update(_OFF)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_word_of_sigterm() -> Iterator[None]:
    """Keep Ray from warning that it leaves the trainer's handler of SIGTERM alone."""

    def passes(record: logging.LogRecord) -> bool:
        return "SIGTERM" not in record.getMessage()

    logger = logging.getLogger("ray._private.worker")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
