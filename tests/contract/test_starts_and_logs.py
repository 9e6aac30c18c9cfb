"""`start_steps`: episodes that do not begin together. `worker_log`: a file for each worker."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import create_env_manager
from envmgr.env import BatchedEnvSpec
from envmgr.errors import ConfigError, LaunchError


class Count(gymnasium.Env[Any, Any]):
    """Observations say the step, and a digest of the actions; an episode takes ten steps."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Discrete(1000)

    def __init__(self, *, abnormal: bool = False) -> None:
        self.obs = np.zeros(2)
        self.abnormal = abnormal

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.obs[0] = 0
        return self.obs.copy(), {"reset": True}

    def step(self, action: Any) -> Any:
        self.obs += 1, action
        info = {"abnormal": True} if self.abnormal else {}
        return self.obs.copy(), 1.0, self.obs[0] == 10, False, info


def first_observations(cfg: dict[str, Any]) -> list[list[float]]:
    with create_env_manager({"start_steps": 30, **cfg}, env_fn=[Count] * 6) as manager:
        first = [obs.tolist() for obs in manager.ready_obs.values()]
        assert all(info == {"reset": True} for info in manager.ready_info.values())
        stats = manager.stats()
        assert (stats["actions"], stats["timesteps"], stats["episodes"]) == (0, 0, 0)
        manager.reset()
        assert all(obs[0] == 0 for obs in manager.ready_obs.values())
    return first


def test_envs_begin_with_different_numbers_of_steps_that_their_seeds_say() -> None:
    first = first_observations({"type": "base", "seed": 1})
    assert len({step for step, _ in first}) > 2
    assert all(0 <= step < 10 for step, _ in first)
    assert first == first_observations({"type": "subprocess", "num_workers": 2, "seed": 1})
    assert first == first_observations({"type": "thread", "seed": 1})
    assert first != first_observations({"type": "base", "seed": 2})
    assert first_observations({"type": "base"}) != first_observations({"type": "base"})


def test_where_envs_cannot_begin_so_it_is_refused() -> None:
    spec = BatchedEnvSpec(partial(gymnasium.vector.SyncVectorEnv, [Count] * 2), 2)
    with pytest.raises(ConfigError, match="start_steps is 5, but env_fn has batched envs"):
        create_env_manager({"type": "base", "start_steps": 5}, env_fn=[spec] * 2)
    cfg = {"type": "base", "start_steps": 100, "seed": 0}
    manager = create_env_manager(cfg, env_fn=[partial(Count, abnormal=True)])
    with pytest.raises(LaunchError, match="start_steps asks for was abnormal"):
        manager.launch()


class Chatty(Count):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        print("printed")
        print("complained", file=sys.stderr)
        logging.getLogger("mine").info("logged")
        os.write(1, b"by C\n")
        os.write(2, b"by C too\n")
        return super().reset()


def test_each_worker_has_a_file_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "logs"
    cfg = {"type": "subprocess", "num_workers": 2, "worker_log": str(folder)}
    with create_env_manager(cfg, env_fn=[Chatty] * 3) as manager:
        (pid,) = (w["pid"] for w in manager.stats()["workers"] if w["env_ids"] == [2])
        os.kill(pid, signal.SIGKILL)
        assert manager.step({2: 0})[2].info["abnormal"]
        manager.ready_arrays([0, 1, 2])
        names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "worker_0-envs_0-1-generation_0.log",
        "worker_1-env_2-generation_0.log",
        "worker_1-env_2-generation_1.log",
    ]
    for name in names:
        header, *lines = (folder / name).read_text().splitlines()
        assert header.startswith("--- ")
        assert header.endswith(name)
        spoken = [re.sub(r"^20.* INFO mine: ", "", line) for line in lines]
        once = ["printed", "complained", "logged", "by C", "by C too"]
        assert spoken == once * (2 if "envs" in name else 1)
    out, err = capfd.readouterr()
    assert "printed" not in out + err
    assert "by C" not in out + err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (str(tmp_path / "file" / "logs"), "a\0b"):
        manager = create_env_manager({"type": "subprocess", "worker_log": path}, env_fn=[Count])
        with pytest.raises(ConfigError, match=r"worker_log is .*cannot be made"):
            manager.launch()
