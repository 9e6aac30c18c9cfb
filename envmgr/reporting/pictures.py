"""Videos and images in the folder of a run, for its page."""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from envmgr.untrusted import opened_file

KINDS = {".mp4": "video/mp4", ".png": "image/png"}
MOST_BYTES = 1 << 20
"""The most bytes, of all pictures together, that become part of the page."""

_MOST = 12
_MOST_LOOKED_AT = 10_000


@dataclass(frozen=True)
class Picture:
    """A file with a video or an image.

    Attributes:
        name: its path in the folder of the run.
        kind: its media type.
        data: its content as a `data:` URL; empty if it is too large for the page.
    """

    name: str
    kind: str
    data: str


def pictures_in(folder: Path, since_s: float | None = None) -> list[Picture]:
    """Return the newest videos and images in a folder, with the data of those that fit the page.

    Folders and files that are links are passed over, because only what the run has written is to be
    shown. Files that cannot be read, or have gone meanwhile, are passed over, too.

    Args:
        folder: the folder of the run.
        since_s: when the run was begun, in seconds since 1970, rounded down; older files are of
            another run. None shows all.
    """
    found: list[tuple[float, Path]] = []
    n = 0
    for root, _, names in os.walk(folder):
        for name in names:
            n += 1
            path = Path(root, name)
            if path.suffix.lower() not in KINDS:
                continue
            with contextlib.suppress(OSError):
                about = path.lstat()
                is_new = since_s is None or about.st_mtime >= since_s
                if stat.S_ISREG(about.st_mode) and is_new:
                    found.append((about.st_mtime, path))
        if n > _MOST_LOOKED_AT:
            break
    left = MOST_BYTES
    pictures: list[Picture] = []
    for _, path in sorted(found, reverse=True):
        if len(pictures) == _MOST:
            break
        try:
            with opened_file(path) as file:
                data = file.read(left + 1)
        except OSError:
            continue
        if len(data) > left:
            data = b""
        left -= len(data)
        kind = KINDS[path.suffix.lower()]
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}" if data else ""
        pictures.append(Picture(str(path.relative_to(folder)), kind, url))
    return pictures
