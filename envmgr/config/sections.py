"""The other sections of a config file: `env` and `collect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envmgr.config.checks import integer, or_null, text
from envmgr.config.field_checks import (
    free_mapping,
    object_name,
    policy_name,
    wrapper_list,
)
from envmgr.config.merge import to_plain
from envmgr.config.schema import as_mapping, check_keys, normalise_fields, option
from envmgr.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The `env` section: which env to build. At most one of `id` and `entry` is given.

    Attributes:
        id: id for `gymnasium.make`.
        entry: `package.module:callable` that builds the env.
        kwargs: keyword arguments of `gymnasium.make` or of the callable.
        wrappers: `{"path": dotted path, "kwargs": {...}}` for each wrapper, innermost first.
    """

    id: str | None = option(None, or_null(text()), "id for `gymnasium.make`")
    entry: str | None = option(
        None, or_null(object_name()), "`package.module:callable` that builds the env"
    )
    kwargs: Mapping[str, Any] = option(None, free_mapping(), "keyword arguments for it", "{}")
    wrappers: tuple[Mapping[str, Any], ...] = option(
        (), wrapper_list(), "wrappers, the innermost first: a dotted path, or `{path, kwargs}`"
    )

    def __post_init__(self) -> None:
        normalise_fields(self, "env")
        if self.id is not None and self.entry is not None:
            raise ConfigError(
                f"env.id is {self.id!r} and env.entry is {self.entry!r}, but an env is built from "
                "one of the two. Remove the other."
            )
        if not self.is_given and (self.kwargs or self.wrappers):
            raise ConfigError(
                "env has kwargs or wrappers, but neither env.id nor env.entry says which env to "
                "build. Give one of the two."
            )

    @property
    def is_given(self) -> bool:
        """Whether the config says which env to build."""
        return self.id is not None or self.entry is not None

    @classmethod
    def from_mapping(cls, cfg: Mapping[str, Any] | None) -> EnvConfig:
        """Return the checked section; `cfg` is not changed.

        Raises:
            UnknownKeyError: a key that the schema does not have.
            ConfigError: a value that is not allowed, or both `id` and `entry`.
        """
        section = as_mapping(cfg, "env")
        check_keys(section, cls, "env")
        return cls(**to_plain(section))

    def to_dict(self) -> dict[str, Any]:
        """Return every key with its value as a plain dict of fresh dicts and lists."""
        return {
            "id": self.id,
            "entry": self.entry,
            "kwargs": to_plain(self.kwargs),
            "wrappers": [to_plain(wrapper) for wrapper in self.wrappers],
        }


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """The `collect` section: what `envmgr run` does. At most one of `steps` and `episodes`.

    Attributes:
        policy: "random", or `package.module:callable`.
        steps: timesteps to collect, over all envs.
        episodes: episodes to collect, over all envs.
        output: folder for the results.
    """

    policy: str = option("random", policy_name(), "`random`, or `package.module:callable`")
    steps: int | None = option(None, or_null(integer(1)), "timesteps to collect, over all envs")
    episodes: int | None = option(None, or_null(integer(1)), "episodes to collect, over all envs")
    output: str | None = option(None, or_null(text()), "folder for the results")

    def __post_init__(self) -> None:
        normalise_fields(self, "collect")
        if self.steps is not None and self.episodes is not None:
            raise ConfigError(
                f"collect.steps is {self.steps} and collect.episodes is {self.episodes}, but a run "
                "ends with one of the two. Set the other to null."
            )

    @classmethod
    def from_mapping(cls, cfg: Mapping[str, Any] | None) -> CollectConfig:
        """Return the checked section; `cfg` is not changed.

        Raises:
            UnknownKeyError: a key that the schema does not have.
            ConfigError: a value that is not allowed, or both `steps` and `episodes`.
        """
        section = as_mapping(cfg, "collect")
        check_keys(section, cls, "collect")
        return cls(**to_plain(section))

    def to_dict(self) -> dict[str, Any]:
        """Return every key with its value."""
        return {
            "policy": self.policy,
            "steps": self.steps,
            "episodes": self.episodes,
            "output": self.output,
        }
