"""Rendered frames: as PNG files, with nothing but the standard library, and as one tiled image."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.errors import ConfigError
from envmgr.spaces.reading import error_text, read_dict, read_list, short_text
from envmgr.whole_files import write_whole


def checked_frame(frame: Any) -> npt.NDArray[np.uint8]:
    """Return a frame as an array `(height, width, 3)` of uint8.

    Raises:
        ValueError: it has another shape or dtype.
    """
    image = np.ascontiguousarray(frame)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise ValueError(
            f"a frame should be an array (height, width, 3) of uint8, it has shape {image.shape} "
            f"and dtype {image.dtype}"
        )
    return image


def tile_images(
    images: Mapping[Any, Any] | Sequence[Any], columns: int | None = None
) -> npt.NDArray[Any]:
    """Return several images as one, arranged in rows from left to right.

    Example:
        >>> import numpy as np
        >>> from envmgr.env import tile_images
        >>> frames = {0: np.zeros((2, 3, 3), np.uint8), 1: np.ones((2, 3, 3), np.uint8)}
        >>> tile_images(frames).shape
        (2, 6, 3)

    Args:
        images: arrays `(height, width, channels)` or `(height, width)` of one dtype, or a dict of
            them, such as `manager.ready_imgs`, in its order. Smaller ones are padded with zeros.
        columns: number of images in a row; None: about as many as there are rows.

    Returns:
        `(rows * height, columns * width, channels)`, or without channels.

    Raises:
        ConfigError: there are no images, or they are not such arrays.
    """
    try:
        given: Any = read_dict(images).values() if isinstance(images, Mapping) else images
        arrays = [np.asarray(image) for image in read_list(given)]
    except Exception as error:  # whatever reading them raises
        reason = error_text(error)
        raise ConfigError(f"tile_images takes images, in a list or a dict, but {reason}") from error
    kinds = {(array.dtype, *array.shape[2:]) for array in arrays}
    if len(kinds) != 1 or any(array.ndim not in (2, 3) or not array.size for array in arrays):
        found = sorted({f"{array.dtype} {array.shape}" for array in arrays}) or short_text(images)
        raise ConfigError(
            "tile_images takes images (height, width, channels) of one dtype and number of "
            f"channels, found {found}. Of lists of frames, give one of each."
        )
    if columns is None:
        columns = math.ceil(math.sqrt(len(arrays)))
    if type(columns) is not int or columns < 1:
        raise ConfigError(f"columns is {short_text(columns)}, but must be a positive integer")
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    rows = -(-len(arrays) // columns)
    grid: npt.NDArray[Any] = np.zeros(
        (rows, columns, height, width, *arrays[0].shape[2:]), arrays[0].dtype
    )
    for place, array in enumerate(arrays):
        grid[place // columns, place % columns, : array.shape[0], : array.shape[1]] = array
    tall: npt.NDArray[Any] = grid.swapaxes(1, 2)
    return tall.reshape(rows * height, columns * width, *arrays[0].shape[2:])


def write_png(path: str, frame: Any) -> None:
    """Write a frame `(height, width, 3)` of uint8 as a PNG file, replacing the file atomically.

    Raises:
        ValueError: the frame has another shape or dtype.
    """
    image = checked_frame(frame)
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
    write_whole(path, data, survives=False)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
