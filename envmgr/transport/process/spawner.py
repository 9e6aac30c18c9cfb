"""The base class of what starts worker processes, and the connections to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from envmgr.transport.base import HostDied
from envmgr.transport.ready import ReadySet
from envmgr.wire.channel import FrameChannel
from envmgr.wire.hosts import HostSpec, WorkerSettings


class Spawner(ABC):
    """Starts worker processes, sees them die, signals and reaps them.

    Attributes:
        died: what `deaths` has to return although nothing has become readable for it.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pids: dict[int, int] = {}
        self._left: set[int] = set()
        self.died: list[tuple[int, HostDied]] = []
        self._endings: ReadySet | None = None

    @abstractmethod
    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> FrameChannel:
        """Start a worker and return the parent's end of the connection to it.

        Args:
            spec: what it serves.
            shared_fds: the file for last words, the shared memory, the parent's doorbell, and the
                worker's own, as far as there are such.

        Raises:
            OSError: no process or fd could be had.
        """

    @property
    def inherits_factories(self) -> bool:
        """Whether workers get their factories without pickling."""
        return False

    @property
    def must_wait_for_call(self) -> bool:
        """Whether workers cannot be started now, but only in the next call; see `Transport`."""
        return False

    @property
    def preloads(self) -> bool:
        """Whether `preload` has something to do before the first worker is started."""
        return False

    def preload(self, named: Iterable[str]) -> None:
        """Begin to import once, for all workers, what envs need.

        Args:
            named: the modules that their factories name.

        Raises:
            ConfigError: a module that was asked for is not there; nothing was started.
            OSError: no process or fd could be had.
        """
        return

    @property
    def is_prepared(self) -> bool:
        """Whether preloading is done, as far as it can be; until then, `deaths` goes on with it."""
        return True

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers that are not reported dead, by host_id; from any thread."""
        return dict(self._pids)

    def report_to(self, ready: ReadySet) -> None:
        """Keep in `ready` what becomes readable when a worker dies."""
        self._ready = ready

    def any_death(self) -> list[Any]:
        """Return what becomes readable when any worker dies; empty where that is not known.

        The returned objects also cover workers that are started later.
        """
        return [] if self._endings is None else self._endings.waitables()

    @abstractmethod
    def death_of(self, host_id: int) -> Any:
        """Return what becomes readable when this worker dies; perhaps when others do, too."""

    @property
    def has_deaths(self) -> bool:
        """Whether `deaths` has something to return although nothing has become readable for it."""
        return bool(self.died)

    @abstractmethod
    def deaths(self) -> list[tuple[int, HostDied]]:
        """Reap and return the workers that have died since the last call; does not wait."""

    @abstractmethod
    def signal(self, host_id: int, number: int) -> None:
        """Send a signal to a worker and its children; nothing happens if it is gone."""

    @abstractmethod
    def give_up(self, host_id: int) -> None:
        """Report dead a worker that was killed long ago, but that the kernel has not let go of.

        It is reaped whenever it ends. Other workers are not touched.
        """

    def hurry(self) -> None:
        """Prepare to be closed: from now on wait for nothing that takes more than a moment."""
        return

    @abstractmethod
    def close(self) -> None:
        """Kill and reap what is left, and release everything; takes two seconds at most."""


LEFT_BEHIND = "it was killed, but the kernel has not let go of it (a device, a file system?)"
"""Detail of the death of a worker that was given up."""
