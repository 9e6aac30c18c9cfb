"""Env factories from the section `env` of a config.

All names are looked up once, here, before anything starts. The resulting factories are small, can
be pickled, and build the same env wherever they are called: a gymnasium id travels as its
registration, so that a worker needs no registry of its own, and repeats no warning about versions.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from envmgr.config.checks import Refused, as_items, check_value, integer, nearest, show_value
from envmgr.config.file_rules import admit
from envmgr.config.imports import FilePolicy, import_modules, import_object
from envmgr.config.installed import check_installed
from envmgr.config.known_envs import nearest_package, package_of_id
from envmgr.config.manager import MAX_ENV_NUM
from envmgr.config.merge import to_plain
from envmgr.config.schema import as_mapping
from envmgr.config.sections import EnvConfig
from envmgr.errors import ConfigError
from envmgr.types import EnvFactory

_UNKNOWN_ARGUMENT = re.compile(
    r"unexpected keyword argument '(\w+)'(?!.*[Dd]id you mean)", re.DOTALL
)
"""What Python says about an unknown argument; from 3.13 on it names the nearest one itself."""


@contextlib.contextmanager
def _naming_what_was_meant(build: Any) -> Iterator[None]:
    """Name the most similar argument in the error for one that `build` does not take."""
    try:
        yield
    except TypeError as error:
        unknown = _UNKNOWN_ARGUMENT.search(str(error))
        alike = unknown and nearest(unknown[1], arguments_of(build))
        if alike:
            error.args = (f"{error}: did you mean {alike!r}?",)
        raise


def arguments_of(build: Any) -> list[str]:
    """Return the names of the arguments that something takes; none if they cannot be found out."""
    with contextlib.suppress(Exception):
        if isinstance(build, str):
            build = registration.load_env_creator(build)
        return list(inspect.signature(build).parameters)
    return []


@dataclass(frozen=True)
class ConfiguredWrapper:
    """A wrapper to put around an env.

    Attributes:
        path: `package.module:Class` or `package.module.Class`.
        kwargs: its arguments besides the env; every env gets a copy of its own (`to_plain`).
    """

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, env: Any) -> Any:
        """Return the env in this wrapper."""
        wrap = import_object(self.path, key="env.wrappers")
        with _naming_what_was_meant(wrap):
            return wrap(env, **to_plain(self.kwargs))


@dataclass(frozen=True)
class ConfiguredEnv:
    """A factory of one env from a config; it can be pickled if the env's registration can.

    Attributes:
        source: a gymnasium registration, `package.module:callable`, or a callable.
        kwargs: arguments of `gymnasium.make` or of the callable; every env gets a copy of its own
            (`to_plain`).
        wrappers: callables that are given the env and return it wrapped; the innermost first.
        module: the module that registers the env, in ids like `module:Env-v0`; it is imported
            first.
    """

    source: EnvSpec | str | Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    module: str | None = None

    def __call__(self) -> Any:
        """Return a new env."""
        if self.module is not None:
            importlib.import_module(self.module)
        source, kwargs = self.source, to_plain(self.kwargs)
        if isinstance(source, EnvSpec):
            with _naming_what_was_meant(source.entry_point):
                env = gymnasium.make(source, **kwargs)
        else:
            build = import_object(source, key="env.entry") if isinstance(source, str) else source
            with _naming_what_was_meant(build):
                env = build(**kwargs)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


def checked_env_num(env_num: Any, name: str = "env_num") -> int:
    """Return a number of envs, checked.

    Args:
        env_num: what was given as the number.
        name: the name of the argument, for the message.

    Raises:
        ConfigError: it is no integer from 1 on, or more than a manager takes.
    """
    whole = integer(1, MAX_ENV_NUM)
    if isinstance(env_num, float):  # as 4.0 in a config file may be
        raise ConfigError(f"{name} is {show_value(env_num)}, but must be {whole.allowed}")
    count: int = check_value(whole, env_num, name)
    return count


def env_factories(
    env_cfg: Mapping[str, Any] | EnvConfig, env_num: int, *, policy: FilePolicy | None = None
) -> list[EnvFactory]:
    """Return the factories of `env_num` equal envs.

    Modules that the section names are imported here, so that what is wrong with them is known
    before any worker starts. No env is built.

    Args:
        env_cfg: the section `env`; in code, its wrappers may also be classes and functions that are
            given the env.
        env_num: how many; 1 or more.
        policy: what may be imported; None is everything.

    Raises:
        UnknownKeyError: the section has a key that does not exist.
        ConfigError: a value is not allowed, or names something that does not exist.
    """
    count = checked_env_num(env_num)
    config, own = (env_cfg, {}) if isinstance(env_cfg, EnvConfig) else _checked_section(env_cfg)
    check_imports(config, policy)
    module = None
    source: EnvSpec | str
    if config.id is not None:
        source, module = _registration(config.id, policy)
    elif config.entry is not None:
        source = config.entry
    else:
        raise ConfigError(
            "the config does not say which env to build; give env.id (a gymnasium id such as "
            "CartPole-v1) or env.entry (package.module:callable)"
        )
    return [_configured(source, config, own, module)] * count


def with_arguments(
    build: Callable[..., Any],
    kwargs: Mapping[str, Any] | None,
    wrappers: Sequence[Any],
) -> EnvFactory:
    """Return a factory of `build`'s env with arguments and in wrappers; `build` without any.

    Args:
        build: a class or a function that builds an env.
        kwargs: as in the section `env`; so are `wrappers`.
        wrappers: the innermost first; also classes and functions that are given the env.

    Raises:
        ConfigError: they are malformed, or a wrapper does not exist.
    """
    # Any id will do here: without one, the error would be that no env is named.
    config, own = _checked_section({"id": "any", "kwargs": kwargs, "wrappers": wrappers})
    check_imports(config, None)
    return _configured(build, config, own) if config.kwargs or config.wrappers else build


_OwnWrappers = Mapping[int, Callable[[Any], Any]]
"""Wrappers that code gives as classes and functions, by their index."""


def _checked_section(given: Mapping[str, Any]) -> tuple[EnvConfig, _OwnWrappers]:
    """Return the checked form of a section that code gives, and its wrappers that are no names."""
    section = as_mapping(given, EnvConfig.PATH)
    try:
        wrappers = as_items(section.get("wrappers"))
    except Refused:  # none, or no list: the section's own check says so
        return EnvConfig.from_mapping(section), {}
    own = {index: wrapper for index, wrapper in enumerate(wrappers) if callable(wrapper)}
    # Any name stands in their places, so that messages number the others as they were given.
    section["wrappers"] = ["gymnasium:Wrapper" if i in own else w for i, w in enumerate(wrappers)]
    return EnvConfig.from_mapping(section), own


def _configured(
    source: EnvSpec | str | Callable[..., Any],
    config: EnvConfig,
    own: _OwnWrappers,
    module: str | None = None,
) -> ConfiguredEnv:
    named = [ConfiguredWrapper(w["path"], to_plain(w["kwargs"])) for w in config.wrappers]
    wrappers = tuple(own.get(index, wrapper) for index, wrapper in enumerate(named))
    return ConfiguredEnv(source, to_plain(config.kwargs), wrappers, module)


def check_imports(config: EnvConfig, policy: FilePolicy | None) -> None:
    """Import what a section names, so that what is missing or not allowed is found before the run.

    Args:
        config: the section.
        policy: what may be imported; None is everything. What else a file may not set was checked
            where the file was read: here it is not known which values came from it.

    Raises:
        ConfigError: a name is not allowed, or names something that does not exist.
    """
    if policy is not None:
        admit(EnvConfig, {}, config.to_dict(), policy, config)
        return
    if config.entry is not None:
        import_object(config.entry, key="env.entry")
    for index, wrapper in enumerate(config.wrappers):
        import_object(wrapper["path"], key=f"env.wrappers[{index}]")


def _registration(env_id: str, policy: FilePolicy | None) -> tuple[EnvSpec, str | None]:
    """Return what gymnasium knows of an id, and the module to import for it."""
    module, colon, name = env_id.partition(":")
    if colon:
        import_modules([module], key="env.id")
    else:
        name = env_id
        _import_known(name, policy)
    try:
        spec = gymnasium.spec(_current_name(name))
    except gymnasium.error.Error as error:
        raise ConfigError(_unknown_id_text(env_id, name, error)) from error
    if spec.entry_point is None:
        raise ConfigError(
            f"env.id is {env_id!r}, which gymnasium has as a vector env only; choose an env that "
            "can be made alone"
        )
    return spec, module if colon else None


def _import_known(name: str, policy: FilePolicy | None) -> None:
    """Import the well-known package that registers an id, unless the id is already registered.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: Python would import something else, or importing it fails.
    """
    known = None if name in gymnasium.registry else package_of_id(name)
    if known is None:
        return
    if policy is None or not policy.allows(known.module):
        check_installed(known, [Path.cwd()] if policy is None else policy.places, name, "env.id")
    import_modules([known.module], key="env.id")


def _current_name(name: str) -> str:
    """Return the name with a version, and warn of what `gymnasium.make` would warn of."""
    namespace, base, version = registration.parse_env_id(name)
    latest = registration.find_highest_version(namespace, base)
    if latest is None or version == latest:
        return name
    newest = registration.get_env_id(namespace, base, latest)
    if version is None:
        gymnasium.logger.warn(f"env.id is {name!r}, without a version: {newest!r} is used")
        return newest
    if version < latest:
        gymnasium.logger.deprecation(f"env.id is {name!r}, which is out of date: see {newest!r}")
    return name


def _unknown_id_text(env_id: str, name: str, error: Exception) -> str:
    module, _, attribute = name.rpartition(".")
    if module and all(part.isidentifier() for part in name.split(".")) and ":" not in env_id:
        return (
            f"env.id is {env_id!r}, which gymnasium does not have. For {attribute} of the module "
            f"{module}, write '{module}:{attribute}' (in a config: env.entry)."
        )
    near = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.5)
    nearest = f"the nearest ids are {', '.join(near)}" if near else "no id is like it"
    meant = None if package_of_id(name) else nearest_package(name)
    if meant is not None:
        known = f"ids that begin with {meant[0]!r} are of the package {meant[1].distribution}"
        nearest = known if "/" in name or not near else f"{nearest}; {known}"
    way = "If a module registers it when it is imported, write `module:Name-v0`."
    if ":" in env_id:
        way = "If it is a class or a function of that module, it is env.entry, not env.id."
    return f"env.id is {env_id!r}, which gymnasium does not have: {nearest}. ({error}) {way}"


def key_of(path: str) -> str:
    """Return the key of the section `env` under which a name belongs: `id` or `entry`."""
    if path.partition(":")[0].endswith(".py"):  # a file, of which the check of entries knows more
        return "entry"
    is_id = "/" in path or ":" not in path or "-v" in path.rpartition(":")[2]
    return "id" if is_id else "entry"
