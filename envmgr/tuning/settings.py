"""A setting: the keys of a manager's config that decide how fast it steps the same envs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from envmgr.texts import counted

SYNC, ASYNC = "subprocess", "async_subprocess"
_V2 = "_v2"


class Setting(NamedTuple):
    """A way to spread envs over workers and to gather their timesteps.

    Attributes:
        kind: registry key of the manager.
        num_workers: None is a worker for each env; `auto` is the number that the launch finds out.
        wait_num: timesteps to gather; infinity for all of them.
        spare_env_num: number of spares.
    """

    kind: str
    num_workers: int | Literal["auto"] | None = None
    wait_num: float = math.inf
    spare_env_num: int = 0

    @property
    def has_workers(self) -> bool:
        """Whether envs run in worker processes."""
        return self.kind.removesuffix(_V2) in (SYNC, ASYNC)

    def __str__(self) -> str:
        parts = [self.kind]
        if self.has_workers:
            n = self.num_workers
            if n is None:
                parts.append("a worker each")
            else:
                parts.append("auto" if n == "auto" else counted(n, "worker"))
        if not math.isinf(self.wait_num):
            parts.append(f"wait_num {self.wait_num:g}")
        if self.spare_env_num:
            parts.append(counted(self.spare_env_num, "spare"))
        return ", ".join(parts)

    def as_config(self) -> dict[str, Any]:
        """Return the setting as keys of a manager's config."""
        return {
            "type": self.kind,
            "num_workers": self.num_workers,
            "wait_num": self.wait_num,
            "spare_env_num": self.spare_env_num,
        }


def setting_of(config: Mapping[str, Any]) -> Setting:
    """Return the setting that a manager's config has."""
    num_workers = config["num_workers"]
    return Setting(
        config["type"],
        None if num_workers == config["env_num"] else num_workers,
        float(config["wait_num"]),
        config["spare_env_num"],
    )


def pair_of(kind: str) -> tuple[str, str]:
    """Return the kinds with workers that show batches as this kind does: sync and async."""
    suffix = _V2 if kind.endswith(_V2) else ""
    return SYNC + suffix, ASYNC + suffix


def changes_of(setting: Setting, now: Setting) -> dict[str, Any]:
    """Return the keys of a manager's config that a setting changes.

    Args:
        setting: what is wanted.
        now: what the config says.
    """
    before = now.as_config()
    return {key: value for key, value in setting.as_config().items() if value != before[key]}


def without_workers(setting: Setting) -> Setting:
    """Return the setting that runs envs in the trainer's process, with the same form of batches."""
    return Setting("base" + (_V2 if setting.kind.endswith(_V2) else ""))
