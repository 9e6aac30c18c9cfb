"""What kinds of managers do with the schema: what they refuse, and their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from envmgr.config.checks import show_value
from envmgr.config.manager import ManagerConfig
from envmgr.config.merge import EasyDict, to_easydict
from envmgr.config.schema import Section, schema_table
from envmgr.errors import ConfigError


def check_kind(
    config: ManagerConfig, *, hides_resets: bool, refused: Mapping[str, str] | None = None
) -> None:
    """Refuse what a kind of manager cannot do.

    Args:
        config: the config.
        hides_resets: whether its envs can be reset while the trainer does something else.
        refused: keys that mean nothing to this kind, and why.

    Raises:
        ConfigError: the config asks for something that the kind cannot do.
    """
    for key, reason in (refused or {}).items():
        value = getattr(config, key)
        if value and value != _DEFAULTS[key]:
            raise ConfigError(
                f"manager.{key} is {show_value(value)}, but manager.type {config.type} {reason}. "
                "Leave it out, or use type: subprocess."
            )
    if config.spare_env_num and not hides_resets:
        raise ConfigError(
            f"manager.spare_env_num is {config.spare_env_num}, but manager.type {config.type} runs "
            "its envs in the trainer's own thread, where no reset can be hidden. Leave it 0, or "
            "use type: subprocess."
        )


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ManagerConfig)}


def default_manager_config(preset: Mapping[str, Any] | None = None) -> EasyDict:
    """Return every key with its default, `preset` on top, as an EasyDict of its own."""
    return to_easydict(ManagerConfig.from_mapping(None, preset).to_dict())


def schema_markdown(schema: type[Section] = ManagerConfig) -> str:
    """Return the reference table of a section's keys as markdown; by default a manager's."""
    return schema_table(schema)
