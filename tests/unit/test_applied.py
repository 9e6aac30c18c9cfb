"""Functions that are run in a host, on one of its envs."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import gymnasium
import pytest

from envmgr.env import adapt
from envmgr.worker.applied import AppliedEnv, EnvFunction, take_state, try_state


class Counting(gymnasium.Env[int, int]):
    """Its state is a number; one below 0 is refused."""

    observation_space = action_space = gymnasium.spaces.Discrete(9)

    def __init__(self) -> None:
        self.state = 3

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        if state < 0:
            raise ValueError("below 0")
        self.state = state


class Stateless(gymnasium.Env[int, int]):
    observation_space = action_space = gymnasium.spaces.Discrete(9)


def applied(env: Any, episodes: int = 0) -> AppliedEnv:
    wrapped = adapt.as_base_env(env, 0)
    return AppliedEnv(wrapped, lambda action: None, env.action_space, {}, episodes)  # type: ignore[arg-type,return-value]


def test_a_function_is_given_the_env_as_its_factory_built_it() -> None:
    env = Counting()
    function: Any = EnvFunction(lambda built, *args: (built, args), (1, 2))
    assert function(applied(env)) == (env, (1, 2))


def test_a_function_travels_whole_where_its_module_cannot_be_imported() -> None:
    factor = 5
    function = EnvFunction(lambda built, number: built.state * number * factor, (2,))
    assert pickle.loads(pickle.dumps(function))(applied(Counting())) == 30


def test_a_state_is_taken_with_the_number_of_episodes() -> None:
    taken = take_state(applied(Counting(), episodes=7), False)
    assert isinstance(taken, tuple)
    assert taken[1] == 7


def test_what_a_state_lacks_is_said() -> None:
    said = take_state(applied(Stateless()), False)
    assert isinstance(said, str)
    assert "Stateless" in said


@pytest.mark.parametrize("state", [5, -1])
def test_a_state_that_is_tried_leaves_the_env_as_it_was(state: int) -> None:
    other, env = Counting(), Counting()
    other.state = state
    taken = take_state(applied(other), False)
    assert isinstance(taken, tuple)
    with pytest.raises(ValueError, match="below 0") if state < 0 else contextlib.nullcontext():
        assert try_state(applied(env), False, taken[0]) is None
    assert env.state == 3


def test_a_state_of_another_env_is_refused() -> None:
    taken = take_state(applied(Counting()), False)
    assert isinstance(taken, tuple)
    said = try_state(applied(Stateless()), False, taken[0])
    assert said is not None
    assert "Stateless" in said
