"""The error that adapters raise when a trainer is not installed, or too old."""

from __future__ import annotations

from envmgr.errors import MissingDependencyError


def missing(adapter: str, requirement: str, error: BaseException | str) -> MissingDependencyError:
    """Return the error for an adapter whose trainer cannot be imported.

    Args:
        adapter: the module that is imported, such as "envmgr.adapters.sb3".
        requirement: what pip is to install, such as "stable-baselines3>=2.3".
        error: why it cannot be imported.
    """
    return MissingDependencyError(
        f"{adapter} needs {requirement}, which is not installed or not complete ({error}). "
        f"Install it: pip install '{requirement}'"
    )
