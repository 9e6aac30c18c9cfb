"""AtariVectorEnv, which is ale-py's own: games, preprocessing and threads in C++."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ale_py.vector_env import AtariVectorEnv
from spec import Runner, Spec, UnavailableError

from adapters.actions import array_batches
from envmgr.tuning.loops import GymnasiumLoop


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return it with the game and the preprocessing of `envs.env_factory`; `factory` is not used.

    Raises:
        UnavailableError: the env is no Atari game.
    """
    if spec.env != "pong":
        raise UnavailableError("it has Atari games only")
    return AtariVectorEnv("pong", spec.env_num, reward_clipping=False, use_fire_reset=False)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of it."""
    build = functools.partial(vector_env, spec, factory)
    return GymnasiumLoop(build, spec.env_num, array_batches(spec))
