"""What whoever runs config files allows them to do: three lists, in four places.

The lists have modules that files may have imported, keys that they may set to anything, and
environment variables that they may set in workers. They are given on the command line or in code,
and in two more places: environment variables (`ENVMGR_ALLOW_IMPORTS` and others), and the table
`[tool.envmgr]` in the `pyproject.toml` of the working directory. A `pyproject.toml` beside the
config file is never read, not even if that folder is the working directory: it may have come with
the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envmgr.config.checks import Check, check_value, list_of, named
from envmgr.config.field_checks import MODULE_NAME
from envmgr.config.schema import unknown_key
from envmgr.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same library, as a package of its own
    import tomli as tomllib


class _List(NamedTuple):
    """One of the lists, which `LISTS` has by its name in code and in `pyproject.toml`.

    Attributes:
        field: the field of `Allowed`.
        option: the option of the command line.
        variable: the environment variable.
        entry: the check of each entry.
    """

    field: str
    option: str
    variable: str
    entry: Check


_KEY_NAME = named(
    "a dotted key, such as ray.runtime_env",
    lambda name: len(name) < 200 and all(part.isidentifier() for part in name.split(".")),
)
_VARIABLE_NAME = named(
    "the name of an environment variable",
    lambda name: 0 < len(name) < 200 and not set(name) & set("=\0,* \t\n"),
)
LISTS: Mapping[str, _List] = {
    "allow_imports": _List("imports", "--allow-import", "ENVMGR_ALLOW_IMPORTS", MODULE_NAME),
    "allow": _List("keys", "--allow", "ENVMGR_ALLOW", _KEY_NAME),
    "allow_env": _List("env", "--allow-env", "ENVMGR_ALLOW_ENV", _VARIABLE_NAME),
}
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Allowed:
    """What config files may do; the lists are checked.

    Attributes:
        imports: modules, with those below them, that they may have imported.
        keys: keys that they may set to anything: `ray.runtime_env`, or with `manager.` before it.
        env: environment variables that they may set in workers.
    """

    imports: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    env: tuple[str, ...] = ()

    def __add__(self, other: Allowed) -> Allowed:
        """Return what either of the two allows."""
        return Allowed(
            *((*getattr(self, f.name), *getattr(other, f.name)) for f in dataclasses.fields(self))
        )


def plain_key(key: str) -> str:
    """Return a dotted key as the list of keys has it: a manager's key without `manager.`."""
    return key.removeprefix("manager.")


def ways_out(list_name: str, entry: str) -> str:
    """Return how to put an entry on one of the lists, for a message."""
    return (
        f"If you trust it, run with {LISTS[list_name].option} {entry}, pass load_config(..., "
        f"{list_name}=[{entry!r}]), or see docs/guide/configs.md for lasting ways."
    )


def allowed_by_user(config_folder: Path) -> Allowed:
    """Return what the variables and the working directory's `pyproject.toml` allow.

    Args:
        config_folder: the folder of the config, resolved; no file in it is read.

    Raises:
        ConfigError: one of them is malformed.
    """
    given = {}
    for name, one in LISTS.items():
        names = [part.strip() for part in os.environ.get(one.variable, "").split(",")]
        given[name] = [part for part in names if part]
    allowed = checked_lists(given, lambda name: f"${LISTS[name].variable}")
    with contextlib.suppress(OSError):  # no such file, or no working directory any more
        folder = Path.cwd().resolve()
        if folder != config_folder:
            return allowed + _of_project(folder / "pyproject.toml")
    return allowed


def checked_lists(given: Mapping[str, Any], shown: Callable[[str], str] = str) -> Allowed:
    """Return lists that are given by their names in `LISTS`, checked; None is an empty list.

    Args:
        given: some of the lists.
        shown: returns what a list is called in a message.

    Raises:
        ConfigError: one of them is not a list of names of its kind.
    """
    found = {}
    for name, one in LISTS.items():
        entries = () if given.get(name) is None else given[name]
        found[one.field] = check_value(list_of(one.entry), entries, shown(name))
    return Allowed(**found)


def _of_project(file: Path) -> Allowed:
    with file.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if b"envmgr" not in content:
        return Allowed()
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{file} is larger than {_MAX_BYTES} bytes. Is it a pyproject.toml?")
    try:
        tables: Any = tomllib.loads(content.decode())
        section = tables.get("tool", {}).get("envmgr", {})
        keys = [*section.keys()]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Correct it.") from error
    for key in keys:
        if key not in LISTS:
            raise unknown_key(key, LISTS, f"[tool.envmgr] of {file}")
    return checked_lists(section, lambda name: f"tool.envmgr.{name} of {file}")
