"""PufferLib's Multiprocessing (zero-copy, workers that spin) and Serial, by its emulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pufferlib.emulation
import pufferlib.vector
from spec import Runner, Spec

from adapters.actions import array_batches
from envmgr.tuning.loops import GymnasiumLoop


class PufferVector(GymnasiumLoop):
    """A vector env of PufferLib. Observations are valid until the next step."""

    def _begin(self) -> None:
        self._envs.async_reset(0)
        self._envs.recv()


def _emulated(factory: Callable[[], Any], buf: Any = None, seed: int = 0) -> Any:
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=factory, buf=buf, seed=seed)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner of Multiprocessing with `options["workers"]`, or of Serial without it."""
    creator = functools.partial(_emulated, factory)
    workers = spec.options.get("workers")

    def build() -> Any:
        if workers is None:
            return pufferlib.vector.make(
                creator, backend=pufferlib.vector.Serial, num_envs=spec.env_num
            )
        return pufferlib.vector.make(
            creator,
            backend=pufferlib.vector.Multiprocessing,
            num_envs=spec.env_num,
            num_workers=workers,
            batch_size=spec.env_num,
            zero_copy=True,
            overwork=True,
        )

    return PufferVector(build, spec.env_num, array_batches(spec))
