"""PettingZoo's games, and its own tests of envs through a manager of one env."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from envmgr import make
from envmgr.env import AgentRows
from tests.agents import Relay

pytest.importorskip("pygame")  # PettingZoo's tests, and these games, need it too
pytest.importorskip("pettingzoo")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own modules use names that it has moved
    from pettingzoo.test import parallel_api_test, parallel_seed_test
    from pettingzoo.utils import BaseParallelWrapper, ParallelEnv, parallel_to_aec

pytestmark = pytest.mark.filterwarnings("ignore")

GAMES = ("rps_v2:env", "rps_v2:parallel_env", "tictactoe_v3:env")


class OfManager(ParallelEnv):  # type: ignore[misc]
    """What users of a manager see of an env, as a parallel env."""

    metadata: Any = {"name": "of_manager"}  # noqa: RUF012

    def __init__(self, factory: Callable[[], Any], kind: str) -> None:
        self.manager = make(factory, 1, kind, auto_reset=False, context="fork")
        self.manager.launch()
        self.possible_agents = [*self.manager.observation_space.spaces]
        self.agents: list[Any] = []

    def observation_space(self, agent: Any) -> Any:
        return self.manager.observation_space[agent]

    def action_space(self, agent: Any) -> Any:
        return self.manager.action_space[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.manager.seed(seed)
        self.manager.reset({0: {}})
        obs = self.manager.ready_obs[0]
        self.agents = [*obs]
        return obs, self.manager.ready_info[0]["infos"]

    def step(self, actions: Any) -> Any:
        obs, rewards, done, info = self.manager.step({0: actions})[0]
        assert not info.get("abnormal"), info["error"]
        self.agents = [] if done else [*obs]
        obs = {**obs, **info.get("final_obs", {})}
        return obs, rewards, info["terminated"], info["truncated"], info["infos"]

    def close(self) -> None:
        self.manager.close()


@pytest.mark.parametrize("kind", ["base", "subprocess"])
def test_pettingzoos_own_tests(kind: str) -> None:
    for factory in (Relay, lambda: parallel_to_aec(BaseParallelWrapper(Relay()))):
        env = OfManager(factory, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(env, num_cycles=20)
        env.close()
        parallel_seed_test(lambda of=factory: OfManager(of, kind), num_cycles=20)


@pytest.mark.parametrize("game", GAMES)
def test_games(game: str) -> None:
    n_ended = 0
    with make(f"pettingzoo.classic.{game}", 2, "subprocess", seed=0) as manager:
        for _ in range(40):
            manager.ready_arrays([0, 1])
            timesteps = manager.step(manager.random_action())
            n_ended += sum(timestep.done for timestep in timesteps.values())
            assert not any(timestep.info.get("abnormal") for timestep in timesteps.values())
    assert n_ended >= 4


def test_games_as_rows() -> None:
    entry, wrappers = "pettingzoo.classic.rps_v2:env", ["envmgr.env.AgentRows"]
    with make(entry, 2, "base", wrappers=wrappers, seed=0) as manager:
        assert isinstance(manager.env_ref.env, AgentRows)
        timesteps = manager.step(manager.random_action())
        assert all(timestep.reward.sum() == 0.0 for timestep in timesteps.values())
