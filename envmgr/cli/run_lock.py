"""The lock of a run's folder: who writes there, as long as its process lives."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

fcntl: Any = None if sys.platform == "win32" else importlib.import_module("fcntl")

LOCK = "run.lock"


class RunLock:
    """A file in the folder of a run, locked by the process that writes there.

    The lock is that of the process (`lockf`): it goes with it, however it ends, and workers that
    were forked from it do not keep it. Within one process it keeps nobody out.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: io.FileIO | None = None

    def take(self) -> bool:
        """Take the lock; False if another process has it.

        Raises:
            OSError: the file cannot be written.
        """
        if fcntl is None:
            return True
        while True:
            file = io.FileIO(self._path, "a")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            except BaseException:
                file.close()
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    self._file = file
                    return True
            file.close()  # the one that had it removed the file meanwhile

    def release(self) -> None:
        """Remove the file and let go of it; idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None
