"""What holds however workers are started: one small suite for each start method.

Whatever else there is to a manager does not depend on it, and is tested with the quickest.
"""

from __future__ import annotations

import pytest

from envmgr.errors import EnvCrash, LaunchError
from tests.contract.envs import Do, seen
from tests.contract.harness import Setup, World, over, ready_all, step_all
from tests.contract.test_trajectories import SPACES, check_trajectories, sampled

CONTEXTS = ("server", "fork", "spawn", "forkserver")
every_context = over(*(Setup("subprocess", context) for context in CONTEXTS))


@every_context
@pytest.mark.parametrize("shared_memory", [True, False], ids=["block", "message"])
def test_trajectories_repeat(world: World, setup: Setup, shared_memory: bool) -> None:
    spaces = {str(i): SPACES["dict"] for i in range(2)}
    setup = setup._replace(shared_memory=shared_memory)
    manager = world.make(setup, env_fn=sampled(spaces), seed=100)
    assert (manager._running.supervisor.submitter.posts) is shared_memory
    check_trajectories(manager, spaces)


@every_context
def test_what_fails_dies_and_is_shared_is_repaired(world: World, setup: Setup) -> None:
    manager = world.make(setup._replace(num_workers=1), 2)
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.RAISE, 1: 1})
    assert timesteps[0].info["abnormal"]
    ready_all(manager)
    pid = world.pid(0)
    timesteps = step_all(manager, {0: Do.OS_EXIT, 1: 1})
    assert isinstance(timesteps[0].info["error"], EnvCrash)
    assert timesteps[0].info["error"].exit_status == 7
    ready = ready_all(manager)
    assert [seen(ready[i]).build for i in (0, 1)] == [1, 1]
    assert world.pid(0) == world.pid(1) != pid
    assert step_all(manager, {0: 2, 1: 3})[1].obs[4] == 3


@every_context
def test_a_launch_that_fails_leaves_nothing_and_the_next_one_works(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False, scripts={1: {"build_faults": {0: "os_exit"}}})
    with pytest.raises(LaunchError):
        manager.launch()
    manager.launch()
    assert step_all(manager, {0: 1, 1: 1}).keys() == {0, 1}
    manager.close()
    assert len(world.noted(0, "close")) == len(world.noted(0, "build")) == 2
    assert len(world.noted(1, "close")) == 1
