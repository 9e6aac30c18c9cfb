"""The ordinary step in C: `envmgr._hot`, and whether it is used.

The module is optional. Where it is missing, Python does everything that it does: without a compiler
at installation, on free-threaded builds, or where `ENVMGR_PURE=1` leaves it out. Code with a fast
path in C looks at `hot`, and takes its path in Python if that is None.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

ABI = 11
"""The version of the interface between the two sides; `_hot.c` has the same."""

PURE = "ENVMGR_PURE"
"""If this environment variable is set to anything but 0, Python does everything."""


def _imported() -> tuple[ModuleType | None, str]:
    """Return the module, or None, and whether it is used, or why not."""
    if os.environ.get(PURE, "0") not in ("", "0"):
        return None, f"left out: {PURE} is set"
    # In a checkout, both of these Pythons would find a module that another Python has compiled,
    # which fits neither of them.
    if sys.hexversion < 0x030B0000:
        return None, "not there: it needs Python 3.11"
    if "t" in getattr(sys, "abiflags", ""):
        return None, "not there: free-threaded Pythons have no stable ABI"
    try:
        module = importlib.import_module("envmgr._hot")
    except ImportError as error:
        return None, f"not there: {' '.join(str(error).split())}"
    found = getattr(module, "ABI", None)
    if found != ABI:
        why = f"it is of version {found}, this envmgr needs {ABI}"
        warnings.warn(
            f"envmgr._hot is not used: {why}. It was compiled for another version of envmgr: "
            "install envmgr again (pip install -e . in a checkout)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, f"not used: {why}"
    return module, "used"


_found = _imported()

hot: Any = _found[0]
"""The module; None where Python does everything."""

WHY: str = _found[1]
"""Whether the module is used, or why not: for `envmgr --version` and `stats()`."""
