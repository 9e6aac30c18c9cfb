"""The schema mechanism: dataclass fields whose metadata hold the check and the text of a key.

A section of a config is a frozen dataclass whose fields are made by `option`. Defaults, checks, the
names suggested for unknown keys and the generated reference table all come from these fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from envmgr.errors import ConfigError, UnknownKeyError


class Refused(Exception):
    """A value that a check does not accept; the text says what is wrong in it, and may be empty."""


@dataclass(frozen=True)
class Check:
    """What a key accepts.

    Attributes:
        allowed: the accepted values, in words, to follow "must be".
        convert: returns the value in its one normal form, or raises `Refused`.
    """

    allowed: str
    convert: Callable[[Any], Any]


def option(default: Any, check: Check, doc: str, default_text: str | None = None) -> Any:
    """Return the dataclass field of one key.

    Args:
        default: the default in its normal form (immutable).
        check: what the key accepts.
        doc: one line for the reference table.
        default_text: how the table shows the default, if not as its YAML.
    """
    return dataclasses.field(
        default=default, metadata={"check": check, "doc": doc, "default_text": default_text}
    )


def show_value(value: object, limit: int = 80) -> str:
    """Return `value` as users write it in YAML, cut at `limit` characters, for a message."""
    if value is None or isinstance(value, (bool, np.bool_)):
        text = {None: "null", True: "true", False: "false"}[None if value is None else bool(value)]
    elif isinstance(value, (float, np.floating)) and not math.isfinite(value):
        text = ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    elif isinstance(value, np.generic):
        text = repr(value.item())
    else:
        text = _repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _repr(value: object) -> str:
    try:
        return " ".join(repr(value).splitlines())
    except Exception:  # a broken __repr__, or an int of more digits than Python converts
        return f"<{type(value).__name__}>"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None if none is alike."""
    if not isinstance(name, str):
        return None
    by_lower_case = {word.lower(): word for word in known}
    found = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[found[0]] if found else None


def unknown_key(name: object, known: Iterable[str], where: str) -> UnknownKeyError:
    """Return the error for a key that `where` does not know; it names the nearest known one."""
    names = list(known)
    alike = nearest(name, names)
    hint = f"did you mean {alike!r}? " if alike else ""
    return UnknownKeyError(
        f"unknown key {show_value(name)} in {where}: {hint}Known keys: {', '.join(names)}."
    )


def check_value(check: Check, value: object, path: str) -> Any:
    """Return `value` in its normal form.

    Raises:
        ConfigError: the value is not allowed; the message names the key's path, the value found
            and what is allowed.
    """
    try:
        return check.convert(value)
    except Refused as refusal:
        detail = f" ({refusal})" if str(refusal) else ""
        raise ConfigError(
            f"{path} is {show_value(value)} ({type(value).__name__}){detail}, but must be "
            f"{check.allowed}. Correct the value, or leave the key out to get its default."
        ) from None


def checks_of(schema: type) -> dict[str, Check]:
    """Return the checks of a section's keys, in the order of the table."""
    return {f.name: f.metadata["check"] for f in dataclasses.fields(schema)}


def check_keys(given: Iterable[object], schema: type, path: str) -> None:
    """Refuse a key that `schema` does not have.

    Raises:
        UnknownKeyError: names the unknown key, `path` and the nearest known key.
    """
    known = checks_of(schema)
    for name in given:
        if name not in known:
            raise unknown_key(name, known, path)


def normalise_fields(section: Any, path: str) -> None:
    """Check all fields of a frozen section just made and store their normal forms."""
    for name, check in checks_of(type(section)).items():
        value = check_value(check, getattr(section, name), f"{path}.{name}")
        object.__setattr__(section, name, value)


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as the reference table shows it."""
    shown = field.metadata["default_text"]
    if shown is not None:
        return str(shown)
    if field.default == ():
        return "[]"
    return field.default if isinstance(field.default, str) else show_value(field.default)


def schema_table(schema: type) -> str:
    """Return a markdown table of a section: key, default, what is allowed, meaning."""
    lines = ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(schema):
        cells = (
            f"`{field.name}`",
            f"`{default_text(field)}`",
            field.metadata["check"].allowed,
            field.metadata["doc"],
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def as_mapping(value: object, path: str) -> Mapping[Any, Any]:
    """Return `value` as a mapping; null is the empty one.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path} is {show_value(value)} ({type(value).__name__}), but must be a mapping of "
            "keys to values. Write it as `key: value` lines, or leave it out."
        )
    return value
