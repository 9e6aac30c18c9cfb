"""Seeds by env, and random actions that follow from them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr.errors import ConfigError, UnknownEnvError
from envmgr.seeding import Samplers, derived_seed, seeds_by_env, seeds_of_spares


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (7, {0: 7, 1: 8, 2: 9}),
        (0, {0: 0, 1: 1, 2: 2}),
        (np.int64(7), {0: 7, 1: 8, 2: 9}),
        (2**40, {0: 2**40, 1: 2**40 + 1, 2: 2**40 + 2}),
        (None, {0: None, 1: None, 2: None}),
        ([5, 3, 9], {0: 5, 1: 3, 2: 9}),
        ((5, None, 9), {0: 5, 1: None, 2: 9}),
        ({1: 4}, {1: 4}),
        ({2: None, 0: 1}, {2: None, 0: 1}),
        (MappingProxyType({np.int64(1): np.uint8(4)}), {1: 4}),
        ({}, {}),
    ],
    ids=str,
)
def test_seeds_by_env(seed: Any, expected: dict[int, int | None]) -> None:
    found = seeds_by_env(seed, 3)
    assert found == expected
    assert all(type(i) is int for i in found)
    assert all(s is None or type(s) is int for s in found.values())


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (-1, "seed is -1; it should be an integer of 0 or more"),
        (True, "seed is True; it should be an integer of 0 or more"),
        (1.0, "seed is 1.0; it should be an integer, a list"),
        ("7", "seed is '7'; it should be an integer, a list"),
        (b"7", "it should be an integer, a list"),
        ({1, 2, 3}, "it should be an integer, a list"),
        ([1, 2], "seed has 2 entries for 3 envs"),
        ([1, 2, 3, 4], "seed has 4 entries for 3 envs"),
        ([], "seed has 0 entries for 3 envs"),
        ([1, "2", 3], "seed[1] is '2'"),
        ([1, 2, -3], "seed[2] is -3"),
        ([1, 2.5, 3], "seed[1] is 2.5"),
        ({1: "x"}, "the seed of env 1 is 'x'"),
        ({1: True}, "the seed of env 1 is True"),
    ],
    ids=str,
)
def test_bad_seeds_are_refused_by_name(seed: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds_by_env(seed, 3)
    assert message in str(caught.value)


@pytest.mark.parametrize("env_id", [3, -1, "0", None, 1.0])
def test_seeds_of_unknown_envs_are_refused(env_id: Any) -> None:
    with pytest.raises(UnknownEnvError, match=r"but the envs are 0 to 2"):
        seeds_by_env({0: 1, env_id: 1}, 3)


# -- samplers -------------------------------------------------------------------------------------

SPACE = Dict({"a": Discrete(1000), "b": Box(-1, 1, (2,), np.float32)})


def draws(samplers: Samplers, env_id: int, number: int = 5) -> list[int]:
    return [int(samplers.sample(env_id)["a"]) for _ in range(number)]


def test_equal_seeds_give_equal_actions_whatever_the_others_draw() -> None:
    one, other = Samplers([SPACE] * 3), Samplers([SPACE] * 3)
    for samplers in (one, other):
        samplers.seed({0: 7, 1: 8, 2: 9})
    alone = draws(one, 1)
    mixed = []
    for _ in range(5):
        draws(other, 0, 3)
        mixed += draws(other, 1, 1)
        draws(other, 2, 2)
    assert alone == mixed


def test_envs_draw_from_streams_of_their_own() -> None:
    samplers = Samplers([SPACE] * 2)
    samplers.seed({0: 7, 1: 8})
    assert draws(samplers, 0) != draws(samplers, 1)


def test_the_space_that_was_given_is_not_touched() -> None:
    space = Dict({"a": Discrete(1000), "b": Discrete(2)})
    space.seed(3)
    expected = [int(space.sample()["a"]) for _ in range(3)]
    space.seed(3)
    samplers = Samplers([space] * 2)
    samplers.seed({0: 99})
    draws(samplers, 0)
    assert [int(space.sample()["a"]) for _ in range(3)] == expected


def test_none_leaves_a_stream_as_it_is() -> None:
    one, other = Samplers([SPACE]), Samplers([SPACE])
    for samplers in (one, other):
        samplers.seed({0: 7})
    draws(one, 0, 3)
    one.seed({0: None})
    assert draws(one, 0, 2) == draws(other, 0, 5)[3:]


def test_seeding_again_begins_again() -> None:
    samplers = Samplers([SPACE])
    samplers.seed({0: 7})
    first = draws(samplers, 0)
    samplers.seed({0: 7})
    assert draws(samplers, 0) == first


# -- seeds of later generations -------------------------------------------------------------------


def test_derived_seeds_are_those_of_a_seed_sequence() -> None:
    for arguments in [(7, 0, 1, 0), (7, 3, 2, 15), (2**40, 1, 1, 1), (0, 0, 1, 0)]:
        expected = int(np.random.SeedSequence(arguments).generate_state(1)[0])
        assert derived_seed(*arguments) == expected
        assert 0 <= derived_seed(*arguments) < 2**32


def test_spares_get_the_seeds_behind_those_of_the_envs_or_derived_ones() -> None:
    assert seeds_of_spares(10, {0: 10, 1: 11}, 2, 3) == [12, 13, 14]
    derived = [derived_seed(4, 2, 0, 0), derived_seed(4, 3, 0, 0)]
    assert seeds_of_spares([None, 4], {0: None, 1: 4}, 2, 2) == derived
    assert seeds_of_spares({1: 4}, {0: None, 1: 4}, 2, 2) == derived
    assert seeds_of_spares(None, {0: None, 1: None}, 2, 2) == [None, None]
    assert seeds_of_spares(1, {0: 1}, 1, 0) == []


def test_derived_seeds_differ_by_seed_env_generation_and_episode() -> None:
    base = (7, 1, 1, 1)
    changed = [(8, 1, 1, 1), (7, 2, 1, 1), (7, 1, 2, 1), (7, 1, 1, 2)]
    seeds = {derived_seed(*arguments) for arguments in [base, *changed]}
    assert len(seeds) == 5


def test_random_actions_do_not_repeat_what_an_env_of_the_same_seed_draws() -> None:
    space = Discrete(10**6)
    samplers = Samplers([space])
    samplers.seed({0: 5})
    space.seed(5)
    assert samplers.sample(0) != space.sample()


def test_a_space_that_cannot_be_copied_is_sampled_as_it_is() -> None:
    class Locked(Discrete):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    space = Locked(3)
    assert Samplers([space]).spaces[0] is space
    assert space.contains(Samplers([space]).sample(0))
