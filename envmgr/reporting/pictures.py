"""Videos and images in the folder of a run, for its page."""

from __future__ import annotations

import base64
import heapq
import os
from dataclasses import dataclass
from pathlib import Path

KINDS = {".mp4": "video/mp4", ".png": "image/png"}
MOST_BYTES = 1 << 20
"""Of all that becomes part of the page."""

_MOST = 12
_MOST_LOOKED_AT = 10_000


@dataclass(frozen=True)
class Picture:
    """A file with a video or an image.

    Attributes:
        name: its path in the folder of the run.
        kind: its media type.
        data: what is in it, as the URL of that; empty if it is too large for the page.
    """

    name: str
    kind: str
    data: str


def pictures_in(folder: Path, since_s: float | None = None) -> list[Picture]:
    """Return the newest videos and images in a folder, with as many of them as the page can hold.

    Folders and files that are links are passed over: what is shown is what the run has written.

    Args:
        folder: of the run.
        since_s: when the run was begun, in seconds since 1970, rounded down; what is older is of
            another one. None shows all.
    """
    found: list[tuple[float, Path]] = []
    n = 0
    for root, _, names in os.walk(folder):
        for name in names:
            n += 1
            path = Path(root, name)
            if path.suffix.lower() in KINDS and not path.is_symlink() and path.is_file():
                changed_s = path.stat().st_mtime
                if since_s is None or changed_s >= since_s:
                    found.append((changed_s, path))
        if n > _MOST_LOOKED_AT:
            break
    left, pictures = MOST_BYTES, []
    for _, path in heapq.nlargest(_MOST, found):
        data = b""
        if path.stat().st_size <= left:
            data = path.read_bytes()[: left + 1]
        left -= len(data)
        kind = KINDS[path.suffix.lower()]
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}" if data else ""
        pictures.append(Picture(str(path.relative_to(folder)), kind, url))
    return pictures
