"""A setting: the keys of a manager's config that decide how fast it steps the same envs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

SYNC, ASYNC = "subprocess", "async_subprocess"
_V2 = "_v2"


class Setting(NamedTuple):
    """How envs are spread and gathered.

    Attributes:
        kind: registry key.
        num_workers: None is one for each env.
        wait_num: timesteps to gather; infinity for all of them.
        spare_env_num: spares.
    """

    kind: str
    num_workers: int | None = None
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
            parts.append("a worker each" if n is None else f"{n} worker{'s' * (n > 1)}")
        if not math.isinf(self.wait_num):
            parts.append(f"wait_num {self.wait_num:g}")
        if self.spare_env_num:
            parts.append(f"{self.spare_env_num} spare{'s' * (self.spare_env_num > 1)}")
        return ", ".join(parts)

    def as_config(self) -> dict[str, Any]:
        """Return the keys of a manager's config."""
        return {
            "type": self.kind,
            "num_workers": self.num_workers,
            "wait_num": self.wait_num,
            "spare_env_num": self.spare_env_num,
        }


def setting_of(config: Mapping[str, Any]) -> Setting:
    """Return the setting that a manager's config has.

    `num_workers: auto` is None here: what it becomes is the launch's business.
    """
    num_workers, env_num = config["num_workers"], config["env_num"]
    shared = isinstance(num_workers, int) and num_workers != env_num
    return Setting(
        config["type"],
        num_workers if shared else None,
        float(config["wait_num"]),
        config["spare_env_num"],
    )


def pair_of(kind: str) -> tuple[str, str]:
    """Return the kinds with workers that show batches as this kind does: sync and async."""
    suffix = _V2 if kind.endswith(_V2) else ""
    return SYNC + suffix, ASYNC + suffix


def changes_of(setting: Setting, now: Setting, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a manager's config that a setting changes.

    Args:
        setting: what is wanted.
        now: what the config has come to, `num_workers: auto` included.
        config: the manager's section.
    """
    if setting == now:
        return {}
    same = {**setting_of(config).as_config(), "num_workers": config["num_workers"]}
    if config["num_workers"] == config["env_num"] and setting.num_workers is None:
        same["num_workers"] = None
    return {key: value for key, value in setting.as_config().items() if value != same[key]}
