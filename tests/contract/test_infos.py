"""Infos that are alike are written as records, and all others beside them go as they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from envmgr import create_env_manager
from envmgr.collect import EpisodeCollector, RolloutCollector
from envmgr.core import ArrayBatch
from envmgr.core.replies import BlockReplies
from envmgr.errors import ConfigError
from envmgr.wire.block import block_is_possible
from envmgr.wire.info_forms import RecordBatch
from tests.cases import for_each
from tests.values import same_values

N = 4
KNOWN = 12
"""After so many steps of the envs their form is known."""

DIE = 1
"""The action that ends the worker."""

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="infos go by message here")


class Telling(gym.Env[Any, Any]):
    """Tells the same in each step, but for some.

    Args:
        env_id: part of what it tells.
        odd: what else it does, by number of the step: a function of its info, which returns info,
            reward and whether the episode ends.
        is_mortal: whether it ends its worker when it is told to.
    """

    observation_space = gym.spaces.Box(-1.0, 99.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        env_id: int,
        odd: Mapping[int, Callable[[dict[str, Any]], Any]] | None = None,
        *,
        is_mortal: bool = False,
    ) -> None:
        self._env_id, self._odd = env_id, odd or {}
        self._n = self._n_resets = 0
        self._array = np.zeros(2)
        self._info: dict[str, Any] = {"x": 0.0, "n": env_id, "at": self._array, "in": {"t": ""}}
        self._is_mortal = is_mortal

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._n_resets += 1
        return np.zeros(2, np.float32), {"begun": self._n_resets, "env": self._env_id}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Tell where it is; what it tells is always the same object."""
        if action == DIE and self._is_mortal:
            os._exit(3)
        self._n += 1
        self._array[:] = self._n
        info = self._info
        info["x"] = 1.5 * self._n
        info["in"]["t"] = f"{self._n}"
        reward, done = 1.0, False
        if self._n in self._odd:
            info, reward, done = self._odd[self._n](info)
        return np.full(2, self._n % 99, np.float32), reward, done, False, info


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an end": lambda info: (info, 1.0, True),
    "an end that says more": lambda info: ({**info, "episode": {"r": 1.0}}, 1.0, True),
    "an end with an odd info": lambda info: ({**info, "list": [1]}, 1.0, True),
    "an end without an info": lambda info: ({}, 1.0, True),
    "no info": lambda info: ({}, 1.0, False),
    "a part": lambda info: ({"n": 7, "in": {"t": ""}}, 1.0, False),
    "another info": lambda info: ({"y": 1}, 1.0, False),
    "an odd info": lambda info: ({"list": [1], **info}, 1.0, False),
    "a large info": lambda info: ({**info, "large": "x" * 3000}, 1.0, False),
    "a large integer": lambda info: ({**info, "n": 1 << 70}, 1.0, False),
    "another order": lambda info: (dict(reversed(info.items())), 1.0, False),
    "an integer as reward": lambda info: (info, 3, False),
    "an odd reward": lambda info: (info, np.float32(2.5), False),
    "not abnormal": lambda info: ({**info, "abnormal": False}, 1.0, False),
    "abnormal": lambda info: ({**info, "abnormal": True}, 1.0, False),
}


def envs_of(first: int, second: int, also: int = N) -> list[Any]:
    """Envs of which some do something odd: one after another, and two at once."""
    names = list(ODD)
    odd: list[dict[int, Any]] = [{} for _ in range(N + 1)]
    for k, name in enumerate(names):
        odd[first][KNOWN + 2 * k] = ODD[name]
        odd[second][KNOWN + 2 * k + 2] = ODD[name]
        odd[also][KNOWN + 2 * k] = ODD["an end"]
    return [partial(Telling, i, odd[i]) for i in range(N)]


def run(config: Mapping[str, Any], envs: list[Any], *, arrays: bool) -> tuple[list[Any], int]:
    """Return what the envs tell, and how many batches of it were records."""
    seen: list[Any] = []
    ids, n_records = list(range(N)), 0
    with create_env_manager(dict(config), env_fn=envs) as manager:
        for _ in range(KNOWN + 2 * len(ODD) + 2):
            manager.ready_arrays(ids)
            begun = [manager.ready_info[i] for i in ids]
            if arrays:
                manager.send_arrays(ids, np.zeros(N, np.int64))
                batch = manager.recv_arrays()
                read = getattr(getattr(batch.infos, "_remarks", None), "infos", None)
                n_records += type(read) is RecordBatch
                columns = batch.info_columns
                columns.pop("error", None)
                seen.append((begun, list(batch.infos), columns, batch.reward.tolist()))
            else:
                steps = manager.step(dict.fromkeys(ids, 0))
                rewards = [steps[i].reward for i in ids]
                seen.append((begun, [steps[i].info for i in ids], rewards))
    for one in seen:
        _without_errors(one[1])
    return seen, n_records


def _without_errors(infos: list[Any]) -> None:
    for info in infos:
        if isinstance(info, dict) and "error" in info:
            info["error"] = type(info["error"])


CONFIGS: dict[str, dict[str, Any]] = {
    "subprocess": {"type": "subprocess", "context": "fork", "num_workers": 2},
    "in place": {"type": "subprocess", "context": "fork", "num_workers": 1, "reset_inplace": True},
    "views": {"type": "subprocess", "context": "fork", "num_workers": 2, "copy_on_get": False},
    "checked": {"type": "subprocess", "context": "fork", "num_workers": 2, "strict_dtype": True},
    "thread": {"type": "thread"},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [(0, 2), (1, 3, 2), (3, 0, 1)])
def test_what_is_odd_comes_out_beside_records(name: str, rows: tuple[int, ...]) -> None:
    config = {"max_failures": 99, "max_failures_total": 99}
    expected, _ = run({"type": "base", **config}, envs_of(*rows), arrays=True)
    plain, _ = run({"type": "base", **config}, envs_of(*rows), arrays=False)
    got, n_records = run({**CONFIGS[name], **config}, envs_of(*rows), arrays=True)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert same_values(one[:2], other[:2]), step
        assert same_values(one[2:], other[2:]), step
    assert n_records == 0 if name == "thread" else n_records > 30
    steps, _ = run({**CONFIGS[name], **config}, envs_of(*rows), arrays=False)
    for step, (one, other) in enumerate(zip(steps, plain, strict=True)):
        assert same_values(one, other), step


def test_envs_that_are_renewed_begin_with_the_forms_of_the_others() -> None:
    made = [partial(Telling, i, is_mortal=True) for i in range(N)]
    config = {"type": "subprocess", "context": "fork"}  # each has a worker of its own
    with create_env_manager(config, env_fn=made) as manager:
        ids, actions = list(range(N)), np.zeros(N, np.int64)
        for k in range(KNOWN + 10):
            manager.ready_arrays(ids)
            actions[:] = 0
            actions[k % N] = DIE if k in (KNOWN, KNOWN + 3) else 0
            manager.send_arrays(ids, actions)
            batch = manager.recv_arrays()
            infos: Any = batch.infos
            assert bool(len(batch.abnormal)) == bool(actions.any())
            assert len(batch.reward[batch.abnormal]) == len(batch.abnormal), "they are an index"
            assert all(info.get("abnormal") or info["n"] == i for i, info in enumerate(infos))
            if k >= KNOWN and not actions.any():
                assert type(infos._remarks.infos) is RecordBatch, k
                assert not infos._remarks.infos.odd, k
        assert manager.stats()["failures"] == 2


class Counting(Telling):
    """Tells one number, in the same dict each time."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self._same: dict[str, Any] = {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Count."""
        obs, reward, terminated, truncated, info = super().step(action)
        self._same["x"] = info["x"]
        return obs, reward, terminated, truncated, self._same


@pytest.mark.parametrize("name", ["thread", "subprocess", "messages", "base"])
def test_an_env_may_use_the_same_dict_again(name: str) -> None:
    messages = {**CONFIGS["subprocess"], "shared_memory": False}
    config = {"base": {"type": "base"}, "messages": messages, **CONFIGS}[name]
    with create_env_manager(config, env_fn=[partial(Counting, 0)] * 2) as manager:
        seen = [manager.step({0: 0, 1: 0}) for _ in range(KNOWN)]
    assert [steps[1].info["x"] for steps in seen] == [1.5 * k for k in range(1, KNOWN + 1)]


def _said_of(batch: ArrayBatch) -> Any:
    """Return what a batch says of its infos, but for exceptions, which are different objects."""
    columns = batch.info_columns
    columns.pop("error", None)
    return columns, list(batch.told), list(batch.abnormal), batch.has_infos


@pytest.mark.parametrize("name", ["base", "subprocess", "in place"])
@pytest.mark.parametrize("odd", [None, *ODD])
def test_what_is_done_to_infos_is_not_done_to_their_columns(name: str, odd: str | None) -> None:
    config = {"base": {"type": "base"}, **CONFIGS}[name] | {"max_failures": 99}
    said: list[list[Any]] = [[], []]
    for before, after in ((said[0], None), (None, said[1])):
        envs = [partial(Telling, 0, {} if odd is None else {KNOWN: ODD[odd]})]
        envs += [partial(Telling, i) for i in range(1, N)]
        with create_env_manager(config, env_fn=envs) as manager:
            for _ in range(KNOWN + 1):
                ids = list(range(N))
                manager.ready_arrays(ids)
                manager.send_arrays(ids, np.zeros(N, np.int64))
                batch = manager.recv_arrays()
                if before is not None:
                    before.append(_said_of(batch))
                for info in batch.infos:
                    info.clear()
                    info["other"] = 1
                if after is not None:
                    batch.info_columns.clear()
                    after.append(_said_of(batch))
                assert list(batch.infos) == [{"other": 1}] * N
    for k, (one, other) in enumerate(zip(*said, strict=True)):
        assert same_values(one, other), (k, one, other)


def test_that_envs_have_no_form_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Telling:
        return Telling(0, dict.fromkeys(range(1, 3000), lambda info: ({"a": [1]}, 1.0, False)))

    with (
        caplog.at_level(logging.INFO, "envmgr"),
        create_env_manager(CONFIGS["subprocess"], env_fn=[make] * N) as manager,
    ):
        for _ in range(1100):
            manager.step(dict.fromkeys(range(N), 0))
        assert manager.step(dict.fromkeys(range(N), 0))[0].info["a"] == [1]
    said = [record for record in caplog.records if "stable form" in record.getMessage()]
    assert len(said) == 1


# -- collectors keep what they are asked for ------------------------------------------------------


def ends_at(*steps: int) -> dict[int, Callable[[dict[str, Any]], Any]]:
    return dict.fromkeys(steps, ODD["an end that says more"])


@pytest.mark.parametrize("kind", ["base", "subprocess"])
def test_rollouts_hold_what_they_are_asked_for(kind: str) -> None:
    made = [partial(Telling, i, {**ends_at(3 + i), 7: ODD["a part"]}) for i in range(N)]
    config = {"type": "base"} if kind == "base" else CONFIGS["subprocess"]
    with create_env_manager(dict(config), env_fn=made) as manager:
        keys = ["x", "n", "at", "nothing", "in"]
        collector = RolloutCollector(manager, n_steps=5, info_keys=keys)
        rollout = collector.collect()
        assert rollout.infos.keys() == {"x", "n", "at", "in"}, "others are there in no step"
        values, present = rollout.infos["x"]
        assert present.all()
        assert values.tolist() == [[1.5 * t] * N for t in range(1, 6)]
        assert rollout.infos["n"].values.tolist() == [list(range(N))] * 5
        assert rollout.infos["at"].values[:, :, 1].tolist() == [[t] * N for t in range(1, 6)]
        collector.collect()
        values, present = rollout.infos["x"]
        assert present.tolist() == [[True] * N, [False] * N, *[[True] * N] * 3]
        assert values[:, 0].tolist() == [9.0, 0.0, 12.0, 13.5, 15.0]
        assert rollout.infos["n"].values[1].tolist() == [7] * N


def test_a_rollout_of_values_of_unlike_types_holds_objects() -> None:
    made = [
        partial(Telling, i, {2: lambda info: ({"x": np.ones(2), "n": "text"}, 1.0, False)})
        for i in range(2)
    ]
    with create_env_manager({"type": "base"}, env_fn=made) as manager:
        rollout = RolloutCollector(manager, n_steps=3, info_keys=("x", "n")).collect()
    x, n = rollout.infos["x"].values, rollout.infos["n"].values
    assert (x.dtype, n.dtype, x.shape) == (object, object, (3, 2))
    assert [type(value) for value in x[:, 0]] == [float, np.ndarray, float]
    assert n[:, 1].tolist() == [1, "text", 1]
    assert rollout.infos["n"].present.all()


def test_trajectories_keep_what_they_are_asked_for() -> None:
    made = [partial(Telling, i, ends_at(4)) for i in range(2)]
    with create_env_manager({"type": "base"}, env_fn=made) as manager:
        collector = EpisodeCollector(manager, info_keys=("episode", "n"))
        for one in collector.collect(2):
            assert [*one.infos[0]] == ["n"]
            assert one.infos[-1] == {"episode": {"r": 1.0}, "n": one.env_id}


@for_each("keys", ["x", [1], 7, {"x": 1}, [b"x"]])
def test_what_are_no_keys_of_infos(keys: Any) -> None:
    with create_env_manager({"type": "base"}, env_fn=[partial(Telling, 0)]) as manager:
        for make in (partial(RolloutCollector, n_steps=3), EpisodeCollector):
            with pytest.raises(ConfigError, match="info_keys should be a list"):
                make(manager, info_keys=keys)


@for_each("kind", ["base", "subprocess"])
@for_each("before", [True, False])
def test_an_interrupt_while_infos_are_read_costs_no_timestep(
    kind: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [partial(Telling, i) for i in range(N)]
    with create_env_manager({"type": kind}, env_fn=made) as manager:
        ids, actions = list(range(N)), np.zeros(N, np.int64)
        for _ in range(KNOWN + 4):
            manager.send_arrays(ids, actions)
            expected = list(manager.recv_arrays().infos)
        manager.send_arrays(ids, actions)
        read, interrupts = BlockReplies.infos, [KeyboardInterrupt]

        def infos(self: BlockReplies, *args: Any) -> Any:
            found = None if before else read(self, *args)
            if interrupts:
                raise interrupts.pop()
            return read(self, *args) if before else found

        monkeypatch.setattr(BlockReplies, "infos", infos)
        with pytest.raises(KeyboardInterrupt):
            manager.recv_arrays()
        assert manager.stats()["outstanding"] == N
        batch = manager.recv_arrays()
        assert batch.env_ids.tolist() == ids
        for was, now in zip(expected, batch.infos, strict=True):
            assert (now["n"], now["x"]) == (was["n"], was["x"] + 1.5)
        assert manager.stats()["outstanding"] == 0
