"""The kind and the transport that docs/extending.md shows keep what every kind promises."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest

from envmgr import ENV_MANAGER_REGISTRY, create_env_manager
from envmgr.errors import EnvCrash
from envmgr.testing.contract import ManagerContract, WorkerManagerContract
from tests.docs.blocks import ROOT, blocks_of, programs_of


def register(kind: str) -> None:
    """Run the example of the page that registers a kind."""
    programs = programs_of(blocks_of(ROOT / "docs" / "extending.md"))
    (program,) = (one for one in programs if f'.register("{kind}")' in one.source)
    exec(program.source, {"__name__": "extending"})  # noqa: S102


class TestTheKindOfThePage(WorkerManagerContract):
    @pytest.fixture(autouse=True)
    def registered(self, tables_as_before: None) -> None:
        register("careful")
        assert ENV_MANAGER_REGISTRY.source("careful") == "registered by extending"

    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "careful", "context": "fork", **cfg}, env_fn=env_fn)


class TestTheTransportOfThePage(ManagerContract):
    @pytest.fixture(autouse=True)
    def registered(self, tables_as_before: None) -> None:
        register("plain")

    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "plain", **cfg}, env_fn=env_fn)

    def test_a_host_that_is_killed_is_replaced(self) -> None:
        with self.make_manager([Leaving, Leaving]) as manager:
            timesteps = manager.step({0: 1, 1: 0})
            assert isinstance(timesteps[0].info["error"], EnvCrash)
            while 0 not in manager.ready_obs:
                manager.step({1: 0})
            assert manager.stats()["generations"] == [1, 0]


class Leaving(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env whose action 1 ends the program."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        if action == 1:
            sys.exit(3)
        return super().step(action)
