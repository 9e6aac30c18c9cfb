"""The key `manager.worker_env`: which environment variables workers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from envmgr.config.checks import Check, Refused, list_of, text
from envmgr.config.field_checks import variables
from envmgr.config.file_rules import TAKES_AWAY, VARIABLES
from envmgr.config.schema import Section, check_keys, checks_of, option


@dataclass(frozen=True, slots=True)
class WorkerEnv(Section):
    """Which environment variables a worker gets.

    Attributes:
        allow: glob patterns (`OMP_*`); variables of the parent that match one are passed on.
        deny: glob patterns; variables that match one are not passed on, whatever `allow` says.
        set: variables set in the worker, after `allow` and `deny`.
    """

    PATH: ClassVar[str] = "manager.worker_env"

    allow: tuple[str, ...] = option(
        ("*",), list_of(text()), "patterns of what is passed on", '["*"]', from_file=TAKES_AWAY
    )
    deny: tuple[str, ...] = option(
        (), list_of(text()), "patterns of what is not", from_file=TAKES_AWAY
    )
    set: Mapping[str, str] = option(
        None, variables(), "what is set besides", "{}", from_file=VARIABLES
    )


def worker_env() -> Check:
    """Rules for environment variables, kept as a `WorkerEnv`."""

    def convert(value: Any) -> WorkerEnv:
        if isinstance(value, WorkerEnv):
            return value
        if not isinstance(value, Mapping):
            raise Refused
        check_keys(value, WorkerEnv, WorkerEnv.PATH)
        checks = checks_of(WorkerEnv)
        return WorkerEnv(**{name: checks[name].convert(part) for name, part in value.items()})

    return Check(
        "a mapping with `allow` and `deny` (lists of name patterns) and `set` (name: string)",
        convert,
    )
