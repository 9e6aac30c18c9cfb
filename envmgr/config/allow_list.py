"""What config files may import, as whoever runs them has said beside the command line and code.

There are two more places: the environment variable `ENVMGR_ALLOW_IMPORTS`, and the table
`[tool.envmgr]` in the `pyproject.toml` of the working directory. Never one beside the config file,
not even if that is the working directory: it may have come with the config.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envmgr.config.checks import check_value, list_of
from envmgr.config.field_checks import MODULE_NAME
from envmgr.config.schema import unknown_key
from envmgr.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same library, as a package of its own
    import tomli as tomllib

VARIABLE = "ENVMGR_ALLOW_IMPORTS"
KEY = "allow_imports"
_MAX_BYTES = 1 << 20


def checked_prefixes(allow_imports: Sequence[str] | None, where: str = KEY) -> tuple[str, ...]:
    """Return an allow-list as a tuple; None is the empty one.

    Raises:
        ConfigError: it is not a list of dotted module names.
    """
    given = () if allow_imports is None else allow_imports
    prefixes: tuple[str, ...] = check_value(list_of(MODULE_NAME), given, where)
    return prefixes


def allowed_by_user(config_folder: Path) -> tuple[str, ...]:
    """Return what the variable and the working directory's `pyproject.toml` allow.

    Args:
        config_folder: resolved; no file in it is read.

    Raises:
        ConfigError: one of them is malformed.
    """
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    allowed = checked_prefixes([name for name in named if name], f"${VARIABLE}")
    with contextlib.suppress(OSError):  # no such file, or no working directory any more
        folder = Path.cwd().resolve()
        if folder != config_folder:
            return (*allowed, *_of_project(folder / "pyproject.toml"))
    return allowed


def _of_project(file: Path) -> tuple[str, ...]:
    with file.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if b"envmgr" not in content:
        return ()
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{file} is larger than {_MAX_BYTES} bytes. Is it a pyproject.toml?")
    try:
        tables: Any = tomllib.loads(content.decode())
        section = tables.get("tool", {}).get("envmgr", {})
        keys = [*section.keys()]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Correct it.") from error
    for key in keys:
        if key != KEY:
            raise unknown_key(key, [KEY], f"[tool.envmgr] of {file}")
    return checked_prefixes(section.get(KEY), f"tool.envmgr.{KEY} of {file}")
