"""How deep an ordinary step is: the frames of Python that it enters, by name.

Each of them costs, and whoever wants to know what happens in a step has to read them all. Who adds
one adds it here.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envmgr
from envmgr import create_env_manager
from envmgr.hot import hot
from envmgr.wire.block import block_is_possible

N = 64
_PACKAGE = os.path.dirname(envmgr.__file__) + os.sep

pytestmark = [
    pytest.mark.skipif(not block_is_possible(), reason="steps go by message here"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name"),
]


class Ending(gym.Env[Any, Any]):
    """Does nothing; its episodes end after so many steps.

    Args:
        steps: how many; 0: they do not end.
        begun: how many of them the first episode has behind it.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, steps: int = 0, begun: int = 0) -> None:
        self._steps, self._at = steps, begun
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count."""
        self._at += 1
        return self._obs, 1.0, bool(self._steps and self._at % self._steps == 0), False, {}


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Return the functions of envmgr that a call enters in this thread, comprehensions left out."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(_PACKAGE) and not code.co_name.startswith("<")
        if event == "call" and is_ours:
            name = code.co_filename.removeprefix(_PACKAGE).removesuffix(".py")
            found.append(f"{name}: {code.co_qualname}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def waits_in(frames: list[str]) -> int:
    """Return how often a call has waited for a ring."""
    return sum(frame.endswith(".await_ring") for frame in frames)


def frames_with_one_wait(step: Callable[[], Any]) -> list[str]:
    """Return the frames of a step that has waited for one ring, as an ordinary one does."""
    for _ in range(1000):
        frames = frames_of(step)
        if waits_in(frames) == 1:
            return frames
    raise AssertionError("no step has waited once")


def modules_of(frames: list[str]) -> set[str]:
    """Return the modules of some functions."""
    return {frame.partition(":")[0] for frame in frames}


def test_a_step_enters_so_many_frames_of_so_many_modules() -> None:
    config = {"type": "subprocess", "num_workers": 2}
    with create_env_manager(config, env_fn=[Ending] * N) as manager:
        actions = dict.fromkeys(range(N), 0)
        for _ in range(10):
            manager.step(actions)
        frames = frames_with_one_wait(lambda: manager.step(actions))
    listed = "\n".join(frames)
    most_frames, most_modules = (35, 11) if hot is None else (30, 8)
    assert len(frames) <= most_frames, listed
    assert len(modules_of(frames)) <= most_modules, listed


_OF_RESULTS = ("core/collect", "core/episodes", "core/replies", "core/table", "lifecycle")
"""The modules that see what came of steps, rather than that something did."""


def test_the_ends_of_episodes_enter_as_many_frames_whether_there_is_one_or_eight() -> None:
    def at_an_end(factories: list[Callable[[], Any]]) -> Counter[str]:
        config = {"type": "subprocess", "num_workers": 2, "reset_inplace": True}
        with create_env_manager(config, env_fn=factories) as manager:
            ids, actions = list(range(N)), np.zeros(N, np.int64)

            def step() -> None:
                manager.send_arrays(ids, actions)
                manager.recv_arrays()

            for _ in range(10):
                step()
            frames = frames_with_one_wait(step)
            return Counter(f for f in frames if f.partition(":")[0] in _OF_RESULTS)

    one = at_an_end([lambda i=i: Ending(N, i) for i in range(N)])
    eight = at_an_end([lambda i=i: Ending(N // 8, i) for i in range(N)])
    assert one == eight
