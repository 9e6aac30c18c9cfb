"""envmgr's `subprocess` manager."""

from __future__ import annotations

from collections.abc import Mapping

from envmgr import create_env_manager
from peers import LIMIT_S, DictManager, Factories, Outcome

OPTIONS = {
    "type": "subprocess",
    "step_timeout": LIMIT_S,
    "reset_timeout": LIMIT_S,
    "close_timeout": LIMIT_S,
    "nan_policy": "abnormal",
    "seed": 0,
}


class EnvmgrManager(DictManager):
    """The loop of the README."""

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step."""
        return {
            env_id: Outcome(t.obs, t.reward, t.done, t.info.get("error"))
            for env_id, t in self._manager.step(dict(actions)).items()
        }


def open_peer(factories: Factories) -> EnvmgrManager:
    """Return a manager that is not launched."""
    return EnvmgrManager(create_env_manager(OPTIONS, env_fn=list(factories)))
