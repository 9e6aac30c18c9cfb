"""OpenEnv environments for the tests, in a module that workers can import."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    """What to do: a number to be counted, or a word that has something happen."""

    word: str = ""
    seconds: float = 0.0


class Said(Observation):
    """What was said, and by which process."""

    words: list[str] = Field(default_factory=list)
    pid: int = 0


class Talk(Environment):
    """Remembers what it was told. Not fit for several sessions in one process: `told` is shared."""

    told: ClassVar[list[str]] = []

    def __init__(self, limit: int = 100) -> None:
        super().__init__()
        self.limit = limit
        self._state = State()
        Talk.told = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        if kwargs.get("hang"):
            time.sleep(600)
        if kwargs.get("refuse"):
            raise ValueError("there is no such task")
        Talk.told = [f"seed {seed}"] if seed is not None else []
        self._state = State(episode_id=episode_id, step_count=0)
        return self._said()

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Said:
        if action.word == "die":
            os._exit(3)
        if action.word == "hang":
            time.sleep(600)
        if action.word == "wrong":
            raise LookupError("no such word")
        time.sleep(action.seconds)
        Talk.told.append(action.word)
        self._state.step_count += 1
        return self._said(reward=1.0, done=action.word == "end")

    def _said(self, **kwargs: Any) -> Said:
        return Said(words=list(Talk.told), pid=os.getpid(), **kwargs)

    @property
    def state(self) -> State:
        return self._state

    def count(self, plus: int) -> int:
        """Something else that it offers."""
        return self._state.step_count + plus

    @staticmethod
    def list_splits() -> list[str]:
        """What it has tasks for: of no object."""
        return ["train"]

    @classmethod
    def num_tasks(cls, split: str) -> int:
        """How many tasks: of the class."""
        return len(cls.__name__) + len(split)


class AsyncTalk(Talk):
    """The same, as coroutines; the plain methods are not to be called."""

    async def reset_async(self, seed: int | None = None, **kwargs: Any) -> Said:
        return super().reset(seed, **kwargs)

    async def step_async(self, action: Say, **kwargs: Any) -> Said:
        return super().step(action, **kwargs)

    def reset(self, *args: Any, **kwargs: Any) -> Said:
        raise AssertionError("the coroutine is there for this")

    step = reset


class Terse(Talk):
    """Takes nothing but actions."""

    def step(self, action: Say) -> Said:  # type: ignore[override]
        return super().step(action)
