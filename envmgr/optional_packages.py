"""Optional packages, which are imported when a feature that needs them is first used."""

from __future__ import annotations

import importlib
import shlex
from typing import Any

from envmgr.errors import MissingDependencyError

DISTRIBUTION = "rl-env-manager"
"""What pip calls this package; PyPI's `envmgr` is another project."""


def imported(module: str, needs: str, *, extra: str = "", note: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: the module's full name.
        needs: what needs which package: the beginning of the error's sentence.
        extra: the extra of envmgr that installs the package; if it is empty, pip installs the
            package by its own name.
        note: what else the user should know, for the end of the message.

    Raises:
        MissingDependencyError: the package is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise missing(needs, error, package=package, extra=extra, note=note) from error


def missing(
    needs: str, error: ImportError | str, *, package: str = "", extra: str = "", note: str = ""
) -> MissingDependencyError:
    """Return the error for an optional package that cannot be imported.

    Args:
        needs: what needs which package: the beginning of the error's sentence.
        error: why it cannot be imported.
        package: what pip is to install if there is no extra, such as "tianshou>=2.0".
        extra: the extra of envmgr that installs the package.
        note: what else the user should know, for the end of the message.
    """
    how = f"Install it: pip install {shlex.quote(package)}"
    if extra:
        how = f"Install the extra {extra}: pip install '{DISTRIBUTION}[{extra}]'"
    return MissingDependencyError(
        f"{needs}, which is not installed, or cannot be loaded ({error}). {how}{note}"
    )


def own_part(module: str, needs: str) -> Any:
    """Import a module of a package at the edge of envmgr, which may have been left out.

    Args:
        module: the module's name below envmgr.
        needs: what needs the module.

    Raises:
        MissingDependencyError: the package is missing.
    """
    try:
        return importlib.import_module(f"envmgr.{module}")
    except ModuleNotFoundError as error:
        refuse_without_own(error, needs)
        raise


def refuse_without_own(error: ModuleNotFoundError, needs: str) -> None:
    """Raise if what could not be imported is a package of envmgr.

    Raises:
        MissingDependencyError: it is such a package.
    """
    if (error.name or "").startswith("envmgr."):
        raise MissingDependencyError(
            f"{needs} needs the package {error.name}, which this installation of envmgr lacks. "
            f"Install all of it: pip install --force-reinstall {DISTRIBUTION}"
        ) from error
