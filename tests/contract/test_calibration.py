"""`num_workers: auto`: envs are tried out in a worker of its own, of which nothing is left."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import calibrate as calibration
from envmgr.errors import LaunchError, ManagerClosedError
from tests.contract.envs import Do
from tests.contract.harness import Setup, World, meanwhile, over, step_all

AUTO = "auto"
# One test has every start method; to the others it makes no difference.
FORK = Setup("subprocess", "fork")
setups = over(
    Setup("subprocess", "server"),
    Setup("async_subprocess", "fork", False),
    Setup("subprocess", "spawn", False),
    Setup("async_subprocess", "forkserver"),
)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the same decided on every machine."""
    monkeypatch.setattr("envmgr.launch.usable_cores", lambda affinity: 2)


class PlainEnv(gymnasium.Env[Any, Any]):
    """Steps that sleep, or cost next to nothing."""

    observation_space = Box(-1.0, 1.0, (2,), np.float64)
    action_space = Discrete(2)

    def __init__(self, sleep_s: float = 0.0) -> None:
        self._sleep_s = sleep_s
        self._t = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._t += 1
        return self._observe(), float(action), self._t == 20, False, {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 2)


def only(action: int) -> Discrete:
    """Return a space of one action: what is tried out is no surprise."""
    return Discrete(1, start=int(action))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "num_workers: auto" in r.message]


@setups
def test_cheap_envs_share_a_worker(
    setup: Setup, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envmgr"):
        manager = world.make(setup, env_fn=[PlainEnv] * 3, num_workers=AUTO)
    stats = manager.stats()
    found = stats["calibration"]
    assert stats["num_workers"] == found["num_workers"] == manager.cfg.num_workers == 1
    assert "its steps are cheap" in found["reason"]
    assert found["usable_cores"] == 2
    assert found["step_s"] < 1e-3
    assert found["n_steps"] > 100
    assert found["n_episodes"] > 1
    assert len(messages(caplog)) == 1
    assert found["reason"] in messages(caplog)[0]
    if setup.shared_memory:  # it has doorbells
        assert 0.0 < found["wake_up_s"] < 1.0
        assert 0.0 < found["wake_up_cpu_s"] < 1.0
        assert "waking a worker takes" in messages(caplog)[0]
    else:
        assert found["wake_up_s"] is found["wake_up_cpu_s"] is None
    assert len(step_all(manager, dict.fromkeys(range(3), 0))) == 3


def test_envs_that_wait_are_kept_apart(world: World) -> None:
    manager = world.make(FORK, env_fn=[partial(PlainEnv, 1e-3)] * 4, num_workers=AUTO)
    found = manager.stats()["calibration"]
    assert found["num_workers"] == manager.stats()["num_workers"] == 4
    assert "its steps wait" in found["reason"]
    assert found["step_s"] >= found["step_wait_s"] >= 0.5e-3


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Do.RAISE, "ScriptedError"),
        (Do.SYS_EXIT, "sys.exit"),
        (Do.OS_EXIT, "died during the trial: exit code"),
        (Do.KILL, "killed by SIGKILL"),
        (Do.HANG_DEAF, "it has not answered 2.3 s into its steps"),
        (Do.GARBAGE, "broke the protocol"),
    ],
)
def test_an_env_that_cannot_be_tried_out_is_kept_apart(
    action: Do, text: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "PATIENCE_S", 2.0)
    manager = world.make(FORK, 3, action_space=only(action), num_workers=AUTO)
    found = manager.stats()["calibration"]
    assert found["num_workers"] == manager.stats()["num_workers"] == 3
    assert "an env could not be tried out" in found["reason"]
    assert text in found["reason"]
    assert len({world.pid(i) for i in range(3)}) == 3
    assert len(world.noted(0, "build")) == 2
    assert len(world.noted(1, "build")) == 1


@pytest.mark.parametrize("where", ["build", "reset"])
def test_a_launch_that_fails_says_why(where: str, world: World) -> None:
    manager = world.make(
        FORK,
        2,
        launch=False,
        num_workers=AUTO,
        script={f"{where}_faults": dict.fromkeys(range(3), "os_exit")},
    )
    with pytest.raises(LaunchError, match="2 of 2 envs could not be launched"):
        manager.launch()
    assert "died" in manager.stats()["calibration"]["reason"]
    assert manager.closed


def test_the_env_that_is_tried_out_ends_before_the_others_begin(world: World) -> None:
    world.make(FORK, 2, action_space=only(1), num_workers=AUTO)
    kinds = [entry[0] for entry in world.journal(0)]
    second = kinds.index("build", 1)
    assert kinds[second - 1] == "close"
    assert kinds[:second].count("step") > 1


def test_params_and_seed_of_the_first_reset_are_used(world: World) -> None:
    world.make(
        FORK, 2, action_space=only(1), num_workers=AUTO, seed=5, reset_param={0: {"level": 3}}
    )
    tried = world.journal(0)[: [e[0] for e in world.journal(0)].index("build", 1)]
    assert next(entry for entry in tried if entry[0] == "seed")[1] == 5
    assert all("level" in str(entry) for entry in tried if entry[0] == "reset")


def test_trajectories_do_not_depend_on_it(world: World) -> None:
    def run(num_workers: Any) -> list[Any]:
        manager = world.make(FORK, env_fn=[PlainEnv] * 3, num_workers=num_workers, seed=11)
        rows: list[Any] = [manager.random_action()]
        for _ in range(25):
            obs = manager.ready_obs
            rows.append({i: o.tolist() for i, o in obs.items()})
            timesteps = step_all(manager, dict.fromkeys(obs, 1))
            rows.append({i: (t.obs.tolist(), t.reward, t.done) for i, t in timesteps.items()})
            manager.get_attr("action_space")  # until resets are over
        manager.close()
        return rows

    assert run(AUTO) == run(None) == run(2)


def test_a_second_launch_takes_what_the_first_has_found(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envmgr"):
        manager = world.make(FORK, env_fn=[PlainEnv] * 3, num_workers=AUTO)
        found = manager.stats()["calibration"]
        manager.close()
        manager.launch()
    assert manager.stats()["calibration"] == found
    assert len(messages(caplog)) == 1


def test_what_could_not_be_tried_out_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envmgr"):
        manager = world.make(FORK, 2, action_space=only(Do.RAISE), num_workers=AUTO)
        manager.close()
        manager.launch()
    assert len(messages(caplog)) == 2


def test_spaces_that_are_read_early(world: World) -> None:
    manager = world.make(FORK, env_fn=[PlainEnv] * 3, num_workers=AUTO, launch=False)
    assert manager.action_space == Discrete(2)
    found = manager.stats()["calibration"]
    manager.launch()
    assert manager.stats()["calibration"] == found
    assert manager.stats()["num_workers"] == 1


@pytest.mark.parametrize(
    ("setup", "env_num"), [(Setup("base"), 3), (FORK, 1)], ids=["base", "one-env"]
)
def test_where_there_is_nothing_to_find_out(
    setup: Setup, env_num: int, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envmgr"):
        manager = world.make(setup, env_num, num_workers=AUTO)
    assert "calibration" not in manager.stats()
    assert manager.stats()["num_workers"] == env_num
    assert not messages(caplog)
    assert len(world.noted(0, "build")) == 1


def test_close_ends_it(world: World) -> None:
    setup = Setup("subprocess", "server")  # a fork beside the thread that closes is refused
    manager = world.make(setup, 2, launch=False, action_space=only(Do.HANG_DEAF), num_workers=AUTO)
    gate = world.gate
    with (
        meanwhile(lambda: (gate.await_visit(0), manager.close())),
        pytest.raises(ManagerClosedError, match="closed by another thread"),
    ):
        manager.launch()
    assert manager.closed
    assert len(world.noted(0, "build")) == 1
