"""Redirects a worker's output to a log file of its own, instead of the trainer's streams."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple


class LogFile(NamedTuple):
    """The worker that a log file belongs to.

    Attributes:
        host: index of the worker among the manager's hosts; its replacement has the same one.
        env_ids: the env_ids of its envs.
        generation: the highest generation of these envs when the worker is started.
    """

    host: int
    env_ids: Sequence[int]
    generation: int

    @property
    def name(self) -> str:
        """The name of the file, different for each worker of a launch."""
        first, last = self.env_ids[0], self.env_ids[-1]
        envs = f"env_{first}" if first == last else f"envs_{first}-{last}"
        return f"worker_{self.host}-{envs}-generation_{self.generation}.log"


def write_to_log_file(folder: str, file: LogFile) -> None:
    """Redirect the output and the logs of this process and its children to a file.

    What an earlier launch wrote there is kept. If logging is not set up, records of level INFO and
    above are written.

    Raises:
        OSError: the file cannot be opened.
    """
    path = os.path.join(folder, file.name)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(Exception):  # a stream that is closed
            getattr(sys, name).flush()
        os.dup2(fd, number)
        setattr(sys, name, _stream_of(number, name))
    if fd > 2:  # it may be that of a stream that was closed
        os.close(fd)
    if not logging.root.handlers:
        _log_unhandled_records()
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # the disk is full: no reason to end a worker
        print(f"--- {began}: process {os.getpid()}, {file.name}")


def _stream_of(number: int, name: str) -> object:
    """Return the existing stream if it has this fd, as others hold on to it; else a new one."""
    stream = getattr(sys, name)
    with contextlib.suppress(Exception):  # it has no fd, or is something else than Python makes
        if stream.fileno() == number:
            stream.reconfigure(line_buffering=True)
            return stream
    return open(
        number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _log_unhandled_records() -> None:
    """Have log records without a handler written; an env may still set logging up."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.lastResort = handler
    logging.root.setLevel(logging.INFO)
