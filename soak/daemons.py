"""A trainer whose envs start daemons: `python daemons.py CONTEXT ENV_NUM END`.

Each env has a process that left its worker's group and session, and that one another. END says how
the workers end: `kill`, `limit`, `close`; or `trainer`, for one that is killed itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium

from envmgr import create_env_manager

HANG = 1
_SECOND = "setsid sleep 1000 >&- 2>&- & echo $$ $!"
_FIRST = f"setsid sh -c '{_SECOND}; exec sleep 1000 >&- 2>&-' & exit"


class DaemonEnv(gymnasium.Env[int, int]):
    """Starts two daemons when it is built."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        told = subprocess.run(["/bin/sh", "-c", _FIRST], stdout=subprocess.PIPE, check=True).stdout
        self.worker = os.getpid()
        self.daemons = [int(pid) for pid in told.split()]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        """Begin."""
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go on, or hang."""
        if action == HANG:
            time.sleep(1000.0)
        return 0, 1.0, False, False, {}


def main() -> None:
    """Say which workers and daemons there are, and when ending them is begun; end them."""
    logging.getLogger("envmgr").setLevel(logging.CRITICAL)
    context, env_num, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    cfg = {
        "type": "subprocess",
        "context": context,
        "connect_timeout": 300.0,
        "reset_timeout": 300.0,
        "step_timeout": 2.0 if end == "limit" else None,
        "max_failures_total": 10**9,
        "failure_window_s": 0.001,
    }
    with create_env_manager(cfg, env_fn=[DaemonEnv] * env_num) as manager:
        workers = manager.get_attr("worker")
        print(json.dumps([workers, manager.get_attr("daemons")]), flush=True)
        actions = dict.fromkeys(range(env_num), HANG if end == "limit" else 0)
        sys.stdin.readline()  # until they have been counted
        if end == "kill":
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        print(time.monotonic(), flush=True)
        if end in ("kill", "limit"):
            manager.step(actions)
        else:
            manager.close()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
