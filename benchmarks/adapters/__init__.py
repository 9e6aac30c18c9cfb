"""One module per library; each has `open_runner(spec, factory)`, which returns a `spec.Runner`.

Those of vector envs that trainers take also have `vector_env(spec, factory)`.

All loops do equal work: they step every env that is ready with an action drawn beforehand, take the
observations, and reset by the library's own means. A library is imported by its adapter alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec

_MODULES = {
    "envmgr": "envmgr_managers",
    "gymnasium": "gymnasium_vector",
    "sb3": "sb3_vector",
    "tianshou": "tianshou_shmem",
    "pufferlib": "pufferlib_vector",
    "ding": "ding_managers",
    "ale": "ale_vector",
    "envpool": "envpool_vector",
    "plain": "plain_loop",
    "bare": "bare_processes",
}


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return the runner of `spec.library`; importing the library happens here."""
    runner: Runner = _module_of(spec).open_runner(spec, factory)
    return runner


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return the vector env of `spec.library`, for a trainer."""
    return _module_of(spec).vector_env(spec, factory)


def _module_of(spec: Spec) -> Any:
    return importlib.import_module(f"adapters.{_MODULES[spec.library]}")
