"""F22: workers that grow are replaced where an episode ends, and nobody sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contract.envs import ScriptedEnv
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    SOME_MESSAGE,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

EPISODE_LENGTH = 3
LEAKED_MB = 32


class Leaking(ScriptedEnv):
    """Never gives back what each of its resets takes."""

    _leaked: list[Any] = []  # noqa: RUF012 - of the process

    def reset(self, **params: Any) -> Any:
        self._leaked.append(np.ones(LEAKED_MB * 1_000_000, np.uint8))
        return super().reset(**params)

    def resident_mb(self) -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize("reset_inplace", [False, True])
@over(ALL_BLOCK, ALL_MESSAGE, SOME_MESSAGE, ALL_BLOCK_SHARED)
def test_f22_a_worker_that_grows_is_replaced_at_an_episodes_end(
    world: World, setup: Setup, reset_inplace: bool
) -> None:
    n_envs = 2
    script = {"episode_length": EPISODE_LENGTH}
    first = world.make(setup, n_envs, env=Leaking, script=script)
    limit_mb = max(first.call("resident_mb")) + 0.5 * LEAKED_MB  # the next reset exceeds it
    first.close()
    built = [len(world.noted(i, "build")) for i in range(n_envs)]

    manager = world.make(
        setup,
        n_envs,
        env=Leaking,
        script=script,
        max_worker_rss_mb=limit_mb,
        reset_inplace=reset_inplace,
    )
    n_episodes = 3
    for _ in range(n_episodes):
        for k in range(1, EPISODE_LENGTH + 1):
            ready_all(manager)
            timesteps = step_all(manager, dict.fromkeys(range(n_envs), k))
            for timestep in timesteps.values():
                assert "abnormal" not in timestep.info
                assert timestep.info["step"] == k, "replaced in the midst of an episode"
                assert timestep.done == (k == EPISODE_LENGTH)
    ready_all(manager)
    stats = manager.stats()
    assert (stats["failures"], stats["abnormal"]) == (0, 0)
    assert stats["recycled"] >= 1
    assert stats["episodes"] == n_episodes * n_envs
    n_builds = [len(world.noted(i, "build")) - built[i] for i in range(n_envs)]
    assert all(
        n == 1 + generation for n, generation in zip(n_builds, stats["generations"], strict=True)
    )
    assert max(manager.call("resident_mb")) < limit_mb + n_envs * LEAKED_MB + 20.0
