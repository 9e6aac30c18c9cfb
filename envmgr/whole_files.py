"""Files that a reader, and a crash, find whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(
    path: str | os.PathLike[str], *parts: bytes, mode: int = 0o666, survives: bool = True
) -> None:
    """Write a file, or replace it, at once.

    Args:
        path: of the file.
        *parts: what is to be in it.
        mode: its permissions, less the umask.
        survives: on disk when this returns, also if the machine fails then.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        # Exclusively: whatever is there already, such as a link to somewhere else, is not written.
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as file:
            file.writelines(parts)
            file.flush()
            if survives:
                os.fsync(fd)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if survives:
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Have the new name on disk too, where folders can be synced."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
