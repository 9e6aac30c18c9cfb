"""DI-engine's subprocess managers, in their default configs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from ding.envs import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from easydict import EasyDict
from spec import Runner, Spec

from adapters.actions import array_batches
from adapters.ding_env import DingEnv

_KINDS = {"subprocess": SyncSubprocessEnvManager, "async_subprocess": AsyncSubprocessEnvManager}


class DingManager:
    """The loop of DI-engine's collectors: act on what is ready, get timesteps by env_id."""

    def __init__(self, kind: str, factory: Callable[[], Any], env_num: int) -> None:
        self._fns = [functools.partial(DingEnv, factory)] * env_num
        self._cls = _KINDS[kind]
        self._actions = array_batches(env_num)

    def start(self) -> None:
        """Build, launch, and take the first observations."""
        cfg = EasyDict(self._cls.default_config())
        self._manager = self._cls(env_fn=self._fns, cfg=cfg)
        self._manager.launch()
        while len(self._manager.ready_obs) < len(self._fns):
            pass

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(dict(zip(obs, next(self._actions), strict=False)))
        for timestep in timesteps.values():
            np.ndarray.item(timestep.obs, 0)
            break
        return len(timesteps)

    def close(self) -> None:
        """Close."""
        self._manager.close()


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of the manager `options["kind"]`."""
    return DingManager(spec.options["kind"], factory, spec.env_num)
