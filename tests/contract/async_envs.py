"""Async envs of the tests: each says which step of which episode it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep

RAISE, EXIT, DIE, HANG, DEAF, BLOCK, MEET, END, WRONG, INTERRUPT = range(9001, 9011)
"""Actions; others are steps that are told of."""

OBS = Box(-np.inf, np.inf, (3,), np.float64)
ACTIONS = Discrete(10_000)


class Meeting:
    """Where envs of one worker wait for one another, which they can if they run at one time."""

    present = 0
    all_there: asyncio.Event | None = None

    @classmethod
    async def wait(cls, count: int) -> None:
        """Wait until so many are here."""
        cls.all_there = cls.all_there or asyncio.Event()
        cls.present += 1
        if cls.present == count:
            cls.all_there.set()
        await cls.all_there.wait()


class Deeds:
    """What the tests' async envs do when they are stepped or reset, whatever their interface is."""

    company: ClassVar[int] = 0
    """How many envs meet in a step MEET."""

    def __init__(self, closed: str | None = None) -> None:
        self.seed_given, self.steps, self.closed_file = -1, 0, closed

    async def begin(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Begin an episode."""
        await asyncio.sleep(0)
        self.seed_given, self.steps = -1 if seed is None else seed, 0
        how = (options or {}).get("how")
        if how is not None:
            await self.do(how)
        return np.array([self.seed_given, 0.0, -1.0])

    async def take(self, action: int) -> tuple[Any, float, bool, dict[str, Any]]:
        """Take a step."""
        await asyncio.sleep(0)
        await self.do(action)
        self.steps += 1
        obs = np.array([self.seed_given, self.steps, action], np.float64)
        return obs, float(action), action == END, {"steps": self.steps, "pid": os.getpid()}

    async def do(self, action: int) -> None:
        """Fail in one of many ways, if an action says so."""
        if action == RAISE:
            raise RuntimeError("as it was told")
        if action == EXIT:
            raise SystemExit(3)
        if action == DIE:
            os._exit(7)
        if action == HANG:
            await asyncio.Event().wait()
        if action == DEAF:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        if action == BLOCK:
            time.sleep(1000)
        if action == MEET:
            await Meeting.wait(self.company)

    async def end(self) -> None:
        """Note that it was closed, if somebody wants to know."""
        await asyncio.sleep(0)
        if self.closed_file is not None:
            Path(self.closed_file).write_text("closed")


class Plain:
    """An async env without a base class."""

    observation_space, action_space = OBS, ACTIONS

    def __init__(self, closed: str | None = None) -> None:
        self.deeds = Deeds(closed)
        self._seed: int | None = None

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Use a seed in the next reset."""
        self._seed = seed

    async def reset(self, **params: Any) -> Any:
        """Begin an episode."""
        seed, self._seed = self._seed, None
        return await self.deeds.begin(seed, params), {"params": params}

    async def step(self, action: Any) -> Any:
        """Take a step."""
        if action == WRONG:
            return "no timestep"
        return EnvTimestep(*await self.deeds.take(int(action)))

    async def close(self) -> None:
        """Close it."""
        await self.deeds.end()

    async def double(self, number: int) -> int:
        """Return twice a number, later."""
        await self.deeds.do(number)
        return 2 * number

    def steps_taken(self) -> int:
        """Return how many steps it has taken."""
        return self.deeds.steps


class Own(Plain, BaseEnv):
    """One that derives from `BaseEnv`."""

    reward_space = Box(-np.inf, np.inf, (1,), np.float64)

    async def reset(self, **params: Any) -> Any:  # type: ignore[override]
        """Begin an episode."""
        obs, self.reset_info = await super().reset(**params)
        return obs


class Gym(gymnasium.Env[Any, Any]):
    """One with gymnasium's interface."""

    observation_space, action_space = OBS, ACTIONS

    def __init__(self, closed: str | None = None) -> None:
        self.deeds = Deeds(closed)

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # type: ignore[override]
        """Begin an episode."""
        return await self.deeds.begin(seed, options), {"params": dict(options or {})}

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        """Take a step."""
        if action == WRONG:
            return "no timestep"
        obs, reward, terminated, info = await self.deeds.take(action)
        return obs, reward, terminated, False, info

    async def close(self) -> None:  # type: ignore[override]
        """Close it."""
        await self.deeds.end()


class Seeded:
    """One without a base class, with the methods of gymnasium's interface."""

    observation_space, action_space = OBS, ACTIONS

    def __init__(self, closed: str | None = None) -> None:
        self.deeds = Deeds(closed)

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin an episode."""
        return await self.deeds.begin(seed, options), {"params": dict(options or {})}

    async def step(self, action: Any) -> Any:
        """Take a step."""
        if action == WRONG:
            return "no timestep"
        obs, reward, terminated, info = await self.deeds.take(action)
        return obs, reward, terminated, False, info

    async def close(self) -> None:
        """Close it."""
        await self.deeds.end()


class InThreads(Plain):
    """One whose steps are taken in threads of the event loop's pool."""

    async def step(self, action: Any) -> Any:
        """Take a step."""
        await asyncio.to_thread(int)
        return await super().step(action)


class InTasks(Plain):
    """One that gathers what its steps do."""

    async def step(self, action: Any) -> Any:
        """Take a step."""
        if action == INTERRUPT:
            await asyncio.create_task(self._interrupt())
        (timestep,) = await asyncio.gather(super().step(action))
        return timestep

    async def _interrupt(self) -> None:
        raise KeyboardInterrupt


class NotAsync(gymnasium.Env[Any, Any]):
    """One that blocks its worker in each step, for a moment."""

    observation_space, action_space = OBS, ACTIONS

    def __init__(self) -> None:
        self.steps = 0
        self.dies = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begin an episode."""
        if self.dies:
            os._exit(7)
        self.steps = 0
        return np.array([-1, 0.0, -1.0]), {}

    def step(self, action: Any) -> Any:
        """Take a step, or fail in it."""
        if action == DIE:
            os._exit(7)
        if action == BLOCK:
            time.sleep(1000)
        self.steps += 1
        obs = np.array([-1, self.steps, action], np.float64)
        return obs, float(action), bool(action == END), False, {}

    def die_in_reset(self) -> None:
        """Have the next reset end the process."""
        self.dies = True


async def built_later(kind: type[Any] = Plain) -> Any:
    """Build an env, as a factory that waits for something does."""
    await asyncio.sleep(0)
    return kind()


async def never_built() -> Any:
    """Wait for what does not come."""
    await asyncio.Event().wait()


async def meets_others() -> Any:
    """Build an env when two others are built."""
    await Meeting.wait(3)
    return Plain()
