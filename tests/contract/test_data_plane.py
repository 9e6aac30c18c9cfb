"""However steps travel, and in whatever form they are sent and gathered: trajectories are the same.

Every env of a family is played with actions that follow from its env_id and their number alone.
What is up to chance here is the way to do it: in which order envs are stepped, in batches of which
size, as dicts or arrays, gathered how, and what is asked of the envs in between. `base`, which
knows no shared memory and no messages, says what has to come out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from envmgr import create_env_manager
from envmgr.spaces import codec_of
from envmgr.views import array_batch
from tests.contract.family import ACTIONS, OBSERVATIONS, Family, fill
from tests.contract.harness import Setup
from tests.contract.test_trajectories import difference

ENV_NUM = 4
N_STEPS = 60
FAMILIES = (
    Family("vector", "discrete", "gymnasium"),
    Family("image", "box", "base"),
    Family("dict", "multidiscrete", "gymnasium"),
    Family("tuple", "dict", "base"),
    Family("discrete", "multibinary", "gymnasium"),
    Family("point", "tuple", "gymnasium"),
    Family("vector", "discrete", "base"),
    Family("image", "dict", "gymnasium"),
    Family("empty", "dict with an empty part", "gymnasium"),
    Family("dict with an empty part", "empty", "base"),
)
WAYS: dict[str, tuple[Setup, dict[str, Any]]] = {
    "sync, a host each": (Setup("subprocess", "fork"), {}),
    "sync, one host, in place": (
        Setup("subprocess", "fork", num_workers=1),
        {"reset_inplace": True},
    ),
    "sync, two hosts, views": (Setup("subprocess", "fork", num_workers=2), {"copy_on_get": False}),
    "sync, pipes": (Setup("subprocess", "fork", False, num_workers=2), {}),
    "async, a host each, wait for one": (Setup("async_subprocess", "fork"), {"wait_num": 1}),
    "async, one host, wait for two": (
        Setup("async_subprocess", "fork", num_workers=1),
        {"wait_num": 2, "step_timeout": 60.0, "reset_timeout": 60.0},
    ),
    "async, two hosts, wait for all, in place": (
        Setup("async_subprocess", "fork", num_workers=2),
        {"wait_num": float("inf"), "reset_inplace": True, "copy_on_get": False},
    ),
    "async, two hosts, stragglers": (
        Setup("async_subprocess", "fork", num_workers=2),
        {"wait_num": 3, "step_wait_timeout": 0.001, "copy_on_get": "until_send"},
    ),
    "async, pipes": (Setup("async_subprocess", "fork", False), {"wait_num": 1}),
}


def plan_of(env_id: int, k: int) -> str:
    """Return what happens to an env around its k-th action."""
    chance = random.Random(env_id * 1009 + k)
    plans = ["set_attr", "call", "get_attr", "reset", "reset with params", "cancel", "seed"]
    return chance.choice(plans) if chance.random() < 0.2 else ""


def action_of(space: Any, env_id: int, k: int, *, python_numbers: bool) -> Any:
    """Return the k-th action of an env."""
    action = fill(space, np.random.default_rng([env_id, k]))
    return int(action) if python_numbers and isinstance(action, np.int64) else action


class Player:
    """Plays all envs of a manager to the end, and notes what each of them gave.

    Args:
        manager: launched.
        space: of actions.
        chance: which way to take.
    """

    def __init__(self, manager: Any, family: Family, chance: random.Random) -> None:
        self.manager = manager
        self.space = ACTIONS[family.action]
        self.layout = codec_of(OBSERVATIONS[family.observation]).layout
        self.chance = chance
        self.style = family.style
        cfg = manager.cfg
        self.gathers_all = cfg.get("wait_num") == float("inf") or "async" not in cfg.type
        self.trajectories: list[list[Any]] = [[] for _ in range(manager.env_num)]
        self.sent = [0] * manager.env_num
        self.prepared = [-1] * manager.env_num
        self.pending: set[int] = set()
        self.fresh = set(range(manager.env_num))
        self.n_cancelled = 0

    def play(self) -> list[list[Any]]:
        while self.pending or self.fresh or min(self.sent) < N_STEPS:
            self.observe()
            ready = [i for i in self.manager.ready_env if self.sent[i] < N_STEPS]
            ready = [i for i in ready if i not in self.fresh]
            chosen = self.chance.sample(ready, self.chance.randint(0, len(ready)))
            chosen = [i for i in chosen if not self.prepare(i)]
            self.act(chosen)
        stats = self.manager.stats()
        assert stats["outstanding"] == 0
        assert stats["cancelled"] == self.n_cancelled
        assert stats["actions"] == sum(self.sent) == stats["timesteps"] + stats["cancelled"]
        return self.trajectories

    def observe(self) -> None:
        """Note the first observations of episodes; and see that the others are as they were."""
        if len(self.pending) == self.manager.env_num:
            return
        ready, infos = self.manager.ready_obs, self.manager.ready_info
        assert not ready.keys() & self.pending
        for i in list(self.fresh & ready.keys()):
            self.fresh.discard(i)
            self.note(i, "first", copy.deepcopy(ready[i]), infos[i])
        for i, obs in ready.items():
            latest = self.trajectories[i][-1]
            wanted = latest[1].obs if latest[0] == "step" else latest[1]
            if latest[0] in ("first", "step"):
                assert difference(obs, wanted) is None

    def note(self, env_id: int, *entry: Any) -> None:
        self.trajectories[env_id].append(entry)

    def prepare(self, env_id: int) -> bool:
        """Do what comes before an env's next action; True if that takes the env's turn."""
        k = self.sent[env_id]
        if self.prepared[env_id] == k:
            return False
        self.prepared[env_id] = k
        manager, ids, plan = self.manager, [env_id], plan_of(env_id, k)
        match plan:
            case "set_attr":
                manager.set_attr("knob", k, env_ids=ids)
            case "call":
                self.note(env_id, "called", manager.call("peek", 5, env_ids=ids))
            case "get_attr":
                self.note(env_id, "has", manager.get_attr("count", env_ids=ids))
            case "reset":
                manager.reset({env_id: None})
            case "reset with params":
                manager.reset({env_id: {"k": k}})
            case "seed":
                manager.seed({env_id: k})
                manager.reset({env_id: None})
            case "cancel":
                self.cancel(env_id)
        if plan in ("reset", "reset with params", "seed", "cancel"):
            self.fresh.add(env_id)
            return True
        return False

    def cancel(self, env_id: int) -> None:
        """Have an env take a step that nobody gets.

        It must not end the episode: whether the reset that follows is joined is up to the timing.
        """
        self.manager.set_attr("knob", "calm", env_ids=[env_id])
        self.send([env_id])
        self.pending.discard(env_id)
        self.manager.reset({env_id: None if env_id % 2 else {}})
        self.n_cancelled += 1

    # -- steps ------------------------------------------------------------------------------

    def actions(self, env_ids: list[int]) -> dict[int, Any]:
        return {
            i: action_of(self.space, i, self.sent[i], python_numbers=self.is_python(i))
            for i in env_ids
        }

    def is_python(self, env_id: int) -> bool:
        """Whether an env's numbers are Python's own; in an array they are numpy's."""
        return self.style == "gymnasium" or env_id == 0  # gymnasium envs get ints in any case

    def took(self, env_ids: list[int]) -> None:
        for i in env_ids:
            self.sent[i] += 1
            self.pending.add(i)

    def send(self, env_ids: list[int]) -> None:
        actions = self.actions(env_ids)
        if self.chance.random() < 0.5 or (self.style == "base" and 0 in env_ids):
            self.manager.send(actions)
        else:
            self.manager.send_arrays(*self.batch(actions))
        self.took(env_ids)

    def batch(self, actions: dict[int, Any]) -> tuple[Any, Any]:
        layout = codec_of(self.space).layout
        assert layout is not None
        leaves = [layout.flatten(action) for action in actions.values()]
        columns = [
            np.array([row[j] for row in leaves], dtype=leaf.dtype)
            for j, leaf in enumerate(layout.leaves)
        ]
        ids = list(actions)
        return (ids if self.chance.random() < 0.5 else np.array(ids)), layout.unflatten(columns)

    def act(self, env_ids: list[int]) -> None:
        how = self.chance.random()
        if not env_ids:
            if self.pending:
                self.receive()
        elif how < 0.5:
            self.step(env_ids)
        elif how < 0.7 and len(env_ids) > 1:  # two sends, one after another
            half = self.chance.randint(1, len(env_ids) - 1)
            self.send(env_ids[:half])
            if self.chance.random() < 0.5:
                self.receive()
            self.send(env_ids[half:])
        else:
            self.send(env_ids)
            if self.chance.random() < 0.7:
                self.receive()

    def step(self, env_ids: list[int]) -> None:
        actions = self.actions(env_ids)
        timesteps = self.manager.step(actions)
        self.took(env_ids)
        if self.gathers_all:
            assert list(timesteps) == env_ids
        else:
            assert timesteps
            assert list(timesteps) == sorted(timesteps)
        self.got(timesteps)

    def receive(self) -> None:
        chance, manager = self.chance, self.manager
        min_ready = chance.choice([None, None, 1, 1, 2, ENV_NUM])
        timeout_s = chance.choice([None, None, None, 0.0, 0.002, 30.0])
        if chance.random() < 0.5:
            timesteps = manager.recv(min_ready, timeout_s)
            ids = list(timesteps)
        else:
            timesteps = manager.recv_arrays(min_ready, timeout_s)
            ids = timesteps.env_ids.tolist()
        assert ids == sorted(ids)
        if timeout_s in (None, 30.0):
            assert len(ids) >= min(min_ready or 1, len(self.pending))
        if isinstance(timesteps, Mapping):
            self.got(timesteps)
        else:
            self.got_arrays(ids, timesteps)

    def got(self, timesteps: Mapping[int, Any]) -> None:
        for i, timestep in timesteps.items():
            self.pending.remove(i)
            self.note(i, "step", plain(copy.deepcopy(timestep)))
            if timestep.done:
                self.fresh.add(i)

    def got_arrays(self, ids: list[int], batch: Any) -> None:
        batch = copy.deepcopy(batch)
        for k, i in enumerate(ids):
            self.pending.remove(i)
            obs = None if self.layout is None else [x[k] for x in leaves_of(batch.obs)]
            ends = (bool(batch.terminated[k]), bool(batch.truncated[k]))
            self.note(i, "row", obs, batch.reward[k], ends, plain_info(batch.infos[k]))
            if any(ends):
                self.fresh.add(i)


class PlainPlayer(Player):
    """Steps in the simplest way."""

    def send(self, env_ids: list[int]) -> None:
        self.manager.send(self.actions(env_ids))
        self.took(env_ids)

    def act(self, env_ids: list[int]) -> None:
        if env_ids:
            self.step(env_ids)


def leaves_of(value: Any) -> list[Any]:
    """Return the arrays of a nested value, in order."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [value]


def plain(timestep: Any) -> Any:
    return timestep._replace(info=plain_info(timestep.info))


def plain_info(info: Any) -> Any:
    """Return an info whose error can be compared."""
    if isinstance(info, dict) and "error" in info:
        error = info["error"]
        text = str(error).split("\n")[0]
        return {**info, "error": (type(error).__name__, error.env_id, error.during, text)}
    return info


@cache
def expected(family: Family) -> list[list[Any]]:
    """Return what `base` gives, one env after the other, in the simplest way."""
    manager = create_env_manager(config(Setup("base"), {}), env_fn=[family] * ENV_NUM)
    with manager:
        return PlainPlayer(manager, family, random.Random(1)).play()


def config(setup: Setup, more: dict[str, Any]) -> dict[str, Any]:
    calm = {"max_failures": 10**6, "failure_window_s": 1e-6, "retry_waiting_time": 0.0}
    return {**setup.cfg, "seed": 11, **calm, **more}


def compare(family: Family, got: list[list[Any]]) -> None:
    for i, (mine, theirs) in enumerate(zip(got, expected(family), strict=True)):
        for k, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            found = unlike(family, i, one, other)
            assert found is None, f"env {i}, item {k}: {found}\n{theirs[max(k - 3, 0) : k]}"
        assert len(mine) == len(theirs)


def unlike(family: Family, env_id: int, one: Any, other: Any) -> str | None:
    """Say where something differs from what `base` gave."""
    if one[0] != "row":
        return difference(one, other)
    if other[0] != "step":
        return f"a timestep is not {other[0]}"
    _, obs, reward, ends, info = one
    wanted = array_batch({env_id: other[1]}, codec_of(OBSERVATIONS[family.observation]))
    rows = [leaf[0] for leaf in leaves_of(wanted.obs)]
    if (found := difference(obs, rows, "obs")) is not None:
        return found
    if not np.all(np.asarray(reward) == wanted.reward[0]):
        return f"reward: {reward} is not {wanted.reward[0]}"
    if ends != (wanted.terminated[0], wanted.truncated[0]):
        return f"ends: {ends} is not {wanted.terminated[0], wanted.truncated[0]}"
    return difference(info, other[1].info, "info")


PAIRS = [(way, family) for j, way in enumerate(WAYS) for family in FAMILIES[j % 2 :: 2]]


@pytest.mark.parametrize(("way", "family"), PAIRS, ids=str)
def test_trajectories_are_those_of_base(way: str, family: Family) -> None:
    setup, more = WAYS[way]
    chance = random.Random(f"{way} {family}")
    with create_env_manager(config(setup, more), env_fn=[family] * ENV_NUM) as manager:
        compare(family, Player(manager, family, chance).play())
