"""Types that every part of envmgr shares."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


class EnvTimestep(NamedTuple):
    """What one step of one env gave. Four fields in this order, as DI-engine's `BaseEnvTimestep`.

    Attributes:
        obs: the observation after the step; at an episode's end, the terminal observation.
        reward: what the env returned (a float for gymnasium envs).
        done: whether the episode ended (`terminated or truncated` for gymnasium envs).
        info: the env's info. For gymnasium envs it also holds `terminated` and `truncated`; an
            abnormal timestep's holds `abnormal=True` and `error`.
    """

    obs: Any
    reward: Any
    done: bool
    info: Any


EnvFactory = Callable[[], Any]
"""Builds one env: a `BaseEnv` or a `gymnasium.Env`."""


class Clock(Protocol):
    """Monotonic seconds. Tests pass a clock that they move by hand."""

    def __call__(self) -> float:
        """Return the present moment in seconds; never goes back."""
        ...


monotonic: Clock = time.monotonic


def is_abnormal(info: Any) -> bool:
    """Return whether an info, or one in a list or tuple of infos, marks its step as abnormal."""
    if type(info) is dict or isinstance(info, Mapping):
        return bool(info.get("abnormal", False))
    if isinstance(info, (list, tuple)):
        return any(is_abnormal(part) for part in info)
    return False


_MOST_ITEMS = 100_000
"""More than anybody has envs; what has no end is given up there."""


class Unreadable(Exception):
    """A value that a caller gave cannot be read; the text says why."""


def short_text(value: object, limit: int = 80) -> str:
    """Return a value's repr on one line, cut at `limit` characters; of any value whatever."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # a broken __repr__, or an int of more digits than Python converts
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def error_text(error: BaseException, limit: int = 200) -> str:
    """Return the class and the text of an exception on one line, cut at `limit` characters."""
    try:
        text = " ".join(str(error).splitlines())
    except Exception:  # a broken __str__
        text = "without a text"
    text = f"{type(error).__name__}: {text}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_list(values: Any) -> list[Any]:
    """Return the items of an iterable.

    Raises:
        Unreadable: it is no iterable, is text or bytes, raises itself, or does not end.
    """
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        raise Unreadable(f"{short_text(values)} is one value, no list")
    try:
        items = list(itertools.islice(values, _MOST_ITEMS + 1))
    except Exception as error:  # what code of the caller's own may raise
        raise Unreadable(_unreadable_text(values, error)) from error
    if len(items) > _MOST_ITEMS:
        raise Unreadable(f"{short_text(values)} has more than {_MOST_ITEMS} items")
    return items


def read_dict(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping of any class as a dict.

    Raises:
        Unreadable: it raises itself, or has a key twice.
    """
    try:
        pairs = [(key, mapping[key]) for key in mapping]  # an EasyDict may have a key `items`
        found = dict(pairs)
    except Exception as error:  # as above
        raise Unreadable(_unreadable_text(mapping, error)) from error
    if len(found) != len(pairs):
        raise Unreadable(f"{short_text(mapping)} has a key twice")
    return found


def _unreadable_text(value: object, error: Exception) -> str:
    return f"{short_text(value)} cannot be read: {error_text(error)}"
