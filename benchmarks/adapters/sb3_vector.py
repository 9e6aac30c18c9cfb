"""Stable-Baselines3's SubprocVecEnv and DummyVecEnv."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from adapters.actions import array_batches
from envmgr.tuning.loops import Sb3Loop


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return the vec env `options["kind"]`, `subproc` or `dummy`.

    Workers are forked: the default imports PyTorch in each of them.
    """
    fns = [factory] * spec.env_num
    if spec.options["kind"] == "dummy":
        return DummyVecEnv(fns)
    return SubprocVecEnv(fns, start_method="fork")


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of that vec env."""
    build = functools.partial(vector_env, spec, factory)
    return Sb3Loop(build, spec.env_num, array_batches(spec))
