"""Runs that are interrupted by a snapshot, and go on from it in a process of their own.

`python -m tests.contract.snapshot_runs FOLDER` continues all of them, and prints what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium

from envmgr import create_env_manager
from tests.walkers import Walker

ENV_NUM = 3
N_STEPS = 16
_EPISODE_STEPS = 6

KINDS: dict[str, dict[str, Any]] = {
    "base": {"type": "base"},
    "thread": {"type": "thread", "num_workers": 2},
    "block-worn-views": {
        "type": "subprocess",
        "max_episodes_per_worker": 3,
        "copy_on_get": False,
    },
    "some-block-shared": {"type": "async_subprocess", "num_workers": 2, "wait_num": 1},
    "some-message-shared": {
        "type": "async_subprocess",
        "num_workers": 2,
        "shared_memory": False,
        "wait_num": 1,
        "reset_inplace": True,
    },
}


def walker() -> Any:
    """Return an env with counters of its own and of a wrapper, and a generator."""
    return gymnasium.wrappers.TimeLimit(Walker(), _EPISODE_STEPS)


def launched(kind: str, seed: int) -> Any:
    """Return a manager of a kind."""
    config = {"context": "fork", "snapshot_copy": True, "seed": seed, **KINDS[kind]}
    if config["type"] == "thread":
        del config["context"]
    manager = create_env_manager(config, env_fn=[walker] * ENV_NUM)
    manager.launch()
    return manager


def go_on(manager: Any, n_steps: int) -> list[list[Any]]:
    """Take steps until every env has taken so many; return what each env has shown in these."""
    found: list[list[Any]] = [[] for _ in range(ENV_NUM)]
    while min(map(len, found)) < 2 * n_steps:
        waits = manager.stats()["outstanding"] and not manager.ready_env
        ready = {} if waits else {i: obs.tolist() for i, obs in manager.ready_obs.items()}
        for env_id, obs in ready.items():
            found[env_id].append(obs)
        actions = {i: int(sum(obs) + len(found[i])) % 4 for i, obs in ready.items()}
        for env_id, step in manager.step(actions).items():
            found[env_id].append([step.obs.tolist(), step.reward, step.done, step.info])
    return [seen[: 2 * n_steps] for seen in found]


def send_all(manager: Any) -> None:
    """Have every env be in the midst of a step."""
    while manager.stats()["outstanding"]:
        manager.recv()
    obs = manager.ready_arrays(list(range(ENV_NUM))).obs
    manager.send({i: int(obs[i].sum()) % 4 for i in range(ENV_NUM)})


def main(folder: Path) -> None:
    """Continue the runs of all kinds, and print what came of them."""
    found = {}
    for kind in KINDS:
        with launched(kind, seed=77) as manager:
            go_on(manager, 1)
            manager.restore(folder / kind)
            found[kind] = go_on(manager, N_STEPS)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
