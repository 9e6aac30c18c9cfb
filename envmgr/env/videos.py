"""Videos of episodes, as MP4 files that get their names only when they are complete.

A video is written frame by frame into a file that ends in `.part`, locked for as long as its writer
lives, and gets its name when it is complete. A file that a crash leaves behind is locked by nobody.
So it can be recognised, whoever else records into the same folder, and is removed when recording
begins there again.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

from envmgr.env.figures import checked_frame
from envmgr.optional_packages import imported
from envmgr.untrusted import opened_file

PART = ".mp4.part"
_SETTINGS = {"preset": "veryfast", "crf": "23", "rc-lookahead": "10", "threads": "1"}
_NUMBERED = re.compile(r"-episode_(\d+)\.mp4$")


def import_av() -> Any:
    """Return PyAV, which brings its own encoder.

    Raises:
        MissingDependencyError: it is not installed.
    """
    return imported("av", "recording videos needs PyAV", extra="video", note=". On PyPI it is av")


class Video:
    """A video that is being written.

    Args:
        folder: the folder to write it into, which exists.
        fps: frames per second.

    Raises:
        MissingDependencyError: PyAV is not installed.
        OSError: no file can be made there.
    """

    def __init__(self, folder: str, fps: float) -> None:
        self._av = import_av()
        self._folder = folder
        self._fps = Fraction(fps).limit_denominator(1001)
        self._part, self._file = _opened_part(folder)
        self._stream: Any = None
        self._shape: tuple[int, ...] = ()
        self._container: Any = None
        try:
            with self._as_os_errors():
                self._container = self._av.open(self._file, "w", format="mp4")
        except BaseException:
            self.discard()
            raise

    def add(self, frame: Any) -> None:
        """Append a frame `(height, width, 3)` of uint8.

        Raises:
            ValueError: it has another shape or dtype, or not the shape of the frames before.
            OSError: it cannot be written.
        """
        image = checked_frame(frame)
        height, width = image.shape[:2]
        if self._stream is None:
            self._shape = image.shape
            self._stream = self._container.add_stream("libx264", self._fps, options=_SETTINGS)
            # H.264 has one colour for two by two pixels, so an odd edge is left out.
            self._stream.width, self._stream.height = max(width & ~1, 2), max(height & ~1, 2)
            self._stream.pix_fmt = "yuv420p"
        if image.shape != self._shape:
            raise ValueError(
                f"the frames of an episode should be alike, but after frames of shape "
                f"{self._shape} there is one of shape {image.shape}"
            )
        if height & 1 or width & 1:
            image = _even(image)
        picture = self._av.VideoFrame.from_ndarray(image, format="rgb24")
        with self._as_os_errors():
            self._container.mux(self._stream.encode(picture))

    def finish(self, stem: str, first: int = 0) -> tuple[str, int]:
        """Complete the file and give it the first name that is free.

        Args:
            stem: what the name begins with.
            first: the first number to try.

        Returns:
            The path `<folder>/<stem>-episode_<number>.mp4`, and the number.

        Raises:
            OSError: the video cannot be written; it is discarded.
        """
        try:
            with self._as_os_errors():
                if self._stream is not None:
                    self._container.mux(self._stream.encode(None))
                self._container.close()
                self._file.flush()
            for number in itertools.count(first):
                path = os.path.join(self._folder, f"{stem}-episode_{number:06d}.mp4")
                if _has_named(self._part, path):
                    return path, number
        finally:
            self.discard()
        raise AssertionError  # numbers do not end

    def discard(self) -> None:
        """Close the video; if it was not finished, its file is removed."""
        with contextlib.suppress(Exception):  # it may be broken, or on a disk that is full
            self._container.close()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):  # it has got its name
            os.unlink(self._part)

    @contextlib.contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._av.error.FFmpegError as error:
            raise OSError(f"the video cannot be written: {error}") from error


def next_number(folder: str, stem: str) -> int:
    """Return the number after those of all videos in a folder whose names begin with `stem`."""
    numbers = (
        int(found[1])
        for name in _names(folder)
        if name.startswith(f"{stem}-") and (found := _NUMBERED.search(name))
    )
    return max(numbers, default=-1) + 1


def sweep(folders: Iterable[str]) -> None:
    """Remove incomplete videos that were left in folders by writers that are gone."""
    for folder in set(folders):
        for name in _names(folder):
            if name.endswith(PART):
                with contextlib.suppress(OSError):  # somebody's who is alive, or removed already
                    _remove_abandoned(os.path.join(folder, name))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # there is none
        return []


def _remove_abandoned(path: str) -> None:
    with opened_file(Path(path)) as file:  # a link or a pipe is of nobody who records
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


def _opened_part(folder: str) -> tuple[str, IO[bytes]]:
    """Return the path of a new file and the file, which is locked as long as it is open."""
    for path in _new_paths(folder):
        file = open(path, "xb")  # noqa: SIM115 - closed by the video
        with contextlib.suppress(OSError):  # a file system without locks: nobody can sweep it
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # somebody has swept it before it was locked
    raise AssertionError  # paths do not end


def _new_paths(folder: str) -> Iterator[str]:
    while True:
        yield os.path.join(folder, f".{uuid.uuid4().hex}{PART}")


def _has_named(part: str, path: str) -> bool:
    """Give a complete file its name; return False if the name is taken."""
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if os.path.exists(path):
            return False
        os.rename(part, path)
    return True


def _even(image: Any) -> Any:
    """Return an image without its odd edges; a single row or column is doubled."""
    for axis in (0, 1):
        if image.shape[axis] == 1:
            image = image.repeat(2, axis)
    return image[: image.shape[0] & ~1, : image.shape[1] & ~1]
