"""Paths that a config file names: none of them leads out of the working directory.

A config may come from anywhere, and its results are written with the rights of whoever runs it. So
what a file names has to be below the working directory, where the results of runs go by default,
and not hidden there. The text of a path is checked first: a path that leads elsewhere by its text
is not looked up. Then symbolic links are followed to see where it leads. Whoever runs the config
may name any other place, on the command line or in code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envmgr.config.checks import show_value
from envmgr.errors import ConfigError


def check_confined(path: object, key: str, instead: str) -> None:
    """Refuse a path of a config file that leads out of the working directory.

    Args:
        path: what the file says.
        key: the config key, for the message.
        instead: what to do instead, for the message.

    Raises:
        ConfigError: it leads elsewhere, or is no path.
    """
    shown = f"{key} is {show_value(path)}"
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{shown}, which is not a path. Name a folder below the present one.")
    text = _refuse_text_that_leads_out(path, shown, instead)
    try:
        home = Path.cwd().resolve()
        target = (home / text).resolve()
        if any(part.is_symlink() for part in (target, *target.parents)):
            raise OSError("there is a loop of symbolic links")  # Python 3.13 does not say so
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, a NUL in it
        raise ConfigError(f"{shown}, which cannot be looked up: {error}. Name another.") from error
    if not target.is_relative_to(home):
        raise _leads_out(shown, target, home, instead)
    if any(part.startswith(".") for part in target.relative_to(home).parts):
        raise ConfigError(
            f"{shown}, which leads to {target}; a config file may name no hidden folders or files, "
            f"since programs keep what they run and obey in those. {instead}"
        )


def _refuse_text_that_leads_out(path: str, shown: str, instead: str) -> str:
    """Refuse a path whose text leads out, and return it with the user's home filled in.

    Nothing is looked up for that: to look for `/net/host/x` can mount what `host` has, and to look
    for `~name` asks a directory service.

    Raises:
        ConfigError: it leads out.
    """
    first = Path(path).parts[:1]  # also of `./~name`, which `Path` takes for `~name`
    if "".join(first).startswith("~") and path.partition("/")[0] != "~":
        raise ConfigError(
            f"{shown}, which names the home of a user; a config file may name folders below the "
            f"working directory only. {instead}"
        )
    text = os.path.expanduser(path)
    try:
        homes = [os.getcwd()]
    except OSError as error:
        raise ConfigError(f"{shown}, but there is no working directory: {error}.") from error
    with contextlib.suppress(OSError, ValueError):  # as the user sees it, through links
        if os.path.samefile(logical := os.environ.get("PWD", ""), homes[0]):
            homes.append(logical)
    target = Path(os.path.normpath(os.path.join(homes[0], text)))
    if ".." in Path(text).parts or not any(map(target.is_relative_to, homes)):
        raise _leads_out(shown, target, homes[0], instead)
    return text


def _leads_out(shown: str, target: object, home: object, instead: str) -> ConfigError:
    return ConfigError(
        f"{shown}, which leads to {target}; a config file may name folders below the working "
        f"directory {home} only. {instead}"
    )


def check_output(path: object) -> None:
    """Refuse a `collect.output` of a config file that leads out of the working directory.

    Raises:
        ConfigError: it leads elsewhere, or is no path.
    """
    check_confined(path, "collect.output", "Name that folder with --output on the command line.")


_PLACES = {
    ("gymnasium", "RecordVideo"): "video_folder",
    ("envmgr", "FaultyEnv"): "folder",
}
"""Those classes that any file may name and that write, with the argument that says where."""


def check_places(found: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Refuse arguments of an env or a wrapper from a config file that make it write elsewhere.

    This is about gymnasium's and envmgr's own classes. Those of other allowed modules are trusted
    as the modules are.

    Raises:
        ConfigError: as `check_confined`; or a part of a file's name has a path in it.
    """
    kinds = getattr(found, "__mro__", ())
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in kinds}
    for name, argument in _PLACES.items():
        if name in names and argument in kwargs:
            instead = "Name other places with --set, or in code."
            check_confined(kwargs[argument], f"{key}.{argument}", instead)
    prefix = kwargs.get("name_prefix", "")
    is_written = ("gymnasium", "RecordVideo") in names
    if is_written and (not isinstance(prefix, str) or any(mark in prefix for mark in "/\\\0")):
        raise ConfigError(
            f"{key}.name_prefix is {show_value(prefix)}, but must be the beginning of a "
            "file's name, without a path."
        )
    if ("envmgr", "FaultyEnv") in names and "env_id" in kwargs:
        env_id = kwargs["env_id"]
        if type(env_id) is not int:
            raise ConfigError(
                f"{key}.env_id is {show_value(env_id)}, but must be an integer: it becomes part of "
                "a file's name."
            )


_BEGINNING = b'{"traceEvents":['
"""The beginning of a timeline."""

BEGINNING_OF_LINES = b'{"envmgr_log":1,'
"""The beginning of each line of an episode log."""


def check_timeline(path: object, key: str, instead: str) -> None:
    """Refuse a file, named in a config file, that is no place for a timeline.

    An existing file is replaced, and its name could be one that has a meaning to somebody: so the
    name has to end with `.json`, and an existing file has to be a timeline.

    Raises:
        ConfigError: as `check_confined`; or the file is no place for a timeline.
    """
    file = _confined_file(path, key, ".json", instead)
    if not _begins(file, _BEGINNING, key):
        raise ConfigError(
            f"{key} is {show_value(path)}, which is there and is no timeline; a config file may "
            f"replace nothing else. Name another. {instead}"
        )


def check_log(path: object, key: str, instead: str) -> None:
    """Refuse a file, named in a config file, that is no place for an episode log.

    Lines are appended to an existing file: so the name has to end with `.jsonl`, and an existing
    file has to be empty or an episode log.

    Raises:
        ConfigError: as `check_confined`; or the file is no place for an episode log.
    """
    file = _confined_file(path, key, ".jsonl", instead)
    if not _begins(file, BEGINNING_OF_LINES, key, or_is_empty=True):
        raise ConfigError(
            f"{key} is {show_value(path)}, which is there and is no episode log; a config file may "
            f"have nothing else appended to. Name another. {instead}"
        )


def _confined_file(path: object, key: str, suffix: str, instead: str) -> Path:
    check_confined(path, key, instead)
    file = Path(str(path)).expanduser()
    if file.suffix != suffix:
        raise ConfigError(
            f"{key} is {show_value(path)}, but a config file may name only a file that ends with "
            f"{suffix}. {instead}"
        )
    return file


def _begins(file: Path, beginning: bytes, key: str, *, or_is_empty: bool = False) -> bool:
    """Return whether a file does not exist, begins with `beginning`, or is empty if it may be."""
    try:
        if not os.path.lexists(file):
            return True
        if not file.is_file():  # a pipe, say, which is not to be waited for
            return False
        with file.open("rb") as stream:
            found = stream.read(len(beginning))
    except OSError as error:
        shown = f"{key} is {show_value(str(file))}"
        raise ConfigError(f"{shown}, which cannot be read: {error}. Name another.") from error
    return found == beginning or (or_is_empty and not found)
