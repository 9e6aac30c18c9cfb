"""The registry of manager kinds, and building a manager from its config."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from envmgr.config import EasyDict, ManagerConfig, default_manager_config, to_plain
from envmgr.config.checks import check_value, nearest, show_value, text
from envmgr.config.imports import import_modules
from envmgr.config.schema import as_mapping, check_keys
from envmgr.errors import ConfigError, UnknownKeyError

_C = TypeVar("_C", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Entry:
    build: Callable[..., Any]
    source: str


class Registry:
    """Classes (or other callables) by key: built-in, registered by code, or by entry points.

    The built-in ones register themselves when their module is imported, which happens at the first
    look-up. Entry points of other packages are loaded when a key is not known otherwise; one that
    fails to load is an error for its own key only.

    Args:
        noun: what messages call the things that are registered.
        builtin_module: module that registers the built-in keys when it is imported.
        entry_point_group: group of the entry points of other packages.
    """

    def __init__(
        self, noun: str, *, builtin_module: str | None = None, entry_point_group: str | None = None
    ) -> None:
        self._noun = noun
        self._builtin_module = builtin_module
        self._entry_point_group = entry_point_group
        self._entries: dict[str, _Entry] = {}
        self._problems: dict[str, str] = {}
        self._entry_points: dict[str, list[EntryPoint]] | None = None

    def register(self, key: str, *, override: bool = False) -> Callable[[_C], _C]:
        """Return a decorator that registers what it decorates.

        Args:
            key: the registry key.
            override: replace what is registered under this key.

        Raises:
            ConfigError: the key is taken; the message names the class that has it.
        """
        check_value(text(), key, "the registry key")

        def decorate(build: _C) -> _C:
            if not callable(build):
                raise ConfigError(
                    f"register({key!r}) got {show_value(build)}; it should decorate a class, or "
                    "another callable, that makes what the key stands for"
                )
            self._load_builtins()
            self._add(key, build, self._source_of(build), override=override)
            return build

        return decorate

    def get(self, key: str) -> Any:
        """Return what is registered under `key`.

        Raises:
            UnknownKeyError: the key is unknown; the message names all known keys and the nearest.
            ConfigError: the entry point of that key fails to load.
        """
        return self._find(key).build

    def build(self, key: str, *args: Any, **kwargs: Any) -> Any:
        """Call what is registered under `key`; its errors are passed on unchanged."""
        build = self.get(key)  # apart, so that errors of the look-up and of the call never mix
        return build(*args, **kwargs)

    def source(self, key: str) -> str:
        """Return where a key comes from.

        This is "envmgr", "entry point <distribution>" or "registered by <module>".
        """
        return self._find(key).source

    def keys(self) -> list[str]:
        """Return all available keys, sorted; loads all entry points."""
        self._load_builtins()
        for key in list(self._known_entry_points()):
            self._load_entry_points(key)
        return sorted(self._entries)

    def problems(self) -> dict[str, str]:
        """Return, by key, why an entry point cannot be used; loads all entry points."""
        self.keys()
        return dict(self._problems)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and self._find(key) is not None
        except ConfigError:
            return False

    def _find(self, key: str) -> _Entry:
        check_value(text(), key, "the registry key")
        self._load_builtins()
        if key not in self._entries:
            self._load_entry_points(key)
        if key in self._entries:
            return self._entries[key]
        if key in self._problems:
            raise ConfigError(self._problems[key])
        known = self.keys()
        alike = nearest(key, known)
        guess = f": did you mean {alike!r}?" if alike else "."
        raise UnknownKeyError(
            f"no {self._noun} is registered as {show_value(key)}{guess} "
            f"Known keys: {', '.join(known)}. Keys "
            "of other modules are known once the module is imported (`import_names`)."
        )

    def _add(
        self, key: str, build: Callable[..., Any], source: str, *, override: bool = False
    ) -> None:
        present = self._entries.get(key)
        if present is not None and not override and present.build is not build:
            raise ConfigError(
                f"the registry key {key!r} is taken by {_full_name(present.build)} "
                f"({present.source}), so {_full_name(build)} cannot be registered under it. Choose "
                "another key, or pass override=True."
            )
        self._entries[key] = _Entry(build, source)

    def _source_of(self, build: Callable[..., Any]) -> str:
        module = getattr(build, "__module__", None) or type(build).__module__
        builtin = self._builtin_module
        if builtin is not None and module.partition(".")[0] == builtin.partition(".")[0]:
            return builtin.partition(".")[0]
        return f"registered by {module}"

    def _load_builtins(self) -> None:
        # Without a flag: a repeated import costs a look-up, waits for one under way in another
        # thread, and returns at once in the module's own `register` calls.
        if self._builtin_module is not None:
            importlib.import_module(self._builtin_module)

    def _known_entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._entry_points is None:
            self._entry_points = {}
            if self._entry_point_group is not None:
                for point in entry_points(group=self._entry_point_group):
                    self._entry_points.setdefault(point.name, []).append(point)
        return self._entry_points

    def _load_entry_points(self, key: str) -> None:
        """Load the entry points of one key, once; note what is wrong with them."""
        for point in self._known_entry_points().pop(key, []):
            source = f"entry point {point.dist.name if point.dist else point.value}"
            try:
                self._add(key, point.load(), source)
            except Exception as error:
                self._problems[key] = (
                    f"the {self._noun} {key!r} of {source} ({point.value}) cannot be used: "
                    f"{type(error).__name__}: {error}. Repair or uninstall that package."
                )


def _full_name(build: Callable[..., Any]) -> str:
    name = getattr(build, "__qualname__", type(build).__qualname__)
    return f"{getattr(build, '__module__', None) or type(build).__module__}.{name}"


ENV_MANAGER_REGISTRY = Registry(
    "env manager", builtin_module="envmgr.managers", entry_point_group="envmgr.managers"
)
"""Manager classes by `manager.type`. `@ENV_MANAGER_REGISTRY.register("key")` adds one."""


def default_config_of(manager_cls: Callable[..., Any], key: str) -> EasyDict:
    """Return the whole default config of a manager class, with `type` set to its key.

    Raises:
        ConfigError: its `default_config()` does not fit the schema.
    """
    own = getattr(manager_cls, "default_config", None)
    where = f"default_config() of the kind {key!r}"
    preset = {} if own is None else as_mapping(own(), where)
    check_keys(preset, ManagerConfig, where)
    return default_manager_config({**to_plain(preset), "type": key})


def get_env_manager_cls(cfg: Mapping[str, Any]) -> Any:
    """Return the manager class of a config's `type`, after importing its `import_names`.

    Args:
        cfg: the manager section, as a dict or EasyDict; not changed.

    Raises:
        UnknownKeyError: there is no kind of that name; the message names the known ones.
        ConfigError: `type` is missing, as it also is if the key is misspelt; or a module of
            `import_names` cannot be imported.
    """
    if "type" not in as_mapping(cfg, "manager"):
        raise ConfigError(
            "manager.type is missing, which says what kind of manager is meant. Known kinds: "
            f"{', '.join(ENV_MANAGER_REGISTRY.keys())}."
        )
    return ENV_MANAGER_REGISTRY.get(kind_of(cfg))


GIVE_SECTIONS = (
    "a whole config is run by `envmgr run`, or given by its sections: cfg = load_config(...), then "
    "create_env_manager(cfg.manager, env_fn=env_factories(cfg.env, cfg.manager.env_num)), with "
    "env_factories of envmgr.config.env_factories"
)


def class_of_kind(key: str) -> Any:
    """Return what is registered under a key.

    Raises:
        UnknownKeyError: the key is unknown; the message names the known ones.
    """
    return ENV_MANAGER_REGISTRY.get(key)


def kind_of(cfg: Mapping[str, Any]) -> str:
    """Return the registry key that a manager section names, after importing its `import_names`.

    Args:
        cfg: the manager section. What a file may set in it was checked before.

    Raises:
        ConfigError: a module cannot be imported.
    """
    section = as_mapping(cfg, "manager")
    names = section.get("import_names")
    names = () if names is None else names
    given = {"type": section["type"]} if "type" in section else {}
    checked = ManagerConfig(**given, import_names=names)
    import_modules(checked.import_names)
    return checked.type
