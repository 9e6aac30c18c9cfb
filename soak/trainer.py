"""A trainer that is killed: `python trainer.py CONTEXT`. Some envs hang, some have children."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envmgr import create_env_manager
from envmgr.testing import Fault, FaultyEnv

ENV_NUM = 6
PLAN = (
    Fault("fork_child", env_id=0, episode=0, step=1),
    Fault("fork_child", env_id=1, episode=0, step=1),
    Fault("hang", env_id=2, step=3),
    Fault("hang_holding_gil", env_id=3, step=3),
    Fault("kill", env_id=4, step=5),
    Fault("hang_holding_gil", where="reset", env_id=5, episode=1),
)


def main() -> None:
    """Step for ever; env 4 is renewed again and again."""
    logging.getLogger("envmgr").setLevel(logging.CRITICAL)
    env_fn = [partial(FaultyEnv, env_id, PLAN, step_s=0.01) for env_id in range(ENV_NUM)]
    cfg = {
        "type": "async_subprocess",
        "wait_num": 1,
        "context": sys.argv[1],
        "max_failures": 10**9,
        "failure_window_s": 0.001,
        "step_timeout": 60.0,
        "reset_timeout": 60.0,
    }
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        print("launched", flush=True)
        while True:
            manager.step(dict.fromkeys(manager.ready_obs, 1))


if __name__ == "__main__":
    main()
