"""Ray itself, which is imported when it is needed first."""

from __future__ import annotations

import importlib.util
from typing import Any

from envmgr.errors import MissingDependencyError
from envmgr.optional_packages import imported


def refuse_without_ray() -> None:
    """Refuse to go on where Ray is not installed; does not import it.

    Raises:
        MissingDependencyError: it is not.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a mere folder of that name, as Ray leaves in /tmp
        raise MissingDependencyError(
            "type: ray needs the package ray. Install the extra ray, in a clone of this project "
            "with: pip install '.[ray]'"
        )


def imported_ray() -> Any:
    """Return the package.

    Raises:
        MissingDependencyError: it is not installed, or cannot be imported.
    """
    refuse_without_ray()
    return imported("ray", "type: ray needs the package ray", extra="ray")
