"""Stable-Baselines3's SubprocVecEnv."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec
from stable_baselines3.common.vec_env import SubprocVecEnv

from adapters.actions import array_batches
from envmgr.tuning.loops import Sb3Loop


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner. Workers are forked: the default imports PyTorch in each of them."""
    fns = [factory] * spec.env_num
    build = functools.partial(SubprocVecEnv, fns, start_method="fork")
    return Sb3Loop(build, spec.env_num, array_batches(spec.env_num))
