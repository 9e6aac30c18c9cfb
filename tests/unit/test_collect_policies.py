from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr.collect import RandomPolicy, make_policy, policy_seed
from envmgr.errors import ConfigError

SPACE = Discrete(1000)


class Chooses:
    """A policy that says what it was made with."""

    def __init__(self, observation_space: Any, action_space: Any, seed: int | None) -> None:
        self.made_with = (observation_space, action_space, seed)

    def __call__(self, obs: dict[int, Any]) -> dict[int, Any]:
        return dict.fromkeys(obs, 0)


def makes_nothing(observation_space: Any, action_space: Any, seed: int | None) -> int:
    return 5


def takes_one(obs: Any) -> Any:
    return obs


class TestRandomPolicy:
    def draws(self, policy: RandomPolicy, order: list[list[int]]) -> dict[int, list[int]]:
        drawn: dict[int, list[int]] = {}
        for env_ids in order:
            for env_id, action in policy(dict.fromkeys(env_ids)).items():
                drawn.setdefault(env_id, []).append(int(action))
        return drawn

    def test_does_not_depend_on_who_comes_together_and_when(self) -> None:
        together = self.draws(RandomPolicy(None, SPACE, 5), [[0, 1, 2]] * 3)
        apart = self.draws(RandomPolicy(None, SPACE, 5), [[2], [1], [1], [2, 0], [0], [1, 2], [0]])
        assert together == apart

    def test_envs_draw_different_numbers(self) -> None:
        drawn = self.draws(RandomPolicy(None, SPACE, 0), [list(range(8))] * 4)
        assert len({tuple(actions) for actions in drawn.values()}) == 8

    def test_without_seed_too_even_if_the_space_was_seeded(self) -> None:
        space = Discrete(1000, seed=1)
        space.sample()
        drawn = self.draws(RandomPolicy(None, space), [list(range(8))] * 4)
        assert len({tuple(actions) for actions in drawn.values()}) == 8

    def test_the_seed_matters(self) -> None:
        order = [[0, 1]] * 4
        one, same, other = (self.draws(RandomPolicy(None, SPACE, s), order) for s in (1, 1, 2))
        assert one == same != other

    def test_leaves_the_space_alone(self) -> None:
        space = Discrete(1000, seed=1)
        untouched = Discrete(1000, seed=1)
        RandomPolicy(None, space, 3)({0: None})
        assert space.sample() == untouched.sample()

    def test_nested_spaces(self) -> None:
        space = Dict(a=Box(-1, 1, (2,)), b=Discrete(3))
        action = RandomPolicy(None, space, 3)({4: None})[4]
        assert space.contains(action)


class TestPolicySeed:
    def test_an_integer_is_taken_as_it_is(self) -> None:
        assert policy_seed(7) == 7
        assert policy_seed(np.int64(7)) == 7

    @pytest.mark.parametrize("seed", [None, [None, None], {}, {0: None}])
    def test_no_seed(self, seed: Any) -> None:
        assert policy_seed(seed) is None

    def test_follows_from_the_seeds_of_the_envs(self) -> None:
        assert policy_seed([1, 9]) == policy_seed({1: 9, 0: 1}) == policy_seed((1, 9))
        assert policy_seed({0: 5, 1: 6}) == policy_seed(5)  # as an integer seeds them
        assert policy_seed([1, 2]) != policy_seed([2, 1])
        assert policy_seed([None, 1]) != policy_seed([1, None])


class TestMakePolicy:
    def test_random(self) -> None:
        policy = make_policy("random", None, SPACE, 1)
        assert policy({0: None, 3: None}) == RandomPolicy(None, SPACE, 1)({0: None, 3: None})

    def test_by_name_and_as_factory(self) -> None:
        for name in (f"{__name__}:Chooses", Chooses):
            policy: Any = make_policy(name, "observation space", SPACE, 4)
            assert policy.made_with == ("observation space", SPACE, 4)

    def test_what_cannot_be_inspected_is_called(self) -> None:
        class Opaque:
            @property
            def __signature__(self) -> Any:
                raise TypeError

            def __call__(self, *args: Any) -> Any:
                return takes_one

        assert make_policy(Opaque(), None, SPACE) is takes_one

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("takes_one", ("three arguments", "factory(observation_space, action_space, seed)")),
            ("makes_nothing", ("type int", "{env_id: obs}")),
            ("Choses", ("did you mean 'Chooses'",)),
        ],
    )
    def test_says_what_is_wrong(self, name: str, parts: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError) as caught:
            make_policy(f"{__name__}:{name}", None, SPACE)
        for part in ("collect.policy", f"{__name__}:{name}", *parts):
            assert part in str(caught.value)
