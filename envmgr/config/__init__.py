"""Configs: the schema of a manager's keys, checks, merging, safe YAML, and importing by name."""

from __future__ import annotations

from envmgr.config.kind_sections import WorkerEnv
from envmgr.config.kinds import check_kind, default_manager_config, schema_markdown
from envmgr.config.manager import MAX_ENV_NUM, ManagerConfig
from envmgr.config.merge import EasyDict, deep_merge, to_easydict, to_plain
from envmgr.config.sections import CollectConfig, EnvConfig

__all__ = [
    "MAX_ENV_NUM",
    "CollectConfig",
    "EasyDict",
    "EnvConfig",
    "ManagerConfig",
    "WorkerEnv",
    "check_kind",
    "deep_merge",
    "default_manager_config",
    "schema_markdown",
    "to_easydict",
    "to_plain",
]
