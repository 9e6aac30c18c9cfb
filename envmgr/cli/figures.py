"""Figures of a command in a file of their own, as JSON, and the versions that belong to them."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from envmgr import __version__
from envmgr.errors import ConfigError
from envmgr.hot import WHY
from envmgr.whole_files import write_whole

STDOUT = "-"


def try_to_write(path: str | None) -> None:
    """Find out before the work whether its figures can be written; see `refuse_unwritable`."""
    if path is not None and path != STDOUT:
        refuse_unwritable(path, "the figures", "--json")


def refuse_unwritable(path: str, what: str, option: str) -> None:
    """Find out before the work whether its result can be written. Leaves nothing behind.

    Args:
        path: path of the file, as `write_text` takes it.
        what: what is to be written, for the error.
        option: the option that names the file, for the error.

    Raises:
        ConfigError: the result cannot be written.
    """
    try:
        if os.path.isdir(path):
            raise IsADirectoryError("it is a folder")
        if _is_replaced(path):
            with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
                pass
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {path!r}: {error}. Name another file with {option}."
        ) from error


def write_text(path: str, text: str) -> None:
    """Write a file whole, following links; write to a pipe or the like as usual.

    Raises:
        OSError: it cannot be written.
    """
    if _is_replaced(path):
        write_whole(os.path.realpath(path), text.encode())
    else:
        Path(path).write_text(text, encoding="utf-8")


def _is_replaced(path: str) -> bool:
    """Return whether a new file replaces what is there; False for `/dev/stdout`, or a pipe."""
    return os.path.isfile(os.path.realpath(path)) or not os.path.exists(path)


def write_figures(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write figures at the end of a command; see `write_json`.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        write_json(path, figures)
    except OSError as error:
        raise ConfigError(f"the figures cannot be written to {path!r}: {error}") from error


def write_json(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write figures; None writes nothing, `-` to stdout. Numbers that are not finite are null.

    Raises:
        OSError: they cannot be written.
    """
    if path is None:
        return
    # Python reads and writes Infinity and NaN, which are not valid JSON.
    finite = json.loads(json.dumps(figures), parse_constant=lambda name: None)
    text = json.dumps(finite, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    write_text(path, text)


def versions() -> dict[str, str]:
    """Return the versions of envmgr, Python, numpy and gymnasium, and the platform.

    `hot` says whether the ordinary step in C is used, and if not, why.
    """
    return {
        "envmgr": __version__,
        "python": platform.python_version(),
        "numpy": _version_of("numpy"),
        "gymnasium": _version_of("gymnasium"),
        "platform": platform.platform(),
        "hot": WHY,
    }


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
