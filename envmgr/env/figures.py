"""Writes rendered frames as PNG files, with nothing but the standard library."""

from __future__ import annotations

import os
import struct
import uuid
import zlib
from typing import Any

import numpy as np


def write_png(path: str, frame: Any) -> None:
    """Write a frame `(height, width, 3)` of uint8 as a PNG file, replacing the file at once.

    Raises:
        ValueError: the frame has another shape or dtype.
    """
    image = np.ascontiguousarray(frame)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise ValueError(
            f"a frame should be an array (height, width, 3) of uint8, it has shape {image.shape} "
            f"and dtype {image.dtype}"
        )
    height, width = image.shape[:2]
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row begins with its filter: 0
    rows[:, 1:] = image.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(rows.tobytes())),
            _chunk(b"IEND", b""),
        )
    )
    partial = f"{path}.{uuid.uuid4().hex}.part"
    with open(partial, "xb") as file:  # never through a link that somebody has put there
        file.write(data)
    os.replace(partial, path)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
