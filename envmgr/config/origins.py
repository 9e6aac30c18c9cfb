"""Where the values of a config come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Who gave a value. Values of a file are not trusted, nor are module names in an override."""

    DEFAULT = "default"
    """Nobody: it is the default of all kinds."""
    KIND = "kind"
    """Nobody: it is the default of the kind of manager."""
    FILE = "file"
    """A config file, which may come from anywhere."""
    CODE = "argument"
    """Code that passed a mapping."""
    SET = "set"
    """An override: `--set` and other options of the command line, or `set` in code."""


@dataclass(frozen=True)
class Origin:
    """Where one value comes from; `str` gives it in words, such as "file my.yaml".

    Attributes:
        source: who gave the value.
        name: the name of the file or of the kind.
    """

    source: Source
    name: str = ""

    def __str__(self) -> str:
        return f"{self.source.value} {self.name}".rstrip()
