"""DI-engine's SyncSubprocessEnvManager, with its time limits and its retries."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ding.envs import SyncSubprocessEnvManager
from easydict import EasyDict

from peers import LIMIT_S, DictManager, Factories, Outcome

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from adapters.ding_env import DingEnv

# Its limits are whole seconds.
OPTIONS = {
    "step_timeout": math.ceil(LIMIT_S),
    "reset_timeout": math.ceil(LIMIT_S),
    "connect_timeout": 10,
    "max_retry": 3,
    "retry_type": "renew",
}


class DingManager(DictManager):
    """The loop of DI-engine's collectors: act on what is ready, get timesteps by env_id."""

    def ready(self) -> list[int]:
        """Return the keys of `ready_obs`, which would wait for ever if the manager is closed."""
        if self._manager._closed:
            raise RuntimeError("the manager has closed itself")
        return super().ready()

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step; a timestep may say that it is abnormal."""
        outcomes = {}
        for env_id, timestep in self._manager.step(dict(actions)).items():
            abnormal = bool(timestep.info.get("abnormal"))
            error = RuntimeError(f"abnormal timestep of env {env_id}") if abnormal else None
            outcomes[env_id] = Outcome(timestep.obs, timestep.reward, timestep.done, error)
            if abnormal:  # as DI-engine's collectors do
                self._manager.reset({env_id: None})
        return outcomes

    def reset(self) -> dict[int, Any]:
        """Reset all envs; a manager that has closed itself is launched again."""
        return self.start() if self._manager._closed else super().reset()


def open_peer(factories: Factories) -> DingManager:
    """Return a manager that is not launched."""
    cfg = EasyDict({**SyncSubprocessEnvManager.default_config(), **OPTIONS})
    fns = [partial(DingEnv, factory) for factory in factories]
    return DingManager(SyncSubprocessEnvManager(env_fn=fns, cfg=cfg))
