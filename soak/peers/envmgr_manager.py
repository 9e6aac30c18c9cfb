"""envmgr's `subprocess` manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envmgr import create_env_manager
from peers import LIMIT_S, Factories, Outcome

OPTIONS = {
    "type": "subprocess",
    "step_timeout": LIMIT_S,
    "reset_timeout": LIMIT_S,
    "close_timeout": LIMIT_S,
    "nan_policy": "abnormal",
    "seed": 0,
}


class EnvmgrManager:
    """The loop of the README."""

    def __init__(self, factories: Factories) -> None:
        self._manager = create_env_manager(OPTIONS, env_fn=list(factories))

    def start(self) -> dict[int, Any]:
        """Launch."""
        self._manager.launch()
        return dict(self._manager.ready_obs)

    def ready(self) -> list[int]:
        """Return the keys of `ready_obs`."""
        return sorted(self._manager.ready_obs)

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step."""
        return {
            env_id: Outcome(t.obs, t.reward, t.done, t.info.get("error"))
            for env_id, t in self._manager.step(dict(actions)).items()
        }

    def reset(self) -> dict[int, Any]:
        """Reset all envs."""
        self._manager.reset()
        return dict(self._manager.ready_obs)

    def close(self) -> None:
        """Close."""
        self._manager.close()


def open_peer(factories: Factories) -> EnvmgrManager:
    """Return a manager that is not launched."""
    return EnvmgrManager(factories)
