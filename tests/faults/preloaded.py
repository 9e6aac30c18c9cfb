"""Envs that say what their processes have imported.

They have a module of their own, as every worker imports it: one of tests brings pytest along.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
from typing import Any

import numpy as np

from tests.contract.envs import ScriptedEnv


class Env(ScriptedEnv):
    """Says what its process is like."""

    def imports(self, name: str) -> tuple[bool, bool]:
        """Return whether a module was there already, and whether it was imported elsewhere."""
        was_there = name in sys.modules
        module: Any = importlib.import_module(name)
        return was_there, os.getpid() != module.PID

    def importer(self, name: str) -> int:
        """Return the pid of the process that has imported a module."""
        return int(importlib.import_module(name).PID)

    def draws(self) -> tuple[float, float]:
        return random.random(), float(np.random.random())

    def torch_draws(self) -> float:
        import torch

        return float(torch.rand(1))

    def process(self) -> dict[str, Any]:
        handlers = [signal.getsignal(n) for n in signal.valid_signals() if n != signal.SIGINT]
        fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in _open_fds()}
        return {
            "fds": sorted(target.partition(":")[0] for target in fds.values()),
            "handled": [h for h in handlers if callable(h)],
            "threads": len(os.listdir("/proc/self/task")),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "wakeup_fd": signal.set_wakeup_fd(-1),
        }


class LateEnv(Env):
    """Imports something by a name that nobody can read in its source."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        importlib.import_module("late_" + "module")


def _open_fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        found.append(fd)
    return found
