"""Episodes that end and begin within a step (`reset_inplace`), whatever comes between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr import EnvState, create_env_manager
from envmgr.core import table
from envmgr.core.collect import Collector, HandedOut
from envmgr.errors import EnvManagerError
from envmgr.hot import hot
from envmgr.manager import EnvManager
from envmgr.wire.block import block_is_possible
from tests.faults.interrupting import act_at, at_each_point, points_of

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="no steps are posted here")

N = 3
MOST = 25
"""So many points of a call are looked at where each takes a manager of its own."""


class Short(gymnasium.Env[Any, Any]):
    """Episodes of `length` steps, whose observations are the number of the episode and the step."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int, fails_at: int = 0) -> None:
        self.length, self.fails_at = length, fails_at
        self.at = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin the next one."""
        self.at = np.array((self.at[0] + 1, 0), np.float32)
        return self.at, {"episode": int(self.at[0])}

    def step(self, action: Any) -> Any:
        """Go on."""
        self.at = self.at + np.array((0, 1), np.float32)
        if self.fails_at and self.at[0] == self.fails_at:
            raise ValueError("as it should")
        return self.at, 1.0, bool(self.at[1] >= self.length), False, {"at": float(self.at[1])}


class ShortWithoutResetInfos(Short):
    """As `Short`; nothing is said of resets, so that C takes their ends."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin the next one."""
        return super().reset()[0], {}


def manager_of(*envs: Callable[[], Any], **config: Any) -> EnvManager:
    config = {"type": "thread", "num_workers": 1, "reset_inplace": True, **config}
    manager = create_env_manager(config, env_fn=list(envs))
    manager.launch()
    manager.ready_arrays(list(range(len(envs))))
    return manager


@pytest.fixture
def manager() -> Iterator[EnvManager]:
    """Three envs, all of whose episodes have a step more than the one before."""
    with manager_of(*(partial(Short, 1 + i) for i in range(N))) as found:
        for _ in range(6):  # every kind of batch has been seen once
            found.send_arrays(np.arange(N), np.zeros(N, np.int64))
            found.recv_arrays()
        yield found


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch was handed out in C."""
    seen: list[bool] = []
    take = Collector.take_arrays

    def taken(self: Collector, selection: Any) -> HandedOut | None:
        found = take(self, selection)
        seen.append(type(found) is HandedOut)
        return found

    monkeypatch.setattr(Collector, "take_arrays", taken)
    return seen


def step(manager: EnvManager) -> Any:
    """Step all envs; return what came of it."""
    manager.send_arrays(np.arange(manager.env_num), np.zeros(manager.env_num, np.int64))
    return manager.recv_arrays()


def test_an_interrupt_anywhere_loses_and_repeats_no_end(manager: EnvManager) -> None:
    done = 6
    for _ in at_each_point(
        lambda: manager.send_arrays(np.arange(N), np.zeros(N, np.int64)),
        lambda: manager.recv_arrays() and None,
    ):
        while manager.stats()["outstanding"]:
            manager.recv_arrays()
        done += 1
        stats = manager.stats()
        ended = [done // (1 + i) for i in range(N)]
        assert (stats["timesteps"], stats["episodes"]) == (N * done, sum(ended))
        assert stats["resets"] == sum(ended) + N
        assert set(manager.env_states.values()) == {EnvState.RUN}
        obs = manager.ready_arrays(np.arange(N)).obs
        assert obs.tolist() == [[1 + n, done % (1 + i)] for i, n in enumerate(ended)]


@pytest.mark.parametrize("receive", ["recv_arrays", "recv"])
def test_a_handler_that_closes_leaves_figures_that_add_up(receive: str) -> None:
    def opened() -> EnvManager:
        found = manager_of(*[partial(Short, 1)] * N)
        for _ in range(3):
            step(found)
        found.send_arrays(np.arange(N), np.zeros(N, np.int64))
        return found

    with opened() as one:
        points = points_of(lambda: getattr(one, receive)())
    for point in points[:: max(1, len(points) // MOST)]:
        with opened() as closed:
            with suppress(EnvManagerError):
                act_at(point, getattr(closed, receive), closed.close)
            stats = closed.stats()
            assert stats["outstanding"] >= 0, point
            assert stats["actions"] == stats["timesteps"] + stats["cancelled"]
            assert stats["episodes"] == stats["timesteps"], point


@pytest.mark.skipif(hot is None, reason="no C")
def test_who_was_dropped_leaves_the_others_ends_in_c(in_c: list[bool]) -> None:
    config = {"on_exhausted": "drop", "max_failures": 0}
    envs = partial(ShortWithoutResetInfos, 1), partial(ShortWithoutResetInfos, 2, 2)
    with manager_of(*envs, **config) as manager:
        while manager.env_states[1] is not EnvState.DONE:
            ids = manager.ready_arrays().env_ids
            manager.send_arrays(ids, np.zeros(len(ids), np.int64))
            manager.recv_arrays()
        for _ in range(3):
            manager.send_arrays([0], np.zeros(1, np.int64))
            manager.recv_arrays()
        assert in_c[-1]


@pytest.mark.parametrize(
    "ids", [[1], [0, 1], [2, 1], [0, 2], [0, 3, 2], [3, 0, 1, 2], [0, 1, 2, 3]]
)
@pytest.mark.parametrize("form", [list, np.array])
def test_ready_observations_come_in_the_order_that_they_are_asked_for(
    ids: list[int], form: Any
) -> None:
    with manager_of(*(partial(Short, 9) for _ in range(4))) as manager:
        for i in range(4):
            for _ in range(i):
                manager.send_arrays([i], np.zeros(1, np.int64))
                manager.recv_arrays()
        ready = manager.ready_arrays(form(ids))
        assert ready.env_ids.tolist() == ids
        assert ready.obs.tolist() == [[1, i] for i in ids]
        assert not ready.env_ids.flags.writeable
        assert step(manager).obs.tolist() == [[1, i + 1] for i in range(4)]


@pytest.mark.skipif(hot is None, reason="no C")
@pytest.mark.parametrize("inplace", [True, False])
def test_what_says_the_same_is_looked_at_once(
    inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    note = Collector._note_recipe

    def counted(self: Collector, *given: Any) -> None:
        noted.append(given[-1])  # the flags
        note(self, *given)

    monkeypatch.setattr(Collector, "_note_recipe", counted)
    with manager_of(*[partial(Short, 3)] * N, reset_inplace=inplace) as manager:
        for _ in range(20):
            manager.ready_arrays(list(range(N)))
            step(manager)
    assert len(noted) == len(set(noted)) <= 2  # buffers


def test_selections_that_are_not_known_any_more_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_KNOWN_SELECTIONS", 2)
    with manager_of(*[partial(Short, 2)] * 6) as manager:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                for first in range(5):
                    ids = [first, first + 1]
                    for _ in range(2):
                        manager.send_arrays(ids, np.zeros(2, np.int64))
                        manager.recv_arrays()
            left = [one for one in gc.get_objects() if isinstance(one, table.Selection)]
        finally:
            gc.enable()
    assert len(left) <= 4
