"""Caps that all managers of a user on one machine share: so many envs of a kind, and no more.

A manager that has envs has a file that says how many, in a folder that only the user can write to,
and holds a lock on it (flock). The kernel ends a lock with its process, however that ends. So a
file that is not locked belongs to nobody any more, and the next manager that comes removes it. One
lock for all managers, held for a moment, keeps two of them from counting at the same time.

A lock belongs to the open file, and a child that inherits the file would keep holding the lock
after its parent is gone. Therefore the files are closed by exec, and in every fork that Python
makes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from envmgr.errors import CapMismatchError, SharedCapError

_FOLDER = "envmgr-caps"
_MUTEX = ".lock"
_MOST_BYTES = 256
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_HELD: dict[int, str] = {}
"""Files that this process holds, by fd: forks close them."""

_FORKING = threading.RLock()
"""Held while files are opened and locked, so that no fork comes before they are in `_HELD`."""


def _close_in_fork() -> None:
    for fd in list(_HELD):
        with contextlib.suppress(OSError):
            os.close(fd)
    _HELD.clear()
    _FORKING.release()


os.register_at_fork(
    before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_close_in_fork
)


class Holder(NamedTuple):
    """A manager that has envs of a kind.

    Attributes:
        units: how many envs of the kind there may be, as this manager knows it.
        held: how many it has.
        pid: its process.
    """

    units: int
    held: int
    pid: int


class SharedUnits:
    """One manager's share of the shared units: none, or as many of each name as it has envs.

    It is all or none, because two managers that each had some would wait for those of the other.

    Args:
        caps: how many units there are, by name.
        count: how many envs the manager has: each needs one unit of each name.
        folder: the folder of the files; None: see `own_folder`.

    Attributes:
        is_held: whether the manager has the units.
        lacks: what it waits for, in words; empty if it does not wait, or could not look yet because
            others looked at the same moment.
    """

    def __init__(self, caps: Mapping[str, int], count: int, folder: str | None = None) -> None:
        self._caps = dict(caps)
        self._count = count
        self._folder = folder
        self._fds: dict[int, str] = {}
        self.is_held = False
        self.lacks = ""

    def take(self) -> bool:
        """Take the units if there are enough now, without waiting.

        Returns:
            Whether the manager has them.

        Raises:
            CapMismatchError: another manager has another number for a name.
            SharedCapError: the folder, or the system, is unsuitable.
        """
        if self.is_held:
            return True
        if self._folder is None:
            self._folder = own_folder()
        try:
            with _FORKING, _open_folder(self._folder) as folder, _mutex(folder) as is_ours:
                if is_ours:
                    self._take_from(folder)
        except OSError as error:
            self.release()
            raise SharedCapError(
                f"limits.shared: the folder {self._folder!r} cannot be used: {error}"
            ) from error
        return self.is_held

    def _take_from(self, folder: int) -> None:
        holders = {name: self._others(folder, name) for name in self._caps}
        self.lacks = "; ".join(
            self._lack(name, found)
            for name, found in holders.items()
            if sum(other.held for other in found) + self._count > self._caps[name]
        )
        if not self.lacks:
            self._write(folder)

    def _others(self, folder: int, name: str) -> list[Holder]:
        """Return the managers that have units of a name; remove files of those that are gone."""
        found = []
        for file in sorted(os.listdir(folder)):
            holder = _look_at(folder, file) if file.startswith(f"{name}@") else None
            if holder is None:
                continue
            if holder.units != self._caps[name]:
                raise CapMismatchError(name, self._caps[name], holder.units, holder.pid)
            found.append(holder)
        return found

    def _lack(self, name: str, found: list[Holder]) -> str:
        by_pid: dict[int, int] = {}
        for other in found:
            by_pid[other.pid] = by_pid.get(other.pid, 0) + other.held
        whose = ", ".join(f"{held} by process {pid}" for pid, held in by_pid.items())
        return f"{self._count} of the {self._caps[name]} of {name}: held are {whose}"

    def _write(self, folder: int) -> None:
        for name, units in self._caps.items():
            file = f"{name}@{os.getpid()}-{os.urandom(6).hex()}"
            fd = os.open(file, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            self._fds[fd] = _HELD[fd] = f"{self._folder}/{file}"
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, f"{units} {self._count} {os.getpid()}\n".encode())
            with contextlib.suppress(OSError):  # for those who tidy temporary folders up
                os.fchmod(fd, 0o600 | stat.S_ISVTX)
        self.is_held = True

    def release(self) -> None:
        """Give all units back; this can be called again, and does nothing in a fork."""
        self.is_held = False
        while self._fds:
            fd, path = self._fds.popitem()
            if _HELD.pop(fd, None) != path:
                continue  # a fork has closed it; the number may be something else's
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(fd)

    def figures(self) -> dict[str, Any]:
        """Return what `stats()` shows; any thread may call this."""
        held = self._count if self.is_held else 0
        return {name: {"units": units, "held": held} for name, units in self._caps.items()}


def own_folder() -> str:
    """Return the folder of this user's files: in the system's place for such, else a temporary one.

    Somebody else can make the temporary folder first. Then it is a folder below the user's home,
    one for each machine; this comes last, since homes may be on file systems without locks.
    """
    uid = os.geteuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"):
        if os.path.isabs(runtime) and _is_own(runtime):
            return os.path.join(runtime, _FOLDER)
    temporary = os.path.join(tempfile.gettempdir(), f"{_FOLDER}-{uid}")
    with contextlib.suppress(OSError, ValueError):
        if os.lstat(temporary).st_uid != uid:
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            if os.path.isabs(cache):
                os.makedirs(cache, exist_ok=True)
                return os.path.join(cache, f"{_FOLDER}-{socket.gethostname()}")
    return temporary


def _is_own(path: str) -> bool:
    try:
        about = os.lstat(path)
    except (OSError, ValueError):
        return False
    return _fault_of(about) == ""


def _fault_of(about: os.stat_result) -> str:
    """Return what is wrong with a folder that only this user may write to; empty if nothing is."""
    if not stat.S_ISDIR(about.st_mode):
        return "is no folder"
    if about.st_uid != os.geteuid():
        return f"belongs to the user with the id {about.st_uid}"
    if stat.S_IMODE(about.st_mode) & 0o077:
        return f"is open to others (its mode is {stat.S_IMODE(about.st_mode):04o})"
    return ""


@contextlib.contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Open the folder of this user's files, which is made if there is none.

    Raises:
        SharedCapError: others may write to it.
        OSError: it cannot be made or opened.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise NotADirectoryError(f"{path!r} is a link")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fault = _fault_of(os.fstat(fd))
        if fault:
            raise SharedCapError(
                f"limits.shared: the folder {path!r} {fault}, but only this user may look into it "
                "and write to it (mode 0700), or others could take units away. Remove it: it is "
                "made anew. Or set XDG_RUNTIME_DIR to a folder of this user alone, for all managers"
            )
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _mutex(folder: int) -> Iterator[bool]:
    """Hold the lock of a folder if nobody else has it, and yield whether it is held."""
    fd = os.open(_MUTEX, _FLAGS | os.O_CREAT, 0o600, dir_fd=folder)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _look_at(folder: int, file: str) -> Holder | None:
    """Return the holder of a file; remove the file and return None if it is nobody's any more."""
    try:
        fd = os.open(file, _FLAGS, dir_fd=folder)
    except FileNotFoundError:  # given back just now
        return None
    try:
        if _lock(fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file, dir_fd=folder)
            return None
        numbers = os.read(fd, _MOST_BYTES).split()
        if len(numbers) != 3 or not all(map(bytes.isdigit, numbers)):
            raise SharedCapError(
                f"limits.shared: the file {file!r} is locked, but not by envmgr: it does not say "
                "how many units are held. End who has it, or remove the file"
            )
        return Holder(*map(int, numbers))
    finally:
        os.close(fd)
