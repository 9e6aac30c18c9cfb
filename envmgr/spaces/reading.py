"""Reading values from other people's code: they may be anything, and may raise when looked at."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from envmgr.spaces.interrupts import pass_interrupt_on

_MOST_ITEMS = 100_000
"""More than anybody has envs; reading an endless iterable is given up there."""


class Unreadable(Exception):
    """A value that a caller gave cannot be read; the text says why."""


def short_text(value: object, limit: int = 80) -> str:
    """Return a value's repr on one line, cut at `limit` characters; works for any value."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception as error:  # a broken __repr__, or an int of more digits than Python converts
        pass_interrupt_on(error)
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def error_text(error: BaseException, limit: int = 200) -> str:
    """Return the class and the text of an exception on one line, cut at `limit` characters.

    An exception that a signal handler of the user's has raised is no failure of a value: it is
    raised again, as an interrupt of the code that has read the value.
    """
    pass_interrupt_on(error)
    try:
        text = " ".join(str(error).splitlines())
    except Exception as broken:  # a broken __str__
        pass_interrupt_on(broken)
        text = "without a text"
    text = f"{type(error).__name__}: {text}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_list(values: Any) -> list[Any]:
    """Return the items of an iterable.

    Raises:
        Unreadable: `values` is not iterable, is text or bytes, raises an exception of its own, or
            does not end.
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
        Unreadable: the mapping raises an exception of its own, or has a key twice.
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
