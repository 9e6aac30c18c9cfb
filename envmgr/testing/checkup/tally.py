"""A count of the steps that probes take, even in processes that die: in a file that all map."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_COUNT = struct.Struct("<q")


class Tally:
    """A number that processes on this machine add to, one of them at a time.

    Args:
        path: the path of its file; None makes a new file, which `close` removes.
    """

    def __init__(self, path: str | None = None) -> None:
        self._is_own = path is None
        if path is None:
            handle, path = tempfile.mkstemp(prefix="envmgr-check-")
            os.write(handle, bytes(_COUNT.size))
            os.close(handle)
        self.path = path
        with open(path, "r+b") as file:
            self._area = mmap.mmap(file.fileno(), _COUNT.size)

    @property
    def n(self) -> int:
        """The count so far."""
        return int(_COUNT.unpack_from(self._area)[0])

    def add_one(self) -> None:
        """Count one more."""
        _COUNT.pack_into(self._area, 0, self.n + 1)

    def close(self) -> None:
        """Release the file."""
        self._area.close()
        if self._is_own:
            os.unlink(self.path)
