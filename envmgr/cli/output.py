"""The folder of a run: what is checked before the run, and what is written when."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from envmgr.collect import EpisodeRecord
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.observing.status_boards import PROCESS, facts_in, process_facts, start_of
from envmgr.reporting.files import (
    CONFIG,
    EPISODES,
    RESULTS,
    RUN,
    SUMMARY,
    TENSORBOARD,
    VIDEOS,
    WANDB,
)
from envmgr.texts import counted
from envmgr.untrusted import opened_file, opened_itself
from envmgr.whole_files import write_whole

LOCK = "run.lock"
"""Name of the file that exists, and is locked, as long as the run goes on."""


class RunFolder:
    """The folder that holds the results of one run.

    `prepare` makes sure, before anything starts, that results can be written there, and locks the
    folder against other writers; `begin` writes the config and opens the list of episodes; `end`
    writes the summary; `close` and `discard` release the lock.

    Args:
        path: the folder; it need not exist.
        force: whether to replace the results that the folder holds.
        facts: what is to be in `run.json`.
        is_of_file: whether a config file has named the folder, which then has to be new, empty or
            that of a run.

    Attributes:
        resumed: how often the run was resumed.
    """

    resumed = 0

    def __init__(
        self,
        path: Path,
        *,
        force: bool = False,
        facts: bytes = b"{}\n",
        is_of_file: bool = False,
    ) -> None:
        self.path = path
        self._force = force
        self._is_of_file = is_of_file
        self._facts = facts
        self._begun = False
        self._lock: RunLock | None = None
        self._made: list[Path] = []
        self._written: list[Path] = []
        self._episodes: io.FileIO | None = None

    def prepare(self) -> None:
        """Make the folder, lock it, and check that it can take the results.

        Raises:
            ConfigError: the folder holds results and `force` is off, or files that are of no run;
                another run goes on there; or the folder cannot be made or written to.
        """
        try:
            self._make()
            with tempfile.TemporaryFile(dir=self.path):
                pass  # it can be written
        except (OSError, ValueError) as error:  # ValueError: a NUL, or half of a surrogate pair
            self.discard()
            raise ConfigError(
                f"the output folder {str(self.path)!r} cannot be written: {_reason(error)}. Name "
                "another one with --output, or write nothing with --no-output."
            ) from error
        try:
            self._lock = locked(self.path)
            if self._is_of_file:
                self._refuse_what_is_of_no_run()
            held = self._held()
            if held and not self._force:
                raise ConfigError(
                    f"the output folder {str(self.path)!r} holds the results of another run "
                    f"({', '.join(held)}). Name another folder with --output, or replace them with "
                    "--force."
                )
        except BaseException:
            self.discard()
            raise

    def _refuse_what_is_of_no_run(self) -> None:
        """Refuse files that a config file may not have replaced, or mixed with those of a run.

        Raises:
            ConfigError: there are such files.
        """
        there = sorted({*os.listdir(self.path)} - {LOCK})
        if there and not _is_of_run(self.path):
            raise ConfigError(
                f"collect.output is {str(self.path)!r}, which holds {counted(len(there), 'file')} "
                f"({', '.join(there[:3])}{', ...' if there[3:] else ''}), and is not the folder of "
                "a run; a config file may name none but a new or an empty one. Name it with "
                "--output on the command line, if you mean it."
            )
        refuse_links(self.path)

    def _held(self) -> list[str]:
        """Return the names of the files that a run has left in the folder.

        TensorBoard's event files are among them: it draws all that lie together as one run.
        """
        events, held = self.path / TENSORBOARD, list(RESULTS)
        if not events.is_symlink():  # what a link leads to is not ours to remove
            found = sorted(events.glob("events.out.tfevents.*"))
            held += [str(path.relative_to(self.path)) for path in found]
        return [name for name in held if os.path.lexists(self.path / name)]

    def _make(self) -> None:
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            self._made.append(folder)
        if not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._begun

    def begin(self, config_yaml: str) -> None:
        """Write the config, and open the list of episodes.

        Raises:
            OSError: they cannot be written.
        """
        if self._force:
            for name in self._held():
                (self.path / name).unlink(missing_ok=True)
        # Exclusively: of two runs in this process, which the lock both lets in, one fails.
        # Unbuffered: the system has a line as soon as it is written, whatever becomes of this
        # process.
        self._episodes = io.FileIO(self.path / EPISODES, "x")
        self._begun = True
        self._written = [self.path / name for name in RESULTS]
        write_whole(self.path / CONFIG, config_yaml.encode())
        self._write_facts(self._facts)
        self._write_process()

    def _write_facts(self, facts: bytes) -> None:
        write_whole(self.path / RUN, facts)

    def _write_process(self) -> None:
        write_whole(self.path / PROCESS, json.dumps(process_facts()).encode(), b"\n")

    def add(self, record: EpisodeRecord) -> None:
        """Append an episode, as one line of JSON.

        Raises:
            OSError: it cannot be written.
        """
        if self._episodes is None:
            return
        fields = {**record.as_dict(), "resumed": self.resumed}
        line = json.dumps(fields, allow_nan=False).encode() + b"\n"
        before = self._episodes.tell()
        if self._episodes.write(line) != len(line):
            self._episodes.truncate(before)  # whole lines only
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / EPISODES))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Write the summary; all that was written is on disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        self._written = []  # they are kept from here on, whatever else fails
        if self._episodes is not None:
            os.fsync(self._episodes.fileno())
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        write_whole(self.path / SUMMARY, text.encode())

    def close(self) -> None:
        """Close the list of episodes: the run does not go on."""
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None
            with contextlib.suppress(OSError):
                (self.path / PROCESS).unlink(missing_ok=True)
        self._end_lock()

    def _end_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove what this run has made: it came to nothing."""
        self.close()
        with contextlib.suppress(OSError):
            for path in self._written:
                path.unlink(missing_ok=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # somebody else's file is in it
                folder.rmdir()


def refuse_links(path: Path) -> None:
    """Refuse a folder with results that are links: more would be written to where they lead.

    Raises:
        UnreadableRunError: one of the results is a link, or one that has to be a file is not.
    """
    for name in (*RESULTS, VIDEOS, TENSORBOARD, WANDB):
        place = path / name
        if place.is_symlink():
            raise UnreadableRunError(
                f"nothing is written into {str(path)!r}: its {name} is a link, which is not "
                "followed. Put there what it leads to, or begin a run in another folder."
            )
        if name in RESULTS and place.exists() and not place.is_file():
            raise UnreadableRunError(
                f"nothing is written into {str(path)!r}: its {name} is no file. Remove it, or "
                "begin a run in another folder."
            )


def default_path(config: str, now: datetime) -> Path:
    """Return a folder under `runs`, named after the config and the time, that does not exist."""
    name = f"{Path(config).stem}-{now:%Y%m%d-%H%M%S}"
    candidates = [Path("runs") / name, *(Path("runs") / f"{name}-{n}" for n in range(2, 1000))]
    return next((path for path in candidates if not path.exists()), candidates[-1])


def _reason(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    filename = getattr(error, "filename", None)
    return f"{reason} ({filename})" if filename else reason


def _is_of_run(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, RecursionError), opened_file(path / RUN) as file:
        found = json.loads(file.read())
        return isinstance(found, dict) and "envmgr_run" in found
    return False


class RunLock:
    """A file in the folder of a run, locked by the process that writes there.

    The lock belongs to the process (`lockf`): it ends with the process, however that ends, and
    workers that were forked from it do not keep the lock. Within one process it keeps nobody out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: io.FileIO | None = None

    def take(self) -> bool:
        """Take the lock; return False if another process has it.

        Raises:
            OSError: the file cannot be written, or is not one of envmgr's.
        """
        while True:
            file = io.FileIO(self._path, "a", opener=_opened_for_lock)
            try:
                about = os.fstat(file.fileno())
                if about.st_size or not stat.S_ISREG(about.st_mode):
                    raise OSError(errno.EEXIST, f"its {LOCK} is none of envmgr's: rename that")
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            except BaseException:
                file.close()
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(about, os.stat(self._path)):
                    self._file = file
                    return True
            file.close()  # the one that had it removed the file meanwhile

    def release(self) -> None:
        """Remove the file and release the lock; idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None


def _opened_for_lock(path: str, flags: int) -> int:
    """Open the file of a lock for this user alone: whoever can read it can lock it, too."""
    flags |= os.O_NONBLOCK  # a pipe is not waited for
    return opened_itself(path, flags, 0o600)


def locked(path: Path) -> RunLock:
    """Lock the folder of a run against other writers.

    Raises:
        ConfigError: another process writes there, the folder cannot be written to, or it has files
            of others where envmgr's have to be.
    """
    lock = RunLock(path)
    try:
        is_ours = lock.take()
    except OSError as error:
        raise ConfigError(
            f"the folder {str(path)!r} cannot be written: {error.strerror}. Nothing was changed."
        ) from error
    if not is_ours:
        raise ConfigError(
            f"the run in {str(path)!r} is still going on{_process_of(path)}. End it first (Ctrl-C "
            "keeps what it has collected), or wait until it is done."
        )
    try:
        _refuse_process(path)
    except BaseException:
        lock.release()
        raise
    return lock


def _refuse_process(path: Path) -> None:
    """Refuse a `process.json` that a run may not replace, and remove at its end.

    Raises:
        ConfigError: it is not one of envmgr's, or names a process that is alive.
    """
    if not os.path.lexists(path / PROCESS):
        return
    try:
        facts = facts_in(path)
        pid, started, host = (facts[key] for key in ("pid", "started", "host"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the folder {str(path)!r} has a {PROCESS} that is none of envmgr's ({error!r}), and a "
            "run would replace it. Rename that, or name another folder."
        ) from error
    if host == socket.gethostname() and started is not None and start_of(pid) == started:
        raise ConfigError(
            f"the run in {str(path)!r} is still going on, as process {pid}. End it first (Ctrl-C "
            "keeps what it has collected), or wait until it is done."
        )


def _process_of(path: Path) -> str:
    try:
        return f", as process {facts_in(path)['pid']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
