"""Files that a reader finds whole or not at all, also after a crash."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(
    path: str | os.PathLike[str], *parts: bytes, mode: int = 0o666, survives: bool = True
) -> None:
    """Write or replace a file atomically.

    Args:
        path: the file.
        *parts: its content.
        mode: its permissions, less the umask.
        survives: whether it is on disk when this returns, even if the machine fails then.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        # With O_EXCL, nothing that is there already, such as a link elsewhere, is written to.
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
    """Bring a new name in a folder onto the disk, too, where folders can be synced."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
