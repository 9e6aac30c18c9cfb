"""Figures of a command in a file of their own, as JSON, and the versions that belong to them."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from envmgr import __version__
from envmgr.errors import ConfigError
from envmgr.hot import WHY

STDOUT = "-"


def try_to_write(path: str | None) -> None:
    """Find out before the work whether its figures can be written.

    Raises:
        ConfigError: they cannot.
    """
    if path is None or path == STDOUT:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the figures cannot be written to {path!r}: {error}. Name another file with --json."
        ) from error


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
    """Write figures; None writes nothing, `-` to stdout. What is not finite is null there.

    Raises:
        OSError: they cannot be written.
    """
    if path is None:
        return
    # Python reads and writes Infinity and NaN, which are no JSON.
    finite = json.loads(json.dumps(figures), parse_constant=lambda name: None)
    text = json.dumps(finite, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def versions() -> dict[str, str]:
    """Return the versions of envmgr, Python, numpy and gymnasium, and the platform.

    `hot` says whether the ordinary step in C is used, and why not.
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
