"""The env of the tests of leases: it says which step of which episode it has taken."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

RAISE, DIE, HANG, SLOW, END, AT_GATE, INTERRUPT = 9001, 9002, 9003, 9004, 9005, 9006, 9007
"""Actions; others are steps that are told of."""

SLOW_S = 0.3

let_go = threading.Event()
"""Ends what hangs in threads of this process, once a test is over."""


class Told(gymnasium.Env[Any, Any]):
    """Its observation is (seed of the episode, steps of the episode, action)."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(10_000)

    def __init__(self) -> None:
        self._seed, self._steps = -1, 0
        self._gate = ""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._seed, self._steps = -1 if seed is None else seed, 0
        if options and options.get("hang"):
            let_go.wait(600.0)
        if options and "gate" in options:
            self._gate = options["gate"]
        where = {"pid": os.getpid(), "thread": threading.current_thread().name}
        return np.array([self._seed, 0.0, -1.0]), {"options": dict(options or {}), **where}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, or fail in it."""
        if action == RAISE:
            raise RuntimeError("as it was told")
        if action == INTERRUPT:
            raise KeyboardInterrupt
        if action == DIE:
            os._exit(7)
        if action == HANG:
            let_go.wait(600.0)
        if action == SLOW:
            time.sleep(SLOW_S)
        if action == AT_GATE:
            os.close(os.open(self._gate, os.O_RDONLY))  # a FIFO: until somebody opens it to write
        self._steps += 1
        obs = np.array([self._seed, self._steps, action], np.float64)
        info = {"steps": self._steps, "thread": threading.current_thread().name}
        return obs, float(action), bool(action == END), False, info
