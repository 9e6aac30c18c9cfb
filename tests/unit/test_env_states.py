"""The state of an env as bytes: who gives it, what is copied, and what is refused."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from envmgr.env import adapt, states
from envmgr.env.batched import BatchRow
from tests.walkers import Walker


class Given(Walker):
    """Gives its state itself, as simulators do; its lock is none of it."""

    def __init__(self) -> None:
        super().__init__()
        self._n = self._length = 0
        self.lock = threading.Lock()

    def get_state(self) -> Any:
        return self._n, self._length, self.colour

    def set_state(self, state: Any) -> None:
        if state[2] == "no":
            raise RuntimeError("not this one")
        self._n, self._length, self.colour = state


class Cloned(Given):
    """As ALE's: asked for the generator of its emulator, too. Its other pair is not one."""

    get_state = None  # type: ignore[assignment]

    def set_state(self, qpos: Any, qvel: Any) -> None:  # type: ignore[override]
        raise AssertionError("MuJoCo's set_state takes two arguments")

    def clone_state(self, include_rng: bool = False) -> Any:
        assert include_rng
        return self._n, self._length

    def restore_state(self, state: Any) -> None:
        self._n, self._length = state


class Slotted:
    """Has nothing that could be copied."""

    __slots__ = ("n",)
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self) -> Any: ...

    def step(self, action: Any) -> Any: ...


class Built(EzPickle):
    """Pickled as how it was built."""


def played(env: Any, n_steps: int) -> list[Any]:
    """Return what comes of steps, and of the resets between them."""
    found = []
    for k in range(n_steps):
        timestep = env.step(k % 3)
        found.append((np.asarray(timestep.obs).tolist(), *timestep[1:]))
        if timestep.done:
            found.append(np.asarray(env.reset()).tolist())
    return found


def started(env: Any, seed: int) -> Any:
    """Return an env as a host has it, in its third step."""
    env = adapt.as_base_env(env, 0)
    env.seed(seed, dynamic_seed=True)
    env.reset()
    played(env, 3)
    return env


@pytest.mark.parametrize("make", [Walker, Given, Cloned])
def test_an_env_goes_on_as_it_was_and_so_does_one_built_alike(make: Any) -> None:
    def build() -> Any:
        return FrameStackObservation(TimeLimit(make(), 6), 2)

    env = started(build(), 3)
    state = states.take(env, copies=make is Walker)
    expected = played(env, 40)
    for other in (env, started(build(), 8)):
        inner = other.env.env.env
        states.put(other, state)
        assert other.env.env.env is inner  # the same objects, for who holds them
        assert played(other, 40) == expected
        assert (other.random_action(), other.reset_info) is not None
    states.put(env, state)
    assert env.env.env._elapsed_steps == 3
    samples = [env.random_action() for _ in range(20)]
    states.put(env, state)
    assert [env.random_action() for _ in range(20)] == samples


def test_the_env_inside_of_a_plain_env_is_found() -> None:
    class Ding:
        """As DI-engine's: what it wraps is in `_env`."""

        observation_space = action_space = gymnasium.spaces.Discrete(2)
        total = 0

        def __init__(self) -> None:
            self._env = Given()

        def reset(self) -> Any:
            self.total = 0
            return self._env.reset()[0]

        def step(self, action: int) -> Any:
            self.total += action
            return self._env.step(action)

    env = Ding()
    env.reset()
    env.step(2)
    state = states.take(env, copies=False)
    env.step(2)
    states.put(env, state)
    assert (env.total, env._env._n) == (2, 1)


def test_copies_have_to_be_allowed_and_possible() -> None:
    def refused(env: Any, **attributes: Any) -> str:
        for name, value in attributes.items():
            setattr(env, name, value)
        with pytest.raises(states.NoStateError) as caught:
            states.take(adapt.as_base_env(env, 0), copies=True)
        return str(caught.value)

    with pytest.raises(states.NoStateError, match=r"Walker has none .*get_state.*snapshot_copy"):
        states.refuse(TimeLimit(Walker(), 3), copies=False)
    assert "'lock' (lock) of Walker" in refused(Walker(), lock=threading.Lock())
    assert "'screen' (lock) of TimeLimit" in refused(TimeLimit(Given(), 3), screen=threading.Lock())
    assert "Built is pickled as how it was built" in refused(Walker(), game=Built())
    with open(os.devnull) as file:
        assert "'log' (TextIOWrapper) of Walker cannot" in refused(Walker(), log=file)
    assert "Slotted has __slots__" in refused(Slotted())
    assert "get_state() returns cannot be pickled" in refused(Given(), colour=threading.Lock())
    spaces = dict.fromkeys(("observation_space", "action_space", "reward_space"))
    row = BatchRow(SimpleNamespace(**spaces), 3)  # type: ignore[arg-type]
    assert "row 3 of a batched env" in refused(row)


def test_what_is_refused_changes_nothing() -> None:
    env = started(TimeLimit(Given(), 6), 1)
    before = states.take(env, copies=False)
    with pytest.raises(
        states.NoStateError, match=r"GymnasiumEnv of Walker; this one is .*TimeLimit"
    ):
        states.put(env, states.take(started(Walker(), 1), copies=True))
    other = started(TimeLimit(Given(), 6), 2)
    other.env.env.colour = "no"
    with pytest.raises(RuntimeError, match="not this one"):
        states.put(env, states.take(other, copies=False))
    with pytest.raises(states.NoStateError, match="cannot be read"):
        states.put(env, before[:-9])
    found = played(env, 20)
    states.put(env, before)
    assert played(env, 20) == found


def test_classes_of_a_script_are_those_that_the_env_knows(monkeypatch: Any) -> None:
    monkeypatch.setattr(Piece, "__module__", "__main__")
    env = started(Holder(), 1)
    env.env.piece = Piece(4)
    state = states.take(env, copies=True)
    states.put(env, state)
    assert type(env.env.piece) is Piece
    assert env.env.piece.number == 4
    monkeypatch.setitem(globals(), "Piece", None)
    with pytest.raises(states.NoStateError, match="class Piece is not known"):
        states.put(env, state)


class Piece:
    """What an env holds."""

    def __init__(self, number: int) -> None:
        self.number = number


class Holder(Walker):
    """An env of a script, which knows its other classes."""

    def other(self) -> Any:
        return Piece(1)
