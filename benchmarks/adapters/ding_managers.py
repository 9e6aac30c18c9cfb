"""DI-engine's subprocess managers, in their default configs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from ding.envs import (
    AsyncSubprocessEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)
from easydict import EasyDict
from spec import Runner, Spec

from adapters.actions import array_batches, list_batches
from adapters.ding_env import DingEnv

_KINDS = {
    "subprocess": SyncSubprocessEnvManager,
    "async_subprocess": AsyncSubprocessEnvManager,
    "subprocess_v2": SubprocessEnvManagerV2,
}


class DingManager:
    """The loop of DI-engine's collectors: act on what is ready, get timesteps by env_id."""

    def __init__(self, spec: Spec, factory: Callable[[], Any]) -> None:
        self._fns = [functools.partial(DingEnv, factory)] * spec.env_num
        self._cls = _KINDS[spec.options["kind"]]
        self._actions = array_batches(spec)

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


class DingManagerV2(DingManager):
    """The loop of DI-engine's pipelines: a list of actions, a list of treetensors."""

    def __init__(self, spec: Spec, factory: Callable[[], Any]) -> None:
        super().__init__(spec, factory)
        self._actions = list_batches(spec)

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(next(self._actions)[: len(obs)])
        np.ndarray.item(timesteps[0].obs, 0)
        return len(timesteps)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of the manager `options["kind"]`."""
    loop = DingManagerV2 if spec.options["kind"].endswith("_v2") else DingManager
    return loop(spec, factory)
