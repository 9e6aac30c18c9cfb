"""What a check finds, and the verdict on all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from envmgr.texts import counted


class Level(IntEnum):
    """How much a finding matters."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3

    @property
    def word(self) -> str:
        """The level as it is printed."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """What was found about one part of the contract.

    Attributes:
        part: which part, such as "determinism".
        level: how much it matters.
        advice: what to do; empty if nothing.
        figures: what was measured, as values that JSON holds.
    """

    part: str
    level: Level
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON holds."""
        return {**asdict(self), "level": self.level.word, "figures": dict(self.figures)}


def worst_of(findings: Iterable[Finding]) -> Level:
    """Return the highest level among findings."""
    return max((finding.level for finding in findings), default=Level.OK)


def verdict_of(findings: Iterable[Finding]) -> str:
    """Return the verdict on all findings, as one sentence."""
    found = list(findings)
    counts = {level: sum(one.level is level for one in found) for level in Level}
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    if problems:
        return f"not ready: {counted(problems, 'problem')}, {counted(warnings, 'warning')}"
    if warnings:
        return f"it runs, with {counted(warnings, 'warning')}"
    return "ready: nothing stands in the way"
