"""Gymnasium's AsyncVectorEnv and SyncVectorEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from spec import Runner, Spec

from adapters.actions import array_batches
from envmgr.tuning.loops import GymnasiumLoop


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of `options["kind"]`, `async` or `sync`."""
    fns = [factory] * spec.env_num
    copy = spec.options.get("copy", True)

    def build() -> Any:
        if spec.options["kind"] == "sync":
            return gymnasium.vector.SyncVectorEnv(fns, copy=copy)
        return gymnasium.vector.AsyncVectorEnv(fns, copy=copy)

    return GymnasiumLoop(build, spec.env_num, array_batches(spec.env_num))
