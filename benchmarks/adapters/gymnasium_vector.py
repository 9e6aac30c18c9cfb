"""Gymnasium's AsyncVectorEnv and SyncVectorEnv."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
from spec import Runner, Spec

from adapters.actions import array_batches
from envmgr.tuning.loops import GymnasiumLoop


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return the vector env `options["kind"]`, `async` or `sync`, with the other options."""
    arguments = dict(spec.options)
    is_sync = arguments.pop("kind") == "sync"
    cls: Any = gymnasium.vector.SyncVectorEnv if is_sync else gymnasium.vector.AsyncVectorEnv
    return cls([factory] * spec.env_num, **arguments)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of that vector env."""
    build = functools.partial(vector_env, spec, factory)
    return GymnasiumLoop(build, spec.env_num, array_batches(spec))
