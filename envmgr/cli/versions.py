"""Versions of what a run depends on."""

from __future__ import annotations

import platform
from importlib import metadata

from envmgr import __version__
from envmgr.hot import WHY


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
