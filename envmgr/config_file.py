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

from easydict import EasyDict

from envmgr.config import (
    CollectConfig,
    EnvConfig,
    ManagerConfig,
    check_kind,
    to_easydict,
    to_plain,
)
from envmgr.config.checks import check_value, show_value, text
from envmgr.config.env_factories import check_imports
from envmgr.config.imports import ImportPolicy, check_preload, file_policy, import_object
from envmgr.config.paths import check_confined
from envmgr.config.schema import Section, as_mapping, check_keys, checks_of, unknown_key
from envmgr.config.yaml_text import MAX_BYTES, dump_yaml, load_yaml
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
        origins: by dotted key, where the value came from: "default", "kind <registry key>",
            "file <name>", "argument" (a mapping given by code) or "set" (an override).
        import_policy: what names in it may be imported; None if code gave it.
    """

    values: EasyDict
    origins: Mapping[str, str]
    import_policy: ImportPolicy | None = None


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    set: Sequence[str] = (),
    allow_imports: Sequence[str] | None = None,
) -> EasyDict:
    """Return a whole config, checked, with every default filled in.

    Args:
        source: path of a YAML file, or the config as a mapping (not changed).
        set: overrides such as `manager.env_num=16`; the right-hand side is YAML.
        allow_imports: modules (with those below them) that a file may name for import; see
            `envmgr.config.imports` for what it may name without. A mapping is trusted.

    Returns:
        An EasyDict with the sections `env`, `manager` and `collect`. Mappings whose keys are no
        strings, such as seeds by env_id, are held too.

    Raises:
        UnknownKeyError: a key or a kind of manager that does not exist; the nearest is named.
        ConfigError: the file cannot be read or is malformed, a value is not allowed, or a name may
            not be imported or cannot be.
    """
    return resolve_config(source, set=set, allow_imports=allow_imports).values


def resolve_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    set: Sequence[str] = (),
    allow_imports: Sequence[str] | None = None,
) -> ResolvedConfig:
    """Return what `load_config` returns, with the origin of every value.

    The arguments and errors are those of `load_config`.
    """
    policy: ImportPolicy | None = None
    if isinstance(source, Mapping):
        given, origin = to_plain(source), "argument"
    else:
        source = _checked_path(source)
        given, origin = to_plain(read_config_file(source)), f"file {source}"
        policy = file_policy(allow_imports, Path(source))
    origins: dict[_Path, str] = dict.fromkeys(_leaves(given), origin)
    for override in _checked_overrides(set):
        _apply_override(given, override, origins)
    _check_sections(given)

    env = EnvConfig.from_mapping(given.get("env"))
    collect = CollectConfig.from_mapping(given.get("collect"))
    kind = kind_of({"type": "base", **as_mapping(given.get("manager"), "manager")}, policy)
    manager_cls = ENV_MANAGER_REGISTRY.get(kind)
    preset = default_config_of(manager_cls, kind)
    manager = ManagerConfig.from_mapping(given.get("manager"), preset)
    transport_cls = getattr(manager_cls, "_transport_cls", Transport)  # not in classes of others
    check_kind(manager, hides_resets=transport_cls.works_alone, refused=transport_cls.refused)
    if policy is not None:
        check_imports(env, policy)
        check_preload(manager.preload or (), policy)
        if collect.policy != "random":
            import_object(collect.policy, allow=policy, key="collect.policy")
        if origins.get(("collect", "output")) == origin:
            check_output(collect.output)
        if manager.worker_log is not None and origins[("manager", "worker_log")] == origin:
            instead = "Name that folder with --set manager.worker_log=FOLDER on the command line."
            check_confined(manager.worker_log, "manager.worker_log", instead)
        given_there = [o for key, o in origins.items() if key[:2] == ("manager", "trace")]
        if manager.trace is not None and origin in given_there:
            instead = "Name that file with --trace on the command line."
            check_confined(manager.trace.path, "manager.trace", instead)
    values = {"env": env.to_dict(), "manager": manager.to_dict(), "collect": collect.to_dict()}
    return ResolvedConfig(
        values=to_easydict(values),
        origins=_origins_of(values, origins, kind, preset),
        import_policy=policy,
    )


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
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, it is a folder, too large, not UTF-8, empty, malformed,
            or not a mapping; the message names the file, line and column.
    """
    name = os.fspath(file)
    try:
        with open(name, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"the config file {name!r} does not exist (looked in {os.path.abspath(name)}). "
            "Correct the path."
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
        decoded = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise ConfigError(
            f"{name}, line {line}, column {column}: not UTF-8. Save the file as UTF-8."
        ) from None
    values = load_yaml(decoded, name)
    if values is None:
        raise ConfigError(
            f"the config file {name!r} is empty. Write at least one of the sections "
            f"{', '.join(SECTIONS)}."
        )
    return dict(as_mapping(values, f"the config file {name!r}"))


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return a config as YAML that `load_config` reads back equal.

    Raises:
        ConfigError: a value is of a type that YAML does not hold; the message names its key.
    """
    return dump_yaml(values)


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


def check_output(path: str | None) -> None:
    """Refuse a `collect.output` of a config file that leads out of the working directory.

    Raises:
        ConfigError: it does.
    """
    if path is not None:
        instead = "Name that folder with --output on the command line."
        check_confined(path, "collect.output", instead)


def _apply_override(given: dict[str, Any], override: str, origins: dict[_Path, str]) -> None:
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
    # What was given for all or for a part of it is replaced; neighbours keep their origin.
    for known in [k for k in origins if k[: len(path)] == path or k == path[: len(k)]]:
        del origins[known]
    origins.update(dict.fromkeys(_leaves(value, path), "set"))


def _key_like(part: str, node: Mapping[Any, Any]) -> Any:
    """Return the key of `node` that reads like `part`, which may be a number; else `part`."""
    return next((key for key in node if _name_of(key) == part), part)


def _name_of(key: Any) -> str:
    return key if isinstance(key, str) else short_text(key)


def _leaves(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yield the paths of all values that are not filled mappings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, _name_of(key)))
    else:
        yield path


def _origins_of(
    values: Mapping[str, Any], given: Mapping[_Path, str], kind: str, preset: Mapping[str, Any]
) -> dict[str, str]:
    """Return the origin of every value: of the longest part of its path that was given, if any."""
    defaults = ManagerConfig().to_dict()
    origins = {}
    for path in _leaves(values):
        prefixes = (path[:length] for length in range(len(path), 1, -1))
        origin = next((given[prefix] for prefix in prefixes if prefix in given), "default")
        is_managers = path[0] == "manager" and origin == "default"
        if is_managers and preset[path[1]] != defaults[path[1]]:
            origin = f"kind {kind}"
        origins[".".join(path)] = origin
    return origins
