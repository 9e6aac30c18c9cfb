"""Checks made for single keys: seeds, cores, environment variables, names of what to import."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from envmgr.config.checks import MAX_TEXT, as_items, integer, list_of, or_null, text
from envmgr.config.merge import to_plain
from envmgr.config.schema import Check, Refused, show_value, unknown_key

ENV_VARIABLE_KEYS = ("allow", "deny", "set")


@dataclass(frozen=True, slots=True)
class WorkerEnv:
    """Which environment variables a worker gets.

    Attributes:
        allow: glob patterns (`OMP_*`); variables of the parent that match one are passed on.
        deny: glob patterns; variables that match one are not passed on, whatever `allow` says.
        set: variables set in the worker, after `allow` and `deny`.
    """

    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    set: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the form that a config holds."""
        return {"allow": list(self.allow), "deny": list(self.deny), "set": dict(self.set)}


def seed_list() -> Check:
    """A seed for each env, kept as a tuple."""
    entries = list_of(or_null(integer(0)), at_least=1)
    return Check("a list of integers >= 0 or null, one for each env", entries.convert)


def seed_mapping() -> Check:
    """Seeds of some env_ids, kept as a dict with int keys."""
    one = or_null(integer(0))

    def env_id_of(key: Any) -> int:
        # EasyDict holds string keys only, so "3" has to do for 3.
        if isinstance(key, str) and key.isascii() and key.isdigit():
            return int(key)
        return cast(int, integer(0).convert(key))

    def convert(value: Any) -> dict[int, int | None]:
        if not isinstance(value, Mapping):
            raise Refused
        seeds: dict[int, int | None] = {}
        for key, seed in value.items():
            try:
                env_id, checked = env_id_of(key), one.convert(seed)
            except Refused:
                raise Refused(f"entry {show_value(key)}: {show_value(seed)}") from None
            if env_id in seeds:
                raise Refused(f"env_id {env_id} occurs twice")
            seeds[env_id] = checked
        return seeds

    return Check("a mapping of env_id to an integer >= 0 or null", convert)


def affinity() -> Check:
    """Cores for all workers, or for each worker in turn; kept as tuples."""
    cores = list_of(integer(0), at_least=1)
    by_worker = list_of(cores, at_least=1)

    def convert(value: Any) -> Any:
        items = as_items(value)
        nested = any(isinstance(item, (list, tuple, range)) for item in items)
        return (by_worker if nested else cores).convert(value)

    return Check("a list of core numbers, or one such list for each worker", convert)


def worker_env() -> Check:
    """Rules for environment variables, kept as a `WorkerEnv`."""
    patterns = list_of(text())

    def variables(value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise Refused("`set` is not a mapping")
        for name, content in value.items():
            if not _is_variable(name) or not name or "=" in name:
                raise Refused(f"`set` has {show_value(name)}, which cannot name a variable")
            if not _is_variable(content):
                raise Refused(
                    f"`set.{name}` is {show_value(content)}, which is not a string that a variable "
                    "can hold"
                )
        return dict(value)

    def convert(value: Any) -> WorkerEnv:
        if isinstance(value, WorkerEnv):
            value = value.to_dict()
        if not isinstance(value, Mapping):
            raise Refused
        for key in value:
            if key not in ENV_VARIABLE_KEYS:
                raise unknown_key(key, ENV_VARIABLE_KEYS, "manager.worker_env")
        lists = {k: patterns.convert(value[k]) for k in ("allow", "deny") if k in value}
        return WorkerEnv(**lists, set=variables(value.get("set") or {}))

    return Check(
        "a mapping with `allow` and `deny` (lists of name patterns) and `set` (name: string)",
        convert,
    )


def _is_variable(text: object) -> bool:
    """Whether the system can have it as a part of the environment."""
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def module_name() -> Check:
    """The dotted name of a module."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not _is_dotted(value):
            raise Refused
        return value

    return Check("a dotted module name", convert)


def object_name() -> Check:
    """`package.module:callable`; the part after the colon may be dotted."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.count(":") != 1:
            raise Refused
        if not all(_is_dotted(part) for part in value.split(":")):
            raise Refused
        return value

    return Check("a name of the form `package.module:callable`", convert)


def object_path() -> Check:
    """`package.module:Name` or `package.module.Name`."""
    with_colon = object_name()

    def convert(value: Any) -> str:
        if isinstance(value, str) and "." in value and _is_dotted(value):
            return value
        return cast(str, with_colon.convert(value))

    return Check("a name of the form `package.module:callable` or `package.module.Name`", convert)


def policy_name() -> Check:
    """`random`, or the name of a callable."""
    named = object_name()
    return Check(
        f"`random`, or {named.allowed}",
        lambda value: value if value == "random" else named.convert(value),
    )


def free_mapping() -> Check:
    """Keyword arguments: a mapping whose keys are identifiers, of any values; null is none."""

    def convert(value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise Refused
        for key in value:
            if not isinstance(key, str) or not key.isidentifier():
                raise Refused(f"{show_value(key)} cannot name an argument")
        return cast("dict[str, Any]", to_plain(value))

    return Check("a mapping of argument names to values", convert)


def wrapper_list() -> Check:
    """Wrappers by dotted path, kept as a tuple of `{"path": ..., "kwargs": {...}}`."""
    arguments = free_mapping()

    def one(item: Any) -> dict[str, Any]:
        given = {"path": item} if isinstance(item, str) else item
        if not isinstance(given, Mapping) or not set(given) <= {"path", "entry", "kwargs"}:
            raise Refused("neither a dotted path nor a mapping of `path` and `kwargs`")
        if ("path" in given) == ("entry" in given):
            raise Refused("exactly one of `path` and its other name `entry` is needed")
        path = given.get("path", given.get("entry"))
        try:
            named = object_path().convert(path)
        except Refused:
            raise Refused(f"{show_value(path)} is no dotted path") from None
        return {"path": named, "kwargs": arguments.convert(given.get("kwargs"))}

    def convert(value: Any) -> tuple[dict[str, Any], ...]:
        if value is None:
            return ()
        checked = []
        for index, item in enumerate(as_items(value)):
            try:
                checked.append(one(item))
            except Refused as refusal:
                raise Refused(f"entry {index}: {refusal}") from None
        return tuple(checked)

    return Check(
        "a list of dotted paths (`package.module.Wrapper`) or of mappings with `path` and, if "
        "wanted, `kwargs`",
        convert,
    )


def _is_dotted(name: str) -> bool:
    return len(name) <= MAX_TEXT and all(part.isidentifier() for part in name.split("."))
