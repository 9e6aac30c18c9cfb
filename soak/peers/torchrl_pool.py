"""TorchRL's AsyncEnvPool of processes, used by several threads, each of which has one env."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchrl.envs import AsyncEnvPool

from peers import Factories, Outcome
from peers.torchrl_parallel import wrapped
from peers.users import ThreadUser, Users


class PoolThread(ThreadUser):
    """Steps the env of its number; after a failure it resets it, and gives up if that fails."""

    def __init__(self, pool: Callable[[], Any], env_id: int) -> None:
        super().__init__()
        self.env_id = env_id
        self._pool = pool
        self._root: Any = None
        self._failed: Exception | None = None

    def _begin(self) -> Any:
        if self._failed is not None:
            raise self._failed
        try:
            self._pool().async_reset_send(env_index=self.env_id)
            self._root = self._pool().async_reset_recv(env_index=self.env_id)
        except Exception as error:
            self._failed = error
            raise
        return self._root["observation"].numpy()

    def _step(self, action: int) -> Outcome:
        if self._root is None:
            self._begin()
        root, self._root = self._root, None
        root["action"] = torch.tensor(action)
        self._pool().async_step_and_maybe_reset_send(root, env_index=self.env_id)
        stepped, self._root = self._pool().async_step_and_maybe_reset_recv(env_index=self.env_id)
        after = stepped["next"]
        return Outcome(after["observation"].numpy(), float(after["reward"]), bool(after["done"]))


class Pool(Users):
    """A pool with a process for each env."""

    def __init__(self, factories: Factories) -> None:
        super().__init__([PoolThread(lambda: self._pool, i) for i in range(len(factories))])
        self._factories = factories
        self._pool: Any = None

    def _launch(self) -> None:
        makers = [partial(wrapped, factory) for factory in self._factories]
        self._pool = AsyncEnvPool(makers, backend="multiprocessing", exchange="auto")

    def _shut(self) -> None:
        if self._pool is not None:  # else its constructor has failed
            self._pool.close(raise_if_closed=False)


def open_peer(factories: Factories, users: str) -> Pool:
    """Return a pool that is not started; its only users are `threads`."""
    return Pool(factories)
