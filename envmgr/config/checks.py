"""Checks of plain values: each says in words what it allows and returns one normal form."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envmgr.errors import ConfigError
from envmgr.spaces.reading import Unreadable, error_text, read_list, short_text


class Refused(Exception):
    """A value that a check does not accept; the text, perhaps empty, says what is wrong with it."""


@dataclass(frozen=True)
class Check:
    """What a key accepts.

    Attributes:
        allowed: the accepted values, in words, to follow "must be".
        convert: returns the value in its one normal form, or raises `Refused`.
    """

    allowed: str
    convert: Callable[[Any], Any]


def show_value(value: object, limit: int = 80) -> str:
    """Return `value` as users write it in YAML, cut at `limit` characters, for a message."""
    if value is None or isinstance(value, (bool, np.bool_)):
        text = {None: "null", True: "true", False: "false"}[None if value is None else bool(value)]
    elif isinstance(value, (float, np.floating)) and not math.isfinite(value):
        text = ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    elif isinstance(value, np.generic):
        text = repr(value.item())
    else:
        text = short_text(value, limit)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_LEAST_BEGINNING = 3
"""The fewest letters that are taken for the beginning of a name."""


def nearest_few(name: object, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that are like `name`, or begin with it; the most alike first."""
    if not isinstance(name, str):
        return []
    by_lower_case = {word.lower(): word for word in known}
    found = difflib.get_close_matches(name.lower(), by_lower_case, n=most, cutoff=0.6)
    if len(name) >= _LEAST_BEGINNING:
        longer = sorted(word for word in by_lower_case if word.startswith(f"{name.lower()}_"))
        found += [word for word in longer if word not in found]
    return [by_lower_case[one] for one in found[:most]]


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None if none is alike."""
    return next(iter(nearest_few(name, known, 1)), None)


def check_value(check: Check, value: object, path: str, *, is_key: bool = False) -> Any:
    """Return `value` in its normal form.

    Args:
        check: what is allowed.
        value: what was found.
        path: the path of the key, or the name of the argument.
        is_key: whether it is a key of a config, which has a default.

    Raises:
        ConfigError: the value is not allowed; the message names the key's path, the value found
            and what is allowed.
    """
    try:
        return check.convert(value)
    except Refused as refusal:
        detail = f" ({refusal})" if str(refusal) else ""
        or_else = ", or leave the key out to get its default" if is_key else ""
        raise ConfigError(
            f"{path} is {show_value(value)} ({type(value).__name__}){detail}, but must be "
            f"{check.allowed}. Correct the value{or_else}."
        ) from None
    except ConfigError:  # of a key below
        raise
    except Exception as error:  # what objects raise that do not want to be looked at
        raise ConfigError(
            f"{path} is {show_value(value)} ({type(value).__name__}), which cannot be read: "
            f"{error_text(error)}. It must be {check.allowed}."
        ) from error


MAX_SECONDS = 1e6
"""The longest time limit; null means no limit. (`poll` overflows at 2**31 ms.)"""


def boolean() -> Check:
    """Return a check for true or false; numbers and words are refused."""

    def convert(value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise Refused
        return bool(value)

    return Check("true or false", convert)


def nothing() -> Check:
    """Return a check for false, where something can be left out altogether."""

    def convert(value: Any) -> bool:
        if boolean().convert(value):
            raise Refused
        return False

    return Check("false", convert)


def _as_int(value: Any) -> int:
    """Return an int for an int, a numpy integer or a float without a fraction."""
    if isinstance(value, (bool, np.bool_)):
        raise Refused
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)
    raise Refused


def integer(minimum: int, maximum: int | None = None) -> Check:
    """Return a check for a whole number in a range; a bool is not a number, `4.0` is."""

    def convert(value: Any) -> int:
        number = _as_int(value)
        if number < minimum or (maximum is not None and number > maximum):
            raise Refused
        return number

    upper = "" if maximum is None else f" and <= {maximum}"
    return Check(f"an integer >= {minimum}{upper}", convert)


def count_or_inf() -> Check:
    """Return a check for a whole number from 1 on, or `.inf` (kept as `math.inf`)."""
    whole = integer(1)

    def convert(value: Any) -> float:
        if isinstance(value, (float, np.floating)) and value == math.inf:
            return math.inf
        number: int = whole.convert(value)
        return number

    return Check("an integer >= 1, or .inf", convert)


def number(
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float = math.inf,
    unit: str = "",
) -> Check:
    """Return a check for a finite number within bounds, which is kept as float.

    Seconds have `MAX_SECONDS` as upper bound.
    """
    limit = min(maximum, MAX_SECONDS) if unit == "seconds" else maximum

    def convert(value: Any) -> float:
        if isinstance(value, (bool, np.bool_)):
            raise Refused
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise Refused
        try:
            result = float(value)
        except OverflowError:
            raise Refused from None
        if not math.isfinite(result) or result > limit:
            raise Refused
        if (above is not None and result <= above) or (minimum is not None and result < minimum):
            raise Refused
        return result

    bound = f"> {above:g}" if above is not None else f">= {minimum:g}"
    upper = f" and <= {limit:g}" if math.isfinite(limit) else ""
    return Check(f"a number{' of ' + unit if unit else ''} {bound}{upper}", convert)


MAX_TEXT = 1000
"""The most characters of a string that names something; messages repeat such a string."""


def named(allowed: str, fits: Callable[[str], bool]) -> Check:
    """Return a check for a string of some form."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not fits(value):
            raise Refused
        return value

    return Check(allowed, convert)


def text() -> Check:
    """Return a check for a string that is not empty."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise Refused
        if len(value) > MAX_TEXT:
            raise Refused(f"more than {MAX_TEXT} characters")
        return value

    return Check("a non-empty string", convert)


def choice(*words: str) -> Check:
    """Return a check for one of some words."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            alike = nearest(value, words)
            raise Refused(f"did you mean {alike!r}?" if alike else "")
        return value

    return Check(f"one of {', '.join(words)}", convert)


def word(only: str) -> Check:
    """Return a check for one word, as an alternative to values of other types."""
    return Check(f"`{only}`", choice(only).convert)


def or_null(check: Check, meaning: str = "", null_is: Any = None) -> Check:
    """Return a check for what `check` accepts, or null, which becomes `null_is`."""

    def convert(value: Any) -> Any:
        return null_is if value is None else check.convert(value)

    return Check(f"{check.allowed}, or null{f' ({meaning})' if meaning else ''}", convert)


def either(*checks: Check) -> Check:
    """Return a check that converts a value by the first of `checks` that accepts it."""

    def convert(value: Any) -> Any:
        details = []
        for check in checks:
            try:
                return check.convert(value)
            except Refused as refusal:
                details.append(str(refusal))
        raise Refused(next(filter(None, details), ""))

    return Check(", or ".join(check.allowed for check in checks), convert)


def as_items(value: object) -> Sequence[Any]:
    """Return the entries of a list, tuple, range or 1-d array; refuse all else, even strings."""
    if not isinstance(value, (list, tuple, range, np.ndarray)):
        raise Refused
    try:
        return read_list(value)
    except Unreadable as error:
        raise Refused(str(error)) from error


def list_of(check: Check, *, at_least: int = 0, allowed: str = "") -> Check:
    """Return a check for a list (kept as a tuple) of what `check` accepts.

    `allowed` may say that in other words.
    """

    def convert(value: Any) -> tuple[Any, ...]:
        items = as_items(value)
        if len(items) < at_least:
            raise Refused("too few entries")
        result = []
        for index, item in enumerate(items):
            try:
                result.append(check.convert(item))
            except Refused as refusal:
                detail = f": {refusal}" if str(refusal) else f" is {show_value(item)}"
                raise Refused(f"entry {index}{detail}") from None
        return tuple(result)

    return Check(allowed or f"a list of entries that are {check.allowed}", convert)
