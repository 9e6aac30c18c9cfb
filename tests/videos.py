"""Reads videos."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest


def frames_of(path: Path, pixel_format: str) -> list[Any]:
    """Return the frames of a video as arrays.

    They are decoded in a thread that ends. PyAV 19 keeps a converter for each thread, with threads
    that Python does not know. A process that is forked by another thread frees it, and waits for
    these, which it does not have: it hangs for ever.
    """
    av = pytest.importorskip("av")

    def decode() -> list[Any]:
        with av.open(str(path)) as container:
            return [frame.to_ndarray(format=pixel_format) for frame in container.decode(video=0)]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(decode).result()
