"""envmgr runs reinforcement-learning environments for trainers.

The public names are imported when they are first used, so that workers, which import this package
too, stay small.
"""

from __future__ import annotations

__version__ = "0.2.0"  # the one place where it stands: setup.cfg and the docs read it here

TYPE_CHECKING = False  # as type checkers know it; `typing` takes 3 ms, also of each command
if TYPE_CHECKING:
    from typing import Any

    from envmgr.adapters.entries import as_sb3, as_tianshou
    from envmgr.adapters.gymnasium import as_gymnasium
    from envmgr.collect import RolloutCollector
    from envmgr.config_file import load_config
    from envmgr.env import BaseEnv
    from envmgr.lifecycle import EnvState
    from envmgr.manager.snapshots import Snapshot
    from envmgr.managers import (
        AsyncSubprocessEnvManager,
        AsyncSubprocessEnvManagerV2,
        BaseEnvManager,
        BaseEnvManagerV2,
        GymVectorEnvManager,
        PoolEnvManager,
        RayEnvManager,
        SubprocessEnvManagerV2,
        SyncSubprocessEnvManager,
        ThreadEnvManager,
    )
    from envmgr.observing.signals import dump_on_signal
    from envmgr.outcomes import Outcome
    from envmgr.registry import ENV_MANAGER_REGISTRY, get_env_manager_cls
    from envmgr.shortcuts import create_env_manager, make
    from envmgr.types import EnvTimestep

__all__ = [
    "ENV_MANAGER_REGISTRY",
    "AsyncSubprocessEnvManager",
    "AsyncSubprocessEnvManagerV2",
    "BaseEnv",
    "BaseEnvManager",
    "BaseEnvManagerV2",
    "EnvState",
    "EnvTimestep",
    "GymVectorEnvManager",
    "Outcome",
    "PoolEnvManager",
    "RayEnvManager",
    "RolloutCollector",
    "Snapshot",
    "SubprocessEnvManagerV2",
    "SyncSubprocessEnvManager",
    "ThreadEnvManager",
    "as_gymnasium",
    "as_sb3",
    "as_tianshou",
    "create_env_manager",
    "dump_on_signal",
    "get_env_manager_cls",
    "load_config",
    "make",
]

_HOME = {
    "ENV_MANAGER_REGISTRY": "registry",
    "AsyncSubprocessEnvManager": "managers",
    "AsyncSubprocessEnvManagerV2": "managers",
    "BaseEnv": "env",
    "BaseEnvManager": "managers",
    "BaseEnvManagerV2": "managers",
    "EnvState": "lifecycle",
    "EnvTimestep": "types",
    "GymVectorEnvManager": "managers",
    "Outcome": "outcomes",
    "PoolEnvManager": "managers",
    "RayEnvManager": "managers",
    "RolloutCollector": "collect",
    "Snapshot": "manager.snapshots",
    "SubprocessEnvManagerV2": "managers",
    "SyncSubprocessEnvManager": "managers",
    "ThreadEnvManager": "managers",
    "as_gymnasium": "adapters.gymnasium",
    "as_sb3": "adapters.entries",
    "as_tianshou": "adapters.entries",
    "create_env_manager": "shortcuts",
    "dump_on_signal": "observing.signals",
    "get_env_manager_cls": "registry",
    "load_config": "config_file",
    "make": "shortcuts",
}


_ELSEWHERE = {
    "Collector": "envmgr.collect",
    "EpisodeCollector": "envmgr.collect",
    "StepCollector": "envmgr.collect",
    "EnvmgrVecEnv": "envmgr.adapters.sb3",
    "EnvmgrVectorEnv": "envmgr.adapters.gymnasium",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        # An ImportError, because `from envmgr import ...` drops the text of an AttributeError.
        if name in _ELSEWHERE:
            raise ImportError(f"{name} is elsewhere: from {_ELSEWHERE[name]} import {name}")
        if name == "make_vec":
            raise ImportError("envmgr has no make_vec: use as_gymnasium(make(env, n))")
        raise AttributeError(f"module 'envmgr' has no attribute {name!r}")
    from envmgr.optional_packages import own_part

    value = getattr(own_part(home, f"envmgr.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
