"""Whether a Ray cluster that is started on this machine asks whoever connects for a token."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version

_SINCE = (2, 59)
"""From this version on, clusters on one machine ask for tokens unless they are told not to."""


def lets_everybody_in() -> str | None:
    """Return the version of Ray that is installed, if a cluster that it starts asks for no token.

    The processes of a cluster listen on ports of all interfaces, and run code for whoever connects.
    """
    try:
        installed = version("ray")
    except PackageNotFoundError:  # nothing can be started
        return None
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None:
        return None if mode.lower() == "token" and _release(installed) >= (2, 52) else installed
    return None if _release(installed) >= _SINCE else installed


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
