"""Whether a module that the table of known packages names is the one that was installed as such.

The name alone says little: a file `ale_py.py` in the working directory, or beside a config from
somebody else, has the same name. A module that is imported because of the table has to be the one
that Python would find, and has to come from the place where the distribution of that name was
installed. Metadata of a distribution in the working directory or beside the config does not count.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from envmgr.config.known_envs import KnownPackage
from envmgr.errors import ConfigError, MissingDependencyError


def check_installed(known: KnownPackage, folders: Sequence[Path], name: object, key: str) -> None:
    """Refuse a package of the table that is not installed, or is hidden by something of its name.

    Nothing is imported.

    Args:
        known: the package.
        folders: folders whose contents do not count as installed.
        name: what the config says, for the message.
        key: the config key that says it, for the message.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: Python would import something else under the name of its module.
    """
    shown = f"{key} is {name!r}, which is of the package {known.distribution}"
    distribution = _distribution(known.distribution, folders)
    if distribution is None:
        raise MissingDependencyError(
            f"{shown}, and that is not installed. Install it: pip install {known.distribution}"
        )
    homes = homes_of(find(known.top))
    if not homes or not all(_belongs(home, distribution) for home in homes):
        where = " and ".join(f"in {home}" for home in homes) or "elsewhere, or nowhere"
        raise ConfigError(
            f"{shown}. That is installed, but Python finds the module {known.top!r} {where}. "
            f"Rename that file or folder, or allow it with --allow-import {known.top} or "
            f"load_config(..., allow_imports=[{known.top!r}])."
        )


def find(top: str) -> ModuleSpec | None:
    """Return where Python would take, or has taken, a top-level module from; nothing is run."""
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as `__main__`
        return None


def homes_of(spec: ModuleSpec | None) -> list[Path]:
    """Return the folders that a top-level module was found in."""
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or ())
    if not places and spec.has_location and spec.origin:
        places = [spec.origin]
    return [Path(place).absolute().parent.resolve() for place in places]


def _distribution(name: str, folders: Iterable[Path]) -> Distribution | None:
    path = [entry for entry in sys.path if Path(entry).resolve() not in folders]
    return next(iter(distributions(name=name, path=path)), None)


def _belongs(home: Path, distribution: Distribution) -> bool:
    if home == Path(str(distribution.locate_file(""))).resolve():
        return True
    project = _editable_project(distribution)  # its metadata are elsewhere, and name it
    return project is not None and home.is_relative_to(project)


def _editable_project(distribution: Distribution) -> Path | None:
    try:
        given = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not given["dir_info"]["editable"]:
            return None
        return Path(url2pathname(urlparse(given["url"]).path)).resolve()
    except (KeyError, TypeError, ValueError):
        return None
