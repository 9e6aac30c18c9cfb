"""The schema mechanism: dataclass fields that hold a key's check, text, and rule for files.

A section of a config is a `Section`, whose fields are made by `option`. Defaults, checks, the names
suggested for unknown keys and the generated reference table all come from these fields. The keys
themselves are in `manager` (the section `manager`), `sections` (`env` and `collect`) and
`kind_sections` (those of single kinds).
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from typing_extensions import Self

from envmgr.config.checks import Check, check_value, nearest_few, show_value
from envmgr.config.merge import deep_merge, to_plain
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.spaces.reading import Unreadable, read_dict

_LINE = 96
"""The characters per line of a message that lists many names."""


@dataclasses.dataclass(frozen=True)
class FileRule:
    """What a config file may set a key to; `file_rules` has all such rules.

    Attributes:
        says: what a file may set, in words, for the reference; empty is nothing.
        admit: is given a `file_rules.Asked`, and raises `ConfigError` if that is more than what a
            file may set; the error says what would allow it.
        can_be_allowed: whether `--allow KEY` lets a file set the key to anything.
        names_code: whether overrides are checked as well: they say which code is meant, and one of
            the lists has to say that it may be imported.
    """

    says: str
    admit: Callable[[Any], None]
    can_be_allowed: bool = False
    names_code: bool = False


def option(
    default: Any,
    check: Check,
    doc: str,
    default_text: str | None = None,
    *,
    from_file: FileRule | None = None,
) -> Any:
    """Return the dataclass field of one key.

    Args:
        default: the default in its normal form (immutable).
        check: what the key accepts.
        doc: one line for the reference table.
        default_text: how the table shows the default, if not as its YAML.
        from_file: what a config file may set the key to; None: nothing, unless it is allowed to.
    """
    about = {"check": check, "doc": doc, "default_text": default_text, "from_file": from_file}
    return dataclasses.field(default=default, metadata=about)


class Section:
    """A section of a config, checked: a frozen dataclass with one field for each key.

    Making one checks every field and stores its normal form. `dataclasses.replace` checks again.

    Raises:
        ConfigError: a value is not allowed, or two keys contradict each other; the message names
            the key's path, the value found and what is allowed.
    """

    __slots__ = ()

    PATH: ClassVar[str]
    """Where the section is in a config."""

    PASSED_OVER: ClassVar[frozenset[str]] = frozenset()
    """Keys that are accepted and mean nothing."""

    MEANT: ClassVar[Mapping[str, str]] = {}
    """What is meant by keys that other libraries use for the same purpose."""

    OTHERS: ClassVar[str] = ""
    """A sentence that says where keys belong that are like no known key."""

    def __post_init__(self) -> None:
        for name, check in checks_of(type(self)).items():
            value = check_value(check, getattr(self, name), f"{self.PATH}.{name}", is_key=True)
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse keys that contradict each other."""

    @classmethod
    def from_mapping(
        cls, cfg: Mapping[str, Any] | None, preset: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the checked section of `cfg` on top of `preset` on top of the defaults.

        Args:
            cfg: the user's keys; a dict or an EasyDict, not changed. None is an empty one.
            preset: a kind's own defaults, such as `{"wait_num": 2}`; not changed.

        Raises:
            UnknownKeyError: a key that the schema does not have; the nearest ones are named.
            ConfigError: a value that is not allowed.
        """
        user = as_mapping(cfg, cls.PATH)
        below = as_mapping(preset, f"the preset of {cls.PATH}")
        check_keys([*below, *user], cls, cls.PATH)
        values = deep_merge(below, user, cls.PATH)
        return cls(**{key: value for key, value in values.items() if key not in cls.PASSED_OVER})

    def to_dict(self) -> dict[str, Any]:
        """Return every key with its value as a plain dict of fresh dicts and lists."""
        return {name: _as_given(getattr(self, name)) for name in checks_of(type(self))}


def _as_given(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    return list(map(_as_given, value)) if isinstance(value, tuple) else to_plain(value)


_LISTED = " Known keys:"


def unknown_key(
    name: object, known: Iterable[str], where: str, meant: Mapping[str, str] | None = None
) -> UnknownKeyError:
    """Return the error for a key that `where` does not know; it names the nearest known ones.

    It lists all of them only where none is near, or where they are few.

    Args:
        name: the key.
        known: the known keys.
        where: the path of the section.
        meant: what is meant by names that are like no known key.
    """
    names = list(known)
    alike = " or ".join(map(repr, nearest_few(name, names)))
    if meant and isinstance(name, str) and name in meant:
        alike = meant[name]
    text = f"unknown key {show_value(name)} in {where}"
    text += f": did you mean {alike}?" if alike else "."
    keys = f" {', '.join(names)}."
    if len(keys) > _LINE:
        if alike:
            return UnknownKeyError(text)
        keys = "\n" + textwrap.fill(
            keys, _LINE, initial_indent=" ", subsequent_indent="  ", break_on_hyphens=False
        )
    return UnknownKeyError(f"{text}{_LISTED}{keys}")


def with_hint(error: UnknownKeyError, hint: str) -> UnknownKeyError:
    """Return the error with one more sentence, which comes before the list of the known keys."""
    text, listed, keys = str(error).partition(_LISTED)
    return UnknownKeyError(f"{text} {hint}{listed}{keys}")


def keys_of(schema: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a section's keys, in the order of the table."""
    return dataclasses.fields(schema)


def checks_of(schema: type) -> dict[str, Check]:
    """Return the checks of a section's keys, in the order of the table."""
    return {f.name: f.metadata["check"] for f in dataclasses.fields(schema)}


def check_keys(given: Iterable[object], schema: type[Section], path: str) -> None:
    """Refuse a key that `schema` does not have, and does not pass over.

    Raises:
        UnknownKeyError: names the unknown key, `path` and the nearest known keys.
    """
    known = checks_of(schema)
    for name in given:
        if name not in known and name not in schema.PASSED_OVER:
            error = unknown_key(name, known, path, schema.MEANT)
            is_alike = name in schema.MEANT or nearest_few(name, known)
            raise error if is_alike or not schema.OTHERS else with_hint(error, schema.OTHERS)


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as the reference table shows it."""
    shown = field.metadata["default_text"]
    if shown is not None:
        return str(shown)
    if field.default == ():
        return "[]"
    return field.default if isinstance(field.default, str) else show_value(field.default)


def schema_table(schema: type[Section]) -> str:
    """Return a markdown table of a section: key, default, what is allowed, in a file, meaning."""
    lines = [
        "| key | default | allowed | in a file | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for field in keys_of(schema):
        cells = (
            f"`{field.name}`",
            f"`{default_text(field)}`",
            field.metadata["check"].allowed,
            _in_a_file(schema, field),
            field.metadata["doc"],
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _in_a_file(schema: type[Section], field: dataclasses.Field[Any]) -> str:
    """Return what a config file may set a key to, as the reference table shows it."""
    rule: FileRule | None = field.metadata["from_file"]
    says = "" if rule is None else rule.says
    if rule is None or rule.can_be_allowed:
        plain = f"{schema.PATH}.{field.name}".removeprefix("manager.")
        return f"{says}{'; more ' if says else ''}with `--allow {plain}`"
    return says


def as_mapping(value: object, path: str) -> dict[Any, Any]:
    """Return `value` as a new dict; null is an empty one.

    Raises:
        ConfigError: it is not a mapping, or cannot be read.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path} is {show_value(value)} ({type(value).__name__}), but must be a mapping of "
            "keys to values. Write it as `key: value` lines, or leave it out."
        )
    try:
        return read_dict(value)
    except Unreadable as error:
        raise ConfigError(f"{path} should be a mapping of keys to values, but {error}") from error
