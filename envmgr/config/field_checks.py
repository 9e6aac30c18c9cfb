"""Checks made for single keys: seeds, cores, environment variables, names of what to import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from envmgr.config.checks import (
    MAX_TEXT,
    Check,
    Refused,
    as_items,
    integer,
    list_of,
    named,
    or_null,
    show_value,
)
from envmgr.config.merge import to_plain


def seed_list() -> Check:
    """Return a check for a list with a seed for each env, kept as a tuple."""
    allowed = "a list of integers >= 0 or null, one for each env"
    return list_of(or_null(integer(0)), at_least=1, allowed=allowed)


def seed_mapping() -> Check:
    """Return a check for seeds of some env_ids, kept as a dict with int keys."""
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
    """Return a check for cores of all workers, or of each worker in turn; kept as tuples."""
    cores = list_of(integer(0), at_least=1)
    by_worker = list_of(cores, at_least=1)

    def convert(value: Any) -> Any:
        items = as_items(value)
        nested = any(isinstance(item, (list, tuple, range)) for item in items)
        return (by_worker if nested else cores).convert(value)

    return Check("a list of core numbers, or one such list for each worker", convert)


def variables() -> Check:
    """Return a check for environment variables by name; null is none."""

    def convert(value: Any) -> dict[str, str]:
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

    return or_null(Check("a mapping of names to strings", convert), null_is={})


def _is_variable(text: object) -> bool:
    """Return whether the system can have a text as a part of the environment."""
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _is_dotted(name: str) -> bool:
    return len(name) <= MAX_TEXT and all(part.isidentifier() for part in name.split("."))


def _has_colon(name: str) -> bool:
    return name.count(":") == 1 and all(map(_is_dotted, name.split(":")))


def _is_path(name: str) -> bool:
    return _has_colon(name) or ("." in name and _is_dotted(name))


def _is_object(name: str) -> bool:
    file, _, attribute = name.partition(":")
    if file.endswith(".py"):
        module = file.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise Refused(f"a module is named without .py: write '{module}:{attribute or 'MyEnv'}'")
    if not _has_colon(name) and _is_path(name):
        module, _, attribute = name.rpartition(".")
        raise Refused(f"did you mean '{module}:{attribute}'?")
    return _has_colon(name)


MODULE_NAME = named("a dotted module name", _is_dotted)
"""The dotted name of a module."""

OBJECT_NAME = named("a name of the form `package.module:callable`", _is_object)
"""`package.module:callable`; the part after the colon may be dotted."""

OBJECT_PATH = named(
    "a name of the form `package.module:callable` or `package.module.Name`", _is_path
)
"""`package.module:Name` or `package.module.Name`."""

POLICY_NAME = named(
    f"`random`, or {OBJECT_NAME.allowed}", lambda name: name == "random" or _is_object(name)
)
"""`random`, or the name of a callable."""


def free_mapping() -> Check:
    """Return a check for keyword arguments: identifiers mapped to any values; null is none."""

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
    """Return a check for wrappers by name, kept as a tuple of `{"path": ..., "kwargs": {...}}`."""
    arguments = free_mapping()

    def one(item: Any) -> dict[str, Any]:
        given = {"path": item} if isinstance(item, str) else item
        if callable(item):
            raise Refused(f"a class or function, which a config has by name: {_name_of(item)}")
        if isinstance(item, (list, tuple)) and item and callable(item[0]):
            named = f"{{'path': {_name_of(item[0])}, 'kwargs': {{...}}}}"
            raise Refused(f"a class or function and more: write {named}")
        if not isinstance(given, Mapping) or not set(given) <= {"path", "entry", "kwargs"}:
            raise Refused("neither a name nor a mapping of `path` and `kwargs`")
        if ("path" in given) == ("entry" in given):
            raise Refused("exactly one of `path` and its other name `entry` is needed")
        path = given.get("path", given.get("entry"))
        try:
            path = OBJECT_PATH.convert(path)
        except Refused:
            raise Refused(f"{show_value(path)} is not {OBJECT_PATH.allowed}") from None
        return {"path": path, "kwargs": arguments.convert(given.get("kwargs"))}

    allowed = (
        "a list of names (`package.module:Wrapper` or `package.module.Wrapper`), or of mappings "
        "with `path` and, if wanted, `kwargs`"
    )
    wrappers = or_null(list_of(Check("a wrapper", one), allowed=allowed), null_is=())
    return Check(allowed, wrappers.convert)


def _name_of(build: Any) -> str:
    """Return, in quotes, the name by which a config can give a class or function."""
    module, name = (getattr(build, key, "") for key in ("__module__", "__qualname__"))
    path = f"{module}:{name}"
    return repr(path) if _has_colon(path) else "'package.module:Wrapper'"
