"""`on_failure: resume`: an env that has lost its worker goes on where it was saved last."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import create_env_manager
from envmgr.errors import ConfigError, EnvCrash, LaunchError
from tests.contract.harness import ALL_BLOCK, ALL_MESSAGE, INLINE, Setup

RAISES, DIES, ENDS = 97, 98, 99


class Counting(gymnasium.Env[Any, Any]):
    """Its observation is how many steps its episode has, and which of its episodes it is."""

    observation_space = Box(0.0, 1e6, (2,), np.float64)
    action_space = Discrete(100)

    def __init__(self) -> None:
        self._episode = self._steps = 0

    def _obs(self) -> Any:
        return np.array([self._steps, self._episode], np.float64)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._steps = self._episode + 1, 0
        return self._obs(), {"fresh": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == RAISES:
            raise RuntimeError("it stumbles")
        self._steps += 1
        return self._obs(), 1.0, action == ENDS, False, {}


class Run:
    """A manager whose env 0 is told what to do, while env 1 takes ordinary steps."""

    def __init__(self, setup: Setup, env: type[Counting] = Counting, **config: Any) -> None:
        resumes = {"on_failure": "resume", "snapshot_every": 5, "snapshot_copy": True}
        config = {**setup.cfg, **resumes, "max_failures": 100, **config}
        self.manager = create_env_manager(config, env_fn=[env] * 2)
        self.manager.launch()

    def step(self, action: int = 0) -> Any:
        """Return the timestep of env 0."""
        self.manager.ready_arrays([0, 1])
        return self.manager.step({0: action, 1: 0})[0]

    def steps(self, count: int) -> None:
        """Take ordinary steps."""
        for _ in range(count):
            assert not self.step().done

    def shown(self) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """Return what is ready: steps and episodes, and infos."""
        obs = self.manager.ready_arrays([0, 1]).obs.tolist()
        infos = self.manager.ready_info
        return obs, [infos[0], infos[1]]


@pytest.mark.parametrize(
    ("setup", "shared"), [(ALL_BLOCK, False), (Setup("subprocess", "fork", True, 1), True),
                          (ALL_MESSAGE, False)], ids=str,
)  # fmt: skip
def test_who_loses_its_worker_goes_on_where_it_was_saved(setup: Setup, shared: bool) -> None:
    run = Run(setup)
    fresh, resumed = {"fresh": True}, {"resumed": True}
    with run.manager as manager:
        run.steps(13)
        died = run.step(DIES)
        assert (died.obs.tolist(), died.done, died.reward) == ([13.0, 1.0], True, 0.0)
        assert isinstance(died.info["error"], EnvCrash)
        # From step 10, as its neighbour in the same worker, whose last step was its 14th or 13th.
        other = ([10, 1], resumed) if shared else ([14, 1], fresh)
        assert run.shown() == ([[10, 1], other[0]], [resumed, other[1]])
        assert run.step().obs.tolist() == [11, 1]
        # Once: it is not saved again before five more steps.
        assert run.step(DIES).info["abnormal"]
        assert run.shown()[0][0] == [0, 1]
        # An env that raises is reset, and what was saved of an episode ends with it.
        run.steps(7)
        assert run.step(RAISES).info["abnormal"]
        assert run.shown()[0][0] == [0, 2]
        run.steps(6)
        assert run.step(ENDS).done
        assert run.step(DIES).info["abnormal"]
        assert run.shown()[0][0] == [0, 1]
        # A reset that is asked for is one.
        run.steps(6)
        run.step(DIES)
        assert run.shown()[0][0] == [5, 1]  # asked for before, it may come before this, or after
        manager.reset({0: None})
        assert run.shown()[0][0] == [0, 2]
        stats = manager.stats()
        assert (stats["generations"][0], stats["resumed"]) == (4, 5 if shared else 2)
        assert stats["actions"] == stats["timesteps"] + stats["cancelled"]


def test_who_dies_while_it_is_ready_is_told_so_first() -> None:
    run = Run(ALL_BLOCK)
    with run.manager as manager:
        run.steps(7)
        (worker,) = [w["pid"] for w in manager.stats()["workers"] if w["env_ids"] == [0]]
        os.kill(worker, signal.SIGKILL)
        told = run.step()
        assert (told.obs.tolist(), told.info["abnormal"]) == ([7, 1], True)
        assert run.shown()[0][0] == [5, 1]


class Handle(Counting):
    """Cannot be copied from its third step on."""

    def step(self, action: Any) -> Any:
        if self._steps == 2:
            self.handle = threading.Lock()
        return super().step(action)


class Locked(Counting):
    """Gives a state that its successor refuses."""

    def get_state(self) -> Any:
        return self._steps

    def set_state(self, state: Any) -> None:
        raise RuntimeError("the key is lost")


def test_who_cannot_be_resumed_is_reset() -> None:
    run = Run(ALL_BLOCK, env=Locked)
    with run.manager as manager:
        run.steps(7)
        assert run.step(DIES).info["abnormal"]
        assert run.shown()[0][0] == [0, 1]
        assert manager.stats()["failures_by_kind"] == {"EnvCrash": 1, "EnvRaised": 1}
        assert manager.stats()["resumed"] == 0


def test_what_cannot_be_saved_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        LaunchError, match=r"envs 0, 1 .*Counting has none of the methods .*get_state"
    ):
        Run(INLINE, snapshot_copy=False)
    config = {"type": "base", "on_failure": "resume", "snapshot_every": 5, "snapshot_copy": True}
    with create_env_manager(config, env_fn=[Handle]) as manager:
        for k in range(12):
            assert manager.step({0: 0})[0].obs[0] == k + 1
    said = [text for text in caplog.messages if "cannot be saved" in text]
    assert len(said) == 1
    assert "'handle'" in said[0]
    with pytest.raises(ConfigError, match="batched envs, whose rows have no state"):
        create_env_manager({**config, "type": "gym_vector"}, env_fn=[Counting] * 2)


class Saves(Counting):
    """It notes at which of its episodes, and after how many steps, it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[tuple[int, int]] = []

    def get_state(self) -> tuple[int, int]:
        self.saves.append((self._episode, self._steps))
        return self.saves[-1]

    def set_state(self, state: tuple[int, int]) -> None:
        self._episode, self._steps = state


def test_steps_until_the_next_save_count_anew_in_each_episode() -> None:
    run = Run(ALL_BLOCK, Saves)
    with run.manager as manager:
        for n_steps in (3, 6, 4):
            run.steps(n_steps)
            manager.reset()
        assert manager.get_attr("saves")[0] == [(2, 5)]
