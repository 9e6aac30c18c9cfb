"""The sections `env` and `collect` of a config file; `manager` is in `envmgr.config.manager`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from envmgr.config.checks import boolean, choice, integer, list_of, or_null, text
from envmgr.config.field_checks import OBJECT_NAME, POLICY_NAME, free_mapping, wrapper_list
from envmgr.config.file_rules import (
    ARGUMENTS,
    ENV_ID,
    OBJECT,
    OUTPUT,
    POLICY,
    WRAPPERS,
    plain,
    unless_allowed,
)
from envmgr.config.schema import Section, option
from envmgr.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvConfig(Section):
    """The `env` section: which env to build. At most one of `id` and `entry` is given.

    Attributes:
        id: id for `gymnasium.make`.
        entry: `package.module:callable` that builds the env.
        kwargs: keyword arguments of `gymnasium.make` or of the callable.
        wrappers: `{"path": dotted path, "kwargs": {...}}` for each wrapper, innermost first.
    """

    PATH: ClassVar[str] = "env"
    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("name", "env", "env_id", "env_name"), "id"),
        **dict.fromkeys(("class", "cls", "path", "entry_point", "env_fn"), "entry"),
        **{key: f"manager.{key}" for key in ("env_num", "num_workers", "seed", "type")},
        "num_envs": "manager.env_num",
    }
    OTHERS: ClassVar[str] = "Arguments of the env go into env.kwargs."

    id: str | None = option(None, or_null(text()), "id for `gymnasium.make`", from_file=ENV_ID)
    entry: str | None = option(
        None,
        or_null(OBJECT_NAME),
        "`package.module:callable` that builds the env",
        from_file=OBJECT,
    )
    kwargs: Mapping[str, Any] = option(
        None, free_mapping(), "keyword arguments for building the env", "{}", from_file=ARGUMENTS
    )
    wrappers: tuple[Mapping[str, Any], ...] = option(
        (),
        wrapper_list(),
        "wrappers, innermost first: each is a name, or `{path, kwargs}`",
        from_file=WRAPPERS,
    )

    def _check_together(self) -> None:
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


@dataclass(frozen=True, slots=True)
class CollectConfig(Section):
    """The `collect` section: what `envmgr run` does. At most one of `steps` and `episodes`.

    Attributes:
        policy: "random", or `package.module:callable`.
        steps: timesteps to collect, over all envs.
        episodes: episodes to collect, over all envs.
        output: folder for the results.
        loggers: what writes figures there while the run goes on.
        videos: whether a video of each episode is saved there.
    """

    PATH: ClassVar[str] = "collect"

    policy: str = option(
        "random", POLICY_NAME, "`random`, or `package.module:callable`", from_file=POLICY
    )
    steps: int | None = plain(None, or_null(integer(1)), "timesteps to collect, over all envs")
    episodes: int | None = plain(None, or_null(integer(1)), "episodes to collect, over all envs")
    output: str | None = option(
        None,
        or_null(text()),
        "folder for the results",
        from_file=OUTPUT,
    )
    loggers: tuple[str, ...] = option(
        (),
        list_of(choice("csv", "tensorboard", "wandb")),
        "loggers that write figures to `output` every 10 s: `csv` (metrics.csv), `tensorboard` "
        "(by tensorboardX), `wandb` (an offline run)",
        from_file=unless_allowed(
            "runs the wandb service, which listens, and reads settings of its own",
            but=list_of(choice("csv", "tensorboard")),
        ),
    )
    videos: bool = plain(
        False,
        boolean(),
        "save a video of each episode in `videos` below `output` (extra `video`; envs need "
        "`kwargs: {render_mode: rgb_array}`)",
    )

    def _check_together(self) -> None:
        if self.steps is not None and self.episodes is not None:
            raise ConfigError(
                f"collect.steps is {self.steps} and collect.episodes is {self.episodes}, but a run "
                "ends with one of the two. Set the other to null."
            )
