"""Packages that some features need, and that are imported when such a feature is used first."""

from __future__ import annotations

import importlib
from typing import Any

from envmgr.errors import MissingDependencyError

DISTRIBUTION = "rl-env-manager"
"""What pip calls this package; PyPI's `envmgr` is another project."""


def imported(module: str, needs: str, *, extra: str = "", note: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: its full name.
        needs: what needs which package: the beginning of the sentence that the error says.
        extra: the extra of envmgr that brings the package; else pip installs it by its own name.
        note: what else its user should know.

    Raises:
        MissingDependencyError: the package is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        how = f"Install it: pip install {name}"
        if extra:
            how = f"Install the extra {extra}: pip install '{DISTRIBUTION}[{extra}]'"
        raise MissingDependencyError(
            f"{needs}, which is not installed, or cannot be loaded ({error}). {how}{note}"
        ) from error
