"""How long what is handed out stays as it is, whatever happens to its env and the others."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr import create_env_manager, make
from tests.contract.family import ACTIONS, Family
from tests.contract.harness import Setup
from tests.contract.test_data_plane import action_of, config, leaves_of

ENV_NUM = 4
N_ROUNDS = 120
KINDS = {
    "copies": (True, 10**9),
    "views": (False, 2),
    "views until send": ("until_send", 0),
}
"""What `copy_on_get` is, and through how many more steps of its env an observation stays valid."""

FAMILIES = (Family("vector", "discrete", "gymnasium"), Family("dict", "discrete", "base"))


class Holder:
    """Keeps everything that a manager hands out, and looks whether it is as it was.

    Args:
        manager: launched.
        steps: through how many more steps of its env something is valid.
    """

    def __init__(self, manager: Any, steps: int, family: Family) -> None:
        self.manager = manager
        self.space = ACTIONS[family.action]
        self.steps = steps
        self.sent = [0] * ENV_NUM
        self.pending: set[int] = set()
        self.held: list[tuple[int, int, Any, list[bytes]]] = []
        self.n_ends = 0

    def keep(self, env_id: int, observation: Any) -> None:
        leaves = leaves_of(observation)
        contents = [np.asarray(leaf).tobytes() for leaf in leaves]
        self.held.append((env_id, self.sent[env_id], leaves, contents))

    def look(self) -> None:
        """See that all that is still valid is as it was when it was handed out."""
        self.held = [h for h in self.held if self.sent[h[0]] - h[1] <= self.steps]
        for env_id, born, leaves, contents in self.held:
            now = [np.asarray(leaf).tobytes() for leaf in leaves]
            assert now == contents, f"env {env_id}, {self.sent[env_id] - born} steps later"

    def ready(self) -> list[int]:
        if len(self.pending) == ENV_NUM:
            return []
        ready = self.manager.ready_obs
        for env_id, observation in ready.items():
            self.keep(env_id, observation)
        return list(ready)

    def send(self, env_ids: list[int], *, as_array: bool) -> None:
        actions = [action_of(self.space, i, self.sent[i], python_numbers=True) for i in env_ids]
        if as_array:
            self.manager.send_arrays(env_ids, np.array(actions))
        else:
            self.manager.send(dict(zip(env_ids, actions, strict=True)))
        for i in env_ids:
            self.sent[i] += 1
            self.pending.add(i)

    def receive(self, *, as_array: bool) -> None:
        if as_array:
            batch = self.manager.recv_arrays(1)
            ids, done = batch.env_ids.tolist(), batch.terminated | batch.truncated
            observations = [rows_of(batch.obs, k) for k in range(len(ids))]
        else:
            timesteps = self.manager.recv(1)
            ids, done = list(timesteps), [t.done for t in timesteps.values()]
            observations = [t.obs for t in timesteps.values()]
        self.pending.difference_update(ids)
        self.n_ends += int(sum(done))
        for i, observation in zip(ids, observations, strict=True):
            self.keep(i, observation)


def rows_of(batch: Any, k: int) -> Any:
    if isinstance(batch, dict):
        return {key: rows_of(part, k) for key, part in batch.items()}
    return batch[k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("num_workers", [None, 1, 2])
def test_what_is_handed_out_stays_as_it_was(
    kind: str, family: Family, num_workers: int | None
) -> None:
    copy_on_get, steps = KINDS[kind]
    setup = Setup("async_subprocess", "fork", True, num_workers)
    chance = random.Random(f"{kind} {family} {num_workers}")
    cfg = config(setup, {"copy_on_get": copy_on_get, "reset_inplace": num_workers == 2})
    with create_env_manager(cfg, env_fn=[family] * ENV_NUM) as manager:
        holder = Holder(manager, steps, family)
        for _ in range(N_ROUNDS):
            ready = holder.ready()
            chosen = chance.sample(ready, chance.randint(0, len(ready)))
            if chance.random() < 0.5:
                chosen.sort()
            if chosen:
                holder.send(chosen, as_array=chance.random() < 0.5)
                holder.look()
            if holder.pending and (not chosen or chance.random() < 0.8):
                holder.receive(as_array=chance.random() < 0.5)
            holder.look()
        holder.look()
        assert holder.n_ends > 10
    if copy_on_get is True:
        holder.look()  # copies outlive their manager
        check_private(holder.held)


def check_private(held: list[Any]) -> None:
    """See that arrays can be written to, and that nothing else changes then."""
    arrays = {
        id(leaf): leaf for _, _, leaves, _ in held for leaf in leaves if type(leaf) is np.ndarray
    }
    some = list(arrays.values())[-40:]
    for k, array in enumerate(some):
        array[...] = 1 + k % 2
        assert not any(np.shares_memory(array, other) for other in some[k + 1 :])


class Plain(gymnasium.Env[Any, Any]):
    """Its resets and steps have nothing to them, so that all of it goes through the block."""

    observation_space = gymnasium.spaces.Box(-99, 99, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(3)
    episode = step_count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.step_count = self.episode + 1, 0
        return np.full(2, -self.episode, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        self.step_count += 1
        return np.full(2, self.step_count, np.float32), 0.0, action == ENDS, False, {}


MOVES, ENDS, KILLS = range(3)


@pytest.mark.parametrize("copy_on_get", [False, "checked"])
def test_the_view_of_a_reset_outlives_the_death_of_its_worker(copy_on_get: Any) -> None:
    with make(Plain, 2, type="subprocess", copy_on_get=copy_on_get) as manager:
        manager.step({0: ENDS, 1: MOVES})
        while 0 not in (ready := manager.ready_obs):
            pass
        view = ready[0]
        contents = np.array(view)
        manager.step({0: MOVES, 1: MOVES})
        assert manager.step({0: KILLS, 1: MOVES})[0].info["abnormal"]
        while 0 not in manager.ready_obs:
            pass
        assert np.array_equal(np.array(view), contents), "the next env was reset into its slot"
