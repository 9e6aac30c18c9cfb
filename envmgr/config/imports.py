"""What a config file may do; importing what a config names, within an allow-list for files.

A config given by code is trusted: it imports what it names. A config file is not, since naming a
module runs its code. What a file names is imported only when its module is

* in the allow-list, which is given by code (`load_config(..., allow_imports=["my_pkg"])`), by the
  command line (`--allow-import my_pkg`) or by the user's surroundings (`allow_list`), never by the
  file: `my_pkg` allows `my_pkg` and `my_pkg.*`;
* part of gymnasium (environment and wrapper classes) or of envmgr's own envs and policies;
* in the table of well-known packages (`known_envs`), and installed as such a package: these may be
  imported for the envs that they register. The table also says which arguments the envs may be
  given;
* found in the config file's own folder or in the current working directory, so that users' own
  configs run their own code without further ado; but not in the folder of a run that is resumed.
  Such a folder is appended to `sys.path`, once, and stays there, because workers import the module
  as well and get the `sys.path` of their parent. Appended, it shadows nothing: where Python would
  find another module of that name first, the import is refused. (Modules of `import_names` and
  `preload` have to be in the list, too, wherever they are.)

The module is checked before it is imported, and the object it gave afterwards: `logging:os.system`
names a function of `os`, whatever module it was reached through. Of gymnasium and of envmgr only
classes of envs, wrappers and policies pass: their functions would import, or kill, what they are
given. And no attribute of any other module is looked up on the way, since some modules import their
parts when asked for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from envmgr.config.allow_list import (
    Allowed,
    allowed_by_user,
    checked_lists,
    plain_key,
    ways_out,
)
from envmgr.config.checks import check_value, nearest, show_value
from envmgr.config.field_checks import MODULE_NAME, OBJECT_PATH
from envmgr.config.installed import check_installed, find, homes_of
from envmgr.config.known_envs import (
    CLASS_MODULES,
    KnownPackage,
    package_of_classes,
    package_of_module,
)
from envmgr.errors import ConfigError

OWN_MODULES = ("envmgr.testing", "envmgr.env", "envmgr.collect")
"""Modules of envmgr whose envs and policies a config file may name without an allow-list."""

_POLICIES = "envmgr.collect.policies"

_OF_CLASSES = ("gymnasium", *OWN_MODULES, *CLASS_MODULES)
"""Modules whose classes of envs and wrappers a file may name."""


@dataclass(frozen=True)
class FilePolicy(Allowed):
    """What one config file may do: what all config files may, and what its place allows.

    Attributes:
        folders: folders whose own modules are allowed.
        run: folder of a run that is resumed; its modules are not allowed, wherever it is.
    """

    folders: tuple[Path, ...] = ()
    run: Path | None = None

    @property
    def places(self) -> tuple[Path, ...]:
        """Folders whose modules and metadata do not count as installed."""
        return self.folders if self.run is None else (*self.folders, self.run)

    def allows(self, module: str) -> bool:
        """Return whether the list of modules has a module, or one that it is part of."""
        return _within(module, self.imports)

    def admit_key(self, key: str, value: object, why: str) -> None:
        """Refuse to let the file set a key that is not in the list of keys.

        Args:
            key: the key's dotted path.
            value: what the file says.
            why: why the file may not set it, to follow the value in the message.

        Raises:
            ConfigError: the key is not in the list; the message says what would allow it.
        """
        plain = plain_key(key)
        if plain not in map(plain_key, self.keys):
            raise ConfigError(
                f"{key} is {show_value(value)} in a config file, {why}. "
                f"{ways_out('allow', plain)} Or say it yourself: --set {key}=..."
            )

    def refused_variable(self, key: str, name: str, value: object, why: str) -> ConfigError:
        """Return the error for a variable that the file may not set, or not to that value."""
        return ConfigError(
            f"{key} is {show_value(value)}, but {why}. {ways_out('allow_env', name)}"
        )

    def admit_module(self, module: str, name: str, key: str, *, registers: bool = False) -> None:
        """Refuse a module that is not allowed; nothing is imported.

        With `registers` the import itself is all that the config asks for.

        Raises:
            ConfigError: the module is not allowed; the message says what would allow it.
            MissingDependencyError: it is of a known package that is not installed.
        """
        top, is_listed = module.partition(".")[0], self.allows(module)
        if _within(module, ("gymnasium", *OWN_MODULES)):
            return
        if is_listed and (top in sys.modules or find(top) is not None):
            return
        for folder in self.folders:  # a module in the list may be there as well as any other
            if _is_found_in(folder, top):
                _make_importable(folder, top, key)
                return
        if is_listed:  # the import says that there is none
            return
        known = package_of_module(module) if registers else package_of_classes(module)
        if known is None:
            self._refuse_missing(top, name, key)
            raise self._refusal(module, name, key)
        check_installed(known, self.places, name, key)

    def admit_registering(self, module: str, name: str, key: str) -> None:
        """Refuse to import a module for what it registers unless it is allowed for that.

        Modules in the folders have to be listed, too; then they are found there.

        Raises:
            ConfigError: the module is not allowed; the message says what would allow it.
            MissingDependencyError: it is of a known package that is not installed.
        """
        if self.allows(module) or _within(module, ("gymnasium", *OWN_MODULES)):
            self.admit_module(module, name, key)
            return
        known = package_of_module(module)
        if known is None:
            self._refuse_missing(module.partition(".")[0], name, key)
            raise FilePolicy(self.imports)._refusal(module, name, key)
        check_installed(known, self.places, name, key)

    def admit_arguments(
        self, known: KnownPackage, given: Iterable[str], name: str, key: str = "env.kwargs"
    ) -> None:
        """Refuse arguments from a file for an env that may do anything with them.

        Raises:
            ConfigError: they are not allowed; the message says what would allow them.
        """
        refused = sorted(set(given) - {"render_mode"})
        if known.plain_arguments or not refused or self._is_trusted(known.module):
            return
        raise ConfigError(
            f"env.id is {name!r}, and {key} has {', '.join(refused)}; but arguments of the "
            f"envs of {known.distribution} can name code, programs or files to write, so a config "
            f"file gives them none but render_mode. {ways_out('allow_imports', known.top)} "
            f"Or say them yourself: --set {key}.{refused[0]}=..."
        )

    def admit_object(self, found: Any, name: str, key: str) -> None:
        """Refuse an object that belongs to a module that is not allowed.

        Raises:
            ConfigError: the module is not allowed; the message says what would allow it.
        """
        module = module_of(found)
        if self._is_trusted(module) or _is_env_class(found) or _is_own_policy(found):
            return
        raise self._refusal(module, name, key)

    def admit_step(self, owner: Any, name: str, key: str) -> None:
        """Refuse to look for an attribute in a module that is not allowed.

        Raises:
            ConfigError: the module is not allowed; the message says what would allow it.
        """
        if isinstance(owner, ModuleType):
            module = owner.__name__
            if not self._is_trusted(module) and not _within(module, _OF_CLASSES):
                raise self._refusal(module, name, key)

    def _is_trusted(self, module: str) -> bool:
        if self.allows(module):
            return True
        return any(_lives_in(folder, module.partition(".")[0]) for folder in self.folders)

    def _refuse_missing(self, top: str, name: str, key: str) -> None:
        """Refuse a module that does not exist at all: to allow it would be of no use.

        Raises:
            ConfigError: there is no module of that name; the message names a similar one.
        """
        if find(top) is None and not any(_is_found_in(folder, top) for folder in self.folders):
            places = [*(f"in {folder}" for folder in self.folders), "where Python looks"]
            raise ConfigError(
                f"{key} is {name!r}, but there is no module {top!r}"
                f"{_did_you_mean(top, map(str, self.folders))} Looked "
                f"{' and '.join(places)}. Correct the name, install it, or run where it lies."
            )

    def _refusal(self, module: str, name: str, key: str) -> ConfigError:
        folders = " or ".join(str(folder) for folder in self.folders)
        allowed = [*self.imports, *([f"modules found in {folders}"] if folders else [])]
        but = f" (but {' and '.join(allowed)})" if allowed else ""
        return ConfigError(
            f"{key} is {name!r}, which belongs to module {module!r}; a config file may not import "
            f"that{but}. "
            f"{ways_out('allow_imports', module.partition('.')[0])}"
        )


def file_policy(
    lists: Mapping[str, Sequence[str] | None], file: Path, *, is_of_run: bool = False
) -> FilePolicy:
    """Return what `file` may do.

    Args:
        lists: the lists that the command line or code gives, by their names in `allow_list`.
        file: the path of the config file.
        is_of_run: whether its folder is that of a run, which is named for what was collected, not
            for code.

    Raises:
        ConfigError: a list, or what the user has set for all configs, is malformed.
    """
    folders = [file.parent.resolve()]
    allowed = checked_lists(lists) + allowed_by_user(folders[0])
    with contextlib.suppress(OSError):  # the working directory may have been removed
        folders.append(Path.cwd().resolve())
    run = folders[0] if is_of_run else None
    places = tuple(folder for folder in dict.fromkeys(folders) if folder != run)
    return FilePolicy(allowed.imports, allowed.keys, allowed.env, folders=places, run=run)


def import_object(
    name: str, *, allow: FilePolicy | None = None, key: str = "env.entry"
) -> Callable[..., Any]:
    """Return the callable that a config names.

    Args:
        name: `package.module:callable`, or `package.module.Name`.
        allow: what may be imported; None is everything.
        key: path of the config key, for messages.

    Raises:
        ConfigError: the name is malformed, not allowed, not found (the message says where it was
            looked for, and names the nearest attribute), not callable, or its module fails.
    """
    module, attributes = _split(check_value(OBJECT_PATH, name, key))
    if allow is not None:
        allow.admit_module(module, name, key)
    found = _walk(_import_module(module, key), attributes, name, key, allow)
    if allow is not None:
        allow.admit_object(found, name, key)
    if not callable(found):
        raise ConfigError(
            f"{key} is {name!r}, which is a {type(found).__name__} and cannot be called. Name a "
            "class or a function."
        )
    return cast("Callable[..., Any]", found)


def import_modules(names: Iterable[str], *, key: str = "manager.import_names") -> None:
    """Import modules for what they register; whether a file may name them was checked before.

    Raises:
        ConfigError: a module is not found or fails.
    """
    for name in names:
        _import_module(name, key)


def check_env_id(env_id: str, policy: FilePolicy) -> None:
    """Refuse a gymnasium id that names a module to import (`module:Name-v0`) that is not allowed.

    Raises:
        ConfigError: the module is not allowed.
        MissingDependencyError: it is of a known package that is not installed.
    """
    module, colon, _ = env_id.partition(":")
    if colon:
        checked = check_value(MODULE_NAME, module, "env.id")
        policy.admit_module(checked, env_id, "env.id", registers=True)


def left_behind(tops: Iterable[str], folder: Path, allowed: Sequence[str]) -> list[str]:
    """Return those modules of a folder that a config elsewhere may not import yet, or cannot."""
    there = (top for top in sorted(tops) if _is_found_in(folder, top))
    return [top for top in there if top not in allowed or find(top) is None]


def module_of(found: Any) -> str:
    """Return the name of the module that an object belongs to, whatever it was reached through."""
    if isinstance(found, ModuleType):
        return found.__name__
    if isinstance(found, functools.partial):
        return module_of(found.func)
    module = getattr(found, "__module__", None)
    return module if isinstance(module, str) else type(found).__module__


def _split(path: str) -> tuple[str, list[str]]:
    module, colon, attributes = path.partition(":")
    if not colon:
        module, _, attributes = path.rpartition(".")
    return module, attributes.split(".")


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            looked_in = ", ".join(entry or "." for entry in sys.path)
            raise ConfigError(
                f"{key} names the module {name!r}, but there is no {missing!r}"
                f"{_did_you_mean(missing)} Looked in {looked_in}. Install it, correct the name, or "
                "run where it can be found."
            ) from None
        raise ConfigError(
            f"{key} names the module {name!r}, which needs the module {missing!r}, and that is "
            "not installed. Install it."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} names the module {name!r}, whose import failed with {type(error).__name__}: "
            f"{error}. Correct the module; it has to be importable without side effects."
        ) from error


def _did_you_mean(missing: str, folders: Iterable[str] = ()) -> str:
    """Return the end of a sentence about a missing module: it asks whether a similar one is meant.

    Args:
        missing: the name of the module.
        folders: folders of the user's modules, besides the current one and that of the script.
    """
    above, _, last = missing.rpartition(".")
    places: list[str] = []
    if above:
        places = list(getattr(sys.modules.get(above), "__path__", ()))
    else:
        # Not "" itself: for it, Python looks at the folder that was current when it first looked.
        with contextlib.suppress(OSError):  # it may be gone
            places = [os.path.abspath(place) for place in (*folders, "", *sys.path[:1])]
    there = {found.name for found in pkgutil.iter_modules(places)} - {missing}
    alike = nearest(last, sorted(there))
    return f": did you mean {f'{above}.{alike}'.lstrip('.')!r}?" if alike else "."


def _walk(
    module: ModuleType, attributes: list[str], name: str, key: str, policy: FilePolicy | None
) -> Any:
    found: Any = module
    for attribute in attributes:
        if policy is not None:
            policy.admit_step(found, name, key)
        try:
            found = getattr(found, attribute)
        except Exception as error:
            alike = nearest(attribute, dir(found))
            hint = f": did you mean {alike!r}?" if alike else "."
            owner = getattr(found, "__name__", type(found).__name__)
            file = getattr(module, "__file__", None)
            raise ConfigError(
                f"{key} is {name!r}, but {owner!r} has no {attribute!r}{hint} Looked in "
                f"{file or module.__name__}. Correct the name."
            ) from error
    return found


def _within(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _is_env_class(found: Any) -> bool:
    """Return whether an object is a class of envs or wrappers that files may name."""
    if not isinstance(found, type) or not _within(found.__module__, _OF_CLASSES):
        return False
    bases = {(base.__module__, base.__name__) for base in found.__mro__}
    return bool(bases & {("gymnasium.core", "Env"), ("envmgr.env.base", "BaseEnv")})


def _is_own_policy(found: Any) -> bool:
    return isinstance(found, type) and found.__module__ == _POLICIES


def _is_found_in(folder: Path, top: str) -> bool:
    importlib.invalidate_caches()
    return PathFinder.find_spec(top, [str(folder)]) is not None


def _lives_in(folder: Path, top: str) -> bool:
    """Return whether Python would take, or has taken, the module `top` from `folder` alone.

    A namespace package has several homes: that one is in the folder does not make the others the
    user's.
    """
    homes = homes_of(find(top))
    return bool(homes) and all(home == folder for home in homes)


def _make_importable(folder: Path, top: str, key: str) -> None:
    if _lives_in(folder, top):
        return
    sys.path.append(str(folder))
    if _lives_in(folder, top):
        return
    sys.path.pop()
    raise ConfigError(
        f"{key} names the module {top!r}, which is in {folder}, but Python finds another module of "
        "that name first. Rename yours, so that there is no doubt which is meant."
    )
