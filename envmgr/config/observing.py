"""Sections of the manager's config that are about looking at a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from envmgr.config.checks import Check, integer, or_null, text
from envmgr.config.file_rules import ANY, TIMELINE, unless_allowed
from envmgr.config.kind_sections import section
from envmgr.config.schema import Section, option


@dataclass(frozen=True, slots=True)
class Trace(Section):
    """The timeline of what happens from launch to close.

    Attributes:
        path: of the file, which `close` writes; replaced if it is there.
        events: so many of what hosts did, and of the trainer's calls, are kept: the newest.
    """

    PATH: ClassVar[str] = "manager.trace"

    path: str = option(
        "", text(), "file that `close` writes, in the Chrome trace event format", from_file=TIMELINE
    )
    events: int = option(
        200_000,
        integer(1000, 10_000_000),
        "so many of what hosts did, and of the trainer's calls, are kept: the newest",
        from_file=ANY,
    )


def trace() -> Check:
    """A section, or the path alone."""

    def convert(value: Any) -> Trace:
        return Trace(value) if isinstance(value, str) else section(Trace).convert(value)

    return Check("a path, or a mapping of its own keys", convert)


@dataclass(frozen=True, slots=True)
class Metrics(Section):
    """What is measured of steps and resets, and who is shown it.

    Attributes:
        port: of 127.0.0.1, on which an OpenMetrics endpoint is opened; None opens none.
    """

    PATH: ClassVar[str] = "manager.metrics"

    port: int | None = option(
        None,
        or_null(integer(1, 65535), "no endpoint"),
        "port of an OpenMetrics endpoint on 127.0.0.1 (extra `metrics`)",
        from_file=unless_allowed("opens a port to listen on"),
    )
