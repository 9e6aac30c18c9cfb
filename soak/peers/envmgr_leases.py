"""envmgr's leases, to threads or to coroutines, as rollouts take them: one for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from envmgr import create_env_manager
from peers import Factories, Outcome
from peers.envmgr_manager import OPTIONS
from peers.users import ThreadUser, Users


class LeasingThread(ThreadUser):
    """Gives its env back when an episode has failed or ended, and leases the next one."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager
        self._lease = contextlib.ExitStack()
        self._env: Any = None

    def _begin(self) -> Any:
        self._leave()
        env = self._lease.enter_context(self._manager.lease())
        self.env_id = env.env_id
        obs, _ = env.reset()
        self._env = env
        return obs

    def _step(self, action: int) -> Outcome:
        if self._env is None:
            self._begin()
        outcome = _outcome(self._env.step(action))
        if outcome.done or outcome.error is not None:
            self._begin()
        return outcome

    def _leave(self) -> None:
        self._env = None
        self._lease.close()


class LeasingCoroutine:
    """The same as a coroutine; all share a thread and its event loop."""

    env_id = -1

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop
        self._lease = contextlib.AsyncExitStack()
        self._env: Any = None

    def begin(self) -> Future[Any]:
        """Lease an env and reset it; gives the first observation."""
        return asyncio.run_coroutine_threadsafe(self._begin(), self._loop)

    def step(self, action: int) -> Future[Outcome]:
        """Take a step; first begin, if what was begun has failed."""
        return asyncio.run_coroutine_threadsafe(self._step(action), self._loop)

    def leave(self) -> Future[None]:
        """Give the env back."""
        return asyncio.run_coroutine_threadsafe(self._leave(), self._loop)

    async def _begin(self) -> Any:
        await self._leave()
        env = await self._lease.enter_async_context(self._manager.lease())
        self.env_id = env.env_id
        obs, _ = await env.reset()
        self._env = env
        return obs

    async def _step(self, action: int) -> Outcome:
        if self._env is None:
            await self._begin()
        outcome = _outcome(await self._env.step(action))
        if outcome.done or outcome.error is not None:
            await self._begin()
        return outcome

    async def _leave(self) -> None:
        self._env = None
        await self._lease.aclose()


class Threads(Users):
    """A manager whose envs are leased to threads."""

    def __init__(self, manager: Any, n: int) -> None:
        super().__init__([LeasingThread(manager) for _ in range(n)])
        self._manager = manager

    def _launch(self) -> None:
        self._manager.launch()

    def _shut(self) -> None:
        self._manager.close()


class Coroutines(Users):
    """A manager whose envs are leased to coroutines; launching and closing are awaited, too."""

    def __init__(self, manager: Any, n: int) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__([LeasingCoroutine(manager, self._loop) for _ in range(n)])
        self._manager = manager
        self._thread = threading.Thread(target=self._loop.run_forever)

    def close(self) -> None:
        """Have the users let go of their envs, and close; the loop ends, too."""
        super().close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _launch(self) -> None:
        self._thread.start()
        self._run(self._manager.__aenter__())

    def _shut(self) -> None:
        self._run(self._manager.__aexit__(None, None, None))

    def _run(self, call: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _outcome(timestep: Any) -> Outcome:
    return Outcome(timestep.obs, timestep.reward, timestep.done, timestep.info.get("error"))


def open_peer(factories: Factories, users: str) -> Users:
    """Return a manager that is not launched, with `threads` or `coroutines` as users."""
    manager = create_env_manager(OPTIONS, env_fn=list(factories))
    if users == "coroutines":
        return Coroutines(manager, len(factories))
    return Threads(manager, len(factories))
