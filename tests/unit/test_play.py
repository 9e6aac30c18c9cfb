"""Random steps in an env that is tried out."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr.env import adapt
from envmgr.env.play import PATIENCE, RandomPlay
from envmgr.spaces.legal import legal_sample, mask_in

MASK = np.array([0, 0, 1], np.int8)


class Env(gymnasium.Env[Any, Any]):
    """Raises in the steps and resets that it is told; has a mask where it is told."""

    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, *, faults: set[str] | None = None, mask: Any = None) -> None:
        self.faults, self.mask, self.n = faults or set(), mask, 0

    def _next(self, name: str) -> dict[str, Any]:
        self.n += 1
        if f"{name} {self.n}" in self.faults or f"every {name}" in self.faults:
            raise OSError(f"{name} {self.n}")
        return {} if self.mask is None else {"action_mask": self.mask}

    def reset(self, **given: Any) -> tuple[int, dict[str, Any]]:
        return 0, self._next("reset")

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 1, 1.0, False, False, self._next("step")


def test_a_step_that_raises_ends_the_episode() -> None:
    play = RandomPlay(adapt.as_base_env(Env(faults={"step 3", "reset 4"}), 0))
    play.reset()
    assert not play.step(play.action()).done
    timestep = play.step(play.action())
    assert timestep.done
    assert timestep.obs == 1  # what it showed last
    play.reset()
    assert (play.n_steps, play.n_failed) == (2, 2)
    assert play.failure.splitlines()[-1] == "OSError: step 3"


def test_what_fails_again_and_again_is_raised() -> None:
    play = RandomPlay(adapt.as_base_env(Env(faults={"every step"}), 0))
    for _ in range(PATIENCE - 1):
        play.reset()
        assert play.step(play.action()).done
    with pytest.raises(OSError, match="step"):
        play.step(play.action())
    with pytest.raises(OSError, match="reset 1"):
        RandomPlay(adapt.as_base_env(Env(faults={"reset 1"}), 0), forgives=False).reset()


def test_actions_are_legal() -> None:
    play = RandomPlay(adapt.as_base_env(Env(mask=MASK), 0))
    play.reset()
    assert not play.is_free
    assert {int(play.action()) for _ in range(20)} == {2}
    free = RandomPlay(adapt.as_base_env(Env(), 0))
    free.reset()
    assert free.is_free
    assert len({int(free.action()) for _ in range(99)}) == 3


def test_masks_of_spaces() -> None:
    assert mask_in({"action_mask": MASK}) is MASK
    assert mask_in(np.zeros(3), {"action_mask": MASK}) is MASK
    assert mask_in(None) is mask_in(3, None) is None
    pairs = gymnasium.spaces.MultiDiscrete([3, 2])
    flat = np.array([0, 0, 1, 1, 0], bool)
    for mask in (flat, (flat[:3], flat[3:])):
        assert {tuple(legal_sample(pairs, mask)) for _ in range(20)} == {(2, 0)}
    for space in (pairs, gymnasium.spaces.Discrete(5), gymnasium.spaces.Box(-1, 1, (2,))):
        assert space.contains(legal_sample(space, MASK))  # it is of another space
