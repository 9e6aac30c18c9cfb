"""Merging and copying of configs: nested mappings as dicts and as EasyDicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easydict import EasyDict

from envmgr.config.schema import show_value
from envmgr.errors import ConfigError

REPLACED_WHOLE = frozenset({"manager.seed"})
"""Keys whose mappings are one value: an update replaces them, and may change their form."""


class PlainDict(dict[Any, Any]):
    """A dict that an EasyDict leaves as it is (it converts every exact dict put into it)."""


def to_plain(value: Any) -> Any:
    """Return a deep copy with dicts for mappings of any class, lists and tuples kept as such."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    return value


def deep_merge(
    base: Mapping[str, Any], update: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return `base` with the keys of `update` on top, mappings merged key by key.

    Lists are replaced, as are the values under `REPLACED_WHOLE`. Neither argument is changed, and
    the result shares no dict or list with them. Unknown keys are the schema's business.

    Args:
        base: what is below.
        update: what is on top; null (None) replaces whatever is below.
        path: dotted path of the two mappings, for messages and `REPLACED_WHOLE`.

    Raises:
        ConfigError: a mapping would be replaced by a single value, or the other way round.
    """
    merged: dict[str, Any] = to_plain(base)
    for key, value in update.items():
        here = f"{path}.{key}" if path else str(key)
        below = merged.get(key)
        if here in REPLACED_WHOLE or below is None or value is None:
            merged[key] = to_plain(value)
        elif isinstance(below, Mapping) != isinstance(value, Mapping):
            raise ConfigError(
                f"{here} is {show_value(value)} ({type(value).__name__}), but what it changes is "
                f"{show_value(below)}: a mapping and a single value cannot replace each other. "
                "Set the keys below it, or null."
            )
        elif isinstance(value, Mapping):
            merged[key] = deep_merge(below, value, here)
        else:
            merged[key] = to_plain(value)
    return merged


def to_easydict(values: Mapping[str, Any]) -> EasyDict:
    """Return a deep copy as EasyDict; mappings that EasyDict cannot hold stay dicts (`PlainDict`).

    EasyDict makes an attribute of each key, so keys must be strings and a key such as `items` or
    `update` would hide the method of that name.
    """
    result = EasyDict()
    for key, value in values.items():
        # Past EasyDict's own conversion, which fails on keys that are no strings.
        held = _held(value)
        dict.__setitem__(result, key, held)
        object.__setattr__(result, key, held)
    return result


def _held(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_easydict(value) if _can_hold(value) else PlainDict(to_plain(value))
    if type(value) in (list, tuple):
        return type(value)(_held(item) for item in value)
    return value


def _can_hold(mapping: Mapping[Any, Any]) -> bool:
    """Return whether an EasyDict can hold this mapping and, by itself, dicts in its lists."""
    for key, value in mapping.items():
        if not isinstance(key, str) or hasattr(EasyDict, key):
            return False
        if type(value) in (list, tuple) and not _can_hold_items(value):
            return False
    return True


def _can_hold_items(items: Any) -> bool:
    return all(
        (not isinstance(item, Mapping) or _can_hold(item))
        and (type(item) not in (list, tuple) or _can_hold_items(item))
        for item in items
    )
