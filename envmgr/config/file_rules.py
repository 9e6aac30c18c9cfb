"""What a config file may set each key to.

A config file may come from anywhere. So each key of the schema says, where it is declared
(`option(..., from_file=...)`), what a file may set it to, by one of the rules here; a key that says
nothing may not be set by a file at all. Values given by code are not checked by the rules. Of those
given on the command line, only the names of modules and of what is in them are: `--set` says which
code is meant, and one of the lists has to say that it may be imported.

`admit` applies the rules of all keys that a file gives, before anything is imported or started.
Whoever runs the config can allow more than the rules do: `allow_list` has the three lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from envmgr.config.checks import Check, Refused, check_value
from envmgr.config.env_arguments import check_env_arguments
from envmgr.config.imports import FilePolicy, check_env_id, import_object
from envmgr.config.paths import (
    check_confined,
    check_log,
    check_output,
    check_places,
    check_timeline,
)
from envmgr.config.ray_tokens import lets_everybody_in
from envmgr.config.schema import FileRule, Section, check_keys, keys_of, option
from envmgr.config.variables import HARMLESS


class NamesEnv(Protocol):
    """The section `env`, as far as it says which env is meant."""

    @property
    def id(self) -> str | None:
        """An id of gymnasium's."""
        ...

    @property
    def entry(self) -> str | None:
        """A class or function, as `module:name`."""
        ...


@dataclass(frozen=True)
class Asked:
    """What a config file asks for at one key.

    Attributes:
        key: the key's dotted path.
        value: the value in its normal form.
        policy: what the file may do.
        env: the section `env` of the config, whoever gave its values.
        is_override: whether an override gave the value; overrides are checked only where they name
            code.
    """

    key: str
    value: Any
    policy: FilePolicy
    env: NamesEnv
    is_override: bool = False


@dataclass(frozen=True)
class Below(FileRule):
    """The rule of a key that holds a section, each of whose keys has a rule of its own.

    Attributes:
        lone: the key that is meant by a value given in place of the section's keys, if one may be.
    """

    schema: type[Section] | None = None
    lone: str | None = None

    def given(self, value: Any) -> Mapping[Any, Any]:
        """Return the keys of the section that a value gives, with their values."""
        if isinstance(value, Mapping):
            return value
        return {} if value is None or self.lone is None else {self.lone: value}


def _nothing_more(asked: Asked) -> None:
    """Admit all that the key accepts."""


ANY = FileRule("anything", _nothing_more)
"""For numbers, flags, and words all of which the key knows."""

plain = functools.partial(option, from_file=ANY)
"""Returns the field of a key that a file may set to anything that the key accepts."""

LOOKED_UP = FileRule("anything", _nothing_more)
"""For texts that are only compared with known names: no path, no module and no command."""

TAKES_AWAY = FileRule("anything", _nothing_more)
"""For patterns of variables that workers do not get. `-I`, `-s` and `-P` of Python reach workers
all the same."""


def below(schema: type[Section], lone: str | None = None) -> Below:
    """Return the rule of a key that holds a section."""
    return Below("see its keys", _nothing_more, schema=schema, lone=lone)


def unless_allowed(why: str, but: Check | None = None) -> FileRule:
    """Return the rule of a key that a file may not set, or only to `but`, unless it is allowed to.

    Args:
        why: what the value could do, to follow "which".
        but: what a file may set the key to in any case; None: nothing.
    """

    def admit(asked: Asked) -> None:
        if but is None or not _fits(but, asked.value):
            what = "not set that" if but is None else f"set that only to {but.allowed}"
            asked.policy.admit_key(asked.key, asked.value, f"which {why}; it may {what}")

    return FileRule("" if but is None else but.allowed, admit, can_be_allowed=True)


def _fits(check: Check, value: Any) -> bool:
    try:
        check.convert(value)
    except Refused:
        return False
    return True


def plain_values() -> Check:
    """Return a check for values that cannot name anything: numbers, flags, nulls, lists of them."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float))

    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(map(is_plain, value.values())):
            raise Refused
        return value

    return Check("numbers, true and false, and lists of these", convert)


# -- code that is named ---------------------------------------------------------------------------


def _admit_modules(asked: Asked) -> None:
    for name in asked.value or ():
        asked.policy.admit_registering(name, name, asked.key)


def _admit_env_id(asked: Asked) -> None:
    check_env_id(asked.value, asked.policy)


def _admit_object(asked: Asked) -> None:
    import_object(asked.value, allow=asked.policy, key=asked.key)


def _admit_policy(asked: Asked) -> None:
    if asked.value != "random":
        _admit_object(asked)


def _admit_wrappers(asked: Asked) -> None:
    for index, wrapper in enumerate(asked.value):
        key = f"{asked.key}[{index}]"
        found = import_object(wrapper["path"], allow=asked.policy, key=key)
        if not asked.is_override:
            check_places(found, wrapper["kwargs"], f"{key}.kwargs")


def _admit_arguments(asked: Asked) -> None:
    env = asked.env
    if env.id is not None:
        check_env_arguments(env.id, asked.value, asked.policy, asked.key)
    elif env.entry is not None:
        found = import_object(env.entry, allow=asked.policy, key="env.entry")
        check_places(found, asked.value, asked.key)


_IMPORTED = "what it [may import](../guide/configs.md#what-a-file-may-import)"
MODULES = FileRule(_IMPORTED, _admit_modules, names_code=True)
ENV_ID = FileRule(_IMPORTED, _admit_env_id, names_code=True)
OBJECT = FileRule(_IMPORTED, _admit_object, names_code=True)
POLICY = FileRule(_IMPORTED, _admit_policy, names_code=True)
WRAPPERS = FileRule(_IMPORTED, _admit_wrappers, names_code=True)
ARGUMENTS = FileRule("arguments that name no code", _admit_arguments)


def _admit_kind(asked: Asked) -> None:
    version = lets_everybody_in() if asked.value == "ray" else None
    if version is not None:
        why = f"which starts Ray {version}, and that lets everybody in who reaches its ports"
        asked.policy.admit_key(asked.key, asked.value, why)


KIND = FileRule("anything; `ray` if it asks for tokens", _admit_kind, can_be_allowed=True)

# -- places to write to ---------------------------------------------------------------------------


def _admit_output(asked: Asked) -> None:
    check_output(asked.value)


def _admit_log(asked: Asked) -> None:
    instead = "Name that folder with --set manager.worker_log=FOLDER on the command line."
    check_confined(asked.value, asked.key, instead)


def _admit_timeline(asked: Asked) -> None:
    check_timeline(asked.value, asked.key, "Name that file with --trace on the command line.")


def _admit_episode_log(asked: Asked) -> None:
    check_log(asked.value, asked.key, "Name that file with --set manager.episode_log=FILE.")


_PLACE = "a folder below the working directory"
OUTPUT, LOG = FileRule(_PLACE, _admit_output), FileRule(_PLACE, _admit_log)
EPISODE_LOG = FileRule("a `.jsonl` file below the working directory", _admit_episode_log)
TIMELINE = FileRule("a `.json` file below the working directory", _admit_timeline)

# -- variables ------------------------------------------------------------------------------------


def _admit_variables(asked: Asked) -> None:
    for name, value in asked.value.items():
        if name in asked.policy.env:
            continue
        harmless = HARMLESS.get(name)
        if harmless is None:
            why = (
                "a config file may set variables only of which none can make a process load code, "
                "run a command, write a file or connect to somewhere, such as MUJOCO_GL, "
                "OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES"
            )
            raise asked.policy.refused_variable(f"{asked.key}.{name}", name, value, why)
        if not _fits(harmless, value):
            why = f"a config file may set it only to: {harmless.allowed}"
            raise asked.policy.refused_variable(f"{asked.key}.{name}", name, value, why)


VARIABLES = FileRule(
    "[harmless ones](#variables-that-a-file-may-set); others with `--allow-env`", _admit_variables
)

# -- asking ---------------------------------------------------------------------------------------


def admit(
    schema: type[Section],
    said: Mapping[Any, Any],
    whole: Mapping[Any, Any],
    policy: FilePolicy,
    env: NamesEnv,
) -> None:
    """Refuse what a config file may not set.

    Args:
        schema: the schema of a section.
        said: the part of the section that the file gives, less what was overridden.
        whole: the section with the overrides.
        policy: what the file may do.
        env: the section `env`.

    Raises:
        ConfigError: a value is not allowed; the message names the key and says what would allow it.
        UnknownKeyError: a key of a section below does not exist.
        MissingDependencyError: a well-known package is meant that is not installed.
    """
    for field in keys_of(schema):
        rule: FileRule | None = field.metadata["from_file"]
        given = whole if rule is not None and rule.names_code else said
        if field.name not in given:
            continue
        value = given[field.name]
        if isinstance(rule, Below) and rule.schema is not None:
            keys, all_keys = rule.given(value), rule.given(whole[field.name])
            check_keys(keys, rule.schema, rule.schema.PATH)
            admit(rule.schema, keys, all_keys, policy, env)
            continue
        key = f"{schema.PATH}.{field.name}"
        value = check_value(field.metadata["check"], value, key, is_key=True)
        if value == field.default:  # as if the file did not say it
            continue
        if rule is None:
            policy.admit_key(key, value, "and nothing says that it may set that")
        else:
            rule.admit(Asked(key, value, policy, env, is_override=field.name not in said))


def keys_to_allow(*schemas: type[Section]) -> Iterator[str]:
    """Yield the keys that a file may be allowed to set to anything."""
    for schema in schemas:
        for field in keys_of(schema):
            rule: FileRule | None = field.metadata["from_file"]
            if isinstance(rule, Below) and rule.schema is not None:
                yield from keys_to_allow(rule.schema)
            elif rule is None or rule.can_be_allowed:
                yield f"{schema.PATH}.{field.name}"
