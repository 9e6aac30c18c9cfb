"""Paths that a config file names: none of them leads out of the working directory.

A config may come from anywhere, and its results are written with the rights of whoever runs it. So
what a file names has to be below the working directory, where the results of runs go by default;
symbolic links are followed to see where it leads. Whoever runs it may name any other place, on the
command line or in code.
"""

from __future__ import annotations

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
    try:
        home = Path.cwd().resolve()
        target = (home / Path(path).expanduser()).resolve()
        if any(part.is_symlink() for part in (target, *target.parents)):
            raise OSError("there is a loop of symbolic links")  # Python 3.13 does not say so
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, a NUL in it
        raise ConfigError(f"{shown}, which cannot be looked up: {error}. Name another.") from error
    if ".." in Path(path).parts or not target.is_relative_to(home):
        raise ConfigError(
            f"{shown}, which leads to {target}; a config file may name folders below the working "
            f"directory {home} only. {instead}"
        )


def check_wrapper_paths(wrapper: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Refuse arguments of a wrapper from a config file that have it write elsewhere.

    Of gymnasium's wrappers, `RecordVideo` writes files. Wrappers of allowed modules of others are
    trusted as these modules are.

    Raises:
        ConfigError: as `check_confined`.
    """
    kinds = getattr(wrapper, "__mro__", ())
    if not any(k.__name__ == "RecordVideo" and _is_gymnasiums(k) for k in kinds):
        return
    instead = "Call enable_save_replay in code for other places."
    check_confined(kwargs.get("video_folder"), f"{key}.kwargs.video_folder", instead)
    prefix = kwargs.get("name_prefix", "")
    if not isinstance(prefix, str) or any(mark in prefix for mark in "/\\\0"):
        raise ConfigError(
            f"{key}.kwargs.name_prefix is {show_value(prefix)}, but must be the beginning of a "
            "file's name, without a path."
        )


def _is_gymnasiums(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "gymnasium"
