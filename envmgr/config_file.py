"""Config files: reading, overriding, resolving with every default, and saying what came from where.

A config has the sections `env`, `manager` and `collect`; each key has a default, so each section
may be left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envmgr.config import (
    CollectConfig,
    EasyDict,
    EnvConfig,
    ManagerConfig,
    check_kind,
    to_easydict,
    to_plain,
)
from envmgr.config.allow_list import plain_key
from envmgr.config.checks import check_value, show_value, text
from envmgr.config.file_rules import admit, keys_to_allow
from envmgr.config.imports import FilePolicy, file_policy
from envmgr.config.origins import Origin, Source
from envmgr.config.schema import Section, as_mapping, check_keys, checks_of, unknown_key
from envmgr.config.yaml_text import MAX_BYTES, load_yaml
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.registry import ENV_MANAGER_REGISTRY, default_config_of, kind_of
from envmgr.spaces.reading import Unreadable, read_list, short_text
from envmgr.transport.base import Transport

SECTIONS: Mapping[str, type[Section]] = {
    "env": EnvConfig,
    "manager": ManagerConfig,
    "collect": CollectConfig,
}

_Path = tuple[str, ...]


@dataclass(frozen=True)
class ResolvedConfig:
    """A config with every key filled in.

    Attributes:
        values: the sections `env`, `manager` and `collect` with all their keys.
        origins: where each value came from, by dotted key.
        file_policy: what the file may do; None if code gave the config.
        text: the text of the file, as it was read.
    """

    values: EasyDict
    origins: Mapping[str, Origin]
    file_policy: FilePolicy | None = None
    text: str = ""


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    set: Sequence[str] = (),
    allow_imports: Sequence[str] | None = None,
    allow_env: Sequence[str] | None = None,
    allow: Sequence[str] | None = None,
) -> EasyDict:
    """Return a whole config, checked, with every default filled in.

    Args:
        source: path of a YAML file, or the config as a mapping (not changed).
        set: overrides such as `manager.env_num=16`; the right-hand side is YAML.
        allow_imports: modules (including their submodules) that a file may name for import; see
            `envmgr.config.imports` for what it may name without this. A mapping is trusted.
        allow_env: environment variables that a file may set in workers besides the harmless ones.
        allow: keys that a file may set to anything, such as `ray.runtime_env`.

    Returns:
        An EasyDict with the sections `env`, `manager` and `collect`. It also holds mappings whose
        keys are not strings, such as seeds by env_id.

    Raises:
        UnknownKeyError: a key or a kind of manager does not exist; the message names the nearest.
        ConfigError: the file cannot be read or is malformed; a value is not allowed, or not in a
            file; or a name may not or cannot be imported.
    """
    return resolve_config(
        source, set=set, allow_imports=allow_imports, allow_env=allow_env, allow=allow
    ).values


def resolve_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    set: Sequence[str] = (),
    allow_imports: Sequence[str] | None = None,
    allow_env: Sequence[str] | None = None,
    allow: Sequence[str] | None = None,
) -> ResolvedConfig:
    """Return what `load_config` returns, with the origin of every value.

    The arguments and errors are those of `load_config`.
    """
    lists = {"allow_imports": allow_imports, "allow_env": allow_env, "allow": allow}
    return _resolved(source, set, lists)


def resolve_config_of_run(
    file: str | os.PathLike[str],
    overrides: Sequence[str],
    lists: Mapping[str, Sequence[str] | None],
) -> ResolvedConfig:
    """Return the resolved config of a resumed run; modules beside the file are not allowed.

    Args:
        file: the path of the config.
        overrides: like `set` of `load_config`.
        lists: what is allowed: lists by their names in `allow_list`.
    """
    return _resolved(file, overrides, lists, is_of_run=True)


def _resolved(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str],
    lists: Mapping[str, Sequence[str] | None],
    *,
    is_of_run: bool = False,
) -> ResolvedConfig:
    policy: FilePolicy | None = None
    in_file = ""
    if isinstance(source, Mapping):
        given, origin = to_plain(source), Origin(Source.CODE)
    else:
        source = _checked_path(source)
        in_file = read_config_text(source)
        given, origin = to_plain(config_in(in_file, source)), Origin(Source.FILE, source)
        policy = file_policy(lists, Path(source), is_of_run=is_of_run)
        _check_keys_to_allow(policy)
    origins: dict[_Path, Origin] = dict.fromkeys(_leaves(given), origin)
    for override in _checked_overrides(overrides):
        _apply_override(given, override, origins)
    _check_sections(given)

    env = EnvConfig.from_mapping(given.get("env"))
    collect = CollectConfig.from_mapping(given.get("collect"))
    said = _said_by_file(given, origins)

    def check_trust(schema: type[Section]) -> None:
        if policy is not None:
            by_file, whole = (as_mapping(t.get(schema.PATH), schema.PATH) for t in (said, given))
            admit(schema, by_file, whole, policy, env)

    check_trust(ManagerConfig)  # before its modules are imported
    kind = kind_of({"type": "base", **as_mapping(given.get("manager"), "manager")})
    manager_cls = ENV_MANAGER_REGISTRY.get(kind)
    preset = default_config_of(manager_cls, kind)
    manager = ManagerConfig.from_mapping(given.get("manager"), preset)
    transport_cls = getattr(manager_cls, "_transport_cls", Transport)  # not in classes of others
    check_kind(manager, hides_resets=transport_cls.works_alone, refused=transport_cls.refused)
    check_trust(EnvConfig)
    check_trust(CollectConfig)
    values = {"env": env.to_dict(), "manager": manager.to_dict(), "collect": collect.to_dict()}
    return ResolvedConfig(
        values=to_easydict(values),
        origins=_origins_of(values, origins, kind, preset),
        file_policy=policy,
        text=in_file,
    )


def _check_keys_to_allow(policy: FilePolicy) -> None:
    """Refuse to allow a key that cannot be allowed, so that no mistyped one is relied upon."""
    known = {*map(plain_key, keys_to_allow(*SECTIONS.values()))}
    for key in map(plain_key, policy.keys):
        if key not in known:
            raise unknown_key(key, sorted(known), "what config files are allowed to set (allow)")


def _said_by_file(
    given: Mapping[Any, Any], origins: Mapping[_Path, Origin], path: _Path = ()
) -> dict[Any, Any]:
    """Return the part of a config that a file gave, less what was overridden."""
    said = {}
    for key, value in given.items():
        here = (*path, name_of(key))
        if isinstance(value, Mapping) and value:
            below = _said_by_file(value, origins, here)
            if below:
                said[key] = below
        elif here in origins and origins[here].source is Source.FILE:
            said[key] = value
    return said


def _checked_overrides(given: Any) -> list[str]:
    try:
        overrides = read_list(given)
    except Unreadable as error:
        raise ConfigError(f"`set` should be a list of section.key=value, but {error}") from error
    wrong = [override for override in overrides if not isinstance(override, str)]
    if wrong:
        raise ConfigError(
            f"`set` has {show_value(wrong[0])} in it, but must be a list of strings of the form "
            "section.key=value"
        )
    return overrides


def _checked_path(source: Any) -> str:
    try:
        path = os.fspath(source)
    except Exception:  # no path, or one of the caller's own that raises: said below
        path = None
    if not isinstance(path, str):
        raise ConfigError(
            f"a config is {show_value(source)} ({type(source).__name__}), but must be the path of "
            "a YAML file, or a mapping"
        )
    checked: str = check_value(text(), str.__str__(path), "the path of a config file")
    return checked


def read_config_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the mapping in a YAML file; errors are those of the two functions below."""
    return config_in(read_config_text(file), os.fspath(file))


def read_config_text(file: str | os.PathLike[str]) -> str:
    """Return the text of a YAML file, which may be a pipe and so can be read only once.

    Raises:
        ConfigError: there is no such file, it is a folder, too large, or not UTF-8; the message
            names the file, line and column.
    """
    name = os.fspath(file)
    if name.endswith(".py"):
        raise ConfigError(
            f"{name!r} is a Python file, not a config: run it with python. For an env in it, "
            f"`envmgr init {Path(name).stem}:MyEnv` writes a config."
        )
    try:
        with open(name, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "Correct the path."
        if not name.lower().endswith((".yaml", ".yml")):  # the name of an env, likely
            hint = f"If it is an env, `envmgr init {name}` writes a config for it."
        raise ConfigError(
            f"the config file {name!r} does not exist (looked in {os.path.abspath(name)}). {hint}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{name!r} is a folder, not a config file. Name a file in it.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config file {name!r} cannot be read: {error}.") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"the config file {name!r} is larger than {MAX_BYTES} bytes. Is it a config?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise ConfigError(
            f"{name}, line {line}, column {column}: not UTF-8. Save the file as UTF-8."
        ) from None


def config_in(text: str, name: str) -> dict[str, Any]:
    """Return the mapping in the text of a YAML file of this name.

    Raises:
        ConfigError: it is empty, malformed, or not a mapping; the message names the file, line and
            column.
    """
    values = load_yaml(text, name)
    if values is None:
        raise ConfigError(
            f"the config file {name!r} is empty. Write at least one of the sections "
            f"{', '.join(SECTIONS)}."
        )
    return dict(as_mapping(values, f"the config file {name!r}"))


def _check_sections(given: Mapping[Any, Any]) -> None:
    for name, section in given.items():
        if name in SECTIONS:
            check_keys(as_mapping(section, name), SECTIONS[name], name)
            continue
        homes = [f"{other}.{name}" for other in SECTIONS if name in checks_of(SECTIONS[other])]
        if homes:
            raise UnknownKeyError(
                f"{name!r} is at the top of the config, but belongs into a section. Write "
                f"{' or '.join(homes)} instead."
            )
        raise unknown_key(name, SECTIONS, "the config")


def _apply_override(given: dict[str, Any], override: str, origins: dict[_Path, Origin]) -> None:
    """Store one `section.key=value` in `given` and note it in `origins`."""
    dotted, equals, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(
            f"the override {show_value(override)} is not of the form section.key=value, such as "
            "manager.env_num=16."
        )
    value = load_yaml(text, f"the override {show_value(override)}")
    node: dict[Any, Any] = given
    for depth, part in enumerate(path[:-1], start=1):
        child = node.setdefault(_key_like(part, node), {})
        if child is None:
            child = node[_key_like(part, node)] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"the override {show_value(override)} needs a mapping at "
                f"{'.'.join(path[:depth])}, but that is {show_value(child)}. Override that key "
                "itself."
            )
        node = child
    node[_key_like(path[-1], node)] = value
    # Values given at this path, below it or above it are replaced; neighbours keep their origin.
    for known in [k for k in origins if k[: len(path)] == path or k == path[: len(k)]]:
        del origins[known]
    origins.update(dict.fromkeys(_leaves(value, path), Origin(Source.SET)))


def _key_like(part: str, node: Mapping[Any, Any]) -> Any:
    """Return the key of `node`, perhaps a number, that reads like `part`; else `part` itself."""
    return next((key for key in node if name_of(key) == part), part)


def name_of(key: Any) -> str:
    """Return a key, which may be a number or a date, as paths show it: `env.kwargs.1`."""
    return key if isinstance(key, str) else short_text(key)


def _leaves(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yield the path of each value that is not a mapping, or is an empty one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, name_of(key)))
    else:
        yield path


def _origins_of(
    values: Mapping[str, Any], given: Mapping[_Path, Origin], kind: str, preset: Mapping[str, Any]
) -> dict[str, Origin]:
    """Return the origin of every value: of the longest part of its path that was given, if any."""
    defaults = ManagerConfig().to_dict()
    origins = {}
    for path in _leaves(values):
        prefixes = (path[:length] for length in range(len(path), 1, -1))
        found = next((given[prefix] for prefix in prefixes if prefix in given), None)
        origin = Origin(Source.DEFAULT) if found is None else found
        is_managers = path[0] == "manager" and found is None
        if is_managers and preset[path[1]] != defaults[path[1]]:
            origin = Origin(Source.KIND, kind)
        origins[".".join(path)] = origin
    return origins
