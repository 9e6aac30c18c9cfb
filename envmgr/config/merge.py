"""Merging and copying of configs: nested mappings as dicts and as EasyDicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from envmgr.config.checks import show_value
from envmgr.errors import ConfigError
from envmgr.spaces.reading import Unreadable, error_text, read_dict

if TYPE_CHECKING:  # it has no types of its own, so that `cfg.manager` would be unknown

    class EasyDict(dict[str, Any]):
        """A dict whose keys are attributes, too."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    from easydict import EasyDict

REPLACED_WHOLE = frozenset({"manager.seed"})
"""Keys whose mappings are one value: an update replaces them, and may change their form."""


class ConfigDict(EasyDict):
    """An EasyDict that holds any mapping, and stays one when copied or pickled.

    EasyDict itself makes an attribute of every key: it fails on keys that are no strings (a `seed`
    by env_id), and a key such as `items` hides the method. Here such keys are items only.
    """

    def __init__(self, d: Mapping[Any, Any] | None = None, **keys: Any) -> None:
        super().__init__()
        self.update(d, **keys)

    def __setattr__(self, name: Any, value: Any) -> None:
        held = _held(value)
        dict.__setitem__(self, name, held)
        if isinstance(name, str) and not hasattr(EasyDict, name):
            object.__setattr__(self, name, held)

    __setitem__ = __setattr__

    def update(self, e: Any = None, **f: Any) -> None:  # type: ignore[override]  # as its own is
        """Set the keys of `e` and those given by name."""
        for key, value in {**dict(e or {}), **f}.items():
            self[key] = value

    def pop(self, k: Any, *default: Any) -> Any:
        """Remove a key and return its value."""
        self.__dict__.pop(k, None)
        return dict.pop(self, k, *default)


def _held(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value if isinstance(value, ConfigDict) else ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(_held(item) for item in value)
    return value


def to_plain(value: Any) -> Any:
    """Return a deep copy with dicts for mappings of any class, lists and tuples kept as such.

    Sets, deques, bytearrays and writeable arrays are copied, too. Other objects, and objects in
    arrays, are not: what they hold, such as a lock, may be meant to be shared.

    Raises:
        ConfigError: a mapping in it cannot be read, or it contains itself.
    """
    try:
        return _plain(value)
    except (Unreadable, RecursionError) as error:
        raise ConfigError(
            f"the config {show_value(value)} cannot be copied: {error_text(error)}. Give "
            "plain dicts, lists and values."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in read_dict(value).items()}
    if type(value) in (list, tuple):
        return type(value)([_plain(item) for item in value])
    if type(value) is deque:
        return deque(map(_plain, value), value.maxlen)
    if type(value) in (set, bytearray):
        return value.copy()
    if type(value) is np.ndarray and value.flags.writeable:
        return value.copy(order="K")
    return value


def deep_merge(
    base: Mapping[str, Any], update: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return `base` with the keys of `update` on top, mappings merged key by key.

    Lists are replaced, as are the values under `REPLACED_WHOLE`. Neither argument is changed, and
    the result shares nothing with them that `to_plain` copies. Unknown keys are left to the schema.

    Args:
        base: the mapping below.
        update: the mapping on top; null (None) in it replaces whatever is below.
        path: dotted path of the two mappings, for messages and `REPLACED_WHOLE`.

    Raises:
        ConfigError: a mapping would be replaced by a single value, or the other way round.
    """
    merged: dict[str, Any] = to_plain(base)
    for key, value in to_plain(update).items():
        here = f"{path}.{key}" if path else str(key)
        below = merged.get(key)
        if here in REPLACED_WHOLE or below is None or value is None:
            merged[key] = value
        elif isinstance(below, Mapping) != isinstance(value, Mapping):
            raise ConfigError(
                f"{here} is {show_value(value)} ({type(value).__name__}), but what it changes is "
                f"{show_value(below)}: a mapping and a single value cannot replace each other. "
                "Set the keys below it, or null."
            )
        elif isinstance(value, Mapping):
            merged[key] = deep_merge(below, value, here)
        else:
            merged[key] = value
    return merged


def to_easydict(values: Mapping[str, Any]) -> EasyDict:
    """Return a deep copy as EasyDict (a `ConfigDict`); tuples and lists stay what they are."""
    return ConfigDict(to_plain(values))
